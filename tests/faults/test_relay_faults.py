"""Relays and servers killed again and again under load: every named step twenty times, and at random from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import oncewire
from tests.support.nats import NatsServer
from tests.support.outbox import (
    Load,
    RelayProcess,
    assert_all_messages_once,
    assert_all_once_in_order,
    drained,
    make_chat_stream,
    postgres,
)
from tests.support.postgres import postgres_server, shared_postgres
from tests.support.wait import until, until_async
from tests.system.test_outbox_messages import STEPS as MESSAGE_STEPS
from tests.system.test_relay_crashes import STEPS, crash_at, make_streams

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1_800)]

KILLS = 20
END_STOPPED_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'oncewire' AND wait_event = 'ClientRead'
            AND state <> 'idle' AND state_change < clock_timestamp() - interval '100 ms'
"""
"""What PostgreSQL's own timeouts do later: a stopped relay is idle in its transaction, or stands within a statement."""


DISPATCHED = "SELECT array_agg(dispatched_sequence ORDER BY conversation_id) FROM conversation_relay"


@pytest.mark.parametrize("step", STEPS)
async def test_twenty_deaths_at_a_step_lose_and_double_nothing(server: NatsServer, step: str) -> None:
    await crash_at(server, step, times=KILLS, count=4)


@pytest.mark.parametrize("step", MESSAGE_STEPS)
async def test_twenty_deaths_at_a_step_of_the_general_outbox_lose_and_double_nothing(
    server: NatsServer, step: str
) -> None:
    await crash_at(server, step, times=KILLS, count=4, has_messages=True)


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_kills_of_relays_and_servers_lose_and_double_nothing(server: NatsServer, seed: int) -> None:
    """Two relays, a nats-server and a PostgreSQL; one of them dies every half second or so, and comes back."""
    chance = random.Random(seed)
    with postgres_server() as database, contextlib.ExitStack() as stack:
        url = await database.migrated().new_database()
        await make_streams(server)
        relays = [stack.enter_context(RelayProcess(server.url, url)) for _ in range(2)]

        def kill_relay() -> None:
            at = chance.randrange(len(relays))
            relays[at].kill()
            relays[at] = stack.enter_context(RelayProcess(server.url, url))

        def restart_nats() -> None:
            server.kill()
            server.start()

        def restart_postgres() -> None:
            database.kill()
            database.start()

        acts: list[Callable[[], None]] = [kill_relay] * 4 + [restart_nats, restart_postgres]
        load = Load(url, conversations=25, writers=4, seed=seed, pause_s=0.002, has_messages=True)
        async with load.running():
            for _ in range(3 * KILLS):
                seen, wanted = load.acknowledged.total(), chance.randrange(20, 400)
                await until(lambda seen=seen, wanted=wanted: load.acknowledged.total() > seen + wanted, "some load")
                await asyncio.to_thread(chance.choice(acts))
        await drained(url)
        await load.assert_nothing_acknowledged_is_lost()
        assert await assert_all_once_in_order(server.url, url) >= load.acknowledged.total()
        assert await assert_all_messages_once(server.url, url) >= load.transactions > 0


async def test_a_stopped_relay_that_continues_does_no_harm(server: NatsServer) -> None:
    """SIGSTOP, its session is ended by PostgreSQL, SIGCONT: what it still sends meets the fence."""
    chance = random.Random(3)
    url = await shared_postgres().new_database()
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client)
    load = Load(url, conversations=10, writers=3, pause_s=0.002)
    with RelayProcess(server.url, url), RelayProcess(server.url, url) as sleepy:
        async with load.running():
            for _ in range(KILLS):
                seen, wanted = load.acknowledged.total(), chance.randrange(100)
                await until(lambda seen=seen, wanted=wanted: load.acknowledged.total() > seen + wanted, "some load")
                sleepy.process.send_signal(signal.SIGSTOP)
                seen = load.acknowledged.total()
                async with postgres(url) as connection:
                    await until(lambda seen=seen: load.acknowledged.total() > seen + 300, "work that it misses")
                    before = await connection.fetchval(DISPATCHED)
                    await until_async(partial(_have_moved, connection, before), "every conversation to go on")
                sleepy.process.send_signal(signal.SIGCONT)
        await drained(url)
    assert await assert_all_once_in_order(server.url, url) >= load.acknowledged.total() > 0


async def _have_moved(connection: Any, before: list[int]) -> bool:
    """Whether all conversations of then have gone on. Looks for stopped sessions each time, as PostgreSQL's own timeout
    does: the stopped relay's may be too young at the first look."""
    await connection.execute(END_STOPPED_SESSIONS)
    after: list[int] = await connection.fetchval(DISPATCHED)
    return all(now > then for then, now in zip(before, after, strict=False))
