"""Purges what was dispatched long ago. Open and failed rows never go; the messages themselves stay where they are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from oncewire._ground.database.postgres import queries
from oncewire.outbox.source import transaction

CHUNK: Final = 5_000
TABLES: Final = ("message_outbox", "outbox_messages")

SQL = queries("oncewire.outbox")


async def purge(connection: Any, keep_s: float, *, schema: str = "") -> dict[str, int]:
    """Delete rows dispatched more than `keep_s` ago; returns how many went, by table."""
    before = datetime.now(UTC) - timedelta(seconds=keep_s)
    return {table: await _purge_table(connection, table, before, schema) for table in TABLES}


async def _purge_table(connection: Any, table: str, before: datetime, schema: str) -> int:
    """In chunks from the oldest on, each a short transaction of its own."""
    gone, last_id, is_end = 0, 0, False
    while not is_end:
        async with transaction(connection, SQL["begin_claim"], schema):
            record = await connection.fetchrow(SQL[f"purge_{table}"], last_id, before, CHUNK)
        gone += record["gone"]
        last_id, is_end = record["last_id"], record["last_id"] is None or record["is_end"]
    return gone
