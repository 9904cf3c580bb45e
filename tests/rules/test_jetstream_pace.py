"""Which way messages take that wait together: what was measured decides, size by size."""

from __future__ import annotations

import random

import pytest

from oncewire._ground.jetstream.pace import Pace
from oncewire._ground.jetstream.publish import BATCH_MESSAGES_MAX

DEFAULT = (300.0, 10.0), (2_000.0, 10.0)
"""What a sending takes and each of its messages besides, in microseconds: singles, then a batch."""
ALWAYS = (300.0, 200.0), (2_500.0, 10.0)


def batches_of(
    pace: Pace, server: tuple[tuple[float, float], tuple[float, float]], counts: list[int], *, stalls: float = 0.0
) -> int:
    """How many sendings went as a batch, where a share of all sendings meets a machine that stands still."""
    chance, batches = random.Random(1), 0
    for count in counts:
        is_batch = pace.choose_batch(count)
        fixed_us, message_us = server[is_batch]
        stall_us = 50_000.0 if chance.random() < stalls else 0.0
        pace.learn(count, fixed_us + count * message_us + stall_us, is_batch=is_batch)
        batches += is_batch
    return batches


def test_small_sendings_say_nothing_of_large_ones() -> None:
    """Sixteen singles take thirty microseconds each, most of it for the way: sixty-four are not slower than a batch."""
    pace = Pace()
    batches_of(pace, DEFAULT, [16] * 1_000)
    assert not pace.is_batch_quicker(64)


def test_singles_where_the_server_does_not_sync() -> None:
    counts = [1, 2, 8, 16, 24, 32, 48, 64, 100] * 1_000
    assert batches_of(Pace(), DEFAULT, counts) < len(counts) / 100


@pytest.mark.parametrize("count", [64, 256, BATCH_MESSAGES_MAX])
def test_batches_where_it_syncs_always(count: int) -> None:
    assert batches_of(Pace(), ALWAYS, [count] * 1_000) > 950


def test_few_go_as_singles_even_where_it_syncs_always() -> None:
    assert batches_of(Pace(), ALWAYS, [2] * 1_000) == 0


def test_one_is_never_a_batch() -> None:
    pace = Pace()
    for _ in range(100):
        pace.learn(1, 1e6, is_batch=False)
    assert not pace.choose_batch(1)


def test_a_machine_that_stands_still_now_and_then_changes_little() -> None:
    assert batches_of(Pace(), DEFAULT, [32] * 10_000, stalls=0.02) < 200


def test_a_moment_in_which_all_stands_still_is_over_soon() -> None:
    """Whatever was on its way then took long, one behind the other: that says nothing of the way that it took."""
    pace = Pace()
    batches_of(pace, DEFAULT, [64] * 1_000)
    for _ in range(4):
        pace.learn(64, 50_000.0, is_batch=False)
    assert pace.is_batch_quicker(64)
    assert batches_of(pace, DEFAULT, [64] * 1_000) < 40


def test_a_way_that_is_slow_each_time_is_tried_less_and_less() -> None:
    pace = Pace()
    batches_of(pace, ALWAYS, [64] * 1_000)
    assert batches_of(pace, ALWAYS, [64] * 10_000) > 9_990


def test_a_server_that_becomes_another_one_is_noticed() -> None:
    """The disk became slow, and quick again."""
    pace = Pace()
    batches_of(pace, DEFAULT, [64] * 1_000)
    assert batches_of(pace, ALWAYS, [64] * 1_000) > 900
    batches_of(pace, DEFAULT, [64] * 10_000)
    assert not pace.is_batch_quicker(64)


def test_one_slow_sending_stands_for_larger_ones_where_that_is_asked_for() -> None:
    """A thousand syncs are not needed to learn what sixteen have shown."""
    pace, eager = Pace(is_wary=True), Pace()
    for one in (pace, eager):
        one.learn(16, 300.0 + 16 * 200.0, is_batch=False)
    assert not eager.is_batch_quicker(64)
    assert pace.is_batch_quicker(64)
    assert pace.is_batch_quicker(BATCH_MESSAGES_MAX)
    pace.learn(64, 300.0 + 64 * 10.0, is_batch=False)
    assert not pace.is_batch_quicker(64), "what was measured counts"


def test_messages_that_would_wait_for_each_other_go_as_a_batch() -> None:
    pace = Pace()
    assert not pace.choose_batch(200, [200])
    assert not pace.choose_batch(200, [150, 40, 10])
    assert pace.choose_batch(200, [8] * 25)
