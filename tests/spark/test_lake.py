"""The lake on a real server and a real Spark: every message once in bronze, every identity once in silver."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from oncewire._ground.errors import Conflict, Corrupt
from oncewire._ground.jetstream import Outgoing
from oncewire.pipeline import bronze, deriving, silver, standing
from oncewire.pipeline.checkpoints import folder_of
from oncewire.pipeline.deriving import Silver
from oncewire.pipeline.lake import hold
from oncewire.pipeline.lake.keep import Keeper, Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Streams
from oncewire.pipeline.staging import WHOLE_BYTES_MIN
from oncewire.pipeline.tables import TABLES, files_of, high_water, open_table, read_table
from tests.spark.lakes import chat, doubled, event, metered, once, rows, streams
from tests.spark.support import api, publish
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALL = ("EVENTS", "BILLING", "CHAT", "LAST", "QUEUE")
BAD = (b"", b"\x00", b"\xff\xfe", b"{", b'{"type":"a","payload":{},"schema_version":"9.9"}', b"x" * 900_000)


@pytest.fixture(scope="module")
def lake(spark: SparkSession, shared_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake after two passes, partitioned by date. The tests below only look at it, or take a copy."""
    path = tmp_path_factory.mktemp("made") / "la ke"
    server = shared_server
    streams(server, EVENTS=["evt.>"], BILLING=["platform.billing.>"], CHAT=["chat.>"])
    api(server, "STREAM.CREATE.LAST", {"name": "LAST", "subjects": ["sr.events.>"], "max_msgs_per_subject": 1})
    api(server, "STREAM.CREATE.QUEUE", {"name": "QUEUE", "subjects": ["cmd.>"], "retention": "workqueue"})
    publish(server, [event(number) for number in range(1, 101)])
    publish(server, [event(number) for number in range(1, 11)])  # ten come again
    publish(server, [metered(number) for number in range(1, 21)] + [chat(number) for number in range(1, 6)])
    publish(server, [Outgoing(f"sr.events.{name}", metered(1).payload) for name in ("loop", "run", "loop", "other")])
    publish(server, [Outgoing("cmd.acme.main.biller.charge", b'{"type":"a","payload":{}}')])
    api(server, "STREAM.PURGE.BILLING", {"seq": 4})
    for sequence in (20, 21, 110):
        api(server, "STREAM.MSG.DELETE.EVENTS", {"seq": sequence})
    first = once(spark, path, server, *ALL, partition_by="date")
    assert (132, 123, 9, 0) == first.balance
    assert ["refused"] == [error.code for error in first.errors]  # the work queue, alone
    publish(server, [event(number) for number in (5, 50, 101)] + [metered(7, quantity=99)])
    publish(server, [Outgoing("evt.acme.main.bad", body) for body in BAD])
    assert (10, 1, 2, 7) == once(spark, path, server, *ALL).balance
    return path


def test_every_message_is_once_in_bronze_and_every_identity_once_in_silver(lake: Path) -> None:
    places = [(one["stream"], one["sequence"]) for one in rows(lake, "bronze", "stream", "sequence")]
    gone = {("EVENTS", at) for at in (20, 21, 110)} | {("BILLING", at) for at in (1, 2, 3)} | {("LAST", 1)}
    last = {"EVENTS": 119, "BILLING": 21, "CHAT": 5, "LAST": 4}
    wanted = {(name, at) for name, count in last.items() for at in range(1, count + 1)} - gone
    assert {} == doubled(places)
    assert wanted == set(places)
    assert last == {lifetime[0]: at for lifetime, at in high_water(open_table(lake, "bronze")).items()}
    keys = [one["identity"] for one in rows(lake, "silver/runtime", "identity")]
    assert {} == doubled(keys)
    # 20 and 21 were deleted before anybody read them
    assert {f"key:acme/main/order-{number}" for number in range(1, 102) if number not in (20, 21)} == set(keys)


