"""No gap, no duplicate, no disorder, no silence, whatever the order of things; and the simulation can fail."""

from __future__ import annotations

import pytest

from tests.faults.gateway_mutations import MUTATIONS, SEEDS, STEPS, found
from tests.support.gatewaysim import Simulation


def test_every_client_gets_every_message_once_and_in_order() -> None:
    for seed in range(600):
        assert [] == Simulation(seed).run(STEPS)


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_the_simulation_finds_a_rule_that_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    assert any(found(seed) for seed in range(SEEDS)), f"{name} was not found"
