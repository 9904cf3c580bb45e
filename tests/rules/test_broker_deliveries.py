"""The broker's rules of delivery: who gets what, settles it, gets it again; what is kept, and for how long."""

from __future__ import annotations

import pytest

from oncewire._ground.contracts.broker import RetryPolicy
from oncewire._ground.contracts.records import decode_kept, encode
from oncewire._ground.errors import Conflict, OncewireError, TooLarge
from oncewire.broker import rules
from oncewire.broker.engine import Limits, Produced, TooManyReaders
from oncewire.broker.image import capture, restore
from oncewire.broker.rules import backoff_ms
from oncewire.broker.view import show_topic
from tests.support.broker import NOTHING, START_MS, Reader, Table, at, message


@pytest.fixture
def table() -> Table:
    one = Table()
    one.create()
    return one


# ---- groups and dispatch


def test_every_group_gets_every_message(table: Table) -> None:
    table.produce()
    assert ["v"] == table.read(group="g").values
    assert ["v"] == table.read(group="h").values


def test_a_delivery_goes_to_one_reader_of_the_group_in_turn(table: Table) -> None:
    readers = [table.read(owner) for owner in "abc"]
    for number in range(6):
        table.produce(str(number))
    assert [["0", "3"], ["1", "4"], ["2", "5"]] == [one.values for one in readers]


def test_a_reader_without_room_is_left_out_of_the_turns_and_resumes(table: Table) -> None:
    slow, quick = table.read("slow", room=1), table.read("quick")
    for number in range(4):
        table.produce(str(number))
    assert (["0"], ["1", "2", "3"]) == (slow.values, quick.values)


def test_what_nobody_has_room_for_waits_in_order(table: Table) -> None:
    reader = table.read(room=1)
    for number in range(4):
        table.produce(str(number))
    assert ["0"] == reader.values
    reader.space = 2
    table.state.stirred[table.state.groups[1]] = None
    table.commit()
    assert ["0", "1", "2"] == reader.values


class InRounds(Reader):
    """Takes two at a time, and is never full."""

    def room(self) -> int:
        return 2


def test_a_backlog_is_delivered_round_after_round(table: Table) -> None:
    for number in range(7):
        table.produce(str(number))
    reader = InRounds()
    table.join(reader)
    assert list(range(7)) == reader.offsets


def test_a_partition_is_delivered_in_offset_order(table: Table) -> None:
    for number in range(100):
        table.produce(str(number))
    assert list(range(100)) == table.read().offsets


def test_no_more_than_the_limit_is_in_flight_per_group_and_partition() -> None:
    table = Table(Limits(in_flight_max=2))
    table.create(partitions=2)
    for number in range(8):
        table.produce(str(number), partition_override=number % 2)
    reader = table.read()
    assert [0, 2, 1, 3] == reader.offsets
    table.ack(0)
    assert [0, 2, 1, 3, 4] == reader.offsets
    assert 4 == len(table.read(group="h").got)


def test_a_waiting_retry_is_not_in_flight_and_does_not_block_later_offsets() -> None:
    table = Table(Limits(in_flight_max=2))
    table.create()
    for _ in range(4):
        table.produce(retry_policy=RetryPolicy(max_attempts=9, backoff_ms=10_000))
    reader = table.read(lease_ms=60_000)
    table.nack(0), table.nack(1)
    assert [0, 1, 2, 3] == reader.offsets
    shown = show_topic(table.state, "", "t")
    assert not isinstance(shown, OncewireError)
    assert (2, 2, 4) == (shown.groups[0].in_flight, shown.groups[0].retries, shown.groups[0].lag)


def test_retries_that_come_due_wait_for_in_flight_room() -> None:
    table = Table(Limits(in_flight_max=2))
    table.create()
    for _ in range(4):
        table.produce(retry_policy=RetryPolicy(max_attempts=9, backoff_ms=10_000))
    reader = table.read(lease_ms=60_000)
    table.nack(0), table.nack(1)
    table.tick(10_000)
    assert [0, 1, 2, 3] == reader.offsets
    table.ack(2)
    assert [0, 1, 2, 3, 0] == reader.offsets
    table.ack(3)
    assert [0, 1, 2, 3, 0, 1] == reader.offsets


