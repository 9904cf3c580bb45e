"""Streaming reads: a checkpoint goes on where it stopped, and a stream that is not what it was stops the query."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncewire._ground.contracts.subjects import INCARNATIONS_BUCKET
from oncewire._ground.jetstream import Outgoing
from oncewire.pipeline import backlog
from tests.spark.support import (
    LATE,
    NEEDS_ADMISSION,
    api,
    fill,
    make_stream,
    publish,
    read_stream,
    run_once,
    state,
)
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_a_restart_goes_on_where_the_last_run_stopped(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path
) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 1_500)
    frame = read_stream(spark, shared_server, stream)
    assert list(range(1, 1_501)) == flat(run_once(frame, tmp_path))
    assert [] == run_once(frame, tmp_path)
    fill(shared_server, stream, 7)
    assert list(range(1_501, 1_508)) == flat(run_once(frame, tmp_path))


@pytest.mark.skipif(NEEDS_ADMISSION, reason=LATE)
def test_a_trigger_takes_no_more_than_it_may(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 2_500)
    batches = run_once(read_stream(spark, shared_server, stream, maxRecordsPerTrigger=1_000), tmp_path / "records")
    assert [1_000, 1_000, 500] == [len(batch) for batch in batches]
    assert list(range(1, 2_501)) == flat(batches)
    mean = state(shared_server, stream)["bytes"] // 2_500
    batches = run_once(read_stream(spark, shared_server, stream, maxBytesPerTrigger=mean * 900), tmp_path / "bytes")
    assert [900, 900, 700] == [len(batch) for batch in batches]


@pytest.mark.skipif(NEEDS_ADMISSION, reason=LATE)
def test_progress_shows_the_backlog(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 30)
    query = (
        read_stream(spark, shared_server, stream, maxRecordsPerTrigger=10)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert [20, 10, 0] == [backlog(progress) for progress in query.recentProgress if progress["numInputRows"]]


@pytest.mark.skipif(NEEDS_ADMISSION, reason=LATE)
def test_available_now_ends_at_what_was_there(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> None:
    """Messages that arrive while it runs belong to the next run."""
    stream = make_stream(shared_server)
    fill(shared_server, stream, 20)
    seen: list[int] = []

    def take(rows: Any, _: int) -> None:
        seen.extend(row.sequence for row in rows.collect())
        fill(shared_server, stream, 5)

    query = (
        read_stream(spark, shared_server, stream, maxRecordsPerTrigger=10)
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert list(range(1, 21)) == sorted(seen)


def test_a_new_query_begins_at_the_latest_unless_told_otherwise(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path
) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 10)
    frame = spark.readStream.format("jetstream").options(url=shared_server.url, stream=stream).load()
    assert [] == run_once(frame, tmp_path)
    fill(shared_server, stream, 3)
    assert [11, 12, 13] == flat(run_once(frame, tmp_path))


# ---- what is no longer there


def broken(server: NatsServer, stream: str, how: str) -> None:
    """Read up to 10; then this happens; then there are messages again."""
    config = api(server, f"STREAM.INFO.{stream}")["config"]
    if how == "trimmed":
        fill(server, stream, 30)
        api(server, f"STREAM.PURGE.{stream}", {"seq": 21})
    elif how == "purged":
        fill(server, stream, 10)
        api(server, f"STREAM.PURGE.{stream}")
        fill(server, stream, 20)
    else:
        api(server, f"STREAM.DELETE.{stream}")
        api(server, f"STREAM.CREATE.{stream}", config)
        fill(server, stream, 40)


@pytest.mark.parametrize(
    ("how", "says", "goes_on_with"),
    [
        ("trimmed", "sequences 11 to 20 of stream .* are gone", list(range(21, 41))),
        ("purged", "sequences 11 to 20 of stream .* are gone", list(range(21, 41))),
        ("recreated", "is not the one that was read before: it was created at", list(range(1, 41))),
    ],
)
def test_a_loss_stops_the_query_unless_told_to_go_on(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path, how: str, says: str, goes_on_with: list[int]
) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 10)
    frame = read_stream(spark, shared_server, stream)
    assert list(range(1, 11)) == flat(run_once(frame, tmp_path))
    broken(shared_server, stream, how)
    with pytest.raises(Exception, match=says):
        run_once(frame, tmp_path)
    tolerant = read_stream(spark, shared_server, stream, failOnDataLoss="false")
    assert goes_on_with == flat(run_once(tolerant, tmp_path))
    assert [] == run_once(frame, tmp_path)


def test_a_stream_that_went_back_is_noticed_though_its_sequences_go_on(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    """A restored backup keeps the creation time and gives sequences out again: only the time of a message tells."""
    stream = make_stream(server)
    fill(server, stream, 5)
    server.stop()
    shutil.copytree(server.folder / "jetstream", tmp_path / "backup")
    server.start()
    fill(server, stream, 5, first=6)
    frame = read_stream(spark, server, stream)
    assert list(range(1, 11)) == flat(run_once(frame, tmp_path / "checkpoint"))
    server.stop()
    shutil.rmtree(server.folder / "jetstream")
    shutil.copytree(tmp_path / "backup", server.folder / "jetstream")
    server.start()
    with pytest.raises(Exception, match="ends at sequence 5, and 10 was read"):
        run_once(frame, tmp_path / "checkpoint")
    fill(server, stream, 20, first=100)
    with pytest.raises(Exception, match="message 10 has the time"):
        run_once(frame, tmp_path / "checkpoint")
    tolerant = read_stream(spark, server, stream, failOnDataLoss="false")
    assert list(range(6, 26)) == flat(run_once(tolerant, tmp_path / "checkpoint"))
    accept(server, stream)
    fill(server, stream, 1)
    assert [26] == flat(run_once(frame, tmp_path / "checkpoint"))
    newest = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert 1 == json.loads(newest.read_text().splitlines()[-1])["incarnation"]


def accept(server: NatsServer, stream: str) -> None:
    """What a person does who has looked at the loss: the stream goes on as its first new incarnation."""
    bucket = {"name": f"KV_{INCARNATIONS_BUCKET}", "subjects": [f"$KV.{INCARNATIONS_BUCKET}.>"]}
    api(server, f"STREAM.CREATE.KV_{INCARNATIONS_BUCKET}", bucket)
    publish(server, [Outgoing(f"$KV.{INCARNATIONS_BUCKET}.{stream}", b"1")])


def test_what_a_per_subject_limit_replaced_is_no_loss(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path
) -> None:
    stream = make_stream(shared_server, max_msgs_per_subject=1)
    fill(shared_server, stream, 10)
    frame = read_stream(spark, shared_server, stream)
    assert [10] == flat(run_once(frame, tmp_path))
    fill(shared_server, stream, 10)
    assert [20] == flat(run_once(frame, tmp_path))


@pytest.mark.skipif(not NEEDS_ADMISSION, reason="this Spark has limits per trigger")
def test_an_older_spark_names_what_it_cannot_do(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"maxRecordsPerTrigger needs Spark 4\.2"):
        run_once(read_stream(spark, shared_server, make_stream(shared_server), maxRecordsPerTrigger=5), tmp_path)
