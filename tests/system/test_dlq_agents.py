"""Agents and the dead-letter service: what an agent hands over, what only its ledger knows, what a replay finds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import oncewire
from oncewire.agent.effects import Terminate
from oncewire.contracts import headers as carried
from oncewire.contracts import letters as names
from oncewire.dlq.service import DlqOptions
from oncewire.jetstream import Client
from oncewire.ledger import rules
from oncewire.ledger.sqlite import SqliteStore
from oncewire.ledger.store import Attempt
from oncewire.topology import ensure
from tests.support.dlq import QUICK, given_up, letters_of, read_stream, service, until_letters
from tests.support.dlq_agents import EVENTS as STREAM
from tests.support.dlq_agents import Work
from tests.support.nats import NatsServer, nats_server
from tests.support.wait import until, until_async

PATIENT = replace(QUICK, agent_wait_s=60.0)


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server() as running_server:
        yield running_server


@pytest_asyncio.fixture
async def client(nats: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(nats.url) as connected:
        await ensure(connected)
        yield connected


def envelope_of(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(data)
    return found


async def mine(url: str, work: Work) -> list[Any]:
    return [one for one in await letters_of(url, STREAM) if one.headers[names.CONSUMER] == work.consumer]


async def test_what_a_handler_gives_up_is_a_letter_with_its_reason(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    work = Work(tmp_path)
    work.problem = Terminate("no_such_order: 17")
    async with service(client, PATIENT), work.running(client):
        sequence = await work.publish(client, 1)
        await until_async(lambda: mine(nats.url, work), "a letter")
        (letter,) = await mine(nats.url, work)
    assert (STREAM, work.consumer, sequence) == letter.place
    assert ("no_such_order", "terminated", "default") == (
        letter.cause,
        letter.headers[names.OUTCOME],
        letter.headers[names.TENANT],
    )
    assert {"n": 1} == envelope_of(letter.data)["payload"]
    assert f"{work.event}-1" == letter.headers["Oncewire-Orig-Nats-Msg-Id"]


async def test_an_input_that_never_began_is_replayed_for_its_consumer_and_not_dead_lettered(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    """D1: every delivery died before anything of it was on disk; another agent on the subject passes over the copy."""
    work = Work(tmp_path, max_deliver=1, ack_wait_s=1.0)
    other = Work(tmp_path, event=work.event)
    await work.prepare(client)
    sequence = await work.publish(client, 1)
    await given_up(client, STREAM, 1, work.consumer)
    async with service(client, PATIENT), work.running(client), other.running(client) as beside:
        await until(lambda: work.seen, "the input to be run")
        await until(lambda: beside.counts.get("passed"), "the other agent to pass over it")
        copies = [one for one in await read_stream(nats.url, STREAM) if one.headers.get(carried.REPLAY_FOR)]
    assert ([{"n": 1}], [{"n": 1}]) == (work.seen, other.seen)
    (copy,) = [one for one in copies if one.headers[carried.REPLAY_FOR] == work.consumer]
    assert (work.subject, f"{work.event}-1") == (copy.subject, copy.headers[carried.REPLAY_ID])
    assert str((await client.get(STREAM, sequence)).timestamp_ns // 1_000_000) == copy.headers[carried.REPLAY_TS]
    assert [] == await mine(nats.url, work)


async def test_an_input_that_began_and_whose_last_delivery_died_before_its_mark_is_a_letter(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    """The ledger knows of one attempt, the server of two: being asked makes it the last."""
    work = Work(tmp_path, max_deliver=2, ack_wait_s=1.0)
    async with work.running(client) as runner:
        created = runner.opened[STREAM].source.created
    sequence = await work.publish(client, 1)
    await given_up(client, STREAM, 1, work.consumer)
    store = SqliteStore(work.path)
    store.open("default", "dlq", work.agent.name)
    key = rules.position_key(work.full_name, STREAM, created, sequence)
    store.begun([Attempt(key, STREAM, sequence, 1, 1, "")])
    store.close()
    async with service(client, PATIENT), work.running(client):
        await until_async(lambda: mine(nats.url, work), "a letter")
        (letter,) = await mine(nats.url, work)
    assert ("died", sequence, []) == (letter.cause, letter.place[2], work.seen)


async def test_an_input_that_is_settled_and_lost_its_ack_is_no_letter(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    work = Work(tmp_path, max_deliver=1, ack_wait_s=1.0)
    async with work.running(client):
        sequence = await work.publish(client, 1)
        await until(lambda: work.seen, "the input to be run")
    told = {"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": STREAM, "consumer": work.consumer}
    subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{STREAM}.{work.consumer}"
    async with service(client, PATIENT) as running_service, work.running(client):
        await client.publish(subject, told | {"stream_seq": sequence, "deliveries": 2})
        await until(lambda: 'act="ack",kind="max_deliveries"' in running_service.registry.text(), "the answer")
    assert ([], [{"n": 1}]) == (await mine(nats.url, work), work.seen)


async def test_an_agent_that_does_not_answer_is_waited_for_and_then_there_is_a_letter(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    work = Work(tmp_path, max_deliver=1, ack_wait_s=1.0)
    await work.prepare(client)
    await work.publish(client, 1)
    await given_up(client, STREAM, 1, work.consumer)
    async with service(client, PATIENT) as waiting:
        await until(lambda: 'act="wait",kind="max_deliveries"' in waiting.registry.text(), "it to wait")
        assert [] == await mine(nats.url, work)
    async with service(client, DlqOptions(agent_wait_s=0.0, sweep_s=0.2)):
        await until_async(lambda: mine(nats.url, work), "a letter")
        (letter,) = await mine(nats.url, work)
    assert "max_deliveries: its agent did not answer" == letter.headers[names.ERROR]


async def test_missed_advisories_of_an_agent_are_found_by_the_sweep(client: Client, tmp_path: Path) -> None:
    work = Work(tmp_path, max_deliver=1, ack_wait_s=1.0)
    await work.prepare(client)
    for n in range(3):
        await work.publish(client, n)
    await given_up(client, STREAM, 3, work.consumer)
    await client.api("STREAM.PURGE.DLQ_ADVISORIES", {"filter": f"$JS.EVENT.ADVISORY.CONSUMER.*.*.{work.consumer}"})
    async with service(client, PATIENT), work.running(client):
        await until(lambda: len(work.seen) == 3, "the inputs to be run")
    assert [0, 1, 2] == sorted(one["n"] for one in work.seen)


async def test_a_question_that_is_none_is_refused(client: Client, tmp_path: Path) -> None:
    work = Work(tmp_path)
    async with work.running(client):
        subject = names.exhausted_subject(STREAM, work.consumer)
        for body in (b"", b"[]", b'{"sequences": ["x"]}', msgspec.json.encode({"sequences": list(range(1, 1_002))})):
            reply = await client.call(subject, body)
            assert "contract_violation" == reply.headers["Oncewire-Error"]
        reply = await client.call(subject, b'{"sequences": [999999]}')
        assert names.Known(unknown=[999999]) == msgspec.json.decode(reply.payload, type=names.Known)


async def test_a_message_of_a_stranger_that_no_letter_can_carry_is_handed_over_by_its_place(tmp_path: Path) -> None:
    with nats_server("max_payload: 60000") as server:
        async with oncewire.connect(server.url) as client:
            await ensure(client)
            work = Work(tmp_path)
            async with service(client, PATIENT), work.running(client):
                await client.call(work.subject, b"x" * 60_000)
                (letter,) = await until_letters(server.url, STREAM, 1)
    assert (names.POINTER, "60000", b"") == (
        letter.headers[names.PAYLOAD],
        letter.headers[names.BYTES],
        letter.data,
    )
