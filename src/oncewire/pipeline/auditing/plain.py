"""A second reader of messages, plain and slow: what silver must say of a message, by the contracts and nothing else.

Silver's own reader takes many messages at a time, by compiled loops, into columns. An audit that used it alone would
repeat its mistakes. This one reads one message at a time, knows none of that code, and is held to it by audits: for a
sample of the messages, or for all (`--deep`).

Whether a message meets its contract is decided by the contract (`_ground.contracts`). What its row says is taken from
the body as JSON has it, and from the headers. What they leave out is filled in as the contract says: from the headers
of a replay, the subject, and where the message stands. Pure: nothing depends on a clock or on the messages around.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec

from oncewire._ground.contracts import (
    blocks,
    canonical,
    catalog,
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
from oncewire._ground.contracts import headers as names
from oncewire._ground.contracts.catalog import Family
from oncewire._ground.errors import ContractViolation, Refused, UnsupportedVersion
from oncewire._ground.jetstream.protocol import parse_time_ns

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
QUARANTINE: Final = "quarantine"
LONG_MAX: Final = 2**63 - 1
LAST_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999."""
_JSON: Final = msgspec.json.Encoder().encode

Row = dict[str, Any]
Patterns = Sequence[tuple[str, Family]]
"""Subjects whose family the settings name."""


class Told(NamedTuple):
    """What a message becomes: a row of the silver table `name`, or what quarantine says of it."""

    name: str
    row: Row


class Seen(NamedTuple):
    """A row of bronze, with its headers by name; of doubles the first."""

    row: Row
    headers: dict[str, str]

    @property
    def origin(self) -> ids.Origin:
        row = self.row
        stored_us = (row["timestamp"] - EPOCH) // timedelta(microseconds=1)
        return ids.Origin(
            row["stream"], row["created_ns"], row["sequence"], stored_us * 1000 + (row["nanos"] or 0)
        )  # fmt: skip

    @property
    def tenant(self) -> str:
        return tenant_of(self) or subjects.DEFAULT_TENANT

    @property
    def is_replay(self) -> bool:
        return self.headers.get(names.MSG_ID, "").startswith("rp.")

    @property
    def context(self) -> trace.TraceContext | None:
        return trace.extract(self.headers)


def seen_of(row: Row) -> Seen:
    seen = Seen(row, {})
    for pair in row["headers"] or ():
        seen.headers.setdefault(pair["key"], pair["value"].decode("utf-8", "surrogateescape"))
    return seen


def read(seen: Seen, patterns: Patterns = ()) -> Told:
    """What silver must hold of a message."""
    row = seen.row
    name = family_of(row["subject"], patterns)
    if not name:
        return refused(row, None, "subject")
    try:
        return Told(name, READERS[name](seen))
    except UnsupportedVersion:
        return refused(row, name, "version")
    except Refused:
        return refused(row, name, "contract")
    except Exception:  # whatever a body does to a reader: the message is refused, and the others are read
        return refused(row, name, "unreadable")


def refused(row: Row, family: str | None, reason: str) -> Told:
    return Told(QUARANTINE, {**row, "family": family, "reason": reason})


def family_of(subject: str, patterns: Patterns = ()) -> str:
    """The silver table that a subject belongs to; empty where no contract names it."""
    tokens = subject.split(".")
    if tokens[0] == "owb" and len(tokens) > 1:
        return "broker_mark" if tokens[-1] in (topics.FENCE, topics.KEYS) else "broker"
    if tokens[0] == "broker_records" and len(tokens) > 1:
        return "broker_record"
    for pattern, family in (*patterns, *((entry.pattern, entry.family) for entry in catalog.CATALOG)):
        if subjects.matches(subject, pattern):
            if family is Family.LETTER:
                return "request" if tokens[0] == "dlq_requests" else "letter"
            return "ledger" if family is Family.BLOCK else family.value
    return ""


def tenant_of(seen: Seen) -> str | None:
    """What bronze says of a message's tenant: by its subject, else by its headers."""
    tokens = seen.row["subject"].split(".")
    if tokens[0] in ("evt", "cmd") and len(tokens) > 3 and tokens[1]:
        return str(tokens[1])
    if tokens[0] == "owb":
        try:
            if tenant := topics.read_subject(seen.row["subject"]).tenant:
                return tenant
        except ContractViolation:
            pass
    for name in (names.TENANT, letters.TENANT):
        if name in seen.headers:
            return shown(seen.headers[name])
    return None


