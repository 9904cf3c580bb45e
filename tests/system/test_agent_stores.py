"""The same agent on every store: crashes, takeovers, several processes, rows and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from oncewire._ground.contracts.message import new_message
from oncewire._ground.database.migrate import migrations
from oncewire._ground.ledger.store import Store
from oncewire._ground.ledger.stores import open_store
from oncewire.agent import Agent, Context, Effect, Retry, Runner
from tests.support.ledgers import PostgresKit
from tests.support.nats import NatsServer
from tests.support.postgres import postgres_server
from tests.support.running import COMMANDS, EVENTS, command, counted, new_agent, payload_of, prepared, run, send, stored
from tests.support.streams import consumer_info, unique
from tests.support.wait import until, until_async

WHEN = datetime(2026, 1, 15, 14, 30, tzinfo=UTC)
MakeStore = Callable[[], Store]


@pytest.fixture(params=["sqlite", "postgres"])
async def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Makes stores on one ledger, as several processes have them."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    if request.param == "postgres":
        url = (await asyncio.to_thread(PostgresKit)).url
    return lambda: open_store(url)


def mark(store: Store) -> str:
    """How this driver writes a place for a value."""
    return "?" if store.url.startswith("sqlite") else "%s"


def charging(agent: Agent, store: Store, subject: str) -> Agent:
    insert = f"INSERT INTO orders VALUES ({mark(store)})"
    create = "CREATE TABLE IF NOT EXISTS orders (n INTEGER)"

    @agent.on("sync")
    def sync(ctx: Context, payload: dict[str, Any]) -> Effect:
        ctx.tx.execute(create)
        ctx.tx.execute(insert, (payload["n"],))
        if ctx.deliveries == 1 and payload["n"] % 7 == 1:
            raise Retry(after_s=0.01)
        return Effect(subject, payload)

    @agent.on("wait")
    async def wait(ctx: Context, payload: dict[str, Any]) -> Effect:
        await asyncio.sleep(0)
        async with ctx.tx as tx:
            tx.execute(create)
            tx.execute(insert, (payload["n"],))
            if ctx.deliveries == 1 and payload["n"] % 7 == 1:
                raise Retry(after_s=0.01)
        return Effect(subject, payload)

    return agent


async def rows(runner: Runner) -> list[int]:
    def read() -> list[int]:
        store = runner.store
        store.begin()
        try:
            return sorted(row[0] for row in store.connection.execute("SELECT n FROM orders").fetchall())
        finally:
            store.rollback()

    async with runner.commits.turn:
        found: list[int] = await runner.db(read)
    return found


async def test_rows_and_effects_stand_once_with_two_processes(shared_server: NatsServer, make_store: MakeStore) -> None:
    subject, store = f"evt.default.demo.{unique('s')}", make_store()
    agent = charging(new_agent(batch=10), store, subject)
    async with (
        prepared(shared_server.url) as one,
        prepared(shared_server.url) as two,
        run(agent, one, store) as first,
    ):
        await send(one, command(agent, "sync"), {"n": -1})
        await counted(first, done=1)
        async with run(agent, two, make_store()) as second:
            for n in range(100):
                await send(one, command(agent, "sync" if n % 2 else "wait"), {"n": n})
            await until(lambda: first.counts.get("done", 0) + second.counts.get("done", 0) == 101)
        assert await rows(first) == list(range(-1, 100))
    effects = sorted(payload_of(one)["n"] for one in await stored(shared_server.url, EVENTS, subject))
    assert effects == list(range(-1, 100))


async def test_a_process_that_lost_its_inputs_to_another_undoes_what_it_did(
    shared_server: NatsServer, make_store: MakeStore
) -> None:
    """Stopped past ack_wait inside an async handler: the other one settles the input, what the first did is dropped."""
    subject, store = f"evt.default.demo.{unique('s')}", make_store()
    agent = new_agent()
    insert = f"INSERT INTO orders VALUES ({mark(store)})"
    held = asyncio.Event()
    begun: list[int] = []

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        begun.append(ctx.deliveries)
        if ctx.deliveries == 1:
            await held.wait()
        async with ctx.tx as tx:
            tx.execute("CREATE TABLE IF NOT EXISTS orders (n INTEGER)")
            tx.execute(insert, (ctx.deliveries,))
        return Effect(subject, {"by": ctx.deliveries})

    async with (
        prepared(shared_server.url) as one,
        prepared(shared_server.url) as two,
        run(agent, one, store) as first,
    ):
        await send(one, command(agent, "go"), {})
        await until(lambda: begun, "the first to begin")
        assert first.intakes[0]._pull is not None
        one.unsubscribe(first.intakes[0]._pull._sub)  # a stopped process hears nothing any more, and says nothing
        assert first._keepalive is not None
        await first._keepalive.stop()  # takes a while: its input must not come back to the first meanwhile
        async with run(agent, two, make_store()) as second:
            await counted(second, done=1)
            held.set()
            await until(lambda: first.counts.get("redelivered", 0) == 1)
        assert len(begun) == 2, "each of them ran it once"
        assert len(await rows(first)) == 1
    assert len(await stored(shared_server.url, EVENTS, subject)) == 1


async def test_calls_delays_and_attempts_survive_a_restart(shared_server: NatsServer, make_store: MakeStore) -> None:
    subject, calls = f"evt.default.demo.{unique('s')}", []
    agent = new_agent()

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        result = await ctx.once("call", lambda: calls.append(1) or len(calls))
        if ctx.deliveries == 1:
            raise Retry(after_s=1.5)
        return Effect(subject, {"result": result}, delay_s=0.5)

    async with prepared(shared_server.url) as client:
        async with run(agent, client, make_store()) as runner:
            await send(client, command(agent, "go"), {})
            await counted(runner, retried=1)
        async with run(agent, client, make_store()) as runner:
            assert [one.deliveries for one in await runner.db(runner.store.attempts)] in ([1], [2], [])
            await counted(runner, done=1)
        async with run(agent, client, make_store()) as runner:
            await until_async(lambda: stored(shared_server.url, EVENTS, subject))
            info = await consumer_info(client, COMMANDS, f"{agent.name}_consumer")
            assert info["num_ack_pending"] == 0
            assert await runner.db(runner.store.attempts) == []
    assert calls == [1]
    assert [payload_of(one) for one in await stored(shared_server.url, EVENTS, subject)] == [{"result": 1}]


async def test_a_database_that_dies_under_way_is_waited_for(shared_server: NatsServer) -> None:
    """The batch stays in hand: no delivery is spent, no effect is missing or doubled."""
    subject = f"evt.default.demo.{unique('s')}"
    with postgres_server() as server:
        url = server.url()
        await _migrate(url)
        store = open_store(url)
        agent = charging(new_agent(max_deliver=3), store, subject)
        async with prepared(shared_server.url) as client, run(agent, client, store) as runner:
            await send(client, command(agent, "sync"), {"n": 0})
            await counted(runner, done=1)
            server.kill()
            for n in (2, 3, 4, 5, 6, 7):
                await send(client, command(agent, "sync" if n % 2 else "wait"), {"n": n})
            await until(lambda: runner.trouble, "readiness to name it")
            server.start()
            await counted(runner, done=7)
            assert "dead" not in runner.counts
            assert await rows(runner) == [0, 2, 3, 4, 5, 6, 7]
    effects = sorted(payload_of(one)["n"] for one in await stored(shared_server.url, EVENTS, subject))
    assert effects == [0, 2, 3, 4, 5, 6, 7]


async def _migrate(url: str) -> None:
    for one in migrations(("ledger",)):
        connection = await asyncpg.connect(url)
        await connection.execute(one.sql)
        await connection.close()


async def test_agents_of_one_name_in_two_tenants_each_get_every_message(
    shared_server: NatsServer, make_store: MakeStore
) -> None:
    """On one store, on a stream whose durables carry the settings' prefix."""
    name, seen = unique("agent"), list[tuple[str, str]]()

    def watching(tenant: str) -> Agent:
        agent = new_agent(name, tenant=tenant, workspace="demo")

        @agent.on(f"sr.events.{name}")
        def note(ctx: Context, payload: dict[str, Any]) -> None:
            seen.append((tenant, payload["id"]))

        return agent

    async with prepared(shared_server.url) as client:
        one, other = watching("acme"), watching("zeta")
        async with run(one, client, make_store()) as first, run(other, client, make_store()) as second:
            for number in range(20):
                sent = new_message(
                    "T", {"id": f"{number}"}, message_id=f"{name}-{number}", timestamp=WHEN, actor_id="a",
                    actor_kind="SYSTEM",
                )  # fmt: skip
                await client.publish(f"sr.events.{name}", sent)
            await counted(first, done=20)
            await counted(second, done=20)
            names = [opened.source.consumer for runner in (first, second) for opened in runner.opened.values()]
    assert [f"sr-consumer-acme-demo-{name}", f"sr-consumer-zeta-demo-{name}"] == names
    assert sorted(seen) == sorted((tenant, f"{number}") for tenant in ("acme", "zeta") for number in range(20))
