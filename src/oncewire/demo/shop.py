"""The shop of `oncewire up --demo`: customers place orders, an agent charges them, so that there is something to watch.

A few orders a second, at most ORDERS_MAX per start. A rare order is for a gift card, which has no price: it becomes a
dead letter with a clear cause. The shop uses NATS and PostgreSQL only: it works whatever credentials HTTP asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from uuid import NAMESPACE_DNS, uuid5

from oncewire import Agent, Context, Effect, Terminate, outbox
from oncewire._ground.database.postgres import connected, queries
from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import Client
from oncewire.agent import open_store
from oncewire.agent.run import Runner

SQL = queries("oncewire.demo")
ORDERS_MAX: Final = 10_000
ORDER_EVERY_S: Final = 0.4
CLOSE_S: Final = 5.0
"""Time to charge what is ordered already, at the end."""
POLL_S: Final = 0.05
FIRST_GIFT_CARD: Final = 25
GIFT_CARD_EVERY: Final = 500
PRICES: Final = {"bicycle": 42_000, "bell": 990, "lamp": 2_450, "lock": 3_900, "helmet": 5_900}
ITEMS: Final = tuple(PRICES)
CUSTOMERS: Final = ("Ada", "Grace", "Edsger", "Barbara")

agent = Agent("checkout", tenant="default", workspace="shop")
STREAM: Final = "MESHFORGE_COMMANDS"
COMMAND: Final = f"cmd.default.shop.{agent.name}.charge"
PLACED: Final = "evt.default.shop.orders.placed"
CHARGED: Final = "evt.default.shop.billing.charged"

_log = logging.getLogger("oncewire.demo")


@dataclass
class Order:
    id: str
    item: str
    customer: str = "you"


@agent.on("charge")
def charge(ctx: Context, order: Order) -> Effect:
    """One transaction: the charge, a message in the customer's room, and the event."""
    price = ctx.tx.execute("SELECT cents FROM oncewire_shop.prices WHERE item = %s", (order.item,)).fetchone()
    if price is None:
        raise Terminate(f"no price is set for a {order.item}")
    (cents,) = price
    ctx.tx.execute(
        "INSERT INTO oncewire_shop.charges (id, item, cents) VALUES (%s, %s, %s)", (order.id, order.item, cents)
    )
    text = f"Your {order.item} is paid: {cents / 100:.2f}, order {order.id}."
    outbox.enqueue(ctx.tx, room_of(order.customer), role="assistant", content=text, metadata={"order": order.id})
    return Effect(CHARGED, {"order": order.id, "item": order.item, "cents": cents})


def room_of(customer: str) -> str:
    return str(uuid5(NAMESPACE_DNS, f"{customer}.shop.oncewire"))


class Shop:
    """`async with shop.running():` beside the servers, the relay and the dead-letter service."""

    def __init__(self, client: Client, postgres_url: str) -> None:
        self._client = client
        self._url = postgres_url

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with connected(self._url) as connection:
            await connection.execute(SQL["make_shop"])
            for item, cents in PRICES.items():
                await connection.execute(SQL["set_shop_price"], item, cents)
        store = open_store(self._url, handler_timeout_s=agent.handler_timeout_s)
        async with agent.running(self._client, store) as runner:
            selling = asyncio.create_task(self._sell(runner))
            try:
                yield
            finally:
                selling.cancel()
                await asyncio.gather(selling, return_exceptions=True)
                with contextlib.suppress(TimeoutError, OncewireError):
                    async with asyncio.timeout(CLOSE_S):
                        await self._charged()

    async def _sell(self, runner: Runner) -> None:
        """Orders at about the same pace; none while the agent is not ready."""
        opened = time.strftime("%Y%m%d-%H%M%S")
        number = 1
        while number <= ORDERS_MAX:
            if await self._place(f"{opened}-{number:05}", number, runner):
                number += 1
            await asyncio.sleep(ORDER_EVERY_S)
        _log.info("the shop has sold %s orders and closes; `oncewire up --demo` opens it again", ORDERS_MAX)

    async def _place(self, id_: str, number: int, runner: Runner) -> bool:
        """One order, as an event and as a command of the same id, so that the charge names the event as its cause.
        Safe to repeat: the server knows both by their message ids."""
        if not runner.health()["is_ready"]:
            return False
        is_gift_card = number % GIFT_CARD_EVERY == FIRST_GIFT_CARD
        item = "gift card" if is_gift_card else ITEMS[number % len(ITEMS)]
        order = {"id": id_, "item": item, "customer": CUSTOMERS[number % len(CUSTOMERS)]}
        body = {"id": f"placed-{id_}", "payload": order, "correlation_id": f"order-{id_}"}
        try:
            await self._client.publish(PLACED, body | {"type": "OrderPlaced"}, msg_id=f"placed-{id_}")
            await self._client.publish(COMMAND, body | {"type": "charge"}, msg_id=f"charge-{id_}")
        except OncewireError as error:
            _log.warning("an order of the demo shop waits: %s", error.message)
            return False
        return True

    async def _charged(self) -> None:
        """Wait until the agent has settled every order: the queue of a closed shop is empty."""
        while True:
            info = await self._client.api(f"STREAM.INFO.{STREAM}", {"subjects_filter": COMMAND})
            if not info["state"].get("subjects"):
                return
            await asyncio.sleep(POLL_S)
