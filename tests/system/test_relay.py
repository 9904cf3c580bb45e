"""The relay on a real PostgreSQL and a real nats-server: order, the fence, failures, restores, wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

import oncewire
from oncewire._ground.contracts import decode_realtime
from oncewire._ground.jetstream import Client, Outgoing
from oncewire.outbox import RelayOptions, publish, relaying
from oncewire.outbox import relay as relay_module
from oncewire.outbox.inspect import retry, status, void
from oncewire.outbox.rules import Key, key_in
from oncewire.outbox.wake import Wake
from tests.support.fakes import Proxy
from tests.support.nats import NatsServer
from tests.support.outbox import (
    ENQUEUE,
    STREAM,
    Load,
    assert_all_once_in_order,
    drained,
    found_in_stream,
    make_chat_stream,
)
from tests.support.postgres import shared_postgres
from tests.support.streams import window_passed
from tests.support.wait import until, until_async


@dataclass
class Place:
    """A database, a stream, and a client for each."""

    url: str
    nats_url: str
    client: Client
    connection: Any

    async def enqueue(self, conversation_id: uuid.UUID, *contents: str) -> None:
        for content in contents:
            await self.connection.fetch(ENQUEUE, conversation_id, content)

    async def relayed(self, **options: Any) -> None:
        """Relay until nothing waits."""
        async with relaying(self.client, self.url, RelayOptions(**options)):
            await drained(self.url)

    async def contents(self, conversation_id: uuid.UUID) -> list[tuple[int, str]]:
        found = await found_in_stream(self.nats_url)
        return [(one.sequence, one.content) for one in found if one.conversation_id == str(conversation_id)]

    async def lifecycle(self, conversation_id: uuid.UUID, sequence: int = 0) -> None:
        """What a model server publishes on the same subject."""
        body = json.dumps({"sequence": sequence, "event": {"type": "chat.stream.lifecycle", "status": "started"}})
        await self.client.publish(f"chat.events.{conversation_id}", body.encode(), raw=True)

    async def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return [tuple(record) for record in await self.connection.fetch(statement, *values)]


@pytest.fixture
async def place(server: NatsServer) -> AsyncIterator[Place]:
    url = await shared_postgres().new_database()
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client)
        connection = await asyncpg.connect(url)
        yield Place(url, server.url, client, connection)
        await connection.close()


# ---- the way of a message


async def test_every_committed_message_is_published_in_order_and_marked(place: Place) -> None:
    ids = [uuid.uuid4() for _ in range(60)]
    async with place.connection.transaction():
        for number in range(40):
            for one in ids:
                await place.enqueue(one, f"{one}-{number}")
    await place.relayed()
    assert await assert_all_once_in_order(place.nats_url, place.url) == 2_400
    marked = await place.rows(
        "SELECT status, attempts, dispatched_at IS NOT NULL, count(*) FROM message_outbox GROUP BY 1, 2, 3"
    )
    assert marked == [("dispatched", 1, True, 2_400)]


async def test_each_message_is_an_envelope_and_carries_the_relays_headers(place: Place) -> None:
    one = uuid.uuid4()
    await place.connection.fetch(
        """SELECT * FROM enqueue_conversation_message(
            $1, 'assistant', 'Grüße', 'm:7b', '[{"n": 1.5}]', NULL, '{"k": null}', 'acme')""",
        one,
    )
    await place.relayed()
    stored = await place.client.get_last(STREAM, f"chat.events.{one}")
    envelope = decode_realtime(stored.payload)
    ((epoch, dedupe_id),) = await place.rows(
        """SELECT epoch, replace(m.id::text, '-', '')
            FROM conversations c JOIN conversation_messages m ON m.conversation_id = c.id"""
    )
    assert key_in(stored.headers) == Key(epoch, 1, dedupe_id)
    assert stored.headers["Oncewire-Tenant"] == "acme"
    assert envelope.event.content == "Grüße"
    assert (envelope.event.citations, envelope.event.metadata) == ([{"n": 1.5}], {"k": None})


async def test_a_rolled_back_message_leaves_nothing(place: Place) -> None:
    one = uuid.uuid4()
    with contextlib.suppress(RuntimeError):
        async with place.connection.transaction():
            await place.enqueue(one, "never")
            raise RuntimeError
    await place.enqueue(one, "kept")
    await place.relayed()
    assert await place.contents(one) == [(1, "kept")]


async def test_two_relays_side_by_side_keep_the_order(place: Place) -> None:
    load = Load(place.url, conversations=30, writers=6)
    async with (
        oncewire.connect(place.nats_url) as second,
        relaying(place.client, place.url),
        relaying(second, place.url),
    ):
        async with load.running():
            await until(lambda: load.acknowledged.total() > 3_000, "some load")
        await drained(place.url)
    assert await assert_all_once_in_order(place.nats_url, place.url) >= load.acknowledged.total()


async def test_a_stream_without_atomic_batches_is_served_one_by_one(server: NatsServer) -> None:
    url = await shared_postgres().new_database()
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client, allow_atomic=False)
        connection = await asyncpg.connect(url)
        ids = [uuid.uuid4() for _ in range(20)]
        for number in range(7):
            for one in ids:
                await connection.fetch(ENQUEUE, one, f"{number}")
        await connection.close()
        async with relaying(client, url):
            await drained(url)
    assert await assert_all_once_in_order(server.url, url) == 140


async def test_a_hot_conversation_does_not_keep_the_others_waiting(place: Place) -> None:
    """OUTBOX_BATCH_SIZE rows of each at a time."""
    hot, cold = sorted([uuid.uuid4(), uuid.uuid4()])
    async with place.connection.transaction():
        await place.enqueue(hot, *(str(n) for n in range(200)))
        await place.enqueue(cold, "here")
    await place.relayed(batch_size=10)
    order = [one.conversation_id for one in await found_in_stream(place.nats_url)]
    assert order.index(str(cold)) <= 10


# ---- the fence


async def test_others_may_write_on_the_subject_in_between(place: Place) -> None:
    """Lifecycle envelopes make what the relay expects wrong each time, also under the number of a row."""
    one, others = uuid.uuid4(), [uuid.uuid4() for _ in range(30)]
    for round_ in range(3):
        await place.lifecycle(one, sequence=round_ + 1)
        await place.enqueue(one, f"{round_}")
        for other in others:
            await place.enqueue(other, f"{round_}")
        await place.relayed()
    contents = await place.contents(one)
    assert [content for _, content in contents if content] == ["0", "1", "2"]
    assert len(await found_in_stream(place.nats_url)) == 3 * 32


async def test_what_was_published_and_not_marked_is_found_after_the_duplicate_window(place: Place) -> None:
    """An outage between publish and mark, of any length: the fence does not forget."""
    config = (await place.client.api(f"STREAM.INFO.{STREAM}"))["config"]
    await place.client.api(f"STREAM.UPDATE.{STREAM}", config | {"duplicate_window": 100_000_000})
    ids = [uuid.uuid4() for _ in range(30)]
    for one in ids:
        await place.enqueue(one, "a", "b")
    await place.relayed()
    before = await found_in_stream(place.nats_url)
    await place.connection.execute("UPDATE message_outbox SET status = 'pending', dispatched_at = NULL")
    await place.connection.execute("UPDATE conversation_relay SET stream_sequence = 0, dispatched_sequence = 0")
    await window_passed(place.client, "chat.tokens.probe")
    await place.client.api(f"STREAM.PURGE.{STREAM}", {"filter": "chat.tokens.probe"})
    for one in ids:
        await place.enqueue(one, "c")
    await place.relayed()
    assert await assert_all_once_in_order(place.nats_url, place.url) == 90
    assert (await found_in_stream(place.nats_url))[: len(before)] == before


async def test_lost_marks_of_several_passes_are_all_found(place: Place) -> None:
    one = uuid.uuid4()
    async with place.connection.transaction():
        await place.enqueue(one, *(str(n) for n in range(35)))
    await place.relayed(batch_size=10)
    await place.connection.execute("UPDATE message_outbox SET status = 'pending', dispatched_at = NULL")
    await place.connection.execute("UPDATE conversation_relay SET stream_sequence = 0")
    await place.lifecycle(one)
    await place.enqueue(one, "35")
    await place.relayed(batch_size=10)
    contents = [content for _, content in await place.contents(one) if content]
    assert contents == [str(n) for n in range(36)]


async def test_a_subject_that_was_purged_goes_on(place: Place) -> None:
    one = uuid.uuid4()
    await place.enqueue(one, "a")
    await place.relayed()
    await place.client.api(f"STREAM.PURGE.{STREAM}", {})
    await place.enqueue(one, "b")
    await place.relayed()
    assert await place.contents(one) == [(2, "b")]


async def test_a_stream_that_was_made_again_goes_on(place: Place) -> None:
    ids = [uuid.uuid4() for _ in range(40)]
    for one in ids:
        await place.enqueue(one, "a")
    await place.relayed()
    await place.client.api(f"STREAM.DELETE.{STREAM}")
    await make_chat_stream(place.client)
    for one in ids:
        await place.enqueue(one, "b")
    await place.relayed()
    assert [(one.sequence, one.content) for one in await found_in_stream(place.nats_url)] == [(2, "b")] * 40


# ---- a restored database


async def test_a_restored_database_counts_on_above_the_stream_under_a_new_epoch(place: Place) -> None:
    one = uuid.uuid4()
    await place.enqueue(one, *"abcde")
    await place.relayed()
    ((epoch,),) = await place.rows("SELECT epoch FROM conversations")
    # The backup holds 1 and 2; 3 to 5 were published after it was made.
    await place.connection.execute("DELETE FROM message_outbox WHERE sequence > 2")
    await place.connection.execute("DELETE FROM conversation_messages WHERE sequence > 2")
    await place.connection.execute("UPDATE conversations SET last_sequence = 2")
    await place.connection.execute("UPDATE conversation_relay SET stream_sequence = 2, dispatched_sequence = 2")
    await place.enqueue(one, "C", "D")
    await place.relayed()
    assert await place.contents(one) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e"), (6, "C"), (7, "D")]
    epochs = {found.content: found.headers["Oncewire-Epoch"] for found in await found_in_stream(place.nats_url)}
    assert epochs["e"] == epoch != epochs["C"] == epochs["D"]
    assert await place.rows("SELECT sequence, content FROM conversation_messages ORDER BY 1") == [
        (1, "a"),
        (2, "b"),
        (6, "C"),
        (7, "D"),
    ]
    await place.enqueue(one, "E")
    await place.relayed()
    assert (await place.contents(one))[-1] == (8, "E")


async def test_a_conversation_that_was_made_again_counts_on_too(place: Place) -> None:
    """The id is the same, and the stream still holds the old numbers."""
    one = uuid.uuid4()
    await place.enqueue(one, "a", "b")
    await place.relayed()
    await place.connection.execute("TRUNCATE conversations, conversation_messages, message_outbox, conversation_relay")
    await place.enqueue(one, "A", "B", "C")
    await place.relayed()
    assert [sequence for sequence, _ in await place.contents(one)] == [1, 2, 3, 4, 5]


# ---- what cannot be published


async def stuck_conversation(place: Place) -> uuid.UUID:
    """A conversation whose second message the server would not take; three wait."""
    one = uuid.uuid4()
    await place.connection.execute("UPDATE relay_state SET body_bytes_max = 100000000")
    await place.enqueue(one, "first", "x" * 2_000_000, "third")
    return one


async def test_the_first_failure_stops_its_conversation_and_no_other(place: Place) -> None:
    one, others = await stuck_conversation(place), [uuid.uuid4() for _ in range(20)]
    for other in others:
        await place.enqueue(other, "fine")
    async with relaying(place.client, place.url):

        async def is_stuck() -> bool:
            return not (await status(place.connection)).is_well

        await until_async(is_stuck, "a stuck conversation")
        await until_async(lambda: _dispatched(place, 21), "the others")
    found = await status(place.connection)
    (stuck,) = found.conversations
    assert (stuck.conversation_id, stuck.sequence, stuck.waiting) == (str(one), 2, 2)
    assert "bytes" in stuck.error
    assert await place.contents(one) == [(1, "first")]
    assert await place.rows("SELECT sequence, status FROM message_outbox WHERE status <> 'dispatched' ORDER BY 1") == [
        (2, "failed"),
        (3, "pending"),
    ]


async def _dispatched(place: Place, count: int) -> bool:
    found = await place.rows("SELECT count(*) FROM message_outbox WHERE status = 'dispatched'")
    return bool(found[0][0] == count)


async def test_a_voided_message_leaves_a_tombstone_and_those_behind_it_go_on(place: Place) -> None:
    one = await stuck_conversation(place)
    async with relaying(place.client, place.url):
        await until_async(lambda: _has_failed(place), "a failure")
        await void(place.connection, str(one), 2, "too large")
        await drained(place.url)
    assert await place.contents(one) == [(1, "first"), (2, ""), (3, "third")]
    tombstone = (await found_in_stream(place.nats_url))[1].body
    assert tombstone["event"]["metadata"] == {"voided": True, "reason": "too large"}
    assert (await status(place.connection)).is_well
    with pytest.raises(oncewire.errors.NotFound):
        await void(place.connection, str(one), 2, "again")


async def _has_failed(place: Place) -> bool:
    return bool(await place.rows("SELECT 1 FROM message_outbox WHERE status = 'failed'"))


async def test_a_failed_message_is_retried_when_asked(place: Place) -> None:
    one = await stuck_conversation(place)
    async with relaying(place.client, place.url):
        await until_async(lambda: _has_failed(place), "a failure")
        await place.connection.execute("UPDATE conversation_messages SET content = 'short' WHERE sequence = 2")
        await place.connection.execute("UPDATE conversation_relay SET next_attempt_at = now() + interval '1 hour'")
        assert await retry(place.connection, conversation_id=str(one)) == 1
        await drained(place.url)
    assert await place.contents(one) == [(1, "first"), (2, "short"), (3, "third")]


async def test_no_attempt_is_counted_while_nats_is_away(
    place: Place, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PUBLISH_S_MAX", 0.5)
    monkeypatch.setattr(relay_module, "READY_S_MAX", 0.5)
    one = uuid.uuid4()
    async with relaying(place.client, place.url) as relay:
        server.kill()
        await place.enqueue(one, "a")
        await until(lambda: relay.problem, "the relay to notice")
        assert await place.rows("SELECT status, attempts, error FROM message_outbox") == [("pending", 0, None)]
        assert await place.rows("SELECT attempts FROM conversation_relay") == [(0,)]
        server.start()
        await drained(place.url)
        assert relay.problem == ""
    assert await place.contents(one) == [(1, "a")]


async def test_no_attempt_is_counted_while_there_is_no_stream(place: Place) -> None:
    await place.client.api(f"STREAM.DELETE.{STREAM}")
    one = uuid.uuid4()
    await place.enqueue(one, "a")
    async with relaying(place.client, place.url) as relay:
        await until(lambda: "no stream" in relay.problem, "the relay to notice")
        assert await place.rows("SELECT status, attempts FROM message_outbox") == [("pending", 0)]
        await make_chat_stream(place.client)
        await drained(place.url)
    assert await place.contents(one) == [(1, "a")]


async def test_a_bug_in_one_pass_is_told_and_does_not_end_the_relay(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    left = ["once"]

    def stumble(step: str) -> None:
        if step == "published" and left:
            raise ZeroDivisionError(left.pop())

    one = uuid.uuid4()
    await place.enqueue(one, "a")
    await place.relayed(on_step=stumble)
    assert await place.contents(one) == [(1, "a")]
    assert "ZeroDivisionError" in caplog.text


async def test_a_large_backlog_of_large_messages_is_read_in_parts(place: Place) -> None:
    ids = [uuid.uuid4() for _ in range(60)]
    async with place.connection.transaction():
        for one in ids:
            await place.enqueue(one, "x" * 900_000)
    await place.relayed()
    assert len(await found_in_stream(place.nats_url)) == 60


# ---- writers and relays together


async def test_a_slow_relay_does_not_make_a_writer_wait(place: Place, server: NatsServer) -> None:
    """A claim is held for as long as NATS takes, and locks rows of the relay's own, never a conversation."""
    one = uuid.uuid4()
    async with Proxy(server.port) as proxy, oncewire.connect(proxy.url) as slow, relaying(slow, place.url):
        await until_async(lambda: _is_idle(place), "an idle relay")
        proxy.hold()
        await place.enqueue(one, "a")
        await until_async(lambda: _is_claimed(place), "a claim that waits for NATS")
        await place.connection.execute("SET lock_timeout = '2s'")
        await place.enqueue(one, "b")
        assert await _is_claimed(place)
        proxy.release()
        await drained(place.url)
    assert await place.contents(one) == [(1, "a"), (2, "b")]


