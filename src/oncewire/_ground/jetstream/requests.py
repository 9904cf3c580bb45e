"""Requests: one message out, one reply back by its number."""

from __future__ import annotations

import asyncio
import time

import msgspec

from oncewire._ground.errors import NoResponders, OncewireError, OutcomeUnknown, PermissionDenied, TimedOut
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.connection import Connection
from oncewire._ground.jetstream.options import State
from oncewire._ground.jetstream.protocol import Message

REQUEST_TIMEOUT_S = 5.0


class _Call(msgspec.Struct, gc=False):
    subject: str
    future: asyncio.Future[Message]


class Requests:
    """All requests of one connection. Listens to it for loss."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._calls: dict[int, _Call] = {}
        connection.listeners.append(self)

    async def call(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        header: bytes = b"",
        timeout_s: float = REQUEST_TIMEOUT_S,
        repeat: bool = False,
    ) -> Message:
        """One request, one reply. With `repeat` it is sent again when the connection breaks: only for what may be."""
        deadline = time.monotonic() + timeout_s
        self.connection.check_size(len(header) + len(payload))
        while True:
            if not self.connection.is_ready:
                await self.connection.ready(deadline)
            try:
                reply = await self._call_once(subject, payload, header, deadline)
            except OutcomeUnknown:
                if not repeat or self.connection.state in (State.CLOSED, State.DRAINING):
                    raise
                continue
            except TimeoutError:
                raise TimedOut(f"no answer on {subject} within {timeout_s} s") from None
            if reply.header_raw and not reply.payload and reply.status == 503:
                raise NoResponders(f"nobody answers on {subject}", hint="Is the service running, and on this account?")
            return reply

    async def _call_once(self, subject: str, payload: bytes, header: bytes, deadline: float) -> Message:
        connection = self.connection
        encoded = protocol.encode_subject(subject)
        number = connection.take_numbers()
        call = _Call(subject, connection.loop.create_future())
        self._calls[number] = call
        connection.replies[number] = self._on_reply
        try:
            connection.write(protocol.encode_pub(encoded, connection.reply_to(number), payload, header))
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await call.future
        finally:
            connection.replies.pop(number, None)
            self._calls.pop(number, None)

    def _on_reply(self, number: int, message: Message) -> None:
        call = self._calls.get(number)
        if call is not None and not call.future.done():
            call.future.set_result(message)

    def _finish(self, number: int, error: OncewireError) -> None:
        call = self._calls.get(number)
        if call is not None and not call.future.done():
            call.future.set_exception(error)

    # ---- the connection tells

    def on_connected(self) -> None:
        """Nothing to do: whoever may repeat does so by itself."""

    def on_lost(self, reason: str) -> None:
        for number in list(self._calls):
            self._finish(number, OutcomeUnknown(f"the connection broke before the answer came: {reason}"))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        for number, call in list(self._calls.items()):
            if call.subject == subject:
                self._finish(number, error)

    def in_flight(self) -> int:
        return len(self._calls)
