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

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from oncewire._ground import native
from oncewire._ground.contracts import canonical, headers, ids, subjects, trace
from oncewire._ground.contracts.codec import (
    ENCODE,
    ID_CHARS_MAX,
    Contract,
    read_all,
    read_lines,
    read_payload,
    refuse_repeats,
    write_closely,
    write_payload,
    write_whole,
)
from oncewire._ground.contracts.message import Id, Name, Payload, check_printable
from oncewire._ground.errors import ContractViolation
from oncewire._ground.fields import columns

VERSION: Literal["1.0"] = "1.0"
NAME = "RuntimeEnvelope"
TS_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999."""

UNKNOWN = "unknown"
PrincipalType = Literal["service", "agent", "user", "system"]
PRINCIPAL_TYPES: frozenset[str] = frozenset(get_args(PrincipalType))
TsMs = Annotated[int, Meta(ge=0, le=TS_MS_MAX)]
EntityVersion = Annotated[int, Meta(ge=0, le=canonical.INT_MAX)]


class Actor(Struct, frozen=True, gc=False):
    """Who acted, and in what role."""

    id: Id
    role: Name


class Source(Struct, frozen=True, gc=False):
    """Which agent sent it, through which adapter."""

    agent: Name
    adapter: Name


class SecurityContext(Struct, frozen=True, gc=False):
    """On whose authority."""

    principal_id: Id
    principal_type: PrincipalType


class RuntimeEnvelope(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A message as every handler gets it, complete."""

    id: Id
    ts: TsMs
    type: Name
    schema_version: Literal["1.0"]
    trace_id: str
    span_id: str
    tenant: str
    workspace: str
    actor: Actor
    payload: Payload
    idempotency_key: Id
    source: Source
    security_context: SecurityContext
    causation_id: Id | None = None
    correlation_id: Id | None = None
    reply_to: Id | None = None
    entity_id: Id | None = None
    expected_version: EntityVersion | None = None


class RuntimeOnWire(Struct, frozen=True, kw_only=True):
    """A runtime message as it stands on the wire. Absent and null both mean: fill it in."""

    id: Annotated[Id | UnsetType | None, Meta(description="Unique id; else Nats-Msg-Id or the position.")] = UNSET
    ts: Annotated[TsMs | UnsetType | None, Meta(description="Unix time in ms; else the stream's time.")] = UNSET
    type: Annotated[Name, Meta(description="What happened or is asked for.")]
    schema_version: Annotated[Literal["1.0"] | UnsetType | None, Meta(description="Version of this contract.")] = UNSET
    trace_id: Annotated[str | UnsetType | None, Meta(description="W3C trace id, 32 hex digits.")] = UNSET
    span_id: Annotated[str | UnsetType | None, Meta(description="W3C span id, 16 hex digits.")] = UNSET
    tenant: Annotated[str | UnsetType | None, Meta(description="Must be the subject's tenant.")] = UNSET
    workspace: Annotated[str | UnsetType | None, Meta(description="Must be the subject's workspace.")] = UNSET
    actor: Actor | UnsetType | None = UNSET
    payload: Annotated[Raw, Meta(description="The content, an object.", extra_json_schema={"type": "object"})]
    idempotency_key: Annotated[Id | UnsetType | None, Meta(description="Identity of the message; else its id.")] = UNSET
    source: Source | UnsetType | None = UNSET
    security_context: SecurityContext | UnsetType | None = UNSET
    causation_id: Annotated[Id | UnsetType | None, Meta(description="The message that caused this one.")] = UNSET
    correlation_id: Annotated[Id | UnsetType | None, Meta(description="Ties together what one request caused.")] = UNSET
    reply_to: Annotated[Id | UnsetType | None, Meta(description="Subject for the answer.")] = UNSET
    entity_id: Annotated[Id | UnsetType | None, Meta(description="The entity that this is about.")] = UNSET
    expected_version: Annotated[
        EntityVersion | UnsetType | None,
        Meta(description="Version that the entity must have; else a conflict event answers."),
    ] = UNSET


NO_ACTOR = Actor(UNKNOWN, UNKNOWN)
NO_SOURCE = Source(UNKNOWN, UNKNOWN)
_WHOLE = msgspec.json.Decoder(RuntimeEnvelope)
_PAYLOAD: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(Payload)
_MEMBERS = RuntimeEnvelope.__struct_fields__[:15]
"""Up to the correlation: what most messages have of it."""
_WIRE = Contract(NAME, msgspec.json.Decoder(RuntimeOnWire), "schema_version", VERSION)


