"""What an audit learns from the logs of the tables alone: changes by others, versions that are gone, lakes put back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from msgspec.structs import replace

from oncewire._ground.errors import NotFound, Refused
from oncewire.pipeline.auditing.known import remembered
from oncewire.pipeline.auditing.opened import Told, look_back, open_lake
from oncewire.pipeline.auditing.run import keep_verdict
from oncewire.pipeline.auditing.verdict import Finding, Known, Stop, Verdict
from oncewire.pipeline.lake import files, keep
from oncewire.pipeline.lake.keep import Keeping, small_groups
from oncewire.pipeline.lake.log import Lake as Tables
from oncewire.pipeline.tables import BRONZE, GAPS, QUARANTINE, TABLES
from tests.support.lakes import CREATED_NS, EVENTS, FakeAgent, Lake

NOW_MS = 1_794_830_400_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with an agent's work, gaps, quarantine and a kept verdict."""
    lake = Lake(tmp_path_factory.mktemp("base"))
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(10), effects=1)
    agent.close()
    lake.gap(EVENTS, lake.event("gone", "nobody"), lake.reached[EVENTS])
    lake.add(EVENTS, "evt.default.demo.bills.made", b"no json")
    lake.write()
    keep_verdict(lake.path, Verdict(True, NOW_MS, 0.1, [], {}, [], [], 0, []))
    return lake.path


@pytest.fixture
def path(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "lake"))


def seen(path: Path) -> Known:
    """What an audit of the lake as it is would remember."""
    opened = open_lake(path)
    told = look_back(opened, ())
    return Known(NOW_MS, [Stop(*place, at) for place, at in opened.cut.items()], [], told.logs, told.outside)


def look(path: Path, *earlier: Known, accepted: tuple[str, ...] = ()) -> Told:
    return look_back(open_lake(path), earlier, accepted)


def named(told: Told) -> list[tuple[str, str, str]]:
    return [(one.check, one.problem, one.table or one.stream) for one in told.findings]


# ---- nothing wrong


