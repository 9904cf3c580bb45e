"""Offsets, losses and cuts: what a checkpoint may rely on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oncewire._ground.errors import Corrupt, Refused
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline.rules import (
    Facts,
    Offset,
    backlog,
    cut,
    find_loss,
    partition_count,
    records_limit,
    refuse_queue,
    show_time,
    unread,
)

T1, T2 = "2026-11-01T10:00:00.000000001Z", "2026-11-01T10:00:00.000000002Z"
FACTS = Facts("ORDERS", "2026-01-01T00:00:00Z", 1, 100, T2, 100, 40_000, "limits", False)
START = Offset(51, FACTS.created, T1)


def test_an_offset_survives_the_checkpoint() -> None:
    for offset in (
        START,
        Offset(1, FACTS.created),
        Offset(7, FACTS.created, is_earliest=True),
        replace(FACTS, incarnation=2).end,
    ):
        assert offset == Offset.from_dict(offset.to_dict())


def test_an_offset_of_another_source_is_named() -> None:
    with pytest.raises(Corrupt, match="none of this source's"):
        Offset.from_dict({"orders-0": 12})


def test_going_on_where_reading_stopped_is_no_loss() -> None:
    assert find_loss(START, FACTS, T1) is None


def test_the_message_before_the_offset_may_be_gone_because_it_was_read() -> None:
    assert find_loss(START, FACTS, None) is None
    assert find_loss(START, replace(FACTS, first=51), None) is None


@pytest.mark.parametrize(
    ("facts", "time_before", "cause", "says"),
    [
        (replace(FACTS, created="2026-02-02T00:00:00Z"), T1, "recreated", "created at 2026-02-02"),
        (replace(FACTS, last=40), None, "went back", "ends at sequence 40, and 50 was read"),
        (FACTS, T2, "went back", "message 50 has the time"),
        (replace(FACTS, first=60), None, "trimmed", "sequences 51 to 59 of stream ORDERS are gone"),
        (replace(FACTS, first=101, messages=0), None, "trimmed", "sequences 51 to 100"),
        (replace(FACTS, first=60, has_subject_limits=True), None, "limit", "limits per subject"),
    ],
)
def test_each_kind_of_loss_is_told_apart(facts: Facts, time_before: str | None, cause: str, says: str) -> None:
    loss = find_loss(START, facts, time_before)
    assert loss is not None
    assert cause == loss.cause
    assert says in loss.sentence
    assert "failOnDataLoss=false" in loss.error().hint


def test_a_newer_incarnation_is_no_loss_while_the_last_message_read_is_still_there() -> None:
    newer = replace(FACTS, incarnation=1)
    assert find_loss(START, newer, T1) is None
    loss = find_loss(START, newer, None)
    assert loss is not None
    assert "went back" == loss.cause
    assert "its incarnation is 1, the checkpoint knows 0" in loss.sentence
    assert find_loss(replace(START, incarnation=1), newer, None) is None
    assert find_loss(replace(START, timestamp=""), newer, None) is None


def test_what_was_trimmed_before_the_first_read_was_never_asked_for() -> None:
    assert find_loss(Offset(51, FACTS.created, is_earliest=True), replace(FACTS, first=60), None) is None


def test_deleted_messages_are_no_loss_and_trimmed_ones_are() -> None:
    gaps = [(10, 12), (40, 41)]
    assert unread(gaps, FACTS) is None
    loss = unread(gaps, replace(FACTS, first=20))
    assert loss is not None
    assert (10, 12) == (loss.first, loss.end)
    assert unread([], replace(FACTS, first=20)) is None


def test_a_work_queue_is_refused_with_the_reason() -> None:
    refuse_queue(FACTS)
    with pytest.raises(Refused, match="belongs to the one worker") as caught:
        refuse_queue(replace(FACTS, retention="workqueue"))
    assert "LEDGER" in caught.value.hint


def test_the_smaller_limit_of_a_trigger_counts() -> None:
    assert 0 == records_limit(FACTS, 0, 0)
    assert 10 == records_limit(FACTS, 10, 0)
    assert 5 == records_limit(FACTS, 10, 2_000)
    assert 1 == records_limit(FACTS, 0, 1)


def test_a_range_is_cut_without_hole_or_overlap() -> None:
    for size, minimum in ((1, 1), (7, 3), (2, 8), (250_000, 1), (250_000, 7)):
        parts = cut(11, 11 + size, partition_count(size, minimum))
        assert [number for a, b in parts for number in (a, b)][1:-1:2] == [a for a, _ in parts][1:]
        assert (11, 11 + size) == (parts[0][0], parts[-1][1])
        assert len(parts) == min(size, max(minimum, -(-size // 250_000)))


def test_times_keep_their_nanoseconds() -> None:
    for nanos in (0, 1_500_000_000, 1_794_765_626_876_548_228):
        assert nanos == parse_time_ns(show_time(nanos))


def test_facts_are_read_from_the_stream_info() -> None:
    state: dict[str, Any] = {
        "messages": 0,
        "bytes": 0,
        "first_seq": 0,
        "last_seq": 0,
        "last_ts": "0001-01-01T00:00:00Z",
    }
    empty = Facts.of({"created": "c", "config": {"name": "S", "retention": "limits"}, "state": state})
    assert (1, 1, "") == (empty.first, empty.next, empty.last_time)
    purged = Facts.of({"created": "c", "config": {"name": "S"}, "state": {**state, "last_seq": 9, "first_seq": 10}})
    assert (10, 10) == (purged.first, purged.next)


def test_the_backlog_is_what_lies_between_read_and_latest() -> None:
    source = {"endOffset": START.to_dict(), "latestOffset": '{"sequence": 60, "created": "x"}'}
    assert 9 == backlog({"sources": [source, {"endOffset": "file", "latestOffset": None}]})
