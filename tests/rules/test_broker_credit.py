"""A reader's credit: taken by a delivery, given back by its settlement or the end of its lease."""

from __future__ import annotations

import pytest

from oncewire._ground.contracts.broker import RetryPolicy
from oncewire.broker import rules
from oncewire.broker.credit import Credit
from oncewire.broker.engine import Limits
from tests.support.broker import Reader, Table, message

HOUR_MS = 3_600_000


@pytest.fixture
def table() -> Table:
    one = Table()
    one.create()
    return one


def fill(table: Table, count: int, **envelope: object) -> None:
    """With a policy that lets retries come at once."""
    envelope = {"retry_policy": RetryPolicy(max_attempts=99)} | envelope
    for number in range(count):
        table.produce(str(number), **envelope)


def credit_of(table: Table, place: int = 0) -> Credit:
    return table.state.groups[1].subscribers[place].credit


def test_a_reader_that_asks_for_nothing_holds_two_messages_in_all_partitions_together() -> None:
    table = Table()
    table.create(partitions=4)
    for number in range(8):
        table.produce(partition_override=number % 4)
    reader = table.read(in_flight=0)
    assert 2 == len(reader.got)
    table.ack(reader.got[0].offset, partition=reader.got[0].partition)
    assert 3 == len(reader.got)


def test_a_reader_holds_as_many_messages_as_it_asked_for(table: Table) -> None:
    fill(table, 5)
    assert [0, 1, 2] == table.read(in_flight=3).offsets


def test_all_partitions_are_served_though_the_first_has_a_backlog() -> None:
    table = Table()
    table.create(partitions=3)
    for number in range(9):
        table.produce(partition_override=number % 3)
    reader = table.read(in_flight=1)
    for _ in range(8):
        table.ack(reader.got[-1].offset, partition=reader.got[-1].partition)
    assert [0, 1, 2] * 3 == [one.partition for one in reader.got]


def test_an_ack_gives_credit_back_and_the_next_message_comes(table: Table) -> None:
    fill(table, 3)
    reader = table.read(in_flight=1)
    table.ack(0)
    assert [0, 1] == reader.offsets


def test_an_ack_gives_nothing_back_before_it_is_durable(table: Table) -> None:
    fill(table, 3)
    reader = table.read(in_flight=1)
    table.is_holding = True
    table.ack(0)
    table.desk.hand_out(table.now_ms)
    assert [0] == reader.offsets
    table.lose()
    table.desk.hand_out(table.now_ms)
    assert [0] == reader.offsets
    table.is_holding = False
    table.ack(0)
    assert [0, 1] == reader.offsets


def test_a_nack_gives_credit_back_and_the_message_that_waits_holds_none(table: Table) -> None:
    fill(table, 3, retry_policy=RetryPolicy(max_attempts=9, backoff_ms=HOUR_MS))
    reader = table.read(in_flight=1)
    table.nack(0)
    assert [0, 1] == reader.offsets
    table.nack(1)
    assert [0, 1, 2] == reader.offsets


def test_a_dead_letter_gives_credit_back(table: Table) -> None:
    fill(table, 2, retry_policy=RetryPolicy(max_attempts=1))
    reader = table.read(in_flight=1)
    table.nack(0)
    assert [0, 1] == reader.offsets


def test_a_message_that_is_trimmed_gives_credit_back() -> None:
    table = Table(Limits(dead_letter_age_ms=10_000))
    table.create()
    fill(table, 2, retry_policy=RetryPolicy(max_attempts=1))
    table.read()
    table.nack(0)
    letters = table.read(topic="dlq.t", in_flight=1, lease_ms=HOUR_MS)
    assert [0] == letters.offsets
    table.tick(10_000)
    table.nack(1)
    assert [0, 1] == letters.offsets


def test_the_readers_of_a_group_are_served_in_turn_as_far_as_their_credit_goes(table: Table) -> None:
    fill(table, 1)
    one, two, three = (table.read(owner, in_flight=credit) for owner, credit in (("a", 1), ("b", 2), ("c", 3)))
    for number in range(1, 9):
        table.produce(str(number))
    assert ([0], [1, 3], [2, 4, 5]) == (one.offsets, two.offsets, three.offsets)


# ---- leases that end


