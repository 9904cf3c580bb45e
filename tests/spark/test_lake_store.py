"""A lake in an object store: the same tables, each message once, with checkpoints in a folder beside it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncewire._ground.errors import Conflict, Corrupt
from oncewire._ground.jetstream import Outgoing
from oncewire.pipeline import read_table, standing
from oncewire.pipeline.lake.keep import Keeper, Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Reads, Streams
from oncewire.pipeline.run import Pipeline
from oncewire.pipeline.tables import BRONZE, TABLES, files_of, open_table
from tests.spark.lakes import doubled, event, metered, once, rows, streams
from tests.spark.support import publish
from tests.support.nats import NatsServer
from tests.support.objects import BUCKET, SECRET, ObjectStore, object_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = ("EVENTS", "BILLING")
SUBJECTS = {"EVENTS": ["evt.>"], "BILLING": ["platform.billing.>"]}
FIRST = 40
BAD = Outgoing("evt.acme.main.orders.placed", b"no envelope")


@pytest.fixture(scope="module")
def store(spark: SparkSession) -> Iterator[ObjectStore]:
    """A store that this process and Spark's workers reach. Java is started already, with an environment of its own."""
    workers = spark.sparkContext.environment
    before = dict(workers)
    with object_store() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environ.items():
            patch.setenv(name, value)
        workers |= running.environ
        yield running
        workers.clear()
        workers |= before


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def lake(spark: SparkSession, store: ObjectStore, shared_server: NatsServer, beside: Path) -> str:
    """Two passes over two streams, partitioned by date, with what is late, doubled and refused."""
    url = f"s3://{BUCKET}/whole"
    streams(shared_server, **SUBJECTS)
    sent = [event(number) for number in range(1, FIRST + 1)] + [event(3), event(4), BAD]
    publish(shared_server, [*sent, *(metered(number) for number in range(1, 6))])
    first = once(spark, url, shared_server, *NAMES, checkpoints=beside, partition_by="date")
    assert ([], (48, 45, 2, 1)) == (first.errors, first.balance)
    publish(shared_server, [event(FIRST + 1), event(1), metered(6)])
    second = once(spark, url, shared_server, *NAMES, checkpoints=beside)
    assert ([], (3, 2, 1, 0)) == (second.errors, second.balance)
    return url


