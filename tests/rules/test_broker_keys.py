"""The broker's rules of keys: a producer's, by which a message is stored once, and a worker's, for what it began."""

from __future__ import annotations

import pytest

from oncewire.broker.engine import Limits
from oncewire.broker.idempotency import identity_of
from tests.support.broker import Table, message


@pytest.fixture
def table() -> Table:
    one = Table()
    one.create()
    return one


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