def peek_runtime(body: bytes) -> RuntimeOnWire:
    """The fields around the payload as they were sent: the payload is not looked at."""
    return _WIRE.read(body)


def check_runtime(body: bytes) -> tuple[RuntimeOnWire, dict[str, Any], bytes]:
    """A message checked in full, as it was sent: its fields, its payload, and the payload's canonical form."""
    wire = _WIRE.read(body)
    refuse_repeats(NAME, body, ENCODE(wire), tight=True)
    if wire.reply_to:
        subjects.check_subject(wire.reply_to, "reply_to")
    return wire, *read_payload(NAME, wire.payload)


def decode_runtime(body: bytes, *, subject: str, origin: ids.Origin, carried: headers.Headers) -> RuntimeEnvelope:
    """The message in `body`, completed from its subject, its place in the stream and the headers it carried."""
    whole = open_complete(body, subject) or open_runtime(body, subject=subject, origin=origin, carried=carried)
    return whole[0]


def open_runtime(
    body: bytes, *, subject: str, origin: ids.Origin, carried: headers.Headers
) -> tuple[RuntimeEnvelope, bytes]:
    """The same, with the canonical form of its payload, for digests."""
    wire, payload, written = check_runtime(body)
    return fill(wire, payload, subject=subject, origin=origin, carried=carried), written


def open_complete(body: bytes, subject: str) -> tuple[RuntimeEnvelope, bytes] | None:
    """What `open_runtime` gives, in one go, if the message needs nothing from where it stands. None: look closer."""
    (envelope,), written = open_all_complete((body,), (subjects.parse(subject),))
    return (envelope, written[0]) if envelope is not None else None


def open_all_complete(
    bodies: Sequence[bytes], addresses: Sequence[subjects.Address]
) -> tuple[list[RuntimeEnvelope | None], list[bytes]]:
    """The envelope of each, None where one must look closer, and the canonical payloads of those that are there.
    `addresses` is where their subjects lead."""
    complete, left = _read_plain(bodies, addresses)
    if left:
        closer = _read_complete([bodies[at] for at in left], [addresses[at] for at in left])
        for at, envelope in zip(left, closer, strict=True):
            complete[at] = envelope
    there = complete if all(complete) else [envelope for envelope in complete if envelope is not None]
    return complete, canonical.of_all_plain(columns(there, RuntimeEnvelope, "payload")[0])


def _read_plain(
    bodies: Sequence[bytes], addresses: Sequence[subjects.Address]
) -> tuple[list[RuntimeEnvelope | None], Sequence[int]]:
    """Those that are spelled as `encode_runtime` spells them, where that is compiled, and the numbers of the others."""
    if native.envelopes is None:
        return [None] * len(bodies), range(len(bodies))
    return native.envelopes(
        bodies, addresses, _read_payloads, _MEMBERS, RuntimeEnvelope, Actor, Source, SecurityContext
    )


def _read_payloads(lines: bytes) -> list[dict[str, Any] | None]:
    """The object in each line, None where one must look closer."""
    return read_lines(_PAYLOAD, lines)


def _read_complete(bodies: Sequence[bytes], addresses: Sequence[subjects.Address]) -> Sequence[RuntimeEnvelope | None]:
    complete = read_all(_WHOLE, bodies)
    if _are_complete(complete, addresses):
        return complete
    return [
        envelope if envelope is not None and _is_complete(envelope, address) else None
        for envelope, address in zip(complete, addresses, strict=True)
    ]


def _are_complete(envelopes: Sequence[RuntimeEnvelope | None], addresses: Sequence[subjects.Address]) -> bool:
    """Whether all that are there are complete, at half the cost of asking for each. False: ask."""
    there = [one for one in envelopes if one is not None]
    if len(there) < len(envelopes):
        addresses = [address for one, address in zip(envelopes, addresses, strict=True) if one is not None]
    strays = [
        one
        for one, address in zip(there, addresses, strict=True)
        if one.tenant != address.tenant or one.workspace != address.workspace or one.reply_to
    ]
    return (
        not strays
        and trace.are_all_ids([one.trace_id for one in there], [one.span_id for one in there])
        and headers.is_plain("".join([one.id + one.idempotency_key for one in there]))
    )