async def _is_claimed(place: Place) -> bool:
    """Whether a relay holds a claim: another does not get its row."""
    async with place.connection.transaction():
        free = await place.rows("SELECT 1 FROM conversation_relay FOR UPDATE SKIP LOCKED")
    return not free and bool(await place.rows("SELECT 1 FROM conversation_relay"))


async def test_a_relay_takes_no_conversation_that_another_has(place: Place) -> None:
    taken, free = uuid.uuid4(), uuid.uuid4()
    await place.enqueue(taken, "a")
    await place.enqueue(free, "b")
    holding = await asyncpg.connect(place.url)
    async with relaying(place.client, place.url):
        async with holding.transaction():
            await holding.fetch("SELECT * FROM conversation_relay WHERE conversation_id = $1 FOR UPDATE", taken)
            await until_async(lambda: _dispatched(place, 1), "the other conversation")
        await holding.close()
        await drained(place.url)


async def test_an_idle_relay_is_woken_and_says_when_it_sleeps(place: Place) -> None:
    """The poll interval is an hour here: it looks only now and then, and each message wakes it."""
    one = uuid.uuid4()
    async with relaying(place.client, place.url, RelayOptions(poll_ms=3_600_000)) as relay:
        for number in range(3):
            await until_async(lambda: _is_idle(place), "an idle relay")
            assert relay.is_notified
            before = relay.wake_ups
            await place.enqueue(one, str(number))
            await drained(place.url)
            assert before < relay.wake_ups


