"""A consumer's stream: the engine's deliveries as lines, and no more of them than the client reads."""

from __future__ import annotations

from collections.abc import Sequence

from oncewire._ground.contracts.broker import Delivery, encode_delivery
from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.errors import OncewireError
from oncewire._ground.http import NDJSON, Request, Stream
from oncewire.broker.engine import Subscription
from oncewire.broker.wire import failure_of

ROUND_MAX = 256
"""Deliveries written at once."""
ROUND_BYTES = 1 << 20
"""What one round should hold at most, judged by the last one."""


class StreamReader:
    """The sink of one stream. Its head goes out when the engine has accepted the reader, before any message."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stream: Stream | None = None
        self._subscription: Subscription | None = None
        self._line_bytes = 16_384
        self._is_gone = False
        request.on_close = self._gone

    def begin(self, subscription: Subscription | OncewireError) -> None:
        """The engine's answer to the subscription."""
        if isinstance(subscription, OncewireError):
            status, failure = failure_of(subscription)
            self._request.respond(status, ENCODE(failure))
            return
        self._subscription = subscription
        self._stream = None if self._is_gone else self._request.stream(NDJSON)
        if self._stream is None:
            subscription.close()
            self._request.refuse(503, "UNAVAILABLE", "the broker stops")  # unless the client is gone
            return
        self._stream.on_close = self._gone
        self._stream.on_drain = subscription.resume
        subscription.resume()

    def _gone(self) -> None:
        self._is_gone = True
        self._stream = None
        if self._subscription is not None:
            self._subscription.close()

    # ---- what the engine calls

    def room(self) -> int:
        if self._stream is None or self._stream.is_full:
            return 0
        return max(1, min(ROUND_MAX, ROUND_BYTES // self._line_bytes))

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        if self._stream is None:
            return
        lines = b"".join([encode_delivery(delivery) + b"\n" for delivery in deliveries])
        self._line_bytes = max(1, len(lines) // len(deliveries))
        self._stream.write(lines)

    def ended(self, error: OncewireError) -> None:  # noqa: ARG002 (a stream has no place for a sentence at its end)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
