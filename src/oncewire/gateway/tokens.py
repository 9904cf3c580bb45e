"""Tokens as SSE events: how an envelope looks to an EventSource, where a new client begins, pages for those behind."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from oncewire._ground.contracts.headers import TENANT
from oncewire._ground.contracts.subjects import chat_stop, chat_tokens, token
from oncewire._ground.errors import ContractViolation
from oncewire._ground.jetstream import Client
from oncewire.gateway.channels import Event
from oncewire.gateway.frames import LIFECYCLE, Conversation, Envelope
from oncewire.gateway.history import PAGE_MESSAGES, History, envelope_of

ANSWER_S_MAX: Final = 3_600
"""An answer that began longer ago than this is not looked for: its producer is gone."""

NEVER: Final = 1 << 62

_LINE_END = re.compile(rb"\r\n|\r|\n")


def sse(name: bytes, data: bytes, event_id: bytes = b"") -> bytes:
    """One event. JSON may hold line breaks between its values: each line of data is a line of its own."""
    if b"\n" in data or b"\r" in data:
        data = _LINE_END.sub(b"\ndata: ", data)
    return b"%bevent: %b\ndata: %b\n\n" % (b"id: %b\n" % event_id if event_id else b"", name, data)


class StopBody(msgspec.Struct, frozen=True, rename="camel"):
    """Which answer to stop; any when it names none."""

    message_id: str = ""


class Tokens:
    """The token subjects of one stream."""

    def __init__(self, client: Client, history: History, tokens_prefix: str) -> None:
        self._client = client
        self._history = history
        self._prefix = tokens_prefix

    def event(self, incarnation: str, envelope: Envelope) -> Event:
        name = b"event" if envelope.kind == LIFECYCLE else b"token"
        event_id = b"%b-%d" % (incarnation.encode(), envelope.place)
        return Event(envelope.place, sse(name, envelope.body, event_id))

    async def place_to_begin(self, conversation: Conversation, otherwise: int) -> int:
        """Right before the `started` of the running answer, else before the last lifecycle event, else `otherwise`."""
        subject = self._history.subject(conversation)
        since = (datetime.now(UTC) - timedelta(seconds=ANSWER_S_MAX)).isoformat()
        running: dict[str, int] = {}
        last = 0
        batch = await self._client.get_batch(self._history.stream, start_time=since, subject=subject)
        while batch:
            for message in batch:
                envelope = envelope_of(conversation, message)
                if envelope is not None and envelope.kind == LIFECYCLE:
                    last = envelope.place
                    running.pop(envelope.message_id, None)
                    if envelope.status == "started":
                        running[envelope.message_id] = envelope.place
            batch = await self._client.get_batch(
                self._history.stream, sequence=batch[-1].sequence + 1, subject=subject, count=PAGE_MESSAGES
            )
        return min([otherwise, *([last - 1] if last else []), *(place - 1 for place in running.values())])

    async def page(
        self, incarnation: str, conversation: Conversation, after: int, up_to: int
    ) -> tuple[list[Event], int]:
        """Events behind a place, and up to where that is everything."""
        found: list[Event] = []
        events, tokens = self._history.subject(conversation), chat_tokens(conversation.id, prefix=self._prefix)
        for subject in (events, tokens):
            end = min(up_to, await self._history.end(subject))
            async for batch in self._history.stored(subject, after + 1, end):
                for message in batch:
                    envelope = envelope_of(conversation, message)
                    if envelope is not None and (subject == tokens or envelope.kind == LIFECYCLE):
                        found.append(self.event(incarnation, envelope))
                if len(batch) and batch[-1].sequence < end:
                    up_to = min(up_to, batch[-1].sequence)
                break
        found.sort()
        return [one for one in found if one.place <= up_to], up_to

    async def is_written(self, conversation: Conversation) -> bool:
        """Whether somebody has been writing an answer in it, as far as one may hear it."""
        return await self.place_to_begin(conversation, NEVER) != NEVER

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
        headers = {TENANT: conversation.tenant} if conversation.tenant is not None else None
        reply = await self._client.call(subject, headers=headers, timeout_s=timeout_s)
        return msgspec.json.decode(reply.payload, type=list[str])