async def _is_idle(place: Place) -> bool:
    return bool((await place.rows("SELECT idle_until > clock_timestamp() FROM relay_state"))[0][0])


async def test_a_relay_that_is_woken_for_nothing_lets_the_writers_be(place: Place) -> None:
    """Another relay is quicker each time; a notification in every transaction would slow all writers down."""
    one = uuid.uuid4()
    await place.enqueue(one, "a")
    holding = await asyncpg.connect(place.url)
    async with relaying(place.client, place.url):
        await drained(place.url)
        async with holding.transaction():
            await holding.fetch("SELECT * FROM conversation_relay FOR UPDATE")
            await until_async(lambda: _is_idle(place), "an idle relay")
            await place.enqueue(one, "b")

            async def is_awake() -> bool:
                return not await _is_idle(place)

            await until_async(is_awake, "a relay that wants no notifications")
        await holding.close()
        await drained(place.url)


async def test_writers_do_not_notify_a_relay_that_is_awake(place: Place) -> None:
    heard = asyncio.Event()
    listening = await asyncpg.connect(place.url)
    await listening.add_listener("oncewire_outbox", lambda *_: heard.set())
    await place.enqueue(uuid.uuid4(), "a")
    await listening.execute("SELECT 1")
    assert not heard.is_set()
    await place.connection.execute("UPDATE relay_state SET idle_until = now() + interval '1 minute'")
    await place.enqueue(uuid.uuid4(), "b")
    await asyncio.wait_for(heard.wait(), 10)
    await listening.close()