def test_what_silver_refuses_is_in_quarantine_byte_for_byte(lake: Path) -> None:
    found = rows(lake, "quarantine")
    assert {*BAD, metered(7, quantity=99).payload} == {one["payload"] for one in found}
    assert {"identity_conflict", "contract", "version"} == {one["reason"] for one in found}
    assert all(one["stream"] and one["sequence"] and one["detail"] for one in found)


def test_what_is_missing_is_known_with_its_cause(lake: Path) -> None:
    found = {(one["stream"], one["first"], one["last"], one["cause"]) for one in rows(lake, "gaps")}
    wanted = {("EVENTS", 20, 21, "deleted"), ("EVENTS", 110, 110, "deleted"), ("BILLING", 1, 3, "before")}
    assert wanted | {("LAST", 1, 1, "before")} == found


def test_the_tenant_is_a_column_of_every_row_that_tells_it(lake: Path) -> None:
    assert {"acme"} == {one["tenant"] for one in rows(lake, "silver/realtime")}
    assert {"EVENTS": {"acme"}, "BILLING": {None}, "CHAT": {"acme"}, "LAST": {None}} == {
        name: {one["tenant"] for one in rows(lake, "bronze", "tenant", "stream") if one["stream"] == name}
        for name in ("EVENTS", "BILLING", "CHAT", "LAST")
    }


def test_spark_duckdb_and_pandas_read_the_same_rows(spark: SparkSession, lake: Path) -> None:
    for name in ("bronze", "silver/runtime", "silver/message", "quarantine"):
        wanted = {(one["stream"], one["sequence"], str(one["date"])) for one in rows(lake, name)}
        in_spark = read_table(spark, lake, name).select("stream", "sequence", "date").collect()
        assert wanted == {(one.stream, one.sequence, str(one.date)) for one in in_spark}
        files = [f"{lake}/{name}/{path}" for path in files_of(open_table(lake, name))]
        found = duckdb.sql(f"select stream, sequence, date from read_parquet({files}, hive_partitioning = true)")
        assert wanted == {(stream, sequence, str(date)) for stream, sequence, date in found.fetchall()}
        frame = open_table(lake, name).to_pandas()
        assert wanted == set(zip(frame["stream"], frame["sequence"], frame["date"].astype(str), strict=True))


def test_a_version_of_a_table_stays_as_it_was(spark: SparkSession, lake: Path) -> None:
    versions = range(open_table(lake, "bronze").version() + 1)
    counts = [read_table(spark, lake, "bronze", version=version).count() for version in versions]
    assert 0 == counts[0]
    assert 142 == counts[-1]
    assert sorted(counts) == counts


def test_the_steps_are_functions_on_frames(spark: SparkSession, shared_server: NatsServer, lake: Path) -> None:
    raw = bronze(spark, stream="EVENTS", url=shared_server.url)
    known = {
        (one["sequence"], one["payload"], one["nanos"]) for one in rows(lake, "bronze") if one["stream"] == "EVENTS"
    }
    assert known == {(one.sequence, bytes(one.payload), one.nanos) for one in raw.collect()}
    mine = silver(raw, "runtime").dropDuplicates(["key"]).select("key").collect()
    assert {one["key"] for one in rows(lake, "silver/runtime", "key")} == {bytes(one.key) for one in mine}


def test_silver_says_the_same_of_the_source_as_of_any_other_frame(
    spark: SparkSession, shared_server: NatsServer, lake: Path
) -> None:
    """Right on the source it completes the rows itself: what a user did to a frame in between must count."""
    raw = bronze(spark, stream="EVENTS", url=shared_server.url)
    direct = sorted(silver(raw, "runtime").collect())
    assert direct == sorted(silver(raw.where("sequence > 0"), "runtime").collect())
    assert [one for one in direct if one.sequence > 50] == sorted(
        silver(raw.where("sequence > 50"), "runtime").collect()
    )
    assert 50 < len(direct)


