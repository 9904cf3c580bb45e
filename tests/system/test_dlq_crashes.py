"""A dead-letter service killed at each of its steps: no letter lost, none doubled, no original lost.

Each step once here; twenty times, on streams of both kinds and with every law broken, in tests/faults.
"""

from __future__ import annotations

from tests.faults.dlq_crash import STEPS, problems_after
from tests.support.nats import NatsServer


async def test_a_service_that_dies_at_every_step_loses_and_doubles_nothing(shared_server: NatsServer) -> None:
    assert [] == await problems_after(shared_server, STEPS)


async def test_a_broken_order_is_seen(shared_server: NatsServer) -> None:
    """The count above can fail: the given-up sequence is acked before its letter stands."""
    problems = await problems_after(shared_server, ["mutated"], mutation="settle_first")
    assert any(problem.startswith("original lost") for problem in problems), problems
