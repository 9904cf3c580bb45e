"""Commit an order, a message in a conversation and an event for other services in one transaction: asyncpg.

Run it beside `oncewire up`, in the same folder:  python examples/outbox_asyncpg.py
"""

import asyncio
import uuid
from datetime import UTC, datetime

import asyncpg

from oncewire import new_message, outbox
from oncewire.embedded import postgres_url


async def main() -> None:
    conversation = uuid.uuid4()
    connection = await asyncpg.connect(postgres_url())
    async with connection.transaction():
        await connection.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text)")
        order = await connection.fetchval("INSERT INTO orders (item) VALUES ('a bicycle') RETURNING id")
        done = await outbox.enqueue_async(connection, conversation, role="assistant", content="It is ordered.")
        event = new_message(
            "LoopCreated",
            {"order": order},
            message_id=f"order-{conversation}",
            timestamp=datetime.now(UTC),
            actor_id="shop",
            actor_kind="SYSTEM",
        )
        await outbox.enqueue_message_async(connection, "sr.events.loop", event)
    await connection.close()
    print(f"message {done.sequence} of {conversation}, and {event.idempotency_key}")


asyncio.run(main())