def shown(value: str | None) -> str | None:
    """A header's value as text: bytes that are no UTF-8 are shown as signs."""
    return None if value is None else value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def members(body: bytes) -> Row:
    """What stands in a body that its contract accepts. Contracts look at no member that they do not name: bad bytes
    there are no reason to refuse it here."""
    found: Row = msgspec.json.decode(body.decode("utf-8", "replace"))
    return found


# ---- what all rows say


def common(
    seen: Seen, name: str, tenant: str, scope: str, identity: str, *, time: datetime | None = None,
    context: trace.TraceContext | None = None, causation: str | None = None, correlation: str | None = None,
    edited: bytes = b"",
) -> Row:  # fmt: skip
    """The columns that every table has. `edited` is the digest of a replay that replaces another content: it makes its
    row another one."""
    row = seen.row
    parts = (name, tenant, scope, row["subject"], identity, *((edited.hex(),) if edited else ()))
    return {
        **{column: row[column] for column in ("stream", "created_ns", "incarnation", "sequence", "subject")},
        "timestamp": row["timestamp"],
        "date": row["timestamp"].date(),
        "tenant": tenant,
        "identity": identity,
        "key": hashlib.blake2b(ids.joined("silver", *parts).encode(), digest_size=16).digest(),
        "msg_id": shown(seen.headers.get(names.MSG_ID)),
        "event_time": time if time is not None else row["timestamp"],
        "trace_id": context.trace_id if context else None,
        "span_id": context.span_id if context else None,
        "causation_id": causation,
        "correlation_id": correlation,
    }


def by_place(seen: Seen, name: str, **own: Any) -> Row:
    """A message that nothing but its place tells from others."""
    return common(seen, name, seen.tenant, "", ids.position_identity(seen.origin)) | own


def content_digest(type_: str, payload: Any) -> bytes:
    text = b'{"payload":' + canonical.canonical(payload) + b',"type":' + _JSON(type_) + b"}"
    return hashlib.sha256(text).digest()


# ---- envelopes


def read_runtime(seen: Seen) -> Row:
    body, told = seen.row["payload"], seen.headers
    inputs.read_closely(body, subject=seen.row["subject"], origin=seen.origin, carried=told)
    sent = {name: value for name, value in members(body).items() if value is not None}
    _, tenant, workspace, *_ = seen.row["subject"].split(".")
    id_ = sent.get("id") or told.get(names.REPLAY_ID) or told.get(names.MSG_ID) or ids.origin_id(seen.origin)
    key = sent.get("idempotency_key") or told.get(names.REPLAY_IDEMPOTENCY_KEY) or id_
    digest = content_digest(sent["type"], sent["payload"])
    replay = told if seen.is_replay else {}
    actor = sent.get("actor", {"id": "unknown", "role": "unknown"})
    source = sent.get("source", {"agent": "unknown", "adapter": "unknown"})
    kind = actor["role"] if actor["role"] in ("service", "agent", "user", "system") else "service"
    principal = sent.get("security_context", {"principal_id": actor["id"], "principal_type": kind})
    replaces = replay.get(names.REPLAY_REPLACES)
    return common(
        seen, "runtime", tenant, workspace, _owned("key", tenant, workspace, key), time=_time(_ts(seen, sent)),
        context=_context(seen, sent, id_), causation=sent.get("causation_id") or None,
        correlation=sent.get("correlation_id") or None, edited=digest if replaces else b"",
    ) | {
        "workspace": workspace, "id": id_, "type": sent["type"], "schema_version": "1.0", "idempotency_key": key,
        "actor_id": actor["id"], "digest": digest, "replaces": shown(replaces),
        "replay_for": shown(replay.get(names.REPLAY_FOR)), "payload": _JSON(sent["payload"]).decode(),
        "actor_role": actor["role"], "source_agent": source["agent"], "source_adapter": source["adapter"],
        "principal_id": principal["principal_id"], "principal_type": principal["principal_type"],
        "reply_to": sent.get("reply_to") or None, "entity_id": sent.get("entity_id") or None,
        "expected_version": sent.get("expected_version"),
    }  # fmt: skip


def _owned(kind: str, tenant: str, workspace: str, name: str) -> str:
    """An identity counts within its tenant and workspace. A slash inside either is escaped."""
    owner = "/".join(part.replace("%", "%25").replace("/", "%2F") for part in (tenant, workspace))
    return f"{kind}:{owner}/{name}"


