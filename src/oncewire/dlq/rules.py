"""What the dead-letter service decides. Pure: what is known of a failure goes in, what to do comes out.

An event says that a message failed for a consumer: a request of an agent, an advisory of the server, or a sequence that
the sweep found given up. What follows from it:

    about DLQ or the service's own streams     counted
    a request                                  letter
    an advisory, an agent's consumer           counted: the agent hands over what it ends, and its ledger tells what
                                               never began, which it runs once more, from what did
    an advisory, a foreign consumer            letter

A letter is named by where the message stood and for whom it failed, so whatever is repeated gives the same letter, and
the stream DLQ takes it once. The order of acts: letter confirmed, then the given-up sequence acked, which
takes it out of a work queue, then the alert, then the event acked. A service that dies in between does it all again,
which changes nothing; an original that a work queue no longer has was removed after its letter was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncewire._ground.contracts import catalog, ids, inputs, letters, message, subjects
from oncewire._ground.contracts import headers as names
from oncewire._ground.errors import ContractViolation

DLQ: Final = "DLQ"
REQUESTS: Final = "DLQ_REQUESTS"
ADVISORIES: Final = "DLQ_ADVISORIES"
REPLAYS: Final = "DLQ_REPLAYS"
OWN_STREAMS: Final = frozenset({DLQ, ADVISORIES, REQUESTS, REPLAYS})
REQUESTS_CONSUMER: Final = "dlq_service_requests"
ADVISORIES_CONSUMER: Final = "dlq_service_advisories"
BAD_REQUEST: Final = "bad_request"
MAX_DELIVERIES: Final = "max_deliveries"
TERMINATED: Final = "terminated"
_TYPES = {
    "io.nats.jetstream.advisory.v1.max_deliver": MAX_DELIVERIES,
    "io.nats.jetstream.advisory.v1.terminated": TERMINATED,
}
_ACTING = ("Nats-",)
"""Headers by which the server acts: a replay has its own."""


class Failure(Struct, frozen=True, kw_only=True):
    """A message that failed for a consumer, as far as the event tells."""

    stream: str
    sequence: int
    consumer: str
    kind: str
    deliveries: int = 0
    reason: str = ""
    created_ns: int = 0
    timestamp_ns: int = 0
    subject: str = ""
    outcome: str = ""

    @property
    def place(self) -> tuple[str, str, int]:
        return self.stream, self.consumer, self.sequence


class Original(Struct, frozen=True):
    """The message itself, as a stream or a request holds it."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    timestamp_ns: int
    bytes: int = 0
    """Its size where only its place is known."""
    is_pointer: bool = False
    dropped: int = 0


class Act(StrEnum):
    """What an event leads to."""

    COUNT = "count"
    ACK = "ack"
    """It has its letter already: only the given-up sequence and the event are left to settle."""
    LETTER = "letter"


def decide(failure: Failure, *, is_agents: bool) -> Act:
    """What an advisory leads to; see the table at the head."""
    return Act.COUNT if is_agents or failure.stream in OWN_STREAMS else Act.LETTER


# ---- events


class _Advisory(Struct, frozen=True):
    type: str
    stream: str
    consumer: str
    stream_seq: int
    deliveries: int = 0
    reason: str = ""


_read_advisory = msgspec.json.Decoder(_Advisory).decode


def read_advisory(payload: bytes) -> Failure:
    """An advisory of the server, or ContractViolation."""
    try:
        told = _read_advisory(payload)
        kind = _TYPES[told.type]
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        raise ContractViolation(f"not an advisory about a delivery: {error}") from None
    _check_place(told.stream, told.consumer, told.stream_seq)
    reason = letters.one_line(told.reason)
    return Failure(
        stream=told.stream,
        sequence=told.stream_seq,
        consumer=told.consumer,
        kind=kind,
        deliveries=max(0, told.deliveries),
        reason=reason or f"{kind}: {told.deliveries} deliveries",
        outcome=TERMINATED if kind == TERMINATED else "dead",
    )