def test_a_new_group_starts_at_the_oldest_kept_message() -> None:
    table = Table(Limits(settled_age_ms=1_000))
    table.create()
    table.produce("old")
    table.read()
    table.ack(0)
    table.tick(500)
    table.produce("new")
    assert ["old", "new"] == table.read("b", "early").values
    table.ack(0, "b", group="early")
    table.tick(600)
    table.tick()
    assert ["new"] == table.read("c", "late").values


def test_groups_and_their_readers_are_limited() -> None:
    table = Table(Limits(groups_max=1, subscriptions_max=1))
    table.create()
    table.read()
    assert isinstance(table.enter(group="h"), TooLarge)
    assert isinstance(table.enter(group="g"), TooManyReaders)


def test_a_reader_needs_a_topic_and_a_lease_within_limits(table: Table) -> None:
    assert "topic does not exist" == message(table.enter("nowhere"))
    assert "invalid lease_ms" == message(table.enter(lease_ms=-1))
    assert "invalid lease_ms" == message(table.enter(lease_ms=table.state.limits.lease_ms_max + 1))


def test_a_reader_that_left_gets_nothing_and_its_leases_stay(table: Table) -> None:
    gone = Reader()
    subscriber = table.join(gone, "a")
    table.produce("0")
    rules.leave(table.now_ms, subscriber)
    table.produce("1")
    other = table.read("b")
    assert (["0"], ["1"]) == (gone.values, other.values)
    assert table.ack(0, "a") is None


# ---- acks and progress


def test_an_acked_message_is_not_delivered_again(table: Table) -> None:
    table.produce()
    reader = table.read()
    assert table.ack(0) is None
    table.tick(3_600_000)
    assert [0] == reader.offsets
    assert [] == table.restart().read().offsets


def test_progress_never_skips_an_unacked_message_and_keeps_acks_above_the_gap(table: Table) -> None:
    for _ in range(4):
        table.produce()
    table.read()
    table.ack(1), table.ack(3)
    progress = table.state.groups[1].progress[0]
    assert (-1, {1, 3}, 2) == (progress.floor, progress.ahead, progress.lag)
    assert [0, 2] == table.restart().read().offsets
    table.ack(0)
    assert (1, {3}) == (progress.floor, progress.ahead)
    table.ack(2)
    assert (3, set()) == (progress.floor, progress.ahead)


def test_only_the_owner_may_ack(table: Table) -> None:
    table.produce()
    table.read("a")
    refused = table.ack(0, "b")
    assert isinstance(refused, Conflict)
    assert "not owner" == refused.message


@pytest.mark.parametrize(("partition", "offset"), [(0, 7), (0, -1)])
def test_only_what_is_in_flight_can_be_settled(table: Table, partition: int, offset: int) -> None:
    table.produce()
    table.read()
    assert "message is not in-flight" == message(table.ack(offset, partition=partition))


@pytest.mark.parametrize("partition", [1, -1])
def test_a_partition_that_is_not_there_cannot_be_settled(table: Table, partition: int) -> None:
    assert "partition out of range" == message(table.ack(0, partition=partition))


def test_a_settlement_of_an_unknown_topic_or_group_is_refused(table: Table) -> None:
    table.produce()
    table.read()
    assert "topic does not exist" == message(table.ack(0, topic="nowhere"))
    assert "message is not in-flight" == message(table.ack(0, group="nobody"))


# ---- leases


def test_a_lease_that_ends_redelivers_with_one_more_attempt_and_ack_timeout(table: Table) -> None:
    table.produce()
    reader = table.read(lease_ms=2_000)
    table.tick(1_900)
    assert [1] == [one.attempts for one in reader.got]
    table.tick(250)
    assert [(1, ""), (2, "ack_timeout")] == [(one.attempts, one.last_error) for one in reader.got]


def test_what_is_due_again_comes_before_what_was_never_given_out(table: Table) -> None:
    for _ in range(4):
        table.produce()
    reader = table.read(room=2)
    table.settle("nack", 0), table.settle("nack", 1)
    reader.space = 3
    table.tick(10_000)
    assert [0, 1, 0, 1, 2] == reader.offsets


