"""How many effects for one stream go out: by fast ingest, or as atomic batches. Pure.

Fast ingest is quicker where the server does not sync always, an atomic batch by far where it does: one sync for all. No
server says which it is, but the times that it gave to messages do: where each was synced, the next one was stored so
much later. So a few go by fast ingest, and their times are read back. What a client measures says less: while an agent
works, an answer waits for it longer than a sync takes.

To be wrong about fast ingest makes an agent five times as slow, to be wrong about a batch takes a fifth of its rate. So
all go in batches as long as nothing is known, and a block that fast ingest took long for is a reason to look again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

LOOK: Final = 32
"""So many messages are sent to be looked at."""
FEW: Final = 8
"""Less of them than that tell nothing: others were stored among them, or they are gone."""
SYNCED_US: Final = 40.0
"""From one message to the next: 4 to 14 without a sync, 160 to 330 with one, on a busy machine."""
SLOW_US: Final = 60.0
"""Per message of a large block: fast ingest takes less, unless each is synced."""
LARGE: Final = 250
"""With less, the way there and back is most of what a block takes."""
AGAIN: Final = 1_000
"""After so many blocks it is looked again: a stream may move to another server."""
AGAIN_SOON: Final = 10
"""The same where a look told nothing."""


class Ways:
    """What is known of one stream, since the connection stands."""

    def __init__(self) -> None:
        self._is_synced: bool | None = None
        self._left = 0

    def wants_look(self) -> bool:
        return self._left <= 0

    def looked(self, times_ns: Sequence[int]) -> None:
        """When the messages of a look were stored, in their order."""
        if len(times_ns) < FEW:
            self._is_synced, self._left = None, AGAIN_SOON
            return
        between_ns = median([later - earlier for earlier, later in pairwise(times_ns)])
        self._is_synced, self._left = between_ns > SYNCED_US * 1_000, AGAIN

    def choose_atomic(self) -> bool:
        """Decide for a block."""
        self._left -= 1
        return self._is_synced is not False

    def learn(self, count: int, took_us: float, *, is_atomic: bool) -> None:
        """How long a block took."""
        if not is_atomic and count >= LARGE and took_us > count * SLOW_US:
            self._left = 0
