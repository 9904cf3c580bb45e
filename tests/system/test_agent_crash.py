"""Agents that die at each of their steps: no effect and no row is missing or doubled, and the blocks prove it.

Each point once here, in chains on one ledger (what one death leaves behind, the next process meets); twenty times each,
alone, and at random, in tests/faults.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.faults import agent_points as points
from tests.faults.agent_crash import STORES, chain, store_url
from tests.support.agents import ROOT, world
from tests.support.nats import NatsServer

CHAINS = {
    "start": points.STARTING + points.INBOX,
    "handle": points.HANDLER + points.CALLS,
    "commit": points.BLOCK,
    "publish": points.EFFECTS + points.ATOMIC,
    "settle": points.SETTLING,
    "later": points.MARKS + points.DELAYED + points.ENDING,
    "recover": points.RECOVERY + points.SWEEP,
    "bury": points.BURIAL,
}
DELIVERIES = dict.fromkeys(CHAINS, 1_000) | {"bury": 5}
"""A chain of deaths uses up the deliveries of what is in hand, which is not what it is about."""


def test_every_point_is_in_a_chain() -> None:
    assert sorted(points.POINTS) == sorted(point for chain in CHAINS.values() for point in chain)


def test_every_step_that_the_runtime_names_is_a_point() -> None:
    """A new step without a death at it would be a promise that nobody has tried."""
    sources = (ROOT / "src/oncewire/agent").glob("*.py")
    named = {name for path in sources for name in re.findall(r'\bat\("(\w+)"\)', path.read_text())}

    assert set() == named - set(points.POINTS)


@pytest.mark.parametrize("store", STORES)
async def test_an_agent_that_dies_at_every_step_loses_and_doubles_nothing(
    shared_server: NatsServer, tmp_path: Path, store: str
) -> None:
    """The chains run side by side: most of the time one waits for a redelivery."""

    async def run(name: str) -> None:
        url = await store_url(store)
        async with world(shared_server.url, tmp_path, url, options={"max_deliver": DELIVERIES[name]}) as one:
            await chain(one, [(point, 1) for point in CHAINS[name]])

    ended = await asyncio.gather(*map(run, CHAINS), return_exceptions=True)
    failed = {name: error for name, error in zip(CHAINS, ended, strict=True) if error}

    assert {} == failed
