"""The broker for long: kills under load, thousands of power cuts, millions of steps, and rules built wrongly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.broker_mutations import MUTATIONS, found
from tests.support.brokerkills import Kills
from tests.support.brokerlog import power_cuts
from tests.support.brokersim import Simulation

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("ONCEWIRE_FAULT_KILLS", "200"))
CUTS = int(os.environ.get("ONCEWIRE_FAULT_CUTS", "5000"))
SEEDS = int(os.environ.get("ONCEWIRE_FAULT_SEEDS", "1000"))
STEPS = 2_000
MUTATION_SEEDS = 60


async def test_kills_under_load_lose_double_and_skip_nothing(tmp_path: Path) -> None:
    client = Kills(tmp_path / "wal", seed=1)
    while client.kills < KILLS:
        await client.until_killed()
        assert [] == client.problems
    assert [] == await client.finish()
    assert len(client.produced) > KILLS


def test_power_cuts_lose_nothing_that_was_acked() -> None:
    assert [] == [problem for seed in range(CUTS) if (problem := power_cuts(seed))]


def test_clients_find_nothing_wrong_in_millions_of_steps() -> None:
    assert [] == [problem for seed in range(SEEDS) for problem in Simulation(seed).run(STEPS)]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_turns_the_simulation_red(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTATIONS[name](monkeypatch)
    assert any(found(seed, STEPS) for seed in range(MUTATION_SEEDS)), f"{name} was not found"
