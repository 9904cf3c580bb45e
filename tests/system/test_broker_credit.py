"""A reader's credit where its partitions are at several nodes: one group, served in turn wherever its readers are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody, RetryPolicy
from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import connect
from oncewire.broker.engine import Consume, Limits, Settle
from oncewire.broker.jetstream.cell import Phase
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import unique
from tests.support.wait import until, until_async, within

LEASE_MS = 3_000
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@pytest.fixture
async def start(server: NatsServer) -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def one_node(**limits: Any) -> JetStreamEngine:
            client = await stack.enter_async_context(connect(server.url))
            engine = await open_jetstream(client, limits=Limits(**{"tick_ms": 10, **limits}), owner_lease_ms=LEASE_MS)
            stack.push_async_callback(engine.stop)
            return engine

        yield one_node


@pytest.fixture
async def nodes(start: Start) -> list[JetStreamEngine]:
    engines = [await start() for _ in range(3)]
    await until(lambda: all(len(engine.node.session.nodes) == 3 for engine in engines))
    return engines


async def answer(call: Callable[..., Any], *args: Any) -> Any:
    got = asyncio.get_running_loop().create_future()
    call(*args, got.set_result)
    return await within(got)


class Worker:
    """A stream's reader that works on one message after the other, and settles at any node."""

    def __init__(
        self, nodes: Sequence[JetStreamEngine], topic: str, owner: str, *, work_s: float = 0.0, room: int = 1_000
    ) -> None:
        self._nodes = nodes
        self._topic = topic
        self._work_s = work_s
        self._waiting: asyncio.Queue[Delivery] = asyncio.Queue()
        self._chance = random.Random(owner)
        self.owner = owner
        self.space = room
        self.subscription: Any = None
        self.out: set[tuple[int, int]] = set()
        self.most_out = 0
        self.runs: Counter[str] = Counter()
        self.got: list[Delivery] = []
        self.got_at: list[float] = []
        self.refused: list[str] = []

    async def join(self, node: JetStreamEngine, in_flight: int = 0, lease_ms: int = 60_000) -> Worker:
        consume = Consume(self._topic, "g", self.owner, lease_ms, in_flight)
        self.subscription = await answer(node.subscribe, "", consume, self)
        assert not isinstance(self.subscription, OncewireError)
        return self

    def room(self) -> int:
        return self.space

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        assert len(deliveries) <= self.space
        self.got += deliveries
        self.got_at += [time.monotonic()] * len(deliveries)
        for one in deliveries:
            self.out.add((one.partition, one.offset))
            self._waiting.put_nowait(one)
        self.most_out = max(self.most_out, len(self.out))

    def ended(self, error: OncewireError) -> None:
        pass

    async def settle(self, one: Delivery, act: Any = "ack", node: JetStreamEngine | None = None) -> Any:
        self.out.discard((one.partition, one.offset))
        settle = Settle(act, self._topic, "g", one.partition, one.offset, self.owner)
        return await answer((node or self._chance.choice(self._nodes)).settle, "", settle)

    async def work(self) -> None:
        while True:
            one = await self._waiting.get()
            await asyncio.sleep(self._work_s)
            self.runs[one.value] += 1
            refused = await self.settle(one)
            if refused is not None:
                self.refused.append(refused.message)


@contextlib.asynccontextmanager
async def working(workers: Sequence[Worker]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker.work()) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def topic_on(engine: JetStreamEngine, partitions: int) -> str:
    name = unique("topic")
    await answer(engine.create_topic, "", name, partitions)
    return name


async def produce(engine: JetStreamEngine, topic: str, values: Sequence[str], partitions: int, **envelope: Any) -> None:
    """One after the other into all partitions."""
    bodies = [
        ProduceBody(
            topic=topic, value=value, envelope=BrokerEnvelope(partition_override=number % partitions, **envelope)
        )
        for number, value in enumerate(values)
    ]
    answers = await answer(engine.produce_many, "", bodies)
    assert not [one for one in answers if isinstance(one, OncewireError)]


def owned(engine: JetStreamEngine, topic: str) -> set[int]:
    cells = engine.node.cells.values()
    return {cell.partition for cell in cells if cell.phase is Phase.OPEN and cell.topic.name == topic}


def runs_of(workers: Sequence[Worker]) -> Counter[str]:
    total: Counter[str] = Counter()
    for worker in workers:
        total += worker.runs
    return total


async def is_settled(engine: JetStreamEngine, topic: str) -> bool:
    return bool((await answer(engine.show_topic, "", topic)).groups[0].lag == 0)


