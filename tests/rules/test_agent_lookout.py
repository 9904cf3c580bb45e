"""What follows from what the server tells of a stream and a durable."""

from __future__ import annotations

import pytest

from oncewire._ground.ledger.store import Attempt
from oncewire.agent.lookout import Facts, may_take, seen_by, trimmed

FACTS = Facts(
    first=1, last=100, last_ns=7, is_kept=True, delivered=60, floor=40, unread=5, in_hand=3, redelivered=0
)  # fmt: skip


def test_with_inputs_in_hand_only_what_lies_below_all_of_them_is_settled() -> None:
    assert (40, 0) == seen_by(FACTS)


def test_with_nothing_in_hand_all_that_was_delivered_is_settled() -> None:
    assert (60, 0) == seen_by(FACTS._replace(in_hand=0))


def test_with_nothing_unread_the_whole_stream_is_seen_and_its_last_message_vouches_for_it() -> None:
    assert (100, 7) == seen_by(FACTS._replace(in_hand=0, unread=0))


@pytest.mark.parametrize(
    ("first", "read", "gone"), [(1, 0, None), (61, 60, None), (62, 60, (61, 61)), (90, 60, (61, 89)), (50, 60, None)]
)
def test_what_lies_between_the_last_that_was_read_and_the_streams_beginning_was_dropped(
    first: int, read: int, gone: tuple[int, int] | None
) -> None:
    assert gone == trimmed(FACTS._replace(first=first), read)


def test_where_messages_go_by_design_nothing_is_a_loss() -> None:
    assert None is trimmed(FACTS._replace(first=90, is_kept=False), 60)


def test_an_open_input_without_a_mark_is_anybodys() -> None:
    assert (True, True) == tuple(may_take(None, 5, is_certain=certain) for certain in (True, False))


@pytest.mark.parametrize(
    ("deliveries", "is_certain", "is_free"), [(2, True, True), (2, False, False), (5, True, False), (5, False, False)]
)
def test_one_with_a_mark_is_taken_only_if_the_server_will_not_bring_it_and_nobody_runs_its_last_delivery(
    deliveries: int, is_certain: bool, is_free: bool
) -> None:
    attempt = Attempt(b"k", "EVENTS", "c", 9, deliveries, 0, "")

    assert is_free == may_take(attempt, 5, is_certain=is_certain)
