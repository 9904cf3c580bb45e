"""What an offset is, what a loss is, and how a range is cut into partitions. Pure: no clock, no I/O.

An offset is the *next* stream sequence, with its witnesses: the stream's creation time, the time of the last message
before the offset, and the incarnation once a person has accepted that the stream went back. Sequences alone prove
nothing: a stream that was deleted and made anew counts from 1 again, and one that was restored to an older state keeps
its creation time and hands its sequences out a second time.

    found                                                    it is
    another creation time                                    recreated
    the last sequence is below the last one read             went back
    the message before the offset has another time           went back (its sequence was given out again)
    a newer incarnation, and that message is gone            went back (nothing shows that the offset is older)
    the first sequence is above the offset                   trimmed: by age, size, count, or a purge
    the same, on a stream with limits per subject or TTL     limit: what the stream was made to do, no loss
    the same, on a topic of the broker or its records        limit: the broker removes what is settled
    a sequence is missing between two others                 deleted: legitimate, no loss

Messages before the offset may be gone: they were read. Everything else stops the query, unless it was told to go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Literal

from oncewire._ground.contracts.topics import is_trimmed_by_broker
from oncewire._ground.errors import Corrupt, Refused
from oncewire._ground.jetstream.protocol import parse_time_ns

PARTITION_RECORDS = 250_000
"""One partition's share of a range. A constant, so that a range that is read again is cut the same way."""
ZERO_TIME = "0001-01-01T00:00:00Z"
REMOVES = ("retention", "discard", "max_age", "max_bytes", "max_msgs", "max_msgs_per_subject", "allow_msg_ttl")
"""Of a stream's configuration what removes messages."""
_NOTHING = (None, 0, -1, False, "limits")

Cause = Literal["recreated", "went back", "trimmed", "limit"]


@dataclass(frozen=True)
class Offset:
    """The next sequence to read, and what must still be true of the stream when it is read."""

    sequence: int
    created: str
    timestamp: str = ""
    """Of the last message before `sequence`; '' when there was none."""
    is_earliest: bool = False
    """Begin with whatever is oldest when the reading begins: what was trimmed until then was never asked for."""
    incarnation: int = 0
    """How often it had been accepted that the stream went back."""

    def to_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"sequence": self.sequence, "created": self.created, "timestamp": self.timestamp}
        shown |= {"earliest": True} if self.is_earliest else {}
        return shown | ({"incarnation": self.incarnation} if self.incarnation else {})

    @classmethod
    def from_dict(cls, shown: dict[str, Any]) -> Offset:
        try:
            return cls(
                int(shown["sequence"]),
                str(shown["created"]),
                str(shown.get("timestamp", "")),
                bool(shown.get("earliest", False)),
                int(shown.get("incarnation", 0)),
            )
        except (KeyError, TypeError, ValueError):
            raise Corrupt(
                f"the checkpoint holds an offset that is none of this source's: {shown!r}",
                hint="Was the checkpoint written by another source? Use a checkpoint location of its own.",
            ) from None


@dataclass(frozen=True)
class Facts:
    """What the leader says about the stream."""

    name: str
    created: str
    first: int
    """The first sequence that is stored; one above the last when nothing is."""
    last: int
    last_time: str
    messages: int
    size_bytes: int
    retention: str
    has_subject_limits: bool
    """Per-subject limits or message TTL, or the broker, which removes what is settled: messages go from the middle and
    the head by design."""
    incarnation: int = 0
    deleted: int = 0
    """Sequences between the first and the last one that are not stored."""
    limits: str = "{}"
    """What of the configuration removes messages, as JSON."""

    @property
    def next(self) -> int:
        return self.last + 1

    @property
    def end(self) -> Offset:
        """Behind everything that is stored now."""
        return self.offset(self.next, self.last_time)

    def offset(self, sequence: int, time_before: str) -> Offset:
        return Offset(sequence, self.created, time_before, incarnation=self.incarnation)

    @classmethod
    def of(cls, info: dict[str, Any]) -> Facts:
        state, config = info["state"], info["config"]
        last_time = str(state.get("last_ts") or ZERO_TIME)
        return cls(
            name=config["name"],
            created=info["created"],
            first=max(1, state["first_seq"] if state["messages"] else state["last_seq"] + 1),
            last=state["last_seq"],
            last_time="" if last_time.startswith(ZERO_TIME[:10]) else show_time(parse_time_ns(last_time)),
            messages=state["messages"],
            size_bytes=state["bytes"],
            retention=config.get("retention", "limits"),
            has_subject_limits=config.get("max_msgs_per_subject", 0) > 0
            or bool(config.get("allow_msg_ttl"))
            or is_trimmed_by_broker(config["name"]),
            deleted=int(state.get("num_deleted", 0)),
            limits=json.dumps({name: config[name] for name in REMOVES if config.get(name) not in _NOTHING}),
        )


