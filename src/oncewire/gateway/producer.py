"""The producer's side of a streamed answer: tokens while they are made, and the message at the end.

    async with tokens.stream(conversation, client=client, enqueue=save) as out:
        async for text in model(prompt):
            await out.send(text)

What goes out, in this order: lifecycle `started`; chunks; then, once `enqueue` has stored the whole text as a message
in the caller's own transaction, a last chunk with `isFinal` and lifecycle `completed`, which carries the message's
sequence. An exception gives `errored` instead, `block` gives `blocked`, and neither stores a message.

Tokens are best effort, the message is not: while NATS is away the model runs on, `enqueue` is called with all of the
text, and the block ends. Chunks that wait are sent once NATS is back; what could not be sent in time is missing for
those who watch (`lost_tokens`), until they have the message.

Somebody may ask to stop the answer (`POST /stream/{conversation}/stop`): the next `send` raises Stopped, and the block
ends in order with the text so far, `completed` and the detail {"stopped": true}. A client that only disconnects stops
nothing.

A producer that dies leaves `started` without an end, and no message. Gateways ask a silent producer whether it lives,
and tell those who watch when it does not. Whoever takes the work up begins a stream of its own: its `started` tells
clients to forget the chunks before it. Chunks are confirmed one publish after the other, each under an id, so that a
lost connection neither loses nor doubles one; a dead producer loses what it had not yet sent.

The stream keeps 10,000 chunks of a conversation, and a new viewer begins with an answer's first. So the pause between
two chunks grows with their number: 10 ms at first, 40 ms after 2,000 chunks, 160 ms after 4,000; 9,000 last for forty
minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

from oncewire._ground import settings
from oncewire._ground.arguments import check_secret, check_text
from oncewire._ground.contracts.codec import ENCODE
from oncewire._ground.contracts.headers import TENANT
from oncewire._ground.contracts.realtime import (
    VERSION,
    DeliveryContract,
    Event,
    RealtimeEnvelope,
    StreamLifecycle,
    TokenChunk,
    encode_realtime,
)
from oncewire._ground.contracts.subjects import IS_ALIVE, chat_events, chat_stop, chat_tokens, token
from oncewire._ground.errors import OncewireError, Refused, Unavailable
from oncewire._ground.jetstream import Client, Message

INTERVAL_MS: Final = 10
"""Between two chunks: what is sent meanwhile goes out together. The first goes out at once."""
GROWTH_S: Final = 0.01
"""The least pause after 1,000 chunks; it grows with the square of their number."""
CHUNK_CHARS_MAX: Final = 65_536
"""Of text that gathered while the server was away: what is more goes into the next chunk."""
PUBLISH_S_MAX: Final = 60.0
"""How long a chunk is tried while the server is away."""
BEGIN_S_MAX: Final = 2.0
"""How long `started` is waited for."""
DRAIN_S_MAX: Final = 2.0
"""How long chunks that wait are waited for before the message is stored."""
END_S_MAX: Final = 20.0
"""How long the end is waited for, once the message is stored."""
RETRY_S: Final = 0.1

_log = logging.getLogger("oncewire.tokens")

Enqueue = Callable[[str], Awaitable[Any] | Any]
"""Stores the whole text as a message. What it returns may have a `sequence`, as `outbox.enqueue`'s answer has."""


class Stopped(Exception):
    """Somebody asked to stop the answer. Leave the block; what was written so far is stored."""


class _Piece(NamedTuple):
    """A part of the answer that waits to be sent."""

    text: str
    metadata: dict[str, Any] | None = None
    is_final: bool = False


