"""A load generator that costs less than what it loads: prepared bytes out, the ends of answers counted."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec

CONNECTIONS = 64
VALUE = "x" * 256
BODY = msgspec.json.encode(
    {"topic": "t", "key": "user:1", "value": VALUE, "envelope": {"run_id": "run_123", "step_id": "step_7"}}
)


def request(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {content_type}"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


PRODUCE = request("/v1/produce", BODY)
BATCH = request("/v1/produce", b"\n".join([BODY] * 100), "application/x-ndjson")


class Asker(asyncio.Protocol):
    """One connection with one request open at a time; `answered` gets each answer whole and says what to send next."""

    def __init__(self, answered: Callable[[Asker, bytes], bytes | None]) -> None:
        self._answered = answered
        self._got = b""
        self._length = -1
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        got = self._got + data if self._got else data
        if self._length < 0:
            end = got.find(b"\r\n\r\n")
            if end < 0:
                self._got = got
                return
            at = got.lower().find(b"content-length: ", 0, end)
            self._length = end + 4 + (int(got[at + 16 : got.find(b"\r", at)]) if at >= 0 else 0)
        if len(got) < self._length:
            self._got = got
            return
        self._got, self._length = b"", -1
        if (following := self._answered(self, got)) is not None:
            self.transport.write(following)


async def connect(port: int, answered: Callable[[Asker, bytes], bytes | None]) -> Asker:
    _, asker = await asyncio.get_running_loop().create_connection(lambda: Asker(answered), "127.0.0.1", port)
    return asker


async def ask_once(port: int, sent: bytes) -> bytes:
    done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    asker = await connect(port, lambda _, got: done.set_result(got))
    asker.transport.write(sent)
    answer = await done
    asker.transport.close()
    return answer


@contextlib.asynccontextmanager
async def served(kind: str) -> AsyncIterator[int]:
    """A server of benchmarks.serve, with topic `t`; its port."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serve", kind, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            port = int(await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline))
            if kind in ("memory", "log"):
                await ask_once(port, request("/v1/topics", b'{"name": "t"}'))
            yield port
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


async def rate(port: int, sent: bytes, seconds: float, per_answer: int = 1) -> float:
    """Answers a second with all connections busy."""
    count = 0
    is_over = False

    def answered(_: Asker, got: bytes) -> bytes | None:
        nonlocal count
        assert got.startswith(b"HTTP/1.1 200"), got[:200]
        count += 1
        return None if is_over else sent

    askers = [await connect(port, answered) for _ in range(CONNECTIONS)]
    begun = time.perf_counter()
    for asker in askers:
        asker.transport.write(sent)
    await asyncio.sleep(seconds)
    took, total = time.perf_counter() - begun, count
    is_over = True
    for asker in askers:
        asker.transport.close()
    return total * per_answer / took


async def latencies_us(port: int, sent: bytes, rounds: int) -> list[float]:
    """One connection, one request at a time."""
    times: list[float] = []
    done = asyncio.Event()
    begun = 0.0

    def answered(*_: object) -> bytes | None:
        nonlocal begun
        now = time.perf_counter()
        times.append((now - begun) * 1e6)
        if len(times) == rounds:
            done.set()
            return None
        begun = time.perf_counter()
        return sent

    asker = await connect(port, answered)
    begun = time.perf_counter()
    asker.transport.write(sent)
    await done.wait()
    asker.transport.close()
    return sorted(times)


class Reader(asyncio.Protocol):
    """A consume stream: hands out (partition, offset) of each line."""

    _line = msgspec.json.Decoder(dict[str, Any])

    def __init__(self, found: Callable[[int, int], None]) -> None:
        self._found = found
        self._left = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            if line[:1] == b"{":
                read = self._line.decode(line)
                self._found(read["partition"], read["offset"])


async def cycle_rate(port: int, seconds: float, readers: int = 8, window: int = 2_000) -> float:
    """Messages a second that were produced, delivered on a stream and acked; half of the connections produce."""
    acked = produced = 0
    is_over = False
    idle_ackers: deque[Asker] = deque()
    idle_producers: deque[Asker] = deque()
    to_ack: deque[bytes] = deque()

    def found(owner: int, partition: int, offset: int) -> None:
        body = b'{"topic":"t","group":"g","owner":"o%d","partition":%d,"offset":%d}' % (owner, partition, offset)
        if idle_ackers:
            idle_ackers.popleft().transport.write(request("/v1/ack", body))
        else:
            to_ack.append(body)

    def on_acked(asker: Asker, got: bytes) -> bytes | None:
        nonlocal acked
        assert got.startswith(b"HTTP/1.1 204"), got[:300]
        acked += 1
        if idle_producers and produced - acked < window and not is_over:
            idle_producers.popleft().transport.write(PRODUCE)
        if to_ack:
            return request("/v1/ack", to_ack.popleft())
        idle_ackers.append(asker)
        return None

    def on_produced(asker: Asker, got: bytes) -> bytes | None:
        nonlocal produced
        assert got.startswith(b"HTTP/1.1 200"), got[:300]
        produced += 1
        if is_over or produced - acked >= window:
            idle_producers.append(asker)
            return None
        return PRODUCE

    loop = asyncio.get_running_loop()
    streams = []
    for owner in range(readers):
        take = lambda partition, offset, owner=owner: found(owner, partition, offset)  # noqa: E731
        transport, _ = await loop.create_connection(lambda take=take: Reader(take), "127.0.0.1", port)
        wanted = f"/v1/consume?topic=t&group=g&owner=o{owner}&lease_ms=60000&in_flight=1000"
        transport.write(f"GET {wanted} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        streams.append(transport)
    idle_ackers.extend([await connect(port, on_acked) for _ in range(CONNECTIONS // 2)])
    producers = [await connect(port, on_produced) for _ in range(CONNECTIONS // 2)]
    begun = time.perf_counter()
    for producer in producers:
        producer.transport.write(PRODUCE)
    await asyncio.sleep(seconds)
    took, total = time.perf_counter() - begun, acked
    is_over = True
    for asker in [*producers, *idle_ackers]:
        asker.transport.close()
    for transport in streams:
        transport.abort()
    return total / took
