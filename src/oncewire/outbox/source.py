"""What the relay's loop needs to know of an outbox that it empties."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from msgspec import Struct

from oncewire._ground.database.postgres import quote_name, translated


class Taken(Struct, frozen=True):
    """What a pass found: how many rows it published, whether more are surely waiting, and how old the rows were when
    their stream had them."""

    rows: int
    has_more: bool
    ages_s: Sequence[float] = ()


class Source(Protocol):
    name: str

    async def relay_once(self, connection: Any) -> Taken:
        """One pass on a connection of its own. Unavailable: nothing is lost, try again later."""
        ...


@contextlib.asynccontextmanager
async def transaction(connection: Any, begin: str, schema: str) -> AsyncIterator[None]:
    """A transaction that begins with several settings in one round trip. All settings end with it, so that it works
    behind a pooler that hands out its connections for a transaction only."""
    path = f"\nSET LOCAL search_path = {quote_name(schema)};" if schema else ""
    with translated():
        await connection.execute(begin + ";" + path)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is what counts
                await connection.execute("ROLLBACK")
            raise
        await connection.execute("COMMIT")
