"""Dead letters on their way to their own topic, `dlq.<topic>`, whose partitions may be at any node.

    its topic   found or made, with its stream, whatever a crash left out
    the letter  stored by the owner of its partition, under an id of its own: once, however often it is tried
    done        only then is the message settled (cell.py)

A step that may go through in a moment is tried again for as long as a produce would be. What fails after all leaves
the message unsettled and leased: its owner may nack again, and when the lease ends it is tried anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol

from oncewire._ground.contracts.broker import DEAD_PREFIX
from oncewire._ground.contracts.records import Buried
from oncewire._ground.errors import NotFound, OncewireError, Unavailable
from oncewire.broker.engine import Limits
from oncewire.broker.jetstream import names, ops
from oncewire.broker.jetstream.catalog import Catalog, Listed
from oncewire.broker.jetstream.cell import Cell, Phase
from oncewire.broker.jetstream.owners import Done, Owners

AGAIN_S: Final = 0.05

At = Callable[[int, int], ops.Letter]
"""A letter, once it is known where: the number of its topic, and the partition."""


class Post(Owners, Protocol):
    """What is needed from the node."""

    catalog: Catalog
    limits: Limits
    is_stopping: bool
    search_s: float

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...


class Letters:
    """See the module's head. `problem` says why the last one failed, '' when it did not."""

    def __init__(self, node: Post) -> None:
        self._node = node
        self.problem = ""

    def bury(self, cell: Cell, record: Buried, done: Callable[[OncewireError | None], None]) -> None:
        """Store the letter of a message, then say so, or why not."""
        assert record.letter is not None
        group = cell.state.groups[record.group].name
        identity = names.letter_identity(cell.topic.number, group, record.partition, record.offset)
        letter = partial(ops.Letter, identity=identity, size=record.letter.size, body=record.letter.body)
        self._node.spawn(self._bury(cell, letter, done))

    async def _bury(self, cell: Cell, letter: At, done: Callable[[OncewireError | None], None]) -> None:
        deadline = time.monotonic() + self._node.search_s
        failed = await self._try(cell, letter)
        while isinstance(failed, (NotFound, Unavailable)) and self._may_try(cell, deadline):
            await asyncio.sleep(AGAIN_S)
            failed = await self._try(cell, letter)
        if failed is None:
            self.problem = ""
            self._node.on_step("letter")
            done(None)
        else:
            self.problem = f"dead letters of {cell.topic.name!r} cannot be stored: {failed.message}"
            done(Unavailable(self.problem, retry_after_s=self._node.limits.retry_after_ms / 1000))

    def _may_try(self, cell: Cell, deadline: float) -> bool:
        return time.monotonic() < deadline and cell.phase is not Phase.GONE and not self._node.is_stopping

    async def _try(self, cell: Cell, letter: At) -> OncewireError | None:
        try:
            grave = await self._grave_of(cell.topic)
        except OncewireError as error:
            return error
        return await self._store(grave, letter(grave.number, cell.partition % grave.count))

    async def _grave_of(self, topic: Listed) -> Listed:
        catalog, name, age_ms = self._node.catalog, DEAD_PREFIX + topic.name, self._node.limits.dead_letter_age_ms
        grave = await catalog.find(topic.tenant, name)
        if grave is None:
            return await catalog.create(topic.tenant, name, topic.count, self._node.clock(), age_ms)
        await catalog.ensure(grave, age_ms)
        return grave

    async def _store(self, grave: Listed, letter: ops.Letter) -> OncewireError | None:
        stored: asyncio.Future[OncewireError | None] = asyncio.get_running_loop().create_future()

        def local(at: Cell, told: Done) -> None:
            at.store_letter(letter.identity, letter.size, letter.body, told)

        def answered(answer: OncewireError | None) -> None:
            if not stored.done():  # the node stops
                stored.set_result(answer)

        self._node.at_owner(grave, letter.partition, lambda: letter, local, answered)
        return await stored
