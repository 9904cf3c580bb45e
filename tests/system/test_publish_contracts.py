"""Publishing on the subjects of the contracts: checked, under an id of its own, and never a dead letter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from oncewire._ground.contracts.message import decode_message
from oncewire._ground.errors import ContractViolation, Refused
from oncewire._ground.jetstream import Client, Outgoing, PubAck
from tests.rules.test_contracts_envelopes import body, example
from tests.support.nats import NatsServer
from tests.support.running import prepared
from tests.support.streams import state_of, unique
from tests.support.up import oncewire as command

EVENTS = "MESHFORGE_EVENTS"


@pytest_asyncio.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with prepared(shared_server.url) as connected:
        yield connected


def event() -> str:
    return f"evt.default.demo.{unique('x')}"


def lean(**fields: Any) -> dict[str, Any]:
    return {"type": "OrderPlaced", "payload": {"cents": 5}, **fields}


async def test_a_repeat_is_dropped_by_the_id_that_its_key_gives_it(client: Client) -> None:
    subject = event()
    sent = lean(idempotency_key="o1")
    first, again = await client.publish(subject, sent), await client.publish(subject, json.dumps(sent).encode())
    assert (False, True) == (first.is_duplicate, again.is_duplicate)
    for other in (lean(idempotency_key="o2"), lean(idempotency_key="o1", type="OrderChanged"), lean(), lean()):
        assert not (await client.publish(subject, other)).is_duplicate
    assert (await client.get(EVENTS, first.sequence)).headers["Nats-Msg-Id"].startswith("in.")
    assert not (await client.publish(event(), sent)).is_duplicate, "another subject is another message"


async def test_the_printed_example_is_stored_once(client: Client) -> None:
    subject = f"sr.events.{unique('x')}"
    sent = body("message", idempotency_key=unique("sha256:"))
    first, again = await client.publish(subject, sent), await client.publish(subject, json.loads(sent))
    assert (first.sequence, True) == (again.sequence, again.is_duplicate)
    stored = await client.get("sr-events", first.sequence)
    assert json.loads(sent)["idempotency_key"] == stored.headers["Nats-Msg-Id"]


@pytest.mark.parametrize("subject", ["sr.events.loop", "evt.default.demo.x", "platform.billing.usage.metered"])
@pytest.mark.parametrize("sent", [b"garbage", {"x": 1}, {"schema_version": "9.9"}])
async def test_what_breaks_the_contract_is_not_stored_unless_it_is_raw(client: Client, subject: str, sent: Any) -> None:
    stream = (await client.api("STREAM.NAMES", {"subject": subject}))["streams"][0]
    before = (await state_of(client, stream))["last_seq"]
    with pytest.raises(ContractViolation):
        await client.publish(subject, sent)
    assert before == (await state_of(client, stream))["last_seq"]
    ack = await client.publish(subject, sent, raw=True)
    assert "Nats-Msg-Id" not in (await client.get(stream, ack.sequence)).headers


async def test_of_many_the_wrong_ones_are_told_and_the_others_are_stored(client: Client) -> None:
    subject = event()
    key = unique("k")
    good = json.dumps(lean(id=key)).encode()
    messages = [Outgoing(subject, good), Outgoing(subject, b"{}"), Outgoing(subject, good), Outgoing(subject, b"x")]
    for publish in (client.publish_many, client.publish_all):
        first, wrong, again, broken = await publish(messages)
        assert isinstance(first, PubAck)
        assert isinstance(again, PubAck)
        assert first.sequence == again.sequence
        assert isinstance(wrong, ContractViolation)
        assert isinstance(broken, ContractViolation)


async def test_all_or_nothing_is_nothing_where_one_is_wrong(client: Client) -> None:
    subject = event()
    messages = [Outgoing(subject, json.dumps(lean()).encode()), Outgoing(subject, b"{}")]
    before = (await state_of(client, EVENTS))["last_seq"]
    for publish in (client.publish_atomic, client.publish_fast):
        with pytest.raises(ContractViolation, match="type"):
            await publish(messages)
    assert before == (await state_of(client, EVENTS))["last_seq"]
    await client.publish_atomic(messages, raw=True)
    assert before + 2 == (await state_of(client, EVENTS))["last_seq"]


async def test_an_id_that_is_passed_counts_but_for_sr_where_there_is_no_choice(client: Client) -> None:
    subject, own = event(), unique("own")
    ack = await client.publish(subject, lean(id="o1"), msg_id=own)
    assert own == (await client.get(EVENTS, ack.sequence)).headers["Nats-Msg-Id"]
    sent = body("message", idempotency_key=unique("sha256:"))
    with pytest.raises(ContractViolation, match="idempotency key"):
        await client.publish("sr.events.loop", sent, msg_id=own)
    (refused,) = await client.publish_many([Outgoing("sr.events.loop", sent, headers={"Nats-Msg-Id": own})])
    assert isinstance(refused, ContractViolation)
    assert (await client.publish("sr.events.loop", sent, msg_id=decode_message(sent).idempotency_key)).sequence


@pytest.mark.parametrize("raw", [False, True])
async def test_dead_letters_are_refused_whichever_way_they_are_published(client: Client, raw: bool) -> None:
    message = Outgoing("dlq.billing.x", b"{}")
    ways = (
        client.publish(message.subject, message.payload, raw=raw),
        client.publish_one(message, raw=raw),
        client.publish_atomic([message], raw=raw),
        client.publish_fast([message], raw=raw),
        client.call(message.subject, message.payload),
    )
    before = (await state_of(client, "DLQ"))["last_seq"]
    for way in ways:
        with pytest.raises(Refused, match="dead-letter service alone"):
            await way
    for publish_each in (client.publish_many, client.publish_all):
        (outcome,) = await publish_each([message], raw=raw)
        assert isinstance(outcome, Refused)
        assert "dead-letter service alone" in outcome.message
    assert before == (await state_of(client, "DLQ"))["last_seq"]


# ---- the command


@pytest.fixture
def place(client: Client, shared_server: NatsServer, tmp_path: Path) -> dict[str, Any]:
    return {"cwd": tmp_path, "NATS_URL": shared_server.url}


def test_the_command_stores_a_repeat_once(place: dict[str, Any]) -> None:
    sent = body("message", idempotency_key=unique("sha256:cli")).decode()
    first, again = (command("publish", "sr.events.loop", sent, "--json", **place) for _ in range(2))
    assert (False, True) == (json.loads(first.stdout)["duplicate"], json.loads(again.stdout)["duplicate"])


@pytest.mark.parametrize("sent", ["garbage", '{"schema_version":"9.9"}', json.dumps(example("runtime"))])
def test_the_command_checks_unless_it_is_raw(place: dict[str, Any], sent: str) -> None:
    refused = command("publish", "sr.events.loop", sent, **place)
    assert 2 == refused.returncode
    assert "MessageEnvelope" in refused.stderr
    assert 0 == command("publish", "sr.events.loop", sent, "--raw", **place).returncode


def test_the_command_writes_no_dead_letters(place: dict[str, Any]) -> None:
    refused = command("publish", "dlq.billing.x", "{}", "--raw", **place)
    assert 2 == refused.returncode
    assert "dead-letter service alone" in refused.stderr
