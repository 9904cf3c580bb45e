"""One socket to a NATS server, from connect to close. It parses and reports; all decisions are its owner's."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from oncewire._ground.errors import NotConnected, OncewireError, ProtocolViolation
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.protocol import Event


class ServerInfo(msgspec.Struct, frozen=True):
    """What the server says about itself."""

    server_id: str = ""
    server_name: str = ""
    version: str = "0.0.0"
    max_payload: int = 1024 * 1024
    jetstream: bool = False
    headers: bool = False
    nonce: str = ""
    tls_required: bool = False
    tls_available: bool = False
    auth_required: bool = False
    ldm: bool = False
    cluster: str = ""
    domain: str = ""
    connect_urls: tuple[str, ...] = ()

    @property
    def version_tuple(self) -> tuple[int, int, int]:
        digits = [int("".join(filter(str.isdigit, part)) or 0) for part in self.version.split("-")[0].split(".")[:3]]
        major, minor, patch = [*digits, 0, 0, 0][:3]
        return major, minor, patch


class Owner(Protocol):
    """What a socket needs from the connection that made it."""

    loop: asyncio.AbstractEventLoop

    def on_events(self, wire: Wire, events: list[Event]) -> None: ...
    def on_wire_lost(self, wire: Wire, reason: str) -> None: ...
    def on_writable(self, wire: Wire, *, is_writable: bool) -> None: ...


class Wire(asyncio.Protocol):
    """One socket from connect to close. All decisions are the Connection's."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.parser = protocol.Parser()
        self.transport: asyncio.Transport | None = None
        self.info: asyncio.Future[ServerInfo] = owner.loop.create_future()
        self.greeted: asyncio.Future[None] = owner.loop.create_future()
        self.lost: asyncio.Future[None] = owner.loop.create_future()
        self.pongs: list[asyncio.Future[None]] = []
        self.error = ""
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            events = self.parser.feed(data)
        except ProtocolViolation as violation:
            self.fail(violation)
            return
        self.owner.on_events(self, events)

    def fail(self, error: OncewireError) -> None:
        """The other side broke the rules: drop the socket, say why."""
        self.error = error.message
        if not self.info.done():
            self.info.set_exception(error)
        if not self.greeted.done():
            self.greeted.set_exception(error)
        self.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if not self.lost.done():
            self.lost.set_result(None)
        reason = self.error or (str(error) if error else "the server closed the connection")
        gone = NotConnected(reason)
        waiting: list[asyncio.Future[Any]] = [self.info, self.greeted, *self.pongs]
        self.pongs.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(gone)
            if not future.cancelled():
                future.exception()  # seen: nobody may be waiting any more
        self.owner.on_wire_lost(self, reason)

    def pause_writing(self) -> None:
        self.owner.on_writable(self, is_writable=False)

    def resume_writing(self) -> None:
        self.owner.on_writable(self, is_writable=True)
