"""A finite tour through every part: orders over HTTP, an agent that is killed, a room, a dead letter, Spark, an audit.

Each step does something, says what to look at, and checks what it claims by counting on the other side: rows in
PostgreSQL, messages in the stream, in the room, in the lake. What a command does is done by that command.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery
from oncewire._ground.database.postgres import connected, queries
from oncewire._ground.errors import Conflict, TimedOut
from oncewire._ground.jetstream import Client
from oncewire.broker.client import BrokerClient, Message, Worker
from oncewire.demo.biller import CHARGED, agent
from oncewire.dlq.letters import Dead, Filter, read_letters
from oncewire.dlq.replay import Replay, ReplayOptions
from oncewire.gateway.client import GatewayClient
from oncewire.pipeline.lake.place import Place

SQL = queries("oncewire.demo")
TOPIC: Final = "tour-orders"
GROUP: Final = "checkout"
STREAM: Final = "MESHFORGE_EVENTS"
COMMAND: Final = f"cmd.default.tour.{agent.name}.charge"
PRICES: Final = {"bicycle": 42_000, "bell": 990, "lamp": 2_450, "lock": 3_900}
UNICORN: Final = "unicorn"
UNICORN_CENTS: Final = 100_000_00
REPEAT_EVERY: Final = 4
"""Every so many orders the shop is impatient and sends one twice."""
STEP_S_MAX: Final = 120.0
TAKE_S: Final = 20.0
LAKE_S_MAX: Final = 300.0
POLL_S: Final = 0.1


class Say(Protocol):
    """Shows the tour to whoever takes it."""

    def step(self, title: str) -> None: ...
    def tell(self, text: str) -> None: ...
    def check(self, text: str, *, holds: bool) -> None: ...
    def look(self, text: str) -> None: ...


class Process(Protocol):
    """A running agent."""

    async def kill(self) -> None: ...
    async def stop(self) -> None: ...


class Machine(Protocol):
    """What runs commands: `agent` starts one and waits until it serves, `command` runs one with --json to its end."""

    async def agent(self) -> Process: ...
    async def command(self, *words: str) -> tuple[int, Any]: ...


@dataclass(frozen=True)
class Where:
    """The addresses of a running `up`."""

    postgres_url: str
    broker_url: str
    gateway_url: str
    console_url: str = ""
    lake: Place | None = None
    """None where Spark cannot run."""


@dataclass
class Seen:
    """What was counted, for the verdict."""

    orders: int = 0
    kills: int = 0
    in_room: list[str] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)


class Tour:
    """`await Tour(…).run()` takes the whole of it; False when something that it checked does not hold."""

    def __init__(self, client: Client, where: Where, machine: Machine, say: Say, *, orders: int, kills: int) -> None:
        self._client = client
        self._where = where
        self._machine = machine
        self._say = say
        self._count = orders
        self._kills = kills
        self._id = f"{time.strftime('%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self._room = str(uuid.uuid4())
        self._stream_from = 1
        self._seen = Seen()
        self._is_good = True

    async def run(self) -> bool:
        await self._prepare()
        async with GatewayClient(self._where.gateway_url) as browser:
            watching = asyncio.create_task(self._watch_room(browser))
            try:
                await self._orders_come_in()
                await self._agent_is_killed()
                await self._room_has_it()
                await self._poison()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        await self._spark()
        self._verdict()
        return self._is_good

    def _check(self, text: str, *, holds: bool) -> None:
        self._is_good &= holds
        self._say.check(text, holds=holds)

    async def _prepare(self) -> None:
        async with connected(self._where.postgres_url) as connection:
            await connection.execute(SQL["make_tour"])
            for item, cents in PRICES.items():
                await connection.execute(SQL["set_price"], item, cents)
            await connection.execute(SQL["forget_price"], UNICORN)
        info = await self._client.api(f"STREAM.INFO.{STREAM}")
        self._stream_from = info["state"]["last_seq"] + 1

    # ---- over HTTP

    async def _orders_come_in(self) -> None:
        """The shop produces, a worker turns each order into a command: a repeat ends here."""
        say = self._say
        say.step("Orders come in over HTTP")
        messages = [self._order(number) for number in range(1, self._count + 1)]
        repeated = messages[::REPEAT_EVERY]
        say.tell(f"{self._count} orders are produced to the topic {TOPIC}; {len(repeated)} of them twice")
        async with BrokerClient(self._where.broker_url) as broker:
            with contextlib.suppress(Conflict):  # from a tour before
                await broker.create_topic(TOPIC, partitions=2)
            results = [one for part in (messages, repeated) for one in await broker.produce_many(part)]
            commanded: list[str] = []
            worker = Worker(broker, TOPIC, GROUP, lambda delivery: self._command(delivery, commanded), concurrency=4)
            working = asyncio.create_task(worker.run())
            try:
                await self._until(lambda: self._is_taken(broker), "the orders are taken")
            finally:
                worker.stop()
                await working
        self._seen.orders = len(commanded)
        self._check(
            f"{len(results)} produced, {worker.done} delivered, {len(commanded)} commands: each order once",
            holds=not any(one.problem for one in results)
            and len(commanded) == len(set(commanded)) == worker.done == self._count,
        )
        say.look(f"curl '{self._where.broker_url}/v1/topics/{TOPIC}'" + self._page("topics"))

    def _order(self, number: int, item: str = "") -> Message:
        id_ = f"{self._id}-{number:03}"
        order = {"id": id_, "item": item or list(PRICES)[number % len(PRICES)], "room": self._room, "tour": self._id}
        envelope = BrokerEnvelope(run_id=f"tour-{self._id}", step_id=id_, idempotency_key=id_)
        return Message(TOPIC, json.dumps(order), key=id_, envelope=envelope)

    async def _command(self, delivery: Delivery, commanded: list[str]) -> None:
        order = json.loads(delivery.value)
        await self._charge(order)
        commanded.append(order["id"])

    async def _charge(self, order: dict[str, Any]) -> None:
        """Under the order's own id, so that the charge names the order as its cause: the lake has no commands."""
        body = {"type": "charge", "id": order["id"], "payload": order, "correlation_id": f"tour-{self._id}"}
        await self._client.publish(COMMAND, body, msg_id=f"tour-{order['id']}")

    async def _is_taken(self, broker: BrokerClient) -> bool:
        shown = await broker.topic(TOPIC)
        groups = [one for one in shown.groups if one.name == GROUP]
        return bool(groups) and all(one.lag == 0 for one in groups)

    # ---- an agent, killed

    async def _agent_is_killed(self) -> None:
        say = self._say
        say.step("An agent charges them, and is killed while it does")
        say.tell("one transaction holds the charge, a message for the customer's room, and the effect")
        running = await self._machine.agent()
        try:
            for number in range(1, self._kills + 1):
                mark = max(1, self._count * number // (self._kills + 1))
                await self._until(functools.partial(self._has_charged, mark), f"{mark} charges")
                await running.kill()
                self._seen.kills += 1
                say.tell(f"killed (-9) with {(await self._charges())[0]} charges in the books; it starts again")
                running = await self._machine.agent()
            await self._until(lambda: self._has_charged(self._count), "all charges")
            await self._until(lambda: self._has_effects(self._count), "all effects in their stream")
        finally:
            await running.stop()
        await self._count_all(self._count)
        say.look(f"oncewire agent status oncewire.demo.biller:agent --store '{self._where.postgres_url}'")

    async def _charges(self) -> tuple[int, int]:
        async with connected(self._where.postgres_url) as connection:
            row = await connection.fetchrow(SQL["count_charges"], self._id)
        return row["charges"], row["orders"]

    async def _has_charged(self, count: int) -> bool:
        return (await self._charges())[1] >= count

    async def _effects(self) -> list[str]:
        """The orders of this tour that the stream says are charged, as often as they stand there."""
        found: list[str] = []
        sequence = self._stream_from
        while batch := await self._client.get_batch(STREAM, sequence=sequence, subject=CHARGED):
            payloads = [json.loads(one.payload)["payload"] for one in batch]
            found += [one["order"] for one in payloads if one["tour"] == self._id]
            sequence = batch[-1].sequence + 1
        return found

    async def _has_effects(self, count: int) -> bool:
        return len(await self._effects()) >= count

    async def _count_all(self, wanted: int) -> None:
        charges, orders = await self._charges()
        effects = await self._effects()
        self._check(f"{wanted} orders, {charges} charges in PostgreSQL: each once", holds=charges == orders == wanted)
        self._check(f"{len(effects)} effects in {STREAM}: each once", holds=len(effects) == len(set(effects)) == wanted)

    # ---- a room

    async def _watch_room(self, browser: GatewayClient) -> None:
        async for message in browser.room(self._room, resume=0):
            event: Any = message.event
            self._seen.in_room.append(event.metadata["order"])
            self._seen.sequences.append(message.sequence or 0)

    async def _room_has_it(self) -> None:
        self._say.step("A browser sees it")
        await self._until_true(lambda: len(self._seen.in_room) >= self._count, "the room's messages")
        self._check_room(self._count)
        self._say.look(f"{self._where.gateway_url}/?room={self._room}")

    def _check_room(self, wanted: int) -> None:
        told, numbers = self._seen.in_room, self._seen.sequences
        self._check(
            f"{len(told)} messages in the room, numbered {numbers[0]} to {numbers[-1]}: in order, each once",
            holds=len(told) == len(set(told)) == wanted and numbers == list(range(1, wanted + 1)),
        )

    # ---- a dead letter

    async def _poison(self) -> None:
        say = self._say
        say.step("A poison message becomes a dead letter, and comes back")
        say.tell(f"somebody orders a {UNICORN}: nobody knows its price, and trying again would not help")
        poison = self._order(self._count + 1, UNICORN)
        running = await self._machine.agent()
        try:
            await self._one_more(poison)
            await self._until(self._has_letter, "the dead letter")
            (letter,) = await self._letters()
            self._check(f"letter {letter.sequence}: {letter.cause}: {letter.error}", holds=UNICORN in letter.error)
            say.look(f"oncewire dlq show {letter.sequence}" + self._page("letters"))
            async with connected(self._where.postgres_url) as connection:
                await connection.execute(SQL["set_price"], UNICORN, UNICORN_CENTS)
            say.tell(f"the price is known now: oncewire dlq replay {letter.sequence}")
            await Replay(self._client, Filter(ids=frozenset({letter.id})), ReplayOptions()).run()
            wanted = self._count + 1
            await self._until(lambda: self._has_charged(wanted), "the charge")
            await self._until(lambda: self._has_effects(wanted), "its effect")
            await self._until_true(lambda: len(self._seen.in_room) >= wanted, "its message in the room")
        finally:
            await running.stop()
        self._seen.orders = wanted
        await self._count_all(wanted)
        self._check_room(wanted)
        self._check("the letter is gone from the dead letters", holds=not await self._letters())

    async def _one_more(self, order: Message) -> None:
        """An order after the others, on the same way."""
        async with BrokerClient(self._where.broker_url) as broker:
            await broker.produce(order.topic, order.value, key=order.key, envelope=order.envelope)
            (delivery,) = await broker.take(TOPIC, GROUP, wait_s=TAKE_S)
            await self._charge(json.loads(delivery.value))
            await broker.ack(broker.lease(TOPIC, GROUP, delivery))

    async def _letters(self) -> list[Dead]:
        mine = f"tour-{self._id}".encode()
        chosen = Filter(subject=COMMAND)
        return [one.letter async for one in read_letters(self._client, chosen) if mine in one.stored.payload]

    async def _has_letter(self) -> bool:
        return bool(await self._letters())

    # ---- Spark

    async def _spark(self) -> None:
        say, lake = self._say, self._where.lake
        say.step("Spark has it in tables, and the audit signs")
        if lake is None:
            say.tell("left out: Spark cannot run here (`pip install 'oncewire[local-spark]'` brings it, with Java)")
            return
        await self._fill_lake()
        rows = Counter(await asyncio.to_thread(_silver_orders, lake, self._id))
        self._check(
            f"{rows.total()} rows in silver/runtime for {self._seen.orders} orders: each once",
            holds=len(rows) == rows.total() == self._seen.orders,
        )
        say.tell("the audit compares what the agents say they did with what the lake holds")
        code, verdict = await self._machine.command("pipeline", "audit")
        errors = verdict["errors"] if isinstance(verdict, dict) and "errors" in verdict else verdict
        said = "nothing lost, doubled or changed" if code == 0 else f"it is not well: {errors}"
        self._check(f"audit: {said}", holds=code == 0)
        say.look("oncewire pipeline status; oncewire pipeline report --out report.html" + self._page("pipeline"))

    async def _fill_lake(self) -> None:
        """The pipeline that runs already gets the time it needs; without one, a pass is made."""
        _, told = await self._machine.command("pipeline", "status")
        if not told["held_by"]:
            self._say.tell("oncewire pipeline run --once (Spark starts: half a minute)")
            code, said = await self._machine.command("pipeline", "run", "--once")
            self._check("all streams are read", holds=code == 0)
            if code:
                self._say.tell(str(said))
            return
        self._say.tell("the pipeline of `oncewire up --pipeline` reads on")
        marks = {one["name"]: one["last"] for one in told["streams"] if one["last"]}
        await self._until(lambda: self._is_read(marks), "the pipeline", within_s=LAKE_S_MAX)

    async def _is_read(self, marks: dict[str, int]) -> bool:
        _, told = await self._machine.command("pipeline", "status")
        reached = {one["name"]: one["reached"] for one in told["streams"]}
        is_landed = all(reached.get(name, 0) >= last for name, last in marks.items())
        return is_landed and bool(told["silver_has"] >= told["bronze_version"])

    # ---- the end

    def _verdict(self) -> None:
        seen = self._seen
        self._say.step("The verdict")
        if self._is_good:
            self._check(
                f"every effect happened once: {seen.orders} orders, {seen.kills} kills, nothing lost, nothing doubled",
                holds=True,
            )
        else:
            self._check("something above does not hold", holds=False)
        if self._where.console_url:
            self._say.look(f"{self._where.console_url}/runs/tour-{self._id}, all of it on one line of time")

    def _page(self, view: str) -> str:
        return f", or {self._where.console_url}/{view}" if self._where.console_url else ""

    async def _until_true(self, condition: Callable[[], bool], what: str) -> None:
        async def asked() -> bool:
            return condition()

        await self._until(asked, what)

    async def _until(
        self, condition: Callable[[], Awaitable[bool]], what: str, *, within_s: float = STEP_S_MAX
    ) -> None:
        """Look again until it holds. What does not come in time ends the tour."""
        deadline = time.monotonic() + within_s
        while not await condition():
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"waited {within_s:.0f} s in vain for {what}", hint="See `oncewire doctor`, and the logs."
                )
            await asyncio.sleep(POLL_S)


def _silver_orders(lake: Place, tour: str) -> list[str]:
    """The orders of a tour in silver/runtime, read without Spark."""
    from oncewire.pipeline.tables import dataset, open_table

    silver = dataset(open_table(lake, "silver/runtime"))
    rows = (row for batch in silver.to_batches(columns=["subject", "payload"]) for row in batch.to_pylist())
    charged = (json.loads(row["payload"]) for row in rows if row["subject"] == CHARGED)
    return [one["order"] for one in charged if one["tour"] == tour]
