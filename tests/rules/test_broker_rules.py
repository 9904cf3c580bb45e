"""The broker's rules, one promise of the contract at a time."""

from __future__ import annotations

import pytest

from oncewire._ground.contracts.broker import BrokerEnvelope, ProduceBody
from oncewire._ground.errors import ContractViolation, NotFound, OncewireError, OutcomeUnknown, TooLarge, Unavailable
from oncewire.broker import rules, upkeep
from oncewire.broker.engine import BufferFull, Limits, Produced, RoutingDecision, TopicCreated
from oncewire.broker.messages import partition_of
from oncewire.broker.view import show_topic, topic_names
from tests.support.broker import NOTHING, START_MS, Table, at, message


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