def test_the_default_lease_is_two_seconds(table: Table) -> None:
    table.produce()
    reader = table.read()
    table.tick(1_999)
    assert [0] == reader.offsets
    table.tick(250)
    assert [0, 0] == reader.offsets


def test_the_last_owner_may_ack_until_another_owner_has_it(table: Table) -> None:
    table.produce(retry_policy=RetryPolicy(max_attempts=9, backoff_ms=60_000))
    table.read("a")
    table.tick(2_500)
    assert table.ack(0, "a") is None
    table.produce()
    table.tick(2_500)
    table.read("b")
    table.tick(2_500)
    table.tick(2_500)
    owner = next(iter(table.state.groups[1].progress[0].flights.values())).owner
    other = "b" if owner == "a" else "a"
    assert "not owner" == message(table.ack(1, other))


def test_an_extended_lease_lasts_longer(table: Table) -> None:
    table.produce()
    reader = table.read(lease_ms=2_000)
    table.tick(1_900)
    assert table.settle("extend", 0, lease_ms=5_000) is None
    table.tick(4_500)
    assert [0] == reader.offsets
    table.tick(750)
    assert [0, 0] == reader.offsets


def test_a_lease_may_be_made_shorter(table: Table) -> None:
    table.produce()
    reader = table.read(lease_ms=60_000)
    table.settle("extend", 0, lease_ms=1_000)
    table.tick(1_250)
    assert [0, 0] == reader.offsets


def test_only_the_owner_of_a_running_lease_may_extend_it(table: Table) -> None:
    table.produce()
    table.read("a")
    assert "not owner" == message(table.settle("extend", 0, "b"))
    assert "invalid lease_ms" == message(table.settle("extend", 0, lease_ms=-1))
    table.nack(0)
    assert "message is not in-flight" == message(table.settle("extend", 0))


def test_leases_do_not_survive_a_restart(table: Table) -> None:
    table.produce()
    table.read("a", lease_ms=3_600_000)
    again = table.restart()
    assert "message is not in-flight" == message(again.ack(0))
    assert [0] == again.read("b").offsets


# ---- nacks, retries, dead letters


def test_a_nack_redelivers_at_the_next_tick_with_its_reason(table: Table) -> None:
    table.produce()
    reader = table.read()
    assert table.nack(0, reason="db_deadlock") is None
    assert [0] == reader.offsets
    table.tick()
    assert [(1, ""), (2, "db_deadlock")] == [(one.attempts, one.last_error) for one in reader.got]


def test_a_nack_without_a_reason_records_nack(table: Table) -> None:
    table.produce()
    reader = table.read()
    table.nack(0)
    table.tick()
    assert "nack" == reader.got[1].last_error


def test_only_the_owner_may_nack(table: Table) -> None:
    table.produce()
    table.read("a")
    assert "not owner" == message(table.nack(0, "b"))


def test_attempts_and_last_error_survive_a_restart(table: Table) -> None:
    table.produce()
    table.read()
    table.nack(0, reason="boom")
    again = table.restart()
    again.tick()
    assert [(2, "boom")] == [(one.attempts, one.last_error) for one in again.read().got]


def test_attempts_are_never_over_counted(table: Table) -> None:
    """A delivery is not written down: after a restart it may be counted again, never twice."""
    table.produce()
    table.read()
    assert [1] == [one.attempts for one in table.restart().read().got]


@pytest.mark.parametrize(
    ("attempts", "expected_ms"), [(1, 250), (2, 500), (3, 1_000), (5, 4_000), (6, 5_000), (999, 5_000)]
)
def test_backoff_doubles_with_each_attempt_up_to_its_cap(attempts: int, expected_ms: int) -> None:
    policy = RetryPolicy(max_attempts=1_000, backoff_ms=250, max_backoff_ms=5_000)
    assert expected_ms == backoff_ms(policy, attempts)


def test_a_retry_waits_for_its_backoff_also_over_a_restart(table: Table) -> None:
    table.produce(retry_policy=RetryPolicy(max_attempts=5, backoff_ms=10_000))
    reader = table.read()
    table.nack(0)
    table.tick(9_500)
    assert [0] == reader.offsets
    again = table.restart()
    other = again.read()
    again.tick(250)
    assert [] == other.offsets
    again.tick(500)
    assert [0] == other.offsets


