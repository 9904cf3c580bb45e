"""Server-sent events: tokens while they are made. One listener is one socket that the gateway has taken over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from oncewire._ground.contracts.realtime import VERSION
from oncewire._ground.http import Heir, Principal, Request
from oncewire.gateway.channels import Listener
from oncewire.gateway.frames import Conversation
from oncewire.gateway.tokens import error_event, sse

if TYPE_CHECKING:
    from oncewire.gateway.service import Gateway

KEEP_ALIVE_S: Final = 15.0
RETRY_MS: Final = 2_000
"""What a client waits before it comes back."""
CLOSE_S_MAX: Final = 5.0

HEAD: Final = (
    b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache, no-transform\r\n"
    b"X-Accel-Buffering: no\r\n"
    b"Connection: close\r\n"
)
"""Proxies must neither keep nor change nor hold back. The answer ends with the connection."""
BEGIN: Final = b"retry: %d\n%b" % (RETRY_MS, sse(b"protocol", VERSION.encode()))
KEEP_ALIVE: Final = b":\n\n"


def begin(gateway: Gateway, request: Request, conversation: Conversation) -> None:
    """Answer GET /stream/{conversation}."""
    last_event_id = request.header(b"last-event-id") or request.query.get("lastEventId", "")

    def make(transport: asyncio.Transport) -> Source:
        return Source(gateway, transport, request.principal, conversation, last_event_id)

    request.take_over(200, HEAD, make)


class Source(Heir):
    """One EventSource."""

    __slots__ = ("_gateway", "_is_closing", "_transport", "conversation", "listener")

    def __init__(
        self,
        gateway: Gateway,
        transport: asyncio.Transport,
        principal: Principal,
        conversation: Conversation,
        last: str,
    ) -> None:
        self._gateway = gateway
        self.principal = principal
        self._transport = transport
        self._is_closing = False
        self.conversation = conversation
        self.listener = Listener(self, transport.write, 0)
        self.deadline = gateway.now + KEEP_ALIVE_S
        transport.set_write_buffer_limits(high=gateway.limits.buffer_bytes_max)
        transport.write(BEGIN)
        gateway.listen(self, last)

    def data_received(self, data: bytes) -> None:
        """A client that has asked for a stream has nothing more to say."""

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._is_closing = True
        self._gateway.stop_listening(self)

    def pause_writing(self) -> None:
        self.deadline = self._gateway.now + self._gateway.limits.slow_s_max
        self._gateway.listener_full(self)

    def resume_writing(self) -> None:
        self.deadline = self._gateway.now + KEEP_ALIVE_S
        if not self._is_closing:
            self._gateway.listener_drained(self)

    def missed(self, message: str) -> None:
        if not self._is_closing:
            self._transport.write(error_event(message))

    def lost(self, message: str) -> None:
        """Say what is wrong, and close: the client comes back."""
        self.missed(message)
        self.stop()

    def _end(self) -> None:
        self._is_closing = True
        self._gateway.node.stop_listening(self.conversation, self.listener)
        self.deadline = self._gateway.now + CLOSE_S_MAX
        self._transport.close()

    def overdue(self) -> None:
        if self._is_closing:
            self.abort()
        elif self.listener.is_full:
            self._gateway.count("slow_clients")
            self._end()
        else:
            self.deadline = self._gateway.now + KEEP_ALIVE_S
            self._transport.write(KEEP_ALIVE)

    def revoke(self) -> None:
        self._gateway.count("revoked_clients")
        self.lost("the credential is no longer good")

    def stop(self) -> None:
        if not self._is_closing:
            self._end()

    def abort(self) -> None:
        self._transport.abort()
