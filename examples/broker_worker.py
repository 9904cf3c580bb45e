"""A worker on the HTTP broker: an order that is produced twice is charged once.

Run it beside `oncewire broker run`, or with BROKER_URL at another one:  python examples/broker_worker.py
"""

import asyncio
import json
import os

import oncewire
from oncewire.broker import BrokerEnvelope, Delivery
from oncewire.broker.client import Message, Worker

ORDERS = [{"id": "o1", "cents": 4200}, {"id": "o2", "cents": 990}, {"id": "o1", "cents": 4200}]


async def main() -> None:
    charged: list[str] = []

    async def charge(delivery: Delivery) -> None:
        order = json.loads(delivery.value)
        charged.append(order["id"])
        print(f"charged {order['id']}: {order['cents']} cents (attempt {delivery.attempts})")
        if len(charged) == 2:
            worker.stop()

    async with oncewire.BrokerClient(os.environ.get("BROKER_URL", "http://127.0.0.1:8080")) as client:
        await client.create_topic("orders", partitions=1)
        for order in ORDERS:
            envelope = BrokerEnvelope(idempotency_key=str(order["id"]))
            await client.produce("orders", json.dumps(order), envelope=envelope)
        results = await client.produce_many([Message("orders.log", "not there")])
        print(f"refused: {results[0].problem}")

        worker = Worker(client, "orders", "billing", charge)
        await worker.run()
        print(f"{worker.done} acked, lag {(await client.topic('orders')).groups[0].lag}")


asyncio.run(main())
