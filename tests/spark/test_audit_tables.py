"""Audits of lakes whose tables were changed, cut short or put back by somebody else than the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from oncewire._ground.contracts import blocks
from oncewire.pipeline.auditing.intact import files_of
from oncewire.pipeline.auditing.run import audit, keep_verdict, last_verdicts
from oncewire.pipeline.gold.refresh import Gold
from oncewire.pipeline.lake.log import Lake as Tables
from oncewire.pipeline.tables import open_table
from tests.spark.lakes import chat, event, once, streams
from tests.spark.support import publish
from tests.support.lakes import CREATED, EVENTS, LEDGER, FakeAgent, Lake
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def worked(path: Path) -> Lake:
    """A lake with an agent that has settled ten inputs and stored ten effects."""
    lake = Lake(path)
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(10), effects=1)
    agent.close()
    lake.write()
    return lake


def test_a_whole_stream_that_was_deleted_from_bronze_is_missed(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing of it is left but how far it was read, and the pipeline goes on with another stream."""
    lake = worked(tmp_path)
    DeltaTable(str(tmp_path / "bronze")).delete(f"stream = '{EVENTS}'")
    lake.go_on("BILLING")
    verdict = audit(spark, tmp_path)
    assert not verdict.is_good
    assert (EVENTS, 20) in {(stop.stream, stop.sequence) for stop in verdict.cut}
    missing = [one for one in verdict.findings if (one.check, one.problem) == ("sequences", "missing")]
    assert [(EVENTS, 1, 20)] == [(one.stream, one.first, one.last) for one in missing]


def test_a_row_that_is_deleted_behind_the_cut_is_missed_at_once(spark: SparkSession, tmp_path: Path) -> None:
    """The verdict is about the tables that people query now, whether or not the pipeline runs again."""
    worked(tmp_path)
    good = audit(spark, tmp_path)
    assert ([], True) == (good.findings, good.is_good)
    keep_verdict(tmp_path, good)
    DeltaTable(str(tmp_path / "bronze")).delete(f"stream = '{EVENTS}' and sequence = 3")
    verdict = audit(spark, tmp_path)
    assert not verdict.is_good
    assert {
        ("tables", "changed_outside", "bronze", "", 0),
        ("sequences", "missing", "", EVENTS, 3),
        ("balance", "rows_in", "", "", 0),
        ("silver", "without_message", "", EVENTS, 3),
        ("outcomes", "not_in_bronze", "", EVENTS, 3),
    } == {(one.check, one.problem, one.table, one.stream, one.first) for one in verdict.findings}


def test_chains_that_an_audit_has_seen_must_be_there(spark: SparkSession, tmp_path: Path) -> None:
    """Two agents work. Later one has no block any more, and the other has another last one."""
    lake = Lake(tmp_path / "first")
    agents = [FakeAgent(lake, name) for name in ("gone", "forged")]
    for agent in agents:
        agent.settle(agent.orders(2), effects=1)
        agent.close()
    lake.write()
    known = audit(spark, lake.path).known
    assert ["default/demo/forged@forged-ledger", "default/demo/gone@gone-ledger"] == [one.chain for one in known.chains]
    again = Lake(tmp_path / "again", rows=[row for row in lake.rows if row["sequence"] > 0], reached=lake.reached)
    for sequence in agents[0].announced:
        again.gap(LEDGER, sequence, sequence)
    last = again.row(LEDGER, agents[1].announced[-1])
    told = blocks.read_announcement(last["payload"])
    last["payload"] = blocks.write_announcement(msgspec.structs.replace(told, settled=[(EVENTS, CREATED, 2)]))
    verdict = audit(spark, again.write(), earlier=[known])
    assert [("another", agents[1].chain, 2), ("missing", agents[0].chain, 2)] == [
        (one.problem, one.chain, one.block) for one in verdict.findings if one.check == "known"
    ]
    assert known.chains == verdict.known.chains, "what is missing stays known"


