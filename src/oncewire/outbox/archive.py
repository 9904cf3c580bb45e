"""A conversation's whole history, as the database keeps it: the same envelopes that the relay publishes."""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

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
        try:
            key = str(uuid.UUID(conversation_id))
        except ValueError:
            return None
        async with self._turns, connected(self._url, cache_statements=False) as connection:
            records = await connection.fetch(SQL["history"], key, after, limit, tenant)
        if not records:
            return None
        return [body_of(Row(conversation_id, 0, *record)) for record in records if record[0] is not None]
