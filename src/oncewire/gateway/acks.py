"""Acknowledgements: how far a client has worked through a conversation, in the bucket OW_ACKS.

Kept by tenant, principal and the `clientId` of `join_room`: each device of a user has its own. Clients of one principal
that name no `clientId` share one; without either, an ack ends with its connection. Within an epoch an ack never moves
back, whichever node writes it: a write names the revision that it has seen, and a conflict is read again.

Acks are cumulative, so only the last one of a client and conversation is written, and those of a moment together: a
busy room does not cost a write per ack. An ack that is lost with a killed node makes a client get some messages again,
which it knows by their sequence.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Final, NamedTuple

import msgspec

from oncewire._ground.contracts.ids import joined
from oncewire._ground.errors import Conflict, OncewireError
from oncewire._ground.http import Principal
from oncewire._ground.jetstream import Client, Outgoing, PubAck

BUCKET: Final = "OW_ACKS"
WAITING_MAX: Final = 100_000
KEPT_MAX: Final = 100_000
"""Acks in the bucket whose revision is remembered; the others are read before they are written."""
READ_KEYS_MAX: Final = 500
"""Keys that one request reads; the server answers for 1,024 at most."""
FLUSH_S: Final = 0.5

log = logging.getLogger("oncewire.gateway")


class Acked(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last sequence that was acknowledged, under this epoch."""

    sequence: int = 0
    epoch: str | None = None


class _Kept(NamedTuple):
    """What the bucket holds under a key, as far as this node knows."""

    revision: int
    acked: Acked | None


_ABSENT: Final = _Kept(0, None)


def later_of(known: Acked | None, sent: Acked | None) -> Acked | None:
    """Within an epoch the higher sequence; of two epochs the one that was sent later."""
    if known is None or sent is None:
        return sent or known
    if known.epoch is not None and sent.epoch is not None and known.epoch != sent.epoch:
        return sent
    return Acked(max(known.sequence, sent.sequence), sent.epoch or known.epoch)


def key_of(principal: Principal, client_id: str, conversation_id: str) -> str:
    """Where a client's ack is kept, '' when the client is unknown. Hashed, since clients choose their names freely."""
    if not principal.name and not client_id:
        return ""
    parts = joined("ack", principal.tenant, principal.name, client_id, conversation_id)
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:40]


class Acks:
    """The acks of one node. `run` writes them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[str, Acked] = {}
        self._going: dict[str, Acked] = {}
        """Being written: no longer waiting, and not yet in the bucket."""
        self._kept: dict[str, _Kept] = {}
        self._wake = asyncio.Event()
        self.written = 0

    def note(self, key: str, acked: Acked) -> None:
        known = self._waiting.get(key)
        if known is None and len(self._waiting) >= WAITING_MAX:
            return  # the bucket is away: a later ack of the same client says more
        self._waiting[key] = later_of(known, acked) or acked

    async def get(self, key: str) -> Acked | None:
        """The last ack of a client, as far as it is known here or written; None when there is none."""
        entry = await self._client.kv(BUCKET).get(key)
        written = msgspec.json.decode(entry.value, type=Acked) if entry is not None else None
        return later_of(written, later_of(self._going.get(key), self._waiting.get(key)))

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
        """Write what waits. What could not be written waits on, together with newer acks."""
        if not self._waiting:
            return
        self._going, self._waiting = self._waiting, {}
        try:
            await self._read([key for key in self._going if key not in self._kept])
            await self._write()
        except OncewireError as error:
            log.warning("%d acks of clients wait to be written: %s", len(self._going), error.message)
        finally:
            for key, acked in self._going.items():
                self._waiting[key] = later_of(acked, self._waiting.get(key)) or acked
            self._going = {}
            while len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]

    async def _read(self, keys: list[str]) -> None:
        bucket = self._client.kv(BUCKET)
        for start in range(0, len(keys), READ_KEYS_MAX):
            subjects = {f"$KV.{BUCKET}.{key}": key for key in keys[start : start + READ_KEYS_MAX]}
            self._kept |= dict.fromkeys(subjects.values(), _ABSENT)
            for stored in await self._client.get_last_of(bucket.stream, list(subjects)):
                acked = msgspec.json.decode(stored.payload, type=Acked) if stored.payload else None
                self._kept[subjects[stored.subject]] = _Kept(stored.sequence, acked)

    async def _write(self) -> None:
        """Write what says more than the bucket does; what is written is no longer going."""
        for key, acked in list(self._going.items()):
            merged = later_of(self._kept[key].acked, acked)
            if merged == self._kept[key].acked:
                del self._going[key]
            elif merged is not None:
                self._going[key] = merged
        going = list(self._going.items())
        if not going:
            return
        messages = [
            Outgoing(
                f"$KV.{BUCKET}.{key}",
                msgspec.json.encode(acked),
                expected_last_subject_sequence=self._kept[key].revision,
            )
            for key, acked in going
        ]
        outcomes = await self._client.publish_many(messages, raw=True)
        errors = []
        for (key, acked), outcome in zip(going, outcomes, strict=True):
            self._kept.pop(key)
            if isinstance(outcome, PubAck):
                self.written += 1
                self._kept[key] = _Kept(outcome.sequence, acked)
                del self._going[key]
            elif not isinstance(outcome, Conflict):  # on a conflict another node was faster: it is read again
                errors.append(outcome)
        if errors:
            raise errors[0]
