"""A long poll as a reader: it leaves with its first deliveries, or when its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from oncewire._ground.contracts.broker import Delivery
from oncewire._ground.errors import OncewireError
from oncewire.broker.engine import Done, Subscription

LOOK_S: Final = 0.002


class Take:
    """A long poll: a reader that leaves after its first deliveries, or when its time is over."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, messages_max: int, wait_ms: int, done: Done[list[Delivery]]
    ) -> None:
        self._loop = loop
        self._messages_max = messages_max
        self._done: Done[list[Delivery]] | None = done
        self._subscription: Subscription | None = None
        self._timer = loop.call_later(wait_ms / 1000, self._late)

    def joined(self, subscription: Subscription | OncewireError) -> None:
        if isinstance(subscription, OncewireError):
            self._end(subscription)
            return
        self._subscription = subscription
        if self._done is None:
            subscription.close()

    def _late(self) -> None:
        """Its time is over; but what is being looked for already may still come."""
        if self._subscription is None or self._subscription.is_looking:
            self._timer = self._loop.call_later(LOOK_S, self._late)
        else:
            self._end([])

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

    @property
    def is_looking(self) -> bool:
        return self._done is not None

    def resume(self) -> None:
        """It never pauses."""

    def close(self) -> None:
        self._end([])