def _ts(seen: Seen, sent: Row) -> int:
    """When an envelope says that it was made: as sent, as its replay carries it, else when its stream took it in."""
    if "ts" in sent:
        return int(sent["ts"])
    replayed = seen.headers.get(names.REPLAY_TS, "")
    if replayed.isascii() and replayed.isdigit() and len(replayed) <= len(str(LAST_MS)):
        return int(replayed)
    return seen.origin.timestamp_ns // 1_000_000


def _time(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


def _context(seen: Seen, sent: Row, id_: str) -> trace.TraceContext:
    """The trace that the body names, else the headers, else one that begins with the message."""
    named, span = sent.get("trace_id", ""), sent.get("span_id", "")
    if trace.are_ids(named, span):
        return trace.TraceContext(named, span)
    begun = trace.begun_by(id_)
    if seen.context is not None and named in ("", seen.context.trace_id):
        return seen.context
    return begun._replace(trace_id=named) if trace.is_trace_id(named) else seen.context or begun


def read_message(seen: Seen) -> Row:
    checked = message.decode_message(seen.row["payload"])
    sent = members(seen.row["payload"])
    id_ = str(sent["message_id"] if "message_id" in sent else sent["event_id"])
    tenant = sent["payload"].get("tenant_id")
    if tenant is not None and not isinstance(tenant, str):
        raise ContractViolation("the tenant is not text")
    is_keyed = seen.row["subject"].startswith("sr.")
    digest = content_digest(sent["message_type"], sent["payload"])
    replaces = seen.headers.get(names.REPLAY_REPLACES)
    owner = (tenant or subjects.DEFAULT_TENANT, subjects.DEFAULT_WORKSPACE)
    identity = _owned("key", *owner, sent["idempotency_key"]) if is_keyed else _owned("id", *owner, id_)
    return common(
        seen, "message", *owner, identity, time=checked.timestamp,
        context=seen.context or trace.begun_by(id_), causation=sent.get("causation_id") or None,
        correlation=sent.get("correlation_id") or None, edited=digest if replaces else b"",
    ) | {
        "workspace": subjects.DEFAULT_WORKSPACE, "id": id_, "type": sent["message_type"],
        "schema_version": sent["schema_version"], "idempotency_key": sent["idempotency_key"],
        "actor_id": sent["actor_id"], "digest": digest, "replaces": shown(replaces),
        "replay_for": shown(seen.headers.get(names.REPLAY_FOR)), "payload": _JSON(sent["payload"]).decode(),
        "actor_kind": sent["actor_kind"],
    }  # fmt: skip


def read_realtime(seen: Seen) -> Row:
    checked = realtime.decode_realtime(seen.row["payload"])
    sent = members(seen.row["payload"])
    event, epoch = sent["event"], seen.headers.get(names.EPOCH, "")
    context = seen.context
    if context is None and event["type"] == "chat.message.created":
        context = trace.begun_by(event["messageId"])
    match event["type"]:
        case "chat.message.created":
            identity = ids.joined("message", sent["conversationId"], epoch, sent["sequence"])
        case "chat.token.chunk":
            identity = ids.joined("chunk", event["messageId"], event["chunkId"])
        case "chat.stream.lifecycle":
            identity = ids.joined("status", event["messageId"], event["status"])
        case _:
            identity = ids.position_identity(seen.origin)
    return common(seen, "realtime", seen.tenant, "", identity, time=checked.issued_at, context=context) | {
        "type": event["type"], "version": sent["version"], "conversation_id": sent["conversationId"],
        "epoch": shown(epoch) or None, "conversation_sequence": sent["sequence"],
        "message_id": event.get("messageId"), "chunk_id": event.get("chunkId"),
        "guarantee": sent["contract"]["guarantee"], "dedupe_key": sent["contract"]["dedupeKey"],
        "payload": _JSON(checked.event).decode(),
    }  # fmt: skip


# ---- ledgers and dead letters


def read_ledger(seen: Seen) -> Row:
    body = seen.row["payload"]
    told = _checked(blocks.read_announcement, body)
    if told.version != blocks.ANNOUNCEMENT_VERSION:
        raise UnsupportedVersion(f"block version {told.version}", version=str(told.version))
    hash_ = hashlib.sha256(body).hexdigest()
    parts = (told.ledger, told.tenant, told.workspace, told.agent, told.number, hash_)
    return common(seen, "ledger", told.tenant, told.workspace, ids.joined("block", *parts)) | {
        "version": told.version, "ledger": told.ledger, "workspace": told.workspace, "agent": told.agent,
        "number": told.number, "previous": told.previous, "hash": hash_,
        "inputs": [_inputs(one) for one in told.inputs], "effects": told.effects, "state": told.state,
        "confirmed_block": told.confirmed.block,
        "confirmed_streams": [
            {"stream": stream, "sequence": last} for stream, last in sorted(told.confirmed.streams.items())
        ],
        "targets": [{"stream": stream, "places": _ranges(at)} for stream, at in sorted(told.targets.items())],
        "settled": [
            {"stream": stream, **_lifetime(created), "sequence": last} for stream, created, last in told.settled
        ],
    }  # fmt: skip


def _inputs(told: blocks.Inputs) -> Row:
    """One name stands for all subjects that are the same."""
    named: list[str | None] = [*told.subjects]
    if len(named) != len(told.listed):
        named = (named[:1] or [None]) * len(told.listed)
    listed = zip(told.listed, named, strict=True)
    return {
        "stream": told.stream, **_lifetime(told.created), "consumer": told.consumer, "filters": list(told.filters),
        "start": told.start, "sum": told.sum,
        **{outcome.value: _ranges(getattr(told, outcome.value)) for outcome in blocks.Outcome},
        "listed": [
            {"sequence": sequence, "identity": identity, "digest": digest, "subject": subject}
            for (sequence, identity, digest), subject in listed
        ],
    }  # fmt: skip


def _ranges(found: blocks.Ranges) -> list[Row]:
    return [{"first": first, "last": last} for first, last in found]


def _lifetime(created: str) -> Row:
    """When a stream was made, and behind a # how often it went back since."""
    time, mark, incarnation = created.partition("#")
    try:
        return {"created_ns": parse_time_ns(time), "incarnation": int(incarnation) if mark and incarnation else 0}
    except ValueError:
        raise ContractViolation(f"{created!r} is not when a stream was made") from None


def read_letter(seen: Seen) -> Row:
    told = seen.headers
    msg_id = shown(told.get(names.MSG_ID))
    reason = told.get(letters.CAUSE, "")
    at_ms = _number(told.get(letters.AT))
    context = trace.extract({names.TRACEPARENT: told.get(letters.TRACE, "")}) or seen.context
    identity = ids.joined("letter", msg_id) if msg_id else ids.position_identity(seen.origin)
    name = "request" if seen.row["subject"].startswith("dlq_requests.") else "letter"
    time = _time(min(at_ms, LAST_MS)) if at_ms else None
    return common(seen, name, seen.tenant, "", identity, time=time, context=context) | {
        "cause": shown(letters.cause_of(reason, letters.one_line(reason, letters.CAUSE_CHARS_MAX))) or "unknown",
        "error": shown(told.get(letters.ERROR, reason)), "outcome": shown(told.get(letters.OUTCOME, "")),
        "consumer": shown(told.get(letters.CONSUMER, "")), "deliveries": _number(told.get(letters.DELIVERIES)),
        "origin_stream": shown(told.get(letters.STREAM, "")),
        "origin_created_ns": _number(told.get(letters.CREATED)),
        "origin_sequence": _number(told.get(letters.SEQUENCE)),
        "origin_timestamp_ns": _number(told.get(letters.TIMESTAMP)),
        "origin_subject": shown(told.get(letters.SUBJECT, "")), "body_is": shown(told.get(letters.PAYLOAD, "")),
        "body": seen.row["payload"],
    }  # fmt: skip


def _number(text: str | None) -> int:
    """A header's number, 0 for what is none."""
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) <= 19
    return min(int(text or 0), LONG_MAX) if is_number else 0


