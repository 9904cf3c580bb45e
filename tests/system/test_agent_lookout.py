"""What the server gave up or lost: an agent runs the one after all and reports the other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.jetstream import Client, losses
from oncewire._ground.ledger.rules import position_key
from oncewire._ground.ledger.store import Attempt
from oncewire._ground.settings import Settings
from oncewire.agent import Agent, Context, sources
from tests.support.nats import NatsServer
from tests.support.running import COMMANDS, EVENTS, command, counted, new_agent, prepared, run, send, sqlite_in
from tests.support.streams import consumer_info, state_of, unique, witness
from tests.support.wait import until, until_async

NOW_MS = 1_790_000_000_000


def writer(subject: str, **options: Any) -> tuple[Agent, list[int]]:
    """An agent that remembers what it was given."""
    agent, seen = new_agent(**options), list[int]()

    @agent.on(subject or "go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        seen.append(payload["n"])
        if payload["n"] < 0:
            raise ValueError("it never works")

    return agent, seen


async def use_up(client: Client, agent: Agent, stream: str, url: str, count: int) -> None:
    """Take all inputs through the agent's durable as processes would that die at once: no mark, no ack."""
    await sources.open_all(client, agent, Settings())
    consumer = sources.durable_of(agent, stream, Settings())
    async with witness(url) as connection:
        pull = await connection.jetstream().pull_subscribe("", durable=consumer, stream=stream)
        taken = 0
        while taken < count * agent.max_deliver:
            taken += len(await pull.fetch(count, timeout=10))


@pytest.mark.parametrize(("stream", "deliveries"), [(EVENTS, 1), (EVENTS, 2), (COMMANDS, 2)])
async def test_inputs_that_were_given_up_before_anybody_began_them_run_after_all(
    shared_server: NatsServer, tmp_path: Path, stream: str, deliveries: int
) -> None:
    """On a log and on a work queue, which is empty afterwards."""
    agent, seen = writer(f"evt.default.demo.{unique('given')}" if stream == EVENTS else "", max_deliver=deliveries)
    async with prepared(shared_server.url) as client:
        subject = agent.handlers[0].pattern
        for n in (1, 2, -3):
            await send(client, subject, {"n": n})
        await use_up(client, agent, stream, shared_server.url, 3)
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=2, dead=1)
            consumer = sources.durable_of(agent, stream, Settings())

            async def is_over() -> bool:
                return (await consumer_info(client, stream, consumer))["num_redelivered"] == 0

            await until_async(is_over, "the server to count no redelivery")
            await send(client, subject, {"n": 4})
            await counted(runner, done=3, dead=1)
    assert sorted(seen) == [-3, 1, 2, 4]
    if stream == COMMANDS:
        async with witness(shared_server.url) as connection:
            left = await connection.jetstream().stream_info(stream, subjects_filter=command(agent, "go"))
            assert not left.state.subjects


async def test_a_copy_of_something_done_that_was_given_up_gets_its_outcome(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    """Its identity is settled, its position is not."""
    agent, seen = writer(f"evt.default.demo.{unique('copy')}", max_deliver=1)
    async with prepared(shared_server.url) as client:
        subject = agent.handlers[0].pattern
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await send(client, subject, {"n": 1}, key="one")
            await counted(runner, done=1)
        await send(client, subject, {"n": 1}, key="one")
        await use_up(client, agent, EVENTS, shared_server.url, 1)
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, duplicate=1)
    assert seen == [1]


async def test_messages_that_a_limit_dropped_unread_are_a_loss_until_a_person_has_looked(
    server: NatsServer, tmp_path: Path
) -> None:
    agent, seen = writer("evt.default.demo.in")
    async with prepared(server.url) as client:
        for n in range(4):
            await send(client, "evt.default.demo.in", {"n": n})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=4)
            assert runner.trouble == ""
        for n in range(4, 9):
            await send(client, "evt.default.demo.in", {"n": n})
        await client.api(f"STREAM.PURGE.{EVENTS}", {"seq": 8})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await until(lambda: "dropped what was not read: 3 messages, 5 to 7" in runner.trouble, "the loss")
            assert not runner.health()["is_ready"]
            await counted(runner, done=2)
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            assert "5 to 7" in runner.trouble
            await losses.acknowledge(client, EVENTS, NOW_MS)
            await until(lambda: runner.health()["is_ready"], "a ready agent")
    assert seen == [0, 1, 2, 3, 7, 8]


async def test_a_stream_that_is_still_empty_has_lost_nothing(server: NatsServer, tmp_path: Path) -> None:
    """Not even when its first message comes before the agent has read any."""
    agent, seen = writer("evt.default.demo.in")
    async with prepared(server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            assert runner.lookout.seen(*runner.opened) == 0
        await send(client, "evt.default.demo.in", {"n": 1})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=1)
        assert [] == await losses.losses(client)
    assert seen == [1]


async def test_what_was_dropped_before_an_agent_first_ran_or_after_it_was_read_is_no_loss(
    server: NatsServer, tmp_path: Path
) -> None:
    """Nor is what the agent was not asked to read: it saw that there was nothing for it."""
    agent, seen = writer("evt.default.demo.in")
    async with prepared(server.url) as client:
        for turn in range(2):
            await send(client, "evt.default.demo.else", {})
            if turn == 0:
                await client.api(f"STREAM.PURGE.{EVENTS}")
            await send(client, "evt.default.demo.in", {"n": turn})
            async with run(agent, client, sqlite_in(tmp_path)) as runner:
                await counted(runner, done=1)
                await send(client, "evt.default.demo.else", {})
                last = (await state_of(client, EVENTS))["last_seq"]
                await until(
                    lambda last=last, runner=runner: runner.lookout.seen(*runner.opened) == last, "all to be seen"
                )
                assert runner.trouble == ""
            await client.api(f"STREAM.PURGE.{EVENTS}")
        assert [] == await losses.losses(client)
    assert seen == [0, 1]


async def test_a_mark_that_is_younger_than_its_outcome_is_taken_away_and_nothing_is_given_up(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    """A process stood still before it marked an input, another one settled it, the first one marked it and died. The
    work queue has the input no more; what was never settled and is gone all the same is given up, and told."""
    agent, seen = writer("")
    async with prepared(shared_server.url) as client:
        subject = agent.handlers[0].pattern
        gone = await send(client, subject, {"n": 0})
        await client.api(f"STREAM.MSG.DELETE.{COMMANDS}", {"seq": gone})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            settled = await send(client, subject, {"n": 1})
            await counted(runner, done=1)
            (source,) = [opened.source for opened in runner.opened.values()]
        store = sqlite_in(tmp_path)
        name = store.open(agent.tenant, agent.workspace, agent.name).name
        now_ms = time.time_ns() // 1_000_000
        store.begun([
            Attempt(position_key(name, COMMANDS, source.created, at), *source.durable, at, 2, now_ms - 60_000, "")
            for at in (settled, gone)
        ])  # fmt: skip
        store.close()
        async with run(agent, client, store := sqlite_in(tmp_path)) as runner:
            await counted(runner, dead=1)
            await until(lambda: store.attempts() == [], "no mark")
            await counted(runner, dead=1)
    assert seen == [1]
