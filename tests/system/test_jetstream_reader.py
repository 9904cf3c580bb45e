"""Ordered readers, direct gets and key-value buckets against a real server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from oncewire._ground.errors import Conflict, ContractViolation, Corrupt, NotFound, OncewireError, Refused
from oncewire._ground.jetstream import Client, Entry, KeyValue, Message, Options, Reader, Start, connect, parse_reply
from oncewire._ground.jetstream.protocol import parse_time_ns
from tests.support.fakes import Proxy
from tests.support.nats import NatsServer
from tests.support.streams import make_stream, outgoing, unique, witness
from tests.support.wait import until, until_async, within


def quick(url: str, **changes: Any) -> Client:
    return Client(Options((url,), reconnect_delay_min_s=0.01, reconnect_delay_max_s=0.05, **changes))


async def read(reader: Reader, count: int) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await reader.fetch(count - len(found))
    return found


def sequences(messages: list[Message]) -> list[int]:
    return [parse_reply(message.reply).sequence for message in messages]


async def readers_of(client: Client, stream: str) -> list[str]:
    names: list[str] = (await client.api(f"CONSUMER.NAMES.{stream}")).get("consumers") or []
    return names


# ---- where to start


async def test_a_reader_hands_out_everything_in_order_and_cleans_up(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 2_000))
        async with client.read(stream) as reader:
            messages = await read(reader, 2_000)
            assert [name.startswith("ow-reader-") for name in await readers_of(client, stream)] == [True]

        assert sequences(messages) == list(range(1, 2_001))
        assert reader.sequence == 2_000
        assert await readers_of(client, stream) == []


@pytest.mark.parametrize(("start", "expected"), [(0, 1), (1, 1), (5, 5), (10, 10)])
async def test_a_reader_starts_at_a_sequence(shared_server: NatsServer, start: int, expected: int) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 10))
        async with client.read(stream, start=Start(sequence=start)) as reader:
            assert sequences(await read(reader, 11 - expected)) == list(range(expected, 11))


async def test_a_reader_starts_at_a_time(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish(f"{stream}.x", b"before")
        await until_async(lambda: _clock_moved(client, stream))
        moment = (await client.get(stream, 2)).timestamp
        await client.publish(f"{stream}.x", b"after")
        async with client.read(stream, start=Start(time=moment)) as reader:
            assert sequences(await read(reader, 2)) == [2, 3]
        found = await client.get_batch(stream, start_time=moment)
        assert [one.sequence for one in found] == [2, 3]


async def _clock_moved(client: Client, stream: str) -> bool:
    return (await client.publish(f"{stream}.x", b"")).sequence == 2


async def test_a_reader_of_what_is_new_sees_nothing_old(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 10))
        async with client.read(stream, start=Start(is_new_only=True)) as reader:
            await client.publish(f"{stream}.x", b"new")
            assert [message.payload for message in await read(reader, 1)] == [b"new"]
        empty = await make_stream(client)
        async with client.read(empty, start=Start(is_new_only=True)) as reader:
            await client.publish(f"{empty}.x", b"new")
            assert [message.payload for message in await read(reader, 1)] == [b"new"]


async def test_a_reader_of_the_last_per_subject(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        for subject in ("a", "b", "a", "c", "b"):
            await client.publish(f"{stream}.{subject}", b"")
        async with client.read(stream, start=Start(is_last_per_subject=True)) as reader:
            assert sequences(await read(reader, 3)) == [3, 4, 5]


async def test_a_reader_of_some_subjects_and_of_headers_only(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        for subject in ("a", "b", "c", "a"):
            await client.publish(f"{stream}.{subject}", b"12345", headers={"H": subject})
        async with client.read(stream, subjects=[f"{stream}.a", f"{stream}.c"], headers_only=True) as reader:
            messages = await read(reader, 3)
        async with client.read(stream, subjects=[f"{stream}.b"]) as reader:
            [single] = await read(reader, 1)

        assert sequences(messages) == [1, 3, 4]
        assert [message.payload for message in messages] == [b""] * 3
        assert messages[0].headers == {"H": "a", "Nats-Msg-Size": "5"}
        assert single.payload == b"12345"


async def test_a_reader_is_an_iterator(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 5))
        seen = 0
        async with client.read(stream) as reader:
            async for message in reader:
                seen += 1
                assert message.payload
                if seen == 5:
                    break
    assert seen == 5


async def test_a_reader_with_nothing_to_read_gives_an_empty_list(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        async with client.read(stream) as reader:
            assert await reader.fetch(timeout_s=0.05) == []


async def test_a_stream_that_is_not_there_is_not_found(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        with pytest.raises(NotFound):
            await client.read("MISSING").__aenter__()


# ---- gaps


async def test_a_message_lost_on_the_way_is_noticed_and_read_again(server: NatsServer) -> None:
    """One delivery never arrives: the consumer's own numbers have a hole."""
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 100))
        lost: list[bytes] = []

        def lose_one(data: bytes) -> bytes:
            begin = data.find(b"\r\nHMSG " + stream.encode())
            end = data.find(b"\r\nHMSG " + stream.encode(), begin + 2)
            if lost or begin < 0 or end < 0:
                return data
            lost.append(data[begin + 2 : end + 2])
            return data[: begin + 2] + data[end + 2 :]

        proxy.on_answer = lose_one
        async with client.read(stream) as reader:
            assert sequences(await read(reader, 100)) == list(range(1, 101))
            assert lost
            assert reader.restarts == 1


