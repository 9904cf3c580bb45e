"""Several nodes of the broker over one NATS server: any of them serves every topic."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from oncewire._ground.contracts import topics
from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody, RetryPolicy
from oncewire._ground.errors import OncewireError, Unavailable
from oncewire._ground.jetstream import Client, connect
from oncewire.broker.engine import Consume, Limits, Produced, Settle, TooManyReaders
from oncewire.broker.jetstream import cell, names
from oncewire.broker.jetstream.cell import Phase
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from oncewire.broker.jetstream.takeover import FIRST_PAGE
from tests.support.broker import Reader
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import unique
from tests.support.wait import until, until_async, within

LEASE_MS = 3_000


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@pytest.fixture
async def nodes(server: NatsServer) -> AsyncIterator[Callable[..., Any]]:
    """Starts nodes, each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**limits: Any) -> JetStreamEngine:
            client = await stack.enter_async_context(connect(server.url))
            settings = Limits(**{"tick_ms": 10, **limits})
            engine = await open_jetstream(client, limits=settings, owner_lease_ms=LEASE_MS)
            stack.push_async_callback(engine.stop)
            return engine

        yield start


async def answer(call: Callable[..., Any], *args: Any) -> Any:
    got = asyncio.get_running_loop().create_future()
    call(*args, got.set_result)
    return await within(got)


async def produce(engine: JetStreamEngine, topic: str, *values: str, **envelope: Any) -> list[Any]:
    sent = BrokerEnvelope(**envelope) if envelope else None
    bodies = [ProduceBody(topic=topic, value=value, key=value, envelope=sent) for value in values]
    return list(await answer(engine.produce_many, "", bodies))


async def ack(engine: JetStreamEngine, topic: str, one: Delivery, owner: str = "a") -> Any:
    return await answer(engine.settle, "", Settle("ack", topic, "g", one.partition, one.offset, owner))


async def nack(engine: JetStreamEngine, topic: str, one: Delivery) -> Any:
    return await answer(engine.settle, "", Settle("nack", topic, "g", one.partition, one.offset, "a", "broken"))


async def read(engine: JetStreamEngine, topic: str, owner: str = "a", in_flight: int = 10_000) -> Reader:
    reader = Reader()
    joined = await answer(engine.subscribe, "", Consume(topic, "g", owner, 60_000, in_flight), reader)
    assert not isinstance(joined, OncewireError), joined
    return reader


async def spread(*engines: JetStreamEngine) -> None:
    """Until all nodes know each other."""
    await until(lambda: all(len(engine.node.session.nodes) == len(engines) for engine in engines))


def owned(engine: JetStreamEngine) -> set[int]:
    return {cell.partition for cell in engine.node.cells.values() if cell.phase is Phase.OPEN}


async def topic_on(engine: JetStreamEngine, partitions: int = 8) -> str:
    name = unique("topic")
    await answer(engine.create_topic, "", name, partitions)
    return name


def stream_of(engine: JetStreamEngine, topic: str) -> str:
    return engine.node.catalog.topics["", topic].stream


async def test_a_message_goes_in_at_one_node_out_at_another_and_is_settled_at_a_third(nodes: Any) -> None:
    one, two, three = [await nodes() for _ in range(3)]
    await spread(one, two, three)
    topic = await topic_on(one)
    values = [f"v{n}" for n in range(100)]
    stored = await produce(one, topic, *values)
    assert all(isinstance(each, Produced) for each in stored)
    reader = await read(two, topic)
    await until(lambda: len(reader.got) == 100)
    assert set(values) == set(reader.values)
    assert [None] * 100 == [await ack(three, topic, each) for each in reader.got]
    shown = await answer(three.show_topic, "", topic)
    assert (100, 0, 0) == (shown.messages, shown.groups[0].lag, shown.groups[0].in_flight)


async def test_one_reader_too_many_is_refused_by_whichever_node_owns_the_partition(nodes: Any) -> None:
    """Not taken for an owner that is away, which the node would ask again and again."""
    one, two = await nodes(subscriptions_max=1), await nodes(subscriptions_max=1)
    await spread(one, two)
    topic = await topic_on(one)
    await read(one, topic)
    assert owned(one)
    assert owned(two)
    for engine in (one, two):
        refused = await answer(engine.subscribe, "", Consume(topic, "g", "b", 60_000), Reader())
        assert isinstance(refused, TooManyReaders)