def test_what_the_pipeline_itself_does_is_no_change_by_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come, files that are put together and removed, tables that gain a column, another verdict."""
    before = seen(path)
    lake = Lake(path)
    lake.reached = {EVENTS: 24, "LEDGER": 2}
    for stream in ("BILLING", "CHAT"):
        lake.go_on(stream)
    tables = Tables(path)
    handle = tables.open(BRONZE)
    monkeypatch.setattr(keep, "FILES_MIN", 1)
    groups = small_groups(BRONZE, keep.added_of(handle))
    for group in groups:
        written = keep.rewrite(keep.Rewrite("bronze", tables.root(BRONZE), tuple(one.path for one in group)))
        tables.rewrite(tables.open(BRONZE), BRONZE, group, written)
    for table in TABLES.values():
        if tables.exists(table):
            tables.clear(table, Keeping().retention_hours)
    tables.open(BRONZE).alter.add_columns([Field("later", PrimitiveType("string"))])
    keep_verdict(path, Verdict(True, NOW_MS + 1, 0.1, [], {}, [], [], 0, []))
    for told in (look(path), look(path, before), look(path, seen(path))):
        assert ([], [], []) == (told.findings, told.notes, told.outside)
    assert groups


def test_where_nothing_was_read_there_is_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="has no table bronze"):
        open_lake(tmp_path)


# ---- changes by others

Damage = Callable[[Path], None]


def table(path: Path, name: str) -> DeltaTable:
    return DeltaTable(str(path / name))


CHANGED: dict[str, tuple[str, Damage, str]] = {
    "a row is deleted": (
        "bronze", lambda path: table(path, "bronze").delete(f"stream = '{EVENTS}' and sequence = 3"),
        "DELETE removed files of 21 rows and added files of 20",
    ),
    "a stream is deleted": (
        "bronze", lambda path: table(path, "bronze").delete(f"stream = '{EVENTS}'"),
        "DELETE removed files of 21 rows and added files of 0",
    ),
    "a tenant is changed": (
        "bronze", lambda path: table(path, "bronze").update(updates={"tenant": "'evil'"}, predicate="sequence = 2"),
        "UPDATE removed files of 23 rows and added files of 23",
    ),
    "a payload is changed": (
        "silver/runtime", lambda path: table(path, "silver/runtime").update(updates={"payload": "'{}'"}),
        "UPDATE removed files of 20 rows and added files of 20",
    ),
    "a row is added": (
        "silver/runtime",
        lambda path: write_deltalake(str(path / "silver/runtime"), one_row(path, "silver/runtime"), mode="append"),
        "WRITE removed files of 0 rows and added files of 1",
    ),
    "a refusal is deleted": (
        "quarantine", lambda path: table(path, "quarantine").delete("true"),
        "DELETE removed files of 1 rows and added files of 0",
    ),
    "a gap is made up": (
        "gaps", lambda path: write_deltalake(str(path / "gaps"), a_gap(100, 140), mode="append"),
        "WRITE removed files of 0 rows and added files of 1",
    ),
    "a gap is widened": (
        "gaps", lambda path: table(path, "gaps").update(updates={"first": "1"}),
        "UPDATE removed files of 1 rows and added files of 1",
    ),
    "a balance is changed": (
        "batches", lambda path: table(path, "batches").update(updates={"rows_in": "7"}),
        "UPDATE removed files of 2 rows and added files of 2",
    ),
    "a verdict is deleted": (
        "gold/audits", lambda path: table(path, "gold/audits").delete("true"),
        "DELETE removed files of 1 rows and added files of 0",
    ),
    "a table is put back": (
        "silver/runtime", lambda path: table(path, "silver/runtime").restore(0),
        "RESTORE removed files of 20 rows and added files of 0",
    ),
    "files are put together": (
        "bronze", lambda path: table(path, "bronze").optimize.compact(),
        "OPTIMIZE removed files of 23 rows and added files of 23",
    ),
}  # fmt: skip


def one_row(path: Path, name: str) -> pa.Table:
    return table(path, name).to_pyarrow_table().slice(0, 1)


def a_gap(first: int, last: int) -> pa.Table:
    place = {"stream": EVENTS, "created_ns": CREATED_NS, "incarnation": 0}
    return pa.Table.from_pylist([place | {"first": first, "last": last, "cause": "deleted"}], GAPS.schema)


@pytest.mark.parametrize("what", CHANGED)
def test_a_change_by_somebody_else_is_named_with_its_version_time_and_rows(path: Path, what: str) -> None:
    name, change, words = CHANGED[what]
    before = seen(path)
    change(path)
    version = table(path, name).version()
    for told in (look(path), look(path, before)):
        (found,) = told.findings
        assert ("tables", "changed_outside", name) == (found.check, found.problem, found.table)
        assert f"version {version} of 20" in found.detail
        assert words in found.detail, found.sentence


def test_a_change_stays_known_until_a_person_accepts_it(path: Path) -> None:
    table(path, "bronze").delete("sequence = 3")
    version = table(path, "bronze").version()
    known = seen(path)
    assert [("tables", "changed_outside", "bronze")] == named(look(path, known)), "no later audit forgets it"
    with pytest.raises(Refused, match="no version that is not the pipeline's is bronze@99"):
        look(path, known, accepted=(f"bronze@{version}", "bronze@99"))
    told = look(path, known, accepted=(f"bronze@{version}",))
    assert [] == told.findings
    assert ["changed_outside"] == [one.problem for one in told.notes]
    later = look(path, replace(known, outside=told.outside))
    assert ([], ["changed_outside"]) == (later.findings, [one.problem for one in later.notes])
    disputed = look(path, replace(known, outside=told.outside), known)
    assert [("tables", "changed_outside", "bronze")] == named(disputed), "every record must say that it was accepted"


# ---- logs that were cut short, and lakes that were put back


def last_entries(path: Path, name: str, count: int) -> list[Path]:
    return sorted((path / name / "_delta_log").glob("*.json"))[-count:]


def cut_short(path: Path, name: str, count: int = 1) -> None:
    for entry in last_entries(path, name, count):
        entry.unlink()


def test_bronze_whose_last_versions_are_gone_is_shorter_than_silver_says(path: Path) -> None:
    """Even where no audit was kept."""
    cut_short(path, "bronze")
    (found,) = look(path).findings
    assert ("tables", "older", "bronze") == (found.check, found.problem, found.table)
    assert "silver has processed version 2, and its log ends at version 1" in found.detail


def test_a_lake_that_was_put_back_is_older_than_the_last_audit(path: Path) -> None:
    before = seen(path)
    for name in ("bronze", "silver/runtime", "silver/ledger", "quarantine", "gaps", "batches"):
        cut_short(path, name)
    found = named(look(path, before))
    assert {("tables", "older", name) for name in ("bronze", "silver/runtime", "quarantine", "batches")} <= set(found)
    assert ("known", "missing", EVENTS) in found


def test_a_stream_that_is_read_less_far_than_once_is_shorter(path: Path) -> None:
    known = seen(path)
    (events,) = [stop for stop in known.streams if stop.stream == EVENTS]
    further = replace(known, streams=[replace(events, sequence=events.sequence + 5)])
    (found,) = look(path, further).findings
    assert ("known", "shorter", EVENTS, 23, 27) == (
        found.check, found.problem, found.stream, found.first, found.last,
    )  # fmt: skip
    assert "it was read up to 27 at the audit of 2026-11-16" in found.detail


def test_a_stream_that_is_known_as_it_was_before_it_was_made_anew_is_older(path: Path) -> None:
    known = seen(path)
    newer = replace(known, streams=[replace(stop, created_ns=stop.created_ns + 1) for stop in known.streams])
    assert {("known", "older", EVENTS), ("known", "older", "LEDGER")} == set(named(look(path, newer)))


@pytest.mark.parametrize("name", ["bronze", "gold/audits"])
def test_another_table_in_the_place_of_one_that_cannot_be_made_anew_is_named(path: Path, name: str) -> None:
    before = seen(path)
    rows = table(path, name).to_pyarrow_table()
    shutil.rmtree(path / name)
    write_deltalake(str(path / name), rows)
    assert ("tables", "replaced", name) in named(look(path, before))


def test_silver_may_be_made_anew(path: Path) -> None:
    before = seen(path)
    lake = Tables(path)
    rows = table(path, "quarantine").to_pyarrow_table()
    shutil.rmtree(path / "quarantine")
    written = list(files.write_files(lake.root(QUARANTINE), QUARANTINE, "1", rows, is_partitioned=False))
    lake.commit(lake.open(QUARANTINE), QUARANTINE, written, "silver", 2)
    assert [] == look(path, before).findings


def test_a_table_that_is_gone_is_missing(path: Path) -> None:
    before = seen(path)
    shutil.rmtree(path / "silver" / "ledger")
    assert [("tables", "missing", "silver/ledger")] == named(look(path, before))


def test_a_log_that_was_written_once_more_from_an_older_version_is_another_one(path: Path) -> None:
    """As many versions as before, and as many rows: but not those that the audit saw."""
    before = seen(path)
    entry = last_entries(path, "gaps", 1)[0]
    lines = [json.loads(line) for line in entry.read_text().splitlines()]
    for line in lines:
        line.get("add", {})["modificationTime"] = 1
    entry.write_text("\n".join(json.dumps(line) for line in lines if line))
    assert [("tables", "rewritten", "gaps")] == named(look(path, before))


def test_what_is_missing_stays_known_for_the_audits_to_come(path: Path) -> None:
    """The first audit after the loss sees less; the second must not take that for all there ever was."""
    before = seen(path)
    cut_short(path, "bronze")
    first = look(path, before)
    broken = {one.chain or one.table for one in first.findings}
    after = remembered([before], seen(path), broken)
    assert {one.table: one.version for one in before.logs} == {one.table: one.version for one in after.logs}
    assert set(named(first)) == set(named(look(path, after)))


BROKEN: dict[str, Callable[[Path], object]] = {
    "garbage": lambda log: (log / f"{1:020d}.json").write_text("garbage"),
    "half an entry": lambda log: os.truncate(log / f"{1:020d}.json", 200),
    "no first entry": lambda log: (log / f"{0:020d}.json").unlink(),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_log_that_cannot_be_read_is_named_and_the_others_are_looked_at(path: Path, what: str) -> None:
    before = seen(path)
    BROKEN[what](path / "silver" / "ledger" / "_delta_log")
    table(path, "gaps").delete("true")
    wanted = [("tables", "unreadable", "silver/ledger"), ("tables", "changed_outside", "gaps")]
    assert wanted == named(look(path)) == named(look(path, before))
    assert all("\n" not in one.detail for one in look(path).findings)


def test_an_entry_that_was_emptied_is_not_the_pipeline_s(path: Path) -> None:
    last_entries(path, "silver/ledger", 1)[0].write_bytes(b"")
    (found,) = look(path).findings
    assert ("changed_outside", "silver/ledger") == (found.problem, found.table)


def test_two_records_that_say_the_same_name_a_loss_once(path: Path) -> None:
    before = seen(path)
    shutil.rmtree(path / "silver" / "ledger")
    assert 1 == len(look(path, before, before).findings)


def test_a_sentence_names_the_table() -> None:
    told = Finding("tables", "changed_outside", table="bronze", detail="version 3")
    assert "tables: changed outside: bronze: version 3" == told.sentence
