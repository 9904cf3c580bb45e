"""Servers that are not NATS servers: a proxy that can swallow, hold and cut, and servers that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

INFO: dict[str, Any] = {
    "server_id": "FAKE",
    "server_name": "fake",
    "version": "2.15.1",
    "proto": 1,
    "headers": True,
    "jetstream": True,
    "max_payload": 1_048_576,
}

Session = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One accepted connection of a fake server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.lines: list[bytes] = []

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def info(self, **changes: Any) -> None:
        await self.send(b"INFO " + json.dumps(INFO | changes).encode() + b"\r\n")

    async def line(self) -> bytes:
        """The next line, '' at the end. Payload lines are lines too: fakes need no more."""
        try:
            line = await self.reader.readline()
        except (ValueError, ConnectionError):
            return b""
        self.lines.append(line)
        return line

    async def greet(self, **changes: Any) -> None:
        """INFO, then the client's CONNECT and PING, then PONG."""
        await self.info(**changes)
        while line := await self.line():
            if line.startswith(b"PING"):
                break
        await self.send(b"PONG\r\n")

    async def answer_pings(self) -> None:
        """Read for ever; answer each PING."""
        while line := await self.line():
            if line.startswith(b"PING"):
                await self.send(b"PONG\r\n")

    async def gone(self) -> None:
        """Until the client hangs up, without reading what it sends into memory."""
        while await self.reader.read(65_536):
            pass


class FakeServer:
    """Runs `session` for each connection. Counts them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.connections = 0
        self.peers: list[Peer] = []

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = Peer(reader, writer)
        self.peers.append(peer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await self._session(peer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self.peers:
            peer.writer.transport.abort()
        await asyncio.sleep(0)


class Proxy:
    """Between a client and a real server: passes bytes on, and can swallow answers, hold everything, or cut.

    `swallow_answers` loses what the server says (it acted, nobody hears it); `hold` passes nothing on in either
    direction, as a network that is down without a word; `cut` breaks every open connection.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self.swallow_answers = False
        self.swallowed_bytes = 0
        self.is_refusing = False
        self.connections = 0
        self.on_answer: Callable[[bytes], bytes] | None = None
        """May change what the server says."""

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def hold(self) -> None:
        self._flow.clear()

    def release(self) -> None:
        self._flow.set()

    def cut(self) -> None:
        for pair in list(self._links):
            for writer in pair:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.is_refusing:
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        link = (writer, server_writer)
        self._links.add(link)
        up = asyncio.create_task(self._pump(reader, server_writer, is_answer=False))
        down = asyncio.create_task(self._pump(server_reader, writer, is_answer=True))
        self._tasks |= {up, down}
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        for one in link:
            one.transport.abort()
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        self._tasks -= {up, down}
        self._links.discard(link)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65_536):
                await self._flow.wait()
                if is_answer and self.swallow_answers:
                    self.swallowed_bytes += len(data)
                    continue
                if is_answer and self.on_answer is not None:
                    data = self.on_answer(data)
                writer.write(data)
                await writer.drain()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def fake(session: Session) -> AsyncIterator[FakeServer]:
    async with FakeServer(session) as server:
        yield server