def test_a_message_that_used_up_its_attempts_goes_to_the_dead_letters(table: Table) -> None:
    table.create("u", 3)
    policy = RetryPolicy(max_attempts=2, backoff_ms=1)
    future = at(START_MS + 10**9)
    table.produce(
        "v", "u", "key", partition_override=1, retry_policy=policy, run_id="r", idempotency_key="i", deadline=future
    )
    reader = table.read(topic="u")
    table.settle("nack", 0, partition=1, topic="u", reason="one")
    table.tick()
    table.settle("nack", 0, partition=1, topic="u", reason="two")
    table.tick(10_000)
    assert [1, 2] == [one.attempts for one in reader.got]
    dead = table.read(topic="dlq.u").got[0]
    assert ("key", "v", 1) == (dead.key, dead.value, dead.partition)
    envelope = dead.envelope
    assert envelope is not None
    assert envelope.dlq is not None
    assert ("r", "i", "", None, None, None) == (
        envelope.run_id,
        envelope.idempotency_key,
        envelope.target_topic,
        envelope.partition_override,
        envelope.retry_policy,
        envelope.deadline,
    )
    found = envelope.dlq
    assert ("u", 1, 0, 2, "two") == (
        found.original_topic,
        found.original_partition,
        found.original_offset,
        found.attempts,
        found.last_error,
    )
    assert 3 == len(table.state.topics["", "dlq.u"].partitions)
    assert 0 == show_lag(table, "u")


def show_lag(table: Table, topic: str = "t", group: str = "g") -> int:
    shown = show_topic(table.state, "", topic)
    assert not isinstance(shown, OncewireError)
    return next(one.lag for one in shown.groups if one.name == group)


def test_a_timeout_uses_up_attempts_too(table: Table) -> None:
    table.produce(retry_policy=RetryPolicy(max_attempts=1))
    table.read()
    table.tick(2_500)
    dead = table.read(topic="dlq.t").got[0].envelope
    assert dead is not None
    assert dead.dlq is not None
    assert "ack_timeout" == dead.dlq.last_error


def test_dead_letter_and_settlement_are_one_step(table: Table) -> None:
    table.produce(retry_policy=RetryPolicy(max_attempts=1))
    reader = table.read(lease_ms=1_000)
    table.is_holding = True
    table.nack(0, reason="bad")
    table.lose()
    assert ("", "dlq.t") not in table.state.topics
    assert 1 == show_lag(table), "the original stays unsettled"
    table.is_holding = False
    table.tick(1_500)
    assert (1, 0) == (len(reader.got), show_lag(table))


def test_dead_letters_ignore_the_limits_of_producers_and_are_bounded_by_age() -> None:
    table = Table(Limits(partition_messages_max=1, topics_max=1, dead_letter_age_ms=10_000))
    table.create()
    reader = table.read()
    for _ in range(3):
        assert isinstance(table.produce(retry_policy=RetryPolicy(max_attempts=1)), Produced)
        table.nack(reader.offsets[-1])
    graveyard = table.state.topics["", "dlq.t"].partitions[0]
    assert 3 == len(graveyard)
    table.tick(10_001)
    table.tick()
    assert 0 == len(graveyard)


def waits_ms(table: Table, count: int) -> list[int]:
    """How long a message that is nacked at once waits for each next attempt, in ticks of 250 ms."""
    reader, waits = table.read(), []
    for attempts in range(1, count + 1):
        table.nack(0)
        begun = table.now_ms
        while len(reader.got) == attempts:
            table.tick()
        waits.append(table.now_ms - begun)
    assert list(range(1, count + 2)) == [one.attempts for one in reader.got]
    return waits


def test_a_message_without_a_policy_comes_again_without_end_and_ever_later(table: Table) -> None:
    table.produce()
    doubling = [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000]
    assert [250, *doubling, 60_000, 60_000] == waits_ms(table, 11)


