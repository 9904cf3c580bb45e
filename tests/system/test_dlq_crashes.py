"""A dead-letter service killed at each of its steps: no letter lost, none doubled, no original lost.

Each step once here; twenty times in tests/faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.dlq_crash import LETTER_STEPS, REPLAY_STEPS, problems_after, replay_problems_after
from tests.support.nats import NatsServer


@pytest.mark.parametrize("step", LETTER_STEPS)
async def test_a_service_that_dies_at_a_step_loses_and_doubles_nothing(shared_server: NatsServer, step: str) -> None:
    assert [] == await problems_after(shared_server, step)


@pytest.mark.parametrize("step", REPLAY_STEPS)
async def test_a_service_that_dies_while_it_replays_runs_each_input_once(
    shared_server: NatsServer, step: str, tmp_path: Path
) -> None:
    assert [] == await replay_problems_after(shared_server, step, tmp_path)


@pytest.mark.parametrize(
    ("mutation", "step", "retention", "found"),
    [
        ("settle_first", "mutated", "workqueue", "original lost"),
        ("ack_first", "mutated", "limits", "letter missing"),
        ("new_ids", "letters", "limits", "letter doubled"),
    ],
)
async def test_a_broken_law_is_seen(
    shared_server: NatsServer, mutation: str, step: str, retention: str, found: str
) -> None:
    """The count above can fail."""
    problems = await problems_after(shared_server, step, retention=retention, mutation=mutation)
    assert any(problem.startswith(found) for problem in problems), problems
