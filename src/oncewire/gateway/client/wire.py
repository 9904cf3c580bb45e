"""One WebSocket of the client: the protocol is the `websockets` library's, without its I/O; the socket is ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

MESSAGE_BYTES_MAX = 16 << 20
REASON_CHARS_MAX = 200
NO_CLOSE_FRAME = 1006
REFUSED = {401: 4401, 403: 4403, 404: 4404}
"""What an HTTP answer instead of the upgrade means, as a close code."""


class Wire(asyncio.Protocol):
    """Tells `on_text` and, once, `on_closed` with the close code and the reason that was given."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        on_text: Callable[[bytes], None],
        on_closed: Callable[[int, str], None],
    ) -> None:
        self._protocol = ClientProtocol(parse_uri(url), max_size=MESSAGE_BYTES_MAX)
        self._headers = headers
        self._on_text, self._on_closed = on_text, on_closed
        self._parts: list[bytes] = []
        self._refused = 0
        self._reason = ""
        self._is_silent = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        request = self._protocol.connect()
        for name, value in self._headers.items():
            request.headers[name] = value
        self._protocol.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        self._flush()
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._answered(event)
            elif isinstance(event, Frame):
                self._framed(event)
        if self._protocol.close_expected():
            self._transport.close()

    def _answered(self, response: Response) -> None:
        if self._protocol.state is not State.OPEN:
            self._refused = REFUSED.get(response.status_code, 0)
            self._reason = bytes(response.body or b"").decode(errors="replace")[:REASON_CHARS_MAX]

    def _framed(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._parts.append(bytes(frame.data))
            if frame.fin:
                text, self._parts = b"".join(self._parts), []
                if not self._is_silent:
                    self._on_text(text)

    def eof_received(self) -> None:
        self._protocol.receive_eof()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if not self._is_silent:
            self._is_silent = True
            code = self._refused or self._protocol.close_code or NO_CLOSE_FRAME
            self._on_closed(code, self._reason or self._protocol.close_reason or "")

    def send(self, text: bytes) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_text(text)
            self._flush()

    def drop(self, code: int) -> None:
        """Say good-bye and go, without waiting for an answer and without telling `on_closed`."""
        self._is_silent = True
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code)
            self._flush()
        self._transport.close()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.write_eof()


async def open_wire(
    url: str,
    headers: Mapping[str, str],
    *,
    on_text: Callable[[bytes], None],
    on_closed: Callable[[int, str], None],
) -> Wire | None:
    """A socket on which the upgrade is asked for; None when there is none to be had."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "wss"
    loop = asyncio.get_running_loop()
    try:
        _, wire = await loop.create_connection(
            lambda: Wire(url, headers, on_text, on_closed),
            parts.hostname or "",
            parts.port or (443 if is_secure else 80),
            ssl=True if is_secure else None,
        )
    except (OSError, WebSocketException):
        return None
    return wire
