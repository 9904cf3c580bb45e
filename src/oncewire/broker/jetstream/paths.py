"""The way to the owner of a partition, for requests of this node and for those that others send here.

They find it in this order: a cell that is open here; the node that was the owner last time; the partition's entry in
the bucket of leases; and when nobody has it, the node that should, which takes it when it is asked. A node that is
asked for what it does not have says who has it.

What is asked of a partition while its owner is looked for waits in a line, and goes on in that order: messages that
were produced together must not overtake each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from oncewire._ground.errors import NotFound, OncewireError, Unavailable
from oncewire.broker.jetstream import names
from oncewire.broker.jetstream.catalog import Listed
from oncewire.broker.jetstream.cell import Phase
from oncewire.broker.jetstream.ops import Moved, Placed, Unsent
from oncewire.broker.jetstream.owners import Done, Local
from oncewire.broker.rules import NO_TOPIC

if TYPE_CHECKING:
    from oncewire.broker.jetstream.node import Node

STEP_S: Final = 0.005
AGAIN_S: Final = 0.05

Key = tuple[int, int]
"""A topic's number and a partition's."""


class Call(NamedTuple):
    """What is asked of an owner: here by `local`, elsewhere by `request`."""

    request: Callable[[], Placed]
    local: Local
    done: Done
    deadline: float


class Paths:
    """See the module's head."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.known: dict[Key, str] = {}
        """Who had it last."""
        self._lines: dict[Key, list[Call]] = {}
        self._guests: dict[Key, list[tuple[str, Placed, Done]]] = {}
        """What other nodes ask of a partition that is being taken."""

    def forget(self, number: int) -> None:
        """A topic is gone."""
        for key in [key for key in self.known if key[0] == number]:
            del self.known[key]

    def lose(self, node: str) -> None:
        """A node is gone."""
        for key in [key for key, owner in self.known.items() if owner == node]:
            del self.known[key]

    # ---- what this node asks

    def at_owner(self, topic: Listed, partition: int, request: Callable[[], Placed], local: Local, done: Done) -> None:
        key = (topic.number, partition)
        cell = self._node.cells.get(key)
        if key not in self._lines and cell is not None and cell.phase is Phase.OPEN:
            local(cell, done)
            return
        call = Call(request, local, done, time.monotonic() + self._node.search_s)
        owner = self.known.get(key)
        if key not in self._lines and cell is None and owner is not None and self._is_other(owner):
            self._forward(topic, partition, owner, call)
        else:
            self._line_up(topic, partition, call)

    def _is_other(self, owner: str) -> bool:
        """Whether that is another node that is there."""
        return owner != self._node.node and self._node.session.is_there(owner)

    def _line_up(self, topic: Listed, partition: int, call: Call, *, after_s: float = 0.0) -> None:
        line = self._lines.get((topic.number, partition))
        if line is not None:
            line.append(call)
        else:
            self._lines[topic.number, partition] = [call]
            self._node.spawn(self._search(topic, partition, after_s))

    def _forward(self, topic: Listed, partition: int, owner: str, call: Call) -> None:
        key = (topic.number, partition)

        def answered(answer: object) -> None:
            if not isinstance(answer, (Moved, Unsent)):
                call.done(answer)
                return
            if self.known.get(key) == owner:
                del self.known[key]
            if isinstance(answer, Moved) and answer.node and self._node.session.is_there(answer.node):
                self.known[key] = answer.node
            self._line_up(topic, partition, call, after_s=STEP_S)

        self._node.link.ask(owner, call.request(), answered)

    async def _search(self, topic: Listed, partition: int, after_s: float) -> None:
        """Until all who wait in the line are on their way to the owner, or know why not."""
        key = (topic.number, partition)
        answer: str | OncewireError
        try:
            if after_s:
                await asyncio.sleep(after_s)
            answer = await self._find(topic, partition)
        except (OncewireError, TimeoutError) as error:
            answer = _told(error)
        finally:
            line = self._lines.pop(key)  # in this very turn they go on, and nobody comes between
        for call in line:
            if isinstance(answer, OncewireError):
                call.done(answer)
            elif answer != self._node.node:
                self._forward(topic, partition, answer, call)
            else:
                call.local(self._node.cells[key], call.done)

    async def _find(self, topic: Listed, partition: int) -> str | OncewireError:
        """The owner; if it is this node, its cell is open. Those whose time is up are told why there is none."""
        key, node = (topic.number, partition), self._node
        problem: OncewireError = Unavailable("nobody owns the partition yet", retry_after_s=0.5)
        while self._are_left(key, problem):
            if node.is_stopping:
                return Unavailable("the broker is stopping", retry_after_s=1.0)
            if topic.number not in node.catalog.numbered:
                return NotFound(f"{NO_TOPIC} (create it first)")
            try:
                owner = await self._owner(topic, partition)
            except Unavailable as error:
                problem = error
                await asyncio.sleep(AGAIN_S)
                continue
            cell = node.cells.get(key)
            if owner != node.node or (cell is not None and cell.phase is Phase.OPEN):
                return owner
            await asyncio.sleep(STEP_S)
        return problem

    def _are_left(self, key: Key, problem: OncewireError) -> bool:
        now, line = time.monotonic(), self._lines[key]
        self._lines[key] = [call for call in line if call.deadline > now]
        for call in line:
            if call.deadline <= now:
                call.done(problem)
        return bool(self._lines[key])

    async def _owner(self, topic: Listed, partition: int) -> str:
        """Who has it, or who should: then it is taken by being asked."""
        key, node = (topic.number, partition), self._node
        if key in node.cells:
            return node.node
        known = self.known.get(key)
        if known is not None and self._is_other(known):
            return known
        owned = await node.taker.owner_of(*key)
        owner = owned.node if owned.node and node.session.is_there(owned.node) else ""
        if not owner or owner == node.node:
            owner = names.preferred(node.session.nodes, *key)
        if owner == node.node:
            return await node.take(topic, partition)
        self.known[key] = owner
        return owner

    # ---- what others ask of this node

    def serve(self, asker: str, request: Placed, done: Done) -> None:
        """At once, or when the partition is taken, if nobody has it."""
        key = (request.number, request.partition)
        guests, cell = self._guests.get(key), self._node.cells.get(key)
        if guests is not None:
            guests.append((asker, request, done))
        elif cell is not None and cell.phase is Phase.OPEN:
            self._node.serve(cell, asker, request, done)
        else:
            self._guests[key] = [(asker, request, done)]
            self._node.spawn(self._serve_soon(key))

    async def _serve_soon(self, key: Key) -> None:
        node = self._node
        answer: str | OncewireError
        try:
            answer = await self._taken(key)
        except (OncewireError, TimeoutError) as error:
            told = _told(error)
            answer = Moved(told.message) if isinstance(told, Unavailable) else told
        finally:
            guests = self._guests.pop(key)
        for asker, request, done in guests:
            cell = node.cells.get(key)
            if isinstance(answer, OncewireError):
                done(answer)
            elif answer == node.node and cell is not None and cell.phase is Phase.OPEN:
                node.serve(cell, asker, request, done)
            else:
                done(Moved("the partition is elsewhere", node=answer if answer != node.node else ""))

    async def _taken(self, key: Key) -> str:
        """Take the partition if nobody has it; who has it."""
        node = self._node
        if key[0] not in node.catalog.numbered:
            await node.catalog.catch_up()
        topic = node.catalog.numbered.get(key[0])
        if topic is None:
            raise NotFound(f"{NO_TOPIC} (create it first)")
        return await node.take(topic, key[1])


def _told(error: OncewireError | TimeoutError) -> OncewireError:
    return error if isinstance(error, OncewireError) else Unavailable("NATS did not answer in time", retry_after_s=1.0)
