"""Plain HTTP requests of the client: history, and streams that go on. One connection each: they are rare."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from urllib.parse import SplitResult, urlsplit

import httptools

from oncewire._ground.errors import NotConnected, ProtocolViolation, TimedOut

BODY_BYTES_MAX = 64 << 20
READ_BYTES = 1 << 16


class _Answer:
    """What httptools finds in the bytes of an answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body: list[bytes] = []
        self.has_head = False
        self.is_whole = False

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_whole = True

    def feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as wrong:
            raise ProtocolViolation(f"the gateway's answer is not HTTP: {wrong}") from None

    def take(self) -> bytes:
        body, self.body = b"".join(self.body), []
        return body


def _request(method: str, url: SplitResult, headers: Mapping[str, str], body: bytes) -> bytes:
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    lines = [f"{method} {target} HTTP/1.1", f"Host: {url.netloc}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def _asked(
    method: str, url: str, headers: Mapping[str, str], body: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, _Answer]]:
    """The request is sent, and the head of its answer is there."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, port, ssl=True if parts.scheme == "https" else None
        )
    except OSError as error:
        raise NotConnected(f"no gateway at {parts.netloc}: {error}", hint="Start one: oncewire gateway run.") from None
    try:
        writer.write(_request(method, parts, headers, body))
        answer = _Answer()
        while not answer.has_head:
            answer.feed(await _read(reader))
        yield reader, answer
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        data = await reader.read(READ_BYTES)
    except OSError as error:
        raise NotConnected(f"the connection to the gateway broke: {error}") from None
    if not data:
        raise NotConnected("the gateway closed the connection in the middle of its answer")
    return data


async def ask(
    method: str, url: str, *, headers: Mapping[str, str], body: bytes = b"", timeout_s: float
) -> tuple[int, bytes]:
    """Status and body of an answer."""
    try:
        async with asyncio.timeout(timeout_s), _asked(method, url, headers, body) as (reader, answer):
            size = 0
            while not answer.is_whole:
                data = await _read(reader)
                size += len(data)
                if size > BODY_BYTES_MAX:
                    raise ProtocolViolation(f"the gateway's answer is larger than {BODY_BYTES_MAX} bytes")
                answer.feed(data)
            return answer.parser.get_status_code(), answer.take()
    except TimeoutError:
        raise TimedOut(f"no answer from {url} within {timeout_s} s") from None


@contextlib.asynccontextmanager
async def streaming(
    url: str, *, headers: Mapping[str, str], silence_s: float
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Status and body, piece by piece. A stream on which nothing comes for `silence_s` is dead: TimedOut."""
    try:
        async with asyncio.timeout(silence_s) as opening, _asked("GET", url, headers, b"") as (reader, answer):
            opening.reschedule(None)
            yield answer.parser.get_status_code(), _pieces(reader, answer, silence_s)
    except TimeoutError:
        raise TimedOut(f"nothing was heard from the gateway for {silence_s} s") from None


async def _pieces(reader: asyncio.StreamReader, answer: _Answer, silence_s: float) -> AsyncIterator[bytes]:
    while True:
        if piece := answer.take():
            yield piece
        if answer.is_whole:
            return
        async with asyncio.timeout(silence_s):
            answer.feed(await _read(reader))
