"""How long a ledger must remember."""

from __future__ import annotations

import pytest

from oncewire._ground.errors import Refused
from oncewire.agent import Agent
from oncewire.agent.forget import DAY_S, Life, check_keep, least_s

WEEK = Life("EVENTS", 7 * DAY_S, is_work_queue=False)
QUEUE = Life("COMMANDS", 0, is_work_queue=True)


class Counter:
    def receive(self, envelope: object) -> None:
        """An adapter needs no more."""


def test_the_least_is_twice_the_longest_life_and_a_letters_and_a_day() -> None:
    assert (14 + 30 + 1) * DAY_S == least_s([WEEK, QUEUE], 30 * DAY_S)
    assert 31 * DAY_S == least_s([QUEUE], 30 * DAY_S)


def test_the_least_is_enough_and_a_second_less_is_refused() -> None:
    check_keep(Agent("a"), 45 * DAY_S, [WEEK, QUEUE], 30 * DAY_S)

    with pytest.raises(Refused, match="may come again for 3888000 s"):
        check_keep(Agent("a"), 45 * DAY_S - 1, [WEEK, QUEUE], 30 * DAY_S)


def test_a_log_that_never_ends_lets_nothing_be_forgotten() -> None:
    with pytest.raises(Refused, match="EVENTS keeps its messages for ever"):
        check_keep(Agent("a"), 900 * DAY_S, [Life("EVENTS", 0, is_work_queue=False)], 0)


def test_an_adapter_keeps_all_that_its_state_is_folded_from() -> None:
    with pytest.raises(Refused, match="folded from the whole ledger"):
        check_keep(Agent.from_adapter(Counter(), name="a"), 900 * DAY_S, [WEEK], 0)
