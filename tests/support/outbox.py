"""For tests of the outbox: writers, relays as processes that stop at a named step, and an outside count."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg

import oncewire
from oncewire._ground.jetstream import Client
from oncewire.cli import face
from oncewire.outbox.relay import Relay, RelayOptions
from tests.support.streams import stored_ids, witness
from tests.support.wait import until_async

STREAM = "CHAT_EVENTS"
ENQUEUE = "SELECT message_id::text, sequence FROM enqueue_conversation_message($1, 'user', $2)"
ENQUEUE_MESSAGE = "SELECT enqueue_message($1, $2::text::json)"
MESSAGES_STREAM = "sr-events"
MESSAGES_SUBJECT = "sr.events.loop"
ROLLED_BACK = "rolled back"
AWAY = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What asyncpg raises when its server is killed."""


async def make_chat_stream(client: Client, **config: Any) -> None:
    """The stream of the conversations, by a raw request."""
    body = {"name": STREAM, "subjects": ["chat.events.*", "chat.tokens.*"], "allow_direct": True, "allow_atomic": True}
    await client.api(f"STREAM.CREATE.{STREAM}", body | config)


async def make_messages_stream(client: Client, **config: Any) -> None:
    """A stream for the general outbox."""
    body = {"name": MESSAGES_STREAM, "subjects": ["sr.events.>"], "allow_direct": True, "allow_atomic": True}
    await client.api(f"STREAM.CREATE.{MESSAGES_STREAM}", body | config)


def envelope_json(key: str, payload: str = "{}") -> str:
    """A MessageEnvelope as somebody's own SQL writes it."""
    return (
        '{"schema_version":"1.0","message_type":"LoopCreated","message_id":"m","timestamp":"2025-01-01T00:00:00Z",'
        f'"actor_id":"a","actor_kind":"HUMAN","payload":{payload},"idempotency_key":"{key}"}}'
    )


@contextlib.asynccontextmanager
async def postgres(url: str, **options: Any) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url, **options)
    try:
        yield connection
    finally:
        await connection.close()


async def open_rows(url: str) -> int:
    async with postgres(url) as connection:
        left: int = await connection.fetchval(
            "SELECT (SELECT count(*) FROM message_outbox WHERE status <> 'dispatched')"
            " + (SELECT count(*) FROM outbox_messages WHERE status <> 'dispatched')"
        )
        return left


async def drained(url: str) -> None:
    """Until no row waits."""

    async def is_empty() -> bool:
        with contextlib.suppress(*AWAY):
            return await open_rows(url) == 0
        return False

    await until_async(is_empty, "an empty outbox", deadline_s=240)


# ---- what is in the stream, told by another client


@dataclass(frozen=True)
class Found:
    """A message on the stream as nats-py reads it."""

    conversation_id: str
    stream_sequence: int
    sequence: int
    content: str
    headers: dict[str, str]
    body: dict[str, Any]


async def found_in_stream(nats_url: str, stream: str = STREAM) -> list[Found]:
    found: list[Found] = []
    async with witness(nats_url) as connection:
        js = connection.jetstream()
        total = (await js.stream_info(stream)).state.messages
        if not total:
            return found
        sub = await js.pull_subscribe("", stream=stream)
        while len(found) < total:
            for message in await sub.fetch(min(1_000, total - len(found)), timeout=10):
                body = json.loads(message.data)
                content = body.get("event", {}).get("content", "")
                place = message.metadata.sequence.stream
                headers = dict(message.headers or {})
                conversation = message.subject.rpartition(".")[2]
                found.append(Found(conversation, place, body.get("sequence", 0), content, headers, body))
                await message.ack()
        await sub.unsubscribe()
    return sorted(found, key=lambda one: one.stream_sequence)


async def assert_all_once_in_order(nats_url: str, url: str) -> int:
    """Every committed message is in the stream, in order within its conversation, once by sequence; nothing else."""
    async with postgres(url) as connection:
        rows = await connection.fetch(
            "SELECT conversation_id::text, sequence, content FROM conversation_messages ORDER BY 1, 2"
        )
    committed: dict[str, list[tuple[int, str]]] = {}
    for conversation_id, sequence, content in rows:
        committed.setdefault(conversation_id, []).append((sequence, content))
    stored: dict[str, list[tuple[int, str]]] = {}
    for one in await found_in_stream(nats_url):
        stored.setdefault(one.conversation_id, []).append((one.sequence, one.content))
    assert committed == stored
    for messages in stored.values():
        assert list(range(1, len(messages) + 1)) == [sequence for sequence, _ in messages]
        assert not any(content.startswith(ROLLED_BACK) for _, content in messages)
    return len(rows)


