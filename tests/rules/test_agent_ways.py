"""How an agent's effects go out: the times that the server gave to a few of them decide for all."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from oncewire.agent.ways import AGAIN, AGAIN_SOON, FEW, LARGE, LOOK, SLOW_US, Ways

DEFAULT_US = (4.0, 14.0)
ALWAYS_US = (80.0, 400.0)
"""From one message to the next, at least and at most: as the server syncs now and then, and for each."""
Server = tuple[float, float]


def times_of(server: Server, chance: random.Random, count: int = LOOK) -> list[int]:
    """By chance the machine stands still, or stores a block of somebody else between two of ours."""
    gaps_us = [chance.uniform(*server) + (30_000.0 if chance.random() < 0.1 else 0.0) for _ in range(count - 1)]
    return [int(one * 1_000) for one in accumulate(gaps_us, initial=1.7e15)]


@pytest.mark.parametrize(("server", "is_atomic"), [(DEFAULT_US, False), (ALWAYS_US, True)], ids=["default", "always"])
def test_one_look_is_enough(server: Server, is_atomic: bool) -> None:
    for seed in range(200):
        ways = Ways()
        assert ways.wants_look()
        ways.looked(times_of(server, random.Random(seed)))
        assert not ways.wants_look()
        assert ways.choose_atomic() is is_atomic


def test_as_long_as_nothing_is_known_all_go_in_batches() -> None:
    """A thousand syncs would take a fifth of a second."""
    assert Ways().choose_atomic()


@pytest.mark.parametrize("found", [0, 1, FEW - 1])
def test_a_look_that_finds_little_tells_nothing_and_is_soon_repeated(found: int) -> None:
    ways = Ways()
    ways.looked(times_of(DEFAULT_US, random.Random(1), max(1, found))[:found])
    assert {True} == {ways.choose_atomic() for _ in range(AGAIN_SOON)}
    assert ways.wants_look()


def test_it_is_looked_again_now_and_then_and_a_stream_that_moved_is_noticed() -> None:
    ways = Ways()
    ways.looked(times_of(ALWAYS_US, random.Random(1)))
    for _ in range(AGAIN):
        assert not ways.wants_look()
        assert ways.choose_atomic()
    assert ways.wants_look()
    ways.looked(times_of(DEFAULT_US, random.Random(1)))
    assert not ways.choose_atomic()


def test_a_large_block_that_fast_ingest_took_long_for_is_a_reason_to_look() -> None:
    """A small one is not: its answer may have waited for the loop, and each look would cost another way there."""
    ways = Ways()
    ways.looked(times_of(DEFAULT_US, random.Random(1)))
    ways.learn(LARGE - 1, 1e6, is_atomic=False)
    ways.learn(1_000, 999 * SLOW_US, is_atomic=False)
    ways.learn(1_000, 2_000 * SLOW_US, is_atomic=True)
    assert not ways.wants_look()
    ways.learn(1_000, 1_001 * SLOW_US, is_atomic=False)
    assert ways.wants_look()
