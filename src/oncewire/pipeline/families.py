"""How a message of each family is read: one reader per silver table, and the key that no two of its rows share.

Runtime envelopes, which are the most, are read many at a time (envelopes.py), all others one by one.

A message is read exactly as an agent reads it, with what it leaves out filled in the same way, so identities, digests
and ids are those that ledgers and blocks know. What breaks its contract is refused with the reason that a person needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from oncewire._ground.contracts import (
    blocks,
    catalog,
    headers,
    ids,
    inputs,
    letters,
    message,
    realtime,
    records,
    subjects,
    topics,
    trace,
)
from oncewire._ground.contracts.broker import DeliveredEnvelope, RetryPolicy
from oncewire._ground.contracts.catalog import Family
from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.errors import ContractViolation, UnsupportedVersion
from oncewire._ground.jetstream.protocol import parse_time_ns

KEY_BYTES: Final = 16
REPLAY_PREFIX: Final = "rp."
"""Of the id of a replayed message."""
LONG_MAX: Final = 2**63 - 1
INCARNATION: Final = "#"
"""Stands between a stream's creation time and its incarnation in a block."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)
_NAMES: Final = {Family.BLOCK: "ledger"}

Families = tuple[tuple[str, Family], ...]
"""Patterns that come before the catalog's, such as chat subjects under another prefix."""


class Place(NamedTuple):
    """Where a message stands, and what it carried."""

    origin: ids.Origin
    subject: str
    tenant: str | None
    msg_id: str | None
    carried: Callable[[], dict[str, str]]


class Read(NamedTuple):
    """What a message says. `own` are the columns that only its family has."""

    tenant: str
    scope: str
    """Within which an identity counts, besides tenant and subject."""
    identity: str
    event_us: int
    trace_id: str | None
    span_id: str | None
    causation_id: str | None
    correlation_id: str | None
    digest: bytes
    replaces: str | None
    own: tuple[Any, ...]


def silver_name(subject: str, families: Families = ()) -> str:
    """The silver table of a subject, '' where no contract names it."""
    if subject.startswith("owb."):
        return "broker_mark" if subject.endswith((f".{topics.FENCE}", f".{topics.KEYS}")) else "broker"
    if subject.startswith("broker_records."):
        return "broker_record"
    found = next((family for pattern, family in families if subjects.matches(subject, pattern)), None)
    family = found or catalog.family(subject)
    if family is Family.LETTER:
        return "request" if subject.startswith("dlq_requests.") else "letter"
    return _NAMES.get(family, family.value) if family else ""


def read_closely(body: bytes, place: Place) -> inputs.Input:
    return inputs.read_closely(body, subject=place.subject, origin=place.origin, carried=place.carried())


def carried_by_replay(place: Place) -> dict[str, str]:
    """The headers of a runtime message that count here: a replay's."""
    return place.carried() if place.msg_id and place.msg_id.startswith(REPLAY_PREFIX) else {}


def read_message(body: bytes, place: Place) -> Read:
    sent, written = message.open_message(body)
    carried = place.carried()
    told = inputs.view(sent, carried)
    digest = ids.content_digest(sent.message_type, written)
    own = (
        told.workspace,
        sent.message_id,
        sent.message_type,
        sent.schema_version,
        sent.idempotency_key,
        sent.actor_id,
        digest,
        shown(carried.get(headers.REPLAY_REPLACES)),
        shown(carried.get(headers.REPLAY_FOR)),
        ENCODE(sent.payload).decode(),
        sent.actor_kind,
    )
    return Read(
        told.tenant,
        told.workspace,
        inputs.identity_of(place.subject, told),
        (sent.timestamp - _EPOCH) // _MICRO,
        told.trace_id,
        told.span_id,
        sent.causation_id,
        sent.correlation_id,
        digest,
        carried.get(headers.REPLAY_REPLACES),
        own,
    )


