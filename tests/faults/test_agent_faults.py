"""The long fault runs of agents; tests/system/test_agent_crash.py holds the short form."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults import agent_points as points
from tests.faults import agent_scenes as scenes
from tests.faults.agent_crash import STORES, chain, store_url
from tests.support.agents import world
from tests.support.nats import NatsServer, nats_server

pytestmark = pytest.mark.faults

HITS = 20
WORLDS = 4
BUSY = frozenset(points.INBOX + points.HANDLER + points.BLOCK) | {"publish:before", "publish:after", "published"}
"""Points that a process passes often enough to die at a later visit."""


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", points.POINTS)
async def test_twenty_deaths_at_every_step(tmp_path: Path, store: str, point: str) -> None:
    """Half of them on a server that syncs always."""
    with nats_server() as server, nats_server(sync_always=True) as careful_server:

        async def run(number: int) -> None:
            url = (server, careful_server)[number % 2].url
            deliveries = 5 if point in points.BURIAL else 1_000
            async with world(url, tmp_path, await store_url(store), options={"max_deliver": deliveries}) as one:
                visits = [1 + (number + hit) % 3 if point in BUSY else 1 for hit in range(HITS // WORLDS)]
                await chain(one, [(point, visit) for visit in visits])

        await asyncio.gather(*map(run, range(WORLDS)))


FANNED = ("committed", "publish:before", "publish:half", "publish:sent", "publish:after")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", FANNED)
async def test_effects_on_every_kind_of_stream(server: NatsServer, tmp_path: Path, store: str, point: str) -> None:
    deaths = [(point, nth) for nth in range(1, 9)]

    assert [] == await scenes.deaths_with_effects_everywhere(server.url, tmp_path, await store_url(store), deaths)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("point", FANNED)
async def test_effects_on_every_kind_of_stream_after_their_ids_are_forgotten(
    server: NatsServer, tmp_path: Path, store: str, point: str
) -> None:
    deaths = [(point, nth) for nth in (1, 4, 8)]

    assert [] == await scenes.deaths_with_effects_everywhere(
        server.url, tmp_path, await store_url(store), deaths, window_s=0.1
    )


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("count", [2, 3])
async def test_a_chain_of_agents_under_kills(server: NatsServer, tmp_path: Path, store: str, count: int) -> None:
    url = await store_url(store)

    assert [] == await scenes.killed_links(server, tmp_path, url, count=count, inputs=400, kills=20, seed=11)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("sync_always", [False, True], ids=["default", "always"])
async def test_sixty_kills_at_random(tmp_path: Path, store: str, sync_always: bool) -> None:
    assert [] == await scenes.storm(store, tmp_path, kills=60, seed=7, sync_always=sync_always)


@pytest.mark.parametrize("point", ["fetched", "claimed", "row:after", "written", "committed", "published", "acked"])
async def test_a_stopped_process_is_taken_over_on_postgresql(server: NatsServer, tmp_path: Path, point: str) -> None:
    options = {"handler_timeout_s": 4.0, "max_deliver": 100}
    async with world(server.url, tmp_path, await store_url("postgresql"), options=options) as one:
        await scenes.stopped_and_taken_over(one, point)
        one.kills = 1

        assert [] == await one.count()


@pytest.mark.parametrize("point", ["fetched", "committed"])
async def test_a_stopped_process_is_taken_over_on_sqlite_outside_its_transaction(
    server: NatsServer, tmp_path: Path, point: str
) -> None:
    async with world(server.url, tmp_path, options={"max_deliver": 100}) as one:
        await scenes.stopped_and_taken_over(one, point)
        one.kills = 1

        assert [] == await one.count()


@pytest.mark.parametrize("point", ["claimed", "row:after", "written"])
async def test_a_stopped_process_is_waited_for_on_sqlite_inside_its_transaction(
    server: NatsServer, tmp_path: Path, point: str
) -> None:
    async with world(server.url, tmp_path, options={"ack_wait_s": 2.0, "max_deliver": 100}) as one:
        await scenes.stopped_and_waited_for(one, point)
        one.kills = 1

        assert [] == await one.count()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("processes", [1, 5])
async def test_one_poison_message_among_a_thousand(
    server: NatsServer, tmp_path: Path, store: str, processes: int
) -> None:
    async with world(server.url, tmp_path, await store_url(store), options={"ack_wait_s": 2.0}) as one:
        killed = await scenes.poison(one, 1_000, processes)

        assert ([], True) == (await one.count(), 1 <= killed <= 5)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "point", ["publish:half", "publish:sent", "publish:after", "published", "acked", "mark:before"]
)
async def test_an_outage_longer_than_the_duplicate_window(
    server: NatsServer, tmp_path: Path, store: str, point: str
) -> None:
    async with world(server.url, tmp_path, await store_url(store), window_s=1.0) as one:
        await scenes.outage_past_the_window(one, point)

        assert [] == await one.count()


async def test_sixty_four_async_handlers_that_wait_for_half_a_minute(server: NatsServer, tmp_path: Path) -> None:
    options = {"ack_wait_s": 10.0, "wait_s": 30.0, "concurrency": 64}
    async with world(server.url, tmp_path, options=options) as one:
        await scenes.long_waits(one, "slow", 64, lambda: scenes.takes_the_write_lock(one.store))

        assert [] == await one.count()


@pytest.mark.parametrize("store", STORES)
async def test_a_handler_that_holds_the_interpreter_for_many_ack_waits(
    server: NatsServer, tmp_path: Path, store: str
) -> None:
    options = {"ack_wait_s": 2.0, "wait_s": 10.0}
    async with world(server.url, tmp_path, await store_url(store), options=options) as one:
        await scenes.long_waits(one, "regex", 3, lambda: None)

        assert [] == await one.count()


@pytest.mark.parametrize("store", STORES)
async def test_an_input_whose_last_delivery_died_before_its_mark_is_run_after_all(
    server: NatsServer, tmp_path: Path, store: str
) -> None:
    """The server gives it up without a word to the agent, and counts it."""
    async with world(server.url, tmp_path, await store_url(store), options={"max_deliver": 2}) as one:
        await one.die("fetched", burst=1)
        await one.die("begun:before", burst=0)
        await one.finish()

        assert [] == await one.count()
