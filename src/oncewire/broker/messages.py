"""The messages that a partition holds, in offset order, and how many of them are still needed. Pure.

A held message costs one `bytes` object (its encoded body) and 28 bytes in four parallel columns. Nothing here grows
with what was trimmed, and nothing but a search by halves grows with what is held.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from oncewire._ground.contracts.records import Stored

COMPACT_MIN: Final = 1_024
_FNV_BASE: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193


def partition_of(key: str, partitions: int) -> int:
    """FNV-1a, 32 bits, of the key's bytes, modulo the number of partitions; 0 for an empty key."""
    if partitions == 1 or not key:
        return 0
    digest = _FNV_BASE
    for byte in key.encode():
        digest = ((digest ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return digest % partitions


class Partition:
    """One partition's messages. `head` is the index of the first one that is held; what lies before it is free."""

    __slots__ = (
        "behind", "bodies", "head", "hold", "needed_bytes", "number", "offsets", "reserved", "reserved_bytes",
        "settled", "settled_bytes", "sizes", "times", "trimmed", "trimming",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.offsets = array("q")
        self.times = array("q")
        self.sizes = array("I")
        self.bodies: list[bytes] = []
        self.head = 0
        self.trimmed = -1
        """The last offset that was trimmed."""
        self.hold = -1
        """Messages up to this offset are settled by all groups that hold messages back."""
        self.settled = 0
        """How many held messages that is."""
        self.settled_bytes = 0
        self.needed_bytes = 0
        """Of the held messages that are not settled."""
        self.reserved = 0
        self.reserved_bytes = 0
        """Messages that are on their way to the disk: they count against the limits and for nothing else."""
        self.trimming = -1
        """A trim up to this offset is on its way to the disk."""
        self.behind: list[tuple[int, int, int, bytes]] | None = None
        """While older messages are still being read from a stream: the newer ones, which wait for their turn."""

    def __len__(self) -> int:
        return len(self.offsets) - self.head

    @property
    def needed(self) -> int:
        return len(self.offsets) - self.head - self.settled + (len(self.behind) if self.behind else 0)

    def append(self, offset: int, at_ms: int, size: int, body: bytes) -> None:
        if self.behind is not None:
            self.behind.append((offset, at_ms, size, body))
            return
        self.offsets.append(offset)
        self.times.append(at_ms)
        self.sizes.append(size)
        self.bodies.append(body)
        self.needed_bytes += size

    def extend(self, records: Sequence[Stored]) -> int:
        """Many at once, in order; returns their bytes."""
        if self.behind is not None:
            self.behind += [(one.offset, one.at_ms, one.size, one.body) for one in records]
            return sum([one.size for one in records])
        sizes = [one.size for one in records]
        self.offsets.extend([one.offset for one in records])
        self.times.extend([one.at_ms for one in records])
        self.sizes.extend(sizes)
        self.bodies += [one.body for one in records]
        self.needed_bytes += (total := sum(sizes))
        return total

    def load(self, page: Sequence[tuple[int, int, int, bytes]], *, is_last: bool) -> None:
        """Messages that were stored before those behind, in order; the last page lets those follow."""
        behind, self.behind = self.behind, None
        for one in page:
            self.append(*one)
        if is_last:
            for one in behind or ():
                self.append(*one)
        else:
            self.behind = behind

    def prepend(self, page: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Settled messages that are older than all that are held."""
        held = slice(self.head, None)
        self.offsets = array("q", [one[0] for one in page]) + self.offsets[held]
        self.times = array("q", [one[1] for one in page]) + self.times[held]
        self.sizes = array("I", [one[2] for one in page]) + self.sizes[held]
        self.bodies = [one[3] for one in page] + self.bodies[held]
        self.head = 0
        self.settled += len(page)
        self.settled_bytes += sum(one[2] for one in page)

    def after(self, offset: int) -> int:
        """The index of the first held message behind the offset."""
        return bisect_right(self.offsets, offset, self.head)

    def find(self, offset: int) -> int:
        """The index of a held message, -1 when it is not held."""
        index = bisect_left(self.offsets, offset, self.head)
        return index if index < len(self.offsets) and self.offsets[index] == offset else -1

    def hold_from(self, offset: int) -> None:
        """All messages up to the offset are settled; it may also go back, when a group comes that needs them."""
        index = bisect_right(self.offsets, offset, self.head)
        before = self.head + self.settled
        moved = sum(self.sizes[before:index]) if index >= before else -sum(self.sizes[index:before])
        self.needed_bytes -= moved
        self.settled_bytes += moved
        self.settled = index - self.head
        self.hold = offset

    def trim(self, offset: int) -> int:
        """Forget all messages up to the offset; returns how many."""
        index = bisect_right(self.offsets, offset, self.head)
        gone = index - self.head
        unsettled = self.head + self.settled
        self.settled_bytes -= sum(self.sizes[self.head : min(index, unsettled)])
        if index > unsettled:
            self.needed_bytes -= sum(self.sizes[unsettled:index])
        self.settled = max(0, self.settled - gone)
        self.bodies[self.head : index] = [b""] * gone
        self.head = index
        self.trimmed = max(self.trimmed, offset)
        if self.head > COMPACT_MIN and self.head * 2 > len(self.offsets):
            self._compact()
        return gone

    def _compact(self) -> None:
        for column in (self.offsets, self.times, self.sizes, self.bodies):
            del column[: self.head]
        self.head = 0
