"""The harness is tested: the runtime built wrongly in one step must turn the count red, and built rightly must not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.agent_crash import STORES, store_url, with_ledger
from tests.faults.agent_mutations import MUTATIONS
from tests.faults.agent_power import can_tell, cut_power
from tests.support.agents import World, world
from tests.support.nats import NatsServer
from tests.support.postgres import postgres_server
from tests.support.wait import until

pytestmark = pytest.mark.faults

PATIENCE_S = 10.0
"""A worker that was built wrongly may never finish."""
WINDOW_S = 1.0


@dataclass(frozen=True)
class Trial:
    """Where a process with the mutation dies, and what is expected to be found, in words of the count."""

    finds: str
    point: str = ""
    nth: int = 1
    or_finds: str = "?"
    """What PostgreSQL finds by itself, before the count can."""


TRIALS = {
    "ack_before_commit": Trial("row missing", "claimed"),
    "ack_before_publish": Trial("acked and not published", "swapped"),
    "publish_before_commit": Trial("published and not committed", "swapped"),
    "rows_committed_before_the_block": Trial("row doubled", "swapped"),
    "delayed_dropped_before_sent": Trial("effect missing", "swapped"),
    "marks_never_written": Trial("confirmed up to block 0"),
    "sweep_skipped": Trial("effect missing", "publish:before"),
    "resend_pretended": Trial("effect missing", "publish:before"),
    "claim_ignored": Trial("row doubled", "ack:before", or_finds="settled by another process meanwhile"),
    "calls_never_recorded": Trial("calls made again"),
    "delayed_never_dropped": Trial("announced 2 times", "due", 2),
    "block_not_announced": Trial("no block was announced"),
    "confirmed_half_way": Trial("effect missing"),
    "random_ids_at_publish": Trial("effect doubled", "published", 2),
    "random_effect_ids": Trial("effect without its stable id"),
    "ids_without_the_index": Trial("id doubled"),
    "old_effects_not_looked_up": Trial("effect doubled", "published", 2),
}


def test_every_mutation_has_a_trial() -> None:
    assert MUTATIONS.keys() == TRIALS.keys() | {"fsync_left_out"}


async def verdict(one: World, trial: Trial, mutation: str) -> list[str]:
    """What the harness says about a runtime with this mutation: the dead, then the end."""
    problems: list[str] = []
    if trial.point:
        await one.die(trial.point, trial.nth, mutation=mutation)
        problems += await one.autopsy()
        forgotten_at = time.monotonic() + 2 * one.window_s
        if one.window_s <= WINDOW_S:
            await until(lambda: time.monotonic() > forgotten_at, "the server to forget its ids")
    else:
        await one.send(30)
    try:
        await one.finish(mutation=mutation, patience_s=PATIENCE_S)
    except AssertionError as error:
        problems.append(f"it never finished: {error}")
    return problems + await one.count(repeated_calls=None if trial.point else 0)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("mutation", TRIALS)
async def test_a_mutation_turns_the_count_red(server: NatsServer, tmp_path: Path, store: str, mutation: str) -> None:
    window_s = WINDOW_S if mutation == "old_effects_not_looked_up" else 120.0
    async with world(server.url, tmp_path, await store_url(store), window_s=window_s) as one:
        problems = await verdict(one, TRIALS[mutation], mutation)

    trial = TRIALS[mutation]
    assert [one for one in problems if trial.finds in one or trial.or_finds in one], problems


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("window_s", [WINDOW_S, 120.0])
@pytest.mark.parametrize("point", sorted({one.point for one in TRIALS.values()} - {"swapped"}))
async def test_the_same_trials_without_a_mutation_stay_green(
    server: NatsServer, tmp_path: Path, store: str, point: str, window_s: float
) -> None:
    async with world(server.url, tmp_path, await store_url(store), window_s=window_s) as one:
        assert [] == await verdict(one, Trial("", point), "")


@pytest.mark.parametrize("mutation", ["", "fsync_left_out"])
async def test_a_power_cut_takes_along_what_sqlite_has_not_synced(
    server: NatsServer, tmp_path: Path, mutation: str
) -> None:
    """Right after a commit, with earlier blocks published: with FULL nothing is lost, without it the blocks are."""
    if not can_tell(tmp_path):
        pytest.skip("this kernel or file system does not tell what is synced: Linux 6.5 and a disk are needed")
    note = tmp_path / "unsynced.json"
    async with world(server.url, tmp_path) as one:
        await one.die("committed", 12, mutation=mutation, power_cut_file=str(note))
        blanked = cut_power(note)
        problems = await one.autopsy()
        try:
            await one.finish(patience_s=PATIENCE_S)
        except AssertionError as error:
            problems.append(f"it never finished: {error}")
        problems += await one.count()

    assert (bool(mutation), bool(mutation)) == (bool(blanked), bool(problems)), problems


@pytest.mark.parametrize("mutation", ["", "fsync_left_out"])
async def test_a_killed_postgresql_takes_along_what_it_has_not_written(
    server: NatsServer, tmp_path: Path, mutation: str
) -> None:
    """Without synchronous_commit a commit waits in the server's memory for up to 600 ms."""
    with postgres_server(wal_writer_delay="10000ms") as database:
        url = await with_ledger(await database.migrated().new_database())
        async with world(server.url, tmp_path, url) as one:
            await one.die("committed", 12, mutation=mutation)
            database.kill()
            database.start()
            problems = await one.autopsy()
            try:
                await one.finish(patience_s=PATIENCE_S)
            except AssertionError as error:
                problems.append(f"it never finished: {error}")
            problems += await one.count()

    assert bool(mutation) == bool(problems), problems
