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
from oncewire._ground.contracts import letters as names
from oncewire._ground.jetstream import Client
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.ledger.store import Attempt
from oncewire._ground.topology import ensure
from oncewire.agent.effects import Terminate
from tests.support.dlq import QUICK, given_up, letters_of, service, until_letters
from tests.support.dlq_agents import EVENTS, Work
from tests.support.nats import NatsServer, nats_server
from tests.support.wait import until, until_async


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
    return [one for one in await letters_of(url, EVENTS) if one.headers[names.CONSUMER] == work.consumer]


async def test_what_a_handler_gives_up_is_a_letter_with_its_reason(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    work = Work(tmp_path)
    work.problem = Terminate("no_such_order: 17")
    async with service(client), work.running(client):
        sequence = await work.publish(client, 1)
        await until_async(lambda: mine(nats.url, work), "a letter")
        (letter,) = await mine(nats.url, work)
    assert (EVENTS, work.consumer, sequence) == letter.place
    assert ("no_such_order", "terminated", "default") == (
        letter.cause,
        letter.headers[names.OUTCOME],
        letter.headers[names.TENANT],
    )
    assert {"n": 1} == envelope_of(letter.data)["payload"]
    assert f"{work.event}-1" == letter.headers["Oncewire-Orig-Nats-Msg-Id"]


async def test_an_input_that_never_began_is_run_by_its_agent_and_not_dead_lettered(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    """D1: every delivery died before anything of it was on disk. The advisory is counted, and the agent's own ledger
    tells that nothing had happened."""
    work = Work(tmp_path, max_deliver=2, ack_wait_s=1.0)
    await work.prepare(client)
    await work.publish(client, 1)
    await given_up(client, EVENTS, 1, work.consumer)
    async with service(client) as running_service:
        await until(lambda: running_service.seen.counts["max_deliveries", "count"], "a count")
        async with work.running(client):
            await until(lambda: work.seen, "the input to be run")
    assert ([{"n": 1}], []) == (work.seen, await mine(nats.url, work))


async def test_an_input_that_began_and_fails_at_what_is_left_of_it_is_one_letter(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    """The ledger knows of one attempt, the server of two."""
    work = Work(tmp_path, max_deliver=2, ack_wait_s=1.0)
    work.problem = ValueError("not today")
    async with work.running(client) as runner:
        created = runner.opened[EVENTS, work.consumer].source.created
    sequence = await work.publish(client, 1)
    await given_up(client, EVENTS, 1, work.consumer)
    store = SqliteStore(work.path)
    store.open("default", "dlq", work.agent.name)
    key = rules.position_key(work.full_name, EVENTS, created, sequence)
    store.begun([Attempt(key, EVENTS, work.consumer, sequence, 1, 1, "")])
    store.close()
    async with service(client), work.running(client):
        await until_async(lambda: mine(nats.url, work), "a letter")
        (letter,) = await mine(nats.url, work)
    assert ("ValueError", sequence, []) == (letter.cause, letter.place[2], work.seen)


async def test_an_input_that_is_settled_and_lost_its_ack_is_no_letter(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    work = Work(tmp_path)
    async with work.running(client):
        sequence = await work.publish(client, 1)
        await until(lambda: work.seen, "the input to be run")
    told = {"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": EVENTS, "consumer": work.consumer}
    subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{EVENTS}.{work.consumer}"
    async with service(client) as running_service:
        await client.publish(subject, told | {"stream_seq": sequence, "deliveries": 2})
        await until(lambda: running_service.seen.counts["max_deliveries", "count"], "a count")
    assert [] == await mine(nats.url, work)


async def test_given_up_inputs_of_an_agent_that_does_not_run_are_an_alert(
    nats: NatsServer, client: Client, tmp_path: Path
) -> None:
    """They are not dead: the agent takes them in when it comes back."""
    work = Work(tmp_path, max_deliver=2, ack_wait_s=1.0)
    await work.prepare(client)
    await work.publish(client, 1)
    await given_up(client, EVENTS, 1, work.consumer)
    told = tmp_path / "alerts"

    def is_told() -> bool:
        return told.exists() and work.consumer in told.read_text()

    async with service(client, replace(QUICK, stalled_s=0.1, alert_command=f"tee -a {told}")):
        await until(is_told, "an alert")
    assert [] == await mine(nats.url, work)


async def test_a_message_of_a_stranger_that_no_letter_can_carry_is_handed_over_by_its_place(tmp_path: Path) -> None:
    with nats_server("max_payload: 60000") as server:
        async with oncewire.connect(server.url) as client:
            await ensure(client)
            work = Work(tmp_path)
            async with service(client), work.running(client):
                await client.call(work.subject, b"x" * 60_000)
                (letter,) = await until_letters(server.url, EVENTS, 1)
    assert (names.POINTER, "60000", b"") == (
        letter.headers[names.PAYLOAD],
        letter.headers[names.BYTES],
        letter.data,
    )
