"""Tokens: from a producer over SSE, through stops, crashes, reconnects and restarts."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import oncewire
from oncewire import tokens
from oncewire._ground.contracts.subjects import chat_stop
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import ensure
from oncewire.gateway import channels
from oncewire.gateway import node as node_module
from tests.support.gateway import chunk, guest, lifecycle, new_conversation, node, publish, running, source
from tests.support.http import get, post, wire
from tests.support.nats import NatsServer
from tests.support.wait import until, within


@pytest.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        yield client


@pytest.fixture
async def url(client: Client) -> AsyncIterator[str]:
    async with node(client) as (_, url):
        yield url


def port(url: str) -> int:
    return int(url.rpartition(":")[2])


async def told(stream: Any) -> str:
    """The status of the next lifecycle event."""
    name, data = await stream.event()
    assert "event" == name, data
    return str(json.loads(data)["event"]["status"])


async def test_an_answer_streams_from_started_to_completed(client: Client, url: str) -> None:
    conversation, saved = new_conversation(), []

    async def save(text: str) -> None:
        saved.append(text)

    async with source(url, conversation) as one:
        assert ("protocol", "2024-12-01") == await one.event()
        async with tokens.stream(conversation, client=client, enqueue=save) as out:
            for n in range(100):
                await out.send(f"{n} ")
        assert "started" == await told(one)
        text = ""
        while True:
            name, data = await one.event()
            event = json.loads(data)["event"]
            assert ("token", out.message_id) == (name, event["messageId"])
            text += event["token"]
            if event.get("isFinal"):
                break
        assert "completed" == await told(one)
    assert [text] == saved
    assert " ".join(map(str, range(100))) + " " == text


async def test_many_small_sends_become_few_chunks(client: Client) -> None:
    conversation = new_conversation()
    async with tokens.stream(conversation, client=client, interval_ms=50) as out:
        for _ in range(2_000):
            await out.send("x")
    subject = f"chat.tokens.{conversation}"
    found = await client.get_batch("CHAT_EVENTS", subject=subject)
    assert 2_000 == sum(len(json.loads(one.payload)["event"]["token"]) for one in found)
    assert len(found) < 200


async def test_the_end_says_what_became_of_the_answer(client: Client, url: str) -> None:
    conversation, saved = new_conversation(), []
    async with source(url, conversation) as one:
        await one.event()

        async def fail() -> None:
            async with tokens.stream(conversation, client=client, enqueue=saved.append) as out:
                await out.send("half")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with tokens.stream(conversation, client=client, enqueue=saved.append) as out:
            await out.block({"why": "not allowed"})
        statuses = []
        while len(statuses) < 4:
            name, data = await one.event()
            if name == "event":
                statuses.append(json.loads(data)["event"]["status"])
    assert ["started", "errored", "started", "blocked"] == statuses
    assert [] == saved


async def test_completed_reaches_a_room_only_behind_the_message_that_it_announces(client: Client, url: str) -> None:
    conversation = new_conversation()

    class Stored:
        sequence = 5

    async with guest(url) as one:
        await publish(client, conversation, 1, 4)
        await one.join(conversation)
        async with tokens.stream(conversation, client=client, last_sequence=4, enqueue=lambda text: Stored()) as out:
            await out.send("x")
        assert "started" == (await one.next())["event"]["status"]
        await one.hears_nothing_more()
        await publish(client, conversation, 5, 5)
        assert ["chat.message.created", "chat.stream.lifecycle"] == [
            (await one.next())["event"]["type"] for _ in range(2)
        ]


async def test_a_stop_ends_the_answer_with_what_was_written_and_a_disconnect_does_not(client: Client, url: str) -> None:
    conversation, saved = new_conversation(), []
    stop = post(f"/stream/{conversation}/stop", b"")
    async with wire(port(url)) as web:
        assert 404 == (await web.ask(stop)).status, "nothing runs"
        async with source(url, conversation) as one:
            await one.event()
            async with tokens.stream(conversation, client=client, enqueue=saved.append) as out:
                await out.send("first ")
                async with source(url, conversation) as other:
                    await other.event()
                await out.send("second ")
                assert not out.stopped, "a client that goes away stops nothing"
                other_stop = post(f"/stream/{conversation}/stop", b'{"messageId": "another"}')
                assert 404 == (await web.ask(other_stop)).status
                answer = await web.ask(stop)
                assert (202, [out.message_id]) == (answer.status, answer.json["stopped"])
                await out.send("third")
                raise AssertionError("send goes on after a stop")
            found = ""
            while "completed" not in found:
                found = (await one.event())[1]
            assert {"stopped": True} == json.loads(found)["event"]["detail"]
    assert ["first second "] == saved


async def test_a_new_client_gets_the_running_answer_from_its_start_and_an_ended_one_only_by_its_end(
    client: Client, url: str
) -> None:
    conversation = new_conversation()
    await client.publish_many([chunk(conversation, 0, "old"), lifecycle(conversation, "started", 0, "a1")])
    await client.publish_many([chunk(conversation, n) for n in range(1, 4)])
    await publish(client, conversation, 1, 3)
    async with source(url, conversation) as one:
        await one.event()
        assert "started" == await told(one)
        assert "t1 t2 t3 " == await one.tokens(3)
        await client.publish_many([chunk(conversation, 4), lifecycle(conversation, "completed")])
        assert "t4 " == await one.tokens(1)
        assert "completed" == await told(one)
    async with source(url, conversation) as late:
        await late.event()
        assert "completed" == await told(late)
        await client.publish_one(chunk(conversation, 5))
        assert "t5 " == await late.tokens(1)


@pytest.mark.parametrize("behind", [5, 700])
async def test_a_client_resumes_exactly_behind_its_last_event(client: Client, url: str, behind: int) -> None:
    """Also further back than a node keeps in memory, and with other conversations in between."""
    conversation, other = new_conversation(), new_conversation()
    await client.publish_one(lifecycle(conversation, "started"))
    await client.publish_one(chunk(conversation, 0))
    async with source(url, conversation) as one:
        await one.event()
        assert "started" == await told(one)
        assert "t0 " == await one.tokens(1)
        last = one.last_id
    mixed = [chunk(where, n) for n in range(1, behind + 1) for where in (other, conversation)]
    await client.publish_many(mixed)
    async with source(url, conversation, last_id=last) as again:
        await again.event()
        await client.publish_many([chunk(conversation, behind + 1), lifecycle(conversation, "completed")])
        assert "".join(f"t{n} " for n in range(1, behind + 2)) == await again.tokens(behind + 1)
        assert "completed" == await told(again)


async def test_an_event_id_that_the_stream_does_not_have_means_from_the_running_answer_and_is_reported(
    client: Client, url: str
) -> None:
    """Of another stream, of another life of it, trimmed, beyond its end, or of nothing."""
    conversation = new_conversation()
    await client.publish_many([lifecycle(conversation, "started"), chunk(conversation, 1)])
    last = (await client.get_last("CHAT_EVENTS", f"chat.tokens.{conversation}")).sequence
    now_ns = time.time_ns()
    ids = ["17-5", "nonsense", "1-99999999999999999999999", "-", "é-1", f"{now_ns}-{last}", f"{now_ns}-99999999"]
    for id_ in ids:
        async with source(url, conversation, last_id=id_) as one:
            await one.event()
            name, data = await one.event()
            assert ("error", True) == (name, "does not have the last event" in data), id_
            assert "started" == await told(one)
            assert "t1 " == await one.tokens(1)


async def test_a_client_of_a_stream_that_was_restored_gets_the_running_answer_whole(server: NatsServer) -> None:
    """The places of its last events hold others now, and the stream has kept its creation time."""
    conversation, store, copy = new_conversation(), server.folder / "jetstream", server.folder / "copy"
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        await client.publish_many([lifecycle(conversation, "started"), *(chunk(conversation, n) for n in range(3))])
        server.stop()
        shutil.copytree(store, copy)
        server.start()
        for n in range(3, 6):
            await client.publish(f"chat.tokens.{conversation}", chunk(conversation, n).payload, msg_id=f"t{n}")
        async with node(client) as (gateway, url):
            async with source(url, conversation) as one:
                await one.event()
                assert "started" == await told(one)
                assert "".join(f"t{n} " for n in range(6)) == await one.tokens(6)
            server.stop()
            shutil.rmtree(store)
            shutil.copytree(copy, store)
            server.start()
            again = [lifecycle(conversation, "started"), *(chunk(conversation, n) for n in range(10, 16))]
            for n, outgoing in enumerate(again):
                await client.publish(outgoing.subject, outgoing.payload, msg_id=f"again{n}")
            await until(lambda: not gateway.node.problem)
            for _ in range(2):  # a browser's EventSource comes back with the id that it has
                async with source(url, conversation, last_id=one.last_id) as back:
                    await back.event()
                    assert "error" == (await back.event())[0]
                    assert "started" == await told(back)
                    assert "".join(f"t{n} " for n in range(10, 16)) == await back.tokens(6)


async def test_an_answer_whose_beginning_is_no_longer_kept_says_so(server: NatsServer) -> None:
    conversation = new_conversation()
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        config = (await client.api("STREAM.INFO.CHAT_EVENTS"))["config"]
        await client.api("STREAM.UPDATE.CHAT_EVENTS", config | {"max_msgs_per_subject": 20})
        await client.publish_one(lifecycle(conversation, "started"))
        await client.publish_many([chunk(conversation, n, chunk_id=f"0123abcd-{n}") for n in range(1, 31)])
        async with node(client) as (_, url), source(url, conversation) as one:
            await one.event()
            assert "started" == await told(one)
            name, data = await one.event()
            assert ("error", True) == (name, "no longer kept" in data)
            assert "".join(f"t{n} " for n in range(11, 31)) == await one.tokens(20)


async def test_a_killed_gateway_loses_no_token_for_a_client_that_comes_back(
    client: Client, shared_server: NatsServer
) -> None:
    conversation = new_conversation()
    with running(shared_server.url) as gateway:
        async with source(gateway.url, conversation) as one:
            await one.event()
            await client.publish_many([lifecycle(conversation, "started"), chunk(conversation, 1)])
            assert "started" == await told(one)
            assert "t1 " == await one.tokens(1)
            last = one.last_id
            gateway.kill()
            assert b"" == await within(one.reader.read())
    await client.publish_many([chunk(conversation, n) for n in range(2, 20)])
    with running(shared_server.url) as gateway:
        async with source(gateway.url, conversation, last_id=last) as one:
            await one.event()
            assert "".join(f"t{n} " for n in range(2, 20)) == await one.tokens(18)


PRODUCER = """
import asyncio, sys, oncewire
from oncewire import tokens
async def main():
    async with oncewire.connect(sys.argv[1]) as client:
        async with tokens.stream(sys.argv[2], client=client) as out:
            await out.send("begun")
            await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer is asked after a moment of silence."""
    monkeypatch.setattr(channels, "SILENT_S", 0.2)
    monkeypatch.setattr(node_module, "LOOK_S", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_an_answer_whose_producer_died_ends_for_all_who_watch_and_for_who_comes_later(
    client: Client, shared_server: NatsServer
) -> None:
    conversation = new_conversation()
    process = subprocess.Popen([sys.executable, "-c", PRODUCER, shared_server.url, conversation])
    try:
        async with node(client) as (_, url), source(url, conversation) as one, guest(url) as member:
            await member.join(conversation)
            await one.event()
            assert "started" == await told(one)
            assert "started" == (await member.next())["event"]["status"]
            assert "begun" == json.loads((await one.event())[1])["event"]["token"]
            process.kill()
            process.wait()
            name, data = await one.event()
            event = json.loads(data)["event"]
            assert ("event", "errored", {"cause": "producer_lost"}) == (name, event["status"], event["detail"])
            assert event == (await member.next())["event"], "in the room too"
            async with source(url, conversation) as late:
                await late.event()
                assert "started" == await told(late)
                assert "begun" == json.loads((await late.event())[1])["event"]["token"]
                assert "errored" == await told(late)
        found = await client.get_batch("CHAT_EVENTS", subject=f"chat.events.{conversation}")
        assert 1 == len(found), "it is not stored"
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("impatient")
async def test_a_producer_that_is_silent_and_lives_is_left_alone(client: Client) -> None:
    conversation, asked = new_conversation(), []
    async with node(client) as (_, url), source(url, conversation) as one:
        await one.event()
        async with tokens.stream(conversation, client=client) as out:
            answer = out._on_stop

            async def count(message: Any) -> bytes:
                asked.append(message)
                return await answer(message)

            for subscription in out._subscriptions:
                client.unsubscribe(subscription)
            out._subscriptions = [client.serve(f"{chat_stop(conversation)}.{out.message_id}", count)]
            await until(lambda: len(asked) >= 4, "questions")
            assert not out.stopped
            await out.send("at last")
        assert "started" == await told(one)
        assert "at last" == json.loads((await one.event())[1])["event"]["token"]


async def test_an_answer_whose_producer_died_is_begun_anew_by_the_next(
    client: Client, url: str, shared_server: NatsServer
) -> None:
    conversation = new_conversation()
    process = subprocess.Popen([sys.executable, "-c", PRODUCER, shared_server.url, conversation])
    try:
        async with source(url, conversation) as one:
            await one.event()
            assert "started" == await told(one)
            assert "begun" == json.loads((await one.event())[1])["event"]["token"]
            process.send_signal(signal.SIGKILL)
            process.wait()
            async with tokens.stream(conversation, client=client) as out:
                await out.send("again")
            assert "started" == await told(one)
            assert "again" == json.loads((await one.event())[1])["event"]["token"]
    finally:
        process.kill()
        process.wait()


async def test_a_server_that_is_killed_loses_and_doubles_no_token(server: NatsServer, tmp_path: Path) -> None:
    conversation = new_conversation()
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        async with node(client) as (gateway, url), source(url, conversation) as one:
            await one.event()

            async def produce() -> None:
                async with tokens.stream(conversation, client=client, interval_ms=1) as out:
                    for n in range(300):
                        await out.send(f"{n} ")
                        await asyncio.sleep(0.001)

            producing = asyncio.create_task(produce())
            await until(lambda: gateway.node.place > 20)
            server.kill()
            server.start()
            await within(producing)
            text = ""
            while True:
                name, data = await one.event()
                event = json.loads(data)["event"]
                if name == "token":
                    text += event["token"]
                elif event["status"] == "completed":
                    break
            assert "".join(f"{n} " for n in range(300)) == text


async def produce(client: Client, conversation: str, stored: list[str], before: Callable[[int], None]) -> Any:
    """An answer of two hundred words. `before` is told of each."""
    async with tokens.stream(conversation, client=client, enqueue=stored.append) as out:
        for n in range(200):
            before(n)
            await out.send(f"{n} ")
            await asyncio.sleep(0)
    return out


KINDS = ("events", "tokens")
WORDS = "".join(f"{n} " for n in range(200))


async def test_an_answer_is_stored_although_nats_goes_away_while_it_is_given(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "DRAIN_S_MAX", 0.1)
    monkeypatch.setattr(tokens, "END_S_MAX", 0.1)
    stored: list[str] = []
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        out = await within(produce(client, new_conversation(), stored, lambda n: server.kill() if n == 50 else None))
    assert [WORDS] == stored
    assert out.lost_tokens


async def test_an_answer_is_stored_while_nats_is_away_and_seen_once_it_is_back(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BEGIN_S_MAX", 0.1)
    monkeypatch.setattr(tokens, "DRAIN_S_MAX", 0.1)
    conversation, stored = new_conversation(), list[str]()
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        server.kill()
        producing = asyncio.create_task(produce(client, conversation, stored, lambda n: None))
        await until(lambda: stored)
        server.start()
        assert not (await within(producing)).lost_tokens
        found = [await client.get_batch("CHAT_EVENTS", subject=f"chat.{kind}.{conversation}") for kind in KINDS]
    events, chunks = [[json.loads(one.payload)["event"] for one in some] for some in found]
    assert ["started", "completed"] == [one["status"] for one in events]
    assert [WORDS, WORDS] == [*stored, "".join(one["token"] for one in chunks)]


async def test_what_can_never_be_published_is_an_error_at_the_beginning(client: Client) -> None:
    with pytest.raises(oncewire.errors.NotFound):
        async with tokens.stream(new_conversation(), client=client, events_prefix="nowhere.events"):
            raise AssertionError("the block began")


async def test_a_long_answer_has_few_enough_chunks_to_be_kept_whole(client: Client) -> None:
    """Each word is a moment later than the one before, as far as the producer can see."""
    conversation = new_conversation()
    async with tokens.stream(conversation, client=client, interval_ms=0) as out:
        out._chunks = 9_000
        for n in range(50):
            await out.send(f"{n} ")
            await asyncio.sleep(0.001)
    found = await client.get_batch("CHAT_EVENTS", subject=f"chat.tokens.{conversation}")
    assert len(found) <= 4
    assert "".join(f"{n} " for n in range(50)) == "".join(json.loads(one.payload)["event"]["token"] for one in found)


async def test_metadata_goes_with_a_chunk_of_its_own(client: Client) -> None:
    conversation, saved = new_conversation(), list[str]()
    async with tokens.stream(conversation, client=client, enqueue=saved.append, metadata={"model": "m"}) as out:
        await out.send("The ")
        await out.send("", metadata={"reasoning": "hm"})
        await out.send("answer", metadata={"citation": 1})
        await out.send(".")
    found = await client.get_batch("CHAT_EVENTS", subject=f"chat.tokens.{conversation}")
    shown = [(one["token"], one["metadata"]) for one in (json.loads(one.payload)["event"] for one in found)]
    model = {"model": "m"}
    assert ["The answer."] == saved
    assert [
        ("The ", model),
        ("", model | {"reasoning": "hm"}),
        ("answer", model | {"citation": 1}),
        (".", model),
        ("", model),
    ] == shown


async def test_headers_keep_proxies_from_holding_back_and_let_only_known_origins_read(client: Client) -> None:
    conversation = new_conversation()
    async with node(client, origins=frozenset({"https://chat.example"})) as (_, url):
        async with source(url, conversation, origin="https://chat.example") as one:
            head = one.head.lower()
            assert "content-type: text/event-stream" in head
            assert "x-accel-buffering: no" in head
            assert "cache-control: no-cache, no-transform" in head
            assert "access-control-allow-origin: https://chat.example\r\n" in head
            assert "access-control-allow-credentials: true" in head
        async with source(url, conversation, origin="https://evil.example") as one:
            assert "403" in one.head.splitlines()[0]
            assert "access-control" not in one.head.lower()
        async with wire(port(url)) as web:
            wanted = ("Origin: https://chat.example", "Access-Control-Request-Method: POST")
            preflight = get(f"/stream/{conversation}/stop", *wanted).replace(b"GET", b"OPTIONS")
            answer = await web.ask(preflight)
            assert (204, "https://chat.example") == (answer.status, answer.headers["access-control-allow-origin"])
