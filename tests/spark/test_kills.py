"""kill -9 of driver, workers and nats-server in the middle of batches: each message once at the far side."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.spark.kills import assert_each_once, await_publishing, copying
from tests.spark.support import fill, make_stream
from tests.support.nats import NatsServer

COUNT = 60_000


@pytest.mark.timeout(600)
def test_each_message_stands_once_after_kills_of_driver_workers_and_server(server: NatsServer, tmp_path: Path) -> None:
    source, sink = make_stream(server, "IN"), make_stream(server, "OUT")
    fill(server, source, COUNT)
    checkpoint = tmp_path / "checkpoint"
    with copying(server, source, sink, checkpoint, COUNT) as job:
        await_publishing(server, sink)
        job.kill()
    with copying(server, source, sink, checkpoint, COUNT) as job:
        assert job.said("started")
        server.kill()
        server.start()
        await_publishing(server, sink)
        assert job.kill_workers()
        is_finished = job.is_finished()
    if not is_finished:
        with copying(server, source, sink, checkpoint, COUNT) as job:
            job.finish()
    assert_each_once(server, sink, COUNT)


def test_the_reader_rides_over_a_server_that_is_killed_in_the_middle(server: NatsServer) -> None:
    """Without Spark: one task's reader, and a server that dies under it twice."""
    import pyarrow as pa

    from oncewire.pipeline import stream as ask
    from oncewire.pipeline.columns import Columns
    from oncewire.pipeline.options import Access, ReadOptions
    from oncewire.pipeline.reader import Part, RangeReader
    from oncewire.pipeline.wire import connect

    name = make_stream(server)
    fill(server, name, 60_000)
    options = ReadOptions(Access(servers=(server.url,)), name)
    wire = connect(options.access)
    created = ask.facts_of(wire, name).created
    wire.close()
    reader = RangeReader(options, Part(1, 60_001, created), Columns(name, pa.schema([("sequence", pa.int64())])))
    found: list[int] = []
    for number, batch in enumerate(reader.batches()):
        found += batch.column(0).to_pylist()
        if number in (1, 4):
            server.kill()
            restart = threading.Thread(target=server.start)
            restart.start()
    restart.join()
    assert list(range(1, 60_001)) == found


def test_the_publisher_rides_over_a_server_that_is_killed_in_the_middle(server: NatsServer) -> None:
    import pyarrow as pa

    from oncewire.pipeline.options import Access, WriteOptions
    from oncewire.pipeline.sink import publish

    name = make_stream(server)
    kills = threading.Event()

    def batches() -> object:
        for first in range(0, 40_000, 10_000):
            numbers = range(first + 1, first + 10_001)
            yield pa.RecordBatch.from_arrays(
                [pa.array([f"{name}.x"] * 10_000), pa.array([b"%d" % number for number in numbers], pa.binary())],
                names=["subject", "payload"],
            )
        kills.set()

    def kill_when_sending() -> None:
        kills.wait()
        server.kill()
        server.start()

    killer = threading.Thread(target=kill_when_sending)
    killer.start()
    done = publish(WriteOptions(Access(servers=(server.url,))), ("write", "w", 0), batches())  # type: ignore[arg-type]
    killer.join()
    assert 40_000 == done.confirmed
    assert_each_once(server, name, 40_000)