async def test_partitions_are_spread_over_the_nodes_and_each_has_one_owner(nodes: Any) -> None:
    one, two, three = [await nodes() for _ in range(3)]
    await spread(one, two, three)
    topic = await topic_on(one, 24)
    await read(one, topic)
    parts = [owned(engine) for engine in (one, two, three)]
    assert all(parts)
    assert set(range(24)) == parts[0] | parts[1] | parts[2]
    assert 24 == sum(map(len, parts))


def slower_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """Each is answered sooner than the one before it, as by replicas that are differently busy."""
    left = 100

    async def late(*args: Any) -> Any:
        nonlocal left
        left -= 1
        await asyncio.sleep(max(left, 0) * 0.001)
        return await call(*args)

    return late


async def test_what_is_produced_together_keeps_its_order_while_the_owner_is_looked_for(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    for engine in (one, two):
        monkeypatch.setattr(engine.node.taker, "owner_of", slower_first(engine.node.taker.owner_of))
        topic = await topic_on(engine, 1)
        stored = await produce(engine, topic, *(f"v{n}" for n in range(100)))
        assert list(range(100)) == [one.offset for one in stored]


async def test_what_is_produced_together_keeps_its_order_at_an_owner_that_has_just_heard_of_the_topic(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    topics_of_two = two.node.catalog.numbered
    while True:
        topic = await topic_on(one, 1)
        number = one.node.catalog.topics["", topic].number
        if names.preferred(one.node.session.nodes, number, 0) == two.node.node:
            break
    await until(lambda: number in topics_of_two)
    listed = topics_of_two.pop(number)

    async def hear() -> None:
        topics_of_two[number] = listed

    monkeypatch.setattr(two.node.catalog, "catch_up", slower_first(hear))
    stored = await produce(one, topic, *(f"v{n}" for n in range(100)))
    assert {0} == owned(two)
    assert list(range(100)) == [one.offset for one in stored]


async def test_what_nobody_uses_is_owned_by_nobody(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    for _ in range(20):
        await topic_on(one)
    assert {} == one.node.cells | two.node.cells


async def test_a_node_that_comes_gets_its_share_and_nothing_is_lost_or_doubled(nodes: Any) -> None:
    one = await nodes()
    topic = await topic_on(one)
    reader = await read(one, topic)
    await produce(one, topic, *(f"a{n}" for n in range(50)))
    await until(lambda: len(reader.got) == 50)
    await asyncio.gather(*(ack(one, topic, each) for each in reader.got))
    two = await nodes()
    await until(lambda: owned(two))
    stored = await produce(two, topic, *(f"b{n}" for n in range(50)))
    assert all(isinstance(each, Produced) for each in stored), stored
    await until(lambda: len(reader.got) >= 100)
    assert {f"a{n}" for n in range(50)} | {f"b{n}" for n in range(50)} == set(reader.values)
    assert 100 == len(reader.got)


async def test_a_node_that_leaves_hands_over_what_is_settled(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    topic = await topic_on(one)
    reader = await read(one, topic)
    await produce(one, topic, *(f"v{n}" for n in range(60)))
    await until(lambda: len(reader.got) == 60)
    assert [None] * 30 == await asyncio.gather(*(ack(one, topic, each) for each in reader.got[:30]))
    settled = {each.value for each in reader.got[:30]}
    await two.stop()
    await until(lambda: owned(one) == set(range(8)))
    again = await read(one, topic, "b")
    await until(lambda: {each.value for each in [*reader.got, *again.got]} == {f"v{n}" for n in range(60)})
    assert not settled & ({each.value for each in reader.got[60:]} | set(again.values))


async def test_a_message_that_comes_while_older_ones_are_read_is_held_once(nodes: Any) -> None:
    """More than the first page waits, and one more is stored when the new owner has just begun to read the rest."""
    one = await nodes()
    topic = await topic_on(one, 1)
    await answer(one.subscribe, "", Consume(topic, "g", "a", 60_000, 1_000), Reader(room=0))
    await produce(one, topic, *(f"v{n}" for n in range(FIRST_PAGE + 50)))
    await one.stop()
    two = await nodes()
    late: list[asyncio.Task[Any]] = []

    def on_step(name: str) -> None:
        if name == "open":
            late.append(asyncio.create_task(produce(two, topic, "late")))

    two.node.on_step = on_step
    reader = await read(two, topic)
    await until(lambda: "late" in reader.values or len(reader.got) == two.limits.in_flight_max)
    for got in list(reader.got):
        assert None is await ack(two, topic, got)
    await until(lambda: "late" in reader.values)
    assert FIRST_PAGE + 51 == (await answer(two.show_topic, "", topic)).messages
    for each in await asyncio.gather(*late):
        assert isinstance(each[0], Produced)


async def test_what_a_new_owner_has_not_read_yet_is_not_counted(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the first page waits, and all but that page is read while requests are served."""
    one = await nodes()
    topic = await topic_on(one, 1)
    reader = await read(one, topic)
    await produce(one, topic, *(f"v{n}" for n in range(FIRST_PAGE + 50)))
    await until(lambda: len(reader.got) == one.limits.in_flight_max)
    settled = reader.got[5:]
    assert {None} == {await ack(one, topic, each) for each in settled}
    await one.stop()
    two = await nodes()
    going_on, read_up_to = asyncio.Event(), two.node.taker._read_up_to

    async def held_up(*args: Any, **options: Any) -> int:
        await going_on.wait()
        return await read_up_to(*args, **options)

    monkeypatch.setattr(two.node.taker, "_read_up_to", held_up)
    shown = await answer(two.show_topic, "", topic)
    assert (None, None, None) == (shown.messages, shown.bytes, shown.groups[0].lag)
    assert (None, None) == (shown.partitions[0].newest_offset, shown.groups[0].partitions[0].lag)
    (stats,) = two.stats().topics
    assert (None, None) == (stats.messages, stats.groups[0][2][0].lag)
    going_on.set()

    async def is_known() -> bool:
        return (await answer(two.show_topic, "", topic)).messages is not None

    await until_async(is_known)
    shown = await answer(two.show_topic, "", topic)
    assert (FIRST_PAGE + 50, FIRST_PAGE + 50 - len(settled)) == (shown.messages, shown.groups[0].lag)


async def test_a_node_that_dies_is_replaced_within_its_lease(nodes: Any, server: NatsServer) -> None:
    one = await nodes()
    async with connect(server.url) as dying:
        two = await open_jetstream(dying, limits=Limits(tick_ms=10), owner_lease_ms=LEASE_MS)
        await spread(one, two)
        topic = await topic_on(one)
        reader = await read(one, topic)
        await produce(one, topic, *(f"v{n}" for n in range(40)))
        await until(lambda: len(reader.got) == 40)
        assert owned(two)
        await asyncio.gather(*(ack(one, topic, each) for each in reader.got))
    try:  # its connection is gone, and with it all that it could say
        await until(lambda: owned(one) == set(range(8)))
        await produce(one, topic, "last")
        await until(lambda: "last" in reader.values)
        assert 41 == len(reader.got), "what was settled came again"
    finally:
        await two.stop()


async def test_a_key_is_used_once_whatever_node_and_partition(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    topic = await topic_on(one)
    first = await asyncio.gather(
        *(produce(engine, topic, value, idempotency_key="k") for engine in (one, two) for value in "abcdef")
    )
    stored = [each for (each,) in first if isinstance(each, Produced) and not each.is_duplicate]
    assert 1 == len(stored)
    shown = await answer(two.show_topic, "", topic)
    assert 1 == shown.messages


async def test_a_routed_key_is_used_once_under_the_topic_that_was_named(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    named, left, right = [await topic_on(one, 2) for _ in range(3)]
    (stored,) = await produce(one, named, "v", idempotency_key="k", target_topic=left)
    (again,) = await produce(two, named, "v", idempotency_key="k", target_topic=right)
    (direct,) = await produce(two, named, "v", idempotency_key="k")
    assert (False, True, True) == (stored.is_duplicate, again.is_duplicate, direct.is_duplicate)
    counts = [(await answer(one.show_topic, "", topic)).messages for topic in (named, left, right)]
    assert [0, 1, 0] == counts


async def test_a_dead_letter_crosses_nodes_once(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    topic = await topic_on(one, 8)
    reader = await read(one, topic)
    await produce(one, topic, *(f"v{n}" for n in range(16)), retry_policy=RetryPolicy(max_attempts=1))
    await until(lambda: len(reader.got) == 16)
    for each in reader.got:
        assert None is await nack(two, topic, each)
    shown = await answer(two.show_topic, "", f"dlq.{topic}")
    assert 16 == shown.messages
    letters = await read(two, f"dlq.{topic}")
    await until(lambda: len(letters.got) == 16)
    assert {topic} == {each.envelope.dlq.original_topic for each in letters.got if each.envelope and each.envelope.dlq}


async def test_a_dead_letter_makes_the_stream_that_a_crash_left_out(nodes: Any, server: NatsServer) -> None:
    """The topic of dead letters is in the list of topics, and whoever put it there died before its stream was made."""
    one = await nodes()
    topic = await topic_on(one, 1)
    reader = await read(one, topic)
    await produce(one, topic, "v", retry_policy=RetryPolicy(max_attempts=1))
    await until(lambda: len(reader.got) == 1)
    await answer(one.create_topic, "", f"dlq.{topic}", 1)
    async with connect(server.url) as client:
        await client.api(f"STREAM.DELETE.{stream_of(one, f'dlq.{topic}')}")
    assert None is await nack(one, topic, reader.got[0])
    letters = await read(one, f"dlq.{topic}")
    await until(lambda: letters.values == ["v"])


async def test_a_dead_letter_does_not_overtake_the_stream_that_another_one_makes(nodes: Any) -> None:
    one = await nodes()
    topic = await topic_on(one, 1)
    reader = await read(one, topic)
    await produce(one, topic, "v", "w", retry_policy=RetryPolicy(max_attempts=1))
    await until(lambda: len(reader.got) == 2)
    second: list[asyncio.Task[Any]] = []

    def on_step(name: str) -> None:
        if name == "entry":
            second.append(asyncio.create_task(nack(one, topic, reader.got[1])))

    one.node.on_step = on_step
    assert None is await nack(one, topic, reader.got[0])
    assert [None] == [await each for each in second]
    letters = await read(one, f"dlq.{topic}")
    await until(lambda: sorted(letters.values) == ["v", "w"])
    info = await one.node.client.api(f"STREAM.INFO.{stream_of(one, f'dlq.{topic}')}")
    assert one.limits.dead_letter_age_ms * 1_000_000 == info["config"]["duplicate_window"]


async def test_a_message_whose_dead_letter_cannot_be_stored_is_unsettled_and_comes_again(
    nodes: Any, server: NatsServer
) -> None:
    one = await nodes()
    topic = await topic_on(one, 1)
    reader = await read(one, topic)
    await produce(one, topic, "v", retry_policy=RetryPolicy(max_attempts=1))
    await until(lambda: len(reader.got) == 1)
    async with connect(server.url) as client:
        in_the_way = {"name": unique("OTHER"), "subjects": [f"owb.=.{topics.token(f'dlq.{topic}')}.>"]}
        await client.api(f"STREAM.CREATE.{in_the_way['name']}", in_the_way)
        refused = await nack(one, topic, reader.got[0])
        assert isinstance(refused, Unavailable)
        assert [refused.message] == one.problems()
        await one.stop()
        two = await nodes()
        again = await read(two, topic)
        await until(lambda: again.values == ["v"])
        await client.api(f"STREAM.DELETE.{in_the_way['name']}")
    assert None is await nack(two, topic, again.got[0])
    letters = await read(two, f"dlq.{topic}")
    await until(lambda: letters.values == ["v"])


async def test_a_poll_takes_from_another_node_no_more_than_it_asked_for(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    topic = await topic_on(one, 8)
    await produce(one, topic, *(f"v{n}" for n in range(40)))
    got: list[Delivery] = []

    async def poll() -> bool:
        found: Any = None
        done = asyncio.get_running_loop().create_future()
        one.take("", Consume(topic, "g", "a", 60_000), 3, 50, done.set_result)
        found = await within(done)
        assert isinstance(found, list)
        assert len(found) <= 3
        got.extend(found)
        return len(got) >= 40

    await until_async(poll)
    assert {f"v{n}" for n in range(40)} == {each.value for each in got}
    assert 40 == len(got)


async def test_a_node_that_hears_nothing_of_another_takes_nothing_from_it(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    topic = await topic_on(one, 16)
    await produce(one, topic, *(f"v{n}" for n in range(100)))
    before = owned(one), owned(two)
    assert all(before)
    two.node.session._peers.clear()  # as after a watch that broke
    stored = await produce(two, topic, *(f"w{n}" for n in range(100)))
    assert all(isinstance(each, Produced) for each in stored)
    assert before == (owned(one), owned(two))


async def test_a_snapshot_follows_one_that_its_owner_does_not_know(nodes: Any, monkeypatch: Any) -> None:
    """Its answer was lost, or a replica told of an older one."""
    monkeypatch.setattr(cell, "SNAPSHOT_RECORDS", 5)
    one = await nodes()
    topic = await topic_on(one, 1)
    reader = await read(one, topic)
    (at,) = one.node.cells.values()

    async def is_written() -> bool:
        (stored,) = await produce(one, topic, "v")
        await until(lambda: reader.got and reader.got[-1].offset == stored.offset)
        assert None is await ack(one, topic, reader.got[-1])
        return at.snapshot_sequence not in (0, known)

    known = 0
    await until_async(is_written)
    known, at.snapshot_sequence = at.snapshot_sequence, 0
    await until_async(is_written)
    assert known < at.snapshot_sequence


async def test_a_group_that_settled_something_in_one_partition_is_kept_in_all(nodes: Any) -> None:
    """Each partition has its own owner, and most of them have seen it settle nothing."""
    one, two = [await nodes(group_trial_ms=500) for _ in range(2)]
    await spread(one, two)
    topic = await topic_on(one)

    async def take(group: str) -> list[Delivery]:
        consume = Consume(topic, group, "a", 60_000 if group == "g" else 1)
        return list(await answer(lambda done: one.take("", consume, 100, 0, done)))

    async def groups() -> dict[str, int]:
        shown = await answer(two.show_topic, "", topic)
        return {group.name: len(group.partitions) for group in shown.groups}

    await produce(one, topic, "first")
    assert ["first"] == [each.value for each in await take("g")]
    first = (await answer(one.show_topic, "", topic)).groups[0]
    (place,) = [part.partition for part in first.partitions if part.in_flight]
    assert None is await answer(one.settle, "", Settle("ack", topic, "g", place, 0, "a"))
    for group in ("g", "typo"):
        await take(group)
    await until_async(lambda: is_equal(groups, {"g": 8}))
    await one.stop()
    one = two
    await take("typo")
    await until_async(lambda: is_equal(groups, {"g": 8}))


async def is_equal(call: Callable[[], Any], expected: object) -> bool:
    return bool(await call() == expected)


async def test_a_deleted_topic_is_gone_everywhere_and_its_name_is_free(nodes: Any) -> None:
    one, two = await nodes(), await nodes()
    await spread(one, two)
    topic = await topic_on(one)
    reader = await read(two, topic)
    await produce(one, topic, "a")
    await until(lambda: reader.got)
    assert None is await answer(one.delete_topic, "", topic)
    await until(lambda: reader.end)
    await answer(two.create_topic, "", topic, 2)
    shown = await answer(one.show_topic, "", topic)
    assert (0, 2, ()) == (shown.messages, len(shown.partitions), shown.groups)
    assert topic in await answer(one.list_topics, "")


async def test_a_commit_that_nobody_confirmed_is_looked_up(nodes: Any, server: NatsServer) -> None:
    """The server dies with publishes on their way: afterwards each message is there whole or not at all."""
    one = await nodes()
    topic = await topic_on(one, 1)
    reader = await read(one, topic)
    await produce(one, topic, "before")
    tries = [asyncio.ensure_future(produce(one, topic, f"v{n}")) for n in range(50)]
    await asyncio.sleep(0)
    server.kill()
    server.start()
    answers = [each for done in tries for each in await within(done)]
    stored = {f"v{n}" for n, each in enumerate(answers) if isinstance(each, Produced)}
    assert all(isinstance(each, (Produced, Unavailable)) for each in answers)

    async def is_well() -> bool:
        (each,) = await produce(one, topic, "after")
        return isinstance(each, Produced)

    await until_async(is_well)
    await until(lambda: "after" in reader.values)
    await until(lambda: stored <= set(reader.values))
    assert not one.problems()


async def test_where_batches_are_quicker_those_who_are_told_are_in_the_next_one(nodes: Any, server: NatsServer) -> None:
    """Two groups of clients that take turns would need two batches for what fits into one."""
    engine = await nodes()
    topic, left, over = await topic_on(engine, 1), 320, asyncio.get_running_loop().create_future()
    for count in (4, 8, 16, 32, 64) * 3:
        engine.node.outlet.pace.learn(count, 1e9, is_batch=False)

    def ask(_: Any = None) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            engine.produce("", ProduceBody(topic=topic, value="v"), ask)
        elif left == -64:
            over.set_result(None)

    await produce(engine, topic, "the partition has its owner now")
    for _ in range(2):
        for _ in range(32):
            ask()
        while engine.node.outlet.in_flight() != 1:
            await asyncio.sleep(0)  # the others ask while the first batch is on its way, not at some later time
    await within(over)
    async with connect(server.url) as client:
        stream = engine.node.catalog.topics["", topic].stream
        places = [(await client.get(stream, n)).headers.get("Nats-Batch-Sequence") for n in range(2, 322)]
    assert places.count("1") == 6  # and ten if both halves went on by turns


async def test_a_failing_router_is_counted_and_logged(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    def route(topic: str, sent: ProduceBody) -> Any:
        raise ValueError("no idea")

    async with connect(server.url) as client:
        engine = await open_jetstream(client, limits=Limits(tick_ms=10), owner_lease_ms=LEASE_MS, router=route)
        try:
            stored = await produce(engine, await topic_on(engine, 1), "a", "b")
            assert [0, 1] == [each.offset for each in stored]
            assert 2 == engine.stats().counters["router_failures"]
            assert 2 == caplog.text.count("a message goes without the router: ValueError('no idea')")
        finally:
            await engine.stop()


async def test_names_that_look_alike_are_kept_apart(nodes: Any) -> None:
    one = await nodes()
    wanted = ["a.b", "a=2Eb", "a b", "A", "a", "ä", "a+b", "*", ">", "x" * 200]
    for name in wanted:
        await answer(one.create_topic, "", name, 1)
        assert isinstance((await produce(one, name, name))[0], Produced)
    for name in wanted:
        assert 1 == (await answer(one.show_topic, "", name)).messages
    assert set(wanted) <= set(await answer(one.list_topics, ""))


async def test_others_can_read_the_stream_of_a_topic(nodes: Any, server: NatsServer) -> None:
    """A topic is a stream: its messages are JSON, an offset is the sequence minus one."""
    one = await nodes()
    topic = await topic_on(one, 2)
    reader = await read(one, topic)
    (stored,) = await produce(one, topic, "hello", run_id="r")
    await until(lambda: reader.got)
    await ack(one, topic, reader.got[0])
    async with connect(server.url) as client:
        message = await client.get(stream_of(one, topic), stored.offset + 1)
        number = one.node.catalog.topics["", topic].number
        assert ("", topic, number, stored.partition, "message") == topics.read_subject(message.subject)
        assert {"key": "hello", "value": "hello", "envelope": {"run_id": "r"}} == msgspec.json.decode(message.payload)
        assert ("ack", "g", stored.offset, 1, "a") in await settlements(client, one, topic, stored.partition)


async def settlements(client: Client, engine: JetStreamEngine, topic: str, partition: int) -> list[tuple[Any, ...]]:
    """What a reader outside finds: outcome, group, offset, attempt, owner."""
    number = engine.node.catalog.topics["", topic].number
    found = await client.get_batch(topics.RECORDS, subject=topics.records_of(number, partition))
    packed = [msgspec.json.decode(one.payload) for one in found]
    return [
        ("ack", one["groups"][str(record[2])], record[4], record[7], record[8])
        for one in packed
        for record in one.get("records", [])
        if record[0] == 6
    ]