def test_a_reader_whose_lease_ended_gets_one_message_at_a_time_until_it_settles_something(table: Table) -> None:
    fill(table, 4)
    reader = table.read(in_flight=3, lease_ms=1_000)
    table.tick(1_000)
    assert [0, 1, 2, 0] == reader.offsets
    table.tick(1_000)
    assert [0, 1, 2, 0, 0] == reader.offsets
    table.ack(0)
    assert [0, 1, 2, 0, 0, 1, 2, 3] == reader.offsets


def test_one_message_at_a_time_also_while_others_are_still_out(table: Table) -> None:
    fill(table, 3)
    reader = table.read(in_flight=3, lease_ms=1_000)
    table.settle("extend", 1, lease_ms=HOUR_MS)
    table.tick(1_000)
    assert [0, 1, 2] == reader.offsets
    table.ack(1)
    assert [0, 1, 2, 0, 2] == reader.offsets


def test_the_end_of_a_lease_counts_an_attempt_as_before(table: Table) -> None:
    fill(table, 1, retry_policy=RetryPolicy(max_attempts=2))
    reader = table.read(in_flight=1, lease_ms=1_000)
    table.tick(1_000)
    assert [1, 2] == [one.attempts for one in reader.got]
    table.tick(1_000)
    assert [0] == [
        one.envelope.dlq.original_offset for one in table.read(topic="dlq.t").got if one.envelope and one.envelope.dlq
    ]


def test_a_reader_whose_lease_ended_is_asked_last(table: Table) -> None:
    fill(table, 1)
    late = table.read("late", in_flight=5, lease_ms=1_000)
    table.tick(1_000)
    assert [0, 0] == late.offsets
    well = table.read("well", in_flight=2)
    table.tick(1_000)
    fill(table, 3)
    assert [0, 1] == well.offsets
    assert [0, 0, 2] == late.offsets


def test_a_late_ack_is_a_settlement_too(table: Table) -> None:
    fill(table, 2, retry_policy=RetryPolicy(max_attempts=9, backoff_ms=HOUR_MS))
    table.read(in_flight=2, lease_ms=1_000)
    table.tick(1_000)
    assert credit_of(table).is_late
    assert table.ack(0) is None
    assert not credit_of(table).is_late


def test_a_renewed_lease_is_no_settlement(table: Table) -> None:
    fill(table, 2)
    table.read(in_flight=2, lease_ms=1_000)
    table.settle("extend", 1, lease_ms=HOUR_MS)
    table.tick(1_000)
    table.settle("extend", 1, lease_ms=HOUR_MS)
    assert credit_of(table).is_late


def test_what_a_reader_that_has_left_settles_is_no_other_reader_s_credit(table: Table) -> None:
    fill(table, 4)
    gone = Reader()
    subscriber = table.join(gone, "a", in_flight=2)
    rules.leave(table.now_ms, subscriber)
    again = table.read("a", in_flight=1)
    table.ack(0), table.ack(1)
    assert [2] == again.offsets


# ---- deliveries that did not arrive


def test_a_delivery_that_is_recalled_counts_no_attempt_and_goes_to_another_reader(table: Table) -> None:
    fill(table, 2)
    subscriber = table.join(Reader(), "gone", in_flight=2)
    progress = table.state.groups[1].progress[0]
    rules.leave(table.now_ms, subscriber)
    rules.recall(table.state, progress, [0, 1], subscriber.credit)
    assert "message is not in-flight" == message(table.ack(0, "gone"))
    assert (0, 0) == (subscriber.credit.out, progress.leased)
    assert [(0, 1), (1, 1)] == [(one.offset, one.attempts) for one in table.read("b").got]


def test_only_what_is_still_out_to_that_reader_is_recalled(table: Table) -> None:
    fill(table, 3)
    subscriber = table.join(Reader(), "a", in_flight=2, lease_ms=1_000)
    table.ack(0, "a")
    rules.leave(table.now_ms, subscriber)
    other = table.read("b", lease_ms=HOUR_MS)
    table.tick(1_000)
    assert [1, 2] == other.offsets
    progress = table.state.groups[1].progress[0]
    rules.recall(table.state, progress, [0, 1, 2], subscriber.credit)
    table.commit()
    assert [1, 2] == other.offsets
    assert [None, None] == [table.ack(offset, "b") for offset in (1, 2)]