def read_request(payload: bytes, carried: Mapping[str, str]) -> tuple[Failure, Original | None]:
    """What an agent handed over, or ContractViolation. Whoever may write to the stream may have written it."""
    subject = subjects.check_subject(carried.get(letters.SUBJECT, ""), letters.SUBJECT)
    failure = Failure(
        stream=carried.get(letters.STREAM, ""),
        sequence=_number(carried, letters.SEQUENCE),
        consumer=carried.get(letters.CONSUMER, ""),
        kind="request",
        deliveries=_number(carried, letters.DELIVERIES),
        reason=letters.one_line(carried.get(letters.CAUSE, "")),
        created_ns=_number(carried, letters.CREATED),
        timestamp_ns=_number(carried, letters.TIMESTAMP),
        subject=subject,
        outcome=letters.one_line(carried.get(letters.OUTCOME, ""), letters.CAUSE_CHARS_MAX),
    )
    _check_place(failure.stream, failure.consumer, failure.sequence)
    if failure.stream in OWN_STREAMS:
        raise ContractViolation(f"a request about {failure.stream}, which has no dead letters", field=letters.STREAM)
    what = carried.get(letters.PAYLOAD, "")
    if what == letters.GONE:
        return failure, None
    is_pointer = what == letters.POINTER
    size = _number(carried, letters.BYTES) if is_pointer else len(payload)
    dropped = _number(carried, letters.HEADERS) if letters.HEADERS in carried else 0
    headers = letters.originals(carried)
    return failure, Original(subject, payload, headers, failure.timestamp_ns, size, is_pointer, dropped)


def bad_request(subject: str, payload: bytes, carried: Mapping[str, str], place: Failure) -> tuple[Failure, Original]:
    """A request that cannot be read is a failure of its own: its bytes are kept, under its own subject."""
    return place, Original(subject, payload, dict(carried), place.timestamp_ns)


def _check_place(stream: str, consumer: str, sequence: int) -> None:
    for field, name in (("stream", stream), ("consumer", consumer)):
        if not 0 < len(name) <= 255 or any(sign in " .*>/\\" or not sign.isprintable() for sign in name):
            raise ContractViolation(f"{field} is not a name: {name[:80]!r}", field=field)
    if not 0 < sequence < 1 << 63:
        raise ContractViolation(f"sequence is {sequence}", field="sequence")


def _number(carried: Mapping[str, str], name: str) -> int:
    text = carried.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ContractViolation(f"{name} is not a number: {text[:40]!r}", field=name)
    return int(text)


# ---- letters


class Limits(Struct, frozen=True):
    """What a letter may be. The server counts headers and body together."""

    payload_bytes_max: int
    headers_bytes_max: int = letters.HEADERS_BYTES_MAX


class Letter(Struct, frozen=True):
    """A letter to be published."""

    id: str
    subject: str
    payload: bytes
    headers: dict[str, str]
    failure: Failure
    cause: str
    is_pointer: bool = False
    """The original must stay where it is."""


def origin_of(failure: Failure, created_ns: int, original: Original | None) -> ids.Origin:
    """Where the message stood. What an event does not say is taken from the stream; of a message that is gone the
    time is not known."""
    timestamp_ns = original.timestamp_ns if original else failure.timestamp_ns
    return ids.Origin(failure.stream, failure.created_ns or created_ns, failure.sequence, timestamp_ns)


def letter_of(failure: Failure, original: Original | None, created_ns: int, now_ms: int, limits: Limits) -> Letter:
    """The letter for a failure; without an original it says that the payload is gone."""
    origin = origin_of(failure, created_ns, original)
    subject = original.subject if original else failure.subject
    reason = failure.reason or failure.kind
    cause = letters.cause_of(reason, failure.outcome or failure.kind)
    told = {
        letters.STREAM: failure.stream,
        letters.CREATED: str(origin.created_ns),
        letters.SEQUENCE: str(failure.sequence),
        letters.TIMESTAMP: str(origin.timestamp_ns),
        letters.CONSUMER: failure.consumer,
        letters.DELIVERIES: str(failure.deliveries),
        letters.SUBJECT: letters.one_line(subject, subjects.SUBJECT_BYTES_MAX),
        letters.OUTCOME: failure.outcome or failure.kind,
        letters.CAUSE: cause,
        letters.ERROR: reason,
        letters.AT: str(now_ms),
    }
    id_ = ids.letter_id(origin, failure.consumer)
    target = letters.letter_subject(subject, failure.stream)
    if original is None:
        return Letter(id_, target, b"", told | {letters.PAYLOAD: letters.GONE}, failure, cause)
    return _with_original(Letter(id_, target, original.payload, told, failure, cause), original, limits)


