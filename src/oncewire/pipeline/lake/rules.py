"""What may be added to the lake, and what is missing from it. Pure: no clock, no I/O.

Bronze is exactly once by position. Each lifetime of a stream has a transaction id whose version is the last sequence of
the last range that was committed, so a range that comes again, from whichever attempt, is known:

    range against what was reached                     step
    begins right behind it                             append
    ends at or below it                                skip: it is there
    begins at or below it, ends above                  refused: the checkpoint is not the one that wrote this lake
    begins further behind                              refused: a range is missing between the two

Sequences inside a range that did not come are gaps. They are found by what was written, never by what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from oncewire._ground.errors import Conflict, Corrupt
from oncewire.pipeline.tables import Lifetime

Closed = tuple[int, int]
"""A closed range of sequences or versions."""

BEFORE: Final = "before"
DELETED: Final = "deleted"
LIMIT: Final = "limit"
TRIMMED: Final = "trimmed"


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
class Gap:
    """A closed range of sequences that bronze does not have."""

    lifetime: Lifetime
    first: int
    last: int
    cause: str
    detail: str = ""


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


def find_gaps(span: Span, runs: Iterable[Closed], *, has_limits: bool, is_loss_accepted: bool) -> list[Gap]:
    """What a range does not have. Before the first range of a stream nothing was promised, a cause of its own; what is
    missing at the beginning of a later one was trimmed, which a person has accepted."""
    found: list[Closed] = []
    at = span.first or 1
    for first, last in runs:
        if first > at:
            found.append((at, first - 1))
        at = last + 1
    if at <= span.last:
        found.append((at, span.last))
    gaps = [Gap(span.lifetime, *one, _cause(span, one[0], has_limits, is_loss_accepted)) for one in found]
    is_later = span.lifetime[2] > 0  # the numbers before a later incarnation's first are the earlier one's
    return [gap for gap in gaps if not (is_later and gap.cause == BEFORE)]


def _cause(span: Span, first: int, has_limits: bool, is_loss_accepted: bool) -> str:
    if span.first == 0 and first == 1:
        return BEFORE
    if has_limits:
        return LIMIT
    return TRIMMED if is_loss_accepted and first == span.first else DELETED


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
