"""What an audit concludes from the records of one partition of a topic, in order. Pure.

Each record names the one before it, and the first one of an owner says that the partition was taken: so nothing can be
put between two records, and none can be taken out, without a trace.

    begins_later   the oldest record in the lake names one before it, which was gone when the lake began
    missing        a record is named and not in the lake
    in_gap         the same, within a known gap: the broker removes records that snapshots have covered
    forked         two records name the same one before them
    stale_owner    written by a node that had not taken the partition

A trim says that all groups that count have settled everything up to an offset. A group counts as long as it gave a sign
of life within `idle_ms`; one that is gone without having settled anything does not. So below a trim, each group that
was alive has an outcome for each message: those ranges are `alive` results. Where records are missing nothing can be
said: then there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from oncewire._ground.contracts.topics import RECORDS
from oncewire.pipeline.auditing.rules import Result

Key = tuple[int, int]
"""A topic's number and a partition."""


class Record(NamedTuple):
    """A record as the walk sees it. `after` is None when it went in the same batch as the one before."""

    number: int
    partition: int
    sequence: int
    created_ns: int
    incarnation: int
    at_ms: int
    name: str
    """Of the topic, for people."""
    owner: str
    taken: bool
    after: int | None
    events: Sequence[Mapping[str, Any]]


class _Group:
    """A group in a partition: up to where trims are accounted for, and its last sign of life."""

    def __init__(self, floor: int, seen_ms: int) -> None:
        self.floor = floor
        self.seen_ms = seen_ms
        self.ranges: list[tuple[int, int]] = []
        """Offsets that it must have an outcome for: above the first, up to the second."""


class _Partition:
    """The walk over one partition."""

    def __init__(self, first: Record, idle_ms: int, gaps: Sequence[tuple[int, int]]) -> None:
        self._idle_ms = idle_ms
        self._gaps = gaps
        self._before: Record | None = None
        self._owner = ""
        self._is_whole = True
        self._trimmed = -1
        self._groups: dict[str, _Group] = {}
        self._first = first

    def take(self, record: Record) -> Iterator[Result]:
        yield from self._follow(record)
        if record.taken:
            self._owner = record.owner
        elif self._owner and record.owner != self._owner:
            text = f"{record.owner} wrote it, and {self._owner} has the partition"
            yield _about(record, "error", "stale_owner", detail=text, amount=1)
        for event in record.events:
            self._event(record, event)
        self._before = record

    def _follow(self, record: Record) -> Iterator[Result]:
        before = self._before
        if before is None:
            if record.after:
                self._is_whole = False
                text = f"the oldest record in the lake follows {record.after}"
                yield _about(record, "note", "begins_later", detail=text)
            return
        named = record.after if record.after is not None else record.sequence - 1
        if named == before.sequence:
            return
        self._is_whole = False
        if named < before.sequence:
            text = f"it follows record {named}, and so does record {before.sequence}"
            yield _about(record, "error", "forked", detail=text, amount=1)
        elif any(first <= named <= last for first, last in self._gaps):
            yield _about(record, "note", "in_gap", detail=f"record {named} stood in a known gap")
        else:
            text = f"record {named}, which {record.sequence} follows, is not in the lake"
            yield _about(record, "error", "missing", first=named, last=named, detail=text, amount=1)

    def _event(self, record: Record, event: Mapping[str, Any]) -> None:
        if event["kind"] == "trimmed":
            self._trim(record, event["offset"])
            return
        if event["kind"] == "group_gone":  # it had settled nothing, and nobody read it
            self._groups.pop(event["group"], None)
            return
        group = self._groups.get(event["group"])
        if group is None:
            group = self._groups[event["group"]] = _Group(self._trimmed, 0)
        group.seen_ms = max(group.seen_ms, event["at_ms"] or record.at_ms)

    def _trim(self, record: Record, offset: int) -> None:
        """Ranges that touch are one: a group in use has a single one, however many trims there were."""
        for group in self._groups.values():
            if record.at_ms - group.seen_ms <= self._idle_ms and offset > group.floor:
                if group.ranges and group.ranges[-1][1] == group.floor:
                    group.ranges[-1] = (group.ranges[-1][0], offset)
                else:
                    group.ranges.append((group.floor, offset))
            group.floor = max(group.floor, offset)
        self._trimmed = max(self._trimmed, offset)

    @property
    def _place(self) -> dict[str, Any]:
        """Topic number and partition, for what is joined with messages."""
        return {"block": self._first.number, "position": str(self._first.partition).encode()}

    def end(self) -> Iterator[Result]:
        if not self._is_whole:
            yield _about(self._first, "count", "unproven", amount=1, **self._place)
            return
        for name, group in sorted(self._groups.items()):
            for above, last in group.ranges:
                yield _about(self._first, "alive", "", id=name, first=above + 1, last=last, **self._place)


def _about(record: Record, what: str, problem: str, **more: Any) -> Result:
    """Named by topic and partition, for people."""
    told = {"first": record.sequence, "last": record.sequence} | more
    return Result(
        what, "settlements", problem, RECORDS, record.created_ns, record.incarnation,
        chain=f"{record.name}/{record.partition}", **told,
    )  # fmt: skip


def walk(records: Iterable[Record], idle_ms: int, gaps: Sequence[tuple[int, int]]) -> Iterator[Result]:
    """Records in order of topic number, partition and sequence."""
    at: Key | None = None
    partition: _Partition | None = None
    for record in records:
        key = (record.number, record.partition)
        if key != at:
            if partition is not None:
                yield from partition.end()
            at, partition = key, _Partition(record, idle_ms, gaps)
        assert partition is not None
        yield from partition.take(record)
    if partition is not None:
        yield from partition.end()
