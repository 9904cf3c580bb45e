"""MessageEnvelope 1.0: the transport wrapper of domain events, commands and queries on `sr.>` and the platform.

Required fields, UTC timestamps and actor kinds as the spec says; unknown fields are ignored. `event_id` is read as
`message_id` when that is missing, since the platform's producers call it so. A timestamp without an offset, or with
another than UTC, is refused: the contract says UTC, and a guess would be wrong by hours in silence. Digits beyond
microseconds are rounded.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from oncewire._ground.contracts import canonical, ids
from oncewire._ground.contracts.codec import (
    ENCODE,
    ID_CHARS_MAX,
    NAME_CHARS_MAX,
    Contract,
    read_payload,
    read_whole,
    refuse_repeats,
    write_closely,
    write_payload,
    write_whole,
)
from oncewire._ground.errors import ContractViolation

VERSION: Literal["1.0"] = "1.0"
NAME = "MessageEnvelope"

ActorKind = Literal["HUMAN", "AGENT", "SYSTEM"]
Id = Annotated[str, Meta(min_length=1, max_length=ID_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Utc = Annotated[datetime, Meta(tz=True, extra_json_schema={"pattern": "([Zz]|[+-]00:00)$"})]


if TYPE_CHECKING:
    Payload = dict[str, Any]
else:
    # What decodes as this type is within the limits. Other payloads are legal too: the functions below read both.
    Payload = canonical.PLAIN_OBJECT


class MessageEnvelope(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message as its readers get it. Make one with `new_message`, read one with `decode_message`."""

    schema_version: Literal["1.0"]
    message_type: Name
    message_id: Id
    correlation_id: Id | None = None
    causation_id: Id | None = None
    timestamp: Utc
    actor_id: Id
    actor_kind: ActorKind
    payload: Payload
    idempotency_key: Id


class MessageOnWire(Struct, frozen=True, kw_only=True):
    """A message as it stands on the wire: the payload still as text, absent told from null."""

    schema_version: Annotated[Literal["1.0"], Meta(description="Version of this contract.")]
    message_type: Annotated[Name, Meta(description="Matches the domain's event_type.")]
    message_id: Annotated[Id, Meta(description="Unique id of the message; also read from event_id.")]
    correlation_id: Annotated[Id | UnsetType | None, Meta(description="Ties together what one request caused.")] = UNSET
    causation_id: Annotated[Id | UnsetType | None, Meta(description="The message that caused this one.")] = UNSET
    timestamp: Annotated[Utc, Meta(description="When the message was created, in UTC.")]
    actor_id: Annotated[Id, Meta(description="Who triggered this message.")]
    actor_kind: Annotated[ActorKind, Meta(description="What kind of actor that is.")]
    payload: Annotated[Raw, Meta(description="The event itself, an object.", extra_json_schema={"type": "object"})]
    idempotency_key: Annotated[
        Id,
        Meta(
            description="sha256: + hex over the canonical JSON of message_type, message_id, payload (RFC 8785, but "
            "whole numbers with all their digits)."
        ),
    ]


def _event_id_as_message_id(sent: dict[str, Any]) -> dict[str, Any] | None:
    if "message_id" in sent or "event_id" not in sent:
        return None
    return {"message_id" if name == "event_id" else name: value for name, value in sent.items()}


_WHOLE = msgspec.json.Decoder(MessageEnvelope)
_WIRE = Contract(NAME, msgspec.json.Decoder(MessageOnWire), "schema_version", VERSION, _event_id_as_message_id)


def peek_message(body: bytes) -> MessageOnWire:
    """The fields around the payload, for those who route without reading it: the payload is not looked at."""
    return _WIRE.read(body)


def decode_message(body: bytes) -> MessageEnvelope:
    """The message in `body`, or ContractViolation naming the field; UnsupportedVersion for another schema_version."""
    envelope = read_whole(_WHOLE, body)
    if envelope is None:
        return _look_closer(body)[0]
    check(envelope)
    return envelope


def open_message(body: bytes) -> tuple[MessageEnvelope, bytes]:
    """The message in `body` with the canonical form of its payload, for digests."""
    envelope = read_whole(_WHOLE, body)
    if envelope is None:
        return _look_closer(body)
    check(envelope)
    return envelope, canonical.of_plain(envelope.payload)


def _look_closer(body: bytes) -> tuple[MessageEnvelope, bytes]:
    """A message with unknown fields, nulls, an unusual payload, or something wrong."""
    wire = _WIRE.read(body)
    # Tight: re-encoding can lengthen only the timestamp, and by less than any field that could stand there twice.
    refuse_repeats(NAME, body, ENCODE(wire), tight=True)
    check(wire)
    payload, written = read_payload(NAME, wire.payload)
    envelope = MessageEnvelope(
        schema_version=wire.schema_version,
        message_type=wire.message_type,
        message_id=wire.message_id,
        correlation_id=wire.correlation_id or None,
        causation_id=wire.causation_id or None,
        timestamp=wire.timestamp,
        actor_id=wire.actor_id,
        actor_kind=wire.actor_kind,
        payload=payload,
        idempotency_key=wire.idempotency_key,
    )
    return envelope, written


def encode_message(envelope: MessageEnvelope) -> bytes:
    """The body of a message. Refuses what `decode_message` would refuse."""
    body = write_whole(_WHOLE, envelope)
    if body is None:
        payload = write_payload(NAME, envelope.payload)
        fields = {name: getattr(envelope, name) for name in envelope.__struct_fields__}
        present = {name: value for name, value in fields.items() if value is not None}
        body = write_closely(_WIRE, MessageOnWire(**present | {"payload": payload}))
    check(envelope)
    return body


def new_message(
    message_type: str,
    payload: dict[str, Any],
    *,
    message_id: str,
    timestamp: datetime,
    actor_id: str,
    actor_kind: ActorKind,
    correlation_id: str | None = None,
    causation_id: str | None = None,
) -> MessageEnvelope:
    """A message with its idempotency key. Id and time are the caller's: the same message made again is the same."""
    return MessageEnvelope(
        schema_version=VERSION,
        message_type=message_type,
        message_id=message_id,
        timestamp=timestamp,
        actor_id=actor_id,
        actor_kind=actor_kind,
        idempotency_key=ids.idempotency_key(message_type, message_id, payload),
        payload=payload,
        correlation_id=correlation_id,
        causation_id=causation_id,
    )


def check(envelope: MessageEnvelope | MessageOnWire) -> None:
    """What types alone cannot say."""
    if envelope.timestamp.tzinfo is UTC and (envelope.message_id + envelope.idempotency_key).isprintable():
        return
    check_utc(NAME, "timestamp", envelope.timestamp)
    check_printable(NAME, "message_id", envelope.message_id)
    check_printable(NAME, "idempotency_key", envelope.idempotency_key)


def check_utc(name: str, field: str, value: datetime) -> None:
    if value.tzinfo is not UTC:
        raise ContractViolation(
            f"{name}: {field}: is not in UTC: {value.isoformat()}", field=field, hint="End it in Z."
        )


def check_printable(name: str, field: str, value: str) -> None:
    """Ids travel in headers, where a line break would begin the next one."""
    if not value.isprintable():
        raise ContractViolation(f"{name}: {field}: has a control character: {value!r}", field=field)