@pytest.mark.parametrize("place", ["one at each node", "all at one that does not own it"])
@pytest.mark.parametrize("partitions", [1, 3, 8])
@pytest.mark.parametrize("when", ["live", "from a backlog"])
async def test_three_workers_share_the_work_of_a_group(
    nodes: list[JetStreamEngine], partitions: int, when: str, place: str
) -> None:
    topic = await topic_on(nodes[0], partitions)
    values = [f"v{number}" for number in range(90)]
    workers = [Worker(nodes, topic, owner, work_s=0.02) for owner in "abc"]
    if when == "from a backlog":
        await produce(nodes[0], topic, values, partitions)
    else:
        await produce(nodes[0], topic, ["first"], partitions)
    elsewhere = next(node for node in nodes if 0 not in owned(node, topic))
    async with working(workers):
        for worker, node in zip(workers, nodes, strict=True):
            await worker.join(node if place == "one at each node" else elsewhere)
        if when == "live":
            for number, value in enumerate(values):
                await produce(nodes[number % 3], topic, [value], 1 if partitions == 1 else partitions)
                await asyncio.sleep(0.007)  # about as much as three workers can do
        await until(lambda: set(values) <= runs_of(workers).keys())
    shares = [sum(worker.runs.values()) for worker in workers]
    assert max(shares) <= 1.5 * min(shares), shares
    assert {1} == set(runs_of(workers).values())
    assert max(worker.most_out for worker in workers) <= 2


@pytest.mark.parametrize("in_flight", [1, 2, 7])
async def test_a_reader_never_holds_more_than_its_credit_at_all_nodes_together_and_gets_everything(
    nodes: list[JetStreamEngine], in_flight: int
) -> None:
    topic = await topic_on(nodes[0], 8)
    values = [f"v{number}" for number in range(120)]
    await produce(nodes[0], topic, values, 8)
    worker = Worker(nodes, topic, "a")
    async with working([worker]):
        await worker.join(nodes[0], in_flight)
        await until(lambda: len(worker.runs) == 120)
    assert Counter(values) == worker.runs
    assert in_flight == worker.most_out
    assert [] == worker.refused


async def test_a_topic_shows_the_credit_of_all_readers_wherever_it_is_lent_to(nodes: list[JetStreamEngine]) -> None:
    topic = await topic_on(nodes[0], 8)
    for node, in_flight in zip(nodes, (1, 2, 20), strict=True):
        await Worker(nodes, topic, f"w{in_flight}").join(node, in_flight)

    async def is_shown() -> bool:
        shown = (await answer(nodes[1].show_topic, "", topic)).groups
        return [23] == [group.credit for group in shown]

    await until_async(is_shown)


async def test_one_partition_gets_nearly_all_of_a_reader_s_credit_when_the_others_have_nothing(
    nodes: list[JetStreamEngine],
) -> None:
    topic = await topic_on(nodes[0], 8)
    worker = await Worker(nodes, topic, "a").join(nodes[0], 30)
    await produce(nodes[0], topic, [f"v{number}" for number in range(60)], 1)
    await until(lambda: len(worker.out) >= 28)


async def test_all_partitions_have_their_turn_though_the_first_has_a_backlog(nodes: list[JetStreamEngine]) -> None:
    topic = await topic_on(nodes[0], 8)
    await produce(nodes[0], topic, [f"old{number}" for number in range(400)], 1)
    worker = Worker(nodes, topic, "a", work_s=0.005)
    async with working([worker]):
        await worker.join(nodes[0], 1)
        await until(lambda: worker.runs)
        await produce(nodes[0], topic, [f"new{number}" for number in range(8)], 8)
        await until(lambda: all(f"new{number}" in worker.runs for number in range(1, 8)))
    assert sum(worker.runs.values()) < 400


async def test_a_reader_whose_lease_ended_has_one_message_at_all_nodes_together(nodes: list[JetStreamEngine]) -> None:
    topic = await topic_on(nodes[0], 8)
    await produce(nodes[0], topic, [f"v{number}" for number in range(16)], 8)
    worker = await Worker(nodes, topic, "a").join(nodes[0], 8, lease_ms=300)
    await until(lambda: len(worker.got_at) >= 14)
    assert [1] * 8 == [one.attempts for one in worker.got[:8]]
    again = worker.got_at[8:]
    assert all(later - earlier > 0.2 for earlier, later in itertools.pairwise(again)), "two were out at a time"


async def test_a_late_reader_has_all_its_credit_again_when_it_settles_something_at_any_node(
    nodes: list[JetStreamEngine],
) -> None:
    topic = await topic_on(nodes[0], 8)
    await produce(nodes[0], topic, [f"v{number}" for number in range(30)], 8)
    worker = await Worker(nodes, topic, "a").join(nodes[0], 8, lease_ms=300)
    await until(lambda: any(one.attempts > 1 for one in worker.got))
    async with working([worker]):
        await until(lambda: len(worker.runs) == 30)
        await until_async(lambda: is_settled(nodes[0], topic))


