"""One message through every part, under one trace: HTTP produce → agent → effect → gateway → Spark's tables.

Run it beside `oncewire up --pipeline`:  python examples/one_message.py

    POST /v1/produce          a client's request, with its traceparent
    ─► topic one_message      a worker of the group `agents` hands each message on, under an id made of its place
    ─► evt.….placed           the agent handles it once: an effect for the events, one for the room
    ─► chat.events.…          the gateway delivers it to who is in the room
    ─► the lake               the pipeline has read all of it

A group holds a topic's messages until it has settled them, so nothing is forgotten before the agent has it, however
long the worker is away; and a message that the worker hands on twice is one to the agent.
"""

import asyncio
import json
import os
import secrets
import tempfile
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import oncewire
from oncewire import Agent, Context, Effect, GatewayClient
from oncewire.agent import open_store
from oncewire.broker import BrokerEnvelope, Delivery
from oncewire.broker.client import Worker
from oncewire.pipeline.tables import dataset, open_table

BROKER = os.environ.get("BROKER_URL", "http://127.0.0.1:8080")
GATEWAY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:3005")
LAKE = os.environ.get("LAKE", ".oncewire/lake")
TOPIC, PLACED, WELCOMED = "one_message", "evt.default.demo.one-message.placed", "evt.default.demo.one-message.welcomed"
TABLES = ("silver/broker", "silver/runtime", "silver/realtime")
WAIT_S = 180

agent = Agent("greeter", tenant="default", workspace="demo")


@dataclass
class Order:
    id: str
    room: str


@agent.on(PLACED)
def welcome(ctx: Context, order: Order) -> list[Effect]:
    """Both effects carry the trace of the input, and its run."""
    event = {"type": "chat.message.created", "messageId": order.id, "dedupeId": order.id, "role": "assistant"}
    envelope = {
        "version": "2024-12-01",
        "conversationId": order.room,
        "sequence": 1,
        "issuedAt": f"{datetime.fromtimestamp(ctx.ts / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "contract": {"guarantee": "at-least-once", "dedupeKey": order.id},
        "event": {**event, "content": f"Thank you for order {order.id}."},
    }
    return [
        Effect(WELCOMED, {"order": order.id}),
        Effect(f"chat.events.{order.room}", envelope, headers={"Oncewire-Epoch": order.room}),
    ]


async def hand_on(client: oncewire.Client, delivery: Delivery) -> None:
    """From the topic to the agent's stream: acked only when it is stored there."""
    envelope = delivery.envelope or BrokerEnvelope()
    place = f"{TOPIC}-{delivery.partition}-{delivery.offset}-{envelope.idempotency_key}"
    body = {
        "type": "OrderPlaced",
        "payload": json.loads(delivery.value),
        "idempotency_key": place,
        "correlation_id": envelope.run_id,
        "causation_id": envelope.step_id,
    }
    await client.publish(PLACED, body, msg_id=place, headers={"traceparent": envelope.traceparent})


async def send(trace_id: str) -> None:
    """Produce one order, and wait for what comes of it in its room."""
    order = Order(uuid.uuid4().hex[:8], str(uuid.uuid4()))
    store = open_store(f"sqlite:///{tempfile.mkdtemp()}/greeter.db")
    envelope = BrokerEnvelope(
        run_id=f"run-{order.id}",
        step_id=f"produce-{order.id}",
        idempotency_key=order.id,
        traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-01",  # a client with tracing sends it as a header
    )
    async with (
        oncewire.connect() as client,
        oncewire.BrokerClient(BROKER) as broker,
        GatewayClient(GATEWAY) as gateway,
        agent.running(client, store),
    ):

        async def effect(delivery: Delivery) -> None:
            await hand_on(client, delivery)
            worker.stop()

        await broker.create_topic(TOPIC)
        await broker.produce(TOPIC, json.dumps({"id": order.id, "room": order.room}), envelope=envelope)
        print(f"produced   {trace_id}")
        worker = Worker(broker, TOPIC, "agents", effect)
        await worker.run()
        async for message in gateway.room(order.room, resume=0):
            print(f"delivered  {message.event.content}")
            break


def rows_of(lake: str | Path, trace_id: str) -> dict[str, int]:
    """How many rows of each table have the trace."""
    found = {}
    for name in TABLES:
        try:
            traces = dataset(open_table(lake, name)).to_table(columns=["trace_id"])["trace_id"].to_pylist()
        except oncewire.errors.NotFound:
            traces = []
        found[name] = traces.count(trace_id)
    return found


async def main() -> None:
    trace_id = secrets.token_hex(16)
    await send(trace_id)
    print(f"waiting for the pipeline's next batch in {LAKE} …")
    for _ in range(WAIT_S):
        found = rows_of(LAKE, trace_id)
        if all(found.values()):
            break
        await asyncio.sleep(1)
    for name, count in found.items():
        print(f"{name:<16} {count} rows of trace {trace_id}")


if __name__ == "__main__":
    asyncio.run(main())
