"""The realtime envelope 2024-12-01: what flows on `chat.>` to gateways and browsers.

Fields are camelCase on the wire and snake_case here. Only `chat.message.created` is numbered; other events carry the
last sequence that their producer knew. Unknown fields are ignored, as gateways forward envelopes untouched; an unknown
event is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from oncewire._ground.contracts import canonical, ids
from oncewire._ground.contracts.codec import ENCODE, Contract, inside, refuse_repeats
from oncewire._ground.contracts.message import Id, Utc, check_utc
from oncewire._ground.contracts.subjects import token
from oncewire._ground.errors import ContractViolation

VERSION: Literal["2024-12-01"] = "2024-12-01"
NAME = "RealtimeEnvelope"

Sequence = Annotated[int, Meta(ge=0, le=canonical.INT_MAX)]
Metadata = dict[str, Any]


class DeliveryContract(Struct, frozen=True, rename="camel"):
    """What the transport promises, and the key that makes the rest of the promise."""

    guarantee: Literal["at-least-once", "exactly-once-emulated"]
    dedupe_key: Id


class _Event(Struct, frozen=True, kw_only=True, tag_field="type", rename="camel", omit_defaults=True):
    pass


class MessageCreated(_Event, frozen=True, kw_only=True, tag="chat.message.created"):
    """A message of a conversation, under the next sequence."""

    message_id: Id
    dedupe_id: Id
    role: Literal["user", "assistant", "system"]
    content: str
    model: str | None = None
    citations: Any = None
    metadata: Metadata | None = None


class TokenChunk(_Event, frozen=True, kw_only=True, tag="chat.token.chunk"):
    """A piece of an answer that is being written."""

    message_id: Id
    chunk_id: Id
    token: str
    is_final: bool = False
    metadata: Metadata | None = None


class StreamLifecycle(_Event, frozen=True, kw_only=True, tag="chat.stream.lifecycle"):
    """An answer began, was blocked, or ended."""

    message_id: Id
    status: Literal["started", "blocked", "completed", "errored"]
    detail: Any = None


class Presence(_Event, frozen=True, kw_only=True, tag="chat.presence"):
    """Who is there."""

    user_id: Id
    state: Literal["online", "offline", "typing", "idle"]
    metadata: Metadata | None = None


class AckRequested(_Event, frozen=True, kw_only=True, tag="chat.ack.requested"):
    """History up to this sequence must be fetched elsewhere."""

    up_to_sequence: Sequence


Event = MessageCreated | TokenChunk | StreamLifecycle | Presence | AckRequested


class RealtimeEnvelope(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An event of a conversation."""

    version: Annotated[Literal["2024-12-01"], Meta(description="Version of this protocol.")]
    conversation_id: Annotated[Id, Meta(description="The conversation, one token of its subject.")]
    sequence: Annotated[
        Sequence, Meta(description="Number of the message in its conversation; of other events the last known one.")
    ]
    issued_at: Annotated[Utc, Meta(description="When the event was issued, in UTC.")]
    contract: DeliveryContract
    event: Event
    replay: Annotated[bool, Meta(description="True when a gateway sends it again.")] = False


_WIRE = Contract(NAME, msgspec.json.Decoder(RealtimeEnvelope), "version", VERSION)


def decode_realtime(body: bytes) -> RealtimeEnvelope:
    """The envelope in `body`, or ContractViolation naming the field; UnsupportedVersion for another version."""
    envelope = _WIRE.read(body)
    refuse_repeats(NAME, body, ENCODE(envelope), tight=False)
    _check(envelope)
    return envelope


def encode_realtime(envelope: RealtimeEnvelope) -> bytes:
    """The body of an envelope. Refuses what `decode_realtime` would refuse."""
    body = ENCODE(envelope)
    _check(_WIRE.read(body))
    _check(envelope)
    return body


def _check(envelope: RealtimeEnvelope) -> None:
    check_utc(NAME, "issuedAt", envelope.issued_at)
    token(envelope.conversation_id, "conversationId")
    for name in ("citations", "metadata", "detail"):
        try:
            canonical.canonical(getattr(envelope.event, name, None))  # depth, and numbers that JSON does not have
        except ContractViolation as wrong:
            raise inside(NAME, f"event.{name}", wrong) from None


def identity(envelope: RealtimeEnvelope, *, epoch: str, origin: ids.Origin) -> str:
    """What makes two envelopes the same one. `epoch` is the conversation's, from the relay's headers."""
    match envelope.event:
        case MessageCreated():
            return ids.joined("message", envelope.conversation_id, epoch, envelope.sequence)
        case TokenChunk(message_id=message_id, chunk_id=chunk_id):
            return ids.joined("chunk", message_id, chunk_id)
        case StreamLifecycle(message_id=message_id, status=status):
            return ids.joined("status", message_id, status)
    return ids.position_identity(origin)
