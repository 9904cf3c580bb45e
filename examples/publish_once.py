"""Publish an event twice under one id: within the duplicate window the stream keeps it once.

Run it beside `oncewire up`, or with NATS_URL at a server that has the topology:  python examples/publish_once.py
"""

import asyncio

import oncewire

EVENT = {"type": "OrderPlaced", "payload": {"order": 1001, "cents": 4200}}


async def main() -> None:
    async with oncewire.connect() as client:
        for attempt in (1, 2):
            ack = await client.publish("evt.default.demo.orders.placed", EVENT, msg_id="order-1001")
            outcome = "duplicate: already stored" if ack.is_duplicate else "stored"
            print(f"attempt {attempt}: {ack.stream} {ack.sequence}, {outcome}")

        async with client.read("MESHFORGE_EVENTS", subjects=["evt.default.demo.orders.>"]) as reader:
            for message in await reader.fetch():
                print(message.subject, message.payload.decode())


asyncio.run(main())
