"""How many of a server's connections each may have: a machine, a tenant. Pure.

A connection is held by one at a time. Who speaks for several tenants on one connection, as a proxy does, has it counted
for the last of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Shares(Generic[Thing]):
    """Connections by who holds them; 0 for no limit."""

    def __init__(self, each_max: int) -> None:
        self._each_max = each_max
        self._holders: dict[Thing, str] = {}
        self._counts: Counter[str] = Counter()

    def take(self, thing: Thing, holder: str) -> bool:
        """Whether the holder may have it; when not, it stays whose it was."""
        if not self._each_max or self._holders.get(thing) == holder:
            return True
        if self._counts[holder] >= self._each_max:
            return False
        self.leave(thing)
        self._holders[thing] = holder
        self._counts[holder] += 1
        return True

    def pass_on(self, thing: Thing, heir: Thing) -> None:
        """Another object stands for the same connection from now on."""
        holder = self._holders.pop(thing, None)
        if holder is not None:
            self._holders[heir] = holder

    def leave(self, thing: Thing) -> None:
        """It is nobody's any more."""
        holder = self._holders.pop(thing, None)
        if holder is not None:
            self._counts[holder] -= 1
            if not self._counts[holder]:
                del self._counts[holder]
