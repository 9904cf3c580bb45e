"""What a topology must be, proved from the declaration alone. Pure: no server is asked.

Errors are what would break a promise: a message that no stream or two streams take, a command that two workers get, a
durable that cannot be trusted, a name that would lose its position. Warnings are limits that drop data in silence.
The server checks few of these: it takes a filter outside its stream, and it lets a mirror drain a work queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from oncewire._ground.contracts import subjects
from oncewire._ground.contracts.subjects import READER_PREFIX
from oncewire._ground.errors import ContractViolation
from oncewire._ground.topology.findings import Finding, Severity
from oncewire._ground.topology.model import (
    BUCKET_PREFIX,
    EVERY,
    SERVICE_STREAMS,
    Consumer,
    Service,
    Stream,
    Topology,
)
from oncewire._ground.topology.units import show_bytes, show_count, show_duration
from oncewire._ground.users import DEVELOPER, MONITOR, OPERATOR

NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
DLQ = "dlq.>"
DLQ_SERVICE = "dlq"
QUERIES = "sr.queries.>"

WRITES = ("publishes", "asks", "makes_streams")
"""The words of a service that let it publish."""
LAST_VALUE = 1
"""Messages kept per subject where only the newest counts: dropping the others is what it is for."""


def lint(topology: Topology) -> list[Finding]:
    """All findings, errors first, in the order of the declaration."""
    found = [
        *_names(topology),
        *_released(topology),
        *_captured(topology),
        *_overlapping(topology),
        *_copies(topology),
        *_one_reader(topology),
        *_dead_letter_writers(topology),
        *_reserved(topology),
        *_services(topology),
    ]
    for stream in topology.streams:
        found += _Stream(topology, stream).findings()
    for consumer in topology.consumers:
        found += _Consumer(topology, consumer).findings()
    return sorted(found, key=lambda finding: finding.severity is not Severity.ERROR)


def _error(code: str, place: str, message: str, remedy: str) -> Finding:
    return Finding(code=code, place=place, message=message, remedy=remedy)


def _warning(code: str, place: str, message: str, remedy: str) -> Finding:
    return Finding(severity=Severity.WARNING, code=code, place=place, message=message, remedy=remedy)


def _names(topology: Topology) -> Iterator[Finding]:
    named = [(stream_path(one), one.name) for one in topology.streams]
    named += [(consumer_path(one), one.name) for one in topology.consumers]
    named += [(("services", one.name), one.name) for one in topology.services]
    for path, name in named:
        if not NAME.fullmatch(name) or name == BUCKET_PREFIX:
            yield _error(
                "illegal-name",
                topology.place(*path),
                f"{name[:140]!r} is not a legal name",
                "Use 1 to 128 letters, digits, '-' or '_'.",
            )
    for one, other in combinations(topology.streams, 2):
        if one.name == other.name:
            yield _error(
                "same-name", topology.place(*stream_path(other)), f"{other.name} is declared twice", "Rename one."
            )


def stream_path(stream: Stream) -> tuple[str, ...]:
    if stream.is_bucket:
        return "buckets", stream.key.removeprefix(BUCKET_PREFIX)
    return "streams", stream.key


def consumer_path(consumer: Consumer) -> tuple[str, ...]:
    return "consumers", consumer.stream_key, consumer.name


def _released(topology: Topology) -> Iterator[Finding]:
    """Renaming is removing: the new name starts from the beginning, the old one keeps its messages waiting."""
    declared = {one.key for one in topology.streams}
    for name in topology.released_streams:
        if name not in declared:
            yield _gone(topology, "streams", name, "its messages are left behind")
    declared = {f"{one.stream_key}/{one.name}" for one in topology.consumers}
    for name in topology.released_consumers:
        if name not in declared:
            yield _gone(topology, "consumers", name, "a new name starts again from the first message")


def _gone(topology: Topology, kind: str, name: str, why: str) -> Finding:
    return _error(
        "name-not-stable",
        topology.place("released", kind, name),
        f"{name} is released and no longer declared: {why}",
        "Names are stable: declare it again under its old name.",
    )


def _captured(topology: Topology) -> Iterator[Finding]:
    """Every subject that a contract names is stored, and by one stream."""
    for entry in topology.contracts:
        takers = [one for one in topology.streams if any(subjects.overlaps(own, entry.pattern) for own in one.subjects)]
        if any(_shared(one, other) for one, other in combinations(takers, 2)):
            continue  # told by _overlapping, once for the two streams
        if len(takers) == 1 and takers[0].captures(entry.pattern):
            continue
        place = topology.place(*stream_path(takers[-1]), "subjects") if takers else "contracts"
        how = f"captured only in parts, by {' and '.join(one.name for one in takers)}" if takers else "captured by none"
        message = f"of the subjects that the contracts name, {entry.pattern} is {how}"
        yield _error("not-captured", place, message, "Let one stream capture all of it: what is left out is lost.")


def _overlapping(topology: Topology) -> Iterator[Finding]:
    for one, other in combinations(topology.streams, 2):
        shared = _shared(one, other)
        if shared:
            place = topology.place(*stream_path(other), "subjects")
            message = f"{shared[1]} overlaps {shared[0]} of {one.name}"
            yield _error("captured-twice", place, message, "A subject belongs to one stream: take it out of one.")


def _shared(one: Stream, other: Stream) -> tuple[str, str] | None:
    both = ((a, b) for a in one.subjects for b in other.subjects if subjects.overlaps(a, b))
    return next(both, None)


def _copies(topology: Topology) -> Iterator[Finding]:
    """A mirror or source of a work queue acknowledges what it copies: the queue is drained, its workers get nothing."""
    by_key = {one.key: one for one in topology.streams}
    for stream in topology.streams:
        for key, names in (("mirror", (stream.mirror,) * bool(stream.mirror)), ("sources", stream.sources)):
            for name in names:
                yield from _copy(topology, stream, key, name, by_key.get(name))


def _copy(topology: Topology, stream: Stream, key: str, name: str, origin: Stream | None) -> Iterator[Finding]:
    place = topology.place(*stream_path(stream), key)
    if origin is None:
        yield _error("unknown-stream", place, f"there is no stream {name!r}", "Name a declared stream.")
    elif origin.retention == "workqueue":
        message = f"{stream.name} copies {name}, a work queue: copying drains it"
        yield _error("copies-work-queue", place, message, 'Remove it, or give the queue retention = "limits".')
    elif stream.retention == "workqueue":
        message = f"{stream.name} is a work queue that copies {name}: a crash repeats or loses what it copied"
        yield _error("copies-into-work-queue", place, message, "Let a service read and publish instead.")


def _one_reader(topology: Topology) -> Iterator[Finding]:
    for stream in topology.streams:
        if not stream.has_one_reader:
            continue
        own = [one for one in topology.consumers if one.stream_key == stream.key]
        for one, other in combinations(own, 2):
            shared = [b for a in one.filters for b in other.filters if subjects.overlaps(a, b)]
            if shared:
                place = topology.place(*consumer_path(other), "filters")
                message = f"{shared[0]} overlaps a filter of {one.name}: on {stream.name} each message is for one"
                yield _error("filters-overlap", place, message, "Give each consumer subjects of its own.")


def _dead_letter_writers(topology: Topology) -> Iterator[Finding]:
    """Whichever word it uses: who asks on a subject, or makes streams for it, may publish there."""
    for service in topology.services:
        for key in WRITES:
            for subject in getattr(service, key):
                if service.name != DLQ_SERVICE and subjects.overlaps(subject, DLQ):
                    place = topology.place("services", service.name, key)
                    message = f"{service.name} writes {subject}: only the service {DLQ_SERVICE!r} writes {DLQ}"
                    yield _error("writes-dead-letters", place, message, "Publish to dlq_requests.* instead.")


def _reserved(topology: Topology) -> Iterator[Finding]:
    """What a service names becomes what its user may: the server's own subjects would be an operator's rights, and
    inboxes the answers to others."""
    for service in topology.services:
        for key in (*WRITES, "answers"):
            for subject in getattr(service, key):
                if _is_reserved(subject):
                    place = topology.place("services", service.name, key)
                    message = f"{subject} is or holds the server's own subjects, or inboxes"
                    yield _error("reserved-subject", place, message, "Name subjects of your own.")


def _is_reserved(subject: str) -> bool:
    first, *rest = subject.split(".")
    if first == "$KV":
        return rest[:1] in ([], ["*"], [">"])
    return (first[0] in "$*>" and first != "$SRV") or first.startswith("_INBOX")


def _services(topology: Topology) -> Iterator[Finding]:
    """What services need must be there; a wide word may not stand where one service would reach all others."""
    streams = {one.name for one in topology.streams}
    for service in topology.services:
        named = [(key, name) for key in SERVICE_STREAMS for name in getattr(service, key)]
        named += [("buckets", BUCKET_PREFIX + name) for name in service.buckets]
        for key, name in named:
            if name not in streams and not (name == EVERY and key in ("reads", "settles")):
                place = topology.place("services", service.name, key)
                yield _error("unknown-stream", place, f"there is no stream {name!r}", "Name a declared one.")
        if service.name in (OPERATOR, DEVELOPER, MONITOR):
            place = topology.place("services", service.name)
            yield _error("reserved-name", place, f"{service.name!r} is a user by itself", "Choose another name.")
        yield from _handles(topology, service)


def _handles(topology: Topology, service: Service) -> Iterator[Finding]:
    place = topology.place("services", service.name, "handles")
    if service.handles and not service.agent:
        yield _error("no-agent", place, "only an agent handles subjects", "Name it with the key agent.")
    for subject in service.handles:
        if sum(one.captures(subject) for one in topology.streams) != 1:
            yield _error("not-captured", place, f"{subject} is not held by one stream", "Mend the subject.")


class _Stream:
    """What one stream must be."""

    def __init__(self, topology: Topology, stream: Stream) -> None:
        self.topology = topology
        self.stream = stream

    def place(self, key: str) -> str:
        return self.topology.place(*stream_path(self.stream), key)

    def findings(self) -> Iterator[Finding]:
        yield from self._subjects()
        yield from self._window()
        yield from self._confirmations()
        if not self.stream.is_bucket:
            yield from self._limits()

    def _subjects(self) -> Iterator[Finding]:
        stream = self.stream
        if stream.key.startswith(BUCKET_PREFIX) and not stream.is_bucket:
            remedy = f"Declare [buckets.{stream.key.removeprefix(BUCKET_PREFIX)}] instead."
            yield _error("is-a-bucket", self.place("subjects"), f"{BUCKET_PREFIX}… is for buckets", remedy)
        if stream.mirror and stream.subjects:
            yield _error(
                "mirror-listens",
                self.place("subjects"),
                "a mirror has no subjects",
                "Remove the subjects or the mirror.",
            )
        for subject in stream.subjects:
            if _is_reserved(subject) and not subject.startswith(("$JS.EVENT.", "$KV.")):
                message = f"{subject} is or holds the server's own subjects, or inboxes"
                yield _error("reserved-subject", self.place("subjects"), message, "Name subjects of your own.")

    def _window(self) -> Iterator[Finding]:
        stream = self.stream
        if stream.max_age_ns and stream.duplicate_window_ns > stream.max_age_ns:
            window, age = show_duration(stream.duplicate_window_ns), show_duration(stream.max_age_ns)
            message = f"the duplicate window ({window}) is longer than the age ({age})"
            yield _error(
                "window-over-age", self.place("duplicate_window"), message, "Shorten the window or raise max_age."
            )
        if stream.captures(DLQ) and stream.duplicate_window_ns != stream.max_age_ns:
            message = "the duplicate window of dead letters is not their max_age: a late TERM gives a second letter"
            yield _warning("letters-repeat", self.place("duplicate_window"), message, "Set both to the same time.")

    def _confirmations(self) -> Iterator[Finding]:
        is_queries = self.stream.captures(QUERIES)
        if is_queries and not self.stream.no_ack:
            message = "requests would be answered by the stream instead of the responder"
            yield _error("queries-need-no-ack", self.place("no_ack"), message, "Set no_ack = true.")
        if self.stream.no_ack and not is_queries:
            message = "no_ack confirms nothing: publishers could not know what is stored"
            yield _error("no-ack-loses", self.place("no_ack"), message, "Remove it.")

    def _limits(self) -> Iterator[Finding]:
        stream = self.stream
        if stream.storage == "memory":
            yield _warning("in-memory", self.place("storage"), "a restart loses all messages", 'Use "file".')
        if stream.retention == "workqueue" and stream.max_age_ns:
            message = f"work that nobody did in {show_duration(stream.max_age_ns)} vanishes without an error"
            yield _warning("drops-unread", self.place("max_age"), message, "Leave max_age out.")
        if stream.discard == "new":
            return
        for key, limit, shown in (
            ("max_bytes", stream.max_bytes, show_bytes(stream.max_bytes)),
            ("max_msgs", stream.max_msgs, f"{show_count(stream.max_msgs)} messages"),
            (
                "max_msgs_per_subject",
                stream.max_msgs_per_subject,
                f"{show_count(stream.max_msgs_per_subject)} messages of a subject",
            ),
        ):
            is_last_value = key == "max_msgs_per_subject" and limit == LAST_VALUE
            if limit > 0 and not is_last_value:
                message = f"beyond {shown} {stream.name} drops its oldest messages, read or not, without an error"
                remedy = f'Raise {key} before it is reached, or set discard = "new" to refuse instead.'
                yield _warning("drops-unread", self.place(key), message, remedy)


class _Consumer:
    """What one durable must be."""

    def __init__(self, topology: Topology, consumer: Consumer) -> None:
        self.topology = topology
        self.consumer = consumer
        self.stream = next((one for one in topology.streams if one.key == consumer.stream_key), None)

    def place(self, *key: str) -> str:
        return self.topology.place(*consumer_path(self.consumer), *key)

    def findings(self) -> Iterator[Finding]:
        if self.stream is None:
            message = f"there is no stream {self.consumer.stream_key!r}"
            yield _error("unknown-stream", self.place(), message, "Declare the stream, or mend the table's name.")
        else:
            yield from self._filters(self.stream)
            yield from self._work_queue(self.stream)
        yield from self._mode()
        yield from self._services()
        yield from self._dead_letters()
        if self.consumer.name.startswith(READER_PREFIX):
            message = f"{READER_PREFIX}… is for readers that keep no position on the server"
            yield _error("reserved-name", self.place(), message, "Choose another name.")

    def _filters(self, stream: Stream) -> Iterator[Finding]:
        for one in self.consumer.filters:
            if not stream.captures(one):
                message = f"{one} lies outside {stream.name} ({', '.join(stream.subjects)})"
                yield _error("filter-outside", self.place("filters"), message, "Filter on subjects of that stream.")
        for one, other in combinations(self.consumer.filters, 2):
            if subjects.overlaps(one, other):
                message = f"{one} and {other} overlap: the server refuses that"
                yield _error("filters-overlap", self.place("filters"), message, "Keep the wider one.")

    def _work_queue(self, stream: Stream) -> Iterator[Finding]:
        if stream.retention == "workqueue" and self.consumer.deliver_policy != "all":
            message = f'on the work queue {stream.name} only deliver_policy "all" is possible'
            yield _error("work-queue-policy", self.place("deliver_policy"), message, "Remove deliver_policy.")

    def _mode(self) -> Iterator[Finding]:
        if self.consumer.ack_policy != "explicit":
            message = f"ack_policy {self.consumer.ack_policy!r} settles messages that nobody has done"
            yield _error("not-explicit", self.place("ack_policy"), message, 'Durables use "explicit".')
        if self.consumer.deliver_subject:
            message = "a push consumer cannot be shared by competing workers"
            yield _error("not-pull", self.place("deliver_subject"), message, "Durables are pulled: remove the key.")

    def _services(self) -> Iterator[Finding]:
        known = {one.name for one in self.topology.services}
        if not self.consumer.services:
            yield _error("no-service", self.place(), "names no service", 'For example services = ["worker"].')
        for name in self.consumer.services:
            if name not in known:
                message = f"there is no service {name!r}"
                yield _error("unknown-service", self.place("services"), message, f"Declare [services.{name}].")

    def _dead_letters(self) -> Iterator[Finding]:
        consumer = self.consumer
        wanted = _dlq_subject(consumer)
        if wanted is not None and consumer.dlq_subject != wanted:
            message = f"dlq_subject is {consumer.dlq_subject!r}, its dead letters go to {wanted!r}"
            yield _error("dlq-subject", self.place("dlq_subject"), message, f'Write dlq_subject = "{wanted}".')


def _dlq_subject(consumer: Consumer) -> str | None:
    """Where its dead letters go; None when that is not one subject, '' when none can come of it."""
    if consumer.max_deliver < 0:
        return ""
    if len(consumer.filters) != 1:
        return None
    if subjects.covers(DLQ, consumer.filters[0]):
        return ""
    try:
        return subjects.dlq_subject(consumer.filters[0])
    except ContractViolation:
        return None  # a wildcard: each letter goes by its message's own subject
