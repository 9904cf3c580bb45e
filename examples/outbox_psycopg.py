"""Commit an order and the message that tells about it in one transaction: psycopg, sync and async.

Run it beside `oncewire up`, in the same folder:  python examples/outbox_psycopg.py
"""

import asyncio
import uuid

import psycopg

from oncewire import outbox
from oncewire.embedded import postgres_url

URL = postgres_url()
CONVERSATION = uuid.uuid4()


def main() -> None:
    with psycopg.connect(URL) as connection:  # one transaction: committed at the end of the block
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text)")
        connection.execute("INSERT INTO orders (item) VALUES ('a bicycle')")
        done = outbox.enqueue(connection, CONVERSATION, role="assistant", content="Your bicycle is ordered.")
        print(f"message {done.sequence} of {CONVERSATION}")


async def main_async() -> None:
    async with await psycopg.AsyncConnection.connect(URL) as connection:
        await connection.execute("INSERT INTO orders (item) VALUES ('a bell')")
        done = await outbox.enqueue_async(
            connection, CONVERSATION, role="assistant", content="Your bell is ordered.", metadata={"items": 2}
        )
        print(f"message {done.sequence} of {CONVERSATION}")


main()
asyncio.run(main_async())
