"""Runs of messages as bytes, shared by all members that are sent them again. Pure.

A crowd that comes back has missed the same messages. Each run is put together once, and all sockets hold the same
bytes: neither the work nor the memory grows with the crowd. The least recently used runs go when the sum of all rooms
is too large.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable
from operator import attrgetter
from typing import Final

from oncewire.gateway.frames import Envelope

SLAB_BYTES: Final = 256 * 1024
"""A run ends with the message that passes this: so much goes out in one write, then a member's buffer is looked at."""
SLABS_BYTES_MAX: Final = 16 * 1024 * 1024
SLABS_MAX: Final = 4_096

_first = attrgetter("first")


class Slab:
    """Messages `first` to `last`, as frames that say they are sent again."""

    __slots__ = ("_ends", "data", "first", "last", "place", "room")

    def __init__(self, room: Hashable, envelopes: Iterable[Envelope]) -> None:
        """Of messages that follow on each other, as many as fit; at least one."""
        frames: list[bytes] = []
        self._ends = [0]
        self.room = room
        self.first = self.last = self.place = 0
        for one in envelopes:
            if frames and (one.sequence != self.last + 1 or self._ends[-1] >= SLAB_BYTES):
                break
            self.first = self.first or one.sequence
            self.last, self.place = one.sequence, one.place
            frames.append(one.replay_frame)
            self._ends.append(self._ends[-1] + len(frames[-1]))
        self.data = b"".join(frames)

    def behind(self, sequence: int) -> bytes:
        """The frames of what comes after a message: the shared bytes for all who have nothing of it."""
        return self.data if sequence < self.first else self.data[self._ends[sequence - self.first + 1] :]


class Slabs:
    """Those of one node, by room. A room is whatever its runs are put together for."""

    def __init__(self, bytes_max: int = SLABS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._rooms: dict[Hashable, list[Slab]] = {}
        self._used: dict[Slab, None] = {}
        """The least recently used first."""
        self.bytes = 0

    def find(self, room: Hashable, sequence: int) -> Slab | None:
        """A run that holds this message."""
        slabs = self._rooms.get(room)
        if not slabs:
            return None
        slab = slabs[max(0, bisect_right(slabs, sequence, key=_first) - 1)]
        if not slab.first <= sequence <= slab.last:
            return None
        del self._used[slab]
        self._used[slab] = None
        return slab

    def add(self, slab: Slab) -> Slab:
        insort(self._rooms.setdefault(slab.room, []), slab, key=_first)
        self._used[slab] = None
        self.bytes += len(slab.data)
        while (self.bytes > self._bytes_max or len(self._used) > SLABS_MAX) and len(self._used) > 1:
            self._drop(next(iter(self._used)))
        return slab

    def forget(self, room: Hashable) -> None:
        """What was said in a room is said no longer."""
        for slab in list(self._rooms.get(room, ())):
            self._drop(slab)

    def _drop(self, slab: Slab) -> None:
        del self._used[slab]
        self.bytes -= len(slab.data)
        slabs = self._rooms[slab.room]
        slabs.remove(slab)
        if not slabs:
            del self._rooms[slab.room]