def _is_complete(envelope: RuntimeEnvelope, address: subjects.Address) -> bool:
    """Whether `fill` would give the same envelope."""
    return (
        envelope.tenant == address.tenant
        and envelope.workspace == address.workspace
        and trace.are_ids(envelope.trace_id, envelope.span_id)
        and (envelope.id + envelope.idempotency_key).isprintable()
        and not envelope.reply_to
    )


def encode_runtime(envelope: RuntimeEnvelope) -> bytes:
    """The body of a complete envelope. Refuses what `check_runtime` would refuse."""
    body = write_whole(_WHOLE, envelope)
    if body is None:
        payload = write_payload(NAME, envelope.payload)
        fields = {name: getattr(envelope, name) for name in envelope.__struct_fields__}
        present = {name: value for name, value in fields.items() if value is not None}
        body = write_closely(_WIRE, RuntimeOnWire(**present | {"payload": payload}))
    if envelope.reply_to:
        subjects.check_subject(envelope.reply_to, "reply_to")
    check_printable(NAME, "id", envelope.id)
    check_printable(NAME, "idempotency_key", envelope.idempotency_key)
    return body


Frame = tuple[str, ...]
"""The text of an envelope around the eight fields that change from message to message."""
_HOLE = msgspec.Raw(b"\0")
"""No JSON text has this byte: the encoder escapes it in strings."""
_ENCODE_LINES = msgspec.json.Encoder().encode_lines
PLAIN_BYTES_MAX = 64 * 1024
FRAME_BYTES_MAX = 16 * 1024
FRAMED_BYTES_MAX = PLAIN_BYTES_MAX + FRAME_BYTES_MAX + 16 * 1024
"""The rest is for the ids: two of our own, two of at most 512 characters, six bytes each when they are escaped."""


def frame(
    type_: str, *, tenant: str, workspace: str, actor: Actor, source: Source, security_context: SecurityContext
) -> Frame | None:
    """What the messages of one sender on one subject share, checked by `encode_runtime` and written once. None: it is
    so long that they are better written one by one."""
    sample = RuntimeEnvelope(
        id="x", ts=0, type=type_, schema_version=VERSION, trace_id="", span_id="", tenant=tenant, workspace=workspace,
        actor=actor, payload={}, idempotency_key="x", source=source, security_context=security_context,
        causation_id="x", correlation_id="x",
    )  # fmt: skip
    encode_runtime(sample)
    varying = ("id", "ts", "trace_id", "span_id", "payload", "idempotency_key", "causation_id", "correlation_id")
    text = ENCODE(msgspec.structs.replace(sample, **dict.fromkeys(varying, _HOLE)))
    return tuple(text.decode().split("\0")) if len(text) <= FRAME_BYTES_MAX else None


Caused = tuple[Frame, bytes, str, str, RuntimeEnvelope]
"""A message that follows from another: frame, payload (from `write_plain`), id, span, and what caused it."""


def write_plain(payload: dict[str, Any], cause: RuntimeEnvelope) -> bytes | None:
    """The text of a payload that may go into a frame. None: let `encode_runtime` look closer, and say what is wrong."""
    try:
        written = ENCODE(payload)
        if not (native.is_plain is not None and native.is_plain(payload)) and _PAYLOAD.decode(written) != payload:
            return None  # the encoder makes null of NaN, for one
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    is_short = len(cause.id) <= ID_CHARS_MAX and (not cause.correlation_id or len(cause.correlation_id) <= ID_CHARS_MAX)
    return written if is_short and len(written) <= PLAIN_BYTES_MAX else None


def write_all_caused(messages: Sequence[Caused]) -> list[bytes]:
    """What `encode_runtime` would write for each, at a quarter of its cost: time and trace are those of the cause, and
    so is the correlation, which begins with it. None is longer than FRAMED_BYTES_MAX."""
    causes = [message[4] for message in messages]
    ids_ = _ENCODE_LINES([cause.id for cause in causes]).decode().split("\n")
    correlations = [
        id_ if cause.correlation_id is None else ENCODE(cause.correlation_id).decode()
        for id_, cause in zip(ids_, causes, strict=False)  # a text ends in a line break
    ]
    bodies: list[bytes] = []
    for (around, payload, id_, span_id, cause), caused, correlation in zip(messages, ids_, correlations, strict=False):
        p0, p1, p2, p3, p4, p5, p6, p7, p8 = around
        bodies.append(
            f'{p0}"{id_}"{p1}{cause.ts}{p2}"{cause.trace_id}"{p3}"{span_id}"{p4}{payload.decode()}{p5}"{id_}"{p6}{caused}{p7}'
            f"{correlation}{p8}".encode()
        )
    return bodies