def places(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted((one["stream"], one["sequence"]) for one in found)


def test_each_message_is_once_in_bronze_and_each_identity_once_in_silver(lake: str) -> None:
    assert places(rows(lake, "bronze")) == sorted(
        [("EVENTS", at) for at in range(1, 46)] + [("BILLING", at) for at in range(1, 7)]
    )  # fmt: skip
    assert FIRST + 1 == len(rows(lake, "silver/runtime")) == len({one["key"] for one in rows(lake, "silver/runtime")})
    assert [("EVENTS", 43)] == places(rows(lake, "quarantine"))


def test_spark_reads_the_same_rows_as_arrow_and_at_a_version_those_of_then(spark: SparkSession, lake: str) -> None:
    for name in ("bronze", "silver/message", "gaps", "batches"):
        wanted = rows(lake, name)
        found = [row.asDict(recursive=True) for row in read_table(spark, lake, name).collect()]
        keys = TABLES[name].keys
        for one in (wanted, found):
            one.sort(key=lambda row: str([row[key] for key in keys]))
        assert [set(row) for row in wanted] == [set(row) for row in found]
        narrow = ("stream", "sequence", "payload", "key", "date", "rows_in")
        assert [[row.get(key) for key in narrow] for row in wanted] == [
            [row.get(key) for key in narrow] for row in found
        ]
    versions = range(open_table(lake, "bronze").version() + 1)
    counts = [read_table(spark, lake, "bronze", version, ["sequence"]).count() for version in versions]
    assert (0, 51) == (counts[0], counts[-1])
    assert sorted(counts) == counts


def test_no_key_of_the_store_is_in_what_spark_or_the_lake_writes_down(
    lake: str, store: ObjectStore, event_log: Path, beside: Path
) -> None:
    assert any("EVENTS" in path.read_text() for path in event_log.rglob("*") if path.is_file()), "it is the log"
    for path in [*event_log.rglob("*"), *beside.rglob("*")]:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_compaction_and_vacuum_change_no_row(
    spark: SparkSession, lake: str, beside: Path, monkeypatch: pytest.MonkeyPatch, store: ObjectStore
) -> None:
    monkeypatch.setattr("oncewire.pipeline.lake.keep.FILES_MIN", 2)
    orphan = f"{lake.removeprefix('s3://')}/bronze/orphan.parquet"
    with store.filesystem.open_output_stream(orphan) as file:
        file.write(b"left by a batch that was never committed")
    before = {name: sorted(map(str, rows(lake, name))) for name in TABLES if Lake(lake).exists(TABLES[name])}
    files = files_of(open_table(lake, "bronze"))
    made = Lake(lake, checkpoints=beside)
    Keeper(spark, made, Keeping(retention_hours=0)).keep(standing.silver_has(made))
    assert before == {name: sorted(map(str, rows(lake, name))) for name in before}
    assert len(files_of(open_table(lake, "bronze"))) < len(files)
    names = {one.path.partition("/bronze/")[2] for one in store.listed(f"{lake}/bronze")}
    assert files_of(open_table(lake, "bronze")).keys() == {name for name in names if name.endswith(".parquet")}


def test_a_lost_folder_beside_the_lake_stops_its_streams_and_backfill_goes_on(
    spark: SparkSession, store: ObjectStore, server: NatsServer, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/lost"
    streams(server, EVENTS=["evt.>"])
    publish(server, [event(number) for number in range(1, 11)])
    once(spark, url, server, "EVENTS", checkpoints=tmp_path)
    publish(server, [event(number) for number in range(11, 21)])
    for one in Lake(url, checkpoints=tmp_path).beside.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    [lost] = once(spark, url, server, "EVENTS", checkpoints=tmp_path).errors
    assert isinstance(lost, Corrupt)
    assert "backfill EVENTS" in lost.hint
    with closing(Streams({"url": server.url})) as asking:
        assert 11 == standing.begin_again(Lake(url, checkpoints=tmp_path), "EVENTS", asking)
    assert [] == once(spark, url, server, "EVENTS", checkpoints=tmp_path).errors
    assert [("EVENTS", at) for at in range(1, 21)] == places(rows(url, "bronze"))
    assert 20 == len(rows(url, "silver/runtime"))


def test_two_drivers_at_once_double_nothing(
    spark: SparkSession, store: ObjectStore, server: NatsServer, tmp_path: Path
) -> None:
    """Each on a machine of its own: no lock is between them, only the tables."""
    url = f"s3://{BUCKET}/both"
    streams(server, EVENTS=["evt.>"])
    publish(server, [event(number % 30) for number in range(40)] + [BAD] * 3)
    ends: list[Any] = []

    def drive(name: str) -> None:
        pipeline = Pipeline(
            spark.newSession(), Lake(url, checkpoints=tmp_path / name), ["EVENTS"],
            Reads({"url": server.url}, rows_per_trigger=10), has_topics=False, keeping=Keeping(),
        )  # fmt: skip
        try:
            pipeline.once(threading.Event())
            ends.append(pipeline.stopped())
        except Conflict as error:
            ends.append([error])

    drivers = [threading.Thread(target=drive, args=(name,)) for name in ("one", "other")]
    for one in drivers:
        one.start()
    for one in drivers:
        one.join()
    assert 2 == len(ends)
    assert all(isinstance(error, Conflict | Corrupt) for end in ends for error in end), ends
    last = Pipeline(
        spark, Lake(url, checkpoints=tmp_path / "third"), [], Reads({"url": server.url}), has_topics=False,
        keeping=Keeping(),
    )  # fmt: skip
    last.derive_all(threading.Event())
    assert {} == doubled(places(rows(url, "bronze")))
    assert [("EVENTS", at) for at in range(1, 44)] == places(rows(url, "bronze"))
    assert 30 == len(rows(url, "silver/runtime"))
    assert [("EVENTS", at) for at in range(41, 44)] == places(rows(url, "quarantine"))
    batches = rows(url, "batches")
    assert 43 == sum(one["rows_in"] for one in batches)
    assert {} == doubled([(one["last_version"], one["family"]) for one in batches])


def test_spark_takes_a_table_of_a_store_for_as_large_as_it_is(spark: SparkSession, lake: str) -> None:
    """It sends what it takes for small to every worker as a whole."""
    frame = read_table(spark, lake, BRONZE.name, columns=["sequence"])
    size = frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()
    assert 51 * 8 <= int(str(size))
