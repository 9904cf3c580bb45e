"""An owner that was replaced and does not know it yet: what it still tries must come to nothing.

Two nodes in one process. The first stops renewing its session, as a stopped process does, and keeps its cells, as a
process does that was just continued. Each scene returns what went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from oncewire._ground.contracts.broker import ProduceBody
from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import connect
from oncewire.broker.engine import Consume, Limits, Produced, Settle
from oncewire.broker.jetstream.cell import Cell
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from tests.support.broker import Reader
from tests.support.streams import unique
from tests.support.wait import until, within

LEASE_MS = 1_500
LATE = 32


async def asked(call: Callable[..., Any], *args: Any) -> Any:
    got = asyncio.get_running_loop().create_future()
    call(*args, got.set_result)
    return await within(got)


class Replaced:
    """A stale owner of the one partition of a topic, and its successor."""

    def __init__(self, stale: JetStreamEngine, cell: Cell, topic: str, reader: Reader, subscription: Any) -> None:
        self.stale = stale
        self.cell = cell
        self.topic = topic
        self.reader = reader
        self.subscription = subscription
        self.next: JetStreamEngine | None = None

    async def ack(self, engine: JetStreamEngine, offset: int, owner: str) -> Any:
        return await asked(engine.settle, "", Settle("ack", self.topic, "g", 0, offset, owner))

    async def ack_stale(self, offset: int) -> Any:
        """Through the cell itself: a node that looks at its session would not even ask."""
        return await asked(self.cell.settle, Settle("ack", self.topic, "g", 0, offset, "a"))


@contextlib.asynccontextmanager
async def replaced(url: str, room: int) -> AsyncIterator[Replaced]:
    """Three messages; the first owner has delivered as many as `room` says, and is gone to sleep."""
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            client = await stack.enter_async_context(connect(url))
            engine = await open_jetstream(client, limits=Limits(tick_ms=10), owner_lease_ms=LEASE_MS)
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        await until(lambda: all(len(engine.node.session.nodes) == 2 for engine in engines))
        topic = unique("fenced")
        await asked(engines[0].create_topic, "", topic, 1)
        for value in "abc":
            assert isinstance(await asked(engines[0].produce, "", ProduceBody(topic=topic, value=value)), Produced)
        first = next(engine for engine in engines if engine.node.cells)
        reader = Reader(room)
        subscription = await asked(first.subscribe, "", Consume(topic, "g", "a", 60_000, 1_000), reader)
        await until(lambda: len(reader.got) == room)
        (cell,) = first.node.cells.values()
        scene = Replaced(first, cell, topic, reader, subscription)
        for task in first.node.session._tasks:
            task.cancel()
        scene.next = successor = next(engine for engine in engines if engine is not first)
        await until(lambda: not successor.node.session.is_there(cell.node))
        yield scene


async def _next_owner(scene: Replaced) -> Reader:
    """The successor has taken over and delivered all that is not settled."""
    assert scene.next is not None
    reader = Reader()
    joined = await asked(scene.next.subscribe, "", Consume(scene.topic, "g", "b", 60_000, 1_000), reader)
    assert not isinstance(joined, OncewireError), joined
    await until(lambda: len(reader.got) == 3)
    return reader


async def settles_nothing(url: str) -> list[str]:
    """What the stale owner settles is refused, and what its successor settles is not."""
    async with replaced(url, room=3) as scene:
        assert scene.next is not None
        await _next_owner(scene)
        stale = await scene.ack_stale(0)
        fresh = await scene.ack(scene.next, 0, "b")
        problems = [] if isinstance(stale, OncewireError) else ["the stale owner settled a message"]
        return problems + ([f"its successor could not: {fresh.message}"] if fresh is not None else [])


async def stores_nothing(url: str) -> list[str]:
    """What the stale owner stores is refused, one message and many: its successor would never deliver it."""
    problems: list[str] = []
    for count in (1, LATE):
        async with replaced(url, room=3) as scene:
            await _next_owner(scene)
            number, body = scene.cell.topic.number, ProduceBody(topic=scene.topic, value="late")
            late = [asked(scene.cell.produce, body, number, None, None) for _ in range(count)]
            stored = [one for one in await asyncio.gather(*late) if not isinstance(one, OncewireError)]
            if stored:
                problems.append(f"the stale owner stored {len(stored)} of {count} messages behind its successor")
            found = await scene.stale.node.client.get_batch(scene.cell.topic.stream, subject=scene.cell.subject)
            if len(found) != 3:
                problems.append(f"{len(found) - 3} of {count} messages landed behind the successor")
    return problems


async def delivers_nothing(url: str) -> list[str]:
    """What its successor has settled is not shown again by the stale owner."""
    async with replaced(url, room=0) as scene:
        assert scene.next is not None
        reader = await _next_owner(scene)
        for one in reader.got:
            assert None is await scene.ack(scene.next, one.offset, "b")
        scene.reader.space = 10
        scene.subscription.resume()
        for _ in range(20):
            await asyncio.sleep(0)
        return [f"{one.value!r} was settled, and the stale owner showed it" for one in scene.reader.got]


async def settles_no_other(url: str) -> list[str]:
    """What it settled before it was replaced counts, and counts for nothing that came before."""
    async with replaced(url, room=3) as scene:
        assert scene.next is not None
        assert None is await scene.ack_stale(2)
        reader = Reader()
        await asked(scene.next.subscribe, "", Consume(scene.topic, "g", "b", 60_000, 1_000), reader)
        await asked(scene.next.produce, "", ProduceBody(topic=scene.topic, value="d"))
        await until(lambda: "d" in reader.values)
        return [] if reader.values == ["a", "b", "d"] else [f"its successor showed {reader.values}"]


Scene = Callable[[str], Awaitable[list[str]]]
SCENES: dict[str, Scene] = {
    scene.__name__: scene for scene in (settles_nothing, settles_no_other, stores_nothing, delivers_nothing)
}
