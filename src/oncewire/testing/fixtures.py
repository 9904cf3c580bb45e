"""The pytest fixture `agent_test`: `pytest_plugins = ["oncewire.testing.fixtures"]` in a conftest.py.

def test_an_order_is_charged_once(agent_test):
    t = agent_test(agent)
    t.send("charge", {"id": "o1", "cents": 4200})
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncewire.agent.agent import Agent
from oncewire.testing.agents import AgentTest


@pytest.fixture
def agent_test() -> Iterator[Callable[..., AgentTest]]:
    """Makes AgentTests and closes them after the test."""
    with contextlib.ExitStack() as stack:

        def make(agent: Agent, **options: Any) -> AgentTest:
            return stack.enter_context(AgentTest(agent, **options))

        yield make
