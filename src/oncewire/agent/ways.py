"""How many effects for one stream go out: by fast ingest, or as atomic batches. Pure.

Fast ingest is quicker where the server does not sync always, an atomic batch by far where it does: one sync for all. So
both are tried, in turns, at a size at which a thousand syncs cannot happen; what that shows holds for larger blocks. It
is tried again now and then, since a disk may become slow. Blocks of about a trial's size are trials themselves.

To be wrong about fast ingest makes an agent five times as slow, to be wrong about a batch a tenth: so fast ingest must
be twice as quick in the trials, and a large block that it took long for is a reason to try both again at once. One
trial that shows it to be slow by far is enough: each costs such a server 64 syncs.
"""

from __future__ import annotations

from typing import Final

from oncewire.jetstream.pace import LAST, Pace

TRIAL: Final = 64
"""So many messages are sent each way."""
HANDICAP: Final = 2.0
SLOW_US: Final = 60.0
"""Per message of a large block: fast ingest takes less, unless each is synced."""
FAR: Final = 3.0
"""Fast ingest that took so many times what a batch took, and over SLOW_US, is slow by far."""
AGAIN: Final = 50
"""After so many large blocks both ways are tried once more."""


class Ways:
    """What is known of one stream, since the connection stands."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._rounds = LAST
        self._blocks = 0
        self._fast_us = self._atomic_us = 0.0
        """What the last sendings of a trial's size took."""
        self._is_far_slower = False
        """The first trial was enough: fast ingest is not to be thought of."""

    def wants_trial(self, count: int) -> bool:
        """Whether so many messages are enough for a trial, and one is due."""
        return self._rounds > 0 and count >= 2 * TRIAL

    def tried(self) -> None:
        """Both ways were tried once."""
        is_slow = self._fast_us > max(FAR * self._atomic_us, TRIAL * SLOW_US)
        if is_slow and self._rounds > 1:  # in place of those that are left
            self._rounds, self._is_far_slower = 0, True
        else:
            self._rounds -= 1
            self._is_far_slower &= is_slow

    def choose_atomic(self, count: int) -> bool:
        """Decide for a sending. As long as too little is known, a large one goes the way that never takes long."""
        if count < 2 * TRIAL:
            return self._pace.choose_batch(count)
        self._blocks += 1
        is_atomic = self._rounds > 0 or self._is_far_slower or self._pace.is_batch_quicker(TRIAL, handicap=HANDICAP)
        if self._blocks % AGAIN == 0:
            self._rounds = max(self._rounds, 1)
        return is_atomic

    def learn(self, count: int, took_us: float, *, is_atomic: bool) -> None:
        if count < 2 * TRIAL:
            self._pace.learn(count, took_us, is_batch=is_atomic)
            if is_atomic:
                self._atomic_us = took_us
            else:
                self._fast_us = took_us
        elif not is_atomic and took_us > count * SLOW_US:
            self._rounds = LAST
