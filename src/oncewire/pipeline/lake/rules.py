"""What may be added to the lake, and what is missing from it. Pure: no clock, no I/O.

Bronze is exactly once by position. Each lifetime of a stream has a transaction id whose version is the last sequence of
the last range that was committed, so a range that comes again, from whichever attempt, is known:

    range against what was reached                     step
    begins right behind it                             append
    ends at or below it                                skip: it is there
    begins at or below it, ends above                  refused: the checkpoint is not the one that wrote this lake
    begins further behind                              refused: a range is missing between the two

Sequences inside a range that did not come are gaps. They are found by what was written, never by what was expected, and
the stream's leader is asked for each a second time, by another way (missing.py). What it says is kept with the gap, and
the cause follows from it:

    the leader says                                              cause
    they lie below the first sequence, at the lake's first look  before
    they lie below the first sequence                            trimmed; limit where the stream removes by design
    nothing is stored there, and it counts as many deletions     deleted; limit where the stream removes by design
    (a later incarnation begins behind them)                     earlier: the numbers are those of the one before
    anything else, or nobody was asked                           unknown: that excuses nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

from oncewire._ground.errors import Conflict, Corrupt
from oncewire.pipeline.tables import Lifetime

Closed = tuple[int, int]
"""A closed range of sequences or versions."""

BEFORE: Final = "before"
DELETED: Final = "deleted"
LIMIT: Final = "limit"
TRIMMED: Final = "trimmed"
EARLIER: Final = "earlier"
UNKNOWN: Final = "unknown"
LAST_SEQUENCE: Final = 2**63 - 1


class Step(StrEnum):
    """What to do with a range."""

    APPEND = "append"
    SKIP = "skip"


@dataclass(frozen=True)
class Span:
    """A range of one lifetime of a stream. `first` is 0 where it begins with whatever the stream begins with."""

    lifetime: Lifetime
    first: int
    last: int

    @property
    def shown(self) -> str:
        return f"sequences {self.first or 'from the beginning'} to {self.last} of stream {self.lifetime[0]}"


@dataclass(frozen=True)
class Written:
    """A file that an executor wrote: its path below the table, and what the log says about it."""

    path: str
    size_bytes: int
    rows: int
    stats: str
    date: str = ""
    """Its partition, '' in a table without partitions."""
    runs: tuple[Closed, ...] = ()
    """The sequences that it holds, for bronze."""


@dataclass(frozen=True)
class Second:
    """What the leader said when it was asked a second time for ranges that did not come: that nothing is stored in
    them, and how the stream stood at that moment."""

    asked_at_ms: int
    first_sequence: int
    last_sequence: int
    messages: int
    deleted: int
    """Sequences between the first and the last one that the server counts as deleted."""
    limits: str
    """What of the stream's configuration removes messages, as JSON."""
    removes_inside: bool
    """Whether messages leave from between others by design."""
    ranges: int
    sequences: int
    """How many ranges were asked for, and how many sequences in all."""
    next_stored: int
    """The next sequence that is stored behind the last range; 0 where nothing is."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, shown: Mapping[str, Any]) -> Second:
        return cls(**shown)


@dataclass(frozen=True)
class Gap:
    """A closed range of sequences that bronze does not have, and what the leader said about it."""

    lifetime: Lifetime
    first: int
    last: int
    cause: str
    detail: str = ""
    second: Second | None = None
    next_stored: int = 0


def admit(span: Span, reached: int | None) -> Step:
    """Whether a range is appended or is there already; Corrupt where neither can be said."""
    if reached is None:
        if span.first > 1:
            raise _refused(span, "and the lake has nothing of it: what came before is missing")
        return Step.APPEND
    if span.last <= reached:
        return Step.SKIP
    if span.first == reached + 1:
        return Step.APPEND
    if span.first <= reached:
        raise _refused(span, f"and the lake has it up to {reached}: the two overlap")
    raise _refused(span, f"and the lake has it up to {reached}: what lies between is missing")


def _refused(span: Span, why: str) -> Corrupt:
    return Corrupt(
        f"{span.shown} were read, {why}",
        hint="The checkpoint does not belong to this lake. "
        f"`oncewire pipeline backfill {span.lifetime[0]}` goes on from what the lake has.",
    )


def check_runs(span: Span, files: Sequence[Written]) -> tuple[Closed, ...]:
    """The sequences of a range in order. Corrupt when one stands twice or outside: then nothing may be committed."""
    runs = tuple(sorted(run for file in files for run in file.runs))
    for (_, last), (first, _) in pairwise(runs):
        if first <= last:
            raise Corrupt(f"sequence {first} of {span.lifetime[0]} was written twice in one batch")
    if runs and (runs[0][0] < max(span.first, 1) or runs[-1][1] > span.last):
        raise Corrupt(f"sequences {runs[0][0]} to {runs[-1][1]} were written for {span.shown}")
    if sum(last - first + 1 for first, last in runs) != sum(file.rows for file in files):
        raise Corrupt(f"the files for {span.shown} do not hold what they were written for")
    return runs


def missing(span: Span, runs: Iterable[Closed]) -> list[Closed]:
    """What of a range is not among the sequences that were written."""
    found: list[Closed] = []
    at = span.first or 1
    for first, last in runs:
        if first > at:
            found.append((at, first - 1))
        at = last + 1
    if at <= span.last:
        found.append((at, span.last))
    return found


def asked(span: Span, ranges: Sequence[Closed]) -> list[Closed]:
    """The ranges that the leader is asked for: not the numbers of an earlier incarnation, whose messages it may still
    have."""
    return [one for one in ranges if not _is_earlier(span, one)]


def _is_earlier(span: Span, range_: Closed) -> bool:
    return span.lifetime[2] > 0 and span.first == 0 and range_[0] == 1


def find_gaps(span: Span, runs: Iterable[Closed], second: Second | None, *, is_loss_accepted: bool) -> list[Gap]:
    """What a range does not have, each with its cause. Where the leader was asked for anything else than what is
    missing now, its answer counts for nothing."""
    ranges = missing(span, runs)
    wanted = asked(span, ranges)
    if second is not None and (second.ranges, second.sequences) != (len(wanted), sizes(wanted)):
        second = None
    inside = sizes(one for one in wanted if second is not None and one[1] >= second.first_sequence)
    detail = "the loss was accepted" if is_loss_accepted else ""
    found = []
    for first, last in ranges:
        is_last = (first, last) == ranges[-1]
        behind = second.next_stored if second is not None and is_last else last + 1 if second is not None else 0
        cause = _cause(span, (first, last), second, inside)
        found.append(Gap(span.lifetime, first, last, cause, detail, second, behind))
    return found


def span_facts(span: Span, rows: int, second: Second | None, *, is_loss_accepted: bool) -> dict[str, Any]:
    """What a version of bronze says of a range: what `find_gaps` needs again, when silver takes the version in."""
    name, created_ns, incarnation = span.lifetime
    return {
        "stream": name, "created_ns": created_ns, "incarnation": incarnation, "first": span.first, "last": span.last,
        "accepted": is_loss_accepted, "gaps": rows != span.last - max(span.first, 1) + 1,
        "second": second.to_dict() if second is not None else None,
    }  # fmt: skip


def sizes(ranges: Iterable[Closed]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _cause(span: Span, range_: Closed, second: Second | None, inside: int) -> str:
    first, last = range_
    if _is_earlier(span, range_):
        return EARLIER
    if second is None or last > second.last_sequence:
        return UNKNOWN
    if last < second.first_sequence:
        is_new = span.first == 0 and first == 1
        return BEFORE if is_new else LIMIT if second.removes_inside else TRIMMED
    if first < second.first_sequence or second.deleted < inside:
        return UNKNOWN
    return LIMIT if second.removes_inside else DELETED


@dataclass(frozen=True)
class Balance:
    """What became of the rows of one family in a batch. `family` is '' for subjects that no contract names."""

    family: str
    rows_in: int
    rows_out: int
    duplicates: int
    quarantined: int

    def check(self) -> None:
        if self.rows_in != self.rows_out + self.duplicates + self.quarantined:
            raise Corrupt(
                f"a batch of family {self.family or 'none'} does not balance: {self.rows_in} rows in, "
                f"{self.rows_out} out, {self.duplicates} duplicates, {self.quarantined} to quarantine",
                hint="Nothing of it was committed. This is a bug: please report it.",
            )


def check_begun(name: str, first: int, last: int, reached: int | None) -> None:
    """Conflict when a table stands where no batch of ours left it: another pipeline derives silver too, and by another
    cut of bronze's versions, so that rows would come twice. That it has just this batch is fine: it is the same."""
    if reached is not None and first <= reached != last:
        raise Conflict(
            f"the table {name} has version {reached} of bronze, and versions {first} to {last} are at hand: "
            "another pipeline works on this lake",
            hint="Only one pipeline may run on a lake. Stop one of them.",
        )


def next_target(begun: Iterable[int], newest: int) -> int:
    """Up to which version of bronze the next batch goes. One that only some tables have (`begun`) is first completed
    exactly as it was begun, since what is committed of it stays."""
    return min(begun, default=newest)
