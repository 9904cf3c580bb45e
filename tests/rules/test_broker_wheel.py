"""What is looked at when its time has come: only what is still out."""

from __future__ import annotations

import pytest

from oncewire._ground.contracts.broker import RetryPolicy
from oncewire.broker.engine import Limits
from oncewire.broker.rules import DEAD_PREFIX
from tests.support.broker import Table

HOUR_MS = 3_600_000


@pytest.fixture
def table() -> Table:
    one = Table(Limits(lease_ms_max=HOUR_MS, settled_age_ms=0))
    one.create()
    return one


def waiting(table: Table) -> int:
    assert all(table.state.wheel.values()), "an empty tick stays until its time has come"
    return sum(map(len, table.state.wheel.values()))


def test_what_is_settled_does_not_wait_for_the_end_of_its_lease(table: Table) -> None:
    table.read(lease_ms=HOUR_MS)
    for offset in range(100):
        table.produce()
        assert table.ack(offset) is None
    assert 0 == waiting(table)


def test_those_that_are_out_stay(table: Table) -> None:
    reader = table.read(lease_ms=HOUR_MS)
    for _ in range(3):
        table.produce()
    table.ack(1)
    assert 2 == waiting(table)
    table.tick(HOUR_MS + 1_000)
    assert [0, 1, 2, 0] == reader.offsets
    table.ack(0)
    assert [0, 1, 2, 0, 2] == reader.offsets


def test_a_lease_that_was_made_shorter_is_looked_at_once(table: Table) -> None:
    reader = table.read(lease_ms=HOUR_MS)
    table.produce()
    table.settle("extend", 0, lease_ms=1_000)
    assert 1 == waiting(table)
    table.tick(1_250)
    assert [0, 0] == reader.offsets
    table.ack(0)
    assert 0 == waiting(table)


def test_a_settlement_that_failed_is_looked_at_again(table: Table) -> None:
    reader = table.read(lease_ms=1_000)
    table.produce()
    table.is_holding = True
    table.ack(0)
    table.tick(2_000)
    table.lose()
    assert 1 == waiting(table)
    table.is_holding = False
    table.tick(1_000)
    assert [0, 0] == reader.offsets


def test_a_topic_that_is_deleted_takes_its_own_with_it(table: Table) -> None:
    table.read(lease_ms=HOUR_MS)
    table.produce()
    table.delete()
    assert 0 == waiting(table)


def test_dead_letters_that_grew_too_old_are_not_out_any_more() -> None:
    table = Table(Limits(lease_ms_max=HOUR_MS, dead_letter_age_ms=10_000))
    table.create()
    table.read()
    table.produce(retry_policy=RetryPolicy(max_attempts=1))
    table.settle("nack", 0)
    letters = table.read(topic=DEAD_PREFIX + "t", lease_ms=HOUR_MS)
    assert [0] == letters.offsets
    assert 1 == waiting(table)
    table.tick(10_000)
    assert 0 == table.state.topics["", DEAD_PREFIX + "t"].partitions[0].trimmed
    assert 0 == waiting(table)