def test_the_policy_of_messages_whose_producer_sent_none_is_a_setting() -> None:
    table = Table(Limits(retry_max_attempts=3, retry_backoff_ms=1_000, retry_max_backoff_ms=1_500))
    table.create()
    for policy in ({}, {"retry_policy": RetryPolicy()}):
        table.produce(**policy)
    reader = table.read()
    for wait_ms in (250, 1_000):
        table.nack(0), table.nack(1)
        table.tick(wait_ms)
    assert [1, 1, 2, 2, 3, 3] == [one.attempts for one in reader.got]
    table.nack(0), table.nack(1)
    assert 0 == show_lag(table)
    assert 2 == len(table.state.topics["", "dlq.t"].partitions[0])


def test_a_producer_s_policy_goes_before_that_of_the_server_and_a_dead_letter_has_no_last_attempt() -> None:
    table = Table(Limits(retry_max_attempts=1))
    table.create()
    table.produce(retry_policy=RetryPolicy(max_attempts=2))
    table.read()
    table.nack(0)
    table.tick()
    table.nack(0)
    letters = table.read("d", topic="dlq.t")
    for _ in range(5):
        table.settle("nack", 0, "d", topic="dlq.t")
        table.tick(60_000)
    assert [1, 2, 3, 4, 5, 6] == [one.attempts for one in letters.got]


def test_a_lease_that_ends_again_and_again_waits_ever_longer_too(table: Table) -> None:
    table.produce()
    reader = table.read(lease_ms=1_000)
    for _ in range(400):
        table.tick(250)
    assert 10 == len(reader.got), "a hundred without"


def test_a_message_that_expires_before_its_delivery_goes_to_the_dead_letters(table: Table) -> None:
    table.produce("late", deadline=at(START_MS + 1_000))
    table.produce("good")
    table.tick(1_000)
    assert ["good"] == table.read().values
    dead = table.read(topic="dlq.t").got[0].envelope
    assert dead is not None
    assert dead.dlq is not None
    assert ("message deadline exceeded", 0) == (dead.dlq.last_error, dead.dlq.attempts)


def test_a_disk_that_fails_is_not_asked_without_a_pause(table: Table) -> None:
    """What would be buried at once again waits for the next tick."""
    table.produce(deadline=at(START_MS + 1_000))
    table.now_ms += 1_000
    table.is_holding = True
    table.enter()
    table.commit()
    table.join(Reader())
    assert table.desk.can_cut
    table.lose()
    table.desk.hand_out(table.now_ms)
    assert not table.desk.can_cut
    table.tick()
    table.commit()
    assert ("", "dlq.t") in table.state.topics


# ---- retention


def test_settled_messages_stay_for_their_age_and_are_then_trimmed() -> None:
    table = Table(Limits(settled_age_ms=10_000))
    table.create()
    table.produce()
    table.read()
    table.ack(0)
    table.tick(9_000)
    partition = table.state.topics["", "t"].partitions[0]
    assert 1 == len(partition)
    table.tick(1_000)
    assert 0 == len(partition)
    assert 1 == table.produce().offset, "offsets go on"
    assert [1] == table.restart().read("b", "late").offsets


def test_an_idle_group_lapses_and_holds_nothing_back() -> None:
    table = Table(Limits(group_idle_ms=50_000, settled_age_ms=1))
    table.create()
    table.enter(group="idle")
    reader = table.read("b", "busy")
    for _ in range(3):
        table.produce()
        table.ack(reader.offsets[-1], "b", group="busy")
    table.tick(49_000)
    partition = table.state.topics["", "t"].partitions[0]
    assert 3 == len(partition)
    table.tick(2_000)
    table.tick()
    assert 0 == len(partition)
    shown = show_topic(table.state, "", "t")
    assert not isinstance(shown, OncewireError)
    assert {"idle": True, "busy": False} == {one.name: one.is_lapsed for one in shown.groups}
    table.produce("next")
    assert ["next"] == table.read("c", "idle").values


def test_a_group_that_is_read_does_not_lapse_also_over_a_restart() -> None:
    table = Table(Limits(group_idle_ms=50_000))
    table.create()
    table.read()
    for _ in range(10):
        table.tick(10_000)
    again = table.restart()
    again.tick(30_000)
    assert not again.state.groups[1].is_lapsed


