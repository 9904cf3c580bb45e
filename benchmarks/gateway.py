"""The gateway beside the broadcast example of `websockets` and a raw ASGI application on uvicorn.

Each contender is a process of its own, the clients are another (benchmarks/crowd.py), and they take turns. The gateway
reads every message from JetStream and has backlog, resume and the cut of slow clients on; the yardsticks make their
messages themselves. Messages come one by one, at a rate that asks for 300,000 deliveries per second; what is reached is
counted from the first byte that a client gets to the last. Latency, at a steady 40,000 per second, is counted from the
moment a message is published.

    python -m benchmarks.gateway [room] [crowd] [sse] [rooms] [storm]    # all, or some of its parts
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import psutil
import uvloop

import oncewire
from benchmarks.measure import ratio, table, take_turns, verdict
from oncewire._ground.jetstream import Client, Outgoing
from oncewire._ground.topology.service import init_streams
from tests.support.nats import nats_server
from tests.support.ports import free_port

ROUNDS = 3
FEW_ROUNDS = 2
"""With thousands of clients."""
ENVELOPE_BYTES = 477
START_SEQUENCE = 100_000
STOP_S = 5.0
OFFERED = 300_000
"""Deliveries per second that are asked for: more than a contender without coalescing can do."""
OFFERED_S = 2.0
STEADY = 40_000
"""The same for latency: below what every contender can do."""
STEADY_S = 3.0
WANTED = 1.4


class Child:
    """A process that is told by lines and answers by lines."""

    def __init__(self, *command: str, **environ: str) -> None:
        self._command = [sys.executable, *command]
        self._environ = {**os.environ, **environ}

    async def __aenter__(self) -> Child:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=self._environ, limit=1 << 24
        )
        self.stats = psutil.Process(self.process.pid)
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_S)
            except TimeoutError:  # uvicorn waits for streams that have no end
                self.process.kill()
        await self.process.wait()

    async def hear(self) -> str:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, f"{self._command} ended"
        return line.decode().strip()

    def tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(order)
        answer: dict[str, Any] = json.loads(await self.hear())
        return answer

    @property
    def cpu_s(self) -> float:
        times = self.stats.cpu_times()
        return float(times.user + times.system)

    @property
    def resident_bytes(self) -> int:
        return int(self.stats.memory_info().rss)


def envelope(conversation: str, sequence: int, event: dict[str, Any]) -> str:
    """An envelope of the usual size, with `|{}` where the time goes."""
    body = {
        "version": "2024-12-01",
        "conversationId": conversation,
        "sequence": sequence,
        "issuedAt": "2025-01-01T12:00:00.000Z",
        "contract": {"guarantee": "at-least-once", "dedupeKey": str(uuid.uuid4())},
        "event": event,
    }
    text = json.dumps(body, separators=(",", ":"))
    return text.replace("|{}", "|{}" + "x" * (ENVELOPE_BYTES - len(text) - 17))


def message(conversation: str, sequence: int) -> str:
    ids = {"messageId": str(uuid.uuid4()), "dedupeId": str(uuid.uuid4())}
    event = {"type": "chat.message.created", **ids, "role": "assistant", "content": "|{}"}
    return envelope(conversation, sequence, event)


def chunk(conversation: str, number: int) -> str:
    event = {"type": "chat.token.chunk", "messageId": "m", "chunkId": str(number), "token": "|{}"}
    return envelope(conversation, 0, event)


def stamped(text: str) -> bytes:
    return text.replace("{}", str(time.time_ns())).encode()


# ---- contenders


class Yardstick:
    """Makes its messages itself."""

    def __init__(self, child: Child, port: int, text: str) -> None:
        self.child = child
        self.port = port
        self._text = text

    async def say(self, count: int, pause_s: float = 0.0) -> None:
        self.child.tell({"count": count, "pause_s": pause_s, "text": self._text})
        assert await self.child.hear() == "done"


class Gateway:
    """Ours: messages come from JetStream."""

    def __init__(self, child: Child, port: int, client: Client, conversations: Sequence[str]) -> None:
        self.child = child
        self.port = port
        self._client = client
        self.conversations = conversations
        self._sequence = START_SEQUENCE

    async def say(self, count: int, pause_s: float = 0.0) -> None:
        """Messages in every conversation, one at a time."""
        begun = time.perf_counter()
        for number in range(count):
            self._sequence += 1
            await self._client.publish_many(
                [self._message(conversation) for conversation in self.conversations], raw=True
            )
            await asyncio.sleep(max(0.0, begun + (number + 1) * pause_s - time.perf_counter()))

    def _message(self, conversation: str) -> Outgoing:
        return Outgoing(f"chat.events.{conversation}", stamped(message(conversation, self._sequence)))


class TokenGateway(Gateway):
    """The same, for token chunks."""

    def _message(self, conversation: str) -> Outgoing:
        return Outgoing(f"chat.tokens.{conversation}", stamped(chunk(conversation, self._sequence)))


@contextlib.asynccontextmanager
async def yardstick(kind: str) -> AsyncIterator[Yardstick]:
    port = free_port()
    text = message(str(uuid.uuid4()), START_SEQUENCE)
    async with Child("-m", "benchmarks.yardsticks", kind, str(port)) as child:
        assert await child.hear() == "serving"
        yield Yardstick(child, port, text)


@contextlib.asynccontextmanager
async def gateway(kind: type[Gateway], conversations: Sequence[str]) -> AsyncIterator[Gateway]:
    with nats_server() as server:
        async with oncewire.connect(server.url) as client:
            await init_streams(client)
            main = "from oncewire.cli import main; main(prog_name='oncewire')"
            port = free_port()
            command = ["-c", main, "gateway", "run", "--json", "--listen", f"127.0.0.1:{port}"]
            room = {"ONCEWIRE_HTTP_CONNECTIONS_MAX": "20000"}
            async with Child(*command, NATS_URL=server.url, **room) as child:
                await child.hear()
                running = kind(child, port, client, conversations)
                await running.say(1)
                yield running


# ---- clients


def upgrade(port: int, frame: dict[str, Any] | None) -> str:
    """The bytes that a WebSocket client sends first: the upgrade, and a frame (masked with zeros)."""
    head = (
        f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    if frame is not None:
        body = json.dumps(frame).encode()
        size = bytes([0x80 | len(body)]) if len(body) < 126 else b"\xfe" + len(body).to_bytes(2, "big")
        head += b"\x81" + size + b"\0\0\0\0" + body
    return base64.b64encode(head).decode()


def joins(running: Gateway, clients: int, resume: int | None = None) -> list[str]:
    """One client per request, spread over the conversations."""
    after = {} if resume is None else {"resumeFromSeq": resume}
    requests = []
    for number in range(clients):
        conversation = running.conversations[number % len(running.conversations)]
        requests.append(upgrade(running.port, {"type": "join_room", "conversationId": conversation, **after}))
    return requests


def streams(running: Yardstick | Gateway, clients: int, conversation: str) -> list[str]:
    head = f"GET /stream/{conversation} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode()
    return [base64.b64encode(head).decode()] * clients


async def measure(running: Yardstick | Gateway, requests: list[str], ready: str) -> dict[str, float]:
    """Deliveries per second when more is asked for than can be done, and latency at a steady rate."""
    clients = len(requests)
    pause_s = clients / OFFERED
    count = round(OFFERED_S / pause_s)
    async with Child("-m", "benchmarks.crowd") as crowd:
        idle = running.child.resident_bytes
        await crowd.ask(do="connect", port=running.port, requests=requests, ready=ready, sample=max(1, clients // 50))
        held = running.child.resident_bytes - idle
        spent = running.child.cpu_s
        crowd.tell({"do": "count", "each": count, "timeout_s": 60.0, "is_from_start": False})
        await running.say(count, pause_s)
        full = json.loads(await crowd.hear())
        spent = running.child.cpu_s - spent
        pause_s = clients / STEADY
        steps = round(STEADY_S / pause_s)
        crowd.tell({"do": "count", "each": steps, "timeout_s": 60.0, "is_from_start": False})
        await running.say(steps, pause_s)
        steady = json.loads(await crowd.hear())
    assert 0 == full["missing"] == full["over"] == steady["missing"] == steady["over"], (full, steady)
    return {
        "rate": clients * count / full["seconds"],
        "per_cpu_s": clients * count / spent,
        "p50_ms": steady["p50_ms"],
        "p99_ms": steady["p99_ms"],
        "idle_kb": held / clients / 1024,
    }


class Compare:
    """Contenders that take turns; keeps everything that was measured."""

    def __init__(self, ready: dict[str, str], clients: int) -> None:
        self.found: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
        self._ready = ready
        self._clients = clients

    async def one(self, name: str) -> float:
        conversation = str(uuid.uuid4())
        ready = self._ready[name]
        if name == "websockets":
            async with yardstick(name) as running:
                requests = [upgrade(running.port, None)] * self._clients
                found = await measure(running, requests, ready)
        elif name == "uvicorn":
            async with yardstick(name) as running:
                found = await measure(running, streams(running, self._clients, conversation), ready)
        elif name == "oncewire rooms":
            async with gateway(Gateway, [conversation]) as running:
                found = await measure(running, joins(running, self._clients), ready)
        else:
            async with gateway(TokenGateway, [conversation]) as running:
                found = await measure(running, streams(running, self._clients, conversation), ready)
        self.found[name].append(found)
        return found["rate"]

    async def run(self, title: str, ours: str, beside: str, rounds: int) -> None:
        print(f"load before: {os.getloadavg()[0]:.1f}")
        runs = await take_turns({name: partial(self.one, name) for name in self._ready}, rounds)
        print(table(title, runs, beside))
        for name, found in self.found.items():
            shown = {key: statistics.median(one[key] for one in found) for key in found[0]}
            print(
                f"  {name}: {shown['per_cpu_s']:,.0f} per CPU-second, {shown['idle_kb']:.1f} KB per idle connection, "
                f"at {STEADY:,}/s p50 {shown['p50_ms']:.1f} ms, p99 {shown['p99_ms']:.1f} ms"
            )
        print(verdict("deliveries", ratio(runs, ours, beside)[0], WANTED))


async def room() -> None:
    ready = {"oncewire rooms": "joined", "websockets": "joined"}
    await Compare(ready, 1_000).run("one room, 1,000 clients", "oncewire rooms", "websockets", ROUNDS)


async def crowd() -> None:
    ready = {"oncewire rooms": "joined", "websockets": "joined"}
    await Compare(ready, 10_000).run("one room, 10,000 clients", "oncewire rooms", "websockets", FEW_ROUNDS)


async def sse() -> None:
    ready = {"oncewire tokens": "protocol", "uvicorn": "protocol"}
    await Compare(ready, 5_000).run("tokens to 5,000 SSE clients", "oncewire tokens", "uvicorn", FEW_ROUNDS)


async def rooms() -> None:
    """Many small rooms: 1,000 with 10 clients each."""
    conversations = [str(uuid.uuid4()) for _ in range(1_000)]
    for _ in range(FEW_ROUNDS):
        async with gateway(Gateway, conversations) as running:
            found = await measure(running, joins(running, 10_000), "joined")
        print(
            f"  1,000 rooms of 10: {found['rate']:,.0f} deliveries/s, {found['per_cpu_s']:,.0f} per CPU-second, "
            f"{found['idle_kb']:.1f} KB per idle connection"
        )


async def storm() -> None:
    """Everybody comes back at once, and everybody has missed as much."""
    clients, missed = 5_000, 100
    for _ in range(ROUNDS):
        async with gateway(Gateway, [str(uuid.uuid4())]) as running, Child("-m", "benchmarks.crowd") as crowd:
            await running.say(missed)
            requests = joins(running, clients, resume=START_SEQUENCE + 1)
            begun, spent = time.perf_counter(), running.child.cpu_s
            joined = await crowd.ask(do="connect", port=running.port, requests=requests, ready="joined", sample=clients)
            counted = await crowd.ask(do="count", each=missed, timeout_s=60.0, is_from_start=True)
            seconds, spent = time.perf_counter() - begun, running.child.cpu_s - spent
        assert 0 == counted["missing"] == counted["over"], counted
        print(
            f"  {clients:,} clients joined in {joined['seconds']:.1f} s and had the {missed} messages that each missed "
            f"after {seconds:.1f} s: {clients * missed / seconds:,.0f} deliveries/s, {spent:.1f} s of CPU"
        )


PARTS = {"room": room, "crowd": crowd, "sse": sse, "rooms": rooms, "storm": storm}


def main() -> None:
    names = [name for name in sys.argv[1:] if name in PARTS] or list(PARTS)
    for name in names:
        uvloop.run(PARTS[name]())


if __name__ == "__main__":
    main()