def read_realtime(body: bytes, place: Place) -> Read:
    told = realtime.decode_realtime(body)
    carried = place.carried()
    epoch = carried.get(headers.EPOCH, "")
    event = told.event
    context = trace.extract(carried) or _begun_by(event)
    own = (
        event.__struct_config__.tag,
        told.version,
        told.conversation_id,
        shown(epoch) or None,
        told.sequence,
        getattr(event, "message_id", None),
        getattr(event, "chunk_id", None),
        told.contract.guarantee,
        told.contract.dedupe_key,
        ENCODE(event).decode(),
    )
    return Read(
        place.tenant or subjects.DEFAULT_TENANT,
        "",
        realtime.identity(told, epoch=epoch, origin=place.origin),
        (told.issued_at - _EPOCH) // _MICRO,
        context.trace_id if context else None,
        context.span_id if context else None,
        None,
        None,
        hashlib.sha256(ENCODE(event)).digest(),
        None,
        own,
    )


def _begun_by(event: realtime.Event) -> trace.TraceContext | None:
    """The trace of a message that was enqueued in none, as its relay tells it, whether or not traces were on there."""
    return trace.begun_by(event.message_id) if isinstance(event, realtime.MessageCreated) else None


def read_ledger(body: bytes, place: Place) -> Read:
    """A block. Its hash is part of its identity: a second block with this number is a fork that audits must see."""
    try:
        told = blocks.read_announcement(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(f"ledger block: {error}") from None
    if told.version != blocks.ANNOUNCEMENT_VERSION:
        raise UnsupportedVersion(f"ledger block: version {told.version} is not supported", version=str(told.version))
    hash_ = blocks.announcement_hash(body)
    own = (
        told.version,
        told.ledger,
        told.workspace,
        told.agent,
        told.number,
        told.previous,
        hash_.hex(),
        [_inputs(one) for one in told.inputs],
        told.effects,
        told.state,
        told.confirmed.block,
        [{"stream": stream, "sequence": sequence} for stream, sequence in sorted(told.confirmed.streams.items())],
        [{"stream": stream, "places": _ranges(places)} for stream, places in sorted(told.targets.items())],
        [_settled(*one) for one in told.settled],
    )
    identity = ids.joined("block", told.ledger, told.tenant, told.workspace, told.agent, told.number, hash_.hex())
    return Read(told.tenant, told.workspace, identity, _stored_us(place), None, None, None, None, hash_, None, own)


def _inputs(told: blocks.Inputs) -> dict[str, Any]:
    created_ns, incarnation = lifetime_of(told.created)
    return {
        "stream": told.stream,
        "created_ns": created_ns,
        "incarnation": incarnation,
        "consumer": told.consumer,
        "filters": list(told.filters),
        "start": told.start,
        "sum": told.sum,
        **{name: _ranges(getattr(told, name)) for name in ("done", "duplicate", "terminated", "dead", "passed")},
        "listed": [
            {"sequence": sequence, "identity": identity, "digest": digest, "subject": subject}
            for (sequence, identity, digest), subject in zip(told.listed, blocks.listed_subjects(told), strict=True)
        ],
    }


def _ranges(found: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    return [{"first": first, "last": last} for first, last in found]


def _settled(stream: str, created: str, sequence: int) -> dict[str, Any]:
    created_ns, incarnation = lifetime_of(created)
    return {"stream": stream, "created_ns": created_ns, "incarnation": incarnation, "sequence": sequence}


def lifetime_of(created: str) -> tuple[int, int]:
    """A stream's creation time with its incarnation, as blocks write it: `2026-11-15T12:00:00Z#2`."""
    when, _, incarnation = created.partition(INCARNATION)
    try:
        return parse_time_ns(when), int(incarnation or 0)
    except ValueError:
        raise ContractViolation(f"ledger block: {created[:60]!r} is not when a stream was made") from None


def read_letter(body: bytes, place: Place) -> Read:
    """A dead letter, or a request for one. What somebody else wrote there has no story: it is kept as it is."""
    told = place.carried()

    def number(name: str) -> int:
        text = told.get(name, "")
        found = int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else 0
        return min(found, LONG_MAX)

    context = trace.extract({headers.TRACEPARENT: told.get(letters.TRACE, "")}) or trace.extract(told)
    reason = told.get(letters.CAUSE, "")
    own = (
        shown(letters.cause_of(reason, letters.one_line(reason, letters.CAUSE_CHARS_MAX))) or "unknown",
        shown(told.get(letters.ERROR, reason)),
        shown(told.get(letters.OUTCOME, "")),
        shown(told.get(letters.CONSUMER, "")),
        number(letters.DELIVERIES),
        shown(told.get(letters.STREAM, "")),
        number(letters.CREATED),
        number(letters.SEQUENCE),
        number(letters.TIMESTAMP),
        shown(told.get(letters.SUBJECT, "")),
        shown(told.get(letters.PAYLOAD, "")),
        body,
    )
    return Read(
        place.tenant or subjects.DEFAULT_TENANT,
        "",
        ids.joined("letter", place.msg_id) if place.msg_id else ids.position_identity(place.origin),
        min(number(letters.AT), 253_402_300_799_999) * 1000 or _stored_us(place),
        context.trace_id if context else None,
        context.span_id if context else None,
        None,
        None,
        b"",
        None,
        own,
    )


def read_replay(body: bytes, place: Place) -> Read:
    letter = place.subject.rpartition(".")[2]
    identity = ids.position_identity(place.origin)
    return _plain(place, identity, (letter, _json_text(body)))


class _Advisory(msgspec.Struct, frozen=True):
    type: str
    stream: str
    consumer: str
    stream_seq: int
    id: str = ""
    deliveries: int = 0


_read_advisory = msgspec.json.Decoder(_Advisory).decode


def read_advisory(body: bytes, place: Place) -> Read:
    try:
        told = _read_advisory(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(f"advisory: {error}") from None
    own = (told.type, told.consumer, told.deliveries, told.stream, told.stream_seq, body.decode())
    identity = ids.joined("advisory", told.id) if told.id else ids.position_identity(place.origin)
    return _plain(place, identity, own)


def _plain(place: Place, identity: str, own: tuple[Any, ...]) -> Read:
    tenant = place.tenant or subjects.DEFAULT_TENANT
    return Read(tenant, "", identity, _stored_us(place), None, None, None, None, b"", None, own)


def _json_text(body: bytes) -> str:
    try:
        msgspec.json.decode(body)
        return body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(f"body: {error}") from None


def _stored_us(place: Place) -> int:
    return place.origin.timestamp_ns // 1000


def shown(value: str | None) -> str | None:
    """A header's value as a table can hold it: bytes that are no UTF-8 are shown as signs."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if value is not None else None


# ---- the broker's


def read_broker(body: bytes, place: Place) -> Read:
    """A message of a topic. Its place is its identity: repeats of a key were dropped before it was stored, and the same
    key after its time is another message."""
    where = topics.read_subject(place.subject)
    try:
        told = records.decode_document(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(f"topic message: {error}") from None
    envelope = told.envelope or _NO_ENVELOPE
    policy, letter = envelope.retry_policy or _NO_POLICY, envelope.dlq
    context = trace.parse_traceparent(envelope.traceparent) or trace.extract(place.carried())
    own = (
        where.topic,
        where.partition,
        place.origin.sequence - 1,
        told.key,
        told.value,
        envelope.run_id or None,
        envelope.step_id or None,
        envelope.parent_step_id or None,
        envelope.idempotency_key or None,
        envelope.target_topic or None,
        envelope.deadline,
        policy.max_attempts or None,
        policy.backoff_ms or None,
        told.routing.label if told.routing else None,
        letter.original_topic if letter else None,
        letter.original_partition if letter else None,
        letter.original_offset if letter else None,
        letter.attempts if letter else None,
        letter.last_error if letter else None,
        hashlib.sha256(body).digest(),
    )
    return Read(
        where.tenant or envelope.tenant_id or subjects.DEFAULT_TENANT,
        "",
        ids.position_identity(place.origin),
        _stored_us(place),
        context.trace_id if context else None,
        context.span_id if context else None,
        envelope.parent_step_id or None,
        envelope.run_id or None,
        own[-1],
        None,
        own,
    )


_NO_ENVELOPE: Final = DeliveredEnvelope()
_NO_POLICY: Final = RetryPolicy()


def read_broker_mark(body: bytes, place: Place) -> Read:
    """What an owner stores beside messages: a fence, or the key of a message that went to another topic."""
    where = topics.read_subject(place.subject)
    partition = None if where.kind == topics.KEYS else where.partition
    own = (where.topic, partition, where.kind, body.decode("utf-8", "replace"))
    return _plain(place._replace(tenant=where.tenant), ids.position_identity(place.origin), own)


def read_broker_record(body: bytes, place: Place) -> Read:
    """What the owner of a partition decided, each record an event in order."""
    number, partition = topics.read_records_subject(place.subject)
    try:
        told = records.decode_packed(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(f"broker record: {error}") from None
    events = [_event(told, one, number, partition) for one in told.records]
    digest = hashlib.sha256(body).digest()
    after = None if told.after == records.SAME_BATCH else told.after
    own = (number, partition, told.topic, told.owner, told.taken, after, events, digest)
    tenant = told.tenant or subjects.DEFAULT_TENANT
    identity = ids.position_identity(place.origin)
    return Read(tenant, "", identity, _stored_us(place), None, None, None, None, digest, None, own)


_KINDS: Final = {
    records.Acked: "acked",
    records.Retried: "retried",
    records.Buried: "buried",
    records.GroupMade: "group_made",
    records.GroupSeen: "group_seen",
    records.GroupGone: "group_gone",
    records.Trimmed: "trimmed",
    records.Marked: "marked",
}


def _event(told: records.Packed, record: records.Record, number: int, partition: int) -> dict[str, Any]:
    kind = _KINDS.get(type(record))
    if kind is None:
        raise ContractViolation(f"broker record: a {type(record).__name__} is not an owner's to write")
    is_mark = isinstance(record, records.Marked)  # a worker's key may be kept in another partition than its message
    if record.topic != number or (not is_mark and getattr(record, "partition", partition) != partition):
        raise ContractViolation(f"broker record: one of {_place(record)} stands among those of {number}.{partition}")
    group = getattr(record, "group", None)
    name = told.groups.get(str(group)) if group is not None else None
    if group is not None and name is None:
        raise ContractViolation(f"broker record: group {group} has no name")
    at_ms = getattr(record, "at_ms", 0)
    return {
        "kind": kind,
        "group": name,
        "offset": None if is_mark else getattr(record, "offset", None),
        "attempts": getattr(record, "attempts", None),
        "consumer": getattr(record, "owner", None) or None,
        "at": _EPOCH + timedelta(milliseconds=at_ms) if at_ms else None,
        "error": getattr(record, "last_error", None) or None,
    }


def _place(record: records.Record) -> str:
    return f"{record.topic}.{getattr(record, 'partition', '*')}"


Reader = Callable[[bytes, Place], Read]
READERS: Final[dict[str, Reader]] = {
    "message": read_message,
    "realtime": read_realtime,
    "ledger": read_ledger,
    "letter": read_letter,
    "request": read_letter,
    "replay": read_replay,
    "advisory": read_advisory,
    "broker": read_broker,
    "broker_mark": read_broker_mark,
    "broker_record": read_broker_record,
}


def key_of(begun: Any, identity: str, digest: bytes = b"") -> bytes:
    """What no two rows of a silver table share, from what the keys of many share (`key_begun`). An edited replay has
    its digest in it: it stands beside what it replaces."""
    hashed = begun.copy()
    hashed.update(ENCODE(identity) + (b',"%b"]' % digest.hex().encode() if digest else b"]"))
    key: bytes = hashed.digest()
    return key


@lru_cache(maxsize=4096)
def key_begun(name: str, tenant: str, scope: str, subject: str) -> Any:
    """The hash over what the keys of many rows share. The whole is one identity of several parts (ids.joined)."""
    begun = ids.joined("silver", name, tenant, scope, subject).removesuffix("]") + ","
    return hashlib.blake2b(begun.encode(), digest_size=KEY_BYTES)
