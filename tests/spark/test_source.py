"""Batch reads of a real stream: every message once, byte for byte, and nothing of anybody else's touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from oncewire._ground.jetstream import Outgoing
from tests.spark.support import api, fill, make_stream, publish, read, sequences, state, until
from tests.support.nats import NatsServer, nats_server

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

POISON = [
    b"",
    b"{}{}",
    b"\x00" * 7,
    b"\xff\xfe\x80 not UTF-8",
    b"\r\n" * 9,
    b"MSG a 1 5\r\nhello\r\n",
    b"\r\nMSG SP.x 1 $JS.ACK.S.ow-reader-x.1.2.3.1763123456789012345.4 5\r\nhello\r\nPING\r\n",
    b"-ERR 'Authorization Violation'\r\n",
    b"HMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n",
]


def refusal(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(error.value)


def test_the_source_is_found_without_a_register_call_and_has_these_columns(
    spark: SparkSession, shared_server: NatsServer
) -> None:
    stream = make_stream(shared_server)
    plain = "stream string, subject string, sequence long, timestamp timestamp, payload binary"
    headed = f"{plain}, headers array<struct<key string, value binary>>"
    for options, wanted in (({}, plain), ({"includeHeaders": "true"}, headed)):
        found = read(spark, shared_server, stream, **options).schema
        assert spark.createDataFrame([], wanted).schema.simpleString() == found.simpleString()


@pytest.mark.parametrize("partitions", [1, 5])
def test_every_message_is_read_once(spark: SparkSession, shared_server: NatsServer, partitions: int) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 20_000)
    frame = read(spark, shared_server, stream, minPartitions=partitions)
    assert partitions == frame.rdd.getNumPartitions()
    rows = frame.selectExpr("stream", "subject", "sequence", "cast(payload as string) text").collect()
    assert list(range(1, 20_001)) == sorted(row.sequence for row in rows)
    assert all(row.text == str(row.sequence) for row in rows)
    assert {(stream, f"{stream}.x")} == {(row.stream, row.subject) for row in rows}


def test_an_empty_stream_has_no_rows(spark: SparkSession, shared_server: NatsServer) -> None:
    assert 0 == read(spark, shared_server, make_stream(shared_server)).count()


def test_the_users_schema_leaves_columns_out(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 3)
    reader = spark.read.format("jetstream").options(url=shared_server.url, stream=stream)
    rows = reader.schema("payload binary, sequence long").load().collect()
    assert [("payload", "sequence")] * 3 == [tuple(row.asDict()) for row in rows]
    for schema, named in (
        ("body string", "no column body"),
        ("sequence int", "sequence is bigint"),
        ("headers array<struct<key string, value binary>>", "contradicts includeHeaders"),
    ):
        with pytest.raises(Exception, match=named):
            reader.schema(schema).load().collect()


@pytest.mark.parametrize("size", ["small", "large"])
def test_poison_comes_through_byte_for_byte(spark: SparkSession, shared_server: NatsServer, size: str) -> None:
    """Small ranges come by direct get, large ones through the bulk parser."""
    stream = make_stream(shared_server)
    payloads = POISON * (1 if size == "small" else 300)
    publish(shared_server, [Outgoing(f"{stream}.x", payload) for payload in payloads])
    rows = read(spark, shared_server, stream).orderBy("sequence").collect()
    assert payloads == [bytes(row.payload) for row in rows]


def test_messages_of_eight_megabytes_come_through(spark: SparkSession) -> None:
    with nats_server("max_payload: 16MB") as server:
        stream = make_stream(server)
        large = bytes(range(256)) * (8 * 1024 * 4)
        around = [Outgoing(f"{stream}.x", b"small %d" % number) for number in range(1_200)]
        publish(server, [*around, Outgoing(f"{stream}.x", large), *around[:5], Outgoing(f"{stream}.x", large[::-1])])
        rows = read(spark, server, stream).where("sequence > 1199").orderBy("sequence").collect()
        assert [b"small 1199", large, *(one.payload for one in around[:5]), large[::-1]] == [
            bytes(row.payload) for row in rows
        ]


@pytest.mark.parametrize("count", [3, 1_500])
def test_headers_keep_order_doubles_and_bytes(spark: SparkSession, shared_server: NatsServer, count: int) -> None:
    stream = make_stream(shared_server)
    headers = {"Trace": "a:b", "Nats-Sequence": "999", "Nats-Stream": "forged"}
    publish(
        shared_server,
        [Outgoing(f"{stream}.x", b"p", f"id-{number}", headers if number % 2 else None) for number in range(count)],
    )
    rows = read(spark, shared_server, stream, includeHeaders="true").orderBy("sequence").collect()
    wanted = [*((name, value.encode()) for name, value in headers.items()), ("Nats-Msg-Id", b"id-1")]
    assert sorted(wanted) == sorted((pair.key, bytes(pair.value)) for pair in rows[1].headers)
    assert [("Nats-Msg-Id", b"id-0")] == [(pair.key, bytes(pair.value)) for pair in rows[0].headers]
    assert list(range(1, count + 1)) == [row.sequence for row in rows]


def test_ranges_are_given_by_sequence_or_by_time(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 10)
    between = state(shared_server, stream)["last_ts"][:26] + "Z"
    fill(shared_server, stream, 10)
    assert [5, 6] == sequences(read(spark, shared_server, stream, startingOffsets="5", endingOffsets="7"))
    later = sequences(read(spark, shared_server, stream, startingOffsets=between))
    assert list(range(11, 21)) == [number for number in later if number > 10]
    assert {10, 11} & set(later)
    assert [] == sequences(read(spark, shared_server, stream, startingOffsets="21"))
    assert [] == sequences(read(spark, shared_server, stream, startingOffsets="2099-01-01T00:00:00Z"))
    with pytest.raises(Exception, match=r"startingOffsets is 22, and stream .* ends at 20"):
        read(spark, shared_server, stream, startingOffsets="22").collect()


@pytest.mark.parametrize("count", [40, 6_000])
def test_subjects_are_filtered_by_the_server(spark: SparkSession, shared_server: NatsServer, count: int) -> None:
    stream = make_stream(shared_server)
    publish(shared_server, [Outgoing(f"{stream}.{'abc'[number % 3]}.k", b"%d" % number) for number in range(count)])
    one = read(spark, shared_server, stream, subjects=f"{stream}.b.>")
    assert [number for number in range(1, count + 1) if number % 3 == 2] == sequences(one)
    two = read(spark, shared_server, stream, subjects=f"{stream}.a.*, {stream}.b.*", minPartitions=3)
    assert [number for number in range(1, count + 1) if number % 3 != 0] == sequences(two)
    assert [] == sequences(read(spark, shared_server, stream, subjects=f"{stream}.none"))


def test_deleted_messages_are_no_loss(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 5_000)
    for number in (2, 3, 4_000, 4_999, 5_000):
        api(shared_server, f"STREAM.MSG.DELETE.{stream}", {"seq": number})
    wanted = sorted(set(range(1, 5_001)) - {2, 3, 4_000, 4_999, 5_000})
    assert wanted == sequences(read(spark, shared_server, stream))
    assert [1] == sequences(read(spark, shared_server, stream, endingOffsets="4"))


def test_a_replica_that_lags_is_not_taken_for_a_gap(spark: SparkSession, shared_server: NatsServer) -> None:
    """A mirror answers direct gets like a replica; one whose tail is missing stands for a replica that is behind."""
    stream = make_stream(shared_server)
    fill(shared_server, stream, 60)
    mirror = f"{stream}M"
    config = {"name": mirror, "mirror": {"name": stream}, "allow_direct": True, "mirror_direct": True}
    api(shared_server, f"STREAM.CREATE.{mirror}", config)
    until(lambda: state(shared_server, mirror)["messages"] == 60)
    for number in range(51, 61):
        api(shared_server, f"STREAM.MSG.DELETE.{mirror}", {"seq": number})
    for first in (45, 55, 46, 56, 47, 57, 48, 58):  # either of the two may answer
        assert list(range(first, 61)) == sequences(read(spark, shared_server, stream, startingOffsets=str(first)))


def test_a_work_queue_is_refused_with_the_reason(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server, retention="workqueue")
    fill(shared_server, stream, 5)
    with pytest.raises(Exception, match="is a work queue, and a work queue cannot be read"):
        read(spark, shared_server, stream).collect()
    assert 5 == state(shared_server, stream)["messages"]


def test_a_stream_that_is_not_there_is_named(spark: SparkSession, shared_server: NatsServer) -> None:
    with pytest.raises(Exception, match="there is no stream NOWHERE"):
        read(spark, shared_server, "NOWHERE").collect()


def test_an_unknown_option_is_named(spark: SparkSession, shared_server: NatsServer) -> None:
    with pytest.raises(Exception, match="there is no option startingoffset"):
        read(spark, shared_server, "S", startingOffset="5").collect()


def test_durables_stay_as_they_are_and_readers_leave_nothing(spark: SparkSession, shared_server: NatsServer) -> None:
    stream = make_stream(shared_server)
    fill(shared_server, stream, 5_000)
    durable = {"durable_name": "svc", "name": "svc", "ack_policy": "explicit"}
    api(shared_server, f"CONSUMER.CREATE.{stream}.svc", {"stream_name": stream, "config": durable})
    before = api(shared_server, f"CONSUMER.INFO.{stream}.svc")
    assert 5_000 == read(spark, shared_server, stream, minPartitions=3).count()
    assert ["svc"] == api(shared_server, f"CONSUMER.NAMES.{stream}")["consumers"]
    after = api(shared_server, f"CONSUMER.INFO.{stream}.svc")
    for part in ("delivered", "ack_floor", "num_pending", "num_ack_pending"):
        assert before[part] == after[part]


def test_secrets_stand_in_no_plan_and_in_nothing_that_the_ui_shows(
    spark: SparkSession, event_log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with nats_server('authorization { user: "me", password: "hunter2" }') as server:
        secret: dict[str, Any] = {"user": "me", "password": "hunter2"}
        frame = spark.read.format("jetstream").options(url=server.url, stream="NONE", **secret).load()
        for mode in ("extended", "codegen", "cost", "formatted"):
            frame.explain(mode=mode)
        with pytest.raises(Exception, match="there is no stream NONE") as caught:
            frame.collect()
        inline = server.url.replace("//", "//me:hunter2@")
        with pytest.raises(Exception, match="there is no stream NONE") as second:
            spark.read.format("jetstream").options(url=inline, stream="NONE").load().collect()
        wrong = {"user": "me", "password": "hunter2x"}
        with pytest.raises(Exception, match="refuses the credentials") as third:
            spark.read.format("jetstream").options(url=server.url, stream="NONE", **wrong).load().collect()
    shown = "".join(capfd.readouterr()) + "".join(map(refusal, (caught, second, third)))
    logged = "".join(path.read_text() for path in event_log.iterdir())
    assert "jetstream" in logged
    assert "hunter2" not in shown + logged
