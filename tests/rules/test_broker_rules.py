"""The broker's rules, one promise of the contract at a time."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from oncewire.broker import rules, upkeep
from oncewire.broker.engine import BufferFull, Limits, Produced, RoutingDecision, TopicCreated
from oncewire.broker.idempotency import identity_of
from oncewire.broker.messages import partition_of
from oncewire.broker.rules import backoff_ms
from oncewire.broker.view import show_topic, topic_names
from oncewire.contracts.broker import BrokerEnvelope, ProduceBody, RetryPolicy
from oncewire.errors import Conflict, ContractViolation, NotFound, OncewireError, OutcomeUnknown, TooLarge, Unavailable
from tests.support.broker import NOTHING, START_MS, Reader, Table, message


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


@pytest.fixture
def table() -> Table:
    one = Table()
    one.create()
    return one


# ---- topics


def test_a_topic_is_created_and_listed_with_its_partitions(table: Table) -> None:
    assert TopicCreated("u", 3) == table.create("u", 3)
    assert ["t", "u"] == topic_names(table.state, "")


def test_creating_a_topic_that_is_there_answers_its_real_partition_count_and_changes_nothing(table: Table) -> None:
    table.create("u", 3)
    assert TopicCreated("u", 3) == table.create("u", 7)
    assert 3 == len(table.state.topics["", "u"].partitions)


@pytest.mark.parametrize("partitions", [0, -1, 1_025])
def test_a_topic_needs_at_least_one_partition_and_not_too_many(table: Table, partitions: int) -> None:
    assert "invalid partitions" == message(table.create("u", partitions))


def test_topics_are_limited_per_tenant() -> None:
    table = Table(Limits(topics_max=1))
    table.create("t")
    assert isinstance(table.create("u"), TooLarge)
    assert TopicCreated("u", 1) == table.create("u", tenant="other")


def test_a_tenant_does_not_see_another_ones_topics(table: Table) -> None:
    assert [] == topic_names(table.state, "other")
    assert isinstance(table.produce(tenant="other"), NotFound)


def test_an_empty_topic_survives_a_restart_with_all_its_partitions(table: Table) -> None:
    table.create("u", 5)
    assert 5 == len(table.restart().state.topics["", "u"].partitions)


def test_a_deleted_topic_is_gone_with_its_messages_groups_and_keys(table: Table) -> None:
    table.produce(idempotency_key="k")
    reader = table.read()
    assert table.delete() is None
    assert "topic does not exist" == message(reader.end)
    assert isinstance(table.produce(), NotFound)
    table.create()
    assert Produced("t", 0, 0) == table.produce(idempotency_key="k")
    assert {} == table.restart().state.topics["", "t"].groups


def test_a_topic_whose_deletion_fails_goes_on(table: Table) -> None:
    table.produce()
    reader = table.read(lease_ms=1_000)
    table.is_holding = True
    assert NOTHING is table.delete()
    table.now_ms += 2_000
    upkeep.tick(table.state, table.now_ms)
    table.lose()
    table.is_holding = False
    table.tick()
    assert [0, 0] == reader.offsets


# ---- partitions


@pytest.mark.parametrize(("key", "digest"), [("a", 0xE40C292C), ("foobar", 0xBF9CF968)])
def test_the_partition_is_fnv_1a_of_the_key_modulo_their_number(key: str, digest: int) -> None:
    assert digest % 7 == partition_of(key, 7)


def test_the_bytes_of_a_key_count_not_its_characters() -> None:
    digest = 0x811C9DC5
    for byte in (0xC3, 0xBC):
        digest = (digest ^ byte) * 0x01000193 % 2**32
    assert digest % 1_000 == partition_of("ü", 1_000)


def test_an_empty_key_goes_to_partition_0(table: Table) -> None:
    table.create("u", 7)
    assert 0 == table.produce(topic="u").partition


def test_the_same_key_always_goes_to_the_same_partition(table: Table) -> None:
    table.create("u", 3)
    assert 1 == len({table.produce(topic="u", key="user:1").partition for _ in range(5)})


def test_a_partition_override_wins_over_the_key(table: Table) -> None:
    table.create("u", 3)
    assert 2 == table.produce(topic="u", key="user:1", partition_override=2).partition


def test_a_partition_override_out_of_range_fails(table: Table) -> None:
    table.create("u", 2)
    assert "partition_override out of range" == message(table.produce(topic="u", partition_override=2))


def test_offsets_are_per_topic_and_increase_within_each_partition(table: Table) -> None:
    table.create("u", 2)
    stored = [table.produce(topic="u", partition_override=p) for p in (0, 1, 1, 0)]
    assert [(0, 0), (1, 1), (1, 2), (0, 3)] == [(one.partition, one.offset) for one in stored]


# ---- producing


def test_a_topic_must_be_there_before_a_message(table: Table) -> None:
    assert "topic does not exist (create it first)" == message(table.produce(topic="nowhere"))


def test_target_topic_sends_a_message_elsewhere_and_the_answer_names_the_requested_topic(table: Table) -> None:
    table.create("u")
    assert "t" == table.produce(target_topic="u").topic
    assert ["v"] == table.read(topic="u").values
    assert [] == table.read(topic="t").values


def test_a_message_that_is_past_its_deadline_is_refused(table: Table) -> None:
    assert "message deadline exceeded" == message(table.produce(deadline=at(START_MS)))
    assert isinstance(table.produce(deadline=at(START_MS + 1)), Produced)


def test_a_full_partition_refuses_with_its_reason_and_when_to_come_again() -> None:
    table = Table(Limits(partition_messages_max=2))
    table.create()
    table.produce(), table.produce()
    refused = table.produce()
    assert isinstance(refused, BufferFull)
    assert ("partition_buffer_full", 1.0) == (refused.reason, refused.retry_after_s)


def test_bytes_of_keys_and_values_are_limited_per_partition() -> None:
    table = Table(Limits(partition_bytes_max=20))
    table.create(partitions=2)
    assert isinstance(table.produce("x" * 14, key="key", partition_override=0), Produced)
    refused = table.produce("ü", key="ü", partition_override=0)
    assert isinstance(refused, BufferFull)
    assert "partition_buffer_bytes_full" == refused.reason
    assert isinstance(table.produce("x", key="ü", partition_override=0), Produced)
    assert isinstance(table.produce("x" * 20, partition_override=1), Produced)


def test_messages_on_their_way_to_the_disk_count_against_the_limits() -> None:
    table = Table(Limits(partition_messages_max=1))
    table.create()
    table.is_holding = True
    assert NOTHING is table.produce()
    assert isinstance(table.produce(), BufferFull)
    table.lose()
    assert NOTHING is table.produce()


def test_what_all_groups_settled_makes_room_again() -> None:
    table = Table(Limits(partition_messages_max=1))
    table.create()
    table.produce()
    table.read("a", "g")
    table.read("b", "h")
    table.ack(0, "a", group="g")
    assert isinstance(table.produce(), BufferFull)
    table.ack(0, "b", group="h")
    assert isinstance(table.produce(), Produced)


def test_settled_messages_are_kept_within_the_limits_of_a_partition() -> None:
    table = Table(Limits(partition_messages_max=3, partition_bytes_max=30, settled_age_ms=10**9))
    table.create()
    reader = table.read()
    partition = table.state.topics["", "t"].partitions[0]
    for _ in range(9):
        table.produce("x")
        table.ack(reader.offsets[-1])
    table.tick()
    assert (3, 3, 0) == (len(partition), partition.settled_bytes, partition.needed_bytes)
    for _ in range(3):
        table.produce("x" * 20)
        table.ack(reader.offsets[-1])
    table.tick()
    assert (1, 20) == (len(partition), partition.settled_bytes)


def test_a_topic_without_groups_trims_nothing_and_refuses_when_full() -> None:
    table = Table(Limits(partition_messages_max=1))
    table.create()
    table.produce()
    table.tick(10 * 365 * 86_400_000)
    assert isinstance(table.produce(), BufferFull)


# ---- visible only when durable


def test_a_message_is_delivered_only_when_it_is_durable(table: Table) -> None:
    reader = table.read()
    table.is_holding = True
    assert NOTHING is table.produce()
    table.tick()
    assert [] == reader.got
    table.commit()
    assert [0] == reader.offsets


def test_a_produce_whose_commit_failed_is_told_so_and_leaves_nothing(table: Table) -> None:
    reader = table.read()
    table.is_holding = True
    answers: list[object] = []
    table.desk.submit(_produce_step(table, "k"), answers.append)
    table.lose()
    assert isinstance(answers[0], OutcomeUnknown)
    table.is_holding = False
    again = table.produce(idempotency_key="k")
    assert Produced("t", 0, 1) == again, "the key is free, the offset is not given out again"
    assert [1] == reader.offsets


def test_requests_behind_a_failed_commit_are_told_that_nothing_was_written(table: Table) -> None:
    table.is_holding = True
    first: list[object] = []
    second: list[object] = []
    table.desk.submit(_produce_step(table), first.append)
    table.desk.cut()
    table.desk.submit(_produce_step(table), second.append)
    table.desk.failed(OutcomeUnknown("outcome unknown"))
    assert [OutcomeUnknown, Unavailable] == [type(first[0]), type(second[0])]


def test_a_message_on_its_way_is_not_counted(table: Table) -> None:
    table.is_holding = True
    table.produce()
    shown = show_topic(table.state, "", "t")
    assert not isinstance(shown, OncewireError)
    assert (0, 0) == (shown.messages, table.state.counters["produced"])


def test_a_topic_on_its_way_does_not_exist(table: Table) -> None:
    table.is_holding = True
    assert NOTHING is table.create("u")
    assert isinstance(table.produce(topic="u"), NotFound)
    assert NOTHING is table.create("u"), "the second creator waits for the first"


def test_an_ack_counts_only_when_it_is_durable(table: Table) -> None:
    table.produce()
    table.read()
    table.is_holding = True
    assert NOTHING is table.ack(0)
    table.lose()
    table.is_holding = False
    assert table.ack(0) is None, "it may be acked again"


def test_a_second_ack_is_answered_only_when_the_first_is_durable(table: Table) -> None:
    table.produce()
    table.read()
    table.is_holding = True
    table.ack(0)
    assert NOTHING is table.ack(0)
    table.commit()
    assert "message is not in-flight" == message(table.ack(0))


def _produce_step(table: Table, key: str = "") -> rules.Step:
    envelope = BrokerEnvelope(idempotency_key=key) if key else None
    return rules.produce(table.state, table.now_ms, "", ProduceBody(topic="t", value="v", envelope=envelope))


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


def test_a_waiting_retry_counts_as_in_flight_and_does_not_block_later_offsets() -> None:
    table = Table(Limits(in_flight_max=2))
    table.create()
    for _ in range(4):
        table.produce(retry_policy=RetryPolicy(max_attempts=9, backoff_ms=10_000))
    reader = table.read(lease_ms=60_000)
    table.nack(0)
    table.tick()
    assert [0, 1] == reader.offsets
    table.ack(1)
    assert [0, 1, 2] == reader.offsets


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
    assert "readers already" in message(table.enter(group="g"))


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


def test_a_message_without_a_policy_is_redelivered_without_end(table: Table) -> None:
    table.produce()
    reader = table.read()
    for _ in range(20):
        table.nack(0)
        table.tick()
    assert list(range(1, 22)) == [one.attempts for one in reader.got]


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


def test_a_topic_whose_groups_all_lapsed_keeps_what_none_of_them_settled() -> None:
    table = Table(Limits(group_idle_ms=1_000, settled_age_ms=1))
    table.create()
    table.enter()
    table.produce()
    table.tick(5_000)
    table.tick(5_000)
    assert [0] == table.read("b", "g").offsets


# ---- producers' idempotency


def test_a_key_that_is_stored_is_a_success_and_stores_nothing(table: Table) -> None:
    assert not table.produce("1", idempotency_key="k").is_duplicate
    assert table.produce("2", idempotency_key="k").is_duplicate
    assert ["1"] == table.read().values


def test_the_identity_is_tenant_topic_and_key(table: Table) -> None:
    table.create("u")
    table.produce(idempotency_key="k")
    assert not table.produce(topic="u", idempotency_key="k").is_duplicate
    assert not table.produce(tenant_id="a", idempotency_key="k").is_duplicate
    assert not table.produce(tenant_id="ak", idempotency_key="").is_duplicate
    assert table.produce(tenant_id="a", idempotency_key="k").is_duplicate


def test_the_identity_names_the_requested_topic(table: Table) -> None:
    table.create("u")
    table.produce(idempotency_key="k", target_topic="u")
    assert table.produce(idempotency_key="k").is_duplicate
    assert not table.produce(topic="u", idempotency_key="k").is_duplicate


def test_a_key_on_its_way_to_the_disk_is_in_flight(table: Table) -> None:
    table.is_holding = True
    table.produce(idempotency_key="k")
    assert "idempotency: key already in-flight" == message(table.produce(idempotency_key="k"))


def test_without_a_key_nothing_is_deduplicated(table: Table) -> None:
    assert [0, 1] == [table.produce(run_id="r").offset for _ in range(2)]


def test_a_key_is_forgotten_after_its_ttl(table: Table) -> None:
    table.produce(idempotency_key="k")
    table.now_ms += 599_999
    assert table.produce(idempotency_key="k").is_duplicate
    table.now_ms += 1
    assert not table.produce(idempotency_key="k").is_duplicate
    table.tick(1_200_000)
    assert 0 == table.state.entries


def test_a_key_survives_a_restart(table: Table) -> None:
    table.produce(idempotency_key="k")
    assert table.restart().produce(idempotency_key="k").is_duplicate


def test_a_duplicate_is_a_success_also_when_the_partition_is_full() -> None:
    table = Table(Limits(partition_messages_max=1))
    table.create()
    table.produce(idempotency_key="k")
    assert table.produce(idempotency_key="k").is_duplicate


def test_the_number_of_keys_is_limited() -> None:
    table = Table(Limits(idempotency_entries_max=1))
    table.create()
    table.produce(idempotency_key="k")
    assert "too many idempotency keys" in message(table.produce(idempotency_key="l"))


# ---- workers' idempotency


@pytest.fixture
def held(table: Table) -> Table:
    """A message is leased to `a`."""
    table.produce(idempotency_key="k")
    table.read("a")
    return table


def test_a_worker_begins_works_and_marks_its_success(held: Table) -> None:
    assert "PENDING" == held.mark("begin", 0).status
    assert "COMMITTED" == held.mark("success", 0).status
    assert "COMMITTED" == held.mark("begin", 0).status


def test_what_is_committed_is_seen_by_the_next_owner(held: Table) -> None:
    held.mark("begin", 0), held.mark("success", 0)
    held.tick(2_500)
    again = held.restart()
    again.tick(2_500)
    again.read("b")
    assert "COMMITTED" == again.mark("begin", 0, owner="b").status


def test_a_failure_is_remembered_and_may_be_begun_again(held: Table) -> None:
    held.mark("begin", 0)
    assert ("FAILED", "boom") == (
        (one := held.mark("failure", 0, error="boom")).status,
        one.last_error,
    )
    again = held.mark("begin", 0)
    assert ("PENDING", "boom") == (again.status, again.last_error)


def test_a_late_failure_does_not_undo_a_success(held: Table) -> None:
    held.mark("success", 0)
    assert "COMMITTED" == held.mark("failure", 0).status


def test_the_same_key_in_another_delivery_is_in_flight_while_its_owner_has_the_lease(held: Table) -> None:
    held.produce()
    held.mark("begin", 0)
    assert "idempotency: key already in-flight" == message(held.mark("begin", 1))
    assert "idempotency: key already in-flight" == message(held.mark("success", 1))
    held.nack(0)
    assert "PENDING" == held.mark("begin", 1).status


def test_the_next_owner_of_a_delivery_takes_its_pending_over(held: Table) -> None:
    held.mark("begin", 0)
    held.nack(0)
    group = held.state.groups[1]
    group.subscribers[0].owner = "b"
    held.tick()
    assert "PENDING" == held.mark("begin", 0, owner="b").status
    assert "not owner" == message(held.mark("success", 0, owner="a"))


def test_only_the_owner_of_a_delivery_may_mark_it(held: Table) -> None:
    assert "not owner" == message(held.mark("begin", 0, owner="b"))
    assert "message is not in-flight" == message(held.mark("begin", 9))


def test_an_ack_commits_what_its_owner_had_begun(held: Table) -> None:
    held.mark("begin", 0)
    held.ack(0)
    held.produce()
    assert "COMMITTED" == held.mark("begin", 1).status
    again = held.restart()
    again.read("a")
    assert "COMMITTED" == again.mark("begin", 1).status


def test_an_ack_without_a_begin_commits_nothing(held: Table) -> None:
    held.ack(0)
    held.produce()
    assert "PENDING" == held.mark("begin", 1).status


def test_groups_work_apart(held: Table) -> None:
    held.mark("success", 0)
    held.read("b", "h")
    assert "PENDING" == held.mark("begin", 0, owner="b", group="h").status


def test_a_pending_found_at_a_start_is_failed(held: Table) -> None:
    held.mark("begin", 0)
    again = held.restart()
    again.read("b")
    status = again.mark("begin", 0, owner="b")
    assert ("PENDING", "the broker was restarted") == (status.status, status.last_error)


def test_pending_and_failed_are_forgotten_after_their_ttl_and_committed_lives_as_its_message(held: Table) -> None:
    held.produce("2"), held.produce("3")
    held.mark("begin", 0, "pending"), held.mark("failure", 1, "failed", error="x"), held.mark("success", 2, "done")
    held.tick(700_000)
    assert {"done"} == {key for key in ("pending", "failed", "done") if _entry(held, key)}
    held.tick()
    held.ack(0), held.ack(1), held.ack(2)
    for _ in range(4):
        held.tick(400_000)
    assert not _entry(held, "done")


def _entry(table: Table, key: str) -> bool:
    return identity_of("", key) in table.state.groups[1].worked


# ---- the router


def test_a_router_labels_and_overrides(table: Table) -> None:
    table.create("u", 3)
    decision = RoutingDecision(label="finance", target_topic="u", partition_override=2, meta={"score": "0.9"})
    assert Produced("t", 2, 0) == table.produce(decision=decision, target_topic="t", partition_override=0)
    got = table.read(topic="u").got[0]
    assert got.routing is not None
    assert ("finance", {"score": "0.9"}) == (got.routing.label, got.routing.meta)
    assert got.envelope is not None
    assert ("u", 2) == (got.envelope.target_topic, got.envelope.partition_override)


@pytest.mark.parametrize(
    "decision",
    [
        RoutingDecision(label="x", target_topic="nowhere"),
        RoutingDecision(label="x", partition_override=9),
        RoutingDecision(label="x", target_topic="u", partition_override=9),
    ],
)
def test_a_routers_choice_that_cannot_be_is_left_out_and_counted(table: Table, decision: RoutingDecision) -> None:
    table.create("u")
    assert isinstance(table.produce(decision=decision), Produced)
    assert 1 == table.state.counters["router_failures"]
    got = table.read().got[0]
    assert got.routing is not None
    assert ("x", None) == (got.routing.label, got.envelope)


def test_a_producers_own_mistake_stays_its_own_with_a_router(table: Table) -> None:
    decision = RoutingDecision(target_topic="nowhere")
    assert isinstance(table.produce(decision=decision, partition_override=9), ContractViolation)