async def assert_all_messages_once(nats_url: str, url: str) -> int:
    """Every committed message of the general outbox is in its stream once, under its key; nothing else."""
    async with postgres(url) as connection:
        keys = sorted(record[0] for record in await connection.fetch("SELECT idempotency_key FROM outbox_messages"))
    assert not any(key.startswith(ROLLED_BACK) for key in keys)
    assert keys == sorted(await stored_ids(nats_url, MESSAGES_STREAM))
    return len(keys)


# ---- writers


@dataclass
class Load:
    """Writers that commit, and now and then roll back, until they are stopped. Survives servers that go away."""

    url: str
    conversations: int = 20
    writers: int = 4
    seed: int = 1
    per_transaction: int = 3
    pause_s: float = 0.0
    has_messages: bool = False
    """Whether each transaction also holds a message of the general outbox."""
    acknowledged: Counter[str] = field(default_factory=Counter)
    """Messages by conversation whose commit was confirmed to the writer."""

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.ids = [uuid.UUID(int=chance.getrandbits(128), version=4) for _ in range(self.conversations)]
        self._stopping = asyncio.Event()
        self.transactions = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        tasks = [asyncio.create_task(self._write(random.Random(self.seed * 100 + n))) for n in range(self.writers)]
        try:
            yield self
        finally:
            self._stopping.set()
            await asyncio.gather(*tasks)

    async def _write(self, chance: random.Random) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(*AWAY):
                async with postgres(self.url) as connection:
                    while not self._stopping.is_set():
                        await self._commit_one(connection, chance)
                        await asyncio.sleep(self.pause_s)
            await asyncio.sleep(0.01)

    async def _commit_one(self, connection: Any, chance: random.Random) -> None:
        picked = sorted(chance.choices(self.ids, k=chance.randint(1, self.per_transaction)))
        if chance.random() < 0.1:
            transaction = connection.transaction()
            await transaction.start()
            await connection.fetch(ENQUEUE, picked[0], ROLLED_BACK)
            await self._enqueue_message(connection, f"{ROLLED_BACK} {chance.getrandbits(64)}")
            await transaction.rollback()
            return
        async with connection.transaction():
            for one in picked:
                await connection.fetch(ENQUEUE, one, f"{one}-{chance.getrandbits(64)}")
            await self._enqueue_message(connection, f"key-{chance.getrandbits(64)}")
        self.acknowledged.update(str(one) for one in picked)
        self.transactions += 1

    async def _enqueue_message(self, connection: Any, key: str) -> None:
        if self.has_messages:
            await connection.fetch(ENQUEUE_MESSAGE, MESSAGES_SUBJECT, envelope_json(key))

    async def assert_nothing_acknowledged_is_lost(self) -> None:
        async with postgres(self.url) as connection:
            rows = await connection.fetch(
                "SELECT conversation_id::text, count(*) FROM conversation_messages GROUP BY 1"
            )
        kept = dict(map(tuple, rows))
        assert all(kept.get(one, 0) >= count for one, count in self.acknowledged.items())


# ---- relays as processes


class StopAt:
    """Kills this process, without a word, the n-th time that a step is reached."""

    def __init__(self, step: str, count: int = 1) -> None:
        self._step = step
        self._left = count

    def __call__(self, step: str) -> None:
        if step == self._step:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class RelayProcess:
    """A relay in a process of its own, killed by the id we started."""

    def __init__(self, nats_url: str, url: str, step: str = "", count: int = 1) -> None:
        code = "import sys; from tests.support.outbox import main; main(*sys.argv[1:])"
        command = [sys.executable, "-c", code, nats_url, url, step, str(count)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> RelayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def main(nats_url: str, url: str, step: str, count: str) -> None:
    face.run(_relay(nats_url, url, StopAt(step, int(count)) if step else None))


async def _relay(nats_url: str, url: str, on_step: StopAt | None) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = RelayOptions(on_step=on_step) if on_step else RelayOptions()
    while True:
        with contextlib.suppress(oncewire.errors.Unavailable):
            async with oncewire.connect(nats_url) as client, asyncio.TaskGroup() as group:
                relay = Relay(client, url, options)
                group.create_task(relay.run())
                await stop.wait()
                relay.stop()
            return
        await asyncio.sleep(0.05)
