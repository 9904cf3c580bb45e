"""The verdict of an audit: what was looked at, what was counted, what is wrong. As values, text and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

from oncewire._ground.contracts.topics import STREAM_PREFIXES

CHECKS: Final = {
    "files": "every file of the tables is there, byte for byte",
    "tables": "nothing but the pipeline has changed the tables",
    "known": "every stream and every chain that an audit has seen is there, as far as it was",
    "balance": "the tables hold what silver's batches say they do",
    "sequences": "every sequence is in bronze once, or in a known gap",
    "chain": "blocks chain without a hole",
    "outcomes": "every input has one outcome, or is in progress",
    "sums": "the inputs' bytes hash to the blocks' sums",
    "state": "the state hash follows from the inputs",
    "effects": "every confirmed effect is in bronze",
    "silver": "every envelope is in silver once, in every column as it follows from bronze",
    "readers": "silver's reader and the audit's own read the same",
    "quarantine": "what silver refuses is in quarantine, with the reason",
    "gold": "the counts of gold follow from silver",
    "letters": "every dead letter has its origin",
    "settlements": "every message of a topic has an outcome per group, or is pending",
}
PENDING: Final = ("pending", "in_progress")
"""Counts of what lies above the cut or is not settled yet: not wrong, not proven either."""


class Stop(msgspec.Struct, frozen=True):
    """Up to where a stream was looked at."""

    stream: str
    created_ns: int
    incarnation: int
    sequence: int
    pending: int = 0
    """What bronze has taken in since."""


class Head(msgspec.Struct, frozen=True):
    """A block that stood at the end of a chain."""

    chain: str
    number: int
    hash: str


class Outside(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version of a table that was not the pipeline's. Rows that nobody can count any more are None."""

    table: str
    version: int
    at_ms: int
    operation: str
    rows_removed: int | None
    rows_added: int
    is_accepted: bool = False
    """A person has looked at it."""


class Log(msgspec.Struct, frozen=True):
    """The end of a table's log. A table that is made anew has another id, a log that was put back another entry."""

    table: str
    id: str
    version: int
    entry: str = ""
    """Hash of the last entry; empty where the log no longer has it."""


class Known(msgspec.Struct, frozen=True):
    """What audits have seen of a lake. The next one must find all of it."""

    at_ms: int = 0
    streams: list[Stop] = []
    chains: list[Head] = []
    logs: list[Log] = []
    outside: list[Outside] = []


class Count(msgspec.Struct, frozen=True, omit_defaults=True):
    """So many of a kind. `of` is the stream or the agent; for what is in progress also where it lies."""

    check: str
    name: str
    of: str
    count: int
    first: int = 0
    last: int = 0


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something wrong (or worth a note), with its place."""

    check: str
    problem: str
    stream: str = ""
    first: int = 0
    last: int = 0
    chain: str = ""
    block: int = 0
    id: str = ""
    detail: str = ""
    count: int = 0
    table: str = ""

    @property
    def sentence(self) -> str:
        where = [self.table] if self.table else []
        if self.stream:
            span = f" {self.first}" if self.first else ""
            where.append(self.stream + span + (f" to {self.last}" if self.last > self.first > 0 else ""))
        if self.chain:
            where.append(self.chain + (f" block {self.block}" if self.block else ""))
        if self.id:
            where.append(self.id)
        return f"{self.check}: {self.problem.replace('_', ' ')}: {', '.join(where)}" + (
            f": {self.detail}" if self.detail else ""
        )


class Chain(msgspec.Struct, frozen=True):
    """An agent's blocks up to where they have no hole."""

    chain: str
    last: int
    confirmed: int
    """Up to this block all effects lie below the cut."""


class Verdict(msgspec.Struct, frozen=True):
    """What an audit says of the lake at its cut."""

    is_good: bool
    at_ms: int
    took_s: float
    cut: list[Stop]
    versions: dict[str, int]
    chains: list[Chain]
    counts: list[Count]
    errors: int
    findings: list[Finding]
    """What is wrong, as far as it is listed."""
    notes: list[Finding] = []
    known: Known = Known()
    """What the next audit must find."""
    unread: int = 0
    """Files that could not be read: what stood in them was not audited."""
    seed: int = 0
    one_in: int = 1
    """One message in so many was read by the audit's own reader too, picked by the seed."""
    compared_ms: list[int] = []
    """When the audits ran that this one was compared with."""

    def counted(self, check: str, name: str, of: str | None = None) -> int:
        return sum(
            one.count for one in self.counts if (one.check, one.name) == (check, name) and (of is None or one.of == of)
        )

    @property
    def pending(self) -> int:
        """Inputs in progress, and what blocks say about positions above the cut."""
        return sum(one.count for one in self.counts if one.name in PENDING)


def shown(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"


def write_verdict(verdict: Verdict) -> bytes:
    return msgspec.json.encode(verdict)


def read_verdict(data: bytes | str) -> Verdict:
    return msgspec.json.decode(data, type=Verdict)


def lines(verdict: Verdict) -> Iterable[str]:
    """For people."""
    word = "good" if verdict.is_good else f"{verdict.errors} findings"
    word += f", {verdict.unread} files could not be read" if verdict.unread else ""
    yield f"audit: {word} ({verdict.took_s:.1f} s)"
    yield "cut:"
    topics = [stop for stop in verdict.cut if stop.stream.startswith(STREAM_PREFIXES)]
    for stop in (one for one in verdict.cut if not one.stream.startswith(STREAM_PREFIXES)):
        again = f" #{stop.incarnation}" if stop.incarnation else ""
        later = f", {stop.pending:,} newer ones wait" if stop.pending else ""
        yield f"  {stop.stream}{again} up to {stop.sequence:,}{later}"
    if topics:
        yield f"  {len(topics):,} topics up to {sum(stop.sequence for stop in topics):,} messages"
    for chain in verdict.chains:
        yield f"  {chain.chain} up to block {chain.last:,}, effects up to block {chain.confirmed:,}"
    times = ", ".join(f"{shown(at_ms)}" for at_ms in sorted(set(verdict.compared_ms)))
    yield f"compared with the audits of {times}" if times else "compared with no earlier audit"
    if verdict.one_in > 1:
        yield f"one message in {verdict.one_in:,} was read twice, by the seed {verdict.seed} (--deep reads all twice)"
    for check, promise in CHECKS.items():
        wrong = sum(1 for found in verdict.findings if found.check == check)
        told: dict[str, int] = {}
        for one in verdict.counts:
            if one.check == check:
                told[one.name] = told.get(one.name, 0) + one.count
        shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(told.items()))
        yield f"{'✗' if wrong else '✓'} {promise}" + (f": {shown}" if shown else "")
    for found in verdict.findings:
        yield f"  ✗ {found.sentence}"
    if verdict.errors > len(verdict.findings):
        yield f"  … and {verdict.errors - len(verdict.findings):,} more"
    for note in verdict.notes:
        yield f"  · {note.sentence}"