async def test_what_was_on_its_way_when_the_connection_broke_is_read_again(server: NatsServer) -> None:
    """And nothing newer comes that would show the hole."""
    async with Proxy(server.port) as proxy, quick(proxy.url) as client, quick(server.url) as other:
        stream = await make_stream(client)
        async with client.read(stream) as reader:
            await client.publish(f"{stream}.x", b"0")
            assert sequences(await read(reader, 1)) == [1]
            assert await reader.fetch(timeout_s=0.02) == []
            proxy.swallow_answers = True
            await other.publish_many(outgoing(stream, 20))
            await until(lambda: proxy.swallowed_bytes > 20 * 20)
            proxy.swallow_answers = False
            proxy.cut()

            assert sequences(await read(reader, 20)) == list(range(2, 22))


async def test_what_got_lost_without_a_word_is_read_again(server: NatsServer) -> None:
    """The connection stays: two missed heartbeats say that something is wrong."""
    async with Proxy(server.port) as proxy, quick(proxy.url) as client, quick(server.url) as other:
        stream = await make_stream(client)
        async with client.read(stream, heartbeat_s=0.2) as reader:
            assert await reader.fetch(timeout_s=0.02) == []
            fetching = asyncio.create_task(reader.fetch())
            pull = reader._pull
            assert pull is not None
            proxy.swallow_answers = True
            await other.publish_many(outgoing(stream, 20))
            await until(lambda: pull.missed_heartbeats)
            proxy.swallow_answers = False

            first = await within(fetching)
            assert sequences(first + await read(reader, 20 - len(first))) == list(range(1, 21))


async def test_a_reader_goes_on_after_the_server_was_killed(server: NatsServer) -> None:
    """Its consumer lived in memory and is gone."""
    async with quick(server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 100))
        async with client.read(stream, batch=10) as reader:
            first = await read(reader, 35)
            server.kill()
            server.start()
            rest = await read(reader, 65)

    assert sequences(first + rest) == list(range(1, 101))


async def test_a_consumer_that_is_deleted_is_replaced(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 20))
        async with client.read(stream, batch=5) as reader:
            first = await read(reader, 7)
            for name in await readers_of(client, stream):
                await client.api(f"CONSUMER.DELETE.{stream}.{name}")
            assert sequences(first + await read(reader, 13)) == list(range(1, 21))


async def test_a_stream_that_was_made_again_is_corrupt(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 20))
        async with client.read(stream) as reader:
            await read(reader, 5)
            await client.api(f"STREAM.DELETE.{stream}")
            await make_stream(client, stream)
            await client.publish_many(outgoing(stream, 30, prefix="other"))
            with pytest.raises(Corrupt, match="made again"):
                await read(reader, 100)


async def test_a_stream_that_went_back_is_corrupt(shared_server: NatsServer) -> None:
    """As after a restore: the same creation time, fewer messages."""
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 20))
        async with client.read(stream) as reader:
            await read(reader, 20)
            reader.sequence = 500
            for name in await readers_of(client, stream):
                await client.api(f"CONSUMER.DELETE.{stream}.{name}")
            with pytest.raises(Corrupt, match="went back from sequence 500 to 20"):
                await read(reader, 1)


async def test_a_reader_of_what_is_new_loses_nothing_before_its_first_message(server: NatsServer) -> None:
    """The connection breaks before anything was handed out: 'new' still means since it was opened."""
    async with Proxy(server.port) as proxy, quick(proxy.url) as client, quick(server.url) as other:
        stream = await make_stream(client)
        async with client.read(stream, start=Start(is_new_only=True)) as reader:
            assert await reader.fetch(timeout_s=0.02) == []
            proxy.is_refusing = True
            proxy.cut()
            await other.publish_many(outgoing(stream, 20))
            proxy.is_refusing = False

            assert sequences(await read(reader, 20)) == list(range(1, 21))