def _with_original(letter: Letter, original: Original, limits: Limits) -> Letter:
    told = dict(letter.headers)
    tenant = letters.one_line(tenant_of(original), subjects.TOKEN_BYTES_MAX)
    if tenant:
        told[letters.TENANT] = tenant
    trace = original.headers.get(names.TRACEPARENT, "")
    if trace:
        told[letters.TRACE] = letters.one_line(trace, subjects.TOKEN_BYTES_MAX)
    carried = letters.carry(original.headers, limits.headers_bytes_max)
    dropped = carried.dropped + original.dropped
    if dropped:
        told[letters.HEADERS] = str(dropped)
    payload, is_pointer = original.payload, original.is_pointer
    if is_pointer or block_bytes(told | carried.headers) + len(payload) > limits.payload_bytes_max:
        is_pointer = True
        told |= {letters.PAYLOAD: letters.POINTER, letters.BYTES: str(original.bytes or len(payload))}
        payload = b""
    headers = told | carried.headers
    if block_bytes(headers) > limits.payload_bytes_max:
        headers = told | {letters.HEADERS: str(len(original.headers))}
    return msgspec.structs.replace(letter, payload=payload, headers=headers, is_pointer=is_pointer)


def block_bytes(headers: Mapping[str, str]) -> int:
    """The size of a header block with the message id that the publisher adds."""
    return 80 + sum(len(name) + len(value.encode("utf-8", "surrogateescape")) + 4 for name, value in headers.items())


def tenant_of(original: Original) -> str:
    """Whose message it is: by its subject, or by its body where the platform says it there. '' when it says nothing."""
    try:
        match catalog.family(original.subject):
            case catalog.Family.RUNTIME:
                return subjects.parse(original.subject).tenant
            case catalog.Family.MESSAGE:
                envelope = message.decode_message(original.payload)
                return inputs.view(envelope, {}).tenant
    except ContractViolation:
        pass
    return ""


# ---- replays


class Resolved(Struct, frozen=True):
    """What an input was resolved to, wherever it stands: the same for a copy of it that carries these."""

    id: str = ""
    idempotency_key: str = ""
    ts: str = ""
    identity: str = ""
    subject: str = ""
    digest: str = ""


def resolve(subject: str, payload: bytes, headers: Mapping[str, str], origin: ids.Origin) -> Resolved:
    """Identity, digest and filled-in fields of a message; empty where its contract has none or it breaks it."""
    try:
        found = inputs.read_input(payload, subject=subject, origin=origin, carried=headers)
    except ContractViolation:
        return Resolved()
    one = found.envelope
    return Resolved(one.id, one.idempotency_key, str(one.ts), found.identity, subject, found.digest.hex())


def replay_headers(
    consumer: str, letter_id: str, origin: ids.Origin, original: Mapping[str, str], resolved: Resolved
) -> dict[str, str]:
    """The original's own headers but for those by which the server acts, and what makes the copy the same input."""
    kept = {name: value for name, value in original.items() if not name.startswith(_ACTING)}
    carried = {
        names.REPLAY_FOR: consumer,
        names.REPLAY_ORIGIN: msgspec.json.encode([letter_id, *origin]).decode(),
        names.REPLAY_ID: resolved.id,
        names.REPLAY_IDEMPOTENCY_KEY: resolved.idempotency_key,
        names.REPLAY_TS: resolved.ts,
    }
    return kept | {name: value for name, value in carried.items() if value}


def read_origin(text: str) -> tuple[str, ids.Origin] | None:
    """The other way; None when a stranger wrote it."""
    try:
        letter, stream, created, sequence, timestamp = msgspec.json.decode(text, type=tuple[str, str, int, int, int])
    except (msgspec.DecodeError, ValueError):
        return None
    return letter, ids.Origin(stream, created, sequence, timestamp)


# ---- consumers


