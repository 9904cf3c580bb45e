"""A worker's key is one operation in its topic, whatever nodes own the partitions of its messages and of its entry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody
from oncewire._ground.errors import ContractViolation, OncewireError, Unavailable
from oncewire._ground.jetstream import connect
from oncewire.broker.engine import Consume, Idempotency, Limits, Settle
from oncewire.broker.idempotency import identity_of
from oncewire.broker.jetstream.cell import Cell
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from tests.support.broker import Reader
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import unique
from tests.support.wait import until, within

LEASE_MS = 1_000
PARTITIONS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


class Place:
    """Two nodes and a topic of which both own a part."""

    def __init__(self, one: JetStreamEngine, two: JetStreamEngine, topic: str) -> None:
        self.one, self.two, self.topic = one, two, topic
        self.reader = Reader()
        self.subscription: Any = None

    def cell(self, engine: JetStreamEngine, number: int = 0) -> Cell:
        """One of the partitions that a node owns."""
        return sorted(engine.node.cells.values(), key=lambda cell: cell.partition)[number]

    def key(self, home: int) -> str:
        """A key whose entry is kept in that partition."""
        topic = self.cell(self.one).held
        return next(key for n in range(1_000) if topic.home_of(identity_of("", key := f"k{n}")) == home)

    async def message(self, partition: int) -> Delivery:
        """A new one there, delivered."""
        body = ProduceBody(topic=self.topic, value="v", envelope=BrokerEnvelope(partition_override=partition))
        count = len(self.reader.got)
        await asked(self.one.produce, "", body)
        await until(lambda: len(self.reader.got) > count)
        return self.reader.got[-1]

    async def step(self, act: Any, one: Delivery, key: str) -> Any:
        """What became of the key: its status, or "elsewhere". Asked again where an owner died with the question."""
        step = Idempotency(act, self.topic, "g", "a", one.partition, one.offset, key)
        while isinstance(answer := await asked(self.one.idempotency, "", step), Unavailable):
            pass
        if isinstance(answer, ContractViolation):
            assert "already in-flight" in answer.message
            return "elsewhere"
        return answer.message if isinstance(answer, OncewireError) else answer.status

    async def ack(self, one: Delivery) -> None:
        settle = Settle("ack", self.topic, "g", one.partition, one.offset, "a")
        while isinstance(answer := await asked(self.one.settle, "", settle), Unavailable):
            pass
        assert answer is None


async def asked(call: Callable[..., Any], *args: Any) -> Any:
    got = asyncio.get_running_loop().create_future()
    call(*args, got.set_result)
    return await within(got)


@contextlib.asynccontextmanager
async def place(url: str, **limits: Any) -> AsyncIterator[Place]:
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            client = await stack.enter_async_context(connect(url))
            settings = Limits(**{"tick_ms": 10, **limits})
            engine = await open_jetstream(client, limits=settings, owner_lease_ms=LEASE_MS)
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        await until(lambda: all(len(engine.node.session.nodes) == 2 for engine in engines))
        found = Place(engines[0], engines[1], unique("keys"))
        while not all(len(engine.node.cells) > 1 for engine in engines):  # else chance gave one too few
            found.topic = unique("keys")
            await asked(engines[0].create_topic, "", found.topic, PARTITIONS)
            consume = Consume(found.topic, "g", "a", 60_000, 1_000)
            found.subscription = await asked(engines[0].subscribe, "", consume, found.reader)
        yield found


async def test_a_key_is_begun_once_and_done_once(server: NatsServer) -> None:
    """With the entry at the first message's partition, at the second's, and at others of both nodes."""
    async with place(server.url) as here:
        p, q = here.cell(here.one).partition, here.cell(here.two).partition
        first, second = await here.message(p), await here.message(q)
        for home in (p, q, here.cell(here.one, 1).partition, here.cell(here.two, 1).partition):
            key = here.key(home)
            assert "PENDING" == await here.step("begin", first, key)
            assert "elsewhere" == await here.step("begin", second, key)
            assert "elsewhere" == await here.step("success", second, key)
            assert "COMMITTED" == await here.step("success", first, key)
            assert "COMMITTED" == await here.step("begin", second, key)


async def test_an_ack_is_done_where_the_key_is_kept(server: NatsServer) -> None:
    async with place(server.url) as here:
        p, q = here.cell(here.one).partition, here.cell(here.two).partition
        for home in (p, q, here.cell(here.two, 1).partition):
            first, second = await here.message(p), await here.message(q)
            key = here.key(home)
            assert "PENDING" == await here.step("begin", first, key)
            await here.ack(first)
            assert "COMMITTED" == await here.step("begin", second, key)


async def test_a_key_outlives_the_owner_of_its_entry(server: NatsServer) -> None:
    """The worker has its lease from another owner, who is alive: nobody else may begin."""
    async with place(server.url) as here:
        first, second = (
            await here.message(here.cell(here.one).partition),
            await here.message(here.cell(here.one, 1).partition),
        )
        key = here.key(here.cell(here.two).partition)
        assert "PENDING" == await here.step("begin", first, key)
        await here.two.node.client.close()
        assert "elsewhere" == await here.step("begin", second, key)
        await here.ack(first)
        assert "COMMITTED" == await here.step("begin", second, key)


async def test_a_key_is_free_when_the_owner_of_its_message_is_gone(server: NatsServer) -> None:
    """The lease went with it."""
    async with place(server.url) as here:
        first, second = (
            await here.message(here.cell(here.two).partition),
            await here.message(here.cell(here.one).partition),
        )
        key = here.key(here.cell(here.one, 1).partition)
        assert "PENDING" == await here.step("begin", first, key)
        here.subscription.close()  # else the next owner gives it to the same worker again, who may begin anew
        await here.two.node.client.close()
        assert "PENDING" == await here.step("begin", second, key)


async def test_an_entry_goes_with_its_message(server: NatsServer) -> None:
    async with place(server.url, idempotency_ttl_ms=100, settled_age_ms=0) as here:
        first = await here.message(here.cell(here.two).partition)
        home = here.cell(here.one)
        assert "COMMITTED" == await here.step("success", first, here.key(home.partition))
        assert 1 == home.state.entries
        await here.ack(first)
        await until(lambda: home.state.entries == 0)
