"""A long poll as a reader: it leaves with its first deliveries, or when its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from oncewire.broker.engine import Done, Subscription
from oncewire.contracts.broker import Delivery
from oncewire.errors import OncewireError


class Take:
    """A long poll: a reader that leaves after its first deliveries, or when its time is over."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, messages_max: int, wait_ms: int, done: Done[list[Delivery]]
    ) -> None:
        self._messages_max = messages_max
        self._done: Done[list[Delivery]] | None = done
        self._subscription: Subscription | None = None
        self._timer = loop.call_later(wait_ms / 1000, self._end, [])

    def joined(self, subscription: Subscription | OncewireError) -> None:
        if isinstance(subscription, OncewireError):
            self._end(subscription)
            return
        self._subscription = subscription
        if self._done is None:
            subscription.close()

    def room(self) -> int:
        return self._messages_max if self._done is not None else 0

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._end(list(deliveries))

    def ended(self, error: OncewireError) -> None:
        self._end(error)

    def _end(self, answer: list[Delivery] | OncewireError) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        if self._subscription is not None:
            self._subscription.close()
        done(answer)

    def resume(self) -> None:
        """It never pauses."""

    def close(self) -> None:
        self._end([])
