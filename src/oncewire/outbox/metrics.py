"""What a relay counts, and what waits in its outboxes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from oncewire._ground.database import postgres
from oncewire._ground.errors import OncewireError
from oncewire._ground.metrics import Page
from oncewire.outbox.inspect import counts

if TYPE_CHECKING:
    from oncewire.outbox.relay import Relay


def collect(page: Page, relay: Relay) -> None:
    page.put("oncewire_relay_ready", 0 if relay.problem else 1)
    for outbox, rows in relay.rows.items():
        page.put("oncewire_relay_published_total", rows, outbox=outbox)
    for outbox, seconds in relay.stored.items():
        page.histogram("oncewire_relay_stored_seconds", seconds, outbox=outbox)
    for one in relay.waiting:
        page.put("oncewire_relay_pending", one.pending, outbox=one.outbox)
        page.put("oncewire_relay_failed", one.failed, outbox=one.outbox)
        page.put("oncewire_relay_oldest_seconds", one.oldest_s, outbox=one.outbox)


async def look(relay: Relay) -> None:
    """Count what waits; while PostgreSQL is away the last count stands."""
    with contextlib.suppress(OncewireError):
        async with postgres.connected(relay.url, cache_statements=False) as connection:
            relay.waiting = await counts(connection, schema=relay.options.schema)