def read_replay(seen: Seen) -> Row:
    try:
        msgspec.json.decode(seen.row["payload"])
        text = seen.row["payload"].decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(str(error)) from None
    return by_place(seen, "replay", letter=seen.row["subject"].split(".")[-1], payload=text)


class Advisory(msgspec.Struct, frozen=True):
    """What the server says of a delivery that it gave up."""

    type: str
    stream: str
    consumer: str
    stream_seq: int
    id: str = ""
    deliveries: int = 0


def read_advisory(seen: Seen) -> Row:
    try:
        told = msgspec.json.decode(seen.row["payload"], type=Advisory)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(str(error)) from None
    row = by_place(seen, "advisory")
    if told.id:
        row = common(seen, "advisory", seen.tenant, "", ids.joined("advisory", told.id))
    return row | {
        "type": told.type, "consumer": told.consumer, "deliveries": told.deliveries, "origin_stream": told.stream,
        "origin_sequence": told.stream_seq, "payload": seen.row["payload"].decode(),
    }  # fmt: skip


# ---- the broker's


def read_broker(seen: Seen) -> Row:
    body = seen.row["payload"]
    where = topics.read_subject(seen.row["subject"])
    told = _checked(records.decode_document, body)
    sent = members(body)
    envelope = {name: value for name, value in (sent.get("envelope") or {}).items() if value is not None}
    policy, letter = envelope.get("retry_policy") or {}, envelope.get("dlq") or {}
    context = trace.parse_traceparent(envelope.get("traceparent", "")) or seen.context
    tenant = where.tenant or envelope.get("tenant_id") or subjects.DEFAULT_TENANT
    causation, correlation = envelope.get("parent_step_id") or None, envelope.get("run_id") or None
    return common(
        seen, "broker", tenant, "", ids.position_identity(seen.origin), context=context, causation=causation,
        correlation=correlation,
    ) | {
        "topic": where.topic, "partition": where.partition, "offset": seen.row["sequence"] - 1,
        "message_key": sent["key"], "value": sent["value"], "run_id": correlation,
        "step_id": envelope.get("step_id") or None, "parent_step_id": causation,
        "idempotency_key": envelope.get("idempotency_key") or None,
        "target_topic": envelope.get("target_topic") or None,
        "deadline": told.envelope.deadline if told.envelope else None,
        "max_attempts": policy.get("max_attempts") or None, "backoff_ms": policy.get("backoff_ms") or None,
        "routing_label": (sent["routing"].get("label", "") if sent.get("routing") else None),
        "original_topic": letter.get("original_topic"), "original_partition": letter.get("original_partition"),
        "original_offset": letter.get("original_offset"), "letter_attempts": letter.get("attempts"),
        "last_error": letter.get("last_error"), "digest": hashlib.sha256(body).digest(),
    }  # fmt: skip


