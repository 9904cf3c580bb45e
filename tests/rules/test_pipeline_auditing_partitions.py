"""Records of a partition: each follows the one before, and what was forgotten had been settled."""

from __future__ import annotations

from typing import Any

from oncewire.pipeline.auditing.partitions import Record, walk
from oncewire.pipeline.auditing.rules import Result

IDLE_MS = 1_000


def record(sequence: int, after: int | None, *events: dict[str, Any], **more: Any) -> Record:
    told = {"owner": "n1", "taken": False, "partition": 0, "at_ms": sequence * 10} | more
    return Record(
        1, told["partition"], sequence, 7, 0, told["at_ms"], "orders", told["owner"], told["taken"], after, events
    )  # fmt: skip


def event(kind: str, group: str | None = "g", offset: int | None = None, at_ms: int = 0) -> dict[str, Any]:
    return {"kind": kind, "group": group, "offset": offset, "at_ms": at_ms}


def walked(*records: Record, gaps: list[tuple[int, int]] | None = None) -> list[tuple[str, str, int, int]]:
    found: list[Result] = list(walk(records, IDLE_MS, gaps or []))
    return [(one.what, one.problem or one.id, one.first, one.last) for one in found]


TAKEN = record(1, 0, taken=True)


def test_records_that_follow_each_other_are_in_order() -> None:
    assert [] == walked(TAKEN, record(3, 1, event("acked", offset=0)), record(4, None), record(9, 4))


def test_a_record_that_was_taken_out_is_named() -> None:
    assert [("error", "missing", 3, 3), ("count", "unproven", 1, 1)] == walked(TAKEN, record(5, 3))
    assert [("error", "missing", 4, 4), ("count", "unproven", 1, 1)] == walked(TAKEN, record(5, None))


def test_one_in_a_known_gap_is_noted() -> None:
    assert [("note", "in_gap", 5, 5), ("count", "unproven", 1, 1)] == walked(TAKEN, record(5, 3), gaps=[(2, 4)])
    assert [("note", "begins_later", 5, 5), ("count", "unproven", 5, 5)] == walked(record(5, 3))


def test_a_second_one_behind_the_same_is_a_fork() -> None:
    assert ("error", "forked", 4, 4) in walked(TAKEN, record(3, 1), record(4, 1))


def test_only_the_owner_writes() -> None:
    taken = record(4, 3, owner="n2", taken=True)
    assert [] == walked(TAKEN, record(3, 1), taken, record(5, 4, owner="n2"))
    assert [("error", "stale_owner", 5, 5)] == walked(TAKEN, record(3, 1), taken, record(5, 4, owner="n1"))


def test_a_group_that_is_gone_answers_for_nothing() -> None:
    made, gone = (
        record(2, 1, event("group_made"), event("group_made", "typo")),
        record(3, 2, event("group_gone", "typo")),
    )
    assert [("alive", "g", 0, 9)] == walked(TAKEN, made, gone, record(4, 3, event("trimmed", None, 9)))


def test_groups_that_were_alive_at_a_trim_answer_for_all_below_it() -> None:
    made = record(2, 1, event("group_made"), event("group_made", "late", at_ms=1))
    trims = [record(3, 2, event("trimmed", None, 4)), record(4, 3, event("trimmed", None, 9))]
    assert [("alive", "g", 0, 9), ("alive", "late", 0, 9)] == walked(TAKEN, made, *trims)


def test_a_group_that_came_after_a_trim_does_not_answer_for_it() -> None:
    trims = [record(2, 1, event("trimmed", None, 4)), record(4, 3, event("trimmed", None, 9))]
    assert [("alive", "g", 5, 9)] == walked(TAKEN, trims[0], record(3, 2, event("group_made")), trims[1])


def test_a_group_that_was_long_silent_does_not_answer() -> None:
    made = record(2, 1, event("group_made"))
    late = record(3, 2, event("trimmed", None, 4), at_ms=2_000)
    back = [record(4, 3, event("acked", offset=7), at_ms=2_001), record(5, 4, event("trimmed", None, 9), at_ms=2_002)]
    assert [] == walked(TAKEN, made, late)
    assert [("alive", "g", 5, 9)] == walked(TAKEN, made, late, *back)


def test_partitions_are_walked_apart() -> None:
    assert [] == walked(TAKEN, record(4, 1), record(2, 0, partition=1, taken=True), record(3, 2, partition=1))
