"""Acknowledgements: how far a client has worked through a conversation, in the bucket OW_ACKS.

Acks are cumulative, so only the last one of a client and conversation is written, and those of a moment together: a
busy room does not cost a write per ack. An ack that is lost with a killed node makes a client get some messages again,
which it knows by their sequence. Kept under the principal, else under the `clientId` of `join_room`; without either the
acks of a connection end with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from oncewire._ground.contracts.ids import joined
from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import Client, Outgoing, PubAck

if TYPE_CHECKING:
    from oncewire.gateway.websocket import Socket

BUCKET: Final = "OW_ACKS"
WAITING_MAX: Final = 100_000
FLUSH_S: Final = 0.5

log = logging.getLogger("oncewire.gateway")


class Acked(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last sequence that was acknowledged, under this epoch."""

    sequence: int = 0
    epoch: str | None = None


class Acks:
    """The acks of one node. `run` writes them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[str, Acked] = {}
        self._going: dict[str, Acked] = {}
        """Being written: no longer waiting, and not yet in the bucket."""
        self._wake = asyncio.Event()
        self.written = 0

    def _key(self, socket: Socket, conversation_id: str) -> str:
        """Where a client's ack stands, '' when nobody knows the client. Names of clients are theirs: hashed."""
        principal = socket.principal
        kind, name = ("principal", principal.name) if principal.name else ("client", socket.client_id)
        if not name:
            return ""
        told = joined(kind, principal.tenant, name, conversation_id)
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:40]

    def note(self, socket: Socket, conversation_id: str, sequence: int, epoch: str | None) -> None:
        key = self._key(socket, conversation_id)
        if not key:
            return
        known = self._waiting.get(key)
        if known is not None and known.epoch == epoch and known.sequence >= sequence:
            return
        if known is None and len(self._waiting) >= WAITING_MAX:
            return  # the bucket is away: a later ack of the same client says more
        self._waiting[key] = Acked(sequence, epoch)

    async def get(self, socket: Socket, conversation_id: str) -> Acked:
        """The last ack of this client, as far as it is known here or written."""
        key = self._key(socket, conversation_id)
        if not key:
            return Acked()
        known = self._waiting.get(key) or self._going.get(key)
        if known is not None:
            return known
        entry = await self._client.kv(BUCKET).get(key)
        return msgspec.json.decode(entry.value, type=Acked) if entry is not None else Acked()

    def flush_soon(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Write what waits, twice a second and when a client has left."""
        while True:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write what waits. What could not be written waits on, unless a newer ack has come."""
        going, self._waiting = self._waiting, {}
        if not going:
            return
        self._going |= going
        messages = [Outgoing(f"$KV.{BUCKET}.{key}", msgspec.json.encode(acked)) for key, acked in going.items()]
        try:
            outcomes = await self._client.publish_many(messages)
        except OncewireError as error:
            outcomes = [error] * len(messages)
        failed = 0
        for (key, acked), outcome in zip(going.items(), outcomes, strict=True):
            if isinstance(outcome, PubAck):
                self.written += 1
            else:
                failed += 1
                self._waiting.setdefault(key, acked)
            if self._going.get(key) is acked:
                del self._going[key]
        if failed:
            log.warning("%d acks of clients wait to be written", failed)
