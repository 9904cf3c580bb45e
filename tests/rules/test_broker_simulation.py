"""The whole broker from a seed, against what its clients know. tests/faults runs it for millions of steps."""

from __future__ import annotations

import pytest

from tests.support.brokersim import Simulation


@pytest.mark.parametrize("first", [0, 10, 20])
def test_clients_find_nothing_wrong(first: int) -> None:
    assert [] == [problem for seed in range(first, first + 10) for problem in Simulation(seed).run(1_500)]


def test_a_seed_replays_exactly() -> None:
    one, two = Simulation(7), Simulation(7)
    one.run(1_000), two.run(1_000)
    assert (one.seen, one.acked, one.deliveries) == (two.seen, two.acked, two.deliveries)
    assert one.seen