def test_silver_of_a_frame_that_is_cached_reads_what_is_kept(
    spark: SparkSession, shared_server: NatsServer, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stream may have more by then, or less."""
    raw = bronze(spark, stream="EVENTS", url=shared_server.url).cache()
    try:
        silver(raw, "runtime").explain()
        assert "InMemoryTableScan" in capsys.readouterr().out
    finally:
        raw.unpersist()


class Cut(Lake):
    """A lake whose power goes before its n-th commit."""

    def __init__(self, path: Path, commits: int) -> None:
        super().__init__(path)
        self.left = commits

    def commit(self, *args: Any, **named: Any) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        super().commit(*args, **named)


class NewRelease(Silver):
    """One that writes other bytes: its files have other names than those that are committed."""

    def _write_items(self, prefix: str, *args: Any) -> Any:
        return super()._write_items(f"new-{prefix}", *args)


def derived(path: Path) -> dict[str, Any]:
    """What silver, quarantine and gaps hold, whatever the files."""
    names = [name for name in TABLES if name not in ("bronze", "batches")]
    found: dict[str, Any] = {
        name: sorted((one["stream"], one.get("sequence", one.get("first"))) for one in rows(path, name))
        for name in names
        if (path / name).exists()
    }
    balance = rows(path, "batches")
    for name in ("rows_in", "rows_out", "duplicates", "quarantined"):
        found[name] = sum(one[name] for one in balance)
    return found


@pytest.mark.parametrize("commits", [0, 1, 2, 4, 5])
def test_power_that_goes_between_two_commits_doubles_and_loses_nothing(
    spark: SparkSession, lake: Path, tmp_path: Path, commits: int
) -> None:
    copy = tmp_path / "lake"
    shutil.copytree(lake / "bronze", copy / "bronze")
    whole = (0, WHOLE_BYTES_MIN) if commits % 2 else (WHOLE_BYTES_MIN, 0)
    with pytest.raises(KeyboardInterrupt):
        Silver(spark, Cut(copy, commits), whole_bytes_min=whole[0]).step()
    # batches of another size do not change what was begun, nor does another way of writing them
    again = NewRelease(spark, Lake(copy), rows_max=1, whole_bytes_min=whole[1])
    while again.step():
        pass
    assert derived(lake) == derived(copy)


def test_rows_that_wait_in_a_file_of_their_table_leave_nothing_behind_when_some_of_them_are_copies(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "lake"
    shutil.copytree(lake / "bronze", copy / "bronze")
    done = Silver(spark, Lake(copy), whole_bytes_min=0).step()
    assert done is not None
    assert done.total("duplicates") > 0
    assert derived(lake) == derived(copy)
    tables = [name for name in TABLES if (copy / name).exists()]
    named = {copy / name / path for name in tables for path in files_of(open_table(copy, name))}
    assert named == set(copy.rglob("*.parquet"))
    assert {True, False} == {"-of-" in path.name for path in named if "silver" in path.parts}, "both ways"


def test_compaction_and_vacuum_change_no_row_and_nothing_that_follows(
    spark: SparkSession, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "lake"
    shutil.copytree(lake, copy)
    monkeypatch.setattr("oncewire.pipeline.lake.keep.FILES_MIN", 2)
    orphan = copy / "bronze" / "orphan.parquet"
    orphan.write_bytes(b"left by a batch that was never committed")
    before = {name: rows(copy, name) for name in TABLES if (copy / name).exists()}
    version = open_table(copy, "bronze").version()
    silver_of = Silver(spark, Lake(copy))
    Keeper(spark, Lake(copy), Keeping(retention_hours=0)).keep(silver_of.done())
    after = {name: rows(copy, name) for name in before}
    for name, found in before.items():
        key = TABLES[name].keys
        assert sorted(found, key=lambda one: str([one[k] for k in key])) == sorted(
            after[name], key=lambda one: str([one[k] for k in key])
        )
    assert open_table(copy, "bronze").version() > version
    assert len(open_table(copy, "bronze").file_uris()) < len(open_table(lake, "bronze").file_uris())
    assert not orphan.exists()
    assert silver_of.step() is None, "compaction brings nothing new"


def test_a_lake_has_one_pipeline_and_says_which(lake: Path) -> None:
    with hold.held(lake, what="the first", since="noon"):
        with pytest.raises(Conflict, match=r"held by the first, process \d+ on .+ since noon"):
            hold.held(lake, what="the second", since="now").__enter__()
        assert "the first" == hold.holder(lake)["what"]
    assert {} == hold.holder(lake)


def test_a_commit_that_another_process_overtook_is_refused(spark: SparkSession, lake: Path, tmp_path: Path) -> None:
    copy = tmp_path / "lake"
    shutil.copytree(lake / "bronze", copy / "bronze")

    class Overtaken(Lake):
        def commit(self, *args: Any, **named: Any) -> None:
            if not self.is_second:
                self.is_second = True
                Silver(spark, Lake(copy)).step()
            super().commit(*args, **named)

        is_second = False

    with pytest.raises(Conflict, match="another process has written"):
        Silver(spark, Overtaken(copy)).step()
    assert derived(lake) == derived(copy)


def test_a_loss_and_a_lost_checkpoint_stop_their_streams_alone(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    streams(server, EVENTS=["evt.>"], BILLING=["platform.billing.>"], CHAT=["chat.>"])
    publish(server, [event(number) for number in range(1, 21)] + [metered(1), chat(1)])
    once(spark, path, server, "EVENTS", "BILLING", "CHAT")
    publish(server, [event(number) for number in range(21, 41)] + [metered(2), chat(2)])
    api(server, "STREAM.PURGE.EVENTS", {"seq": 31})
    shutil.rmtree(folder_of(path, "BILLING"))
    ran = once(spark, path, server, "EVENTS", "BILLING", "CHAT")
    loss, lost = ran.errors
    assert isinstance(loss, Corrupt)
    assert "sequences 21 to 30 of stream EVENTS are gone" in loss.message
    assert "--accept-loss" in loss.hint
    assert isinstance(lost, Corrupt)
    assert "its checkpoint is gone" in lost.message
    assert "oncewire pipeline backfill BILLING" in lost.hint
    assert 1 == ran.balance[0], "the third stream went on"

    server_side = Streams({"url": server.url})
    assert 2 == standing.begin_again(Lake(path), "BILLING", server_side)
    server_side.close()
    ran = once(spark, path, server, "EVENTS", "BILLING", "CHAT", accepted=frozenset({"EVENTS"}))
    assert [] == ran.errors
    places = [(one["stream"], one["sequence"]) for one in rows(path, "bronze", "stream", "sequence")]
    there = {("EVENTS", at) for at in (*range(1, 21), *range(31, 41))}
    assert {} == doubled(places)
    assert there | {(name, at) for name in ("BILLING", "CHAT") for at in (1, 2)} == set(places)
    assert [(21, 30, "trimmed")] == [(one["first"], one["last"], one["cause"]) for one in rows(path, "gaps")]


def test_silver_is_made_anew_from_bronze_as_long_as_bronze_has_what_its_log_names(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "lake"
    shutil.copytree(lake / "bronze", copy / "bronze")
    gone = next((copy / "bronze").rglob("*.parquet"))
    kept = gone.rename(tmp_path / "kept")
    with pytest.raises(Corrupt, match="is no longer there") as late:
        Silver(spark, Lake(copy)).step()
    assert "--lake DIR" in late.value.hint
    kept.rename(gone)
    assert Silver(spark, Lake(copy)).step() is not None
    assert derived(lake) == derived(copy)


def test_a_batch_that_does_not_balance_is_not_committed(
    spark: SparkSession, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows vanish on their way: nobody counted them as duplicates, and no table has them."""
    copy = tmp_path / "lake"
    shutil.copytree(lake / "bronze", copy / "bronze")
    sort_out = deriving.sort_out
    monkeypatch.setattr(deriving, "sort_out", lambda *args, **more: replace(sort_out(*args, **more), duplicates=0))
    with pytest.raises(Corrupt, match="does not balance"):
        Silver(spark, Lake(copy)).step()
    assert [] == [one for name in ("silver/runtime", "quarantine", "gaps") for one in rows(copy, name)]
