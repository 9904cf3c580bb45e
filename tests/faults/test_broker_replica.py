"""A node whose NATS server stood still and is behind: what it takes over it reads up to where the leader is.

A direct get is answered by the replica that is nearest, here the one that lags. How far there is something to read is
asked of the leader, so nothing that was acknowledged is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from oncewire._ground import topology
from oncewire._ground.contracts import topics
from oncewire._ground.contracts.broker import ProduceBody
from oncewire._ground.errors import NotFound, OncewireError, Unavailable
from oncewire._ground.jetstream import Client, connect
from oncewire._ground.topology import Env
from oncewire.broker.engine import Consume, Limits, Produced
from oncewire.broker.jetstream import names
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from tests.support.broker import Reader
from tests.support.nats import Cluster, NatsServer, nats_cluster
from tests.support.streams import unique
from tests.support.wait import until, until_async

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

ROUNDS = 20
SEEN = 3
PAGE, PAGES = 1_000, 8
VALUE = "x" * 1_000
LEASE_MS = 20_000
READ_S = 60.0
LIMITS = Limits(in_flight_max=10**6, partition_bytes_max=10**9)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with nats_cluster() as three:
        yield three


async def asked(call: Any, *args: Any) -> Any:
    got = asyncio.get_running_loop().create_future()
    call(*args, got.set_result)
    async with asyncio.timeout(READ_S):
        return await got


@contextlib.asynccontextmanager
async def node(server: NatsServer) -> AsyncIterator[JetStreamEngine]:
    async with connect(server.url) as client:
        declared = topology.load(env=Env.PROD)
        engine = await open_jetstream(client, limits=LIMITS, owner_lease_ms=LEASE_MS, declared=declared)
        try:
            yield engine
        finally:
            await engine.stop()


async def led_elsewhere(client: Client, stream: str, name: str) -> bool:
    """Whether another server leads the stream; asks for another leader if not."""
    leader = ""
    with contextlib.suppress(Unavailable):  # it is being elected
        info = await client.api(f"STREAM.INFO.{stream}")
        leader = info.get("cluster", {}).get("leader", "")
        if leader == name:
            await client.api(f"STREAM.LEADER.STEPDOWN.{stream}")
    return leader not in ("", name)


async def topic_of(first: JetStreamEngine, second: JetStreamEngine) -> str:
    """A topic whose one partition is the first node's."""
    nodes = [first.node.node, second.node.node]
    await until(lambda: len(first.node.session.nodes) == len(second.node.session.nodes) == 2)
    for name in (unique("behind") for _ in itertools.count()):
        await asked(first.create_topic, "", name, 1)
        if names.preferred(nodes, first.node.catalog.topics["", name].number, 0) == first.node.node:
            await until(lambda name=name: ("", name) in second.node.catalog.topics)  # type: ignore[misc]
            return name
    raise AssertionError("unreachable")


async def stands_at(client: Client, stream: str, subject: str) -> int:
    """The last message that the nearest replica knows."""
    with contextlib.suppress(NotFound):
        return (await client.get_last(stream, subject)).sequence
    return 0


async def is_behind(steady: NatsServer, lagging: NatsServer) -> bool:
    """One takeover at a server that stood still; whether it was seen to be behind."""
    async with node(steady) as first, node(lagging) as second, connect(lagging.url) as near:
        topic = await topic_of(first, second)
        listed = first.node.catalog.topics["", topic]
        assert isinstance(await asked(first.produce, "", ProduceBody(topic=topic, value="first")), Produced)
        for stream in (listed.stream, topics.RECORDS, topics.SNAPSHOTS, f"KV_{names.LEASES}", f"KV_{names.TOPICS}"):
            await until_async(lambda stream=stream: led_elsewhere(first.node.client, stream, lagging.name))  # type: ignore[misc]
        values = ["first"]
        lagging.signal(signal.SIGSTOP)
        try:
            for page in range(PAGES):
                values += [f"{page} {number} {VALUE}" for number in range(PAGE)]
                bodies = [ProduceBody(topic=topic, value=value) for value in values[-PAGE:]]
                told = await asked(first.produce_many, "", bodies)
                assert all(isinstance(one, Produced) for one in told)
            await first.stop()
        finally:
            lagging.signal(signal.SIGCONT)
        reader = Reader()
        joining = asyncio.create_task(asked(second.subscribe, "", Consume(topic, "g", "b", 600_000, 100_000), reader))
        seen = await stands_at(near, listed.stream, f"{listed.prefix}.0")
        assert not isinstance(await joining, OncewireError)
        with contextlib.suppress(AssertionError):
            await until(lambda: len(reader.got) >= len(values), deadline_s=READ_S)
        assert len(values) == len(reader.got)
        assert values == reader.values
        return seen < len(values)


async def test_a_node_whose_replica_lags_delivers_all_that_is_stored(cluster: Cluster) -> None:
    steady, _, lagging = cluster.servers
    behind = 0
    for _ in range(ROUNDS):
        behind += await is_behind(steady, lagging)
        if behind == SEEN:
            break
    assert behind, "the replica was never seen lagging: this run proves nothing"
