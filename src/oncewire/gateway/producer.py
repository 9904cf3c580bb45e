"""The producer's side of a streamed answer: tokens while they are made, and the message at the end.

    async with tokens.stream(conversation, client=client, enqueue=save) as out:
        async for text in model(prompt):
            await out.send(text)

What goes out, in this order: lifecycle `started`; chunks; then, once `enqueue` has stored the whole text as a message
in the caller's own transaction, a last chunk with `isFinal` and lifecycle `completed`, which carries the message's
sequence. An exception gives `errored` instead, `block` gives `blocked`, and neither stores a message.

Somebody may ask to stop the answer (`POST /stream/{conversation}/stop`): the next `send` raises Stopped, and the block
ends in order with the text so far, `completed` and the detail {"stopped": true}. A client that only disconnects stops
nothing.

A producer that dies leaves `started` without an end, and no message. Whoever takes the work up begins a stream of its
own: its `started` tells clients to forget the chunks before it. Chunks are confirmed one publish after the other, each
under an id, so that a lost connection neither loses nor doubles one; a dead producer loses what it had not yet sent.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal

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
from oncewire._ground.contracts.subjects import chat_events, chat_stop, chat_tokens, token
from oncewire._ground.errors import Refused, Unavailable
from oncewire._ground.jetstream import Client, Message

INTERVAL_MS: Final = 10
"""Between two chunks: what is sent meanwhile goes out together. The first goes out at once."""
WAITING_CHARS_MAX: Final = 65_536
"""Text that waits for the server: then `send` waits too."""
PUBLISH_S_MAX: Final = 60.0
"""How long a chunk is tried while the server is away."""
RETRY_S: Final = 0.1

Enqueue = Callable[[str], Awaitable[Any] | Any]
"""Stores the whole text as a message. What it returns may have a `sequence`, as `outbox.enqueue`'s answer has."""


class Stopped(Exception):
    """Somebody asked to stop the answer. Leave the block; what was written so far is stored."""


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
        self._metadata = dict(metadata) if metadata else None
        self._headers = {TENANT: check_text("stream", "tenant", tenant)} if tenant else None
        self._interval_s = interval_ms / 1000
        self._events = chat_events(conversation_id, prefix=events_prefix)
        self._tokens = chat_tokens(conversation_id, prefix=tokens_prefix)
        self._attempt = secrets.token_hex(4)
        self._chunks = 0
        self._text: list[str] = []
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._is_ending = self._is_blocked = False
        self._sender: asyncio.Task[None] | None = None
        self.stopped = False
        """Somebody asked to stop."""

    @property
    def text(self) -> str:
        """All that was sent so far."""
        return "".join(self._text)

    async def __aenter__(self) -> Stream:
        await self._tell("started")
        stop = chat_stop(self._conversation_id)
        queue = f"tokens-{self._attempt}"  # a queue of its own: each producer hears it
        self._subscriptions = [
            self._client.serve(subject, self._on_stop, queue=queue) for subject in (stop, f"{stop}.{self.message_id}")
        ]
        self._sender = asyncio.create_task(self._send_on(), name="oncewire-tokens")
        return self

    async def send(self, text: str) -> None:
        """Send more of the answer. Raises Stopped when somebody asked for that."""
        if self._is_ending or self._is_blocked:
            raise Refused("the answer has ended", hint="Send inside the block, and before `block`.")
        if self.stopped:
            raise Stopped
        if not check_secret("send", "text", text):
            return
        self._text.append(text)
        self._waiting.append(text)
        self._waiting_chars += len(text)
        self._wake.set()
        while self._waiting_chars > WAITING_CHARS_MAX:
            self._room.clear()
            await self._until(self._room)

    async def block(self, detail: Any = None) -> None:
        """End the answer as blocked: it may not be given. Nothing more can be sent, and no message is stored."""
        if not self._is_blocked:
            self._is_blocked = True
            await self._drain()
            await self._tell("blocked", detail)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if self._is_blocked:
                return False
            if error is not None and not isinstance(error, Stopped):
                await self._give_up(error)
                return False
            await self._finish()
            return True
        finally:
            if self._sender is not None:
                self._sender.cancel()
                await asyncio.gather(self._sender, return_exceptions=True)
            for subscription in self._subscriptions:
                self._client.unsubscribe(subscription)

    async def _finish(self) -> None:
        try:
            await self._drain()
            if self._enqueue is not None:
                stored = self._enqueue(self.text)
                stored = await stored if inspect.isawaitable(stored) else stored
                sequence = getattr(stored, "sequence", None)
                self._sequence = sequence if isinstance(sequence, int) else self._sequence
        except Exception as error:
            await self._give_up(error)
            raise
        await self._chunk("", is_final=True)
        await self._tell("completed", {"stopped": True} if self.stopped else None)

    async def _give_up(self, error: BaseException) -> None:
        self._is_ending = True
        await self._tell("errored", {"error": type(error).__name__})

    # ---- out

    async def _drain(self) -> None:
        """Everything that was sent is stored."""
        self._is_ending = True
        self._wake.set()
        if self._sender is not None:
            await self._sender

    async def _until(self, event: asyncio.Event) -> None:
        """Wait, unless sending has failed meanwhile."""
        assert self._sender is not None
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({waiting, self._sender}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._sender.done():
            self._sender.result()

    async def _send_on(self) -> None:
        """One chunk after the other: what gathers while one is on its way is the next."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                began = time.monotonic()
                text, self._waiting = "".join(self._waiting), []
                await self._chunk(text)
                self._waiting_chars -= len(text)
                self._room.set()
                if not self._is_ending:
                    await asyncio.sleep(max(0.0, began + self._interval_s - time.monotonic()))
            if self._is_ending:
                return

    async def _chunk(self, text: str, *, is_final: bool = False) -> None:
        self._chunks += 1
        chunk_id = f"{self._attempt}-{self._chunks}"
        event = TokenChunk(
            message_id=self.message_id, chunk_id=chunk_id, token=text, is_final=is_final, metadata=self._metadata
        )
        await self._publish(self._tokens, event, chunk_id)

    async def _tell(self, status: Literal["started", "blocked", "completed", "errored"], detail: Any = None) -> None:
        event = StreamLifecycle(message_id=self.message_id, status=status, detail=detail)
        await self._publish(self._events, event, f"{self._attempt}-{status}")

    async def _publish(self, subject: str, event: Event, name: str) -> None:
        """Stored when it returns. Tried again under the same id while the server is away."""
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
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return

    # ---- stopping

    async def _on_stop(self, message: Message) -> bytes:
        """A gateway that knows tenants says for which it asks: another's conversation may have the same id."""
        tenant = message.headers.get(TENANT)
        if tenant is not None and self._headers is not None and tenant != self._headers[TENANT]:
            return ENCODE([])
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
