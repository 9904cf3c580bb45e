"""Agents that read by declared durables, of which a stream has several."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.message import new_message
from oncewire._ground.errors import Conflict, NotFound, Refused
from oncewire._ground.jetstream import Client
from oncewire._ground.ledger.rules import position_key
from oncewire._ground.ledger.store import Attempt
from oncewire._ground.settings import Settings
from oncewire._ground.topology import compare, load
from oncewire.agent import Agent, Context
from oncewire.agent.status import status
from tests.support.nats import NatsServer
from tests.support.running import counted, prepared, run, sqlite_in, stored
from tests.support.streams import consumer_info, unique
from tests.support.wait import until

STREAM = "PROVISIONING"
ACTIVE, FAILED = "notification_relay_provision_active", "notification_relay_provision_failed"
WHEN = datetime(2026, 1, 15, 14, 30, tzinfo=UTC)


def subject_of(event: str) -> str:
    return f"gpuaas.provisioning.{event}"


@pytest_asyncio.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with prepared(server.url) as connected:
        yield connected


def relay(consumers: Any = (ACTIVE, FAILED), *, is_async: bool = False, **options: Any) -> tuple[Agent, list[str]]:
    """Handles both subjects, and remembers what came."""
    agent = Agent("notification-relay", consumers={STREAM: consumers}, **options)
    seen: list[str] = []

    def note(ctx: Context, payload: dict[str, Any]) -> None:
        seen.append(f"{ctx.subject} by {ctx.consumer}")

    async def note_later(ctx: Context, payload: dict[str, Any]) -> None:
        note(ctx, payload)

    for event in ("active", "failed"):
        agent.on(subject_of(event))(note_later if is_async else note)
    return agent, seen


async def announce(client: Client, event: str) -> int:
    sent = new_message("Provisioned", {}, message_id=unique("m"), timestamp=WHEN, actor_id="a", actor_kind="SYSTEM")
    return (await client.publish(subject_of(event), sent)).sequence


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_agent_pulls_from_all_its_durables_and_makes_those_that_are_missing_as_declared(
    client: Client, server: NatsServer, tmp_path: Path, is_async: bool
) -> None:
    agent, seen = relay(is_async=is_async)
    for event in ("active", "failed", "failed"):
        await announce(client, event)
    async with run(agent, client, sqlite_in(tmp_path)) as runner:
        await counted(runner, done=3)
    by_active, by_failed = f"{subject_of('active')} by {ACTIVE}", f"{subject_of('failed')} by {FAILED}"
    assert sorted(seen) == [by_active, by_failed, by_failed]
    planned = {step.item for step in (await compare(client, load(settings=Settings()))).steps}
    for name in (ACTIVE, FAILED):
        assert (await consumer_info(client, STREAM, name))["num_ack_pending"] == 0
        assert f"consumer:{STREAM}/{name}" not in planned

    with contextlib.closing(sqlite_in(tmp_path)) as store:
        found = await status(client, store, agent, Settings())
    assert [(STREAM, ACTIVE, 0), (STREAM, FAILED, 0)] == [(one.stream, one.consumer, one.lag) for one in found.sources]
    announced = [blocks.read_announcement(one.data) for one in await stored(server.url, "LEDGER")]
    told = [one for block in announced for one in block.inputs]
    assert {ACTIVE: [1], FAILED: [2, 3]} == {
        name: [at for one in told if one.consumer == name for first, last in one.done for at in range(first, last + 1)]
        for name in (ACTIVE, FAILED)
    }
    assert {(subject_of("active"), subject_of("failed"))} == {one.filters for one in told}


async def test_a_restart_goes_on_with_each_durable_where_it_stood(client: Client, tmp_path: Path) -> None:
    agent, seen = relay()
    for turn in range(3):
        for event in ("active", "failed"):
            await announce(client, event)
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=2)
            assert runner.trouble == ""
        assert len(seen) == 2 * (turn + 1)


async def paused(client: Client, name: str) -> None:
    """From here on nothing comes by this durable."""
    await client.api(f"CONSUMER.PAUSE.{STREAM}.{name}", {"pause_until": "2099-01-01T00:00:00Z"})


async def test_how_far_each_durable_was_seen_is_kept_apart_over_a_restart(client: Client, tmp_path: Path) -> None:
    """What was dropped while the agent was down is a loss of the durable that had not read it."""
    agent, _ = relay((FAILED, ACTIVE))
    async with run(agent, client, sqlite_in(tmp_path)) as runner:
        await paused(client, FAILED)
        await announce(client, "failed")
        await announce(client, "active")
        await counted(runner, done=1)
        await until(lambda: runner.lookout.seen((STREAM, ACTIVE)) == 2, "the active one to be seen")
    await client.api(f"STREAM.PURGE.{STREAM}")
    async with run(agent, client, sqlite_in(tmp_path)) as runner:
        assert "dropped what was not read" in runner.trouble


async def test_a_loss_of_one_durable_is_found_beside_another_that_has_read_further(
    client: Client, tmp_path: Path
) -> None:
    """What the other one read says nothing about this one's messages."""
    agent, _ = relay()
    async with run(agent, client, sqlite_in(tmp_path)) as runner:
        await announce(client, "active")
        await announce(client, "failed")
        await counted(runner, done=2)
        # Both have seen up to 2; then one is stopped from outside, and its messages go.
        await paused(client, FAILED)
        await announce(client, "failed")
        await announce(client, "active")
        await counted(runner, done=3)
        await client.api(f"STREAM.PURGE.{STREAM}", {"keep": 0})
        await announce(client, "active")
        await until(lambda: "dropped what was not read" in runner.trouble, "the loss")
        assert FAILED in str([watch.losses for watch in runner.lookout._watches.values()])


