"""An agent that charges orders: each order once, whatever dies in between.

oncewire up                                   # a NATS JetStream here, with all streams
oncewire agent run examples.biller:agent --store sqlite:///biller.db

# in another terminal
nats pub cmd.default.demo.biller.charge '{"type": "charge", "payload": {"id": "o1", "cents": 4200}}'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oncewire import Agent, Context, Effect, Retry, Terminate

agent = Agent("biller", tenant="default", workspace="demo")


@dataclass
class Order:
    id: str
    cents: int


@dataclass
class Refund:
    id: str


@agent.on("charge")
def charge(ctx: Context, order: Order) -> Effect:
    """Database work: the row, the event and the outcome stand together or not at all."""
    if order.cents <= 0:
        raise Terminate(f"order {order.id} costs {order.cents} cents")
    ctx.tx.execute("CREATE TABLE IF NOT EXISTS charges (id TEXT PRIMARY KEY, cents INTEGER NOT NULL)")
    ctx.tx.execute("INSERT INTO charges VALUES (?, ?)", (order.id, order.cents))
    return Effect("evt.default.demo.billing.charged", {"order": order.id, "cents": order.cents})


@agent.on("refund", rate_per_s=50, timeout_s=30)
async def refund(ctx: Context, refund: Refund) -> list[Effect]:
    """A call outside: its result is recorded before anything else happens; the key lets the bank refuse a repeat."""
    receipt = await ctx.once("bank", pay_back, refund.id, idempotency_key=ctx.key("bank"))
    if not receipt["accepted"]:
        raise Retry(after_s=60, reason="the bank is closed")
    async with ctx.tx as tx:
        tx.execute("DELETE FROM charges WHERE id = ?", (refund.id,))
    return [
        Effect("evt.default.demo.billing.refunded", {"order": refund.id, "receipt": receipt["number"]}),
        Effect("evt.default.demo.mail.survey", {"order": refund.id}, delay_s=3 * 24 * 3600),
    ]


@agent.every(3600)
def summary(ctx: Context) -> Effect:
    """Once an hour, whatever the number of processes."""
    ctx.tx.execute("CREATE TABLE IF NOT EXISTS charges (id TEXT PRIMARY KEY, cents INTEGER NOT NULL)")
    count, cents = ctx.tx.execute("SELECT count(*), coalesce(sum(cents), 0) FROM charges").fetchone()
    return Effect("evt.default.demo.billing.summary", {"charges": count, "cents": cents, "at_ms": ctx.ts})


async def pay_back(order: str, *, idempotency_key: str) -> dict[str, Any]:
    """Your bank's client would be here."""
    return {"accepted": True, "number": f"r-{order}-{idempotency_key[:8]}"}
