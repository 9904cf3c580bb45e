"""Clients that do everything wrong: each is answered or cut, and others hear nothing of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

import oncewire
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import ensure
from oncewire.gateway.websocket import Socket
from tests.support.gateway import Guest, guest, message, new_conversation, node, publish
from tests.support.http import Wire, get, wire
from tests.support.nats import NatsServer
from tests.support.wait import until, within

ROOMS_MAX = 20
FRAMES_MAX = 40
FRAGMENTS_MAX = 8


@pytest.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        yield client


@pytest.fixture
async def bystander(client: Client) -> AsyncIterator[tuple[str, Guest]]:
    """A gateway's address, and somebody in a room who must not be disturbed."""
    conversation = new_conversation()
    async with (
        node(client, frame_bytes_max=2_000, fragments_max=FRAGMENTS_MAX, rooms_per_client_max=ROOMS_MAX) as (_, url),
        guest(url) as one,
    ):
        await publish(client, conversation, 1, 1)
        await one.join(conversation)
        yield url, one
        await publish(client, conversation, 2, 3)
        assert [2, 3] == await one.sequences(2)


async def closed(one: Guest) -> int:
    """The code with which the gateway closes."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await within(one.socket.recv())
    assert one.socket.close_code is not None
    return one.socket.close_code


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "x",
        "[]",
        "null",
        "{}",
        '{"type": "nonsense"}',
        '{"type": "join_room"}',
        '{"type": "join_room", "conversationId": 5}',
        '{"type": "join_room", "conversationId": "c", "resumeFromSeq": -1}',
        '{"type": "join_room", "conversationId": "c", "resumeFromSeq": 1e400}',
        '{"type": "join_room", "conversationId": "c", "resumeFromSeq": 99999999999999999999}',
        '{"type": "ack", "conversationId": "c", "sequence": 1}',
        '{"type": "presence", "conversationId": "c", "state": "online"}',
        "[" * 1_500,
    ],
)
async def test_a_frame_that_is_none_is_answered_and_the_connection_goes_on(
    bystander: tuple[str, Guest], sent: str
) -> None:
    async with guest(bystander[0]) as one:
        await one.socket.send(sent)
        assert "error" == (await one.next())["type"]
        await one.hears_nothing_more()


@pytest.mark.parametrize("id_", ["a.b", ">", "*", "a b", "", "a\r\nPUB x 0", "\x00", "é", "a/b", "x" * 129, "c.>"])
async def test_an_id_cannot_be_another_subject(bystander: tuple[str, Guest], id_: str) -> None:
    async with guest(bystander[0]) as one:
        for type_ in ("join_room", "ack", "resume_from_seq", "presence"):
            sent = {"type": type_, "conversationId": id_, "sequence": 1, "state": "online"}
            await one.socket.send(json.dumps(sent))
            assert "error" == (await one.next())["type"]


async def test_frames_that_break_the_protocol_are_closed_with_its_codes(bystander: tuple[str, Guest]) -> None:
    url, _ = bystander
    async with guest(url) as one:
        await one.socket.send("x" * 2_001)
        assert 1009 == await closed(one)
    async with guest(url) as one:
        await one.socket.send(["x" * 1_500, "x" * 1_500])
        assert 1009 == await closed(one), "in pieces, too"
    async with guest(url) as one:
        await one.socket.send(b"\x00\x01")
        assert 1003 == await closed(one)
    async with guest(url) as one:
        await one.socket.send(b'{"type": "heartbeat", "x": "\xff"}', text=True)
        assert 1007 == await closed(one)


async def upgraded(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket whose bytes are ours."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
    writer.write(get("/any/path?at=all", *lines))
    assert b"101" in await within(reader.readuntil(b"\r\n\r\n"))
    return reader, writer


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x02{}", 1002),  # not masked
        (b"\xf1\x82\0\0\0\0{}", 1002),  # reserved bits
        (b"\x83\x80\0\0\0\0", 1002),  # a kind that is none
        (b"\x80\x80\0\0\0\0", 1002),  # the rest of nothing
        (b"\x89\xfe\x01\x00" + bytes(4 + 256), 1002),  # a ping that is too long
        (b"\x81\xff\x7f" + bytes(7) + bytes(4), 1009),
        (b"GET / HTTP/1.1\r\n\r\n", 1002),
    ],
)
async def test_bytes_that_are_no_frame_are_cut(bystander: tuple[str, Guest], data: bytes, code: int) -> None:
    reader, writer = await upgraded(bystander[0])
    writer.write(data)
    said = await within(reader.read())
    assert struct.pack("!H", code) in said
    writer.close()


async def test_a_frame_may_come_byte_by_byte_and_in_pieces(client: Client, bystander: tuple[str, Guest]) -> None:
    conversation = new_conversation()
    await publish(client, conversation, 1, 2)
    reader, writer = await upgraded(bystander[0])
    sent = json.dumps({"type": "join_room", "conversationId": conversation, "resumeFromSeq": 0}).encode()
    pieces = [Frame(Opcode.TEXT, sent[:9], fin=False), Frame(Opcode.PING, b"?"), Frame(Opcode.CONT, sent[9:])]
    for byte in b"".join(piece.serialize(mask=True) for piece in pieces):
        writer.write(bytes([byte]))
        await writer.drain()
    said = b""
    while said.count(b'"replay":true') < 2:
        said += await within(reader.read(65_536))
    assert b"\x8a\x01?" in said, "the ping in between was answered"
    writer.close()


GARBAGE = Frame(Opcode.TEXT, b"?").serialize(mask=True)
FRAGMENT = b"\x00\x80" + bytes(4)
PING = b"\x89\x80" + bytes(4)


async def test_a_message_has_a_bounded_number_of_fragments(bystander: tuple[str, Guest]) -> None:
    """Empty ones too, which no limit of bytes ends."""
    async with guest(bystander[0]) as one:
        await one.socket.send(['{"type": "heartbeat"', *[" "] * (FRAGMENTS_MAX - 3), "}"])  # and an empty one to end it
        assert "heartbeat" == (await one.next())["type"]
        await one.socket.send(['{"type": "heartbeat"', *[" "] * (FRAGMENTS_MAX - 2), "}"])
        assert 1009 == await closed(one)
    reader, writer = await upgraded(bystander[0])
    writer.write(b"\x01\x80" + bytes(4) + FRAGMENT * 50_000)
    assert struct.pack("!H", 1009) in await within(reader.read())
    writer.close()


@pytest.mark.parametrize(
    "flood",
    [
        GARBAGE,
        PING,
        b"\x01\x80" + bytes(4) + FRAGMENT * (FRAGMENTS_MAX - 2) + b"\x80\x80" + bytes(4),
        b"\x01\x80" + bytes(4) + (PING + FRAGMENT) * (FRAGMENTS_MAX - 2) + b"\x80\x80" + bytes(4),
    ],
    ids=["messages", "pings", "fragments", "fragments and pings"],
)
async def test_a_client_gets_its_frames_a_second_and_no_more_of_one_read(
    client: Client, monkeypatch: pytest.MonkeyPatch, flood: bytes
) -> None:
    """A raw socket sends as fast as it can. What the gateway handles of it is counted frame by frame, while others'
    heartbeats are answered; the rest waits unread, and is not lost."""
    handled: list[float] = []
    on_frame = Socket._on_frame

    def counted(self: Socket, event: Frame) -> None:
        if self.id in hostile_ids:
            handled.append(asyncio.get_running_loop().time())
        on_frame(self, event)

    monkeypatch.setattr(Socket, "_on_frame", counted)
    hostile_ids: set[str] = set()
    async with (
        node(client, frames_per_s_max=FRAMES_MAX, fragments_max=FRAGMENTS_MAX) as (gateway, url),
        guest(url) as one,
        guest(url) as other,
    ):
        known = {socket.id for socket in gateway.sockets}
        reader, writer = await upgraded(url)
        hostile_ids |= {socket.id for socket in gateway.sockets} - known
        assert 1 == len(hostile_ids)
        reading = asyncio.create_task(reader.read())
        writer.write(flood * (3_000_000 // len(flood)))
        heartbeats = 0
        while len(handled) < 4 * FRAMES_MAX:
            before = len(handled)
            await one.hears_nothing_more()
            await other.hears_nothing_more()
            heartbeats += 1
            assert len(handled) - before <= 2 * FRAMES_MAX, "a heartbeat waits for a bounded number of frames"
        lasted_s = handled[-1] - handled[0]
        assert len(handled) <= FRAMES_MAX * (lasted_s + 2)
        assert heartbeats > 4
        writer.transport.abort()
        await asyncio.gather(reading, return_exceptions=True)


async def test_what_waits_for_the_next_second_is_handled_in_order(client: Client) -> None:
    async with node(client, frames_per_s_max=FRAMES_MAX) as (_, url):
        reader, writer = await upgraded(url)
        hello = await within(reader.readuntil(b"}"))
        assert hello
        frames = [Frame(Opcode.PING, b"%03d" % number).serialize(mask=True) for number in range(3 * FRAMES_MAX)]
        writer.write(b"".join(frames))
        answers = await within(reader.readexactly(5 * len(frames)))
        assert [b"\x8a\x03%03d" % number for number in range(len(frames))] == [
            answers[at : at + 5] for at in range(0, len(answers), 5)
        ]
        writer.close()


async def test_thousands_of_joins_are_limited_and_slowed_not_cut(bystander: tuple[str, Guest]) -> None:
    async with guest(bystander[0]) as one:
        for _ in range(1_200):
            await one.say("join_room", new_conversation())
        answers = [(await one.next())["type"] for _ in range(1_200)]
        assert (ROOMS_MAX, 1_200 - ROOMS_MAX) == (answers.count("joined"), answers.count("error"))


async def test_a_body_that_is_no_envelope_reaches_nobody(client: Client, bystander: tuple[str, Guest]) -> None:
    conversation = new_conversation()
    async with guest(bystander[0]) as one:
        await publish(client, conversation, 1, 1)
        await one.join(conversation)
        bodies: list[bytes] = [b"", b"\xff\xfe", b"[]", b"{}", b"null", b'{"version": "2024-12-01"}']
        bodies += [
            message(new_conversation(), 2).payload,
            message(conversation, 2).payload.replace(b"hello", b"\xff\xff"),
        ]
        for body in bodies:
            await client.publish(f"chat.events.{conversation}", body, raw=True)
        await publish(client, conversation, 2, 2)
        assert [2] == await one.sequences(1)


async def _read(guest: Guest, count: int) -> list[int]:
    """The first message of a room tells where one stands in it; then the messages."""
    assert "joined" == (await guest.next())["type"]
    return await guest.sequences(count)


async def test_a_client_that_does_not_read_is_cut_and_resumes_where_it_was(client: Client) -> None:
    """With a code that says so; who reads gets everything meanwhile."""
    conversation = new_conversation()
    limits: dict[str, Any] = {"buffer_bytes_max": 50_000, "slow_s_max": 1.0}
    async with node(client, **limits) as (gateway, url), guest(url, max_queue=1) as slow, guest(url) as quick:
        await slow.join(conversation)
        await quick.join(conversation)
        slow.socket.transport.pause_reading()
        sent, count = "x" * 100_000, 150
        reading = asyncio.create_task(_read(quick, count))
        for n in range(1, count + 1):
            await client.publish_one(message(conversation, n, content=sent))
        assert list(range(1, count + 1)) == await reading
        await until(lambda: gateway.node.counts["slow_clients"])
        slow.socket.transport.resume_reading()
        got = [0]
        with contextlib.suppress(ConnectionClosed):
            while True:
                frame = await slow.next()
                if "sequence" in frame and "event" in frame:
                    got.append(frame["sequence"])
        assert list(range(len(got))) == got
        async with guest(url) as again:
            await again.join(conversation, got[-1])
            assert list(range(got[-1] + 1, count + 1)) == await again.sequences(count - got[-1])


async def test_a_web_page_from_elsewhere_is_refused(bystander: tuple[str, Guest]) -> None:
    url, _ = bystander
    port = int(url.rpartition(":")[2])
    lines = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    lines.append("Sec-WebSocket-Key: " + base64.b64encode(os.urandom(16)).decode())

    async def asked(*more: str) -> int:
        async with wire(port) as web:
            await web.send(get("/ws", *lines, *more))
            return (await Wire.head(web))[0]

    assert 403 == await asked("Origin: https://evil.example")
    assert 403 == await asked("Origin: null")
    assert 101 == await asked("Origin: http://localhost")
    async with wire(port) as web:
        assert 403 == (await web.ask(get("/health").replace(b"localhost", b"evil.example"))).status


async def test_a_request_that_offers_something_else_is_answered_in_http(bystander: tuple[str, Guest]) -> None:
    async with wire(int(bystander[0].rpartition(":")[2])) as web:
        assert 200 == (await web.ask(get("/health", "Upgrade: h2c", "Connection: Upgrade"))).status
        wrong = get("/ws", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 8")
        assert 426 == (await web.ask(wrong)).status
