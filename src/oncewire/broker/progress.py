"""How far a group is in a partition, and which of its messages are out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from oncewire._ground.contracts.broker import RetryPolicy
from oncewire.broker.credit import Credit
from oncewire.broker.messages import Partition

if TYPE_CHECKING:
    from oncewire.broker.state import Group

LEASED: Final = 1
WAITING: Final = 2
"""For its next attempt: nacked or timed out, not due yet."""
READY: Final = 3
"""For its next attempt, which is due."""


class Flight(Struct, eq=False):
    """A message that a group has been given and has not settled."""

    progress: Progress
    offset: int
    state: int = READY
    attempts: int = 0
    owner: str = ""
    """The last one; empty when nobody had it since the start."""
    credit: Credit | None = None
    """Of the reader that had it last."""
    lease_ms: int = 0
    due_at_ms: int = 0
    """When the lease ends or the retry is due."""
    tick: int = 0
    """When it is looked at."""
    policy: RetryPolicy | None = None
    last_error: str = ""
    identity: bytes = b""
    """Of the key that its worker began with, and has not marked since."""
    is_settling: bool = False


class Progress:
    """Where a group stands in a partition."""

    __slots__ = ("ahead", "cursor", "flights", "floor", "group", "leased", "partition", "ready")

    def __init__(self, group: Group, partition: Partition) -> None:
        self.group = group
        self.partition = partition
        self.floor = partition.trimmed
        """All messages up to here are settled; never past one that is not."""
        self.ahead: set[int] = set()
        """Settled above the floor."""
        self.cursor = self.floor
        """Messages up to here were given out at least once, or are ahead, or wait for a retry."""
        self.flights: dict[int, Flight] = {}
        self.leased = 0
        """Of the flights, those that a reader has now. A retry that waits is bounded by the buffer alone."""
        self.ready: list[int] = []
        """A heap of offsets that are due again."""

    @property
    def lag(self) -> int | None:
        """Messages that the group has not settled; None while they are still being read."""
        if self.partition.behind is not None:
            return None
        return len(self.partition.offsets) - self.partition.after(self.floor) - len(self.ahead)

    def settle(self, done: Sequence[int]) -> bool:
        """Take note that messages are done; True when the floor moved."""
        offsets, ahead, floor = self.partition.offsets, self.ahead, self.floor
        index, count = self.partition.after(floor), len(offsets)
        is_whole = self.partition.behind is None
        if done and offsets[index : index + len(done)].tolist() == done:  # the next ones, in order: nearly always
            self.floor = done[-1]
            self.absorb()
            return True
        for offset in done:
            if offset <= floor or offset in ahead:
                continue
            if offsets[index] == offset if index < count else is_whole:
                floor = offset
                index += 1
            else:
                ahead.add(offset)
        if floor == self.floor:
            return False
        self.floor = floor
        self.absorb()
        return True

    def absorb(self) -> None:
        """Let the floor rise over what is settled above it."""
        offsets, ahead, index = self.partition.offsets, self.ahead, self.partition.after(self.floor)
        while ahead and index < len(offsets) and offsets[index] in ahead:
            self.floor = offsets[index]
            ahead.remove(self.floor)
            index += 1
        self.cursor = max(self.cursor, self.floor)

    def land(self, offsets: Iterable[int]) -> list[Flight]:
        """Those messages are not out any more."""
        flights = self.flights
        landed = [flights.pop(offset) for offset in offsets if offset in flights]
        for flight in landed:
            self.release(flight)
        return landed

    def release(self, flight: Flight) -> None:
        """No reader has it now: it was settled, or its lease ended."""
        if flight.state == LEASED:
            flight.state = READY
            self.leased -= 1
            if flight.credit is not None:
                flight.credit.give_back()

    def trim(self, offset: int) -> list[Flight]:
        """The partition forgets everything up to the offset, whether this group had it or not; returns what was out."""
        if offset <= self.floor:
            return []
        self.floor = offset
        self.cursor = max(self.cursor, offset)
        self.ahead = {one for one in self.ahead if one > offset}
        self.absorb()
        return self.land([one for one in self.flights if one <= offset])