class Stream:
    """See the module's head. Made by `stream`."""

    def __init__(
        self,
        conversation_id: str,
        *,
        client: Client,
        enqueue: Enqueue | None,
        message_id: str,
        last_sequence: int,
        metadata: Mapping[str, Any] | None,
        tenant: str,
        interval_ms: int,
        events_prefix: str,
        tokens_prefix: str,
    ) -> None:
        self._client = client
        self._conversation_id = conversation_id
        self._enqueue = enqueue
        self.message_id = token(message_id or str(uuid.uuid4()), "messageId")
        self._sequence = last_sequence
        self._metadata = dict(metadata) if metadata else {}
        self._headers = {TENANT: check_text("stream", "tenant", tenant)} if tenant else None
        self._interval_s = interval_ms / 1000
        self._events = chat_events(conversation_id, prefix=events_prefix)
        self._tokens = chat_tokens(conversation_id, prefix=tokens_prefix)
        self._attempt = secrets.token_hex(4)
        self._chunks = 0
        self._text: list[str] = []
        self._waiting: deque[_Piece | StreamLifecycle] = deque()
        self._wake = asyncio.Event()
        self._is_sent = asyncio.Event()
        """Nothing waits."""
        self._is_ending = self._is_blocked = False
        self._sender: asyncio.Task[None] | None = None
        self._refused: OncewireError | None = None
        self.stopped = False
        """Somebody asked to stop."""
        self.lost_tokens = False
        """Something could not be sent in time: those who watch see less of it than the message has."""

    @property
    def text(self) -> str:
        """All that was sent so far."""
        return "".join(self._text)

    async def __aenter__(self) -> Stream:
        """Begin. What can never be published is an error here; a NATS that is away is not waited for."""
        stop = chat_stop(self._conversation_id)
        queue = f"tokens-{self._attempt}"  # a queue of its own: each producer hears it
        self._subscriptions = [
            self._client.serve(subject, self._on_stop, queue=queue) for subject in (stop, f"{stop}.{self.message_id}")
        ]
        self._sender = asyncio.create_task(self._send_on(), name="oncewire-tokens")
        self._tell("started")
        await self._until_sent(BEGIN_S_MAX)
        if self._refused is not None:
            await self._close()
            raise self._refused
        return self

    async def send(self, text: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Send more of the answer. Raises Stopped when somebody asked for that.

        `metadata` goes with a chunk of its own: what is not part of the text, such as reasoning, a call of a tool or a
        citation, goes there with an empty text.
        """
        if self._is_ending or self._is_blocked:
            raise Refused("the answer has ended", hint="Send inside the block, and before `block`.")
        if self.stopped:
            raise Stopped
        check_secret("send", "text", text)
        self._text.append(text)
        if metadata:
            self._put(_Piece(text, dict(metadata)))
            return
        for start in range(0, len(text), CHUNK_CHARS_MAX):
            self._put(_Piece(text[start : start + CHUNK_CHARS_MAX]))

    async def block(self, detail: Any = None) -> None:
        """End the answer as blocked: it may not be given. Nothing more can be sent, and no message is stored."""
        if not self._is_blocked:
            self._is_blocked = self._is_ending = True
            self._tell("blocked", detail)
            await self._until_sent(END_S_MAX)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if self._is_blocked:
                return False
            self._is_ending = True
            if error is not None and not isinstance(error, Stopped):
                await self._give_up(error)
                return False
            await self._finish()
            return True
        finally:
            await self._close()

    async def _finish(self) -> None:
        """The message is stored whether or not the chunks before it could be sent."""
        await self._until_sent(DRAIN_S_MAX)
        try:
            if self._enqueue is not None:
                stored = self._enqueue(self.text)
                stored = await stored if inspect.isawaitable(stored) else stored
                sequence = getattr(stored, "sequence", None)
                self._sequence = sequence if isinstance(sequence, int) else self._sequence
        except Exception as error:
            await self._give_up(error)
            raise
        self._put(_Piece("", is_final=True))
        self._tell("completed", {"stopped": True} if self.stopped else None)
        await self._until_sent(END_S_MAX)

    async def _give_up(self, error: BaseException) -> None:
        self._tell("errored", {"error": type(error).__name__})
        await self._until_sent(DRAIN_S_MAX)

    async def _close(self) -> None:
        for subscription in self._subscriptions:
            self._client.unsubscribe(subscription)
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        if self._waiting:
            self.lost_tokens = True
            _log.warning("answer %s: %d parts were not sent to those who watch", self.message_id, len(self._waiting))

    # ---- out

    def _tell(self, status: Literal["started", "blocked", "completed", "errored"], detail: Any = None) -> None:
        self._put(StreamLifecycle(message_id=self.message_id, status=status, detail=detail))

    def _put(self, part: _Piece | StreamLifecycle) -> None:
        self._waiting.append(part)
        self._is_sent.clear()
        self._wake.set()

    async def _until_sent(self, timeout_s: float) -> None:
        """Wait until nothing waits to be stored, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_sent.wait()

    async def _send_on(self) -> None:
        """One after the other: text that gathers while something is on its way is the next chunk."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                began = time.monotonic()
                await self._publish_next()
                if not self._is_ending:
                    await asyncio.sleep(max(0.0, began + self._pause_s - time.monotonic()))
            self._is_sent.set()

    @property
    def _pause_s(self) -> float:
        return max(self._interval_s, GROWTH_S * (self._chunks / 1_000) ** 2)

    async def _publish_next(self) -> None:
        """What is next goes only when it is stored, or has been tried for too long."""
        part = self._waiting[0]
        if isinstance(part, StreamLifecycle):
            is_stored = await self._publish(self._events, part, f"{self._attempt}-{part.status}")
            self._waiting.popleft()
        else:
            pieces = self._together()
            self._chunks += 1
            chunk_id = f"{self._attempt}-{self._chunks}"
            event = TokenChunk(
                message_id=self.message_id,
                chunk_id=chunk_id,
                token="".join([piece.text for piece in pieces]),
                is_final=part.is_final,
                metadata=self._metadata | (part.metadata or {}) or None,
            )
            is_stored = await self._publish(self._tokens, event, chunk_id)
            for _ in pieces:
                self._waiting.popleft()
        self.lost_tokens = self.lost_tokens or not is_stored

    def _together(self) -> list[_Piece]:
        """The pieces of the next chunk. One with metadata is a chunk of its own, and so is the final one."""
        pieces: list[_Piece] = []
        size = 0
        for part in self._waiting:
            is_plain = isinstance(part, _Piece) and part.metadata is None and not part.is_final
            if pieces and (not is_plain or size >= CHUNK_CHARS_MAX):
                break
            assert isinstance(part, _Piece)
            pieces.append(part)
            size += len(part.text)
            if not is_plain:
                break
        return pieces

    async def _publish(self, subject: str, event: Event, name: str) -> bool:
        """Whether it is stored when it returns. Tried under the same id while the server is away."""
        envelope = RealtimeEnvelope(
            version=VERSION,
            conversation_id=self._conversation_id,
            sequence=self._sequence,
            issued_at=datetime.now(UTC),
            contract=DeliveryContract("at-least-once", f"{self.message_id}:{name}"),
            event=event,
        )
        body, id_ = encode_realtime(envelope), f"tk.{self.message_id}.{name}"
        deadline = time.monotonic() + PUBLISH_S_MAX
        while True:
            try:
                await self._client.publish(subject, body, msg_id=id_, headers=self._headers, raw=True)
                return True
            except OncewireError as error:
                if isinstance(error, Unavailable) and time.monotonic() < deadline:
                    await asyncio.sleep(RETRY_S)
                    continue
                self._refused = error
                if not self.lost_tokens:
                    _log.warning("answer %s: those who watch do not get %s: %s", self.message_id, name, error)
                return False

    # ---- stopping

    async def _on_stop(self, message: Message) -> bytes:
        """A gateway that knows tenants says for which it asks: another's conversation may have the same id. One that
        has heard nothing for a while only asks whether the answer is still being written."""
        tenant = message.headers.get(TENANT)
        if tenant is not None and self._headers is not None and tenant != self._headers[TENANT]:
            return ENCODE([])
        if message.payload != IS_ALIVE:
            self.stopped = True
        return ENCODE([self.message_id])


def stream(
    conversation_id: str,
    *,
    client: Client,
    enqueue: Enqueue | None = None,
    message_id: str = "",
    last_sequence: int = 0,
    metadata: Mapping[str, Any] | None = None,
    tenant: str = "",
    interval_ms: int = INTERVAL_MS,
    events_prefix: str | None = None,
    tokens_prefix: str | None = None,
) -> Stream:
    """Stream an answer into a conversation. `last_sequence` is the last message that the producer knows of, if any.

    The prefixes are those of this process's settings (NATS_EVENTS_PREFIX, NATS_TOKENS_PREFIX) unless passed.
    """
    if events_prefix is None or tokens_prefix is None:
        chosen = settings.load().settings
        events_prefix = chosen.chat_events_prefix if events_prefix is None else events_prefix
        tokens_prefix = chosen.chat_tokens_prefix if tokens_prefix is None else tokens_prefix
    return Stream(
        conversation_id,
        client=client,
        enqueue=enqueue,
        message_id=message_id,
        last_sequence=last_sequence,
        metadata=metadata,
        tenant=tenant,
        interval_ms=interval_ms,
        events_prefix=events_prefix,
        tokens_prefix=tokens_prefix,
    )
