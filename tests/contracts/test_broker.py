"""Every scenario of the /v1 contract, against the local engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.http import Answer
from tests.support.scenarios import Replay, Scenario, difference, local_broker, read

SCENARIOS = [
    scenario for path in sorted((Path(__file__).parent / "broker").glob("*.scenario")) for scenario in read(path)
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: f"{scenario.place}: {scenario.name}")
async def test_the_contract(scenario: Scenario, tmp_path: Path) -> None:
    await Replay(scenario, lambda settings: local_broker(settings, tmp_path / "wal")).run()


def test_the_scenarios_are_there() -> None:
    """A glob that finds nothing would pass in silence."""
    assert len(SCENARIOS) > 100
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


@pytest.mark.parametrize(
    "expected",
    [
        "201",
        '200 {"a": 1}',
        '200 ~{"a": 2}',
        "200 | X: z",
        '200 ~{"c": 1}',
        '200 lines [{"a": 1}, {"a": 1}]',
        '200 ~{"b": ["x", "y"]}',
    ],
)
def test_an_answer_that_differs_is_seen(expected: str) -> None:
    """A runner that cannot fail is worth nothing."""
    answer = Answer(200, {"x": "y"}, b'{"a": 1, "b": ["x"]}')
    assert difference(answer, expected)
    assert not difference(answer, '200 | X: y ~{"b": ["x"]}')
