"""An agent inside a FastAPI service: one process serves HTTP and handles messages.

    uvicorn examples.fastapi_service:app

`async with agent.running(…)` in the lifespan starts the agent with the service and drains it when the service stops.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response

import oncewire
from examples.biller import Order, agent
from oncewire.agent import open_store


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    store = open_store(os.environ.get("BILLER_STORE", "sqlite:///biller.db"))
    async with oncewire.connect() as client, agent.running(client, store) as runner:
        app.state.client, app.state.runner = client, runner
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def place(order: Order) -> dict[str, Any]:
    """Answers once the command is stored; the agent charges it, once."""
    body = {"type": "charge", "payload": {"id": order.id, "cents": order.cents}, "idempotency_key": f"order-{order.id}"}
    ack = await app.state.client.publish("cmd.default.demo.biller.charge", body, msg_id=f"order-{order.id}")
    return {"order": order.id, "sequence": ack.sequence}


@app.get("/ready")
async def ready(response: Response) -> dict[str, Any]:
    health = app.state.runner.health()
    response.status_code = 200 if health["is_ready"] else 503
    return health
