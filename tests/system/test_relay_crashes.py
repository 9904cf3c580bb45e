"""A relay that dies at each of its steps, servers that are killed under load: nothing is lost, doubled or reordered.

Each step once here; twenty times, and at random, in tests/faults.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import asyncpg
import pytest

import oncewire
from tests.support.nats import NatsServer
from tests.support.outbox import (
    ENQUEUE,
    Load,
    RelayProcess,
    assert_all_messages_once,
    assert_all_once_in_order,
    drained,
    found_in_stream,
    make_chat_stream,
    make_messages_stream,
    open_rows,
)
from tests.support.postgres import postgres_server, shared_postgres
from tests.support.wait import until, until_async

STEPS = ["claimed", "publishing", "row_published", "published", "marked", "committed"]


async def crash_at(server: NatsServer, step: str, times: int, *, count: int, has_messages: bool = False) -> None:
    """Under load, beside a second relay: a relay that dies at the step, started again and again."""
    url = await shared_postgres().new_database()
    await make_streams(server)
    load = Load(url, conversations=15, writers=2, pause_s=0.01, has_messages=has_messages)
    with RelayProcess(server.url, url):
        async with load.running():
            for time in range(times):
                with RelayProcess(server.url, url, step, 1 + time % count) as doomed:
                    await until(lambda doomed=doomed: not doomed.is_running, f"a death at {step}")
        await drained(url)
    assert await assert_all_once_in_order(server.url, url) >= load.acknowledged.total() > 0
    if has_messages:
        assert await assert_all_messages_once(server.url, url) >= load.transactions > 0


async def make_streams(server: NatsServer) -> None:
    """The duplicate window is shorter than the lease on a message: what a dead relay left is searched for."""
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client)
        await make_messages_stream(client, duplicate_window=30_000_000_000)


@pytest.mark.parametrize("step", STEPS)
async def test_a_relay_that_dies_at_a_step_loses_and_doubles_nothing(server: NatsServer, step: str) -> None:
    await crash_at(server, step, times=1, count=1)


async def backlog(url: str, conversations: int, rows: int) -> None:
    """So much at once that it goes as batches."""
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        for number in range(conversations * rows):
            conversation_id = uuid.UUID(int=number % conversations + 1)
            await connection.fetch(ENQUEUE, conversation_id, f"{number}")
    await connection.close()


@pytest.mark.parametrize("step", ["claimed", "publishing", "published", "marked", "committed"])
async def test_a_relay_that_dies_with_a_batch_loses_and_doubles_nothing(server: NatsServer, step: str) -> None:
    url = await shared_postgres().new_database()
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client)
    await backlog(url, conversations=50, rows=30)
    with RelayProcess(server.url, url, step) as doomed:
        await until(lambda: not doomed.is_running, f"a death at {step}")
    assert await open_rows(url) > 0
    with RelayProcess(server.url, url):
        await drained(url)
    assert await assert_all_once_in_order(server.url, url) == 1_500


async def test_a_relay_that_dies_while_it_renumbers_has_renumbered_nothing(server: NatsServer) -> None:
    url = await shared_postgres().new_database()
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client)
    await backlog(url, conversations=1, rows=4)
    with RelayProcess(server.url, url):
        await drained(url)
    connection = await asyncpg.connect(url)
    await connection.execute("TRUNCATE conversations, conversation_messages, message_outbox, conversation_relay")
    await connection.close()
    await backlog(url, conversations=1, rows=2)
    with RelayProcess(server.url, url, "renumbered") as doomed:
        await until(lambda: not doomed.is_running, "a death while it renumbers")
    with RelayProcess(server.url, url):
        await drained(url)
    assert [one.sequence for one in await found_in_stream(server.url)] == [1, 2, 3, 4, 5, 6]


async def test_killed_servers_and_relays_under_load_lose_and_double_nothing(server: NatsServer) -> None:
    """kill -9 of PostgreSQL, of nats-server and of a relay, one after the other, while writers write."""
    with postgres_server() as database:
        url = await database.migrated().new_database()
        async with oncewire.connect(server.url) as client:
            await make_chat_stream(client)
        load = Load(url, conversations=15, writers=3, pause_s=0.002)
        with RelayProcess(server.url, url), RelayProcess(server.url, url) as doomed:
            async with load.running():
                for act in (database.kill, database.start, server.kill, server.start, doomed.kill):
                    seen = load.acknowledged.total()
                    if act != database.start:
                        await until(lambda seen=seen: load.acknowledged.total() > seen + 200, "some load")
                    act()
            await drained(url)
        await load.assert_nothing_acknowledged_is_lost()
        assert await assert_all_once_in_order(server.url, url) >= load.acknowledged.total()


async def test_a_relay_follows_a_failover_by_its_connection_string(server: NatsServer, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    with postgres_server() as primary:
        url = await primary.migrated().new_database()
        standby = primary.copy(_open_folder(tmp_path_factory.mktemp("standby"))).start()
        try:
            both = url.replace(f":{primary.port}/", f":{primary.port},127.0.0.1:{standby.port}/")
            name = url.rpartition("/")[2]
            async with oncewire.connect(server.url) as client:
                await make_chat_stream(client)
            with RelayProcess(server.url, both):
                await backlog(url, conversations=5, rows=4)
                await drained(url)
                await until_async(lambda: _has_followed(standby.url(name), 20), "the standby")
                primary.kill()
                connection = await asyncpg.connect(standby.url(name))
                await connection.execute("SELECT pg_promote()")
                await connection.close()
                await backlog(standby.url(name), conversations=5, rows=4)
                await drained(standby.url(name))
            assert await assert_all_once_in_order(server.url, standby.url(name)) == 40
        finally:
            standby.stop()


def _open_folder(path: Path) -> Path:
    """PostgreSQL runs as another user where we are root: let it reach its folder."""
    for folder in (path, *path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    return path


async def _has_followed(url: str, count: int) -> bool:
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetchval("SELECT count(*) FROM message_outbox WHERE status = 'dispatched'")
        return bool(found == count)
    finally:
        await connection.close()
