"""What a known gap excuses, and what it does not. Pure.

A gap covers sequences, and nothing else: something that is missing is excused only by a sequence at which it may have
stood, and each such sequence excuses one thing. A record whose own figures do not bear out its cause excuses nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts.topics import RECORDS, STREAM_PREFIXES
from oncewire.pipeline.lake import rules

Closed = tuple[int, int]
_BY_DESIGN: Final = '"(max_msgs_per_subject|allow_msg_ttl)"'
"""In a stream's limits: what lets messages leave from between others."""


def bears_out(rows: pa.Table) -> pa.Array:
    """Which records of gaps have figures that go with their cause. `inside` is how many sequences all records of one
    answer of the leader name between the stream's first and last one."""
    first, last, cause = rows["first"], rows["last"], rows["cause"]
    is_below = pc.less(last, rows["first_sequence"])
    is_inside = _all(
        pc.greater_equal(first, rows["first_sequence"]),
        pc.less_equal(last, rows["last_sequence"]),
        pc.greater_equal(rows["deleted"], rows["inside"]),
        pc.greater(pc.fill_null(rows["next_stored"], rules.LAST_SEQUENCE), last),
    )
    is_trimmed = pc.or_(pc.equal(rows["stream"], RECORDS), _starts(rows["stream"], STREAM_PREFIXES))
    by_design = pc.or_(is_trimmed, pc.match_substring_regex(pc.fill_null(rows["limits"], ""), _BY_DESIGN))
    says = {
        rules.BEFORE: _all(is_below, pc.equal(first, 1)),
        rules.TRIMMED: is_below,
        rules.LIMIT: pc.and_(by_design, pc.or_kleene(is_below, is_inside)),
        rules.DELETED: is_inside,
        rules.EARLIER: _all(pc.greater(rows["incarnation"], 0), pc.equal(first, 1)),
    }
    found: Any = pa.chunked_array([pa.array([False] * rows.num_rows)])
    for name, holds in says.items():
        found = pc.or_(found, pc.fill_null(pc.and_kleene(pc.equal(cause, name), holds), False))
    return found.combine_chunks()


def _all(*conditions: Any) -> Any:
    found = conditions[0]
    for one in conditions[1:]:
        found = pc.and_kleene(found, one)
    return found


def _starts(values: Any, prefixes: Sequence[str]) -> Any:
    found = pc.starts_with(values, prefixes[0])
    for prefix in prefixes[1:]:
        found = pc.or_(found, pc.starts_with(values, prefix))
    return found


class Ranges:
    """Closed ranges, as a set of sequences."""

    def __init__(self, ranges: Sequence[Closed]) -> None:
        merged: list[list[int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], last)
            else:
                merged.append([first, last])
        self._firsts = [first for first, _ in merged]
        self._lasts = [last for _, last in merged]
        self._before = [0, *accumulate(last - first + 1 for first, last in merged)]

    def count(self, first: int, last: int) -> int:
        """How many of the sequences from `first` to `last` are in it."""
        return self._up_to(last) - self._up_to(first - 1) if last >= first else 0

    def _up_to(self, last: int) -> int:
        at = bisect_right(self._firsts, last)
        if not at:
            return 0
        return self._before[at] - max(0, self._lasts[at - 1] - last)


class Group(NamedTuple):
    """Things that are missing, which stood somewhere from `first` to `last`."""

    first: int
    last: int
    things: int


def unexcused(groups: Sequence[Group], gaps: Sequence[Closed]) -> list[int]:
    """How many of each group no gap has room for. Each sequence of a gap has room for one thing; they are given out so
    that as few as possible are left: of the groups that a sequence may belong to, the one that ends first has it."""
    room = Ranges(gaps)
    left = [group.things for group in groups]
    edges = sorted({edge for group in groups for edge in (group.first, group.last + 1)})
    waiting: list[tuple[int, int]] = []
    starts = sorted(range(len(groups)), key=lambda at: groups[at].first)
    begun = 0
    for at, begin in enumerate(edges[:-1]):
        end = edges[at + 1] - 1
        while begun < len(starts) and groups[starts[begun]].first <= begin:
            heappush(waiting, (groups[starts[begun]].last, starts[begun]))
            begun += 1
        free = room.count(begin, end)
        while free and waiting:
            last, group = waiting[0]
            if last < begin or not left[group]:
                heappop(waiting)
                continue
            taken = min(free, left[group])
            left[group] -= taken
            free -= taken
    return left
