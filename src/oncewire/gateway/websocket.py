"""One WebSocket connection: frames in through `websockets`' sans-io protocol, shared bytes out to the transport.

Nothing here waits and nothing is queued: what goes out is in the transport's buffer, and when that is full the rooms
are told to hold back.

Every frame counts, fragments and pings included. A client gets so many a second; then its socket is not read, and what
was read already waits here until the second is over. So one client costs the others no more than its frames, however
many arrive in one read.

Close codes that are ours:

    1001  the node stops            reconnect and resume
    4000  silent for too long       reconnect and resume
    4001  credential no longer good reconnect with one that is, and resume
    4008  too slow                  reconnect and resume
    4401  no credential, or refused to a web page, which is not shown the status of an answer
    4403  it does not allow to join the same
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Final

from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side, State
from websockets.utils import accept_key

from oncewire._ground.contracts.subjects import TOKEN_BYTES_MAX, token
from oncewire._ground.errors import AuthenticationFailed, ContractViolation, OncewireError
from oncewire._ground.http import OPEN, Heir, Principal, Request
from oncewire.gateway import frames
from oncewire.gateway.frames import Ack, ClientFrame, Heartbeat, JoinRoom, LeaveRoom, ResumeFromSeq, SetPresence
from oncewire.gateway.rooms import Member, Write

if TYPE_CHECKING:
    from oncewire.gateway.service import Gateway

SILENT: Final = 4000
REVOKED: Final = 4001
UNKNOWN: Final = 4401
FORBIDDEN: Final = 4403
SLOW: Final = 4008
REASON_CHARS_MAX: Final = 120
"""A close frame has room for 123 bytes."""
FRAME_BYTES_MIN: Final = 6
"""A masked frame without content. So many bytes hold at most one frame that ends in them."""
CLOSE_S_MAX: Final = 5.0
"""How long a close waits for the client to take it."""
NEVER: Final = float("inf")

RULES: Final[dict[type[ClientFrame], str]] = {
    JoinRoom: "join",
    LeaveRoom: OPEN,
    Ack: "join",
    ResumeFromSeq: "join",
    SetPresence: "speak",
    Heartbeat: OPEN,
}
"""What one must be allowed to do in the conversation that a frame names. Every client may leave, and say it lives."""

InRoom = JoinRoom | LeaveRoom | Ack | ResumeFromSeq | SetPresence

_quiet = logging.getLogger("oncewire.gateway.frames")
_quiet.setLevel(logging.CRITICAL)  # what clients do wrong is their business, and is counted


def is_offered(request: Request) -> bool:
    return request.can_upgrade and request.header(b"upgrade").lower() == "websocket"


def accept(gateway: Gateway, request: Request, refused: OncewireError | None = None) -> None:
    """Answer an offer to speak WebSocket. One that is refused is closed at once, with the reason."""
    key = request.header(b"sec-websocket-key")
    if request.header(b"sec-websocket-version") != "13" or len(key) != 24:
        request.refuse(426, "INVALID_ARGUMENT", "this is WebSocket 13", b"Sec-WebSocket-Version: 13\r\n")
        return
    lines = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n" % accept_key(key).encode()
    principal = request.principal

    def make(transport: asyncio.Transport) -> Socket:
        socket = Socket(gateway, transport, principal)
        if refused is None:
            socket.send(frames.hello_frame(socket.id))
        else:
            code = UNKNOWN if isinstance(refused, AuthenticationFailed) else FORBIDDEN
            socket.close(code, refused.message[:REASON_CHARS_MAX])
        return socket

    request.take_over(101, lines, make)


class Socket(Heir):
    """See the module's head."""

    __slots__ = (
        "_began", "_fragments", "_frames", "_gateway", "_held", "_is_closing", "_is_full", "_is_heard", "_is_pinged",
        "_is_text", "_protocol", "_transport", "ack_keys", "id", "rooms",
    )  # fmt: skip

    def __init__(self, gateway: Gateway, transport: asyncio.Transport, principal: Principal) -> None:
        self._gateway = gateway
        self._transport = transport
        self.principal = principal
        self.id = str(uuid.uuid4())
        self.rooms: dict[str, Member] = {}
        self.ack_keys: dict[str, str] = {}
        """By conversation: under which key its acks are kept, '' when they are not."""
        self._protocol = Protocol(Side.SERVER, state=State.OPEN, max_size=gateway.limits.frame_bytes_max, logger=_quiet)
        self._fragments: list[bytes] = []
        self._is_text = True
        self._is_closing = self._is_full = self._is_pinged = False
        self._is_heard = True
        self._began = gateway.now
        """When the second began in which `_frames` were read."""
        self._frames = 0
        self._held = b""
        """Read, and not looked at before the second is over."""
        self.deadline = gateway.now + gateway.limits.ping_s
        transport.set_write_buffer_limits(high=gateway.limits.buffer_bytes_max)
        gateway.opened(self)

    # ---- the socket

    def data_received(self, data: bytes) -> None:
        self._is_heard = True
        if self._is_closing:
            return
        if self._held:
            self._held += data
        else:
            self._take(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._is_closing = True
        self._gateway.lost(self)
        self.rooms.clear()

    def pause_writing(self) -> None:
        self._is_full = True
        self.deadline = self._gateway.now + self._gateway.limits.slow_s_max
        for conversation_id, member in self.rooms.items():
            self._gateway.full(self, conversation_id, member)

    def resume_writing(self) -> None:
        self._is_full = False
        self.deadline = self._gateway.now + self._gateway.limits.ping_s
        if not self._is_closing:
            for conversation_id, member in list(self.rooms.items()):
                self._gateway.drained(self, conversation_id, member)

    # ---- frames in

    def _take(self, data: bytes) -> None:
        """As many frames as the client has left in this second. Nothing is lost, and nobody is cut for the rest."""
        limit = self._gateway.limits.frames_per_s_max
        if self._gateway.now - self._began >= 1.0:
            self._began, self._frames = self._gateway.now, 0
        at = 0
        while at < len(data) and not self._is_closing:
            if self._frames >= limit:
                self._held = data[at:]
                self._transport.pause_reading()
                asyncio.get_running_loop().call_later(1.0, self._read_on)
                return
            end = at + (limit - self._frames) * FRAME_BYTES_MIN
            self._protocol.receive_data(data[at:end])
            at = end
            for event in self._protocol.events_received():
                if isinstance(event, Frame) and not self._is_closing:
                    self._frames += 1
                    self._on_frame(event)
            self._answer()

    def _read_on(self) -> None:
        held, self._held = self._held, b""
        if self._is_closing or self._transport.is_closing():
            return
        self._began, self._frames = self._gateway.now, 0
        self._transport.resume_reading()
        self._take(held)

    def _on_frame(self, event: Frame) -> None:
        if event.opcode is Opcode.PONG or event.opcode is Opcode.PING or event.opcode is Opcode.CLOSE:
            return
        if event.opcode is not Opcode.CONT:
            self._is_text = event.opcode is Opcode.TEXT
        self._fragments.append(bytes(event.data))
        if len(self._fragments) > self._gateway.limits.fragments_max:
            self.close(CloseCode.MESSAGE_TOO_BIG, f"more than {self._gateway.limits.fragments_max} fragments")
            return
        if not event.fin:
            return
        body = self._fragments[0] if len(self._fragments) == 1 else b"".join(self._fragments)
        self._fragments = []
        if not self._is_text:
            self.close(CloseCode.UNSUPPORTED_DATA, "frames are text")
        else:
            self._on_message(body)

    def _on_message(self, body: bytes) -> None:
        try:
            body.decode()
        except UnicodeDecodeError:
            self.close(CloseCode.INVALID_DATA, "a frame is not UTF-8")
            return
        conversation_id = kind = ""
        try:
            sent = frames.read_client_frame(body)
            if isinstance(sent, Heartbeat):
                self.send(frames.heartbeat_frame(time.time_ns() // 1_000_000))
                return
            kind = str(type(sent).__struct_config__.tag)
            conversation_id = sent.conversation_id if len(sent.conversation_id) <= TOKEN_BYTES_MAX else ""
            token(sent.conversation_id, "conversationId")
            if action := RULES[type(sent)]:
                self.principal.require(action, conversation_id)
            self._do(conversation_id, sent)
        except OncewireError as error:
            self._gateway.count("refused_frames")
            self.send(frames.error_frame(error, conversation_id, kind))

    def _do(self, conversation_id: str, sent: InRoom) -> None:
        gateway = self._gateway
        if isinstance(sent, JoinRoom):
            gateway.join(self, conversation_id, sent)
            return
        if isinstance(sent, LeaveRoom):
            gateway.leave(self, conversation_id)
            return
        if conversation_id not in self.rooms:
            raise ContractViolation("join the room first", field="conversationId")
        if isinstance(sent, Ack):
            gateway.ack(self, conversation_id, sent)
        elif isinstance(sent, ResumeFromSeq):
            gateway.resume(self, conversation_id, sent)
        else:
            gateway.presence(self, conversation_id, sent)

    # ---- out

    def refused(self, conversation_id: str, frame: str, error: OncewireError) -> None:
        self._gateway.refused(self, conversation_id, frame, error)

    @property
    def write(self) -> Write:
        """The way out for rooms: the transport's own, without a step in between."""
        return self._transport.write

    @property
    def is_full(self) -> bool:
        return self._is_full

    def send(self, data: bytes) -> None:
        if not self._is_closing:
            self._transport.write(data)

    def _answer(self) -> None:
        """What the protocol itself has to say: pongs, and the end."""
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._end()
        if self._protocol.close_expected() and not self._is_closing:
            self._end()
        problem = self._protocol.parser_exc
        if problem is not None and isinstance(problem, ProtocolError):
            self._gateway.count("refused_frames")

    def close(self, code: int, reason: str) -> None:
        """Say why, and close. What is in the buffer is still sent, if the client takes it."""
        if self._is_closing:
            return
        self._protocol.fail(code, reason)
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
        self._end()

    def _end(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._fragments, self._held = [], b""
            self._gateway.leave_all(self)
        self.deadline = self._gateway.now + CLOSE_S_MAX
        if not self._transport.is_closing():
            try:
                self._transport.write_eof()
            except OSError:  # it has gone while it was not read
                self._transport.abort()
                return
            self._transport.resume_reading()  # what it still sends is thrown away: unread, it would cut our close off

    # ---- what the front calls

    def overdue(self) -> None:
        if self._is_closing:
            self.abort()
        elif self._is_full:
            self._gateway.count("slow_clients")
            self.close(SLOW, "too slow: reconnect and resume")
        elif self._is_heard:
            self._is_heard = self._is_pinged = False
            self.deadline = self._gateway.now + self._gateway.limits.ping_s
        elif not self._is_pinged:
            self._is_pinged = True
            self.deadline = self._gateway.now + self._gateway.limits.ping_s
            self._protocol.send_ping(b"")
            self._answer()
        else:
            self.close(SILENT, "silent for too long: reconnect and resume")

    def revoke(self) -> None:
        self._gateway.count("revoked_clients")
        self.close(REVOKED, "the credential is no longer good: reconnect with another")

    def stop(self) -> None:
        self.close(CloseCode.GOING_AWAY, "the gateway stops: reconnect and resume")

    def abort(self) -> None:
        self._transport.abort()
