"""Writes: every row stands once, also when its batch runs again; a bad row stops its task before it sends anything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.support import fill, make_stream, read, read_stream, state, stored
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def write(frame: DataFrame, server: NatsServer, **options: Any) -> None:
    frame.write.format("jetstream").options(url=server.url, **options).mode("append").save()


def rows(spark: SparkSession, stream: str, count: int, partitions: int = 3) -> DataFrame:
    return spark.range(count, numPartitions=partitions).selectExpr(
        f"concat('{stream}.', id % 5) as subject", "cast(cast(id as string) as binary) as payload"
    )


def test_every_row_is_published_with_its_headers_and_its_id(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    frame = spark.range(3).selectExpr(
        f"'{stream}.x' as subject",
        "cast(concat('p', id) as binary) as payload",
        "concat('m-', id) as msg_id",
        "array(named_struct('key', 'Trace', 'value', cast('t' as binary))) as headers",
    )
    write(frame.coalesce(1), shared_server)
    found = stored(shared_server, stream)
    assert [b"p0", b"p1", b"p2"] == [message.data for message in found]
    assert {"Nats-Msg-Id": "m-1", "Trace": "t"} == found[1].headers


def test_payloads_come_through_byte_for_byte(spark: SparkSession, shared_server: NatsServer) -> None:
    poison = [b"", b"{}{}", b"\x00\r\n", b"\xff\xfe", b"HPUB a 1 1\r\n", b"x" * 900_000]
    stream = make_stream(shared_server)
    frame = spark.createDataFrame([(f"{stream}.x", bytearray(one)) for one in poison], "subject string, payload binary")
    write(frame.coalesce(1), shared_server)
    assert sorted(poison) == sorted(message.data for message in stored(shared_server, stream))


def test_a_write_that_is_run_again_under_its_id_publishes_nothing_twice(
    spark: SparkSession, shared_server: NatsServer
) -> None:
    stream = make_stream(shared_server)
    frame = rows(spark, stream, 3_000)
    write(frame, shared_server, writeId="job-1")
    write(frame, shared_server, writeId="job-1")
    assert 3_000 == state(shared_server, stream)["messages"]
    write(frame, shared_server)
    write(frame, shared_server)
    assert 9_000 == state(shared_server, stream)["messages"]


def test_equal_rows_are_all_published(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    frame = spark.range(500, numPartitions=2).selectExpr(
        f"'{stream}.x' as subject", "cast('same' as binary) as payload"
    )
    write(frame, shared_server)
    assert 500 == state(shared_server, stream)["messages"]


def test_rows_of_the_same_id_stand_once(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    frame = rows(spark, stream, 100).selectExpr("subject", "payload", "concat('k', crc32(payload) % 7) as msg_id")
    write(frame, shared_server)
    assert 7 == state(shared_server, stream)["messages"]


@pytest.mark.parametrize(
    ("subject", "reason"),
    [("cast(null as string)", "no subject"), ("'a.*'", "wildcard"), ("'a..b'", "not a subject")],
)
def test_a_bad_row_fails_before_anything_of_its_task_is_sent(
    spark: SparkSession, shared_server: NatsServer, subject: str, reason: str
) -> None:
    stream = make_stream(shared_server)
    frame = spark.range(5_000, numPartitions=1).selectExpr(
        f"if(id = 4999, {subject}, '{stream}.x') as subject", "cast('p' as binary) as payload"
    )
    with pytest.raises(Exception, match=f"row 4999 of the partition cannot be published: .*{reason}"):
        write(frame, shared_server)
    assert 0 == state(shared_server, stream)["messages"]


def test_a_row_that_is_too_large_fails_with_its_size(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    frame = spark.range(3, numPartitions=1).selectExpr(
        f"'{stream}.x' as subject", "cast(repeat('x', cast(id as int) * 600000) as binary) as payload"
    )
    with pytest.raises(Exception, match=r"row 2 of the partition .* takes 12\d+ bytes"):
        write(frame, shared_server)
    assert 0 == state(shared_server, stream)["messages"]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (["'s' as subject"], "payload is missing"),
        (["'s' as subject", "'p' as payload", "1 as extra"], "no column extra"),
        (["1 as subject", "'p' as payload"], "subject is int"),
    ],
)
def test_columns_that_do_not_fit_are_named(
    spark: SparkSession, shared_server: NatsServer, columns: list[str], named: str
) -> None:
    with pytest.raises(Exception, match=named):
        write(spark.range(1).selectExpr(*columns), shared_server)


def test_a_stream_cannot_be_overwritten(spark: SparkSession, shared_server: NatsServer) -> None:
    frame = rows(spark, make_stream(shared_server), 1)
    with pytest.raises(Exception, match="cannot be overwritten"):
        frame.write.format("jetstream").options(url=shared_server.url).mode("overwrite").save()


def test_a_subject_that_no_stream_takes_is_named(spark: SparkSession, shared_server: NatsServer) -> None:
    frame = spark.sql("select 'nobody.home' as subject, 'x' as payload")
    with pytest.raises(Exception, match=r"no stream takes the subject nobody\.home"):
        write(frame, shared_server)


def test_what_lands_in_another_stream_than_named_is_refused(spark: SparkSession, shared_server: NatsServer) -> None:
    stream, other = make_stream(shared_server), make_stream(shared_server)
    with pytest.raises(Exception, match="expected stream does not match"):
        write(rows(spark, stream, 2), shared_server, stream=other)
    write(rows(spark, stream, 2), shared_server, stream=stream)
    assert 2 == state(shared_server, stream)["messages"]


def test_a_streaming_batch_that_is_run_again_is_published_once(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path
) -> None:
    """The commit of the last batch is taken away, as if the driver had died right before it."""
    source, sink = make_stream(shared_server), make_stream(shared_server)
    fill(shared_server, source, 2_500)

    def copy() -> None:
        frame = read_stream(spark, shared_server, source, minPartitions=2).selectExpr(
            f"'{sink}.x' as subject", "payload"
        )
        writer = frame.writeStream.format("jetstream").options(url=shared_server.url)
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        query.awaitTermination()

    copy()
    last = max((tmp_path / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink()
    fill(shared_server, source, 10, first=2_501)
    copy()
    copy()  # Spark 4.0 repeats the open batch in one run and goes on in the next
    texts = [int(message.data) for message in stored(shared_server, sink)]
    assert Counter(range(1, 2_511)) == Counter(texts)


def test_what_is_copied_with_its_headers_needs_its_id_named(spark: SparkSession, shared_server: NatsServer) -> None:
    source, sink = make_stream(shared_server), make_stream(shared_server)
    write(rows(spark, source, 10), shared_server)
    frame = read(spark, shared_server, source, includeHeaders="true").selectExpr(
        f"'{sink}.x' as subject", "payload", "headers"
    )
    with pytest.raises(Exception, match="give the id as the column msg_id"):
        write(frame, shared_server)
    copied = frame.selectExpr("subject", "payload", "filter(headers, h -> h.key <> 'Nats-Msg-Id') as headers")
    write(copied, shared_server)
    assert 10 == state(shared_server, sink)["messages"]