async def test_the_relay_tells_writers_how_large_a_message_may_be(place: Place) -> None:
    await place.enqueue(uuid.uuid4(), "a")
    await place.relayed()
    assert await place.rows("SELECT body_bytes_max FROM relay_state") == [(1_048_576 - 16_384,)]


async def test_a_relay_stops_with_the_pass_at_hand(place: Place) -> None:
    one = uuid.uuid4()
    async with relaying(place.client, place.url):
        await place.enqueue(one, "a")
        await drained(place.url)
    assert await place.rows(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncewire' AND datname = current_database()"
    ) == [(0,)]


# ---- the general outbox is in test_outbox_messages.py


async def test_foreign_messages_are_never_taken_for_a_row(place: Place) -> None:
    """A copy of the relay's headers with another dedupe id is another history, not ours."""
    one = uuid.uuid4()
    await place.enqueue(one, "a")
    ((epoch,),) = await place.rows("SELECT epoch FROM conversations")
    headers = {"Oncewire-Epoch": epoch, "Oncewire-Sequence": "1", "Oncewire-Dedupe-Id": "other", "Oncewire-Tenant": ""}
    await place.client.publish_one(Outgoing(f"chat.events.{one}", b"{}", headers=headers), raw=True)
    await place.relayed()
    assert [sequence for sequence, _ in await place.contents(one)] == [0, 2]


async def test_a_notification_between_the_last_look_and_the_sleep_is_not_lost(place: Place) -> None:
    """Heard while nobody sleeps yet: whoever noted the count before its last look does not begin to sleep."""
    wake = Wake(place.url, schema="", poll_ms=3_600_000)
    listening = asyncio.create_task(wake.run())
    try:
        await wake.is_known.wait()
        before = wake.heard
        await place.rows("SELECT pg_notify('oncewire_outbox', '')")
        await until(lambda: wake.heard > before, "the notification")
        assert await wake.sleep(3_600_000, before)
        assert not await wake.sleep(1, wake.heard)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
