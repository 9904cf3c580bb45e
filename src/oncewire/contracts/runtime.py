"""The runtime envelope on `evt.>` and `cmd.>`: what a lenient producer may send, and what every reader makes of it.

Only `type` and `payload` are required. `fill` adds the rest from the message alone, the same way every time: from the
headers that a replay carries, else from the stream's own record of the message and from its subject. Never from the
clock or by chance, so that a redelivery, another process and a replay see the same envelope.

What no one said is filled as follows: `actor` and `source` are "unknown"; the principal is the actor, of the type that
its role names, else a service. A trace id that is not W3C's counts as absent; without one the message begins a trace
of its own, derived from its id.

A body that names another tenant or workspace than its subject is refused: who may publish is decided by subject.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from oncewire.contracts import canonical, headers, ids, subjects, trace
from oncewire.contracts.codec import (
    ENCODE,
    NAME_CHARS_MAX,
    Contract,
    read_payload,
    refuse_repeats,
    write_payload,
)
from oncewire.contracts.message import Id, check_printable
from oncewire.errors import ContractViolation

VERSION = "1.0"
NAME = "RuntimeEnvelope"
TS_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999."""

UNKNOWN = "unknown"
PrincipalType = Literal["service", "agent", "user", "system"]
PRINCIPAL_TYPES: frozenset[str] = frozenset(get_args(PrincipalType))
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
TsMs = Annotated[int, Meta(ge=0, le=TS_MS_MAX)]


class Actor(Struct, frozen=True):
    """Who acted, and in what role."""

    id: Id
    role: Name


class Source(Struct, frozen=True):
    """Which agent sent it, through which adapter."""

    agent: Name
    adapter: Name


class SecurityContext(Struct, frozen=True):
    """On whose authority."""

    principal_id: Id
    principal_type: PrincipalType


class RuntimeEnvelope(Struct, frozen=True, kw_only=True):
    """A message as every handler gets it, complete."""

    id: str
    ts: int
    type: str
    schema_version: str = VERSION
    trace_id: str
    span_id: str
    tenant: str
    workspace: str
    actor: Actor
    payload: dict[str, Any]
    idempotency_key: str
    source: Source
    security_context: SecurityContext
    causation_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    entity_id: str | None = None
    expected_version: int | None = None


class RawRuntime(Struct, frozen=True, kw_only=True):
    """A runtime message as it stands on the wire. Absent and null both mean: fill it in."""

    type: Annotated[Name, Meta(description="What happened or is asked for.")]
    payload: Annotated[Raw, Meta(description="The content, an object.", extra_json_schema={"type": "object"})]
    id: Annotated[Id | UnsetType | None, Meta(description="Unique id; else Nats-Msg-Id or the position.")] = UNSET
    ts: Annotated[TsMs | UnsetType | None, Meta(description="Unix time in ms; else the stream's time.")] = UNSET
    schema_version: Annotated[Literal["1.0"] | UnsetType | None, Meta(description="Version of this contract.")] = UNSET
    trace_id: Annotated[str | UnsetType | None, Meta(description="W3C trace id, 32 hex digits.")] = UNSET
    span_id: Annotated[str | UnsetType | None, Meta(description="W3C span id, 16 hex digits.")] = UNSET
    tenant: Annotated[str | UnsetType | None, Meta(description="Must be the subject's tenant.")] = UNSET
    workspace: Annotated[str | UnsetType | None, Meta(description="Must be the subject's workspace.")] = UNSET
    actor: Actor | UnsetType | None = UNSET
    idempotency_key: Annotated[Id | UnsetType | None, Meta(description="Identity of the message; else its id.")] = UNSET
    source: Source | UnsetType | None = UNSET
    security_context: SecurityContext | UnsetType | None = UNSET
    causation_id: Annotated[Id | UnsetType | None, Meta(description="The message that caused this one.")] = UNSET
    correlation_id: Annotated[Id | UnsetType | None, Meta(description="Ties together what one request caused.")] = UNSET
    reply_to: Annotated[Id | UnsetType | None, Meta(description="Subject for the answer.")] = UNSET
    entity_id: Annotated[Id | UnsetType | None, Meta(description="The entity that this is about.")] = UNSET
    expected_version: Annotated[
        Annotated[int, Meta(ge=0, le=canonical.INT_MAX)] | UnsetType | None,
        Meta(description="Version that the entity must have; else a conflict event answers."),
    ] = UNSET


_WIRE = Contract(NAME, msgspec.json.Decoder(RawRuntime), "schema_version", VERSION)


def peek_runtime(body: bytes) -> RawRuntime:
    """The fields around the payload as they were sent: the payload is not looked at."""
    return _WIRE.read(body)


