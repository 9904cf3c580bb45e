"""How much an agent takes in hand, and how fast. Pure: time is an argument.

Held messages are kept in progress, so nothing is redelivered while it waits; but what one process holds no other can
work on. So an agent holds a few seconds of its own work at most: by the measured time per message for `def` handlers,
by free places for `async def` handlers, by tokens where a handler has a rate. Which kind the next messages will be is
not known; the share of each kind so far is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

HOLD_S: Final = 2.0
"""So much work may wait in a process."""
BATCH_S: Final = 0.5
"""So long one batch may hold the ledger."""
BURST_S: Final = 0.1
"""A handler with a rate may run so much of it at once."""
FIRST: Final = 64
"""Messages that are asked for before anything was measured."""
BATCHES_HELD: Final = 3
MEMORY: Final = 0.3
"""How much the last batch weighs in what is remembered."""


class Bucket:
    """Tokens for one handler: `rate_per_s` of them come each second, a few can be saved."""

    def __init__(self, rate_per_s: float) -> None:
        self.rate_per_s = rate_per_s
        self._capacity = max(1.0, rate_per_s * BURST_S)
        self._tokens = 1.0
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take a token, if there is one."""
        if self._at:
            self._tokens = min(self._capacity, self._tokens + (now - self._at) * self.rate_per_s)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def wait_s(self) -> float:
        """After a refusal: how long until the next token."""
        return max(0.0, (1.0 - self._tokens) / self.rate_per_s)

    @property
    def hold(self) -> int:
        return max(1, int(self.rate_per_s * HOLD_S))


class Pace:
    """The time that a message takes, measured, and what follows for batches."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._per_message_s = 0.0

    def measured(self, count: int, seconds: float) -> None:
        if count:
            now = seconds / count
            before = self._per_message_s
            # Slower counts at once, faster only by and by: one quick batch must not fill the hands of a slow handler.
            self._per_message_s = now if now > before else before + MEMORY * (now - before)

    def _within(self, seconds: float, at_most: int) -> int:
        if not self._per_message_s:
            return min(FIRST, at_most)
        return max(1, min(at_most, int(seconds / self._per_message_s)))

    @property
    def batch(self) -> int:
        return self._within(BATCH_S, self._batch)

    @property
    def hold(self) -> int:
        return self._within(HOLD_S, self._batch * BATCHES_HELD)


class Shares:
    """Which part of a source's messages are of a kind that has limited places."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._shares = dict.fromkeys(kinds, 1.0)

    def seen(self, counts: dict[str, int], total: int) -> None:
        """Of so many messages so many were of each kind. More counts at once, less by and by."""
        weight = total / (total + FIRST)
        for kind, before in self._shares.items():
            now = counts.get(kind, 0) / total
            self._shares[kind] = max(now, before + weight * (now - before))

    def room(self, kind: str, places: int) -> int:
        """How many messages may come so that about `places` of this kind are among them."""
        share = self._shares[kind]
        return places if places <= 0 or share >= 1.0 else int(places / max(share, 0.001))
