"""Deaths in a row on one ledger, each looked at before anybody takes over."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

import asyncpg

from tests.faults import agent_points as points
from tests.support.agents import World
from tests.support.postgres import shared_postgres

STORES = ("sqlite", "postgresql")
BURST = 10
"""One of each kind."""
KEEP_S = 2 * 3_600 + 86_400
"""The least that the streams of a world allow, which keep their messages for an hour."""
MANY = 3
"""So few effects already go out together: a slow store cuts batches short."""


async def store_url(store: str) -> str:
    """A database of its own on the shared PostgreSQL; '' lets the world make a SQLite file."""
    if store == "sqlite":
        return ""
    return await with_ledger(await shared_postgres().new_database())


async def with_ledger(url: str) -> str:
    """The database, with the ledger's tables."""
    connection = await asyncpg.connect(url)
    try:
        if await connection.fetchval("SELECT to_regclass('ledger_chains')") is None:
            await connection.execute(files("oncewire._ground.ledger").joinpath("sql", "001_ledger.sql").read_text())
    finally:
        await connection.close()
    return url


async def chain(world: World, deaths: Iterable[tuple[str, int]], kind: str = "") -> None:
    """Inputs of one kind, or of all. At each death its order of steps is checked; a point that is never reached fails.
    Then all is finished, and counted."""
    for point, nth in deaths:
        options: dict[str, int | str] = {}
        if point in points.SWEEP:
            await world.die(points.SWEEP_PRELUDE, burst=BURST)
        elif point in points.RECOVERY:  # what a process had in hand when it died
            await world.die(points.RECOVERY_PRELUDE, burst=BURST)
        elif point in points.BURIAL:
            await exhaust(world)
        elif (
            point in points.ATOMIC + points.FAST + points.LOOK
        ):  # only an agent that stopped cleanly takes many at once
            await world.finish()
            await world.send(kinds=["sync"] * BURST)
            options = {"many": MANY, "way": "fast" if point in points.FAST else "atomic"}
            if point in points.LOOK:
                options = {"many": MANY, "look": MANY}
        elif point in points.FORGETTING:
            await world.finish()
            await world.send(BURST)
            await world.finish()
            options = {"keep_s": KEEP_S, "clock_ahead_s": 2 * KEEP_S}
        await world.die(point, nth, burst=BURST, kind=kind, **options)
        problems = await world.autopsy()
        assert not problems, f"after a death at {point}, visit {nth}: {problems}"
    await world.finish()
    problems = await world.count()
    assert not problems, problems


async def exhaust(world: World) -> None:
    """An input that kills every process that takes it, until nobody may take it any more."""
    await world.send(kinds=["poison"])
    for _ in range(world.options["max_deliver"]):
        worker = world.start()
        assert await worker.ended() == -9, worker.tail()
