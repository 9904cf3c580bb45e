"""What stands in WebSocket messages: frames of clients, answers, and envelopes as they are sent on. Pure.

Envelopes go out as the bytes that they came in; only `replay` is added to one that is sent again. Each is looked at
once, however many connections it goes to: a body that is no UTF-8 or no JSON object would make browsers drop their
connections, so such a body goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from oncewire._ground.contracts.canonical import INT_MAX
from oncewire._ground.contracts.realtime import VERSION
from oncewire._ground.errors import ContractViolation, OncewireError

TEXT: Final = 0x81
"""The first byte of a text message in one frame."""
NUMBERED: Final = "chat.message.created"
PRESENCE: Final = "chat.presence"
LIFECYCLE: Final = "chat.stream.lifecycle"
METADATA_BYTES_MAX: Final = 4_096

Number = Annotated[int, Meta(ge=0, le=INT_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]

_encode = msgspec.json.Encoder().encode


def frame(body: bytes) -> bytes:
    """A text message, as it stands on the wire from a server: unmasked, in one piece."""
    size = len(body)
    if size < 126:
        return b"%c%c%b" % (TEXT, size, body)
    if size < 65_536:
        return b"%c\x7e%b%b" % (TEXT, size.to_bytes(2, "big"), body)
    return b"%c\x7f%b%b" % (TEXT, size.to_bytes(8, "big"), body)


# ---- what clients send


class JoinRoom(Struct, frozen=True, tag="join_room", rename="camel"):
    """Enter a room. `resume_from_seq` n means: what comes after n; with `resume` "acked": after the last ack."""

    conversation_id: str
    resume_from_seq: Number | None = None
    epoch: str | None = None
    client_id: Name | None = None
    resume: Literal["acked"] | None = None


class LeaveRoom(Struct, frozen=True, tag="leave_room", rename="camel"):
    """Leave a room, whether one is in it or not; answered."""

    conversation_id: str


class Ack(Struct, frozen=True, tag="ack", rename="camel"):
    """Everything up to this sequence has been worked on."""

    conversation_id: str
    sequence: Number


class ResumeFromSeq(Struct, frozen=True, tag="resume_from_seq", rename="camel"):
    """Go on after this sequence: the answer to a control frame."""

    conversation_id: str
    sequence: Number
    epoch: str | None = None


class SetPresence(Struct, frozen=True, tag="presence", rename="camel"):
    """How the client is there."""

    conversation_id: str
    state: Literal["online", "offline", "typing", "idle"]
    metadata: dict[str, Any] | None = None


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Still here; answered."""

    ts: float | None = None


ClientFrame = JoinRoom | LeaveRoom | Ack | ResumeFromSeq | SetPresence | Heartbeat
_client_frame: Callable[[bytes], ClientFrame] = msgspec.json.Decoder(ClientFrame).decode


def read_client_frame(body: bytes) -> ClientFrame:
    """What a client sent, or ContractViolation with one sentence for it."""
    try:
        return _client_frame(body)
    except msgspec.DecodeError as wrong:
        raise ContractViolation(str(wrong)[:200]) from None
    except RecursionError:
        raise ContractViolation("the frame is nested too deeply") from None


# ---- what the gateway says


def hello_frame(connection_id: str) -> bytes:
    return frame(_encode({"type": "hello", "protocol": VERSION, "id": connection_id}))


def joined_frame(conversation_id: str, epoch: str | None, after: int) -> bytes:
    """`after` is the sequence behind which messages follow: a client that asked for none resumes there, should the
    connection break. It is not called `sequence`, since existing clients take any frame with a conversationId and a
    sequence for an envelope."""
    return frame(_encode({"type": "joined", "conversationId": conversation_id, "epoch": epoch, "after": after}))


def left_frame(conversation_id: str) -> bytes:
    """Behind this there is nothing more of the room, until it is joined again."""
    return frame(_encode({"type": "left", "conversationId": conversation_id}))