class Stand(Struct, frozen=True):
    """How a durable stands, from its info."""

    stream: str
    consumer: str
    pending: int
    in_flight: int
    redelivered: int
    waiting: int
    delivered: int
    ack_floor: int
    max_deliver: int
    filters: tuple[str, ...]
    unsettled: int = 0
    """Deliveries above the ack floor. The floor may lag, so this only says that it is worth a look."""

    @property
    def has_exhausted(self) -> bool:
        """Nothing is in flight, and yet some were delivered again and never settled: the server gave them up."""
        return self.max_deliver > 0 and self.in_flight == 0 and self.redelivered > 0

    @property
    def may_have_exhausted(self) -> bool:
        """The same for those that are delivered once only, where it can be found out which they are."""
        return self.has_exhausted or (self.max_deliver > 0 and self.in_flight == 0 and self.unsettled > 0)

    @property
    def waits(self) -> int:
        """Messages that somebody must pull for: new ones, those in flight, and those that were given up, which an
        agent that comes back takes in by itself."""
        return self.pending + self.in_flight + (self.redelivered if self.has_exhausted else 0)

    def has_moved(self, before: Stand) -> bool:
        return (self.delivered, self.ack_floor, self.in_flight) != (
            before.delivered,
            before.ack_floor,
            before.in_flight,
        )


def read_stand(info: Mapping[str, Any]) -> Stand:
    config = info["config"]
    filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
    return Stand(
        info["stream_name"],
        info["name"],
        info.get("num_pending", 0),
        info.get("num_ack_pending", 0),
        info.get("num_redelivered", 0),
        info.get("num_waiting", 0),
        info["delivered"]["stream_seq"],
        info["ack_floor"]["stream_seq"],
        config.get("max_deliver", -1),
        tuple(filters),
        info["delivered"]["consumer_seq"] - info["ack_floor"]["consumer_seq"],
    )


UNREAD: Final = frozenset({"dlq_inspector", "GATEWAY_FANOUT", "SSE_TOKEN_FANOUT"})
"""Durables of the catalog that stand for tools: nobody pulls from them, and nobody should."""


class Watched(Struct, frozen=True):
    """A durable on which messages wait and nobody pulls, since when."""

    stand: Stand
    since_s: float


def watch(before: Mapping[str, Watched], stands: list[Stand], now_s: float) -> dict[str, Watched]:
    """Those durables on which something waits, nobody asks and nothing has moved; the time counts on from before."""
    found: dict[str, Watched] = {}
    for stand in stands:
        if stand.consumer in UNREAD or not stand.waits or stand.waiting:
            continue
        key = f"{stand.stream}/{stand.consumer}"
        known = before.get(key)
        is_same = known is not None and not stand.has_moved(known.stand)
        found[key] = Watched(stand, known.since_s if known is not None and is_same else now_s)
    return found


# ---- copies that go out once


class State(StrEnum):
    """What became of a letter."""

    SENT = "sent"
    PUBLISHED = "published"
    DROPPED = "dropped"


class Record(Struct, frozen=True, omit_defaults=True):
    """The last word on a letter, written before a copy of it goes out. A letter that is missing from DLQ at
    `letter_sequence` is explained by it: a known gap."""

    letter: str
    state: State
    generation: int = 0
    replay_id: str = ""
    stream: str = ""
    subject: str = ""
    after: int = 0
    """The last sequence of the target when the record was written: a copy stands behind it."""
    sent_ms: int = 0
    sequence: int = 0
    """Where the copy stands."""
    letter_sequence: int = 0
    """Where the letter stood in DLQ."""
    content: str = ""
    reason: str = ""


class Next(StrEnum):
    """What a copy needs."""

    FRESH = "fresh"
    """Record it, publish it."""
    AGAIN = "again"
    """It may be out: the server still remembers its id, so publish it again under that."""
    LOOK = "look"
    """It may be out, and its id may be forgotten: read the target first."""
    OUT = "out"
    """It is out: only the letter is left to clear."""


def next_step(known: Record | None, letter_sequence: int, now_ms: int, window_s: float) -> Next:
    """Where a copy stands that somebody may have begun to send."""
    if known is None or known.letter_sequence != letter_sequence or known.state is State.DROPPED:
        return Next.FRESH
    if known.state is State.PUBLISHED:
        return Next.OUT
    return Next.AGAIN if now_ms - known.sent_ms < window_s * 500 else Next.LOOK


_pack_record = msgspec.json.Encoder().encode
_read_record = msgspec.json.Decoder(Record).decode


def pack_record(record: Record) -> bytes:
    return _pack_record(record)


def read_record(data: bytes) -> Record:
    return _read_record(data)
