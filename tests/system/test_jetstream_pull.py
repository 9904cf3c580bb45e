"""Pulling and settling against a real server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from oncewire._ground.errors import ContractViolation, NotConnected, NotFound, Refused, TooLarge, Unavailable
from oncewire._ground.jetstream import Client, Message, Options, Pull, connect, parse_reply
from oncewire._ground.jetstream.pull import nak_verb, parse_replies, term_verb
from tests.support.fakes import Peer, Proxy, fake
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import consumer_info, make_consumer, make_stream, outgoing
from tests.support.wait import until, until_async, within


def quick(url: str, **changes: Any) -> Client:
    return Client(Options((url,), reconnect_delay_min_s=0.01, reconnect_delay_max_s=0.05, **changes))


async def fetch_all(pull: Pull, count: int) -> list[Message]:
    """Fetch until so many have come."""
    found: list[Message] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await pull.fetch(count - len(found))
    return found


def sequences(messages: list[Message]) -> list[int]:
    return [parse_reply(message.reply).sequence for message in messages]


# ---- reading


async def test_messages_come_in_order_with_their_position(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish_many(outgoing(stream, 1_000))
        async with client.pull(stream, "c", batch=64) as pull:
            messages = await fetch_all(pull, 1_000)
            pull.ack(messages)
            await client.connection.flush()

        assert sequences(messages) == list(range(1, 1_001))
        assert [message.payload for message in messages] == [message.payload for message in outgoing(stream, 1_000)]
        where = parse_reply(messages[4].reply)
        assert (where.stream, where.consumer, where.deliveries, where.consumer_sequence) == (stream, "c", 1, 5)
        assert where.timestamp_ns > 0
        await settled(client, stream)


async def settled(client: Client, stream: str, consumer: str = "c") -> None:
    """Wait until nothing is left to deliver or to ack."""

    async def is_settled() -> bool:
        info = await consumer_info(client, stream, consumer)
        return bool(info["num_ack_pending"] == 0 and info["num_pending"] == 0)

    await until_async(is_settled, "everything settled")


async def test_a_fetch_returns_at_most_what_is_asked_for(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish_many(outgoing(stream, 10))
        async with client.pull(stream, "c", batch=10) as pull:
            first = await pull.fetch(3)
            rest = await fetch_all(pull, 10 - len(first))

    assert len(first) <= 3
    assert sequences(first + rest) == list(range(1, 11))


async def test_an_empty_stream_gives_an_empty_list_after_the_timeout(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        async with client.pull(stream, "c") as pull:
            assert await pull.fetch(timeout_s=0.05) == []
            await client.publish(f"{stream}.x", b"now")
            assert [message.payload for message in await within(pull.fetch())] == [b"now"]


async def test_several_requests_are_open_and_refilled(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        async with client.pull(stream, "c", batch=5, ahead=3) as pull:
            assert await pull.fetch(timeout_s=0.02) == []
            info = await consumer_info(client, stream, "c")
            assert info["num_waiting"] == 3
            await client.publish_many(outgoing(stream, 100))
            assert sequences(await fetch_all(pull, 100)) == list(range(1, 101))


async def test_what_waits_here_is_bounded(shared_server: NatsServer) -> None:
    """Nobody fetches: no more than the requests ahead are sent."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream, max_ack_pending=-1)
        await client.publish_many(outgoing(stream, 1_000))
        async with client.pull(stream, "c", batch=50, ahead=2) as pull:
            await within(pull.fetch(1))
            await client.connection.flush()
            assert len(pull._waiting) <= 150


