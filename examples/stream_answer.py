"""An answer that is streamed while it is made, and stored as a message at its end (run it beside `oncewire up`)."""

import asyncio
import sys
import uuid

import oncewire
from oncewire import tokens

ANSWER = ["Every", "token", "arrives", "once,", "and", "in", "order."]


async def model():
    """Stands for a language model."""
    for word in ANSWER:
        await asyncio.sleep(0.01)
        yield word + " "


async def main() -> None:
    conversation = sys.argv[1] if len(sys.argv) > 1 else str(uuid.uuid4())

    async def save(text: str) -> None:
        """In a service: `await outbox.enqueue_async(connection, conversation, role="assistant", content=text)`."""
        print(f"stored: {text.strip()}")

    async with oncewire.connect() as client:
        async with tokens.stream(conversation, client=client, enqueue=save) as out:
            async for text in model():
                await out.send(text)
        print("stopped" if out.stopped else "completed")


asyncio.run(main())