def _checked(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(str(error)) from None


def read_broker_mark(seen: Seen) -> Row:
    where = topics.read_subject(seen.row["subject"])
    tenant = where.tenant or subjects.DEFAULT_TENANT
    return common(seen, "broker_mark", tenant, "", ids.position_identity(seen.origin)) | {
        "topic": where.topic, "partition": None if where.kind == topics.KEYS else where.partition,
        "kind": where.kind, "payload": seen.row["payload"].decode("utf-8", "replace"),
    }  # fmt: skip


EVENTS: Final[dict[Any, str]] = {
    records.Acked: "acked",
    records.Retried: "retried",
    records.Buried: "buried",
    records.GroupMade: "group_made",
    records.GroupSeen: "group_seen",
    records.GroupGone: "group_gone",
    records.Trimmed: "trimmed",
    records.Marked: "marked",
}


def read_broker_record(seen: Seen) -> Row:
    body = seen.row["payload"]
    number, partition = topics.read_records_subject(seen.row["subject"])
    told = _checked(records.decode_packed, body)
    tenant = told.tenant or subjects.DEFAULT_TENANT
    return common(seen, "broker_record", tenant, "", ids.position_identity(seen.origin)) | {
        "number": number, "partition": partition, "topic": told.topic, "owner": told.owner,
        "taken": told.taken, "after": None if told.after == records.SAME_BATCH else told.after,
        "events": [_event(one, number, partition, told.groups) for one in told.records],
        "digest": hashlib.sha256(body).digest(),
    }  # fmt: skip


def _event(one: Any, number: int, partition: int, groups: Mapping[str, str]) -> Row:
    """One thing that the owner of a partition decided. A worker's mark may be kept in another partition."""
    kind = EVENTS.get(type(one))
    is_mark = kind == "marked"
    is_here = one.topic == number and (is_mark or getattr(one, "partition", partition) == partition)
    if kind is None or not is_here:
        raise ContractViolation("a record that is not the owner's to write")
    group = getattr(one, "group", None)
    if group is not None and str(group) not in groups:
        raise ContractViolation(f"group {group} has no name")
    at_ms = getattr(one, "at_ms", 0)
    return {
        "kind": kind, "group": None if group is None else groups[str(group)],
        "offset": None if is_mark else getattr(one, "offset", None), "attempts": getattr(one, "attempts", None),
        "consumer": getattr(one, "owner", None) or None, "at": _time(at_ms) if at_ms else None,
        "error": getattr(one, "last_error", None) or None,
    }  # fmt: skip


READERS: Final[dict[str, Callable[[Seen], Row]]] = {
    "runtime": read_runtime,
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
