"""A gateway with PostgreSQL: what the stream has forgotten is in the archive, and clients get it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

import oncewire
from oncewire import GatewayClient
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import ensure
from oncewire.gateway.client import Limits, Missing, Position
from oncewire.gateway.run import serving
from oncewire.outbox import relaying
from oncewire.outbox.archive import ConversationArchive
from tests.support.gateway import guest, lifecycle
from tests.support.nats import NatsServer
from tests.support.outbox import ENQUEUE, drained
from tests.support.postgres import shared_postgres
from tests.support.wait import within

QUICK = Limits(backoff_first_ms=100, backoff_most_ms=1_000)


@dataclass
class Chat:
    """A database, its stream, and the address of a gateway that reads both."""

    client: Client
    connection: Any
    database_url: str
    url: str

    async def say(self, conversation: str, count: int) -> None:
        """Messages of a conversation, committed and relayed."""
        for number in range(count):
            await self.connection.fetch(ENQUEUE, uuid.UUID(conversation), f"text {number}")
        async with relaying(self.client, self.database_url):
            await drained(self.database_url)

    async def forget(self, conversation: str, *, keep: int = 0) -> None:
        """What max_age does to a conversation that is quiet."""
        await self.client.api("STREAM.PURGE.CHAT_EVENTS", {"filter": f"chat.events.{conversation}", "keep": keep})


@pytest.fixture
async def chat(shared_server: NatsServer) -> AsyncIterator[Chat]:
    database_url = await shared_postgres().new_database()
    connection = await asyncpg.connect(database_url)
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        archive = ConversationArchive(database_url)
        async with serving(client, "127.0.0.1", 0, archive=archive, stop_s=1.0) as gateway:
            assert gateway.server is not None
            yield Chat(client, connection, database_url, f"http://127.0.0.1:{gateway.server.port}")
    await connection.close()


async def take(room: Any, count: int) -> list[int]:
    return [(await within(anext(room))).sequence for _ in range(count)]


@pytest.mark.parametrize(("resume", "first"), [(0, 1), (3, 4), ("acked", 1)])
async def test_a_conversation_that_was_quiet_for_long_is_there_when_it_is_opened(
    chat: Chat, resume: Any, first: int
) -> None:
    """Its subject is empty, and nothing new is said."""
    conversation, gaps = str(uuid.uuid4()), list[Missing]()
    await chat.say(conversation, 5)
    await chat.forget(conversation)
    async with GatewayClient(chat.url, limits=QUICK) as gateway:
        room = gateway.room(conversation, resume=resume, client_id="phone", on_gap=gaps.append)
        assert list(range(first, 6)) == await take(room, 6 - first)
        await chat.say(conversation, 1)
        assert [6] == await take(room, 1)
    assert [] == gaps


async def test_a_join_of_a_quiet_conversation_names_its_last_message_and_its_epoch(chat: Chat) -> None:
    """Also where the stream still has something of it that is not a message."""
    conversation = str(uuid.uuid4())
    await chat.say(conversation, 5)
    epoch = await chat.connection.fetchval("SELECT epoch FROM conversations WHERE id = $1", uuid.UUID(conversation))
    await chat.forget(conversation)
    await chat.client.publish_one(lifecycle(conversation, "started", 5))
    async with guest(chat.url) as one:
        joined = {"type": "joined", "conversationId": conversation, "epoch": epoch, "after": 5}
        assert joined == await one.join(conversation)
        await one.hears_nothing_more()
    async with guest(chat.url) as one:
        await one.join(conversation, 5, epoch=epoch)
        await one.hears_nothing_more()
    async with guest(chat.url) as one:
        await one.join(conversation, 3, epoch=epoch)
        control = (await one.next())["control"]
        assert (5, epoch) == (control["upToSequence"], control["epoch"])


async def test_a_live_client_of_a_quiet_conversation_misses_nothing_over_a_reconnect(chat: Chat) -> None:
    conversation = str(uuid.uuid4())
    await chat.say(conversation, 2)
    await chat.forget(conversation)
    async with GatewayClient(chat.url, limits=QUICK) as gateway:
        room = gateway.room(conversation)
        await within(room.is_joined.wait())
        position = room.position
    assert position is not None
    assert 2 == position.sequence
    await chat.say(conversation, 2)
    await chat.forget(conversation)
    async with GatewayClient(chat.url, limits=QUICK) as gateway:
        assert [3, 4] == await take(gateway.room(conversation, resume=position), 2)


async def test_a_conversation_that_does_not_exist_yet_begins_at_its_first_message(chat: Chat) -> None:
    conversation = str(uuid.uuid4())
    async with GatewayClient(chat.url, limits=QUICK) as gateway:
        room = gateway.room(conversation)
        await within(room.is_joined.wait())
        assert Position(0, None) == room.position
        await chat.say(conversation, 2)
        assert [1, 2] == await take(room, 2)
