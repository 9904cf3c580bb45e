"""Losses: what a stream held and no longer has, as readers that keep a position record it, until a person has looked.

A record stands in the bucket OW_LOSSES under `<stream>.<reader>.<cause>-<sequence>`, with the end of its range that
does not move: the same loss found again is the same record. Whoever finds one is not ready until it is acknowledged:

    went_back    the stream ends before what was read, or holds something else there: it was restored, or lost its end
                 in a power cut. Sequences are being used again, so acknowledging begins a new incarnation of the
                 stream: a number in the bucket OW_INCARNATIONS that is part of every position from then on
    trimmed      a limit of the stream dropped messages before they were read
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from oncewire._ground.contracts.subjects import INCARNATIONS_BUCKET, token
from oncewire._ground.errors import Conflict, NotFound

if TYPE_CHECKING:
    from oncewire._ground.jetstream.client import Client

LOSSES_BUCKET: Final = "OW_LOSSES"
INCARNATION: Final = "#"
"""Stands between a stream's creation time and the number of its incarnation, from the second one on."""


class Cause(StrEnum):
    """Why it is gone."""

    WENT_BACK = "went_back"
    TRIMMED = "trimmed"


class Loss(msgspec.Struct, frozen=True, omit_defaults=True):
    """A closed range of sequences. On a trimmed stream some of them may have been for other readers: nobody can tell
    any more. `created` is the stream's creation time with its incarnation, `reader` the consumer."""

    stream: str
    created: str
    reader: str
    cause: Cause
    first: int
    last: int
    found_ms: int
    ledger: str = ""
    acknowledged_ms: int = 0
    incarnation: int = 0

    @property
    def key(self) -> str:
        fixed = self.last if self.cause is Cause.WENT_BACK else self.first
        return f"{self.stream}.{self.reader}.{self.cause}-{fixed}"

    @property
    def is_acknowledged(self) -> bool:
        return self.acknowledged_ms > 0

    @property
    def sentence(self) -> str:
        count = self.last - self.first + 1
        what = "went back" if self.cause is Cause.WENT_BACK else "dropped what was not read"
        return f"stream {self.stream} {what}: {count} messages, {self.first} to {self.last}, for {self.reader}"


async def record(client: Client, loss: Loss) -> Loss:
    """Write it down once. A loss that grows keeps its record, with the longer range; what is acknowledged stays so."""
    bucket = client.kv(LOSSES_BUCKET)
    while True:
        entry = await bucket.get(loss.key)
        known = msgspec.json.decode(entry.value, type=Loss) if entry else None
        if known is not None and known.created == loss.created and (known.is_acknowledged or known.last >= loss.last):
            return known
        try:
            if entry is None:
                await bucket.create(loss.key, msgspec.json.encode(loss))
            else:
                await bucket.update(loss.key, msgspec.json.encode(loss), entry.revision)
            return loss
        except Conflict:  # another process of the same reader found it too
            continue


async def losses(client: Client, stream: str = "") -> list[Loss]:
    """All that are recorded, of one stream or of every one, the oldest first."""
    found = await client.kv(LOSSES_BUCKET).entries(f"{token(stream, 'stream')}.>" if stream else ">")
    return sorted((msgspec.json.decode(one.value, type=Loss) for one in found), key=lambda one: one.found_ms)


async def acknowledge(client: Client, stream: str, now_ms: int, *, found_until_ms: int | None = None) -> list[Loss]:
    """A person has looked at all losses of a stream that are open: their readers may go on. Returns those that were.

    `found_until_ms` is for who looked at a list: what was found, or has grown, after its newest is not meant.
    """
    found = await losses(client, token(stream, "stream"))  # '' would be every stream
    seen = [one for one in found if found_until_ms is None or one.found_ms <= found_until_ms]
    open_ = [one for one in seen if not one.is_acknowledged]
    if not open_:
        raise NotFound(f"no open loss of stream {stream} is recorded", hint="Start its reader: it says what is wrong.")
    went_back = any(one.cause is Cause.WENT_BACK for one in open_)
    number = await _next_incarnation(client, stream) if went_back else 0
    told = [msgspec.structs.replace(one, acknowledged_ms=now_ms, incarnation=number) for one in open_]
    for one in told:
        await client.kv(LOSSES_BUCKET).put(one.key, msgspec.json.encode(one))
    return told


async def _next_incarnation(client: Client, stream: str) -> int:
    bucket = client.kv(INCARNATIONS_BUCKET)
    entry = await bucket.get(stream)
    number = int(entry.value) + 1 if entry else 1
    if entry is None:
        await bucket.create(stream, b"%d" % number)
    else:
        await bucket.update(stream, b"%d" % number, entry.revision)
    return number


async def incarnation_of(client: Client, stream: str, created: str) -> str:
    """The stream's creation time, and from the second incarnation on its number: part of every position."""
    entry = await client.kv(INCARNATIONS_BUCKET).get(stream)
    return created if entry is None else f"{created}{INCARNATION}{int(entry.value)}"
