"""Both clients against a real gateway: resume after a kill, gaps, acks after processing, tokens without a seam."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import oncewire
from oncewire import GatewayClient
from oncewire._ground.jetstream import Client
from oncewire.gateway.client import Limits, Missing, Position, Token
from tests.support.gateway import Running, chunk, lifecycle, new_conversation, node, publish
from tests.support.nats import NatsServer
from tests.support.wait import until, until_async, within

QUICK = Limits(backoff_first_ms=100, backoff_most_ms=1_000)


@pytest.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(shared_server.url) as client:
        await oncewire.init_streams(client)
        yield client


@pytest.fixture
async def url(client: Client) -> AsyncIterator[str]:
    async with node(client) as (_, url):
        yield url


async def take(room: Any, count: int) -> list[int]:
    return [(await within(anext(room))).sequence for _ in range(count)]


async def test_history_then_live_without_a_seam(client: Client, url: str) -> None:
    conversation = new_conversation()
    await publish(client, conversation, 1, 300)
    async with GatewayClient(url, limits=QUICK) as gateway:
        room = gateway.room(conversation, resume=0)
        first = await take(room, 10)
        await publish(client, conversation, 301, 320)
        assert list(range(1, 321)) == first + await take(room, 310)


async def test_a_position_is_resumed_by_the_next_client(client: Client, url: str) -> None:
    """What was in hand when the loop ended was not done: it comes again."""
    conversation = new_conversation()
    await publish(client, conversation, 1, 5)
    async with GatewayClient(url, limits=QUICK) as gateway:
        room = gateway.room(conversation, resume=0)
        assert [1, 2, 3] == await take(room, 3)
        position = room.position
    assert Position(2, "e1") == position
    async with GatewayClient(url, limits=QUICK) as gateway:
        assert [3, 4, 5] == await take(gateway.room(conversation, resume=position), 3)


async def test_what_was_acknowledged_is_not_sent_again(client: Client, url: str) -> None:
    conversation = new_conversation()
    await publish(client, conversation, 1, 4)
    async with GatewayClient(url, limits=QUICK) as gateway:
        room = gateway.room(conversation, resume=0, client_id="phone")
        assert [1, 2, 3] == await take(room, 3)

    async def resumed() -> list[int]:
        async with GatewayClient(url, limits=QUICK) as gateway:
            return await take(gateway.room(conversation, resume="acked", client_id="phone"), 2)

    async def is_resumed() -> bool:
        return [3, 4] == await resumed()  # the ack may still be on its way

    await until_async(is_resumed, "the ack")


async def test_messages_that_are_gone_are_told_in_their_place(client: Client, url: str) -> None:
    """The stream lost the first ones and there is no other history: a gap, and the room goes on."""
    conversation, gaps = new_conversation(), list[Missing]()
    await publish(client, conversation, 1, 6)
    found = await client.api("STREAM.PURGE.CHAT_EVENTS", {"filter": f"chat.events.{conversation}", "keep": 2})
    assert 4 == found["purged"]
    async with GatewayClient(url, limits=QUICK) as gateway:
        room = gateway.room(conversation, resume=1, on_gap=gaps.append)
        assert [5, 6] == await take(room, 2)
        await publish(client, conversation, 7, 7)
        assert [7] == await take(room, 1)
    assert [Missing(2, 4)] == gaps


async def test_a_refused_credential_is_an_error_and_not_a_loop() -> None:
    async def forbid(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(forbid, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with GatewayClient(f"http://127.0.0.1:{port}", limits=QUICK) as gateway:
            with pytest.raises(oncewire.errors.PermissionDenied):
                await within(anext(gateway.room("a")))


async def test_an_answer_goes_on_exactly_where_its_stream_broke(shared_server: NatsServer, client: Client) -> None:
    conversation = new_conversation()
    running = await asyncio.to_thread(Running, shared_server.url)
    try:
        async with GatewayClient(running.url, limits=QUICK) as gateway:
            await client.publish_many([lifecycle(conversation, "started"), chunk(conversation, 1)])
            stream = gateway.tokens(conversation)
            assert "started" == (await within(anext(stream))).status  # type: ignore[union-attr]
            assert Token("a1", "t1 ", "t1 ", False) == await within(anext(stream))
            port = running.port
            running.kill()
            await client.publish_many([chunk(conversation, 2), chunk(conversation, 3)])
            running.stop()
            running = await asyncio.to_thread(Running, shared_server.url, listen=f"127.0.0.1:{port}")
            texts = [(await within(anext(stream))).text for _ in range(2)]
            assert ["t1 t2 ", "t1 t2 t3 "] == texts
            await stream.aclose()  # type: ignore[attr-defined]
    finally:
        running.kill()
        running.stop()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_the_javascript_client_goes_on_after_a_kill(shared_server: NatsServer, client: Client) -> None:
    """Messages once and in order, tokens without a seam, presence said again."""
    conversation, told = new_conversation(), list[dict[str, Any]]()
    running = await asyncio.to_thread(Running, shared_server.url)
    program = str(Path(__file__).parents[1] / "support" / "js_client.mjs")
    pipe = asyncio.subprocess.PIPE
    command = ["node", "--experimental-websocket", "--no-warnings", program, running.url, conversation]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)

    async def listen() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            told.append(json.loads(line))

    def said(kind: str) -> list[Any]:
        return [one["value"] for one in told if one["kind"] == kind]

    listening = asyncio.create_task(listen())
    try:
        await publish(client, conversation, 1, 3)
        await client.publish_many([lifecycle(conversation, "started", 3), chunk(conversation, 1)])
        await until(lambda: [1, 2, 3] == said("message") and said("token"), "the first messages")
        await until(lambda: "online" in said("event"), "presence")
        port = running.port
        running.kill()
        await publish(client, conversation, 4, 6)
        await client.publish_many([chunk(conversation, 2)])
        running.stop()
        running = await asyncio.to_thread(Running, shared_server.url, listen=f"127.0.0.1:{port}")
        await until(lambda: 6 in said("message") and len(said("token")) == 2, "what was said meanwhile")
        await until(lambda: said("event").count("online") >= 2, "presence again")
        assert process.stdin is not None
        process.stdin.write(b"end\n")
        assert 0 == await within(process.wait())
        await within(listening)
    finally:
        if process.returncode is None:
            process.kill()
        running.kill()
        running.stop()
    assert [1, 2, 3, 4, 5, 6] == said("message")
    assert "t1 t2 " == said("token")[-1]["text"]
    assert [{"sequence": 6, "epoch": "e1"}] == said("position")
    assert [] == said("gap")


@pytest.mark.parametrize("before", [0, 2])
async def test_a_room_that_is_only_followed_misses_nothing_over_a_reconnect(
    shared_server: NatsServer, client: Client, before: int
) -> None:
    """Also when nothing was said before the connection broke: joining told where it stood, an empty room's join too."""
    conversation = new_conversation()
    await publish(client, conversation, 1, before)
    running = await asyncio.to_thread(Running, shared_server.url)
    try:
        async with GatewayClient(running.url, limits=QUICK) as gateway:
            room = gateway.room(conversation)
            await within(room.is_joined.wait())
            port = running.port
            running.kill()
            await publish(client, conversation, before + 1, before + 2)
            running.stop()
            running = await asyncio.to_thread(Running, shared_server.url, listen=f"127.0.0.1:{port}")
            assert [before + 1, before + 2] == await take(room, 2)
    finally:
        running.kill()
        running.stop()


async def test_a_room_beyond_the_limit_is_joined_once_another_is_left(client: Client) -> None:
    """Rooms come and go without end, and what was refused for the limit is tried again."""
    rooms = [new_conversation() for _ in range(12)]
    for conversation in rooms:
        await publish(client, conversation, 1, 1)
    async with node(client, rooms_per_client_max=2) as (gateway, url), GatewayClient(url, limits=QUICK) as reader:
        for conversation in rooms[:10]:
            room = reader.room(conversation, resume=0)
            assert [1] == await take(room, 1)
            room.leave()
        held = [reader.room(conversation, resume=0) for conversation in rooms[9:]]
        assert [[1], [1]] == [await take(room, 1) for room in held[:2]]
        await until(lambda: gateway.node.counts["refused_frames"], "a refusal")
        held[0].leave()
        assert [1] == await take(held[2], 1)