def open_runtime(body: bytes) -> tuple[RawRuntime, dict[str, Any], bytes]:
    """A message checked in full: its fields as sent, its payload, and the payload's canonical form for digests."""
    raw = _WIRE.read(body)
    refuse_repeats(NAME, body, ENCODE(raw), tight=True)
    if raw.reply_to:
        subjects.check_subject(raw.reply_to, "reply_to")
    return raw, *read_payload(NAME, raw.payload)


def decode_runtime(body: bytes, *, subject: str, origin: ids.Origin, carried: headers.Headers) -> RuntimeEnvelope:
    """The message in `body`, completed from its subject, its place in the stream and the headers it carried."""
    raw, payload, _ = open_runtime(body)
    return fill(raw, payload, subject=subject, origin=origin, carried=carried)


def encode_runtime(envelope: RuntimeEnvelope) -> bytes:
    """The body of a complete envelope. Refuses what `open_runtime` would refuse."""
    payload = write_payload(NAME, envelope.payload)
    fields = {name: getattr(envelope, name) for name in envelope.__struct_fields__}
    present = {name: value for name, value in fields.items() if value is not None}
    body = ENCODE(RawRuntime(**present | {"payload": payload}))
    if _WIRE.read(body).reply_to:
        subjects.check_subject(str(envelope.reply_to), "reply_to")
    return body


def fill(
    raw: RawRuntime, payload: dict[str, Any], *, subject: str, origin: ids.Origin, carried: headers.Headers
) -> RuntimeEnvelope:
    """The complete envelope. A pure function of the message: see the head of this module."""
    address = subjects.parse(subject)
    id_ = _filled_id(raw, carried, origin)
    context = _filled_trace(raw, carried, id_)
    actor = raw.actor or Actor(UNKNOWN, UNKNOWN)
    return RuntimeEnvelope(
        id=id_,
        ts=_filled_ts(raw, carried, origin),
        type=raw.type,
        trace_id=context.trace_id,
        span_id=context.span_id,
        tenant=_same(raw.tenant, address.tenant, "tenant"),
        workspace=_same(raw.workspace, address.workspace, "workspace"),
        actor=actor,
        payload=payload,
        idempotency_key=_filled_key(raw, carried, id_),
        source=raw.source or Source(UNKNOWN, UNKNOWN),
        security_context=raw.security_context or principal_of(actor),
        causation_id=raw.causation_id or None,
        correlation_id=raw.correlation_id or None,
        reply_to=raw.reply_to or None,
        entity_id=raw.entity_id or None,
        expected_version=None if raw.expected_version is UNSET else raw.expected_version,
    )


def _filled_id(raw: RawRuntime, carried: headers.Headers, origin: ids.Origin) -> str:
    sent = raw.id or carried.get(headers.REPLAY_ID) or carried.get(headers.MSG_ID)
    if not sent:
        return ids.origin_id(origin)
    check_printable(NAME, "id", sent)
    return sent


def _filled_key(raw: RawRuntime, carried: headers.Headers, id_: str) -> str:
    key = raw.idempotency_key or carried.get(headers.REPLAY_IDEMPOTENCY_KEY) or id_
    check_printable(NAME, "idempotency_key", key)
    return key


def _filled_ts(raw: RawRuntime, carried: headers.Headers, origin: ids.Origin) -> int:
    if isinstance(raw.ts, int):
        return raw.ts
    replayed = carried.get(headers.REPLAY_TS, "")
    if replayed.isascii() and replayed.isdigit() and len(replayed) <= len(str(TS_MS_MAX)):
        return int(replayed)
    return origin.timestamp_ns // 1_000_000


def _filled_trace(raw: RawRuntime, carried: headers.Headers, id_: str) -> trace.TraceContext:
    """The body's trace, else the headers', else one that begins with this message."""
    sent = trace.from_fields(raw.trace_id or "", raw.span_id or "")
    if sent is not None:
        return sent
    context = trace.extract(carried)
    if context is not None and raw.trace_id in (None, UNSET, "", context.trace_id):
        return context
    if raw.trace_id and trace.is_trace_id(raw.trace_id):
        return trace.begun_by(id_)._replace(trace_id=raw.trace_id)
    return context or trace.begun_by(id_)


def _same(sent: str | UnsetType | None, expected: str, field: str) -> str:
    if sent and sent != expected:
        raise ContractViolation(f"{NAME}: {field}: is {sent!r}, but the subject says {expected!r}", field=field)
    return expected


def principal_of(actor: Actor) -> SecurityContext:
    kind = actor.role if actor.role in PRINCIPAL_TYPES else "service"
    return SecurityContext(actor.id, kind)  # type: ignore[arg-type]  # narrowed by the set above
