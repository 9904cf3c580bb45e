"""A chat backend in one file: store a question, stream an answer, and follow both as a client does.

Run it beside `oncewire up`, in the same folder:  python examples/chat_backend.py
"""

import asyncio
import os
import uuid

import asyncpg

import oncewire
from oncewire import GatewayClient, outbox, tokens
from oncewire.embedded import postgres_url

POSTGRES = postgres_url()
GATEWAY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:3005")


async def store(conversation: str, role: str, content: str) -> outbox.Enqueued:
    """In a real service, your own rows are written in the same transaction."""
    connection = await asyncpg.connect(POSTGRES)
    try:
        async with connection.transaction():
            return await outbox.enqueue_async(connection, conversation, role=role, content=content)
    finally:
        await connection.close()


async def answer(client: oncewire.Client, conversation: str, question: str) -> None:
    """Tokens while they are made; the whole text becomes a message at the end. A stop ends it with what there is."""

    async def save(text: str) -> outbox.Enqueued:
        return await store(conversation, "assistant", text)

    async with tokens.stream(conversation, client=client, enqueue=save) as out:
        for word in f"You asked: {question}".split():
            await out.send(f"{word} ")
            await asyncio.sleep(0.02)


async def main() -> None:
    conversation = str(uuid.uuid4())
    async with oncewire.connect() as client, GatewayClient(GATEWAY) as gateway:
        await store(conversation, "user", "What is once?")
        answering = asyncio.create_task(answer(client, conversation, "What is once?"))
        async for message in gateway.room(conversation, resume=0):
            print(message.sequence, message.event.role, message.event.content)
            if message.event.role == "assistant":
                break
        await answering


asyncio.run(main())
