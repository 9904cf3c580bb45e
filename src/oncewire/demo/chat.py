"""The demo chat behind its page: takes messages, stores each once through the outbox, and answers it once.

A message comes with a key that the page made. It is looked up under a lock before it is stored, so that a page may send
again when it does not know whether it was heard. An answer is written token by token, stored as a message in the end,
and names its question: whoever finds a question without an answer (this process died while it wrote) begins it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from oncewire import outbox, tokens
from oncewire._ground.database.postgres import connected, queries
from oncewire._ground.errors import ContractViolation, OncewireError, Unavailable
from oncewire._ground.http import OPEN, Request, Routes
from oncewire._ground.jetstream import Client
from oncewire._ground.settings import Settings
from oncewire.demo.answers import answer_to

SQL = queries("oncewire.demo")
PIECE_S = 0.045
"""Between two pieces of an answer: about as fast as a model."""
RETRY_S = 1.0

_log = logging.getLogger("oncewire.demo")


class Sent(Struct, frozen=True, rename="camel"):
    """What the page posts."""

    conversation_id: UUID
    content: Annotated[str, Meta(min_length=1, max_length=4_000)]
    author: Annotated[str, Meta(min_length=1, max_length=40)]
    key: Annotated[str, Meta(min_length=8, max_length=64)]


class Question(Struct, frozen=True):
    """A message that wants an answer."""

    conversation: str
    question: str
    sequence: int
    content: str


_decode = msgspec.json.Decoder(Sent).decode
_encode = msgspec.json.Encoder().encode


class Chat:
    """`async with chat.running():` around the server whose routes it is in."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._url = settings.postgres_url
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}

    def add_to(self, routes: Routes) -> None:
        routes.add("POST", "/demo/messages", self.post, action=OPEN)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers what was left unanswered; at the end, what is being written breaks off and is begun anew later."""
        async with connected(self._url) as connection:
            found = await connection.fetch(SQL["find_unanswered"])
        for row in found:
            self._spawn(self._answer(Question(**row)))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- messages of the page

    def post(self, request: Request) -> None:
        """As JSON, which a page of another origin cannot send without asking first."""
        if request.header(b"content-type").partition(";")[0] != "application/json":
            raise ContractViolation("send application/json", field="Content-Type")
        try:
            sent = _decode(request.body)
        except msgspec.DecodeError as wrong:
            raise ContractViolation(str(wrong)) from None
        self._spawn(self._take(request, sent))

    async def _take(self, request: Request, sent: Sent) -> None:
        try:
            message_id, sequence, is_new = await self._store(sent)
        except OncewireError as error:
            request.fail(error)
            return
        request.respond(201, _encode({"messageId": message_id, "sequence": sequence}))
        if is_new:
            await self._answer(Question(str(sent.conversation_id), message_id, sequence, sent.content))

    async def _store(self, sent: Sent) -> tuple[str, int, bool]:
        conversation = str(sent.conversation_id)
        async with connected(self._url) as connection, connection.transaction():
            await connection.execute(SQL["lock"], conversation)
            known = await connection.fetchrow(SQL["find_sent"], conversation, sent.key)
            if known is not None:
                return known["message_id"], known["sequence"], False
            stored = await outbox.enqueue_async(
                connection,
                conversation,
                role="user",
                content=sent.content,
                metadata={"author": sent.author, "key": sent.key},
            )
        return stored.message_id, stored.sequence, True

    # ---- answers

    async def _answer(self, asked: Question) -> None:
        """One answer at a time per conversation. What fails is tried again: the question still waits."""
        async with self._turns.setdefault(asked.conversation, asyncio.Lock()):
            while True:
                try:
                    await self._write(asked)
                    return
                except Unavailable as error:
                    _log.info("an answer is begun anew: %s", error.message)
                    await asyncio.sleep(RETRY_S)

    async def _write(self, asked: Question) -> None:
        async def enqueue(text: str) -> outbox.Enqueued | None:
            return await self._store_answer(asked, out.message_id, text, is_stopped=out.stopped)

        async with tokens.stream(
            asked.conversation,
            client=self._client,
            enqueue=enqueue,
            last_sequence=asked.sequence,
            events_prefix=self._settings.chat_events_prefix,
            tokens_prefix=self._settings.chat_tokens_prefix,
        ) as out:
            for piece in answer_to(asked.content, asked.sequence):
                await out.send(piece)
                await asyncio.sleep(PIECE_S)

    async def _store_answer(
        self, asked: Question, answer: str, text: str, *, is_stopped: bool
    ) -> outbox.Enqueued | None:
        """None when somebody else was faster."""
        async with connected(self._url) as connection, connection.transaction():
            await connection.execute(SQL["lock"], asked.conversation)
            if await connection.fetchval(SQL["find_answer"], asked.conversation, asked.question):
                return None
            metadata = {"question": asked.question, "answer": answer} | ({"stopped": True} if is_stopped else {})
            return await outbox.enqueue_async(
                connection, asked.conversation, role="assistant", content=text, model="demo", metadata=metadata
            )