def heartbeat_frame(now_ms: int) -> bytes:
    return frame(_encode({"type": "heartbeat", "ts": now_ms}))


def control_frame(conversation_id: str, up_to: int, epoch: str | None) -> bytes:
    """Fetch messages up to this sequence by REST, then resume after it."""
    told = {
        "type": "chat.ack.requested",
        "upToSequence": up_to,
        "conversationId": conversation_id,
        "epoch": epoch,
    }
    return frame(_encode({"control": told}))


def error_frame(error: OncewireError, conversation_id: str = "", refused: str = "") -> bytes:
    """A client's frame was refused; the connection goes on. `refused` is that frame's type: whoever joined or resumed
    is not in the room. Only what is retryable is worth sending again."""
    shown = {"type": "error", "code": error.code, "message": error.message, "retryable": error.is_retryable}
    if conversation_id:
        shown["conversationId"] = conversation_id
    if refused:
        shown["frame"] = refused
    return frame(_encode(shown))


# ---- envelopes


class _EventPeek(Struct, frozen=True, gc=False, rename="camel"):
    type: str
    status: str = ""
    message_id: str = ""
    chunk_id: str = ""
    user_id: str = ""
    state: str = ""


class _Peek(Struct, frozen=True, rename="camel"):
    version: str
    conversation_id: str
    sequence: Number
    event: _EventPeek
    replay: Raw | UnsetType = UNSET


_peek = msgspec.json.Decoder(_Peek).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode


class Conversation(NamedTuple):
    """A conversation as somebody may hear it: what is their tenant's alone. Without authentication `tenant` is None,
    and everything is heard."""

    id: str
    tenant: str | None = None


class Envelope:
    """A stored envelope: its bytes, and what the gateway needs to know of them."""

    __slots__ = (
        "_has_replay", "_replay_frame", "body", "chunk_id", "epoch", "is_numbered", "is_passing", "kind", "message_id",
        "place", "sequence", "state", "status", "stored_ns", "user_id",
    )  # fmt: skip

    def __init__(self, place: int, body: bytes, peek: _Peek, epoch: str | None, stored_ns: int) -> None:
        self.place = place
        """Its sequence in the stream."""
        self.stored_ns = stored_ns
        """When the stream stored it, 0 for what it did not."""
        self.body = body
        self.sequence = peek.sequence
        """Its number in the conversation; of an unnumbered one, the last that its producer knew."""
        self.kind = peek.event.type
        self.status = peek.event.status
        self.message_id = peek.event.message_id
        self.chunk_id = peek.event.chunk_id
        self.user_id = peek.event.user_id
        self.state = peek.event.state
        self.is_numbered = peek.event.type == NUMBERED
        self.epoch = epoch if self.is_numbered else None
        self.is_passing = peek.event.type == PRESENCE or place == 0
        """It is not on the subject that is read again: it comes from another one, or a node says it itself."""
        self._has_replay = peek.replay is not UNSET
        self._replay_frame = b""

    @property
    def frame(self) -> bytes:
        """For a WebSocket, as it came."""
        return frame(self.body)

    @property
    def replay_body(self) -> bytes:
        """The same with `replay` true."""
        if self._has_replay:
            return _encode(_fields(self.body) | {"replay": True})
        return b'%b,"replay":true}' % self.body.rstrip()[:-1].rstrip()

    @property
    def replay_frame(self) -> bytes:
        if not self._replay_frame:
            self._replay_frame = frame(self.replay_body)
        return self._replay_frame


def read_envelope(
    conversation_id: str, place: int, body: bytes, epoch: str | None, stored_ns: int = 0
) -> Envelope | None:
    """A stored body as an envelope of this conversation; None when it is none, or another's."""
    try:
        if not body.isascii():
            body.decode()
        peek = _peek(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if peek.version != VERSION or peek.conversation_id != conversation_id:
        return None
    if peek.event.type == NUMBERED and peek.sequence == 0:
        return None
    return Envelope(place, body, peek, epoch, stored_ns)
