"""How an agent's effects go out: what small trials took decides, also for large blocks."""

from __future__ import annotations

import random

import pytest

from oncewire.agent.ways import AGAIN, TRIAL, Ways
from oncewire.jetstream.pace import LAST

DEFAULT = (300.0, 8.0), (2_000.0, 11.0)
"""What a sending takes and each of its messages besides, in microseconds: fast ingest, then an atomic batch."""
ALWAYS = (300.0, 150.0), (2_500.0, 12.0)
Server = tuple[tuple[float, float], tuple[float, float]]


def send(ways: Ways, server: Server, count: int, chance: random.Random | None = None) -> bool:
    """One block, with its trials; whether its rest went as an atomic batch. By chance the machine stands still."""

    def learn(size: int, is_atomic: bool) -> None:
        fixed_us, message_us = server[is_atomic]
        stall_us = 50_000.0 if chance is not None and chance.random() < 0.05 else 0.0
        ways.learn(size, fixed_us + size * message_us + stall_us, is_atomic=is_atomic)

    while ways.wants_trial(count):
        learn(TRIAL, False)
        learn(TRIAL, True)
        ways.tried()
        count -= 2 * TRIAL
    is_atomic = ways.choose_atomic(count)
    learn(count, is_atomic)
    return is_atomic


@pytest.mark.parametrize(("server", "is_atomic"), [(DEFAULT, False), (ALWAYS, True)], ids=["default", "always"])
@pytest.mark.parametrize("count", [1_000, 5_000])
def test_the_first_large_block_already_knows(server: Server, is_atomic: bool, count: int) -> None:
    ways = Ways()
    assert {is_atomic} == {send(ways, server, count) for _ in range(50)}


@pytest.mark.parametrize(("server", "wanted"), [(DEFAULT, LAST), (ALWAYS, 1)], ids=["default", "always"])
def test_one_trial_is_enough_where_each_message_is_synced(server: Server, wanted: int) -> None:
    ways, trials = Ways(), 0
    while ways.wants_trial(1_000):
        trials += 1
        for is_atomic in (False, True):
            fixed_us, message_us = server[is_atomic]
            ways.learn(TRIAL, fixed_us + TRIAL * message_us, is_atomic=is_atomic)
        ways.tried()
    assert wanted == trials


def test_as_long_as_too_little_is_known_nothing_large_goes_without_a_batch() -> None:
    """A thousand syncs would take a fifth of a second."""
    ways = Ways()
    ways.learn(TRIAL, 1.0, is_atomic=False)
    assert ways.choose_atomic(1_000)


@pytest.mark.parametrize(("server", "is_atomic"), [(DEFAULT, False), (ALWAYS, True)], ids=["default", "always"])
def test_what_small_blocks_took_decides_for_small_blocks(server: Server, is_atomic: bool) -> None:
    ways = Ways()
    chosen = [send(ways, server, 100) for _ in range(500)]
    assert chosen.count(is_atomic) > 480


def test_both_ways_are_tried_again_now_and_then_at_a_size_that_costs_little() -> None:
    ways = Ways()
    due = []
    for _ in range(5 * AGAIN):
        due.append(ways.wants_trial(1_000))
        send(ways, ALWAYS, 1_000)
    assert due.count(True) == 5


def test_a_machine_that_stands_still_by_chance_decides_nothing_for_long() -> None:
    chance = random.Random(3)
    ways = Ways()
    chosen = [send(ways, DEFAULT, 1_000, chance) for _ in range(50 * AGAIN)]
    assert chosen.count(True) < len(chosen) / 20


def test_a_wrong_verdict_costs_one_block() -> None:
    """Each batch of the trials met a machine that stood still; then a thousand messages are synced one by one."""
    ways = Ways()
    for _ in range(LAST):
        ways.learn(TRIAL, 10_000.0, is_atomic=False)
        ways.learn(TRIAL, 60_000.0, is_atomic=True)
        ways.tried()
    assert not send(ways, ALWAYS, 1_000)
    assert {True} == {send(ways, ALWAYS, 1_000) for _ in range(10)}


def test_fast_ingest_must_be_clearly_quicker_in_the_trials() -> None:
    ways = Ways()
    for _ in range(LAST):
        ways.learn(TRIAL, 6_000.0, is_atomic=False)
        ways.learn(TRIAL, 8_000.0, is_atomic=True)
        ways.tried()
    assert ways.choose_atomic(1_000)


def test_a_server_that_becomes_another_one_is_noticed() -> None:
    """The disk became slow, and quick again."""
    ways = Ways()
    assert not send(ways, DEFAULT, 1_000)
    for _ in range((LAST + 1) * AGAIN):
        send(ways, ALWAYS, 1_000)
    assert send(ways, ALWAYS, 1_000)
    for _ in range((LAST + 1) * AGAIN):
        send(ways, DEFAULT, 1_000)
    assert not send(ways, DEFAULT, 1_000)