async def test_a_limit_in_bytes_is_kept_and_does_not_stop_the_flow(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish_many(outgoing(stream, 200, size=1_000))
        async with client.pull(stream, "c", batch=100, ahead=1, batch_bytes=10_000) as pull:
            first = await within(pull.fetch())
            assert 0 < len(first) < 10
            messages = first + await fetch_all(pull, 200 - len(first))

        assert sequences(messages) == list(range(1, 201))


async def test_a_message_over_the_limit_in_bytes_is_reported(shared_server: NatsServer) -> None:
    """It could never be delivered under this limit: waiting would be for ever."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish(f"{stream}.x", b"x" * 5_000)
        async with client.pull(stream, "c", batch_bytes=1_000) as pull:
            with pytest.raises(TooLarge, match="MaxBytes"):
                await within(pull.fetch())


async def test_more_than_the_consumer_allows_is_refused_and_not_asked_for_ever(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream, max_batch=10)
        async with client.pull(stream, "c", batch=100) as pull:
            with pytest.raises(Refused, match="MaxRequestBatch"):
                await within(pull.fetch())


async def test_a_consumer_with_too_many_waiting_is_asked_again_in_a_moment() -> None:
    """Not in a tight loop: the server says no each time."""
    full = b"NATS/1.0 409 Exceeded MaxWaiting\r\n\r\n"
    requests: list[bytes] = []

    async def session(peer: Peer) -> None:
        await peer.greet()
        while line := await peer.line():
            if line.startswith(b"PUB $JS.API.CONSUMER.MSG.NEXT"):
                requests.append(line.split()[2])
                size = len(full)
                if len(requests) < 4:
                    await peer.send(b"HMSG %b 2 %d %d\r\n%b\r\n" % (requests[-1], size, size, full))
                else:
                    await peer.send(b"MSG %b 2 $JS.ACK.S.c.1.1.1.1.0 2\r\nhi\r\n" % requests[-1])

    async with fake(session) as server, quick(server.url) as client:
        began = time.monotonic()
        assert len(await within(client.pull("S", "c", ahead=1).fetch())) == 1
        assert time.monotonic() - began >= 0.5
        assert len(requests) == 4


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch": 10_001}, {"ahead": -1}, {"heartbeat_s": 20.0}])
async def test_a_pull_that_makes_no_sense_is_refused(shared_server: NatsServer, wrong: dict[str, Any]) -> None:
    async with connect(shared_server.url) as client:
        with pytest.raises(ContractViolation):
            client.pull("S", "c", **wrong)


# ---- the end of a consumer


async def test_a_consumer_that_is_not_there_is_not_found(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        for name, consumer in ((stream, "missing"), ("MISSING", "c")):
            async with client.pull(name, consumer) as pull:
                with pytest.raises(NotFound, match="does not exist"):
                    await within(pull.fetch())


async def test_a_consumer_that_is_deleted_meanwhile_is_not_found(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        async with client.pull(stream, "c") as pull:
            fetching = asyncio.create_task(pull.fetch())
            await until_async(lambda: is_waited_for(client, stream))
            await client.api(f"CONSUMER.DELETE.{stream}.c")
            with pytest.raises(NotFound):
                await within(fetching)


async def is_waited_for(client: Client, stream: str) -> bool:
    return bool((await consumer_info(client, stream, "c"))["num_waiting"])


async def test_a_closed_pull_says_so(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        pull = client.pull(stream, "c")
        fetching = asyncio.create_task(pull.fetch())
        await asyncio.sleep(0)
        pull.close()
        pull.close()
        with pytest.raises(NotConnected, match="closed"):
            await within(fetching)


async def test_a_push_consumer_cannot_be_pulled(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream, deliver_subject="push.here")
        async with client.pull(stream, "c") as pull:
            with pytest.raises(Refused):
                await within(pull.fetch())


# ---- settling


async def test_a_nak_brings_it_back_after_its_delay(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish_many(outgoing(stream, 2))
        async with client.pull(stream, "c") as pull:
            first, second = await fetch_all(pull, 2)
            began = time.monotonic()
            pull.nak([first], delay_s=0.5)
            pull.nak([second])
            again = await fetch_all(pull, 2)

        assert [parse_reply(message.reply).sequence for message in again] == [2, 1]
        assert [parse_reply(message.reply).deliveries for message in again] == [2, 2]
        assert time.monotonic() - began >= 0.5


async def test_a_term_ends_it_and_its_reason_stands_in_the_advisory(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        told: list[dict[str, Any]] = []
        subject = f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{stream}.c"
        client.subscribe(subject, lambda message: told.append(json.loads(message.payload)))
        await client.publish(f"{stream}.x", b"")
        async with client.pull(stream, "c") as pull:
            pull.term(await fetch_all(pull, 1), "it is\r\nbroken")
            await until(lambda: told)
            await settled(client, stream)

        assert told[0]["reason"] == "it is broken"
        assert told[0]["stream_seq"] == 1


async def test_work_in_progress_keeps_a_message_from_coming_back(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream, ack_wait=300_000_000)
        await client.publish(f"{stream}.x", b"")
        async with client.pull(stream, "c", heartbeat_s=0.5) as pull:
            messages = await fetch_all(pull, 1)
            began = time.monotonic()
            while time.monotonic() - began < 0.9:
                pull.in_progress(messages)
                assert await pull.fetch(timeout_s=0.05) == []
            again = await fetch_all(pull, 1)
            assert parse_reply(again[0].reply).deliveries == 2


async def test_a_settlement_can_be_confirmed(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish_many(outgoing(stream, 50))
        async with client.pull(stream, "c") as pull:
            messages = await fetch_all(pull, 50)
            await pull.settle_confirmed(messages[:48])
            await pull.settle_confirmed([messages[48]], term_verb("no"))
            await pull.settle_confirmed([messages[49]], nak_verb(0))
            assert (await consumer_info(client, stream, "c"))["num_ack_pending"] <= 1
            assert sequences(await fetch_all(pull, 1)) == [50]


async def test_a_confirmation_that_does_not_come_is_unavailable(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish(f"{stream}.x", b"")
        async with client.pull(stream, "c") as pull:
            messages = await fetch_all(pull, 1)
            proxy.hold()
            with pytest.raises(Unavailable, match="not confirmed"):
                await within(pull.settle_confirmed(messages, timeout_s=0.1))
            proxy.release()


async def test_many_acks_are_one_write(shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish_many(outgoing(stream, 200))
        async with client.pull(stream, "c", batch=200) as pull:
            messages = await fetch_all(pull, 200)
            writes: list[bytes] = []
            monkeypatch.setattr(client.connection, "write", writes.append)
            pull.ack(messages)
            pull.ack([])
            monkeypatch.undo()

    assert len(writes) == 1
    assert writes[0].count(b"+ACK\r\n") == 200


@pytest.mark.parametrize(("delay_s", "verb"), [(0.0, b"-NAK"), (1.5, b'-NAK {"delay": 1500000000}'), (1e-12, b"-NAK")])
def test_the_verb_of_a_nak(delay_s: float, verb: bytes) -> None:
    assert verb == nak_verb(delay_s)


def test_the_reason_of_a_term_is_one_bounded_line() -> None:
    assert term_verb() == b"+TERM"
    assert term_verb(" \r\n ") == b"+TERM"
    assert len(term_verb("ä" * 5_000)) <= 1_024 + 6
    term_verb("ä" * 5_000).decode()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"$JS.ACK",
        b"_INBOX.1",
        b"$JS.ACK.s.c.1.2.3.4",
        b"$JS.ACK.s.c.x.2.3.4.5",
        b"$XX.ACK.s.c.1.2.3.4.5",
        b"$JS.ACK.s.c.1.2.3.4.5.6",
        b"$JS.ACK.s\xff.c.1.2.3.4.5",
    ],
)
def test_what_is_no_delivery_is_refused(reply: bytes) -> None:
    with pytest.raises(ContractViolation):
        parse_reply(reply)


@pytest.mark.parametrize(
    "reply",
    [
        b"$JS.ACK.s.c.1.2.3.4.5",
        b"$JS.ACK._.ACCHASH.s.c.1.2.3.4.5",
        b"$JS.ACK.hub.ACCHASH.s.c.1.2.3.4.5.random",
    ],
)
def test_the_longer_reply_subject_of_newer_servers_is_read(reply: bytes) -> None:
    (read,) = parse_replies([reply])
    assert read == parse_reply(reply)
    assert (read.stream, read.consumer, read.deliveries, read.sequence) == ("s", "c", 1, 2)
    assert (read.consumer_sequence, read.timestamp_ns, read.pending) == (3, 4, 5)


# ---- outages


async def test_a_reconnect_resumes_without_losing_anything(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client, quick(server.url) as publisher:
        stream = await make_stream(client)
        await make_consumer(client, stream, ack_wait=500_000_000)
        seen: set[bytes] = set()
        # heartbeats so rare that only the reconnect itself can renew the requests
        async with client.pull(stream, "c", batch=10, heartbeat_s=60.0, expires_s=600.0) as pull:
            for round_ in range(5):
                await publisher.publish_many(outgoing(stream, 40, prefix=f"r{round_}"))
                if round_ % 2:
                    proxy.cut()
                async with asyncio.timeout(30):
                    while len(seen) < 40 * (round_ + 1):
                        messages = await pull.fetch()
                        seen |= {message.payload for message in messages}
                        try:
                            pull.ack(messages)
                        except NotConnected:
                            continue
        assert client.connection.reconnects == 2


async def test_who_may_pull_but_not_look_goes_on_after_a_restart() -> None:
    """The look at the consumer is denied: it must not end the pulling."""
    config = """
        authorization { users: [
            { user: "all", password: "p" }
            { user: "u", password: "p", permissions: { publish: { deny: ["$JS.API.CONSUMER.INFO.>"] } } }
        ] }
    """
    with nats_server(config) as server:
        async with quick(server.url, user="all", password="p") as client:
            stream = await make_stream(client)
            async with quick(server.url, user="u", password="p") as other, other.pull(stream, "c") as pull:
                assert await pull.fetch(timeout_s=0.3) == []  # it is not there yet: nobody answers
                await make_consumer(client, stream)
                await client.publish(f"{stream}.x", b"hi")
                assert [message.payload for message in await fetch_all(pull, 1)] == [b"hi"]


async def test_two_heartbeats_of_silence_and_it_is_asked_again() -> None:
    """The request got lost, the connection is fine."""
    requests: list[bytes] = []

    async def session(peer: Peer) -> None:
        await peer.greet()
        while line := await peer.line():
            if line.startswith(b"PING"):
                await peer.send(b"PONG\r\n")
            if line.startswith(b"PUB $JS.API.CONSUMER.MSG.NEXT"):
                requests.append(line.split()[2])
                if len(requests) == 3:
                    await peer.send(b"MSG %b 2 $JS.ACK.S.c.1.1.1.1.0 2\r\nhi\r\n" % requests[-1])

    async with fake(session) as server, quick(server.url) as client:
        pull = client.pull("S", "c", ahead=1, heartbeat_s=0.05, expires_s=1.0)
        [message] = await within(pull.fetch())
        assert message.payload == b"hi"
        assert pull.missed_heartbeats == 2


async def test_heartbeats_keep_a_quiet_pull_alive(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        async with client.pull(stream, "c", heartbeat_s=0.2, expires_s=2.0) as pull:
            assert await pull.fetch(timeout_s=1.5) == []
            assert pull.missed_heartbeats == 0


async def test_a_pull_asks_again_when_there_is_room_to_write(shared_server: NatsServer) -> None:
    """While the socket takes nothing no request goes out; nobody else would remember to ask."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await make_consumer(client, stream)
        await client.publish(f"{stream}.x", b"hi")
        wire = client.connection._wire
        assert wire is not None
        client.connection.on_writable(wire, is_writable=False)
        async with client.pull(stream, "c") as pull:
            fetching = asyncio.create_task(pull.fetch())
            await asyncio.sleep(0)
            client.connection.on_writable(wire, is_writable=True)
            assert [message.payload for message in await within(fetching)] == [b"hi"]


def test_many_replies_are_read_as_each_alone() -> None:
    one, two = b"$JS.ACK.s.c.1.2.3.4.5", b"$JS.ACK.s.c.2.30.40.50.60"
    strangers = [b"$JS.ACK.s.d.1.2.3.4.5", b"$JS.ACK.hub.ACCHASH.s.c.1.2.3.4.5.random"]
    for replies in ([], [one], [one, two], [one, *strangers, two], [*strangers, one]):
        assert [parse_reply(reply) for reply in replies] == parse_replies(replies)


@pytest.mark.parametrize("reply", [b"$JS.ACK.s.c.1.2.3.4", b"$JS.ACK.s.c.1.2.3.x.5", b"$JS.ACK.s.c.1.2.3.4.5.6", b""])
def test_among_many_replies_one_that_is_none_is_seen(reply: bytes) -> None:
    parse_reply(b"$JS.ACK.s.c.1.2.3.4.5")  # from now on it is known how those of this consumer begin
    with pytest.raises(ContractViolation):
        parse_replies([b"$JS.ACK.s.c.1.2.3.4.5", reply, b"$JS.ACK.s.c.1.2.3.4.5"])
