"""A follower that stood still answers with an old end: the reader asks the leader before it takes that for all."""

from __future__ import annotations

import signal
from typing import Any

import pyarrow as pa
import pytest

from oncewire._ground.errors import Unavailable
from oncewire.pipeline import stream as ask
from oncewire.pipeline.columns import Columns
from oncewire.pipeline.options import Access, ReadOptions
from oncewire.pipeline.reader import Part, RangeReader, direct
from oncewire.pipeline.wire import connect
from tests.spark.support import api, fill, make_stream
from tests.support.nats import NatsServer, nats_cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

ROUNDS = 20
BEHIND = 20_000
TAIL = 500


def probed(options: ReadOptions, first: int) -> int:
    """How much of the tail this server hands out at once; all of it when it does not answer yet."""
    wire = connect(options.access)
    try:
        return len(direct(wire, options, first, TAIL) or [])
    except Unavailable:
        return TAIL
    finally:
        wire.close()


def read_tail(options: ReadOptions, created: str, first: int) -> list[int]:
    columns = Columns(options.stream, pa.schema([("sequence", pa.int64())]))
    reader = RangeReader(options, Part(first, first + TAIL, created), columns)
    return [number for batch in reader.batches() for number in batch.column(0).to_pylist()]


def follower(servers: list[NatsServer], info: dict[str, Any]) -> NatsServer:
    name = info["cluster"]["replicas"][0]["name"]
    return next(server for server in servers if server.name == name)


def test_a_follower_that_lags_never_shortens_what_is_read() -> None:
    """Read through the follower itself: a direct get is answered by the replica that is nearest."""
    short = 0
    with nats_cluster() as nodes:
        name = make_stream(nodes.servers[0], num_replicas=3)
        info = api(nodes.servers[0], f"STREAM.INFO.{name}")
        lagging = follower(nodes.servers, info)
        others = [server for server in nodes.servers if server is not lagging]
        for turn in range(ROUNDS):
            lagging.signal(signal.SIGSTOP)
            fill(others[0], name, BEHIND)
            lagging.signal(signal.SIGCONT)
            first = (turn + 1) * BEHIND - TAIL + 1
            options = ReadOptions(Access(servers=(lagging.url,)), name)
            short += probed(options, first) < TAIL
            assert list(range(first, first + TAIL)) == read_tail(options, info["created"], first)
            assert ask.READER_PREFIX not in "".join(api(others[0], f"CONSUMER.NAMES.{name}").get("consumers") or [])
            if short >= 3:
                break
    assert short, "the follower was never seen lagging: this run proves nothing"