async def test_the_credit_that_an_owner_had_when_it_died_is_not_lost(start: Start, server: NatsServer) -> None:
    """Nor when its partitions went to a node that came."""
    one = await start()
    topic = await topic_on(one, 8)
    values = [f"v{number}" for number in range(40)]
    worker = await Worker([one], topic, "a").join(one, 4)
    async with connect(server.url) as dying:
        two = await open_jetstream(dying, limits=Limits(tick_ms=10), owner_lease_ms=LEASE_MS)
        await produce(one, topic, values, 8)
        await until(lambda: owned(two, topic) and len(worker.out) >= 4)
    try:
        async with working([worker]):
            await until(lambda: set(values) == worker.runs.keys())
            await until(lambda: owned(one, topic) == set(range(8)))
            await until_async(lambda: is_settled(one, topic))
        await produce(one, topic, [f"w{number}" for number in range(16)], 8)
        await until(lambda: len(worker.out) == 4)
    finally:
        await two.stop()


async def test_the_credit_that_was_out_where_partitions_moved_away_is_not_lost(start: Start) -> None:
    """Their old owner has others still, and the reader's credit for them."""
    one = await start()
    topic = await topic_on(one, 16)
    worker = await Worker([one], topic, "a").join(one, 16)
    await produce(one, topic, [f"v{number}" for number in range(48)], 16)
    await until(lambda: len(worker.out) == 16)
    two = await start()
    await until(lambda: owned(one, topic) and owned(two, topic) and len(owned(one, topic) | owned(two, topic)) == 16)
    async with working([worker]):
        await until_async(lambda: is_settled(one, topic))
    worker.out.clear()
    await produce(one, topic, [f"w{number}" for number in range(48)], 16)
    await until(lambda: len(worker.out) == 16)


async def test_a_slow_client_of_another_node_is_bounded_and_resumes(nodes: list[JetStreamEngine]) -> None:
    topic = await topic_on(nodes[0], 1)
    await produce(nodes[0], topic, [f"v{number}" for number in range(50)], 1)
    elsewhere = next(node for node in nodes if not owned(node, topic))
    worker = Worker(nodes, topic, "a", room=3)
    original = worker.deliver

    def deliver(deliveries: Sequence[Delivery]) -> None:
        original(deliveries)
        worker.space -= len(deliveries)

    worker.deliver = deliver  # type: ignore[method-assign]
    await worker.join(elsewhere, 1_000)
    await until(lambda: len(worker.got) == 3)
    for space in (10, 1_000):
        worker.space = space
        worker.subscription.resume()
        await until(lambda: not worker.space or len(worker.got) == 50)
    assert [f"v{number}" for number in range(50)] == [one.value for one in worker.got]


async def test_what_comes_to_a_reader_that_has_gone_counts_no_attempt(nodes: list[JetStreamEngine]) -> None:
    topic = await topic_on(nodes[0], 1)
    await produce(nodes[0], topic, ["first"], 1, retry_policy=RetryPolicy(max_attempts=1))
    owner = next(node for node in nodes if owned(node, topic))
    elsewhere = next(node for node in nodes if node is not owner)
    gone = await Worker(nodes, topic, "gone").join(elsewhere, 100)
    await until(lambda: gone.got)
    assert None is await gone.settle(gone.got[0])
    (guest,) = [guest for guest in owner.node._guests.values() if guest.node == elsewhere.node.node]
    fan = elsewhere.node.fans.pop(guest.number)  # it is gone, and its owner has not heard of it yet
    await produce(nodes[0], topic, [f"v{number}" for number in range(20)], 1, retry_policy=RetryPolicy(max_attempts=1))
    worker = await Worker(nodes, topic, "a").join(nodes[0], 100)
    await until(lambda: len(worker.got) == 20)
    assert {1} == {one.attempts for one in worker.got}
    assert 1 == len(gone.got)
    fan.close()


async def test_a_delivery_whose_answer_is_lost_does_not_stop_the_reader(
    nodes: list[JetStreamEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's connection breaks: what it was doing for the reader is forgotten, and the reader attaches anew."""
    topic = await topic_on(nodes[0], 1)
    await produce(nodes[0], topic, ["first"], 1)
    owner = next(node for node in nodes if owned(node, topic))
    elsewhere = next(node for node in nodes if node is not owner)
    worker = Worker(nodes, topic, "a")
    async with working([worker]):
        await worker.join(elsewhere, 5)
        await until(lambda: worker.runs)
        owner.node.link.on_lost("for the test")
        monkeypatch.setattr(owner.node.link, "_on_answers", lambda *_: None)
        await produce(elsewhere, topic, ["second"], 1)
        await until(lambda: "second" in worker.runs)
        monkeypatch.undo()
        owner.node.link.on_lost("for the test")
        await produce(elsewhere, topic, [f"v{number}" for number in range(20)], 1)
        await until(lambda: all(f"v{number}" in worker.runs for number in range(20)))
