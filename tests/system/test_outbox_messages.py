"""The general outbox: MessageEnvelopes to any subject, each once under its idempotency key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

import oncewire
from oncewire import outbox
from oncewire._ground.contracts import MessageEnvelope, decode_message, new_message
from oncewire._ground.jetstream import Client
from oncewire.outbox import relay as relay_module
from oncewire.outbox.inspect import retry, status, void_message
from oncewire.outbox.relay import RelayOptions, relaying
from tests.support.nats import NatsServer
from tests.support.outbox import (
    MESSAGES_STREAM,
    MESSAGES_SUBJECT,
    RelayProcess,
    drained,
    envelope_json,
    make_messages_stream,
)
from tests.support.postgres import shared_postgres
from tests.support.streams import stored_ids, window_passed
from tests.support.wait import until, until_async

STEPS = ["marking_sent", "sent", "messages_published", "messages_marked"]


def message(number: int) -> MessageEnvelope:
    return new_message(
        "LoopCreated",
        {"loop_id": f"loop-{number}"},
        message_id=f"evt-{number}",
        timestamp=datetime(2025, 1, 1, tzinfo=UTC),
        actor_id="user-1",
        actor_kind="HUMAN",
    )


@dataclass
class Place:
    url: str
    nats_url: str
    client: Client
    connection: Any

    async def enqueue(self, *numbers: int, subject: str = MESSAGES_SUBJECT) -> list[str]:
        async with self.connection.transaction():
            for number in numbers:
                await outbox.enqueue_message_async(self.connection, subject, message(number))
        return [message(number).idempotency_key for number in numbers]

    async def relayed(self) -> None:
        async with relaying(self.client, self.url, RelayOptions()):
            await drained(self.url)

    async def stream(self, **config: Any) -> None:
        await make_messages_stream(self.client, **config)

    async def ids(self, name: str = MESSAGES_STREAM) -> list[str]:
        return [one for one in await stored_ids(self.nats_url, name) if not one.startswith("probe-")]

    async def window_passed(self) -> None:
        """Every id that the stream knows by now is forgotten."""
        await window_passed(self.client, "sr.events.probe")

    async def forget_marks(self) -> None:
        """As a relay leaves it that dies between publish and mark."""
        await self.connection.execute(
            "UPDATE outbox_messages SET status = 'pending', dispatched_at = NULL, claimed_until = NULL, attempts = 0"
        )


@pytest.fixture
async def place(server: NatsServer) -> AsyncIterator[Place]:
    url = await shared_postgres().new_database()
    async with oncewire.connect(server.url) as client:
        connection = await asyncpg.connect(url)
        yield Place(url, server.url, client, connection)
        await connection.close()


async def test_each_message_is_published_once_under_its_idempotency_key(place: Place) -> None:
    await place.stream()
    keys = await place.enqueue(*range(200))
    await place.relayed()
    assert sorted(await place.ids()) == sorted(keys)
    stored = await place.client.get_last(MESSAGES_STREAM, MESSAGES_SUBJECT)
    assert decode_message(stored.payload).message_type == "LoopCreated"


async def test_the_same_message_enqueued_twice_is_one_row(place: Place) -> None:
    await place.stream()
    await place.enqueue(1)
    await place.enqueue(1)
    await place.relayed()
    assert len(await place.ids()) == 1


async def test_the_same_message_for_another_subject_is_refused(place: Place) -> None:
    await place.enqueue(1)
    with pytest.raises(oncewire.errors.Conflict, match="was enqueued for"):
        await place.enqueue(1, subject="sr.events.run")


async def test_the_trace_travels_in_the_headers(place: Place) -> None:
    await place.stream()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with place.connection.transaction():
        await outbox.enqueue_message_async(place.connection, MESSAGES_SUBJECT, message(1), traceparent=trace)
    await place.relayed()
    assert (await place.client.get_last(MESSAGES_STREAM, MESSAGES_SUBJECT)).headers["traceparent"] == trace


async def test_a_repeat_within_the_duplicate_window_is_dropped_by_the_stream(place: Place) -> None:
    await place.stream()
    await place.enqueue(*range(30))
    await place.relayed()
    await place.forget_marks()
    await place.relayed()
    assert len(await place.ids()) == 30


async def test_after_the_duplicate_window_the_stream_is_searched_first(place: Place) -> None:
    await place.stream(duplicate_window=100_000_000)
    await place.enqueue(*range(30))
    await place.relayed()
    await place.forget_marks()
    await place.enqueue(*range(30, 40))
    await place.window_passed()
    await place.relayed()
    ids = await place.ids()
    assert (len(ids), len(set(ids))) == (40, 40)


async def test_what_was_marked_as_sent_and_never_published_goes_out(place: Place) -> None:
    """A relay that died before it published; the window is long over."""
    await place.stream(duplicate_window=100_000_000)
    keys = await place.enqueue(1, 2)
    await place.connection.execute(
        "UPDATE outbox_messages SET sent_at = now() - interval '1 hour', sent_stream = 'sr-events', sent_after = 0"
    )
    await place.relayed()
    assert sorted(await place.ids()) == sorted(keys)


async def test_a_work_queue_cannot_be_searched_and_gets_it_again(place: Place) -> None:
    """Its reader's ledger drops the double; losing it would be worse."""
    await place.stream(retention="workqueue", duplicate_window=100_000_000)
    await place.enqueue(1)
    await place.relayed()
    await place.client.api("STREAM.PURGE.sr-events", {})
    await place.forget_marks()
    await place.window_passed()
    await place.relayed()
    assert len(await place.ids()) == 1


