"""Presence: who is in a conversation and how, on every node.

A client says how it is there (online, typing, idle, offline); its node publishes that on the conversation's presence
subject, and every node passes it on to the members of its room. A client that goes, or is cut off, is published as
offline by its node; who types and says nothing more is online again after a while. Only who has announced itself is
there: a room of silent readers costs nothing.

Nodes say every few seconds that they live (plain NATS, nothing is stored), and every presence names its node. When a
node falls silent, each other node tells the members of its rooms that whoever was there through it is offline.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from oncewire._ground.contracts.headers import NODE, TENANT
from oncewire._ground.contracts.realtime import VERSION, DeliveryContract, Presence, RealtimeEnvelope, encode_realtime
from oncewire._ground.contracts.subjects import chat_presence
from oncewire._ground.errors import OncewireError
from oncewire._ground.http import ANYONE
from oncewire._ground.jetstream import Client, Message, Outgoing
from oncewire._ground.jetstream.protocol import encode_pub, encode_subject
from oncewire.gateway.frames import Conversation, Envelope, SetPresence, read_envelope

if TYPE_CHECKING:
    from oncewire.gateway.node import Node
    from oncewire.gateway.websocket import Socket

WAITING_MAX: Final = 10_000
PUBLISH_S: Final = 0.02
TYPING_S_MAX: Final = 10.0
BEACON_S: Final = 2.0
SILENT_S_MAX: Final = 10.0
"""A node that was not heard for so long is gone."""
THERE_MAX: Final = 100_000
"""Who is there, kept per node; more are passed on, and do not lapse."""
NODES: Final = "chat.nodes"

log = logging.getLogger("oncewire.gateway")


class Presences:
    """The presence of the clients of one node. `run` publishes it."""

    def __init__(self, client: Client, node: Node) -> None:
        self._client = client
        self._node = node
        self._waiting: deque[Outgoing] = deque(maxlen=WAITING_MAX)
        self._wake = asyncio.Event()
        self._states: dict[tuple[str, str], tuple[str, float, Socket]] = {}
        """By conversation and connection: what was published last, and when."""
        self._there: dict[tuple[Conversation, str], str] = {}
        """By conversation and user: the node through which they are there, if it is another."""
        self._alive: dict[str, float] = {}
        """When each other node was last heard."""
        node.on_presence = self.heard

    def set(self, conversation_id: str, socket: Socket, sent: SetPresence) -> None:
        if sent.state == "offline":
            self._states.pop((conversation_id, socket.id), None)
        else:
            self._states[conversation_id, socket.id] = (sent.state, self._now, socket)
        self._publish(conversation_id, socket, sent.state, sent.metadata)

    def left(self, conversation_id: str, socket: Socket) -> None:
        if self._states.pop((conversation_id, socket.id), None) is not None:
            self._publish(conversation_id, socket, "offline", None)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- other nodes

    def heard(self, conversation: Conversation, node_id: str, user_id: str, state: str) -> None:
        """A presence that some node has published."""
        if not node_id or node_id == self._node.id:
            return
        self._alive.setdefault(node_id, self._now)
        if state == "offline":
            self._there.pop((conversation, user_id), None)
        elif len(self._there) < THERE_MAX:
            self._there[conversation, user_id] = node_id

    def _on_beacon(self, message: Message) -> None:
        node_id = message.subject.rpartition(".")[2]
        if node_id != self._node.id:
            self._alive[node_id] = self._now

    async def watch(self) -> None:
        """Say that this node lives; look for what has lapsed."""
        subject = encode_subject(f"{NODES}.{self._node.id}")
        subscription = self._client.subscribe(f"{NODES}.*", self._on_beacon)
        try:
            while True:
                if self._client.connection.is_ready:
                    self._client.connection.write(encode_pub(subject, b"", b""))
                else:  # nobody can be heard: nobody is silent
                    self._alive = dict.fromkeys(self._alive, self._now)
                self.lapse(self._now)
                await asyncio.sleep(BEACON_S)
        finally:
            self._client.unsubscribe(subscription)

    def lapse(self, now: float) -> None:
        """Who typed is online again; who was there through a node that is gone is offline."""
        for (conversation_id, id_), (state, since, socket) in list(self._states.items()):
            if state == "typing" and now - since > TYPING_S_MAX:
                self._states[conversation_id, id_] = ("online", now, socket)
                self._publish(conversation_id, socket, "online", None)
        gone = {node_id for node_id, heard_at in self._alive.items() if now - heard_at > SILENT_S_MAX}
        for node_id in gone:
            del self._alive[node_id]
        for (conversation, user_id), node_id in list(self._there.items()):
            if node_id in gone:
                del self._there[conversation, user_id]
                self._node.tell(conversation, self._offline(conversation, user_id))

    def _offline(self, conversation: Conversation, user_id: str) -> Sequence[Envelope]:
        body = _body(conversation.id, 0, user_id, "offline", None)
        envelope = read_envelope(conversation.id, 0, body, None)
        return [envelope] if envelope is not None else []

    # ---- publishing

    def _publish(self, conversation_id: str, socket: Socket, state: Any, metadata: dict[str, Any] | None) -> None:
        principal = socket.principal
        tenant = None if principal is ANYONE else principal.tenant
        room = self._node.rooms.get(Conversation(conversation_id, tenant))
        body = _body(conversation_id, room.last if room else 0, principal.name or socket.id, state, metadata)
        headers = {NODE: self._node.id} | ({TENANT: tenant} if tenant is not None else {})
        self._waiting.append(Outgoing(chat_presence(conversation_id), body, headers=headers))
        self._wake.set()

    async def run(self) -> None:
        """Publish what waits, that of a moment together."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(PUBLISH_S)
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        going = list(self._waiting)
        self._waiting.clear()
        if not going:
            return
        try:
            await self._client.publish_many(going, raw=True)
        except OncewireError as error:
            log.warning("%d changes of presence were not published: %s", len(going), error.message)


def _body(conversation_id: str, sequence: int, user_id: str, state: Any, metadata: dict[str, Any] | None) -> bytes:
    envelope = RealtimeEnvelope(
        version=VERSION,
        conversation_id=conversation_id,
        sequence=sequence,
        issued_at=datetime.now(UTC),
        contract=DeliveryContract("at-least-once", str(uuid.uuid4())),
        event=Presence(user_id=user_id, state=state, metadata=metadata),
    )
    return encode_realtime(envelope)
