"""Gateways for tests: a node in this process or one of its own, a WebSocket client that is not ours, envelopes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from oncewire._ground import http
from oncewire._ground.contracts.headers import DEDUPE_ID, EPOCH, SEQUENCE
from oncewire._ground.contracts.realtime import (
    VERSION,
    DeliveryContract,
    Event,
    MessageCreated,
    RealtimeEnvelope,
    StreamLifecycle,
    TokenChunk,
    encode_realtime,
)
from oncewire._ground.jetstream import Client, Outgoing
from oncewire.gateway.limits import Limits
from oncewire.gateway.run import serving
from oncewire.gateway.service import Gateway
from tests.support.up import clean_environ
from tests.support.wait import within

GATEWAY = [sys.executable, "-c", "from oncewire.cli.gateway import gateway; gateway()"]


def new_conversation() -> str:
    return str(uuid.uuid4())


def body_of(conversation: str, sequence: int, event: Event) -> bytes:
    return encode_realtime(
        RealtimeEnvelope(
            version=VERSION,
            conversation_id=conversation,
            sequence=sequence,
            issued_at=datetime.now(UTC),
            contract=DeliveryContract("at-least-once", f"k{sequence}"),
            event=event,
        )
    )


def message(conversation: str, sequence: int, *, epoch: str | None = "e1", content: str = "") -> Outgoing:
    """A message as the relay publishes it; without an epoch, as anybody else may."""
    event = MessageCreated(
        message_id=f"m{sequence}", dedupe_id=f"d{sequence}", role="user", content=content or f"hello {sequence}"
    )
    headers = {EPOCH: epoch, SEQUENCE: str(sequence), DEDUPE_ID: f"d{sequence}"} if epoch else None
    return Outgoing(f"chat.events.{conversation}", body_of(conversation, sequence, event), headers=headers)


def lifecycle(conversation: str, status: Any, sequence: int = 0, answer: str = "a1") -> Outgoing:
    event = StreamLifecycle(message_id=answer, status=status)
    return Outgoing(f"chat.events.{conversation}", body_of(conversation, sequence, event))


def chunk(conversation: str, number: int, answer: str = "a1", *, chunk_id: str = "") -> Outgoing:
    event = TokenChunk(message_id=answer, chunk_id=chunk_id or str(number), token=f"t{number} ")
    return Outgoing(f"chat.tokens.{conversation}", body_of(conversation, 0, event))


async def publish(client: Client, conversation: str, first: int, last: int, *, epoch: str | None = "e1") -> None:
    """Messages first to last, in order."""
    found = await client.publish_many([message(conversation, n, epoch=epoch) for n in range(first, last + 1)])
    assert not [one for one in found if isinstance(one, Exception)]


def reads_as_envelope(frame: dict[str, Any]) -> bool:
    """The predicate of the protocol's reference client, which then reads `event.type` without looking."""
    return not frame.get("control") and bool(frame.get("sequence")) and bool(frame.get("conversationId"))


class Guest:
    """One WebSocket client, with the frames that it has got."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.hello: dict[str, Any] = {}

    async def say(self, type_: str, conversation: str = "", **fields: Any) -> None:
        told = {"type": type_} | ({"conversationId": conversation} if conversation else {}) | fields
        await self.socket.send(json.dumps(told))

    async def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await within(self.socket.recv()))
        assert "event" in found or not reads_as_envelope(found), found
        return found

    async def join(self, conversation: str, after: int | None = None, **fields: Any) -> dict[str, Any]:
        """Join, and what it was answered."""
        if after is not None:
            fields["resumeFromSeq"] = after
        await self.say("join_room", conversation, **fields)
        return await self.next()

    async def sequences(self, count: int) -> list[int]:
        """The sequences of the next envelopes."""
        return [(await self.next())["sequence"] for _ in range(count)]

    async def hears_nothing_more(self) -> None:
        """What was sent to it before now has been seen: a heartbeat is answered behind everything else."""
        await self.say("heartbeat", ts=1)
        heard = await self.next()
        assert "heartbeat" == heard.get("type"), heard


@contextlib.asynccontextmanager
async def guest(url: str, **options: Any) -> AsyncIterator[Guest]:
    address = url.replace("http", "ws", 1) + "/ws"
    async with connect(address, max_size=None, open_timeout=30, **options) as socket:
        one = Guest(socket)
        one.hello = await one.next()
        yield one


@contextlib.asynccontextmanager
async def node(
    client: Client, *, origins: frozenset[str] = frozenset(), **limits: Any
) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway in this process, and its address."""

    def front(routes: http.Routes) -> http.Server:
        return http.Server(routes, http.Limits(origins=origins))

    async with serving(client, "127.0.0.1", 0, limits=Limits(**limits), front=front, stop_s=1.0) as gateway:
        assert gateway.server is not None
        yield gateway, f"http://127.0.0.1:{gateway.server.port}"


class Running:
    """A gateway in a process of its own."""

    def __init__(self, nats_url: str, *words: str, listen: str = "127.0.0.1:0") -> None:
        command = [*GATEWAY, "run", "--listen", listen, "--json", *words]
        environ = clean_environ(NATS_URL=nats_url)
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.serving: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.url: str = self.serving["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def running(nats_url: str, *words: str) -> Iterator[Running]:
    gateway = Running(nats_url, *words)
    try:
        yield gateway
    finally:
        gateway.stop()


class Stream:
    """One EventSource, by the letter."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.head = ""
        self.last_id = ""

    async def event(self) -> tuple[str, str]:
        """The next event and its data; comments are skipped."""
        name, data = "", []
        while True:
            line = (await within(self.reader.readuntil(b"\n"))).decode().rstrip("\n")
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data.append(line[6:])
            elif line.startswith("id: "):
                self.last_id = line[4:]
            elif not line and name:
                return name, "\n".join(data)

    async def tokens(self, count: int) -> str:
        """The text of the next chunks."""
        found = []
        for _ in range(count):
            name, data = await self.event()
            assert "token" == name, data
            found.append(json.loads(data)["event"]["token"])
        return "".join(found)


@contextlib.asynccontextmanager
async def source(url: str, conversation: str, *, last_id: str = "", origin: str = "") -> AsyncIterator[Stream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    lines = [f"GET /stream/{conversation} HTTP/1.1", "Host: localhost"]
    lines += [f"Last-Event-ID: {last_id}"] if last_id else []
    lines += [f"Origin: {origin}"] if origin else []
    writer.write("\r\n".join([*lines, "", ""]).encode())
    stream = Stream(reader, writer)
    try:
        stream.head = (await within(reader.readuntil(b"\r\n\r\n"))).decode()
        yield stream
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
