"""The agent of the tour: it charges orders in PostgreSQL, tells the customer's room, and says so to everyone.

One transaction holds the charge, the room's message in the outbox and the effect: they stand together or not at all.
`oncewire demo` kills it again and again while it works.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from oncewire import Agent, Context, Effect, Terminate, outbox

agent = Agent("tour-biller", tenant="default", workspace="tour", batch=4, ack_wait_s=2, handler_timeout_s=60)

BANK_S = 0.04
"""How long a charge takes: long enough to be killed in."""
CHARGED = "evt.default.tour.billing.charged"


@dataclass
class Order:
    id: str
    item: str
    room: str
    tour: str


@agent.on("charge")
def charge(ctx: Context, order: Order) -> Effect:
    """What has no price cannot be charged: a person must look, so it becomes a dead letter."""
    found = ctx.tx.execute("SELECT cents FROM oncewire_tour.prices WHERE item = %s", (order.item,)).fetchone()
    if found is None:
        raise Terminate(f"nobody knows what a {order.item} costs")
    (cents,) = found
    time.sleep(BANK_S)
    ctx.tx.execute(
        "INSERT INTO oncewire_tour.charges (id, tour, cents) VALUES (%s, %s, %s)", (order.id, order.tour, cents)
    )
    text = f"Your {order.item} is paid: {cents / 100:.2f}, order {order.id}."
    outbox.enqueue(ctx.tx, order.room, role="assistant", content=text, metadata={"order": order.id})
    return Effect(CHARGED, {"order": order.id, "tour": order.tour, "item": order.item, "cents": cents})