async def test_a_subject_without_a_stream_fails_alone_and_is_retried(place: Place) -> None:
    await place.stream()
    await place.enqueue(1)
    await place.enqueue(2, subject="nowhere.at.all")
    async with relaying(place.client, place.url):

        async def is_stuck() -> bool:
            return bool((await status(place.connection)).messages)

        await until_async(is_stuck, "a failed message")
        (stuck,) = (await status(place.connection)).messages
        assert (stuck.subject, stuck.error) == ("nowhere.at.all", "no stream captures its subject")
        await until_async(lambda: _is_dispatched(place), "the other one")
        await place.client.api("STREAM.CREATE.N", {"name": "N", "subjects": ["nowhere.>"]})
        await retry(place.connection, message_id=stuck.id)
        await drained(place.url)
    assert len(await place.ids("N")) == 1


async def _is_dispatched(place: Place) -> bool:
    return bool(await place.connection.fetchval("SELECT 1 FROM outbox_messages WHERE status = 'dispatched'"))


async def test_a_failed_message_can_be_given_up(place: Place) -> None:
    await place.enqueue(2, subject="nowhere.at.all")
    async with relaying(place.client, place.url):

        async def is_stuck() -> bool:
            return bool((await status(place.connection)).messages)

        await until_async(is_stuck, "a failed message")
        (stuck,) = (await status(place.connection)).messages
        await void_message(place.connection, stuck.id)
    assert (await status(place.connection)).is_well
    with pytest.raises(oncewire.errors.NotFound):
        await void_message(place.connection, stuck.id)


async def test_while_nats_is_away_no_attempt_is_counted(
    place: Place, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "READY_S_MAX", 0.5)
    await place.stream()
    async with relaying(place.client, place.url) as relay:
        server.kill()
        await place.enqueue(1)
        await until(lambda: relay.problem, "the relay to notice")
        assert await place.connection.fetchval("SELECT attempts FROM outbox_messages") == 0
        server.start()
        await drained(place.url)
    assert len(await place.ids()) == 1


@pytest.mark.parametrize("step", STEPS)
async def test_a_relay_that_dies_at_a_step_loses_and_doubles_nothing(place: Place, step: str) -> None:
    await place.stream(duplicate_window=100_000_000)
    keys = await place.enqueue(*range(50))
    with RelayProcess(place.nats_url, place.url, step) as doomed:
        await until(lambda: not doomed.is_running, f"a death at {step}")
    await place.window_passed()
    await place.connection.execute("UPDATE outbox_messages SET claimed_until = NULL")  # the lease is over
    with RelayProcess(place.nats_url, place.url):
        await drained(place.url)
    assert sorted(await place.ids()) == sorted(keys)


async def test_two_relays_share_the_work(place: Place) -> None:
    await place.stream()
    keys = await place.enqueue(*range(3_000))
    async with (
        oncewire.connect(place.nats_url) as second,
        relaying(place.client, place.url),
        relaying(second, place.url),
    ):
        await drained(place.url)
    assert sorted(await place.ids()) == sorted(keys)


@pytest.mark.parametrize(
    ("subject", "envelope", "state"),
    [
        ("sr.events.*", {}, "OW400"),
        ("sr..events", {}, "OW400"),
        ("sr.events loop", {}, "OW400"),
        ("sr.queries.x", {}, "OW400"),
        ("dlq.x", {}, "OW400"),
        ("$JS.API.STREAM.DELETE.x", {}, "OW400"),
        ("_INBOX.x", {}, "OW400"),
        ("x" * 1_025, {}, "OW400"),
        (MESSAGES_SUBJECT, {"schema_version": "2.0"}, "OW400"),
        (MESSAGES_SUBJECT, {"idempotency_key": ""}, "OW400"),
        (MESSAGES_SUBJECT, {"idempotency_key": "a\nb"}, "OW400"),
        (MESSAGES_SUBJECT, {"payload": {"text": "x" * 2_000_000}}, "OW413"),
    ],
)
async def test_what_could_never_be_published_is_refused(
    place: Place, subject: str, envelope: dict[str, Any], state: str
) -> None:
    body = json.loads(envelope_json("k")) | envelope
    with pytest.raises(asyncpg.PostgresError) as caught:
        await place.connection.fetch("SELECT enqueue_message($1, $2)", subject, json.dumps(body))
    assert caught.value.sqlstate == state