@dataclass(frozen=True)
class Loss:
    """A range that cannot be read any more: [first, end) in sequences, and why."""

    stream: str
    cause: Cause
    first: int
    end: int
    detail: str

    @property
    def is_by_design(self) -> bool:
        return self.cause == "limit"

    @property
    def sentence(self) -> str:
        if self.cause in ("trimmed", "limit"):
            return f"sequences {self.first} to {self.end - 1} of stream {self.stream} are gone: {self.detail}"
        return f"stream {self.stream} is not the one that was read before: {self.detail}"

    def error(self) -> Corrupt:
        return Corrupt(
            self.sentence,
            hint="Find out whether the loss matters. To go on behind it, restart once with failOnDataLoss=false; "
            "to read everything that is there, use a new checkpoint location with startingOffsets=earliest.",
        )


def refuse_queue(facts: Facts) -> None:
    """A work queue gives each message to one worker and then forgets it: nothing is left for a second reader."""
    if facts.retention == "workqueue":
        raise Refused(
            f"stream {facts.name} is a work queue, and a work queue cannot be read: each message belongs to the one "
            "worker that takes it and is deleted when that worker acks, so a second reader would take work away or "
            "find nothing, and mirroring or sourcing the queue drains it",
            hint="Read what the agents did from the stream LEDGER, or declare this stream with retention = "
            '"limits" in its catalog file: one durable per agent still gives each message to one worker.',
        )


def find_loss(start: Offset, facts: Facts, time_before: str | None) -> Loss | None:
    """What is wrong with going on from `start`; `time_before` is that of the message before it, None if it is gone."""
    if start.created != facts.created:
        detail = f"it was created at {facts.created}, the checkpoint knows one from {start.created}"
        return Loss(facts.name, "recreated", start.sequence, facts.next, detail)
    if facts.last < start.sequence - 1:
        detail = f"it ends at sequence {facts.last}, and {start.sequence - 1} was read"
        return Loss(facts.name, "went back", facts.next, start.sequence, detail)
    if start.timestamp and time_before is not None and time_before != start.timestamp:
        detail = f"message {start.sequence - 1} has the time {time_before}, the one that was read had {start.timestamp}"
        return Loss(facts.name, "went back", start.sequence, facts.next, detail)
    if start.timestamp and time_before is None and start.incarnation != facts.incarnation:
        detail = f"its incarnation is {facts.incarnation}, the checkpoint knows {start.incarnation}: it went back, and "
        detail += f"message {start.sequence - 1}, which was read, is not there to show that this was later"
        return Loss(facts.name, "went back", start.sequence, facts.next, detail)
    if facts.first > start.sequence and not start.is_earliest:
        return trimmed(facts, start.sequence, facts.first)
    return None


def trimmed(facts: Facts, first: int, end: int) -> Loss:
    """Messages that were there to be read and are not any more."""
    if is_trimmed_by_broker(facts.name):
        return Loss(facts.name, "limit", first, end, "the broker removed them: settled by all groups, or deleted")
    if facts.has_subject_limits and facts.messages:
        return Loss(facts.name, "limit", first, end, "its limits per subject or TTL removed them")
    detail = f"it now begins at {facts.first}; age, size or count limits or a purge removed them before they were read"
    return Loss(facts.name, "trimmed", first, end, detail)


def records_limit(facts: Facts, records_max: int, bytes_max: int) -> int:
    """How many sequences one trigger may take; 0 for all. Bytes are counted by the stream's mean message size."""
    limits = [records_max] if records_max else []
    if bytes_max:
        mean = max(1, facts.size_bytes // max(1, facts.messages))
        limits.append(max(1, bytes_max // mean))
    return min(limits) if limits else 0


def partition_count(records: int, partitions_min: int) -> int:
    return min(max(-(-records // PARTITION_RECORDS), partitions_min), max(records, 1))


def cut(first: int, end: int, count: int) -> list[tuple[int, int]]:
    """[first, end) in `count` parts that differ by one at most."""
    size = end - first
    edges = [first + size * part // count for part in range(count + 1)]
    return [(a, b) for a, b in pairwise(edges) if b > a]


def unread(gaps: Sequence[tuple[int, int]], facts: Facts) -> Loss | None:
    """The loss among what did not come: whatever lies below the stream's first sequence was trimmed, not deleted."""
    lost = [(first, min(end, facts.first)) for first, end in gaps if first < facts.first]
    return trimmed(facts, lost[0][0], lost[-1][1]) if lost else None


def backlog(progress: Mapping[str, Any]) -> int:
    """How many sequences a query had not read yet, from `StreamingQuery.lastProgress` (Spark 4.2 and newer)."""
    total = 0
    for source in progress["sources"]:
        latest, end = (_sequence(source[name]) for name in ("latestOffset", "endOffset"))
        total += max(0, latest - end) if latest and end else 0
    return total


def _sequence(shown: object) -> int:
    """Spark shows an offset as a text; 0 for what is none of ours."""
    with suppress(ValueError):
        shown = json.loads(shown) if isinstance(shown, str) else shown
    return int(shown.get("sequence", 0)) if isinstance(shown, dict) else 0


def show_time(timestamp_ns: int) -> str:
    """RFC 3339 in UTC with all nine digits, so that equal times have equal texts."""
    seconds, nanos = divmod(timestamp_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"