async def test_a_letter_names_the_durable_that_brought_the_input(
    client: Client, server: NatsServer, tmp_path: Path
) -> None:
    """Also when the input is gone, and only its mark says by which it came."""
    agent, _ = relay()
    sequence = await announce(client, "failed")
    async with run(agent, client, sqlite_in(tmp_path)) as runner:
        await counted(runner, done=1)
        created = runner.opened[STREAM, FAILED].source.created
        key = position_key(runner.ledger.name, STREAM, created, 99)
        limit = runner.opened[STREAM, FAILED].max_deliver
        await runner.db(runner.store.begun, [Attempt(key, STREAM, FAILED, 99, limit, 1, "")])
        await counted(runner, done=1, dead=1)
    assert sequence == 1
    (letter,) = await stored(server.url, "DLQ_REQUESTS")
    assert FAILED == letter.headers["Oncewire-Dlq-Consumer"]


async def test_a_handler_that_no_durable_feeds_is_refused(client: Client, tmp_path: Path) -> None:
    agent, _ = relay([ACTIVE])
    with pytest.raises(Conflict, match=f"no consumer of agent .* on {STREAM} brings {subject_of('failed')}"):
        async with run(agent, client, sqlite_in(tmp_path)):
            pass


async def test_a_durable_that_brings_more_than_the_handlers_know_is_refused(client: Client, tmp_path: Path) -> None:
    agent, _ = relay([ACTIVE, FAILED, "notification_relay_releasing_completed"])
    with pytest.raises(Conflict, match="does not handle all of"):
        async with run(agent, client, sqlite_in(tmp_path)):
            pass


async def test_two_durables_that_bring_the_same_are_refused(client: Client, tmp_path: Path) -> None:
    for name, subject in (("one", subject_of("active")), ("two", subject_of("*"))):
        config = {"durable_name": name, "name": name, "ack_policy": "explicit", "filter_subject": subject}
        body = {"stream_name": STREAM, "config": config, "action": "create"}
        await client.api(f"CONSUMER.CREATE.{STREAM}.{name}", body)
    agent = Agent("both", consumers={STREAM: ["one", "two"]})
    agent.on(subject_of("*"))(lambda ctx, payload: None)
    with pytest.raises(Conflict, match=f"one and two on {STREAM} both bring {subject_of('active')}"):
        async with run(agent, client, sqlite_in(tmp_path)):
            pass


async def test_a_durable_that_nobody_declares_is_not_made(client: Client, tmp_path: Path) -> None:
    agent, _ = relay([ACTIVE, "nobody_knows"])
    with pytest.raises(NotFound, match=f"nobody_knows on {STREAM} does not exist, and no catalog declares it"):
        async with run(agent, client, sqlite_in(tmp_path)):
            pass


async def test_a_stream_without_a_handler_is_refused(client: Client, tmp_path: Path) -> None:
    agent = Agent("lost", consumers={STREAM: ACTIVE})
    agent.on("go")(lambda ctx, payload: None)
    with pytest.raises(Refused, match=f"bound to consumers on {STREAM}, and no handler reads that stream"):
        async with run(agent, client, sqlite_in(tmp_path)):
            pass
