"""Tokens as SSE events: how an envelope looks to an EventSource, where a new client begins, pages for those behind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Final

import msgspec

from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.contracts.headers import TENANT
from oncewire._ground.contracts.realtime import (
    VERSION,
    DeliveryContract,
    RealtimeEnvelope,
    StreamLifecycle,
    encode_realtime,
)
from oncewire._ground.contracts.subjects import IS_ALIVE, chat_stop, chat_tokens, token
from oncewire._ground.errors import ContractViolation, NoResponders, NotFound
from oncewire._ground.jetstream import Client
from oncewire.gateway.channels import Event
from oncewire.gateway.frames import LIFECYCLE, Conversation, Envelope, read_envelope
from oncewire.gateway.history import PAGE_MESSAGES, History, envelope_of

LOST: Final = "producer_lost"
ANSWER_S_MAX: Final = 3_600
"""An answer that began longer ago than this is not looked for: its producer is gone."""

_place = attrgetter("place")
_CHUNK_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,9})")
_LINE_END = re.compile(rb"\r\n|\r|\n")


def sse(name: bytes, data: bytes, event_id: bytes = b"") -> bytes:
    """One event. JSON may hold line breaks between its values: each line of data is a line of its own."""
    if b"\n" in data or b"\r" in data:
        data = _LINE_END.sub(b"\ndata: ", data)
    return b"%bevent: %b\ndata: %b\n\n" % (b"id: %b\n" % event_id if event_id else b"", name, data)


def error_event(message: str) -> bytes:
    return sse(b"error", ENCODE({"message": message}))


def number_of(chunk_id: str) -> tuple[str, int] | None:
    """The attempt at an answer that a chunk belongs to, and its number there: `tokens.stream` counts from 1. None of
    chunks that others have made."""
    found = _CHUNK_ID.fullmatch(chunk_id)
    return (found[1], int(found[2])) if found else None


class StopBody(msgspec.Struct, frozen=True, rename="camel"):
    """Which answer to stop; any when it names none."""

    message_id: str = ""


def cut_off(envelopes: Iterable[Envelope]) -> Iterator[tuple[Envelope, bool]]:
    """Each envelope of a stretch, and whether chunks of its answer are missing right before it: the first one behind a
    `started` is number 1, and each other one more than the one before it."""
    following: dict[str, tuple[str, int]] = {}
    for one in envelopes:
        if one.kind == LIFECYCLE:
            following[one.message_id] = ("", 1)
            yield one, False
            continue
        number = number_of(one.chunk_id)
        expected = following.get(one.message_id)
        is_cut = False
        if number is not None:
            following[one.message_id] = (number[0], number[1] + 1)
            is_cut = expected is not None and number[1] != (expected[1] if expected[0] in ("", number[0]) else 1)
        yield one, is_cut


def producer_lost(conversation: Conversation, message_id: str, sequence: int) -> Envelope:
    """What a node says itself of an answer whose producer is gone. It is not stored: another node finds out itself."""
    body = encode_realtime(
        RealtimeEnvelope(
            version=VERSION,
            conversation_id=conversation.id,
            sequence=sequence,
            issued_at=datetime.now(UTC),
            contract=DeliveryContract("at-least-once", f"{message_id}:{LOST}"),
            event=StreamLifecycle(message_id=message_id, status="errored", detail={"cause": LOST}),
        )
    )
    envelope = read_envelope(conversation.id, 0, body, None)
    assert envelope is not None
    return envelope


def _tenant_of(conversation: Conversation) -> dict[str, str] | None:
    return {TENANT: conversation.tenant} if conversation.tenant is not None else None


class Tokens:
    """The token subjects of one stream."""

    def __init__(self, client: Client, history: History, tokens_prefix: str) -> None:
        self._client = client
        self._history = history
        self._prefix = tokens_prefix

    def event(self, envelope: Envelope) -> Event:
        name = b"event" if envelope.kind == LIFECYCLE else b"token"
        event_id = b"%d-%d" % (envelope.stored_ns, envelope.place)
        return Event(envelope.place, envelope.stored_ns, sse(name, envelope.body, event_id))

    async def is_stored(self, stored_ns: int, place: int) -> bool:
        """Whether the stream still has an event. In a stream that was restored its place may hold another."""
        try:
            return (await self._client.get(self._history.stream, place, is_exact=True)).timestamp_ns == stored_ns
        except NotFound:
            return False

    async def lifecycles(self, conversation: Conversation) -> list[Envelope]:
        """The lifecycle envelopes of the last hour."""
        subject = self._history.subject(conversation)
        since = (datetime.now(UTC) - timedelta(seconds=ANSWER_S_MAX)).isoformat()
        found: list[Envelope] = []
        batch = await self._client.get_batch(self._history.stream, start_time=since, subject=subject)
        while batch:
            for message in batch:
                envelope = envelope_of(conversation, message)
                if envelope is not None and envelope.kind == LIFECYCLE:
                    found.append(envelope)
            batch = await self._client.get_batch(
                self._history.stream, sequence=batch[-1].sequence + 1, subject=subject, count=PAGE_MESSAGES
            )
        return found

    async def page(self, conversation: Conversation, after: int, up_to: int) -> tuple[list[Event], int]:
        """Events behind a place, and up to where that is everything."""
        found: list[Envelope] = []
        events, tokens = self._history.subject(conversation), chat_tokens(conversation.id, prefix=self._prefix)
        for subject in (events, tokens):
            end = min(up_to, await self._history.end(subject))
            async for batch in self._history.stored(subject, after + 1, end):
                for message in batch:
                    envelope = envelope_of(conversation, message)
                    if envelope is not None and (subject == tokens or envelope.kind == LIFECYCLE):
                        found.append(envelope)
                if len(batch) and batch[-1].sequence < end:
                    up_to = min(up_to, batch[-1].sequence)
                break
        found = sorted((one for one in found if one.place <= up_to), key=_place)
        return [self._told(one, is_cut) for one, is_cut in cut_off(found)], up_to

    def _told(self, envelope: Envelope, is_cut: bool) -> Event:
        event = self.event(envelope)
        if not is_cut:
            return event
        problem = error_event("a part of the answer is no longer kept, before this")
        return event._replace(data=problem + event.data)

    async def has_producer(self, conversation: Conversation, message_id: str) -> bool:
        """Whether somebody is writing this answer."""
        subject = f"{chat_stop(conversation.id)}.{token(message_id, 'messageId')}"
        try:
            reply = await self._client.call(subject, IS_ALIVE, headers=_tenant_of(conversation))
        except NoResponders:
            return False
        return message_id in msgspec.json.decode(reply.payload, type=list[str])

    async def is_written(self, conversation: Conversation) -> bool:
        """Whether somebody has been writing an answer in it, as far as one may hear it."""
        return bool(await self.lifecycles(conversation))

    async def stop(self, conversation: Conversation, body: bytes, timeout_s: float) -> list[str]:
        """Ask the producer of an answer to stop; the messages whose writing was stopped. NoResponders when nobody
        writes. The body may name the message: {"messageId": …}."""
        subject = chat_stop(conversation.id)
        try:
            wanted = msgspec.json.decode(body, type=StopBody) if body.strip() else StopBody()
        except msgspec.DecodeError as wrong:
            raise ContractViolation(str(wrong)[:200]) from None
        if wanted.message_id:
            subject += "." + token(wanted.message_id, "messageId")
        reply = await self._client.call(subject, headers=_tenant_of(conversation), timeout_s=timeout_s)
        return msgspec.json.decode(reply.payload, type=list[str])