async def test_a_fetch_during_an_outage_ends_at_its_timeout_and_waits_without_one(server: NatsServer) -> None:
    async with quick(server.url) as client:
        stream = await make_stream(client)
        async with client.read(stream) as reader:
            server.kill()
            assert await within(reader.fetch(timeout_s=0.3)) == []
            fetching = asyncio.create_task(reader.fetch())
            server.start()
            await client.publish(f"{stream}.x", b"back")
            [message] = await within(fetching)
            assert message.payload == b"back"


# ---- direct get


async def test_a_message_is_read_by_its_sequence(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        for allow_direct in (True, False):
            stream = await make_stream(client, allow_direct=allow_direct)
            await client.publish(f"{stream}.a", b"one", headers={"A": "b"})
            await client.publish(f"{stream}.b", b"")
            await client.publish(f"{stream}.a", b"three")
            found = await client.get(stream, 1)

            assert (found.stream, found.subject, found.sequence) == (stream, f"{stream}.a", 1)
            assert (found.payload, found.headers) == (b"one", {"A": "b"})
            assert abs(found.timestamp_ns / 1e9 - datetime.now(UTC).timestamp()) < 60
            assert (await client.get(stream, 2)).payload == b""
            assert (await client.get_last(stream, f"{stream}.a")).sequence == 3
            assert (await client.get_next(stream, 2, f"{stream}.a")).sequence == 3
            assert (await client.get_next(stream, 1, f"{stream}.*")).sequence == 1
            for missing in (
                client.get(stream, 99),
                client.get_last(stream, f"{stream}.zzz"),
                client.get_next(stream, 4, f"{stream}.a"),
            ):
                with pytest.raises(NotFound):
                    await missing


async def test_a_stream_that_is_missing_is_not_found(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        with pytest.raises(NotFound):
            await client.get("MISSING", 1)
        with pytest.raises(OncewireError, match="MISSING"):
            await client.get_batch("MISSING")


async def test_many_messages_are_read_at_once(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 1_500))
        await client.publish(f"{stream}.y", b"other")
        await client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3})

        first = await client.get_batch(stream)
        assert [one.sequence for one in first] == [1, 2, *range(4, 1_002)]
        assert [one.sequence for one in await client.get_batch(stream, sequence=1_499, count=2)] == [1_499, 1_500]
        assert [one.payload for one in await client.get_batch(stream, subject=f"{stream}.y")] == [b"other"]
        assert await client.get_batch(stream, sequence=9_999) == []
        few = await client.get_batch(stream, bytes_max=500)
        assert 0 < len(few) < 100


async def test_a_read_that_a_broken_connection_interrupts_is_asked_again(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy, quick(proxy.url) as client:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 10))
        proxy.swallow_answers = True
        reading = asyncio.create_task(client.get_batch(stream, timeout_s=600))
        await until(lambda: proxy.swallowed_bytes > 0)
        proxy.swallow_answers = False
        proxy.cut()

        assert [one.sequence for one in await within(reading)] == list(range(1, 11))


async def test_the_last_of_each_subject_is_one_picture(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client)
        for subject in ("a", "b", "a", "c", "b"):
            await client.publish(f"{stream}.{subject}", subject.encode())

        found = await client.get_last_of(stream, [f"{stream}.>"])
        assert [one.sequence for one in found] == [3, 4, 5]
        past = await client.get_last_of(stream, [f"{stream}.a", f"{stream}.b"], up_to_sequence=2)
        assert [one.sequence for one in past] == [1, 2]
        assert await client.get_last_of(stream, [f"{stream}.none"]) == []


async def test_stored_messages_are_what_the_witness_reads(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client, witness(shared_server.url) as other:
        stream = await make_stream(client)
        await client.publish_many(outgoing(stream, 50))
        stored = await client.get_batch(stream)
        assert 50 == len(stored)
        for one in stored:
            seen = await other.jetstream().get_msg(stream, seq=one.sequence)
            assert (seen.subject, seen.data, seen.headers) == (one.subject, one.payload, one.headers)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("2026-11-15T18:00:26.876548228Z", 1_794_765_626_876_548_228),
        ("2026-11-15T18:00:26.87654822Z", 1_794_765_626_876_548_220),
    ],
)
def test_times_keep_their_nanoseconds(text: str, nanoseconds: int) -> None:
    assert nanoseconds == parse_time_ns(text)


