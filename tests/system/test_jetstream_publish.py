"""Confirmed publishing against a real server: what is stored, under which id, and what the caller is told."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import pytest

from oncewire._ground.errors import (
    Conflict,
    ContractViolation,
    NotConnected,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    Overloaded,
    Refused,
    TooLarge,
    Unavailable,
)
from oncewire._ground.jetstream import Client, Options, Outgoing, PubAck, connect
from tests.support.fakes import Peer, Proxy, fake
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import make_stream, outgoing, state_of, stored_ids, unique, witness
from tests.support.wait import until, within


def quick(url: str, **changes: Any) -> Client:
    return Client(Options((url,), reconnect_delay_min_s=0.01, reconnect_delay_max_s=0.05, **changes))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost answers are noticed soon."""
    monkeypatch.setattr("oncewire._ground.jetstream.publish.RESEND_S", 0.2)
    monkeypatch.setattr("oncewire._ground.jetstream.publish.SWEEP_S", 0.05)


# ---- one message


async def test_a_publish_returns_where_the_message_stands(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        first = await client.publish(f"{stream}.a", b"one")
        second = await client.publish(f"{stream}.a", {"n": 2})

        assert (first.stream, first.sequence, first.is_duplicate) == (stream, 1, False)
        assert second.sequence == 2
        assert (await client.get(stream, 1)).payload == b"one"
        assert json.loads((await client.get(stream, 2)).payload) == {"n": 2}
        for like_bytes in (bytearray(b"raw"), memoryview(b"raw")):
            ack = await client.publish(f"{stream}.a", like_bytes)
            assert (await client.get(stream, ack.sequence)).payload == b"raw"
        for wrong in (object(), {"a": {1, object()}}):
            with pytest.raises(ContractViolation, match="written as JSON"):
                await client.publish(f"{stream}.a", wrong)  # type: ignore[arg-type]
        with pytest.raises(ContractViolation, match="NaN or an infinite number"):
            await client.publish(f"{stream}.a", {"amount": float("nan")})
        for options in ({"msg_id": 5}, {"headers": {"a": 5}}, {"headers": "a"}, {"subject": 5}):
            with pytest.raises(ContractViolation, match="publish: "):
                await client.publish(**{"subject": f"{stream}.a", "payload": b"x"} | options)  # type: ignore[arg-type]
        assert (await state_of(client, stream))["messages"] == 4


@pytest.mark.parametrize("way", ["publish_many", "publish_all"])
@pytest.mark.parametrize("count", [1, 700])
async def test_one_outcome_per_message_whatever_a_message_holds(
    shared_server: NatsServer, way: str, count: int
) -> None:
    """One that can never be written is its own outcome, wherever it is, and the others are stored."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        good = [Outgoing(f"{stream}.a", b"x", f"id-{number}") for number in range(count)]
        wrong: list[Any] = [
            Outgoing(f"{stream}.a", b"x", headers={"a": 5}),  # type: ignore[dict-item]
            Outgoing(f"{stream}.a", b"x", headers="a"),  # type: ignore[arg-type]
            Outgoing(f"{stream}.a", b"x", msg_id=5),  # type: ignore[arg-type]
            Outgoing(f"{stream}.a", b"x", msg_id="\ud800"),
            Outgoing(f"{stream}.a", None),  # type: ignore[arg-type]
            Outgoing(f"{stream}.a", "text"),  # type: ignore[arg-type]
        ]
        if way == "publish_many":
            wrong += [
                Outgoing(5, b"x"),  # type: ignore[arg-type]
                Outgoing("sr.queries.x", b"x"),
                {"subject": f"{stream}.a"},
            ]
        messages = [*good, *wrong, *(Outgoing(f"{stream}.a", b"x", f"late-{one}") for one in range(count))]
        outcomes = await getattr(client, way)(messages)

        assert [isinstance(one, PubAck) for one in outcomes] == [True] * count + [False] * len(wrong) + [True] * count
        assert all(isinstance(one, Refused) for one in outcomes[count:-count])
        assert (await state_of(client, stream))["messages"] == 2 * count


async def test_names_and_subjects_that_could_only_go_wrong_are_refused(shared_server: NatsServer) -> None:
    async def answer(_: Any) -> bytes:
        return b""

    async with connect(shared_server.url) as client:
        for names in (("a.b", "c"), ("a", "b.c"), ("a", "*"), ("", "c"), ("a b", "c"), ("a/b", "c"), (5, "c")):
            with pytest.raises(ContractViolation, match="pull: "):
                client.pull(*names)  # type: ignore[arg-type]
        for subject in (">", "*.>", "*.ACK.>", "$JS.ACK.>", "$JS.API.>", "_INBOX.>", "$SYS.REQ.>"):
            with pytest.raises(Refused, match="would answer what others send"):
                client.serve(subject, answer)
        assert client.serve("mine.>", answer)
        with pytest.raises(Refused, match="the client is open already"):
            await client.open()
        assert (await client.api("INFO"))["streams"] >= 0
    opening = connect(shared_server.url)
    results = await asyncio.gather(opening.open(), opening.open(), return_exceptions=True)
    assert [type(one) for one in results] == [type(None), Refused]
    await opening.close()
    await opening.open()
    await opening.close()


async def test_large_messages_go_both_ways() -> None:
    with nats_server("max_payload: 8MB") as server:
        async with connect(server.url) as client:
            stream = await make_stream(client)
            payload = bytes(range(256)) * (4 * 7_900)
            await client.publish(f"{stream}.a", payload, msg_id="1", headers={"A": "b"})
            assert (await client.get(stream, 1)).payload == payload
            async with client.read(stream) as reader:
                [message] = await within(reader.fetch())
            assert message.payload == payload
            with pytest.raises(TooLarge):
                await client.publish(f"{stream}.a", b"x" * (8 * 1024 * 1024 - 16 * 1024 + 1))


async def test_an_id_is_stored_once(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        first = await client.publish(f"{stream}.a", b"", msg_id="same")
        again = await client.publish(f"{stream}.a", b"", msg_id="same")

        assert (first.is_duplicate, again.is_duplicate) == (False, True)
        assert first.sequence == again.sequence
        assert (await state_of(client, stream))["messages"] == 1


@pytest.mark.parametrize("msg_id", ["ä-日本", "with space", "a:b:c", "x" * 3_000, "tab\tin", '"quoted"'])
async def test_odd_ids_are_ids(shared_server: NatsServer, msg_id: str) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish(f"{stream}.a", b"", msg_id=msg_id)
        again = await client.publish(f"{stream}.a", b"", msg_id=msg_id, headers={"A": "b"})

        assert again.is_duplicate
        assert (await client.get(stream, 1)).headers == {"Nats-Msg-Id": msg_id}


@pytest.mark.parametrize("msg_id", ["a\r\nb", "a\nNats-Expected-Stream: x", "\x00", "\ud800"])
async def test_an_id_cannot_break_out_of_its_line(shared_server: NatsServer, msg_id: str) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        with pytest.raises(ContractViolation):
            await client.publish(f"{stream}.a", b"", msg_id=msg_id)
        assert (await state_of(client, stream))["messages"] == 0


async def test_expectations_that_do_not_hold_are_conflicts_with_the_servers_number(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish(f"{stream}.a", b"", expected_last_sequence=0)
        await client.publish(f"{stream}.b", b"", expected_last_subject_sequence=0)
        for wrong in ({"expected_last_sequence": 1}, {"expected_last_subject_sequence": 0}):
            with pytest.raises(Conflict) as caught:
                await client.publish(f"{stream}.b", b"", **wrong)
            assert caught.value.server_code == 10071
        with pytest.raises(Conflict) as caught:
            await client.publish_one(Outgoing(f"{stream}.b", b"", expected_stream="OTHER"))
        assert caught.value.server_code == 10060
        await client.publish(f"{stream}.b", b"", expected_last_subject_sequence=2)


async def test_a_subject_that_no_stream_takes_is_not_found_soon(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        with pytest.raises(NotFound, match="no stream captures"):
            await within(client.publish(unique("nothing."), b"", timeout_s=600))
        with pytest.raises(NotFound, match="no stream captures"):
            await within(client.publish(unique("nothing."), b"", msg_id="1", timeout_s=600))


async def test_a_server_without_jetstream_says_so() -> None:
    with nats_server() as server:
        server.stop()
        server.jetstream = False
        server.start()
        async with connect(server.url) as client:
            for use in (client.publish("a.b", b"", timeout_s=600), client.api("INFO", timeout_s=600)):
                with pytest.raises(OncewireError, match="JetStream") as caught:
                    await within(use)
                assert "JetStream" in caught.value.hint


async def test_queries_are_not_published(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        bad = Outgoing("sr.queries.users.get", b"")
        for publish_each in (client.publish_many, client.publish_all):
            (outcome,) = await publish_each([bad])
            assert isinstance(outcome, Refused)
            assert "for requests" in outcome.message
        for publish in (client.publish_atomic, client.publish_fast):
            with pytest.raises(Refused, match="for requests"):
                await within(publish([bad, bad]))
        with pytest.raises(Refused, match="for requests"):
            await client.publish(bad.subject, b"")


async def test_what_answers_in_a_streams_place_is_reported(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        for answer in (b"not json", b"[]", b"{}", b'{"error": 7}', b"null", b""):
            subject = unique("odd.")
            client.subscribe(
                subject, lambda message, answer=answer: client.connection.write(_pub(message.reply, answer))
            )
            with pytest.raises(OncewireError) as caught:
                await within(client.publish(subject, b"", timeout_s=0.5))
            assert caught.value.message


def _pub(subject: bytes, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


# ---- many


async def test_many_are_stored_in_order_and_each_has_its_own_outcome(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        messages = outgoing(stream, 3_000)
        outcomes = await client.publish_many(messages)

        assert [getattr(outcome, "sequence", outcome) for outcome in outcomes] == list(range(1, 3_001))
        assert await stored_ids(shared_server.url, stream) == [message.msg_id for message in messages]
        again = await client.publish_many(messages)
        assert all(isinstance(outcome, PubAck) and outcome.is_duplicate for outcome in again)


async def test_bad_messages_get_their_own_errors_and_hold_up_nobody(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, max_msg_size=1_000)
        limit = client.server.max_payload
        good = Outgoing(f"{stream}.a", b"ok")
        messages = [
            good,
            Outgoing("a..b", b"no subject"),
            good,
            Outgoing(f"{stream}.a", b"x" * (limit + 1)),
            Outgoing(f"{stream}.a", b"x", headers={"A": "b\r\nc"}),
            Outgoing(f"{stream}.a", b"x" * 2_000),
            Outgoing(unique("nobody."), b""),
            Outgoing(f"{stream}.a", b"", expected_last_sequence=77),
            good,
        ]
        for publish in (client.publish_many, client.publish_all):
            outcomes = await within(publish(messages))
            assert [type(outcome) for outcome in outcomes] == [
                PubAck,
                ContractViolation,
                PubAck,
                TooLarge,
                ContractViolation,
                TooLarge,
                NotFound,
                Conflict,
                PubAck,
            ]
        assert (await state_of(client, stream))["messages"] == 6


async def test_nothing_to_publish_is_nothing_to_do(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        assert await client.publish_many([]) == []
        assert await client.publish_all([]) == []
        with pytest.raises(Refused):
            await client.publish_atomic([])


async def test_many_publishers_share_a_connection(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        jobs = [client.publish_many(outgoing(stream, 500, prefix=f"p{n}")) for n in range(40)]
        results = await within(asyncio.gather(*jobs))

        sequences = [outcome.sequence for outcomes in results for outcome in outcomes if isinstance(outcome, PubAck)]
        assert sorted(sequences) == list(range(1, 20_001))
        assert client.publisher._pending_bytes == 0


async def test_an_outage_gives_each_message_its_outcome(server: NatsServer) -> None:
    """Not an exception that hides what became of those before it."""
    async with quick(server.url) as client:
        stream = await make_stream(client)
        server.kill()
        for publish in (client.publish_many, client.publish_all):
            outcomes = await within(publish(outgoing(stream, 1_200), timeout_s=0.3))
            assert len(outcomes) == 1_200
            assert all(isinstance(outcome, Unavailable) for outcome in outcomes)


# ---- atomic batches


@pytest.mark.parametrize("count", [1, 2, 50, 1_000])
async def test_an_atomic_batch_is_stored_as_a_whole(shared_server: NatsServer, count: int) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish(f"{stream}.x", b"before")
        messages = outgoing(stream, count)
        ack = await client.publish_atomic(messages)

        assert (ack.stream, ack.sequence, ack.count) == (stream, count + 1, count)
        found = await client.get_batch(stream, sequence=2)
        assert [one.payload for one in found] == [message.payload for message in messages]
        assert {"Nats-Msg-Id": "m-0"}.items() <= found[0].headers.items()


async def test_a_batch_over_the_limit_is_refused_here(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        with pytest.raises(Refused, match="1 to 1000 messages"):
            await client.publish_atomic(outgoing("s", 1_001))


async def test_a_batch_with_a_duplicate_is_refused_whole_and_goes_one_by_one(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        messages = outgoing(stream, 20)
        await client.publish_one(messages[7])
        with pytest.raises(Conflict) as caught:
            await client.publish_atomic(messages)
        assert caught.value.server_code == 10201
        assert (await state_of(client, stream))["messages"] == 1

        outcomes = await client.publish_all(messages)
        assert [outcome.is_duplicate for outcome in outcomes if isinstance(outcome, PubAck)] == [
            index == 7 for index in range(20)
        ]
        assert sorted(await stored_ids(shared_server.url, stream)) == sorted(message.msg_id for message in messages)


async def test_a_batch_with_the_same_id_twice_goes_one_by_one(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        messages = [*outgoing(stream, 5), *outgoing(stream, 5)]
        outcomes = await client.publish_all(messages)

        assert [outcome.is_duplicate for outcome in outcomes if isinstance(outcome, PubAck)] == [False] * 5 + [True] * 5
        assert len(await stored_ids(shared_server.url, stream)) == 5


async def test_a_stream_without_batches_takes_the_messages_one_by_one(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, allow_atomic=False)
        with pytest.raises(Refused) as caught:
            await client.publish_atomic(outgoing(stream, 3))
        assert caught.value.server_code == 10174

        outcomes = await client.publish_all(outgoing(stream, 3))
        assert [type(outcome) for outcome in outcomes] == [PubAck] * 3


async def test_a_server_without_batches_takes_the_messages_one_by_one(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        client.connection.server = msgspec.structs.replace(client.server, version="2.11.9")
        with pytest.raises(Refused, match=r"2\.11\.9 has no atomic batches"):
            await client.publish_atomic(outgoing(stream, 3))

        outcomes = await client.publish_all(outgoing(stream, 3))
        assert [type(outcome) for outcome in outcomes] == [PubAck] * 3
        ingested = await client.publish_fast(outgoing(stream, 3, prefix="fast"))
        assert (ingested.sequence, ingested.count) == (6, 3)


async def test_more_batches_than_a_server_holds_open_all_go_through(shared_server: NatsServer) -> None:
    """The server refuses more than 50 open batches on a stream; a client keeps fewer open by itself."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        jobs = [client.publish_atomic(outgoing(stream, 20, prefix=f"b{n}")) for n in range(120)]
        acks = await within(asyncio.gather(*jobs))

        assert {ack.count for ack in acks} == {20}
        assert (await state_of(client, stream))["messages"] == 2_400


async def test_a_server_with_too_many_open_batches_is_overloaded(shared_server: NatsServer) -> None:
    """Others hold them open: ours is refused as a batch, and goes one by one in publish_all."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        for number in range(60):
            header = f"NATS/1.0\r\nNats-Batch-Id: foreign-{number}\r\nNats-Batch-Sequence: 1\r\n\r\n".encode()
            frame = b"HPUB %b.x %d %d\r\n%b\r\n" % (stream.encode(), len(header), len(header), header)
            client.connection.write(frame)
        await client.connection.flush()
        with pytest.raises(Overloaded) as caught:
            await client.publish_atomic(outgoing(stream, 3))
        assert caught.value.server_code == 10210

        outcomes = await client.publish_all(outgoing(stream, 3))
        assert [type(outcome) for outcome in outcomes] == [PubAck] * 3


async def test_expectations_hold_inside_a_batch(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish(f"{stream}.a", b"")
        good = [
            Outgoing(f"{stream}.a", b"1", expected_last_subject_sequence=1),
            Outgoing(f"{stream}.b", b"2", expected_last_subject_sequence=0),
            Outgoing(f"{stream}.a", b"3"),
        ]
        await client.publish_atomic(good)
        with pytest.raises(Conflict) as caught:
            await client.publish_atomic(good)
        assert caught.value.server_code in (10071, 10164)
        assert (await state_of(client, stream))["messages"] == 4


async def test_a_long_list_goes_as_several_batches(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        messages = outgoing(stream, 2_500)
        outcomes = await client.publish_all(messages)

        assert [getattr(outcome, "sequence", outcome) for outcome in outcomes] == list(range(1, 2_501))
        assert await stored_ids(shared_server.url, stream) == [message.msg_id for message in messages]


# ---- fast ingest


async def test_fast_ingest_stores_all_once(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, allow_batched=True)
        messages = outgoing(stream, 7_000)
        ingested = await client.publish_fast(messages)
        assert (ingested.sequence, ingested.count) == (7_000, 7_000)
        assert ingested == await client.publish_fast(messages)

        assert await stored_ids(shared_server.url, stream) == [message.msg_id for message in messages]


async def test_fast_ingest_tells_the_highest_sequence_also_where_some_stood_there_already(
    shared_server: NatsServer,
) -> None:
    """The server answers with the last one that is new, and with none when none is."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, allow_batched=True)
        messages = outgoing(stream, 30)
        found = [await client.publish_fast(part) for part in (messages[:20], messages[5:15], messages[10:], messages)]

        assert [one.sequence for one in found] == [20, 15, 30, 30]
        assert [one.count for one in found] == [20, 10, 20, 30]


async def test_fast_ingest_that_the_stream_does_not_allow_goes_as_singles(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        ingested = await client.publish_fast(outgoing(stream, 50))

        assert ingested.count == 50
        assert (await state_of(client, stream))["messages"] == 50


@pytest.mark.parametrize("count", [10, 1_000])
@pytest.mark.parametrize("bad", [0, 5, 9])
async def test_fast_ingest_never_doubles_what_has_no_id(shared_server: NatsServer, count: int, bad: int) -> None:
    """A message in the middle is refused: those before it are stored already."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, allow_batched=True, max_msg_size=1_000)
        messages = [Outgoing(f"{stream}.x", b"%d" % n if n != bad else b"x" * 2_000) for n in range(count)]
        with pytest.raises((OutcomeUnknown, TooLarge)):
            await within(client.publish_fast(messages))

        found = []
        while batch := await client.get_batch(stream, sequence=found[-1].sequence + 1 if found else 1):
            found += batch
        payloads = [one.payload for one in found]
        assert len(payloads) == len(set(payloads))


async def test_fast_ingest_with_ids_stores_all_but_the_bad_one(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, allow_batched=True, max_msg_size=1_000)
        messages = outgoing(stream, 100)
        messages[50] = Outgoing(f"{stream}.x", b"x" * 2_000, "bad")
        with pytest.raises(TooLarge):
            await within(client.publish_fast(messages))
        ids = await stored_ids(shared_server.url, stream)
        assert sorted(ids) == sorted(message.msg_id for message in messages if message.msg_id != "bad")


async def test_fast_ingest_that_is_cut_continues_under_the_same_ids(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client, allow_batched=True)
        messages = outgoing(stream, 20_000)
        publishing = asyncio.create_task(client.publish_fast(messages))
        await until(lambda: client.connection._out_bytes or client.publisher.connection._subs)
        await until_some_stored(client, server, stream)
        proxy.cut()
        ingested = await within(publishing)

        assert ingested.count == 20_000
    ids = await stored_ids(server.url, stream)
    assert sorted(ids) == sorted(message.msg_id for message in messages)


async def until_some_stored(client: Client, server: NatsServer, stream: str) -> None:
    async with connect(server.url) as other:
        async with asyncio.timeout(30):
            while (await state_of(other, stream))["messages"] == 0:
                pass


# ---- what a broken connection leaves open


async def test_what_was_stored_but_not_confirmed_is_sent_again_and_not_stored_twice(server: NatsServer) -> None:
    """The answers are lost, the connection breaks: the same ids again, which the server drops."""
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        proxy.swallow_answers = True
        messages = outgoing(stream, 100)
        publishing = asyncio.create_task(client.publish_many(messages))
        await until(lambda: proxy.swallowed_bytes > 100 * 20)
        proxy.swallow_answers = False
        proxy.cut()
        outcomes = await within(publishing)

        assert [type(outcome) for outcome in outcomes] == [PubAck] * 100
        assert any(outcome.is_duplicate for outcome in outcomes if isinstance(outcome, PubAck))
    assert await stored_ids(server.url, stream) == [message.msg_id for message in messages]


async def test_what_was_never_stored_is_sent_again_after_the_reconnect(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reconnect itself, not by the search for lost answers."""
    monkeypatch.setattr("oncewire._ground.jetstream.publish.RESEND_S", 600.0)
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        proxy.hold()
        publishing = asyncio.create_task(client.publish_many(outgoing(stream, 100)))
        await until(lambda: client.publisher.in_flight() == 100)
        proxy.cut()
        proxy.release()
        outcomes = await within(publishing)

        assert [type(outcome) for outcome in outcomes] == [PubAck] * 100
        assert (await state_of(client, stream))["messages"] == 100


async def test_without_an_id_the_outcome_is_unknown_and_nothing_is_sent_again(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        proxy.swallow_answers = True
        publishing = asyncio.create_task(client.publish(f"{stream}.x", b"1"))
        await until(lambda: proxy.swallowed_bytes > 0)
        proxy.swallow_answers = False
        proxy.cut()
        with pytest.raises(OutcomeUnknown, match="broke before the confirmation"):
            await within(publishing)
        await until(lambda: client.connection.reconnects == 1)
        await client.publish(f"{stream}.x", b"2")

        assert (await state_of(client, stream))["messages"] == 2


async def test_an_expectation_is_never_sent_again(server: NatsServer, soon: None) -> None:
    """A repeat of what was stored would be answered with a conflict, and that would be a lie."""
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        for message in (
            Outgoing(f"{stream}.x", b"1", msg_id="1", expected_last_sequence=0),
            Outgoing(f"{stream}.y", b"2", msg_id="2", expected_last_subject_sequence=0),
            Outgoing(f"{stream}.z", b"3", msg_id="3", headers={"Nats-Expected-Last-Sequence": "2"}),
        ):
            proxy.swallow_answers, proxy.swallowed_bytes = True, 0
            publishing = asyncio.create_task(client.publish_one(message))
            await until(lambda: proxy.swallowed_bytes > 0)
            proxy.swallow_answers = False
            proxy.cut()
            with pytest.raises(OutcomeUnknown):
                await within(publishing)
            await until(lambda: client.connection.is_ready)
        assert (await state_of(client, stream))["messages"] == 3


async def test_an_answer_that_never_comes_is_asked_for_again(server: NatsServer, soon: None) -> None:
    """The connection is fine, the answer is lost: a leader may have died with it."""
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        proxy.swallow_answers = True
        publishing = asyncio.create_task(client.publish(f"{stream}.x", b"1", msg_id="1"))
        await until(lambda: proxy.swallowed_bytes > 0)
        proxy.swallow_answers = False
        ack = await within(publishing)

        assert ack.is_duplicate
        assert client.connection.reconnects == 0


async def test_a_batch_that_broke_off_goes_one_by_one_under_its_ids(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        messages = outgoing(stream, 200)
        proxy.swallow_answers = True
        publishing = asyncio.create_task(client.publish_all(messages))
        await until(lambda: proxy.swallowed_bytes > 60)
        proxy.swallow_answers = False
        proxy.cut()
        outcomes = await within(publishing)

        assert [type(outcome) for outcome in outcomes] == [PubAck] * 200
    assert sorted(await stored_ids(server.url, stream)) == sorted(message.msg_id for message in messages)


async def test_a_batch_without_ids_that_broke_off_is_unknown(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        proxy.swallow_answers = True
        publishing = asyncio.create_task(client.publish_all(outgoing(stream, 10, has_id=False)))
        await until(lambda: proxy.swallowed_bytes > 60)
        proxy.swallow_answers = False
        proxy.cut()
        outcomes = await within(publishing)

        assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 10
        await until(lambda: client.connection.is_ready)
        assert (await state_of(client, stream))["messages"] in (0, 10)


async def test_no_answer_until_the_deadline_is_an_unknown_outcome(server: NatsServer, soon: None) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        proxy.swallow_answers = True
        with pytest.raises(OutcomeUnknown, match="not confirmed in time") as caught:
            await within(client.publish(f"{stream}.x", b"1", msg_id="1", timeout_s=0.4))
        assert "same msg_id" in caught.value.hint
        with pytest.raises(OutcomeUnknown):
            await within(client.publish_atomic(outgoing(stream, 3), timeout_s=0.4))
        proxy.swallow_answers = False


async def test_a_close_tells_whoever_waits(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy:
        client = quick(proxy.url)
        await client.open()
        stream = await make_stream(client)
        proxy.swallow_answers = True
        tasks = [
            asyncio.create_task(client.publish(f"{stream}.x", b"", msg_id="1")),
            asyncio.create_task(client.publish_atomic(outgoing(stream, 3))),
            asyncio.create_task(client.call(f"{stream}.x")),
        ]
        await until(lambda: proxy.swallowed_bytes > 0)
        await client.close()
        outcomes = await within(asyncio.gather(*tasks, return_exceptions=True))

        assert all(isinstance(outcome, OutcomeUnknown | NotConnected) for outcome in outcomes), outcomes


async def test_a_cluster_that_is_electing_gets_it_again() -> None:
    """Errors that pass (here: not leader, duplicate in process) are not the caller's business."""
    answers = [
        b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}',
        b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id is in process"}}',
        b'{"stream":"S","seq":7,"duplicate":true}',
    ]

    async def session(peer: Peer) -> None:
        await peer.greet()
        while line := await peer.line():
            if line.startswith(b"HPUB a.b "):
                await peer.send(_msg(line.split()[2], answers.pop(0)))

    async with fake(session) as server, quick(server.url) as client:
        ack = await within(client.publish("a.b", b"", msg_id="1"))
        assert (ack.sequence, ack.is_duplicate) == (7, True)


def _msg(subject: bytes, payload: bytes) -> bytes:
    return b"MSG %b 1 %d\r\n%b\r\n" % (subject, len(payload), payload)


# ---- the witness

ODD = {
    "Plain": "value",
    "Empty": "",
    "Unicode": "grüße 日本 ✓",
    "Colon": "a: b: c",
    "Quotes": "\"'{}[]\\",
    "Inner": "two  spaces\tand a tab",
    "X-Lower-UPPER": "Case Stays",
    "Long": "x" * 5_000,
}


async def test_the_witness_reads_what_we_publish(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client, witness(shared_server.url) as other:
        stream = await make_stream(client)
        payload = bytes(range(256)) * 10
        await client.publish(f"{stream}.x", payload, msg_id="one", headers=ODD)
        found = await other.jetstream().get_msg(stream, seq=1)
        raw = json.loads((await other.request(f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq":1}')).data)["message"]

        assert found.data == payload
        unicode = found.headers.pop("Unicode")  # read as bytes: the witness decodes headers as mail, in ASCII
        assert unicode is not None
        assert {**found.headers, "Unicode": ODD["Unicode"]} == {**ODD, "Nats-Msg-Id": "one"}
        assert f"\r\nUnicode: {ODD['Unicode']}\r\n".encode() in base64.b64decode(raw["hdrs"])


async def test_we_read_what_the_witness_publishes(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client, witness(shared_server.url) as other:
        stream = await make_stream(client)
        payload = bytes(range(256)) * 10
        await other.jetstream().publish(f"{stream}.x", payload, headers=ODD)
        found = await client.get(stream, 1)

        assert (found.subject, found.payload) == (f"{stream}.x", payload)
        assert found.headers == ODD
        async with client.read(stream) as reader:
            [message] = await reader.fetch(1)
        assert (message.headers, message.payload) == (ODD, payload)


async def test_requests_between_us_and_the_witness(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client, witness(shared_server.url) as other:

        async def answer(message: Any) -> None:
            await other.publish(message.reply, b"from the witness", headers={"Seen": message.headers["A"]})

        async def ours(message: Any) -> bytes:
            return b"ours:" + message.payload

        await other.subscribe("ask.witness", cb=answer)
        await other.flush()
        client.serve("ask.us", ours)
        await client.connection.flush()

        reply = await client.call("ask.witness", b"", headers={"A": "grüße"})
        assert (reply.payload, reply.headers) == (b"from the witness", {"Seen": "grüße"})
        assert (await other.request("ask.us", b"hi", timeout=5)).data == b"ours:hi"


async def test_a_stream_that_is_full_is_overloaded(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, max_msgs=2, discard="new")
        outcomes = await client.publish_many(outgoing(stream, 4))

        assert [type(outcome) for outcome in outcomes] == [PubAck, PubAck, Overloaded, Overloaded]
        assert isinstance(outcomes[3], Unavailable)
        assert outcomes[3].hint
