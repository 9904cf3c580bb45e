"""Servers that are not what they should be: bounded waits and clear errors, at connect and in mid-stream."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from oncewire._ground.errors import NotConnected, OncewireError, Unavailable
from oncewire._ground.jetstream import Client, Options, State
from tests.support.fakes import Peer, fake
from tests.support.wait import until, within


def quick(url: str, **changes: Any) -> Client:
    options = {"connect_timeout_s": 0.5, "reconnect_delay_min_s": 0.01, "reconnect_delay_max_s": 0.05}
    return Client(Options((url,), **(options | changes)))


GARBAGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "redis": b"-ERR unknown command 'CONNECT'\r\n",
    "postgres": b"E\x00\x00\x00\x8fSFATAL\x00\r\n",
    "zeros": b"\x00" * 100_000 + b"\r\n",
    "random": random.Random(7).randbytes(50_000) + b"\r\n",
    "no line end": b"x" * 300_000,
    "info without json": b"INFO nonsense\r\n",
    "info not utf-8": b'INFO {"server_id":"\xff"}\r\n',
    "message before info": b"MSG a 1 2\r\nhi\r\n" * 3,
    "pong before info": b"PONG\r\nPONG\r\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_at_connect_is_a_clear_error(data: bytes) -> None:
    async def session(peer: Peer) -> None:
        await peer.send(data)
        await peer.gone()

    async with fake(session) as server:
        with pytest.raises(NotConnected, match="no NATS server can be reached") as caught:
            await within(quick(server.url).open())
        assert len(caught.value.message) < 500


WRONG_INFO: list[dict[str, Any]] = [
    {"max_payload": "big"},
    {"server_id": 7},
    {"headers": "yes"},
    {"connect_urls": "a:1"},
    {"connect_urls": [1, 2]},
    {"version": None},
    {"jetstream": [True]},
    {"max_payload": 1.5},
    {"tls_required": 1},
    {"nonce": {"a": 1}},
]


@pytest.mark.parametrize("wrong", WRONG_INFO, ids=str)
async def test_an_info_with_wrong_types_is_a_clear_error(wrong: dict[str, Any]) -> None:
    async def session(peer: Peer) -> None:
        await peer.info(**wrong)
        await peer.answer_pings()

    async with fake(session) as server:
        with pytest.raises(NotConnected, match="INFO of the NATS server is wrong"):
            await within(quick(server.url).open())


@pytest.mark.parametrize("wrong", WRONG_INFO[:4], ids=str)
async def test_an_info_with_wrong_types_in_mid_stream_makes_it_reconnect(wrong: dict[str, Any]) -> None:
    async def session(peer: Peer) -> None:
        await peer.greet()
        if server.connections == 1:
            await peer.info(**wrong)
        await peer.answer_pings()

    async with fake(session) as server, quick(server.url) as client:
        await until(lambda: client.connection.reconnects == 1)
        await within(client.connection.flush())


async def test_odd_facts_in_an_info_are_survived() -> None:
    """Unknown fields, addresses that are none, a version that is none."""

    async def session(peer: Peer) -> None:
        await peer.greet(version="dev", connect_urls=["[bad", "", "x y", "a" * 1_000], news={"deep": [1]})
        await peer.answer_pings()

    async with fake(session) as server, quick(server.url) as client:
        await within(client.connection.flush())
        assert client.server.version_tuple == (0, 0, 0)


async def test_a_server_that_never_says_anything_is_given_up() -> None:
    async def session(peer: Peer) -> None:
        await peer.gone()

    async with fake(session) as server:
        with pytest.raises(NotConnected, match=r"no answer within 0\.5 s"):
            await within(quick(server.url).open())


async def test_a_server_that_never_answers_the_greeting_is_given_up() -> None:
    async def session(peer: Peer) -> None:
        await peer.info()
        await peer.gone()

    async with fake(session) as server:
        with pytest.raises(NotConnected, match=r"no answer within 0\.5 s"):
            await within(quick(server.url).open())


@pytest.mark.parametrize("when", ["at once", "after info", "after connect"])
async def test_a_server_that_closes_is_a_clear_error(when: str) -> None:
    async def session(peer: Peer) -> None:
        if when != "at once":
            await peer.info()
        if when == "after connect":
            await peer.line()

    async with fake(session) as server:
        with pytest.raises(NotConnected, match="no NATS server can be reached"):
            await within(quick(server.url).open())


async def test_a_server_that_closes_again_and_again_is_not_hammered() -> None:
    async def session(peer: Peer) -> None:
        if server.connections == 1:
            await peer.greet()

    async with fake(session) as server:
        changes: list[State] = []
        async with quick(server.url, on_change=lambda state, _: changes.append(state)) as client:
            await until(lambda: server.connections > 5)
            assert client.state is State.RECONNECTING
            with pytest.raises(Unavailable):
                await within(client.publish("a.b", b"", timeout_s=0.2))
        assert changes == [State.CONNECTED, State.RECONNECTING, State.CLOSED]


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_in_mid_stream_makes_it_reconnect(data: bytes) -> None:
    """Nobody knows where the next frame begins: the connection is dropped and made again."""
    if data.startswith((b"-ERR", b"MSG", b"PONG")):
        data = b"nonsense\r\n"

    is_adopted = asyncio.Event()

    async def session(peer: Peer) -> None:
        await peer.greet()
        if server.connections == 1:
            await is_adopted.wait()
            await peer.send(data)
        await peer.answer_pings()

    async with fake(session) as server, quick(server.url) as client:
        is_adopted.set()
        await until(lambda: client.connection.reconnects == 1)
        await within(client.connection.flush())
        assert client.state is State.CONNECTED


async def test_who_waits_when_garbage_comes_is_told() -> None:
    async def session(peer: Peer) -> None:
        await peer.greet()
        while line := await peer.line():
            if line.startswith((b"PUB a.b", b"HPUB a.b")):
                await peer.send(b"garbage\r\n")

    async with fake(session) as server, quick(server.url) as client:
        with pytest.raises(OncewireError, match="not a line of the NATS protocol"):
            await within(client.publish("a.b", b""))
        await until(lambda: client.connection.is_ready)
        with pytest.raises(OncewireError, match="not a line of the NATS protocol"):
            await within(client.call("a.b"))


ANSWERS = {
    "foreign number": b"MSG {inbox}999999 1 2\r\nhi\r\n",
    "no number": b"MSG {inbox}abc 1 2\r\nhi\r\n",
    "huge number": b"MSG {inbox}" + b"9" * 5_000 + b" 1 2\r\nhi\r\n",
    "unknown sid": b"MSG other 77 2\r\nhi\r\n",
    "headers that are none": b"HMSG {inbox}999999 1 4 6\r\nabcdhi\r\n",
    "too many pongs": b"PONG\r\n" * 50,
    "okay": b"+OK\r\n",
}


@pytest.mark.parametrize("data", ANSWERS.values(), ids=ANSWERS.keys())
async def test_answers_that_nobody_asked_for_are_passed_over(data: bytes) -> None:
    async def session(peer: Peer) -> None:
        await peer.greet()
        while line := await peer.line():
            if line.startswith(b"SUB _INBOX"):
                await peer.send(data.replace(b"{inbox}", line.split()[1][:-1]))
            if line.startswith(b"PING"):
                await peer.send(b"PONG\r\n")
            if line.startswith(b"PUB ask"):
                await peer.send(b"MSG %b 1 2\r\nok\r\n" % line.split()[2])

    async with fake(session) as server, quick(server.url) as client:
        assert (await within(client.call("ask"))).payload == b"ok"
        assert client.connection.reconnects == 0


async def test_an_error_line_before_the_close_is_the_reason() -> None:
    async def session(peer: Peer) -> None:
        await peer.greet()
        if server.connections == 1:
            await peer.send(b"-ERR 'Maximum Connections Exceeded'\r\n")
            return
        await peer.answer_pings()

    reasons: list[str] = []
    async with fake(session) as server, quick(server.url, on_change=lambda _, why: reasons.append(why)) as client:
        await until(lambda: client.connection.reconnects == 1)
    assert "Maximum Connections Exceeded" in reasons[1]


async def test_a_server_that_is_full_at_connect_says_so() -> None:
    async def session(peer: Peer) -> None:
        await peer.info()
        await peer.send(b"-ERR 'maximum connections exceeded'\r\n")

    async with fake(session) as server:
        with pytest.raises(NotConnected, match="maximum connections exceeded"):
            await within(quick(server.url).open())


async def test_a_server_that_stops_answering_in_mid_stream_is_left() -> None:
    async def session(peer: Peer) -> None:
        await peer.greet()
        if server.connections == 1:
            await peer.gone()
        await peer.answer_pings()

    async with fake(session) as server, quick(server.url, ping_interval_s=0.05) as client:
        await until(lambda: client.connection.reconnects == 1)


async def test_a_half_frame_that_never_completes_does_not_block_the_keep_alive() -> None:
    async def session(peer: Peer) -> None:
        await peer.greet()
        if server.connections == 1:
            await peer.send(b"MSG a 1 1000\r\nonly a few bytes")
            await peer.gone()
        await peer.answer_pings()

    async with fake(session) as server, quick(server.url, ping_interval_s=0.05) as client:
        await until(lambda: client.connection.reconnects == 1)
        await within(client.connection.flush())


async def test_a_close_during_the_handshake_is_possible() -> None:
    entered = asyncio.Event()

    async def session(peer: Peer) -> None:
        entered.set()
        await peer.gone()

    async with fake(session) as server:
        opening = asyncio.create_task(quick(server.url, connect_timeout_s=60).open())
        await within(entered.wait())
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        assert opening.cancelled()