@pytest.mark.parametrize("text", ["", "now", "2026-13-01T00:00:00Z", "2026-11-15T18:00:26.xZ"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ContractViolation):
        parse_time_ns(text)


# ---- key-value


async def make_bucket(client: Client, **config: Any) -> KeyValue:
    bucket = unique("B")
    await make_stream(
        client,
        f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        max_msgs_per_subject=5,
        discard="new",
        allow_rollup_hdrs=True,
        **config,
    )
    return client.kv(bucket)


async def test_a_bucket_keeps_the_last_value(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        kv = await make_bucket(client)
        assert await kv.get("a.b") is None
        first = await kv.put("a.b", b"1")
        second = await kv.put("a.b", b"2")

        assert second > first
        assert await kv.get("a.b") == Entry("a.b", b"2", second)
        await kv.delete("a.b")
        assert await kv.get("a.b") is None


async def test_of_many_creators_one_wins(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client, connect(shared_server.url) as other:
        kv = await make_bucket(client)
        buckets = [kv, other.kv(kv.bucket)] * 10
        results = await asyncio.gather(
            *(one.create("lock", b"%d" % index) for index, one in enumerate(buckets)), return_exceptions=True
        )
        winners = [index for index, result in enumerate(results) if isinstance(result, int)]

        assert len(winners) == 1
        assert sum(isinstance(result, Conflict) for result in results) == 19
        entry = await kv.get("lock")
        assert entry is not None
        assert entry.value == b"%d" % winners[0]


async def test_a_deleted_key_can_be_created_again_by_one(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        kv = await make_bucket(client)
        await kv.create("k", b"1")
        await kv.delete("k")
        results = await asyncio.gather(*(kv.create("k", b"2") for _ in range(10)), return_exceptions=True)

        assert sum(isinstance(result, int) for result in results) == 1
        with pytest.raises(Conflict, match="exists already"):
            await kv.create("k", b"3")


async def test_an_update_needs_the_last_revision(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        kv = await make_bucket(client)
        first = await kv.create("k", b"1")
        results = await asyncio.gather(*(kv.update("k", b"2", first) for _ in range(10)), return_exceptions=True)
        [second] = [result for result in results if isinstance(result, int)]

        with pytest.raises(Conflict):
            await kv.update("k", b"3", first)
        with pytest.raises(Conflict):
            await kv.delete("k", first)
        await kv.delete("k", second)


async def test_a_watch_shows_the_present_and_then_each_change(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        kv = await make_bucket(client)
        await kv.put("a", b"1")
        await kv.put("a", b"2")
        await kv.put("b", b"3")
        seen: list[Entry] = []

        async def watch() -> None:
            async for entry in kv.watch():
                seen.append(entry)  # noqa: PERF401 - looked at while it grows

        watching = asyncio.create_task(watch())
        await until(lambda: len(seen) == 2)
        await kv.put("c", b"4")
        await kv.delete("a")
        await until(lambda: len(seen) == 4)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

        assert [(entry.key, entry.value, entry.is_deleted) for entry in seen] == [
            ("a", b"2", False),
            ("b", b"3", False),
            ("c", b"4", False),
            ("a", b"", True),
        ]


@pytest.mark.parametrize("count", [0, 3, 1_010, 1_100])
async def test_entries_are_all_entries(shared_server: NatsServer, count: int) -> None:
    """Also past what one answer of the server holds."""
    async with connect(shared_server.url) as client:
        kv = await make_bucket(client)
        keys = [f"k{number}" for number in range(count)]
        await asyncio.gather(*(kv.put(key, key.encode()) for key in keys))
        if count:
            await kv.put("gone", b"")
            await kv.delete("gone")
        entries = await within(kv.entries())

        assert sorted((entry.key, entry.value) for entry in entries) == sorted((key, key.encode()) for key in keys)


@pytest.mark.parametrize("key", ["", ".", "a.", "a b", "a*", ">", "a..b", "ä", "x" * 1_025, "a\r\nb"])
async def test_what_is_no_key_is_refused(shared_server: NatsServer, key: str) -> None:
    async with connect(shared_server.url) as client:
        kv = await make_bucket(client)
        for use in (kv.get(key), kv.put(key, b""), kv.create(key, b""), kv.delete(key)):
            with pytest.raises(ContractViolation):
                await use
        with pytest.raises(ContractViolation):
            client.kv("a.b")


async def test_a_bucket_that_is_not_there_is_not_found(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        with pytest.raises(NotFound):
            await client.kv("missing").get("a")
        with pytest.raises(NotFound):
            await client.kv("missing").put("a", b"")
        with pytest.raises((NotFound, Refused, OncewireError)):
            await client.kv("missing").entries()


async def test_the_witness_shares_a_bucket_with_us(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client, witness(shared_server.url) as other:
        kv = await make_bucket(client)
        theirs = await other.jetstream().key_value(kv.bucket)
        await kv.put("ours", b"1")
        await theirs.put("theirs", b"2")
        assert (await theirs.get("ours")).value == b"1"
        entry = await kv.get("theirs")
        assert entry is not None
        assert entry.value == b"2"
        await theirs.delete("theirs")
        assert await kv.get("theirs") is None
