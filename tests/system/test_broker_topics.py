"""Topics that are deleted and made again at the same time: each has what is its own, and what is late meets nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from oncewire._ground.contracts import topics
from oncewire._ground.contracts.broker import ProduceBody
from oncewire._ground.errors import OncewireError, Unavailable
from oncewire._ground.jetstream import Client, connect
from oncewire.broker.engine import Limits, Produced
from oncewire.broker.jetstream.catalog import Entry, Listed, listed
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from tests.support.brokernodes import Proxy
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import unique
from tests.support.wait import until, until_async
from tests.system.test_broker_nodes import answer, produce, read, spread

LEASE_MS = 1_000


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@pytest.fixture
async def start() -> AsyncIterator[Callable[[str], Any]]:
    """Starts nodes, each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:

        async def started(url: str) -> JetStreamEngine:
            client = await stack.enter_async_context(connect(url))
            engine = await open_jetstream(client, limits=Limits(tick_ms=10), owner_lease_ms=LEASE_MS)
            stack.push_async_callback(engine.stop)
            return engine

        yield started


def at_step(engine: JetStreamEngine, step: str, act: Callable[[], None]) -> None:
    """Once."""

    def on_step(name: str) -> None:
        if name == step:
            engine.node.on_step = lambda _: None
            act()

    engine.node.on_step = on_step


async def made(engine: JetStreamEngine, name: str) -> Listed:
    await answer(engine.create_topic, "", name, 1)
    return engine.node.catalog.topics["", name]


async def left_of(client: Client, topic: Listed) -> list[str]:
    """What the server still has of a topic."""
    streams = (await client.api("STREAM.NAMES"))["streams"]
    found = [topic.stream] if topic.stream in streams else []
    for stream, subject in (
        (topics.RECORDS, f"broker_records.{topic.number}.>"),
        (topics.SNAPSHOTS, f"broker_snapshots.{topic.number}.>"),
        ("KV_OW_LEASES", f"$KV.OW_LEASES.part.{topic.number}.>"),
    ):
        found += [one.subject for one in await client.get_last_of(stream, [subject])]
    return found


async def test_a_late_deletion_takes_nothing_of_the_topic_that_has_the_name_by_then(
    server: NatsServer, start: Any
) -> None:
    async with Proxy(server.port) as proxy:
        late, other = await start(proxy.url), await start(server.url)
        await spread(late, other)
        name = unique("topic")
        old = await made(late, name)
        await produce(late, name, "old")
        at_step(late, "unlisted", proxy.cut)  # what follows is sent, and does not arrive
        gone: list[Any] = []
        late.delete_topic("", name, gone.append)
        await until(lambda: ("", name) not in other.node.catalog.topics)
        await spread(other)
        new = await made(other, name)
        values = [f"v{n}" for n in range(20)]
        assert all(isinstance(one, Produced) for one in await produce(other, name, *values))
        proxy.mend()
        await until(lambda: gone)
        assert [None] == gone
        assert new.number > old.number
        reader = await read(other, name)
        await until(lambda: set(values) == set(reader.values))
        assert 20 == (await answer(other.show_topic, "", name)).messages
        assert [] == await left_of(other.node.client, old)


async def topic_owned_by(engine: JetStreamEngine) -> str:
    """A topic of one partition that this node owns."""

    async def is_owned() -> bool:
        names.append(unique("topic"))
        topic = await made(engine, names[-1])
        await produce(engine, names[-1], "before")
        return (topic.number, 0) in engine.node.cells

    names: list[str] = []
    await until_async(is_owned)
    return names[-1]


async def test_a_late_message_is_not_stored_in_the_topic_that_has_the_name_by_then(
    server: NatsServer, start: Any
) -> None:
    async with Proxy(server.port) as proxy:
        late, other = await start(proxy.url), await start(server.url)
        await spread(late, other)
        name = await topic_owned_by(late)
        proxy.cut()
        told: list[Any] = []
        late.produce("", ProduceBody(topic=name, value="late", key="late"), told.append)
        await asyncio.sleep(0)  # it is on its way now
        assert late.node.outlet.in_flight()
        assert None is await answer(other.delete_topic, "", name)
        new = await made(other, name)
        proxy.mend()
        await until(lambda: told)
        assert isinstance(told[0], OncewireError)
        await late.node.client.api("INFO")  # what it had sent before has arrived
        assert 0 == (await other.node.client.api(f"STREAM.INFO.{new.stream}"))["state"]["messages"]


@pytest.mark.parametrize("step", ["unlisted", "cleared"])
async def test_what_a_crash_leaves_of_a_deleted_topic_is_taken_away_later(
    step: str, server: NatsServer, start: Any
) -> None:
    def die() -> None:
        raise Unavailable("this node is no more")

    one = await start(server.url)
    name = unique("topic")
    old = await made(one, name)
    await read(one, name)
    await produce(one, name, "old")
    at_step(one, step, die)
    assert isinstance(await answer(one.delete_topic, "", name), Unavailable)
    assert old.stream in await left_of(one.node.client, old)
    new = await made(one, name)
    await produce(one, name, "new")
    two = await start(server.url)

    async def is_swept() -> bool:
        return not await left_of(two.node.client, old)

    await until_async(is_swept)
    assert 1 == (await answer(two.show_topic, "", name)).messages
    assert new.stream in await left_of(two.node.client, new)


async def test_a_stream_that_only_looks_like_a_deleted_topic_stays(server: NatsServer, start: Any) -> None:
    """Without a word of the deletion: the list may have been lost, and a stream may hold all that there is."""
    one = await start(server.url)
    stray = listed(1, "", unique("stray"), Entry(1, 0))
    await one.node.client.api(f"STREAM.CREATE.{stray.stream}", one.node.catalog._config(stray, 0))
    await one.node.catalog.sweep()
    assert [stray.stream] == await left_of(one.node.client, stray)
