"""One task's reader and one task's held rows, against a real server and without Spark around them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from oncewire._ground.errors import Corrupt
from oncewire.pipeline import outgoing, stream
from oncewire.pipeline.columns import Columns
from oncewire.pipeline.options import Access, ReadOptions
from oncewire.pipeline.reader import Part, RangeReader
from oncewire.pipeline.sink import Held
from oncewire.pipeline.wire import connect
from tests.spark.support import api, fill, make_stream
from tests.support.nats import NatsServer

SCHEMA = pa.schema([("sequence", pa.int64()), ("payload", pa.binary())])


def planned(server: NatsServer, name: str, **options: Any) -> tuple[ReadOptions, str]:
    read = replace(ReadOptions(Access(servers=(server.url,)), name), **options)
    wire = connect(read.access)
    try:
        return read, stream.facts_of(wire, name).created
    finally:
        wire.close()


def sequences(read: ReadOptions, part: Part) -> list[int]:
    reader = RangeReader(read, part, Columns(read.stream, SCHEMA))
    return [number for batch in reader.batches() for number in batch.column(0).to_pylist()]


@pytest.mark.parametrize("size", [500, 5_000])
@pytest.mark.parametrize("subjects", [(), ("all.>",)])
def test_what_is_trimmed_between_plan_and_read_is_a_loss(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, size: int, subjects: tuple[str, ...]
) -> None:
    name = make_stream(shared_server)
    fill(shared_server, name, size)
    subjects = tuple(one.replace("all", name) for one in subjects)
    read, created = planned(shared_server, name, subjects=subjects)
    api(shared_server, f"STREAM.PURGE.{name}", {"seq": 101})
    with pytest.raises(Corrupt, match="sequences 1 to 100 of stream"):
        sequences(read, Part(1, size + 1, created))
    rest = list(range(101, size + 1))
    assert rest == sequences(read, Part(1, size + 1, created, is_earliest=True))
    caplog.set_level(logging.WARNING, "oncewire.pipeline")
    assert rest == sequences(replace(read, fails_on_data_loss=False), Part(1, size + 1, created))
    assert "sequences 1 to 100" in caplog.text


def test_a_stream_that_is_made_anew_between_plan_and_read_is_noticed(shared_server: NatsServer) -> None:
    name = make_stream(shared_server)
    fill(shared_server, name, 5)
    read, created = planned(shared_server, name)
    config = api(shared_server, f"STREAM.INFO.{name}")["config"]
    api(shared_server, f"STREAM.DELETE.{name}")
    api(shared_server, f"STREAM.CREATE.{name}", config)
    fill(shared_server, name, 5)
    with pytest.raises(Corrupt, match="is not the one that was read before"):
        sequences(read, Part(1, 6, created))


def test_a_reader_whose_consumer_is_removed_begins_a_new_one(shared_server: NatsServer) -> None:
    name = make_stream(shared_server)
    fill(shared_server, name, 60_000)
    read, created = planned(shared_server, name)
    reader = RangeReader(read, Part(1, 60_001, created), Columns(name, SCHEMA))
    found: list[int] = []
    for number, batch in enumerate(reader.batches()):
        found += batch.column(0).to_pylist()
        if number == 1:
            for consumer in api(shared_server, f"CONSUMER.NAMES.{name}")["consumers"]:
                api(shared_server, f"CONSUMER.DELETE.{name}.{consumer}")
    assert list(range(1, 60_001)) == found
    assert [] == api(shared_server, f"CONSUMER.NAMES.{name}")["consumers"]


def test_a_reader_that_is_dropped_in_the_middle_removes_its_consumer(shared_server: NatsServer) -> None:
    """LIMIT ends a task before its range does."""
    name = make_stream(shared_server)
    fill(shared_server, name, 60_000)
    read, created = planned(shared_server, name)
    batches = RangeReader(read, Part(1, 60_001, created), Columns(name, SCHEMA)).batches()
    assert next(batches).num_rows
    batches.close()  # type: ignore[attr-defined]
    assert [] == api(shared_server, f"CONSUMER.NAMES.{name}")["consumers"]


def test_a_stream_without_direct_get_is_read_through_a_consumer(shared_server: NatsServer) -> None:
    name = make_stream(shared_server, allow_direct=False)
    fill(shared_server, name, 20)
    read, created = planned(shared_server, name)
    assert list(range(1, 21)) == sequences(read, Part(1, 21, created))


@pytest.mark.parametrize("bytes_max", [0, 3_000, 10**9])
def test_held_rows_come_back_in_order_from_memory_and_from_the_file(bytes_max: int) -> None:
    batches = [
        pa.RecordBatch.from_arrays(
            [pa.array(["a.b"] * 10), pa.array([b"%d" % number] * 10, pa.binary())], names=["subject", "payload"]
        )
        for number in range(20)
    ]
    with Held("prefix", bytes_max) as held:
        for batch in batches:
            held.add(outgoing.check(batch, held.count, b"", 10**6), has_ids=False)
        rows = list(held.rows())
    assert [b"%d" % number for number in range(20) for _ in range(10)] == [
        payload for one in rows for payload in one.payload.to_pylist()
    ]
    lines = [line for one in rows for line in one.lines.to_pylist()]
    assert 200 == len(set(lines)) == held.count
    assert lines[0].startswith(b"Nats-Msg-Id: prefix.")
