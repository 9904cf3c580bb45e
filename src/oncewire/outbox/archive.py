"""A conversation's whole history, as the database keeps it: the same envelopes that the relay publishes."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final

from oncewire._ground.database.postgres import connected, queries
from oncewire.outbox.rules import Row, body_of

SQL = queries("oncewire.outbox")
AT_ONCE_MAX: Final = 8


class ConversationArchive:
    """Reads for those who missed something. A connection per reading, few at a time: history is asked for rarely."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)

    async def read(self, tenant: str | None, conversation_id: str, after: int, limit: int) -> list[bytes] | None:
        """Bodies above a sequence, in order, at most `limit`; None when the database does not know the conversation."""
        records = await self._fetch("history", conversation_id, after, limit, tenant)
        if not records:
            return None
        return [body_of(Row(conversation_id, 0, *record)) for record in records if record[0] is not None]

    async def last(self, tenant: str | None, conversation_id: str) -> tuple[int, str] | None:
        """The sequence of the newest message, and the epoch; None when the database does not know the conversation."""
        records = await self._fetch("newest", conversation_id, tenant)
        return (records[0][0], records[0][1]) if records else None

    async def _fetch(self, name: str, conversation_id: str, *values: Any) -> list[Any]:
        """What a query says of a conversation: nothing when its id is not a UUID, which all in the database are."""
        try:
            key = str(uuid.UUID(conversation_id))
        except ValueError:
            return []
        async with self._turns, connected(self._url, cache_statements=False) as connection:
            records: list[Any] = await connection.fetch(SQL[name], key, *values)
            return records
