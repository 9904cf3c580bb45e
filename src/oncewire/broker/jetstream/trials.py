"""Which groups have settled something anywhere in a topic. One that has not is on trial: see upkeep.py.

A partition knows only what is settled in it. So the first settlement of a group in a partition leaves a key in the
bucket of leases, and before a partition forgets a group it looks for that key. Each owner of the partition sees to it
again, so that a crash between settlement and key changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from oncewire._ground.errors import Conflict, OncewireError
from oncewire._ground.jetstream import Client
from oncewire.broker import rules
from oncewire.broker.jetstream import names
from oncewire.broker.jetstream.cell import Cell, Phase
from oncewire.broker.state import Group

_log = logging.getLogger(__name__)


class Court(Protocol):
    """What is needed from the node."""

    client: Client
    on_step: Callable[[str], None]

    def clock(self) -> int: ...
    def spawn(self, work: Coroutine[Any, Any, Any]) -> object: ...


class Trials:
    """See the module's head. Looks at a cell once a tick."""

    def __init__(self, node: Court) -> None:
        self._node = node
        self._kv = node.client.kv(names.LEASES)
        self._proven: set[tuple[int, str]] = set()
        """Groups that have their key, by the number of their topic."""
        self._busy: set[tuple[int, str]] = set()

    def forget(self, number: int) -> None:
        """A topic is gone."""
        self._proven = {key for key in self._proven if key[0] != number}

    def look(self, cell: Cell) -> None:
        state = cell.state
        state.proven = [group for group in state.proven if not self._is_proven(cell, group)]
        for group in state.proven:
            self._begin(cell, group, self._prove(cell, group))
        while state.doubted:
            group, _ = state.doubted.popitem()
            if self._is_proven(cell, group):
                group.has_settled = True
            else:
                self._begin(cell, group, self._try(cell, group))

    def _is_proven(self, cell: Cell, group: Group) -> bool:
        return (cell.topic.number, group.name) in self._proven

    def _begin(self, cell: Cell, group: Group, work: Coroutine[Any, Any, None]) -> None:
        """One thing at a time for each group. What fails is tried again at a later tick."""
        key = (cell.topic.number, group.name)
        if key in self._busy:
            work.close()
            return
        self._busy.add(key)

        async def whole() -> None:
            try:
                await work
            except (OncewireError, TimeoutError) as error:
                _log.info("whether group %r has settled something could not be read yet: %s", group.name, error)
            finally:
                self._busy.discard(key)

        self._node.spawn(whole())

    async def _prove(self, cell: Cell, group: Group) -> None:
        self._node.on_step("proof")
        with contextlib.suppress(Conflict):  # another partition was first
            await self._kv.create(names.group_of(cell.topic.number, group.name), b"")
        self._proven.add((cell.topic.number, group.name))

    async def _try(self, cell: Cell, group: Group) -> None:
        if await self._kv.get(names.group_of(cell.topic.number, group.name), is_exact=True) is not None:
            self._proven.add((cell.topic.number, group.name))
            group.has_settled = True
        elif cell.phase is Phase.OPEN and cell.state.groups.get(group.number) is group:
            cell.desk.propose(rules.forget_group(self._node.clock(), group))
            cell.home.wake(cell)
