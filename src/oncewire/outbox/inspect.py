"""What a person may want of the outboxes: see what waits and why, try again, give up on a message."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from oncewire._ground.database.postgres import queries
from oncewire._ground.errors import NotFound
from oncewire.outbox.source import transaction

LISTED_MAX: Final = 100
REASON_MAX: Final = 500

SQL = queries("oncewire.outbox")


class Count(Struct, frozen=True):
    """Open rows of one outbox."""

    outbox: str
    pending: int
    failed: int
    oldest_s: float


class StuckConversation(Struct, frozen=True):
    """A conversation that waits for another attempt at `sequence`; `waiting` rows stand behind it, itself included."""

    conversation_id: str
    sequence: int
    attempts: int
    next_attempt_at: datetime | None
    error: str
    waiting: int


class StuckMessage(Struct, frozen=True):
    """A failed message of the general outbox."""

    id: int
    subject: str
    idempotency_key: str
    attempts: int
    next_attempt_at: datetime | None
    error: str


class Status(Struct, frozen=True):
    counts: tuple[Count, ...]
    conversations: tuple[StuckConversation, ...]
    messages: tuple[StuckMessage, ...]

    @property
    def is_well(self) -> bool:
        return not self.conversations and not self.messages


async def counts(connection: Any, *, schema: str = "") -> tuple[Count, ...]:
    """How much waits in each outbox."""
    async with transaction(connection, SQL["begin_durable"], schema):
        return tuple(Count(*record) for record in await connection.fetch(SQL["counts"]))


async def status(connection: Any, *, schema: str = "", limit: int = LISTED_MAX) -> Status:
    """What waits, and what is stuck; at most `limit` of each kind are listed."""
    async with transaction(connection, SQL["begin_durable"], schema):
        counts = [Count(*record) for record in await connection.fetch(SQL["counts"])]
        conversations = [
            StuckConversation(*record) for record in await connection.fetch(SQL["stuck_conversations"], limit)
        ]
        messages = [StuckMessage(*record) for record in await connection.fetch(SQL["stuck_messages"], limit)]
    return Status(tuple(counts), tuple(conversations), tuple(messages))


async def retry(connection: Any, *, conversation_id: str = "", message_id: int = 0, schema: str = "") -> int:
    """Try again now instead of after the backoff: one conversation, one message, or all. Returns how many."""
    async with transaction(connection, SQL["begin_durable"], schema):
        if conversation_id:
            done = _count(await connection.execute(SQL["retry_conversation"], conversation_id))
        elif message_id:
            done = _count(await connection.execute(SQL["retry_message"], message_id))
        else:
            done = _count(await connection.execute(SQL["retry_all_conversations"]))
            done += _count(await connection.execute(SQL["retry_all_messages"]))
        await connection.execute(SQL["wake"])
    return done


async def void(connection: Any, conversation_id: str, sequence: int, reason: str, *, schema: str = "") -> None:
    """Publish a tombstone in the place of a message that waits, so that those behind it can go on."""
    async with transaction(connection, SQL["begin_durable"], schema):
        await connection.execute(SQL["lock_conversation"], conversation_id)
        if not await connection.fetch(SQL["void"], conversation_id, sequence, reason[:REASON_MAX]):
            raise NotFound(
                f"conversation {conversation_id} has no message {sequence} that waits",
                hint="`oncewire outbox status` lists what is stuck; what was published cannot be voided.",
            )
        await connection.execute(SQL["wake"])


async def void_message(connection: Any, message_id: int, *, schema: str = "") -> None:
    """Give up on a failed message of the general outbox. No order depends on it, so it leaves no trace."""
    async with transaction(connection, SQL["begin_durable"], schema):
        if not await connection.fetch(SQL["void_message"], message_id):
            raise NotFound(f"the outbox has no failed message {message_id}", hint="See `oncewire outbox status`.")


def _count(tag: str) -> int:
    """How many rows a statement changed, from its tag ("UPDATE 3")."""
    return int(tag.rpartition(" ")[2])
