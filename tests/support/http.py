"""A client that sends exactly the bytes it is told to, and reads answers by the letter of HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from oncewire._ground.http import Limits, Routes, Server
from tests.support.wait import within


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes, *, eof: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()
            if eof:
                self.writer.write_eof()

    async def head(self) -> tuple[int, dict[str, str]]:
        """The next status line and headers."""
        lines = (await within(self.reader.readuntil(b"\r\n\r\n"))).decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert "HTTP/1.1" == version
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        headers = {name.lower(): value for name, value in pairs}
        assert len(pairs) == len(headers), f"a header stands twice: {pairs}"
        return int(status), headers

    async def answer(self, *, is_head: bool = False) -> Answer:
        """The next answer, whole."""
        status, headers = await self.head()
        if is_head or status in (100, 204):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, b"".join([chunk async for chunk in self.chunks()]))
        return Answer(status, headers, await within(self.reader.readexactly(int(headers["content-length"]))))

    async def chunk(self) -> bytes:
        """The next chunk of a stream, empty at its proper end."""
        size = int(await within(self.reader.readuntil(b"\r\n")), 16)
        data = await within(self.reader.readexactly(size + 2))
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self.chunk():
            yield chunk

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Wait until the server has closed, and said nothing more."""
        try:
            return await within(self.reader.read()) == b""
        except ConnectionError:
            return True


@contextlib.asynccontextmanager
async def wire(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(routes: Routes, **limits: Any) -> AsyncIterator[Server]:
    server = Server(routes, Limits(**limits))
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop(grace_s=1.0)


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