def trial(table: Table, ms: int = 2_000) -> list[str]:
    """Which groups there are after a while."""
    for _ in range(ms // 250):
        table.tick(250)
    return sorted(table.state.topics["", "t"].groups)


def on_trial() -> Table:
    table = Table(Limits(group_trial_ms=1_000))
    table.create()
    return table


def leave(table: Table, name: str = "g") -> None:
    for subscriber in list(table.state.topics["", "t"].groups[name].subscribers):
        rules.leave(table.now_ms, subscriber)


def test_a_group_that_has_settled_nothing_is_forgotten_after_its_last_reader() -> None:
    table = on_trial()
    table.produce()
    table.read(lease_ms=500)
    assert ["g"] == trial(table, 5_000), "it has a reader"
    leave(table)
    assert [] == trial(table)
    assert [] == list(table.restart().state.groups)
    assert [1] == [one.attempts for one in table.read("b").got], "it is a new group"


@pytest.mark.parametrize("act", ["ack", "nack"])
def test_a_group_that_has_settled_something_is_kept(act: str) -> None:
    table = on_trial()
    table.produce()
    table.read()
    table.settle(act, 0)  # type: ignore[arg-type]
    leave(table)
    assert ["g"] == trial(table, 10_000)
    again = table.restart()
    again.now_ms += 10_000
    assert ["g"] == trial(again)


def test_a_group_that_gave_a_message_up_is_kept() -> None:
    table = on_trial()
    table.produce(retry_policy=RetryPolicy(max_attempts=1))
    table.read(lease_ms=500)
    table.tick(500)
    leave(table)
    assert ["g"] == trial(table)


def test_a_group_that_works_on_its_first_message_or_waits_for_its_retry_is_kept() -> None:
    table = on_trial()
    table.produce(retry_policy=RetryPolicy(max_attempts=5, backoff_ms=20_000))
    table.read(lease_ms=8_000)
    leave(table)
    assert ["g"] == trial(table, 6_000), "it works"
    assert ["g"] == trial(table, 10_000), "its lease ended, and its retry waits"
    assert [] == trial(table, 30_000)


def test_a_start_leaves_readers_time_to_come_back() -> None:
    table = on_trial()
    table.produce()
    table.read()
    again = table.restart()
    again.now_ms += 3_600_000
    assert ["g"] == trial(again, 1_000)
    assert [] == trial(again, 2_000)


def test_a_group_that_is_read_again_while_it_is_being_forgotten_is_a_new_one() -> None:
    table = on_trial()
    table.produce()
    table.read(lease_ms=250)
    leave(table)
    table.tick(250)
    table.is_holding = True
    table.tick(2_000)
    assert table.ack(0) is NOTHING, "it is answered when it is known whether the group is gone"
    assert table.enter() is NOTHING
    table.is_holding = False
    table.commit()
    assert "message is not in-flight" == message(table.ack(0))
    assert [1] == [one.attempts for one in table.read("b").got]
    assert [2] == list(table.state.groups)


def test_a_group_whose_forgetting_was_not_written_is_still_there() -> None:
    table = on_trial()
    table.produce()
    table.read(lease_ms=250)
    leave(table)
    table.tick(250)
    table.is_holding = True
    table.tick(2_000)
    table.lose()
    table.is_holding = False
    assert [0] == table.read("b").offsets
    assert [1] == list(table.state.groups)


def test_a_topic_whose_groups_all_lapsed_keeps_what_none_of_them_settled() -> None:
    table = Table(Limits(group_idle_ms=1_000, settled_age_ms=1))
    table.create()
    table.enter()
    table.produce()
    table.tick(5_000)
    table.tick(5_000)
    assert [0] == table.read("b", "g").offsets


def test_a_snapshot_knows_which_groups_have_settled_something() -> None:
    table = on_trial()
    table.produce()
    table.read()
    table.ack(0)
    table.enter(group="new")
    restored = Table(table.state.limits)
    for part in capture(table.state):
        for kept in part():
            restore(restored.state, decode_kept(encode(kept)))
    groups = restored.state.topics["", "t"].groups.values()
    assert {"g": True, "new": False} == {group.name: group.has_settled for group in groups}
