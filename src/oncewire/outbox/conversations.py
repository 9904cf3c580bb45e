"""Relays conversations: claims some, reads their open rows, publishes them, marks what JetStream confirmed.

One transaction holds the claim for the whole pass: a relay that dies loses its locks, and the next one goes on at once.
Nothing is marked before it is confirmed; what was confirmed and not marked is refused by the fence when it is published
again, and then found in the stream.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any, Final

from oncewire._ground.database.postgres import queries
from oncewire._ground.jetstream import Client
from oncewire._ground.tracing import Tracer
from oncewire.outbox import traces
from oncewire.outbox.publish import OnStep, Publishing
from oncewire.outbox.rules import BYTES_MAX, ROWS_MAX, Claim, Progress, Row, conversations_wanted, grouped
from oncewire.outbox.source import Taken, transaction

log = logging.getLogger("oncewire.outbox")

SQL = queries("oncewire.outbox")
FIRST: Final = "00000000-0000-0000-0000-000000000000"
POSTPONE_MS: Final = 1_000


class Conversations:
    """One relay's view: where its round over all conversations stands, and how many to take at a time."""

    name = "conversations"

    def __init__(
        self,
        client: Client,
        *,
        prefix: str,
        batch_size: int,
        schema: str,
        on_step: OnStep,
        tracer: Tracer | None = None,
    ) -> None:
        self._publishing = Publishing(client, prefix, on_step, is_traced=tracer is not None)
        self._tracer = tracer
        self._batch_size = batch_size
        self._schema = schema
        self._on_step = on_step
        self._from = FIRST
        self._wanted = conversations_wanted(0, 0, batch_size)

    async def relay_once(self, connection: Any) -> Taken:
        async with transaction(connection, SQL["begin_claim"], self._schema):
            claims, is_cut = await self._claim(connection)
            if not claims:
                return Taken(0, is_cut)
            self._on_step("claimed")

            async def still_ours() -> None:
                await connection.execute("SELECT 1")

            began_ns = time.time_ns()
            found = await self._publishing.publish(claims, still_ours)
            if self._tracer is not None:
                traces.tell_conversations(self._tracer, found, began_ns)
            self._on_step("published")
            await self._mark(connection, found)
            self._on_step("marked")
        self._on_step("committed")
        for one in found:
            if one.renumber_above:
                await self._renumber(connection, one)
        now = datetime.now(UTC)
        done = [row.created_at for one in found for row in one.claim.rows[: one.confirmed]]
        ages = [(now - created_at).total_seconds() for created_at in done]
        return Taken(len(done), is_cut or self._has_more(claims), ages)

    async def _claim(self, connection: Any) -> tuple[list[Claim], bool]:
        """Rows to publish, and whether the round over the conversations was cut here."""
        began, wanted = self._from, self._wanted
        ids = [record[0] for record in await connection.fetch(SQL["candidates"], began, wanted)]
        is_cut = len(ids) == wanted
        self._from = ids[-1] if is_cut else FIRST
        if not ids:
            return [], began != FIRST
        fences = {record[0]: record[1] for record in await connection.fetch(SQL["lock"], ids)}
        if not fences:
            return [], is_cut
        rows = await self._read(connection, list(fences), self._batch_size)
        claims = grouped(rows, fences)
        self._wanted = conversations_wanted(len(rows), len(claims), self._batch_size)
        return claims, is_cut

    async def _read(self, connection: Any, ids: list[str], rows_each: int) -> list[Row]:
        """Open rows; the statement names a conversation by its place in `ids`, which counts from 1."""
        found = await connection.fetch(SQL["read"], ids, rows_each, ROWS_MAX, BYTES_MAX)
        return [Row(ids[place - 1], *values) for place, *values in found]

    def _has_more(self, claims: list[Claim]) -> bool:
        rows = [len(claim.rows) for claim in claims]
        return sum(rows) == ROWS_MAX or max(rows) == self._batch_size

    async def _mark(self, connection: Any, found: list[Progress]) -> None:
        """Marks and cursors of what was confirmed; what stopped each of the others."""
        done = [one for one in found if one.confirmed]
        if done:
            await connection.execute(
                SQL["mark"],
                [row.id for one in done for row in one.claim.rows[: one.confirmed]],
                [one.claim.conversation_id for one in done],
                [one.claim.rows[one.confirmed - 1].sequence for one in done],
                [one.stream_sequence for one in done],
            )
        for one in found:
            if one.refused:
                log.error(
                    "conversation %s stops at %d: %s", one.claim.conversation_id, one.next_row.sequence, one.refused
                )
                await connection.execute(SQL["mark_failed"], one.next_row.id, one.refused)
            elif one.postponed:
                await connection.execute(SQL["postpone"], one.claim.conversation_id, one.postponed, POSTPONE_MS)

    async def _renumber(self, connection: Any, one: Progress) -> None:
        """The stream holds numbers that this database has yet to give: it was restored. Count on above them.

        In a transaction of its own, on disk before anything is published under the new numbers.
        """
        conversation_id, row = one.claim.conversation_id, one.next_row
        async with transaction(connection, SQL["begin_durable"], self._schema):
            if not await connection.fetch(SQL["lock"], [conversation_id]):
                return
            await connection.execute(SQL["lock_numbers"], conversation_id)
            rows = await self._read(connection, [conversation_id], 1)
            if not rows or rows[0].key != row.key:
                return
            up = one.renumber_above - row.sequence + 1
            await connection.execute(SQL["renumber_away"], conversation_id, row.sequence)
            await connection.execute(SQL["renumber_back"], conversation_id, up)
            await connection.execute(SQL["new_epoch"], conversation_id, up, one.stream_sequence)
            self._on_step("renumbered")
        log.warning(
            "conversation %s: the stream holds %d, the database was about to give %d (restored from a backup?): "
            "it goes on at %d under a new epoch",
            conversation_id,
            one.renumber_above,
            row.sequence,
            row.sequence + up,
        )
