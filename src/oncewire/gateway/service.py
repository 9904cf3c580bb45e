"""The gateway as its connections see it: rooms, channels, acks and presence of one node, behind one check per room."""

from __future__ import annotations

from oncewire._ground.errors import OncewireError, Overloaded
from oncewire._ground.http import ANYONE, Principal, Server
from oncewire.gateway.acks import Acked, Acks, key_of
from oncewire.gateway.frames import Ack, Conversation, JoinRoom, ResumeFromSeq, SetPresence, error_frame, left_frame
from oncewire.gateway.limits import Limits
from oncewire.gateway.node import Node
from oncewire.gateway.presence import Presences
from oncewire.gateway.rooms import Member, Phase
from oncewire.gateway.sse import Source
from oncewire.gateway.websocket import Socket


def heard_by(principal: Principal, conversation_id: str) -> Conversation:
    """A conversation as a principal may hear it: what is their tenant's; all of it where nobody asks who is there."""
    return Conversation(conversation_id, None if principal is ANYONE else principal.tenant)


class Gateway:
    """What a connection may ask for."""

    def __init__(self, node: Node, acks: Acks, presences: Presences) -> None:
        self.node = node
        self.limits: Limits = node.limits
        self.acks = acks
        self.presences = presences
        self.sockets: set[Socket] = set()
        self.sources = 0
        self.server: Server | None = None
        """The front that it listens on; set by who starts it."""

    @property
    def now(self) -> float:
        """The front's time."""
        assert self.server is not None, "the gateway is not served"
        return self.server.now

    def count(self, what: str) -> None:
        self.node.counts[what] += 1

    # ---- sockets

    def opened(self, socket: Socket) -> None:
        self.sockets.add(socket)

    def lost(self, socket: Socket) -> None:
        self.leave_all(socket)
        self.sockets.discard(socket)
        if self.server is not None:
            self.server.closed(socket)

    def leave(self, socket: Socket, conversation_id: str) -> None:
        self._leave(socket, conversation_id)
        socket.send(left_frame(conversation_id))

    def leave_all(self, socket: Socket) -> None:
        for conversation_id in list(socket.rooms):
            self._leave(socket, conversation_id)

    def _leave(self, socket: Socket, conversation_id: str) -> None:
        member = socket.rooms.pop(conversation_id, None)
        if member is not None:
            socket.ack_keys.pop(conversation_id, None)
            self.node.leave(heard_by(socket.principal, conversation_id), member)
            self.presences.left(conversation_id, socket)
            self.acks.flush_soon()

    def join(self, socket: Socket, conversation_id: str, sent: JoinRoom) -> None:
        member = socket.rooms.get(conversation_id)
        if member is None:
            if len(socket.rooms) >= self.limits.rooms_per_client_max:
                raise Overloaded(f"a client may be in {self.limits.rooms_per_client_max} rooms")
            member = Member(socket, socket.write)
            member.is_full = socket.is_full
        ack_key = key_of(socket.principal, sent.client_id or "", conversation_id)
        if sent.resume == "acked":
            socket.rooms[conversation_id], socket.ack_keys[conversation_id] = member, ack_key
            self.node.spawn(self._join_acked(socket, conversation_id, member, sent))
            return
        self.node.join(heard_by(socket.principal, conversation_id), member, sent.resume_from_seq, sent.epoch)
        socket.rooms[conversation_id], socket.ack_keys[conversation_id] = member, ack_key

    async def _join_acked(self, socket: Socket, conversation_id: str, member: Member, sent: JoinRoom) -> None:
        """Resume after the last ack; a client that has none begins where it says, else at the oldest message."""
        try:
            key = socket.ack_keys[conversation_id]
            acked = await self.acks.get(key) if key else None
            start = acked or Acked(sent.resume_from_seq or 0, sent.epoch)
            if socket.rooms.get(conversation_id) is member:
                self.node.join(heard_by(socket.principal, conversation_id), member, start.sequence, start.epoch)
        except OncewireError as error:
            self.refused(socket, conversation_id, "join_room", error)

    def refused(self, socket: Socket, conversation_id: str, frame: str, error: OncewireError) -> None:
        """What a join or a resume came to: the client is not in the room."""
        if conversation_id in socket.rooms:
            self._leave(socket, conversation_id)
            self.count("refused_frames")
            socket.send(error_frame(error, conversation_id, frame))

    def resume(self, socket: Socket, conversation_id: str, sent: ResumeFromSeq) -> None:
        conversation = heard_by(socket.principal, conversation_id)
        self.node.join(conversation, socket.rooms[conversation_id], sent.sequence, sent.epoch, is_resume=True)

    def ack(self, socket: Socket, conversation_id: str, sent: Ack) -> None:
        """Nobody has worked on more than they got. A member that must fetch history first may be of an older epoch."""
        key, member = socket.ack_keys[conversation_id], socket.rooms[conversation_id]
        if key and member.phase is not Phase.WAITING:
            self.acks.note(key, Acked(min(sent.sequence, member.last), member.epoch))

    def presence(self, socket: Socket, conversation_id: str, sent: SetPresence) -> None:
        self.presences.set(conversation_id, socket, sent)

    def full(self, socket: Socket, conversation_id: str, member: Member) -> None:
        member.is_full = True
        room = self.node.rooms.get(heard_by(socket.principal, conversation_id))
        if room is not None:
            room.full(member)

    def drained(self, socket: Socket, conversation_id: str, member: Member) -> None:
        member.is_full = False
        room = self.node.rooms.get(heard_by(socket.principal, conversation_id))
        if room is not None:
            self.node.perform(room, room.drained(member))

    # ---- event sources

    def listen(self, source: Source, last_event_id: str) -> None:
        self.sources += 1
        self.node.spawn(self._listen(source, last_event_id))

    async def _listen(self, source: Source, last_event_id: str) -> None:
        try:
            await self.node.listen(source.conversation, source.listener, last_event_id)
        except OncewireError as error:
            source.lost(error.message)

    def stop_listening(self, source: Source) -> None:
        self.sources -= 1
        self.node.stop_listening(source.conversation, source.listener)
        if self.server is not None:
            self.server.closed(source)

    def listener_full(self, source: Source) -> None:
        source.listener.is_full = True
        self.node.full(source.conversation, source.listener)

    def listener_drained(self, source: Source) -> None:
        source.listener.is_full = False
        self.node.step(source.conversation, source.listener)
