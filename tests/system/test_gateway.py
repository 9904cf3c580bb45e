"""The gateway's frames, by a client that is not ours, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import oncewire
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import ensure
from oncewire.gateway.frames import Conversation
from tests.support.gateway import guest, lifecycle, message, new_conversation, node, publish
from tests.support.nats import NatsServer
from tests.support.wait import until


@pytest.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        yield client


@pytest.fixture
async def url(client: Client) -> AsyncIterator[str]:
    async with node(client, backlog_size=20) as (_, url):
        yield url


async def test_a_client_is_greeted_with_the_protocol_s_version(url: str) -> None:
    async with guest(url) as one:
        assert ("hello", "2024-12-01") == (one.hello["type"], one.hello["protocol"])
        assert one.hello["id"]


async def test_a_heartbeat_is_answered_with_the_time(url: str) -> None:
    async with guest(url) as one:
        await one.say("heartbeat", ts=1)
        answer = await one.next()
        assert "heartbeat" == answer["type"]
        assert answer["ts"] > 1_600_000_000_000


async def test_without_a_position_a_join_is_live_only(client: Client, url: str) -> None:
    conversation = new_conversation()
    await publish(client, conversation, 1, 3)
    async with guest(url) as one:
        joined = {"type": "joined", "conversationId": conversation, "epoch": "e1", "after": 3}
        assert joined == await one.join(conversation)
        await publish(client, conversation, 4, 5)
        assert [4, 5] == await one.sequences(2)


async def test_a_room_without_messages_has_no_epoch_and_takes_whatever_comes_first(client: Client, url: str) -> None:
    conversation = new_conversation()
    async with guest(url) as one:
        joined = {"type": "joined", "conversationId": conversation, "epoch": None, "after": 0}
        assert joined == await one.join(conversation)
        await publish(client, conversation, 7, 8)
        assert joined | {"epoch": "e1", "after": 6} == await one.next(), "now it is known where it begins"
        assert [7, 8] == await one.sequences(2)


@pytest.mark.parametrize("after", [0, 1, 30, 59, 60])
async def test_a_join_resumes_after_its_sequence_from_memory_or_from_the_stream(
    client: Client, url: str, after: int
) -> None:
    conversation, other = new_conversation(), new_conversation()
    for n in range(1, 61):
        await client.publish_one(message(other, n))
        await client.publish_one(message(conversation, n))
        if n % 7 == 0:
            await client.publish_one(lifecycle(conversation, "started", n))
    async with guest(url) as one:
        await one.join(conversation, after)
        await publish(client, conversation, 61, 62)
        assert list(range(after + 1, 63)) == await one.sequences(62 - after)
        await one.hears_nothing_more()


async def test_envelopes_are_forwarded_byte_by_byte_and_marked_only_when_sent_again(client: Client, url: str) -> None:
    conversation = new_conversation()
    first, second = message(conversation, 1, content="Grüße \U0001f600"), message(conversation, 2)
    await client.publish_one(first)
    async with guest(url) as one:
        await one.join(conversation, 0)
        assert first.payload[:-1] + b',"replay":true}' == (await one.socket.recv(decode=False))
        await client.publish_one(second)
        assert second.payload == await one.socket.recv(decode=False)


async def test_a_client_that_follows_the_specification_gets_on_in_a_lively_room_at_its_limit(
    server: NatsServer,
) -> None:
    """Each message drops the oldest one. What is asked for is fetched while the room goes on, then it is resumed from
    the requested value, to the letter: the next frame must be the next message and not another request."""
    conversation, kept = new_conversation(), 30
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        config = (await client.api("STREAM.INFO.CHAT_EVENTS"))["config"]
        await client.api("STREAM.UPDATE.CHAT_EVENTS", config | {"max_msgs_per_subject": kept})
        await publish(client, conversation, 1, 2 * kept)
        async with node(client, backlog_size=20) as (_, url), guest(url) as one:
            await one.join(conversation, 5)
            up_to = (await one.next())["control"]["upToSequence"]
            await publish(client, conversation, 2 * kept + 1, 2 * kept + 8)  # said while it fetches history
            await one.say("resume_from_seq", conversation, sequence=up_to, epoch="e1")
            assert list(range(up_to + 1, 2 * kept + 9)) == await one.sequences(2 * kept + 8 - up_to)
            await one.hears_nothing_more()


async def test_a_room_that_was_left_sends_nothing_more_and_no_longer_counts(client: Client) -> None:
    first = new_conversation()
    async with node(client, rooms_per_client_max=5) as (gateway, url), guest(url) as one:
        await one.join(first)
        await one.say("leave_room", first)
        assert {"type": "left", "conversationId": first} == await one.next()
        await publish(client, first, 1, 2)
        await until(lambda: gateway.node.rooms[Conversation(first)].last == 2)
        await one.hears_nothing_more()
        for _ in range(20):
            conversation = new_conversation()
            assert "joined" == (await one.join(conversation, 0))["type"]
            await one.say("leave_room", conversation)
            assert "left" == (await one.next())["type"]
        await one.join(first, 0)
        assert [1, 2] == await one.sequences(2)
        await one.say("leave_room", new_conversation())
        assert "left" == (await one.next())["type"], "also of a room that it was not in"
