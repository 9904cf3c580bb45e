"""Reading a conversation back: from the stream its end, a page behind a sequence, a stretch between two places; from
the archive what the stream no longer has.

A place is a stream sequence; sequences are the conversation's own numbers. "After n" is found by bisecting places: a
conversation's messages stand in the stream in the order of their numbers. Any replica may answer a direct get, also one
that lags: how far there is something to read is asked of the leader, and a short answer is asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, NamedTuple, Protocol

from oncewire._ground.contracts.headers import EPOCH, TENANT
from oncewire._ground.contracts.subjects import chat_events
from oncewire._ground.errors import NotFound
from oncewire._ground.jetstream import Client, StoredMessage, codes
from oncewire.gateway.frames import Conversation, Envelope, read_envelope
from oncewire.gateway.rooms import NOTHING_ARCHIVED, Archived

PAGE_MESSAGES: Final = 256
PAGE_BYTES: Final = 512 * 1024
PROBE: Final = 16
NEAR: Final = 32
LAG_LOOKS: Final = 5
LAG_LOOK_S: Final = 0.05
BACK_MESSAGES: Final = 256
"""How far back the newest message is first looked for when unnumbered envelopes stand behind it."""


class Archive(Protocol):
    """Where all messages of a conversation are kept. `tenant` None means whoever's it is; the answer is None for a
    conversation that it does not know."""

    async def read(self, tenant: str | None, conversation_id: str, after: int, limit: int) -> list[bytes] | None:
        """Bodies above a sequence, in order, at most `limit`."""

    async def last(self, tenant: str | None, conversation_id: str) -> tuple[int, str] | None:
        """The sequence of the newest message, and the epoch."""


class Tail(NamedTuple):
    """The end of a conversation."""

    envelopes: list[Envelope]
    end: int
    """Up to which place that reaches."""
    archived: Archived = NOTHING_ARCHIVED


class History:
    """The conversations of one stream, and of the archive where there is one."""

    def __init__(self, client: Client, stream: str, events_prefix: str, archive: Archive | None = None) -> None:
        self._client = client
        self.stream = stream
        self._prefix = events_prefix
        self._archive = archive

    def subject(self, conversation: Conversation) -> str:
        return chat_events(conversation.id, prefix=self._prefix)

    async def tail(self, conversation: Conversation, count: int, up_to: int) -> Tail:
        """The end of a conversation with at least its last `count` messages. When the stream has no message of it, the
        archive says which one was the last."""
        end = max(up_to, await self.end(self.subject(conversation)))
        newest = await self._newest(conversation, end) if end else None
        if newest is None:
            return Tail([], end, await self._archived(conversation))
        start = newest.place
        if count > 1 and newest.sequence > 1:
            start = await self._place_after(conversation, max(0, newest.sequence - count), 1, newest.place)
        return Tail(await self.between(conversation, start, end), end)

    async def _archived(self, conversation: Conversation) -> Archived:
        if self._archive is None:
            return NOTHING_ARCHIVED
        last = await self._archive.last(conversation.tenant, conversation.id)
        return Archived(*last) if last is not None else NOTHING_ARCHIVED

    async def behind(self, conversation: Conversation, after: int, up_to: int) -> Tail:
        """Everything of a conversation that stands behind a place."""
        end = max(up_to, await self.end(self.subject(conversation)))
        return Tail(await self.between(conversation, after + 1, end), end)

    async def page(self, conversation: Conversation, after: int, place: int, end: int) -> list[Envelope]:
        """Messages above the sequence `after`: one page of them, empty when there is none up to the place `end`.

        `place` is where `after` stands, or before that; 0 when it is not known.
        """
        start = place + 1 if place else await self._place_after(conversation, after, 1, end)
        found: list[Envelope] = []
        async for batch in self._batches(conversation, start, end):
            found += [one for one in batch if one.is_numbered and one.sequence > after]
            if found:
                break
        return found

    async def messages(self, conversation: Conversation, after: int, limit: int) -> tuple[list[bytes], bool]:
        """The bodies of messages above a sequence, and whether that is all there ever was: the archive knows, the
        stream only reaches back so far."""
        if self._archive is not None:
            bodies = await self._archive.read(conversation.tenant, conversation.id, after, limit)
            if bodies is not None:
                return bodies, True
        return await self._stored_messages(conversation, after, limit), False

    async def _stored_messages(self, conversation: Conversation, after: int, limit: int) -> list[bytes]:
        end = await self.end(self.subject(conversation))
        found: dict[int, bytes] = {}
        if end:
            start = await self._place_after(conversation, after, 1, end)
            async for batch in self._batches(conversation, start, end):
                found |= {one.sequence: one.body for one in batch if one.is_numbered and one.sequence > after}
                if len(found) >= limit:
                    break
        return list(found.values())[:limit]

    async def between(self, conversation: Conversation, start: int, end: int) -> list[Envelope]:
        """Everything on the subject from one place to another, both included."""
        found: list[Envelope] = []
        async for batch in self._batches(conversation, start, end):
            found += [one for one in batch if one.place <= end]
        return found

    async def end(self, subject: str) -> int:
        """The place of the last message on a subject, 0 when there is none."""
        try:
            return (await self._client.get_last(self.stream, subject, is_exact=True)).sequence
        except NotFound as missing:
            if missing.server_code == codes.STREAM_NOT_FOUND:
                raise
            return 0

    async def stored(self, subject: str, start: int, end: int) -> AsyncIterator[list[StoredMessage]]:
        """What stands on a subject, page by page. A replica that has less than the leader is asked again."""
        looks = 0
        while start <= end:
            batch = await self._client.get_batch(
                self.stream, count=PAGE_MESSAGES, sequence=start, subject=subject, bytes_max=PAGE_BYTES
            )
            if not batch:
                looks += 1
                if looks > LAG_LOOKS or await self.end(subject) < start:
                    return
                await asyncio.sleep(LAG_LOOK_S * looks)
                continue
            looks = 0
            yield batch
            start = batch[-1].sequence + 1

    async def _batches(self, conversation: Conversation, start: int, end: int) -> AsyncIterator[list[Envelope]]:
        async for batch in self.stored(self.subject(conversation), start, end):
            yield [one for one in (envelope_of(conversation, message) for message in batch) if one is not None]

    async def _newest(self, conversation: Conversation, end: int) -> Envelope | None:
        """The newest message: usually the last envelope of all, else the last numbered one before it."""
        back, start = BACK_MESSAGES, end
        while True:
            numbered = [one for one in await self.between(conversation, start, end) if one.is_numbered]
            if numbered or start == 1:
                return max(numbered, key=lambda one: one.place) if numbered else None
            start, back = max(1, end - back), back * 16

    async def _place_after(self, conversation: Conversation, after: int, low: int, high: int) -> int:
        """A place from which on everything above `after` stands, and little else."""
        while high - low > NEAR:
            middle = (low + high) // 2
            found = await self._numbered_from(conversation, middle, high)
            if found is None or found.sequence > after:
                high = middle
            else:
                low = found.place + 1
                if found.sequence == after:
                    break
        return low

    async def _numbered_from(self, conversation: Conversation, start: int, end: int) -> Envelope | None:
        """The first message at or behind a place."""
        subject = self.subject(conversation)
        while start <= end:
            batch = await self._client.get_batch(
                self.stream, count=PROBE, sequence=start, subject=subject, bytes_max=PAGE_BYTES
            )
            for message in batch:
                envelope = envelope_of(conversation, message)
                if envelope is not None and envelope.is_numbered:
                    return envelope
            if not batch:
                return None
            start = batch[-1].sequence + 1
        return None


def envelope_of(conversation: Conversation, message: StoredMessage) -> Envelope | None:
    """A stored message as an envelope of this conversation; None when it is none, or another tenant's."""
    if conversation.tenant is not None and message.headers.get(TENANT, "") != conversation.tenant:
        return None
    epoch = message.headers.get(EPOCH) or None
    return read_envelope(conversation.id, message.sequence, message.payload, epoch, message.timestamp_ns)
