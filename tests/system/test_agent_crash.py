"""Agents that die at each of their steps: no effect and no row is missing or doubled, and the blocks prove it.

Each point once here, in chains on one ledger (what one death leaves behind, the next process meets); twenty times each,
alone, and at random, in tests/faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import NotFound
from oncewire.agent import Context
from tests.faults import agent_points as points
from tests.faults import agent_scenes as scenes
from tests.faults.agent_crash import STORES, chain, store_url
from tests.support.agents import ROOT, world
from tests.support.nats import NatsServer
from tests.support.running import command, counted, new_agent, prepared, run, send, sqlite_in
from tests.support.wait import until_async

CHAINS = {
    "start": points.STARTING + points.INBOX,
    "handle": points.HANDLER + points.CALLS,
    "commit": points.BLOCK,
    "publish": points.EFFECTS + points.ATOMIC,
    "ingest": points.FAST + points.LOOK,
    "settle": points.SETTLING,
    "later": points.MARKS + points.DELAYED + points.ENDING,
    "recover": points.RECOVERY + points.SWEEP,
    "bury": points.BURIAL,
    "forget": points.FORGETTING,
}
DELIVERIES = {"bury": 5}
"""A chain of deaths uses up the deliveries of what is in hand, which is not what it is about."""

SHORT = {
    "write": ("claimed", "append:after", "commit:after", "publish:sent"),
    "end": ("ack:before", "mark:before", "begun", "forget:inside"),
}
"""On PostgreSQL one death per part of the protocol; all of them need room for more: `make faults`."""


def test_every_point_is_in_a_chain() -> None:
    assert sorted(points.POINTS) == sorted(point for chain in CHAINS.values() for point in chain)


def test_every_step_that_the_runtime_names_is_a_point() -> None:
    """A new step without a death at it would be a promise that nobody has tried."""
    sources = (ROOT / "src/oncewire/agent").glob("*.py")
    named = {name for path in sources for name in re.findall(r'\bat\("(\w+)"\)', path.read_text())}

    assert set() == named - set(points.POINTS)


@pytest.mark.parametrize(
    ("store", "chains"),
    [("sqlite", CHAINS), ("postgresql", SHORT), pytest.param("postgresql", CHAINS, marks=pytest.mark.faults)],
    ids=["sqlite", "postgresql", "postgresql-all"],
)
async def test_an_agent_that_dies_at_every_step_loses_and_doubles_nothing(
    shared_server: NatsServer, tmp_path: Path, store: str, chains: dict[str, tuple[str, ...]]
) -> None:
    """The chains run side by side: most of the time one waits for a redelivery."""

    async def run(name: str) -> None:
        url = await store_url(store)
        async with world(shared_server.url, tmp_path, url, options={"max_deliver": DELIVERIES.get(name, 1_000)}) as one:
            await chain(one, [(point, 1) for point in chains[name]])

    ended = await asyncio.gather(*map(run, chains), return_exceptions=True)
    failed = {name: error for name, error in zip(chains, ended, strict=True) if error}

    assert {} == failed


@pytest.mark.parametrize(("store", "kills"), [("sqlite", 3), ("postgresql", 2)])
async def test_a_few_kills_at_random_lose_and_double_nothing(tmp_path: Path, store: str, kills: int) -> None:
    """Two workers, nats-server, and PostgreSQL where it is the store."""
    assert [] == await scenes.storm(store, tmp_path, kills=kills, seed=1)


@pytest.mark.parametrize("store", STORES)
async def test_effects_on_every_kind_of_stream_outlive_a_kill(
    shared_server: NatsServer, tmp_path: Path, store: str
) -> None:
    """The next process knows none of these streams before it looks at what was left open."""
    deaths = [("publish:before", 1), ("publish:half", 3)]

    assert [] == await scenes.deaths_with_effects_everywhere(
        shared_server.url, tmp_path, await store_url(store), deaths
    )


@pytest.mark.parametrize(("store", "count"), [("sqlite", 3), ("postgresql", 2)])
async def test_a_chain_of_agents_outlives_kills(server: NatsServer, tmp_path: Path, store: str, count: int) -> None:
    url = await store_url(store)

    assert [] == await scenes.killed_links(server, tmp_path, url, count=count, inputs=60, kills=3, seed=3)


@pytest.mark.faults
async def test_a_stopped_process_is_taken_over_on_postgresql(shared_server: NatsServer, tmp_path: Path) -> None:
    options = {"handler_timeout_s": 3.0, "max_deliver": 100}
    async with world(shared_server.url, tmp_path, await store_url("postgresql"), options=options) as one:
        await scenes.stopped_and_taken_over(one, "committed")
        one.kills = 1

        assert [] == await one.count()


async def test_a_stopped_process_is_waited_for_on_sqlite(shared_server: NatsServer, tmp_path: Path) -> None:
    async with world(shared_server.url, tmp_path, options={"ack_wait_s": 1.0, "max_deliver": 100}) as one:
        await scenes.stopped_and_waited_for(one, "row:after")
        one.kills = 1

        assert [] == await one.count()


async def test_a_second_file_on_one_durable_is_refused(shared_server: NatsServer, tmp_path: Path) -> None:
    async with world(shared_server.url, tmp_path) as one:
        assert "belongs to another ledger" in await scenes.another_file(one)
        assert [] == await one.count()


@pytest.mark.parametrize(("store", "processes"), [("sqlite", 1), ("postgresql", 5)])
async def test_a_poison_message_is_the_only_one_given_up(
    shared_server: NatsServer, tmp_path: Path, store: str, processes: int
) -> None:
    async with world(shared_server.url, tmp_path, await store_url(store)) as one:
        killed = await scenes.poison(one, 30, processes)

        assert ([], True) == (await one.count(), 1 <= killed <= 5)


async def test_a_full_disk_only_delays(shared_server: NatsServer, tmp_path: Path) -> None:
    async with world(shared_server.url, tmp_path) as one:
        await scenes.full_disk(one, file_bytes_max=400_000)

        assert [] == await one.count()


async def test_an_outage_longer_than_the_duplicate_window_doubles_nothing(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    async with world(shared_server.url, tmp_path, window_s=1.0) as one:
        await scenes.outage_past_the_window(one, "published")

        assert [] == await one.count()


async def test_waiting_handlers_hold_no_lock_and_nothing_is_redelivered(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    options = {"ack_wait_s": 1.5, "wait_s": 4.5, "concurrency": 64}
    async with world(shared_server.url, tmp_path, options=options) as one:
        await scenes.long_waits(one, "slow", 64, lambda: scenes.takes_the_write_lock(one.store))

        assert [] == await one.count()


async def test_a_handler_that_holds_the_interpreter_keeps_its_inputs(shared_server: NatsServer, tmp_path: Path) -> None:
    async with world(shared_server.url, tmp_path, options={"ack_wait_s": 2.0, "wait_s": 5.0}) as one:
        await scenes.long_waits(one, "regex", 2, lambda: None)

        assert [] == await one.count()


async def test_a_stream_that_went_back_is_refused(server: NatsServer, tmp_path: Path) -> None:
    async with world(server.url, tmp_path) as one:
        assert "went back" in await scenes.restored_stream(one, server)


async def test_a_process_may_start_while_another_commits(server: NatsServer, tmp_path: Path) -> None:
    """What is announced between its two looks, at the stream and at the ledger, is no sign of a restored ledger."""
    agent = new_agent()

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        """Only its block matters."""

    async with (
        prepared(server.url) as client,
        prepared(server.url) as late,
        run(agent, client, sqlite_in(tmp_path)) as first,
    ):
        look = late.get_last

        async def look_late(stream: str, subject: str, **named: Any) -> Any:
            if stream == "LEDGER":
                await send(client, command(agent, "go"), {})
                await counted(first, done=1)
                await until_async(lambda: _is_there(look, stream, subject), "the announcement")
            return await look(stream, subject, **named)

        late.get_last = look_late  # type: ignore[method-assign]
        async with run(agent, late, sqlite_in(tmp_path)) as second:
            assert second.ledger == first.ledger


async def _is_there(look: Any, stream: str, subject: str) -> bool:
    with contextlib.suppress(NotFound):
        return bool(await look(stream, subject))
    return False


async def test_a_batch_of_suspects_alone_outlives_a_store_that_is_away(server: NatsServer, tmp_path: Path) -> None:
    """Nothing is left to commit together then, so there is nothing that could be tried again."""
    agent, store = new_agent(), sqlite_in(tmp_path)

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        """Never called."""

    async with prepared(server.url) as client, run(agent, client, store) as runner:
        store.connection.execute("PRAGMA busy_timeout = 10")
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")

            assert [] == [settled async for settled in runner.commits.commit([], agent.max_deliver)]
