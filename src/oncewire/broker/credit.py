"""What a reader may hold. Pure."""

from __future__ import annotations


class Credit:
    """How many deliveries a reader may hold: taken by a delivery, given back by its settlement or the end of its lease.

    A reader whose lease ended is late until it settles something: it is asked last, and for one message at a time. So a
    reader that is connected and does nothing uses up attempts no faster than its lease.
    """

    __slots__ = ("is_late", "limit", "out")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_late = False
        self.out = 0

    @property
    def room(self) -> int:
        """Not above 0 when it holds all that it may."""
        return (min(1, self.limit) if self.is_late else self.limit) - self.out

    def give_back(self) -> None:
        """One that was out is settled, or its lease ended."""
        self.out -= 1

    def lapse(self) -> None:
        """A lease has ended without a settlement."""
        self.is_late = True

    def settle(self) -> None:
        """The reader settles something."""
        self.is_late = False