def fill(
    wire: RuntimeOnWire, payload: dict[str, Any], *, subject: str, origin: ids.Origin, carried: headers.Headers
) -> RuntimeEnvelope:
    """The complete envelope. A pure function of the message: see the head of this module."""
    address = subjects.parse(subject)
    id_ = _filled_id(wire, carried, origin)
    context = _filled_trace(wire, carried, id_)
    actor = wire.actor or NO_ACTOR
    return RuntimeEnvelope(
        id=id_,
        ts=_filled_ts(wire, carried, origin),
        type=wire.type,
        schema_version=VERSION,
        trace_id=context.trace_id,
        span_id=context.span_id,
        tenant=_same(wire.tenant, address.tenant, "tenant"),
        workspace=_same(wire.workspace, address.workspace, "workspace"),
        actor=actor,
        payload=payload,
        idempotency_key=_filled_key(wire, carried, id_),
        source=wire.source or NO_SOURCE,
        security_context=wire.security_context or principal_of(actor),
        causation_id=wire.causation_id or None,
        correlation_id=wire.correlation_id or None,
        reply_to=wire.reply_to or None,
        entity_id=wire.entity_id or None,
        expected_version=None if wire.expected_version is UNSET else wire.expected_version,
    )


def _filled_id(wire: RuntimeOnWire, carried: headers.Headers, origin: ids.Origin) -> str:
    sent = wire.id or carried.get(headers.REPLAY_ID) or carried.get(headers.MSG_ID)
    if not sent:
        return ids.origin_id(origin)
    check_printable(NAME, "id", sent)
    return sent


def _filled_key(wire: RuntimeOnWire, carried: headers.Headers, id_: str) -> str:
    key = wire.idempotency_key or carried.get(headers.REPLAY_IDEMPOTENCY_KEY) or id_
    check_printable(NAME, "idempotency_key", key)
    return key


def _filled_ts(wire: RuntimeOnWire, carried: headers.Headers, origin: ids.Origin) -> int:
    if isinstance(wire.ts, int):
        return wire.ts
    replayed = carried.get(headers.REPLAY_TS, "")
    if replayed.isascii() and replayed.isdigit() and len(replayed) <= len(str(TS_MS_MAX)):
        return int(replayed)
    return origin.timestamp_ns // 1_000_000


def _filled_trace(wire: RuntimeOnWire, carried: headers.Headers, id_: str) -> trace.TraceContext:
    """The body's trace, else the headers', else one that begins with this message."""
    if wire.trace_id and wire.span_id and trace.are_ids(wire.trace_id, wire.span_id):
        return trace.TraceContext(wire.trace_id, wire.span_id)
    context = trace.extract(carried)
    if context is not None and wire.trace_id in (None, UNSET, "", context.trace_id):
        return context
    if wire.trace_id and trace.is_trace_id(wire.trace_id):
        return trace.begun_by(id_)._replace(trace_id=wire.trace_id)
    return context or trace.begun_by(id_)


def check_named(envelope: RuntimeEnvelope | RuntimeOnWire, subject: str) -> subjects.Address:
    """Where a message on `subject` leads. ContractViolation for one that names another tenant or workspace, or that has
    ids which cannot travel in headers."""
    address = subjects.parse(subject)
    _same(envelope.tenant, address.tenant, "tenant")
    _same(envelope.workspace, address.workspace, "workspace")
    check_printable(NAME, "id", envelope.id or "")
    check_printable(NAME, "idempotency_key", envelope.idempotency_key or "")
    return address


def _same(sent: str | UnsetType | None, expected: str, field: str) -> str:
    if sent and sent != expected:
        raise ContractViolation(f"{NAME}: {field}: is {sent!r}, but the subject says {expected!r}", field=field)
    return expected


def principal_of(actor: Actor) -> SecurityContext:
    kind = actor.role if actor.role in PRINCIPAL_TYPES else "service"
    return SecurityContext(actor.id, kind)  # type: ignore[arg-type]  # narrowed by the set above
