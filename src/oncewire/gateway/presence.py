"""Presence: who is in a conversation and how, on every node.

A client says how it is there (online, typing, idle, offline); its node publishes that on the conversation's presence
subject, and every node passes it on to the members of its room. A client that goes, or is cut off, is published as
offline by its node. Only who has announced itself is there: a room of silent readers costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from oncewire.contracts.headers import TENANT
from oncewire.contracts.realtime import VERSION, DeliveryContract, Presence, RealtimeEnvelope, encode_realtime
from oncewire.contracts.subjects import chat_presence
from oncewire.errors import OncewireError
from oncewire.gateway.frames import Conversation, SetPresence
from oncewire.http import ANYONE
from oncewire.jetstream import Client, Outgoing

if TYPE_CHECKING:
    from oncewire.gateway.node import Node
    from oncewire.gateway.websocket import Socket

WAITING_MAX: Final = 10_000
PUBLISH_S: Final = 0.02

log = logging.getLogger("oncewire.gateway")


class Presences:
    """The presence of the clients of one node. `run` publishes it."""

    def __init__(self, client: Client, node: Node) -> None:
        self._client = client
        self._node = node
        self._waiting: deque[Outgoing] = deque(maxlen=WAITING_MAX)
        self._wake = asyncio.Event()
        self._states: dict[tuple[str, str], str] = {}
        """By conversation and connection: what was published last."""

    def set(self, conversation_id: str, socket: Socket, sent: SetPresence) -> None:
        if sent.state == "offline":
            self._states.pop((conversation_id, socket.id), None)
        else:
            self._states[conversation_id, socket.id] = sent.state
        self._publish(conversation_id, socket, sent.state, sent.metadata)

    def left(self, conversation_id: str, socket: Socket) -> None:
        if self._states.pop((conversation_id, socket.id), None) is not None:
            self._publish(conversation_id, socket, "offline", None)

    def _publish(self, conversation_id: str, socket: Socket, state: Any, metadata: dict[str, Any] | None) -> None:
        principal = socket.principal
        tenant = None if principal is ANYONE else principal.tenant
        room = self._node.rooms.get(Conversation(conversation_id, tenant))
        envelope = RealtimeEnvelope(
            version=VERSION,
            conversation_id=conversation_id,
            sequence=room.last if room else 0,
            issued_at=datetime.now(UTC),
            contract=DeliveryContract("at-least-once", str(uuid.uuid4())),
            event=Presence(user_id=socket.principal.name or socket.id, state=state, metadata=metadata),
        )
        headers = {TENANT: tenant} if tenant is not None else None
        self._waiting.append(Outgoing(chat_presence(conversation_id), encode_realtime(envelope), headers=headers))
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
            await self._client.publish_many(going)
        except OncewireError as error:
            log.warning("%d changes of presence were not published: %s", len(going), error.message)