def test_counts_of_gold_that_are_changed_do_not_follow_from_silver(spark: SparkSession, tmp_path: Path) -> None:
    """In place, behind the log's back, and by a commit; a row is dropped besides."""
    lake = worked(tmp_path)
    lake.go_on("BILLING")
    Gold(spark, Tables(tmp_path)).refresh(open_table(tmp_path, "bronze").version() - 1)
    good = audit(spark, tmp_path)
    assert ([], 20) == (good.findings, good.counted("gold", "rows", "gold/steps"))
    change_in_place(tmp_path / "gold" / "health", messages=1)
    DeltaTable(str(tmp_path / "gold" / "consumers")).update(updates={"done": "7"})
    DeltaTable(str(tmp_path / "gold" / "steps")).delete(f"stream = '{EVENTS}' and sequence = 3")
    verdict = audit(spark, tmp_path)
    assert {("files", "gold/health"), ("tables", "gold/consumers"), ("tables", "gold/steps")} == {
        (one.check, one.table) for one in verdict.findings if one.table
    }
    found = sorted((one.problem, one.detail.split()[0]) for one in verdict.findings if one.check == "gold")
    assert [("differs", "gold/consumers"), ("differs", "gold/health"), ("missing", "gold/steps")] == found


def change_in_place(table: Path, **values: Any) -> None:
    """The first row of a table's largest file says something else; nobody tells the log."""
    file = max(table.glob("*.parquet"), key=lambda path: path.stat().st_size)
    rows = pq.read_table(file)
    for name, value in values.items():
        field = rows.schema.field(name)
        changed = pa.array([value, *rows[name].to_pylist()[1:]], field.type)
        rows = rows.set_column(rows.schema.get_field_index(name), field, changed)
    pq.write_table(rows, file, row_group_size=1 << 20)


@pytest.mark.faults
def test_a_pipeline_and_its_housekeeping_raise_no_alarm(
    spark: SparkSession, server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncewire.pipeline.lake.keep.FILES_MIN", 2)
    streams(server, EVENTS=["evt.>"], CHAT=["chat.>"])
    for number in range(3):
        publish(server, [event(number * 10 + at) for at in range(12)] + [chat(number)])
        ran = once(spark, tmp_path, server, "EVENTS", "CHAT", gold=Gold(spark, Tables(tmp_path)))
        assert [] == ran.errors
        verdict = audit(spark, tmp_path)
        assert ([], []) == (verdict.findings, verdict.notes)
        keep_verdict(tmp_path, verdict)
    assert 4 == verdict.counted("silver", "copies")


def test_a_missing_file_is_named_and_the_rest_is_audited(spark: SparkSession, tmp_path: Path) -> None:
    """Half of the events are in a file that is gone. What stood in it is not wrong, only unread."""
    lake = Lake(tmp_path)
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(10), effects=1)
    agent.settle(agent.orders(10), effects=1)
    agent.close()
    lake.gap(EVENTS, lake.event("gap", "nobody"), lake.reached[EVENTS])
    lake.derive()
    lake.gaps.clear()
    lake.write(rows_per_file=20)
    (gone,) = [one for one in files_of("bronze", open_table(tmp_path, "bronze")) if one.first[3] == 21]
    (tmp_path / "bronze" / gone.path).unlink()
    verdict = audit(spark, tmp_path)
    assert [
        ("files", "missing", "bronze", EVENTS, 21, 40),
        ("sequences", "missing", "", EVENTS, 41, 41),
    ] == [(one.check, one.problem, one.table, one.stream, one.first, one.last) for one in verdict.findings]
    assert (1, 20) == (verdict.unread, verdict.counted("sequences", "unread"))
    assert (10, 10) == (verdict.counted("sums", "inputs"), verdict.counted("sums", "unproven"))
    keep_verdict(tmp_path, verdict)
    assert [verdict] == last_verdicts(tmp_path)
    (kept,) = (tmp_path / "gold" / "audits").glob("*.parquet")
    kept.unlink()
    again = audit(spark, tmp_path)
    assert ["bronze", "gold/audits"] == [one.table for one in again.findings if one.check == "files"]
