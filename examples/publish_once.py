"""Publish an event twice under one id: the stream keeps it once, however often and whenever this runs.

Run it beside `oncewire up`, or with NATS_URL at a server that has the topology:  python examples/publish_once.py
Without `once=True` the server drops a repeat within the stream's duplicate window only (2 minutes by default).
"""

import asyncio

import oncewire

SUBJECT = "evt.default.demo.publish-once.placed"
EVENT = {"type": "OrderPlaced", "payload": {"order": 1001, "cents": 4200}}


async def main() -> None:
    async with oncewire.connect() as client:
        for attempt in (1, 2):
            ack = await client.publish(SUBJECT, EVENT, msg_id="order-1001", once=True)
            outcome = "duplicate: already stored" if ack.is_duplicate else "stored"
            print(f"attempt {attempt}: {ack.stream} {ack.sequence}, {outcome}")

        async with client.read("MESHFORGE_EVENTS", subjects=[SUBJECT]) as reader:
            for message in await reader.fetch():
                print(message.subject, message.payload.decode())


asyncio.run(main())
