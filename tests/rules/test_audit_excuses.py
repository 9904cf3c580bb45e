"""What a known gap excuses: one thing for each sequence that it covers, where it may have stood, with cause."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from oncewire.pipeline.auditing.excuses import Group, Ranges, bears_out, unexcused
from oncewire.pipeline.auditing.workers import judge_gaps

# ---- ranges


def test_ranges_count_the_sequences_that_they_cover() -> None:
    ranges = Ranges([(5, 9), (1, 2), (8, 12), (13, 13), (20, 10**12)])
    assert [0, 2, 9, 11, 1, 1, 10**12 - 19] == [
        ranges.count(*one) for one in ((3, 4), (1, 3), (5, 15), (1, 19), (9, 9), (20, 20), (14, 10**13))
    ]
    assert 0 == ranges.count(9, 8) == Ranges([]).count(1, 100)


# ---- room for what is missing


def test_each_sequence_of_a_gap_has_room_for_one_thing() -> None:
    assert [37] == unexcused([Group(1, 100, 40)], [(10, 12)])
    assert [0] == unexcused([Group(1, 100, 3)], [(10, 12)])
    assert [3] == unexcused([Group(1, 100, 3)], [])


def test_a_gap_somewhere_else_has_none() -> None:
    assert [2, 0] == unexcused([Group(1, 9, 2), Group(10, 20, 2)], [(10, 30)])
    assert [1] == unexcused([Group(10, 20, 1)], [(1, 9), (21, 90)])


def test_room_is_given_out_so_that_as_little_as_possible_is_left() -> None:
    """The group that may stand anywhere leaves the narrow place to the one that has no other."""
    assert [0, 0] == unexcused([Group(1, 100, 1), Group(50, 50, 1)], [(50, 50), (90, 90)])
    assert [0, 0] == unexcused([Group(50, 50, 1), Group(1, 100, 1)], [(50, 50), (90, 90)])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_is_what_no_assignment_could_place(seed: int) -> None:
    """Against every way to assign, on small cases."""
    chance = random.Random(seed)
    for _ in range(40):
        firsts = [chance.randint(1, 8) for _ in range(3)]
        groups = [Group(first, chance.randint(first, 8), chance.randint(0, 2)) for first in firsts]
        gaps = [(at, at) for at in range(1, 9) if chance.random() < 0.4]
        things = [group for group in groups for _ in range(group.things)]
        best = 0
        for places in product(*([None, *(at for at, _ in gaps if one.first <= at <= one.last)] for one in things)):
            used = [at for at in places if at is not None]
            if len(set(used)) == len(used):
                best = max(best, len(used))
        assert len(things) - best == sum(unexcused(groups, gaps))


# ---- records of gaps

GAP: dict[str, Any] = {
    "stream": "EVENTS", "created_ns": 1, "incarnation": 0, "first": 10, "last": 12, "cause": "deleted",
    "next_stored": 13, "first_sequence": 1, "last_sequence": 100, "deleted": 3, "limits": "{}", "inside": 3,
}  # fmt: skip
LIMITED = {"cause": "limit", "limits": '{"max_msgs_per_subject": 1}'}


def gap(**changed: Any) -> pa.RecordBatch:
    kinds = {int: pa.int64(), str: pa.string()}
    schema = pa.schema([(name, kinds[type(value)]) for name, value in GAP.items()])
    return pa.RecordBatch.from_pylist([GAP | changed], schema)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"next_stored": None, "last_sequence": 12},
        {"deleted": 50},
        LIMITED,
        {"cause": "limit", "limits": '{"allow_msg_ttl": true}'},
        {"cause": "limit", "stream": "BROKER_RECORDS"},
        {"cause": "limit", "stream": "OWB+a+b+1"},
        LIMITED | {"first_sequence": 13, "deleted": 0},
        {"cause": "trimmed", "first_sequence": 13, "deleted": 0},
        {"cause": "before", "first": 1, "first_sequence": 13, "deleted": 0},
        {"cause": "earlier", "first": 1, "incarnation": 1, "first_sequence": None, "deleted": None},
    ],
    ids=str,
)
def test_a_gap_is_known_where_the_leader_s_figures_bear_out_its_cause(changed: dict[str, Any]) -> None:
    assert [True] == bears_out(pa.Table.from_batches([gap(**changed)])).to_pylist()


@pytest.mark.parametrize(
    "changed",
    [
        {"cause": "unknown"},
        {"cause": "whatever"},
        {"cause": None},
        {"deleted": 2},
        {"deleted": 0},
        {"deleted": None},
        {"inside": 4},  # another gap of the same answer takes the rest
        {"next_stored": 12},
        {"last_sequence": 11},
        {"first_sequence": 11},
        {"first_sequence": None},
        {"cause": "limit"},  # on a stream without such a limit
        {"cause": "limit", "limits": None},
        {"cause": "limit", "limits": '{"max_age": 1}'},
        LIMITED | {"deleted": 0},
        {"cause": "trimmed"},
        {"cause": "trimmed", "first_sequence": 12},
        {"cause": "before", "first_sequence": 13},
        {"cause": "earlier", "first": 1},
        {"cause": "earlier", "incarnation": 1},
    ],
    ids=str,
)
def test_a_gap_whose_figures_say_something_else_excuses_nothing(changed: dict[str, Any]) -> None:
    assert [False] == bears_out(pa.Table.from_batches([gap(**changed)])).to_pylist()
    (judged,) = judge_gaps(iter([gap(**changed)]))
    assert [False] == judged.column("is_known").to_pylist()
