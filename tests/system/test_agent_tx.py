"""What a handler may do with `ctx.tx`, and what becomes of its input and of the others when it does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import Refused
from oncewire._ground.jetstream import Client
from oncewire._ground.ledger.stores import open_store
from oncewire.agent import Agent, Context, Effect, Runner
from tests.support.ledgers import LedgerKit, PostgresKit, SqliteKit
from tests.support.nats import NatsServer
from tests.support.running import EVENTS, command, counted, new_agent, payload_of, prepared, run, send, stored
from tests.support.streams import unique
from tests.support.wait import until_async


@dataclass
class Place:
    """An agent with its ledger, and how a stranger sees its rows."""

    kit: LedgerKit
    url: str
    agent: Agent = field(default_factory=lambda: new_agent(max_deliver=2))
    subject: str = field(default_factory=lambda: f"evt.default.demo.{unique('tx')}")

    @property
    def insert(self) -> str:
        return f"INSERT INTO charges VALUES ({'?' if self.kit.kind == 'sqlite' else '%s'})"

    def done(self, payload: dict[str, Any]) -> Effect:
        return Effect(self.subject, {"n": payload["n"]})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[Client, Runner]]:
        async with (
            prepared(self.url) as client,
            run(self.agent, client, open_store(self.kit.url)) as runner,
        ):
            yield client, runner
            assert not runner.commits.stopping.is_set(), runner.last_error
            assert runner.trouble == ""

    async def send(self, client: Client, name: str, *numbers: int) -> None:
        for number in numbers:
            await send(client, command(self.agent, name), {"n": number})

    async def effects(self) -> list[int]:
        return sorted(payload_of(one)["n"] for one in await stored(self.url, EVENTS, self.subject))

    async def causes(self) -> dict[int, str]:
        """Of the dead letters, by input."""
        letters = await stored(self.url, "DLQ_REQUESTS", f"dlq_requests.{self.agent.name}")
        return {payload_of(one)["n"]: one.headers["Oncewire-Dlq-Cause"] for one in letters}


@pytest.fixture(params=["sqlite", "postgres"])
async def place(request: pytest.FixtureRequest, shared_server: NatsServer, tmp_path: Path) -> Place:
    kit: LedgerKit = SqliteKit(tmp_path) if request.param == "sqlite" else await asyncio.to_thread(PostgresKit)
    return Place(kit, shared_server.url)


def outcome(use: Callable[[], Any]) -> str:
    try:
        return f"ran: {use()}"
    except Refused as error:
        return error.message


# ---- it ends


@pytest.mark.parametrize("statement", ["SELECT 1", "INSERT INTO charges VALUES (999)"])
async def test_a_statement_after_its_section_is_refused_and_the_ledger_goes_on(place: Place, statement: str) -> None:
    """In a background task that outlives the input: on PostgreSQL one of them, and nothing was ever committed again."""
    said: list[str] = []

    @place.agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        async with ctx.tx as tx:
            tx.execute(place.insert, (payload["n"],))

        async def audit() -> None:
            said.append(outcome(lambda: tx.execute(statement)))
            await asyncio.sleep(0.01)
            said.append(outcome(lambda: tx.execute(statement)))
            said.append(outcome(lambda: tx.cursor().execute(statement)))

        audits.add(asyncio.ensure_future(audit()))
        return place.done(payload)

    audits: set[asyncio.Future[None]] = set()
    async with place.running() as (client, runner):
        await place.send(client, "go", *range(10))
        await counted(runner, done=10)
        await asyncio.gather(*audits)
        await place.send(client, "go", *range(10, 20))
        await counted(runner, done=20)
        assert list(range(20)) == place.kit.rows(), "durable for a stranger while the agent runs"
    await asyncio.gather(*audits)
    assert set(said) == {"ctx.tx was used after its transaction had ended"}
    assert await place.effects() == list(range(20))


async def test_a_transaction_that_a_def_handler_kept_is_refused_in_the_next_and_in_threads(place: Place) -> None:
    kept: list[Any] = []
    said: list[str] = []
    threads: list[threading.Thread] = []

    @place.agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        for tx, cursor, context in kept:
            said.append(outcome(lambda tx=tx: tx.execute("INSERT INTO charges VALUES (999)")))
            said.append(outcome(cursor.fetchall))
            said.append(outcome(lambda context=context: context.tx))
        ctx.tx.execute(place.insert, (payload["n"],))
        kept.append((ctx.tx, ctx.tx.execute("SELECT 1"), ctx))
        late = threading.Thread(
            target=lambda tx=ctx.tx: (go_on.wait(), said.append(outcome(lambda: tx.execute("SELECT 1"))))
        )
        threads.append(late)
        late.start()
        return place.done(payload)

    go_on = threading.Event()
    async with place.running() as (client, runner):
        await place.send(client, "go", *range(5))
        await counted(runner, done=5)
        go_on.set()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert place.kit.rows() == list(range(5))
    assert set(said) == {"ctx.tx was used after its transaction had ended"}
    assert await place.effects() == list(range(5))


# ---- a section that raises


@pytest.mark.parametrize("way", ["caught", "timeout around", "timeout inside"])
async def test_rows_of_a_section_that_raised_are_gone_also_when_the_handler_goes_on(place: Place, way: str) -> None:
    @place.agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        try:
            if way == "timeout around":
                async with asyncio.timeout(1), ctx.tx as tx:
                    tx.execute(place.insert, (payload["n"],))
                    await asyncio.sleep(30)
            async with ctx.tx as tx:
                tx.execute(place.insert, (payload["n"],))
                if way == "timeout inside":
                    async with asyncio.timeout(0.01):
                        await asyncio.sleep(30)
                raise ValueError("no")
        except (ValueError, TimeoutError):
            await asyncio.sleep(0.01)
        return place.done(payload)

    @place.agent.on("good")
    async def good(ctx: Context, payload: dict[str, Any]) -> Effect:
        async with ctx.tx as tx:
            tx.execute(place.insert, (payload["n"],))
        return place.done(payload)

    async with place.running() as (client, runner):
        await place.send(client, "good", 1)
        await place.send(client, "go", 2)
        await place.send(client, "good", 3)
        await counted(runner, done=3)
    assert place.kit.rows() == [1, 3]
    assert await place.effects() == [1, 2, 3]


async def test_a_section_that_raised_lets_others_write_while_its_handler_goes_on(place: Place) -> None:
    others_done = asyncio.Event()

    @place.agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        try:
            async with ctx.tx as tx:
                tx.execute(place.insert, (payload["n"],))
                raise ValueError("no")
        except ValueError:
            await others_done.wait()
        return place.done(payload)

    @place.agent.on("good")
    async def good(ctx: Context, payload: dict[str, Any]) -> Effect:
        async with ctx.tx as tx:
            tx.execute(place.insert, (payload["n"],))
        return place.done(payload)

    async with place.running() as (client, runner):
        await place.send(client, "go", 1)
        await place.send(client, "good", 2, 3)
        await counted(runner, done=2)
        others_done.set()
        await counted(runner, done=3)
    assert place.kit.rows() == [2, 3]
    assert await place.effects() == [1, 2, 3]


async def test_a_section_that_is_given_up_before_its_turn_writes_nothing_and_its_handler_goes_on(place: Place) -> None:
    begun, inside, given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @place.agent.on("holds")
    async def holds(ctx: Context, payload: dict[str, Any]) -> Effect:
        async with ctx.tx as tx:
            tx.execute(place.insert, (payload["n"],))
            inside.set()
            await given_up.wait()
        return place.done(payload)

    @place.agent.on("waits")
    async def waits(ctx: Context, payload: dict[str, Any]) -> Effect:
        begun.set()
        await inside.wait()
        try:
            async with asyncio.timeout(0.01), ctx.tx as tx:
                tx.execute(place.insert, (payload["n"],))
        except TimeoutError:
            given_up.set()
            await asyncio.sleep(0.01)
        return place.done(payload)

    async with place.running() as (client, runner):
        await place.send(client, "waits", 2)
        await begun.wait()  # no handler begins while another writes
        await place.send(client, "holds", 1)
        await counted(runner, done=2)
    assert place.kit.rows() == [1]
    assert await place.effects() == [1, 2]


async def test_a_handler_that_returns_before_its_section_has_ended_fails_alone(place: Place) -> None:
    """Half of what it writes is not there yet."""
    tasks: set[asyncio.Future[None]] = set()

    @place.agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        entered = asyncio.Event()

        async def write() -> None:
            async with ctx.tx as tx:
                tx.execute(place.insert, (payload["n"],))
                entered.set()
                await asyncio.sleep(30)

        tasks.add(asyncio.ensure_future(write()))
        await entered.wait()
        return place.done(payload)

    @place.agent.on("good")
    def good(ctx: Context, payload: dict[str, Any]) -> Effect:
        ctx.tx.execute(place.insert, (payload["n"],))
        return place.done(payload)

    async with place.running() as (client, runner):
        await place.send(client, "go", 1)
        await place.send(client, "good", 2)
        await counted(runner, done=1, retried=1, dead=1)
        await until_async(place.causes, "the letter")
        for task in tasks:
            task.cancel()
    assert "returned before its section of ctx.tx had ended" in (await place.causes())[1]
    assert place.kit.rows() == await place.effects() == [2]


# ---- what only looks like a connection


def raising_in_a_block(ctx: Context) -> None:
    with ctx.tx:
        ctx.tx.execute("DELETE FROM charges")
        raise ValueError("no such order")


WRONG: dict[str, tuple[Callable[[Context], Any], str]] = {
    "a block that raises": (raising_in_a_block, "no such order"),
    "close": (lambda ctx: ctx.tx.close(), "may not close the ledger's connection"),
    "commit": (lambda ctx: ctx.tx.commit(), "may not end or begin the ledger's transaction"),
    "rollback": (lambda ctx: ctx.tx.rollback(), "may not end or begin the ledger's transaction"),
    "the connection": (lambda ctx: ctx.tx.connection.close(), "ctx.tx has no 'connection'"),
    "ctx.once": (lambda ctx: ctx.once("pay", print), "ctx.once needs an `async def` handler"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_a_def_handler_must_not_do_fails_its_input_alone(place: Place, name: str) -> None:
    """It is not taken for a store that is away, and nothing of the others is lost."""
    wrong, cause = WRONG[name]

    @place.agent.on("bad")
    def bad(ctx: Context, payload: dict[str, Any]) -> Effect:
        ctx.tx.execute(place.insert, (payload["n"],))
        wrong(ctx)
        return place.done(payload)

    @place.agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        with ctx.tx, ctx.tx.transaction():
            ctx.tx.execute(place.insert, (payload["n"],))
        return place.done(payload)

    async with place.running() as (client, runner):
        await place.send(client, "go", 1)
        await place.send(client, "bad", 2)
        await place.send(client, "go", 3, 4, 5)
        await counted(runner, done=4, retried=1, dead=1)
        await until_async(place.causes, "the letter")
    assert cause in (await place.causes())[2]
    assert place.kit.rows() == await place.effects() == [1, 3, 4, 5]


async def test_an_async_handler_that_does_not_enter_its_transaction_is_told_how(place: Place) -> None:
    @place.agent.on("bare")
    async def bare(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.tx.execute(place.insert, (payload["n"],))

    @place.agent.on("sync")
    async def sync(ctx: Context, payload: dict[str, Any]) -> None:
        with ctx.tx as tx:
            tx.execute(place.insert, (payload["n"],))

    async with place.running() as (client, runner):
        await place.send(client, "bare", 1)
        await place.send(client, "sync", 2)
        await counted(runner, retried=2, dead=2)
        await until_async(lambda: _both(place), "the letters")
    assert all("`async with ctx.tx as tx:`" in cause for cause in (await place.causes()).values())
    assert place.kit.rows() == []


async def _both(place: Place) -> bool:
    return len(await place.causes()) == 2


async def test_what_one_handler_sets_for_its_session_the_next_does_not_find(place: Place) -> None:
    """Nor the ledger itself, whose rows would come as something else."""
    found: list[Any] = []

    @place.agent.on("sets")
    def sets(ctx: Context, payload: dict[str, Any]) -> Effect:
        if place.kit.kind == "sqlite":
            ctx.tx.text_factory = lambda *_: found.append("used")
            ctx.tx.execute("CREATE TEMP TABLE mine (n)")
        else:
            ctx.tx.execute("SET search_path TO nowhere")
            ctx.tx.execute("SET app.tenant = 'blue'")
            ctx.tx.execute("CREATE TEMP TABLE mine (n int)")
        ctx.tx.row_factory = lambda *_: found.append("used")
        return place.done(payload)

    @place.agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        async with ctx.tx as tx:
            tx.execute(place.insert, (payload["n"],))
        return place.done(payload)

    async with place.running() as (client, runner):
        for number in range(0, 20, 2):
            await place.send(client, "sets", number)
            await place.send(client, "go", number + 1)
        await counted(runner, done=20)
    assert found == []
    assert place.kit.rows() == list(range(1, 20, 2))
    assert await place.effects() == list(range(20))
