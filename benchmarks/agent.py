"""An agent beside what a user would write: one effect per input, SQLite with synchronous FULL, input on `evt.>`.

    plain loop        nats-py, one SQLite transaction per message, publish, ack
    on nats-py        our protocol and batch size (ledger, blocks, stable ids), nats-py with single confirmed publishes
    FastStream        the same handler, no ledger at all: nothing is kept once
    oncewire          the agent as `oncewire agent run` runs it
    the client alone  receives, publishes effects that were made before, acks: no contract, no handler, no ledger

Each figure counts inputs whose effect stands in its stream and whose ack the server has taken; the clock starts when
the contender is connected and its ledger is open.

    python -m benchmarks.agent default always   the table, with the server's own sync and with `always`
    python -m benchmarks.agent queue            input from a work queue under `always`: the server syncs for each ack
    python -m benchmarks.agent growth           the same agent with ten thousand and with a million inputs in its ledger
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import nats
import uvloop

import oncewire
from benchmarks.measure import ratio, table, take_turns, verdict
from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.contracts.runtime import Actor, RuntimeEnvelope, SecurityContext, Source, encode_runtime
from oncewire._ground.jetstream import Client, Outgoing, Pull
from oncewire._ground.jetstream.protocol import Message, encode_headers
from oncewire._ground.ledger.rules import Content, Entry, identity_key
from oncewire._ground.ledger.rules import Source as LedgerSource
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.ledger.store import Mark
from oncewire._ground.topology import init_streams
from oncewire.agent import Agent, Effect
from oncewire.agent.batch import GroupCommit, Limits
from oncewire.agent.commits import COMMITS_AHEAD
from oncewire.agent.exits import Exit
from oncewire.agent.flow import BATCHES_HELD
from oncewire.agent.outflow import Targets, now_ms
from oncewire.agent.read import Reading
from oncewire.agent.run import Runner, own_the_process
from oncewire.agent.sources import open_source
from tests.support.nats import nats_server

INPUTS = 60_000
INPUTS_NATS_PY = 10_000
INPUTS_PLAIN = 1_000
COMMANDS = 5_000
SMALL_LEDGER, LARGE_LEDGER = 10_000, 1_000_000
GROWTH_MAX = 1.25
ROUNDS = 3
BATCH = 1_000
EFFECT_BYTES = 538
TRACE = f"00-{1:032x}-{1:016x}-01"
IN = "evt.default.bench.orders.placed"
OUT = "evt.default.bench.billing.charged"


class Order(msgspec.Struct):
    order: int
    note: str


def handle(_: Any, order: Order) -> Effect:
    return Effect(OUT, {"order": order.order})


def body(number: int) -> bytes:
    """Ids and text are chance, as traffic's are: what is the same in all of them could be kept for nothing."""
    chance = random.Random(number)
    return encode_runtime(
        RuntimeEnvelope(
            id=f"order-{number}",
            ts=1_700_000_000_000,
            type="OrderPlaced",
            schema_version="1.0",
            trace_id=chance.randbytes(16).hex(),
            span_id=chance.randbytes(8).hex(),
            tenant="default",
            workspace="bench",
            actor=Actor("shop", "service"),
            payload={"order": number, "note": chance.randbytes(32).hex()},
            idempotency_key=f"order-{number}",
            source=Source("shop", "bench"),
            security_context=SecurityContext("shop", "service"),
        )
    )


class Bench:
    """One server with the inputs stored once; every run reads them through a fresh durable and a fresh file."""

    def __init__(self, client: Client, other: Any, folder: Path) -> None:
        self.client = client
        self.other = other
        self.js = other.jetstream(publish_async_max_pending=4_000)
        self.folder = folder
        self.numbers = itertools.count(1)

    def file(self) -> str:
        return str(self.folder / f"ledger{next(self.numbers)}.db")

    async def all_acked(self, consumer: str, count: int, stream: str = "MESHFORGE_EVENTS") -> None:
        while True:
            info = await self.client.api(f"CONSUMER.INFO.{stream}.{consumer}")
            if info["ack_floor"]["consumer_seq"] >= count:
                return
            await asyncio.sleep(0.005)

    async def ours(self) -> float:
        return await self.run_agent(Agent(f"bench{next(self.numbers)}", workspace="bench", batch=BATCH), self.file())

    async def run_agent(self, agent: Agent, path: str, subject: str = IN, count: int = INPUTS) -> float:
        stream = "MESHFORGE_COMMANDS" if subject.startswith("cmd.") else "MESHFORGE_EVENTS"
        agent.on(subject)(handle)
        async with Runner(agent, self.client, SqliteStore(path)) as runner:
            started = time.perf_counter()
            while runner.counts.get("done", 0) < count:
                await asyncio.sleep(0.005)
            await self.all_acked(f"default_bench_{agent.name}_consumer", count, stream)
            return count / (time.perf_counter() - started)

    async def client_alone(self) -> float:
        """What is left when nothing is done with an input: about how far any agent could come beside this server."""
        consumer = f"alone{next(self.numbers)}"
        await self.durable(consumer)
        way, slots = Exit(self.client), asyncio.Semaphore(COMMITS_AHEAD)

        async def finish(pull: Pull, messages: list[Message], first: int) -> None:
            async with slots:
                ids = [f"{consumer}-{number:030d}" for number in range(first, first + len(messages))]
                await way.publish([Outgoing(OUT, bytes(EFFECT_BYTES), id_, traceparent=TRACE) for id_ in ids])
                pull.ack(messages)

        started = time.perf_counter()
        count, held = 0, list[Message]()
        async with self.client.pull("MESHFORGE_EVENTS", consumer, batch=BATCH, ahead=BATCHES_HELD) as pull:
            async with asyncio.TaskGroup() as finishing:
                while count < INPUTS:
                    held += await pull.fetch(BATCH)
                    if len(held) >= BATCH or count + len(held) == INPUTS:
                        finishing.create_task(finish(pull, held, count))
                        count, held = count + len(held), []
            await self.all_acked(consumer, INPUTS)
        return INPUTS / (time.perf_counter() - started)

    async def from_a_work_queue(self) -> float:
        """The same agent on `cmd.>`: each ack removes a message, which the server syncs."""
        agent = Agent(f"bench{next(self.numbers)}", workspace="bench", batch=BATCH)
        subject = f"cmd.default.bench.{agent.name}.charge"
        commands = [Outgoing(subject, body(number), f"{agent.name}-{number}") for number in range(COMMANDS)]
        await self.client.publish_all(commands)
        return await self.run_agent(agent, self.file(), subject, COMMANDS)

    async def with_rows(self, rows: int) -> float:
        agent = Agent(f"bench{next(self.numbers)}", workspace="bench", batch=BATCH)
        path = self.file()
        await asyncio.to_thread(fill, path, agent.name, rows)
        return await self.run_agent(agent, path)

    async def plain(self) -> float:
        """What a user would write: look, handle, record, publish, ack, one message at a time."""
        consumer = f"plain{next(self.numbers)}"
        await self.durable(consumer)
        db = sqlite3.connect(self.file(), isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE seen (key TEXT PRIMARY KEY, effect BLOB)")
        subscription = await self.js.pull_subscribe_bind(durable=consumer, stream="MESHFORGE_EVENTS")
        started = time.perf_counter()
        count = 0
        while count < INPUTS_PLAIN:
            for message in await subscription.fetch(100):
                envelope = msgspec.json.decode(message.data)
                effect = msgspec.json.encode({"type": "charged", "payload": {"order": envelope["payload"]["order"]}})
                db.execute("BEGIN IMMEDIATE")
                db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (envelope["idempotency_key"], effect))
                db.execute("COMMIT")
                id_ = f"{consumer}-{envelope['idempotency_key']}"
                await self.js.publish(OUT, effect, headers={"Nats-Msg-Id": id_})
                await message.ack()
                count += 1
        await self.other.flush()
        await self.all_acked(consumer, INPUTS_PLAIN)
        elapsed = time.perf_counter() - started
        db.close()
        await subscription.unsubscribe()
        return INPUTS_PLAIN / elapsed

    async def on_nats_py(self) -> float:
        """Our ledger, batch size and ids, on the usual client with single confirmed publishes."""
        agent = Agent(f"bench{next(self.numbers)}", workspace="bench", batch=BATCH)
        agent.on(IN)(handle)
        consumer = f"default_bench_{agent.name}_consumer"
        store = SqliteStore(self.file())
        ledger = store.open("default", "bench", agent.name)
        opened = await open_source(self.client, agent, "MESHFORGE_EVENTS", [IN], consumer)
        sources = {opened.source.durable: opened.source}
        reading, targets = Reading(agent, ledger, [opened.source]), Targets(self.client)
        await targets.resolve(OUT)
        subscription = await self.js.pull_subscribe_bind(durable=consumer, stream="MESHFORGE_EVENTS")
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        count = 0
        while count < INPUTS_NATS_PY:
            fetched = await subscription.fetch(BATCH)
            items = reading.read([_message(one) for one in fetched])
            limits = Limits(ledger, 5, targets.stream_of, targets.check_size, now_ms())
            group = GroupCommit(store, limits, sources)
            settled = await loop.run_in_executor(None, group.run, items, dict(targets.last), [])
            futures = [
                await self.js.publish_async(
                    one.subject, one.payload, headers={"Nats-Msg-Id": one.id, "traceparent": one.trace}
                )
                for one in settled.sendings
            ]
            await asyncio.gather(*futures)
            for message in fetched:
                await message.ack()
            count += len(fetched)
        await self.other.flush()
        await self.all_acked(consumer, INPUTS_NATS_PY)
        elapsed = time.perf_counter() - started
        store.close()
        await subscription.unsubscribe()
        return count / elapsed

    async def faststream(self) -> float:
        """The same handler in FastStream, which keeps no ledger: a crash doubles or loses."""
        from faststream.nats import JStream, NatsBroker, PullSub  # type: ignore[import-not-found]

        consumer = f"faststream{next(self.numbers)}"
        await self.durable(consumer)
        broker = NatsBroker(self.client.connection.options.servers[0], logger=None)
        # Declaring it would write the stream's configuration back without what nats-py does not know: atomic batches.
        stream = JStream("MESHFORGE_EVENTS", declare=False)
        done = asyncio.Event()
        count = 0

        @broker.subscriber(IN, durable=consumer, stream=stream, pull_sub=PullSub(batch_size=100))
        async def on_order(message: dict[str, Any]) -> None:
            nonlocal count
            payload = {"type": "charged", "payload": {"order": message["payload"]["order"]}}
            await broker.publish(payload, OUT, stream="MESHFORGE_EVENTS")
            count += 1
            if count >= INPUTS_PLAIN:
                done.set()

        started = time.perf_counter()
        await broker.start()
        await done.wait()
        elapsed = time.perf_counter() - started
        await broker.stop()
        return INPUTS_PLAIN / elapsed

    async def durable(self, consumer: str) -> None:
        config = {"durable_name": consumer, "name": consumer, "ack_policy": "explicit", "filter_subject": IN}
        request = {"stream_name": "MESHFORGE_EVENTS", "config": config | {"max_ack_pending": 5_000}, "action": "create"}
        await self.client.api(f"CONSUMER.CREATE.MESHFORGE_EVENTS.{consumer}", request)


def _message(one: Any) -> Message:
    header = encode_headers(one.headers) if one.headers else b""
    return Message(0, one.subject.encode(), one.reply.encode(), header, one.data)


def fill(path: str, agent: str, rows: int) -> None:
    """A ledger that has settled so many inputs before, all of them published."""
    store = SqliteStore(path)
    name = store.open("default", "bench", agent).name
    source = LedgerSource("BENCH", "2026-01-01T00:00:00Z", "bench", ("bench",), 1, False)
    for first in range(0, rows, BATCH):
        numbers = range(first + 1, first + BATCH + 1)
        entries = [
            Entry(
                identity_key(name, f"old:{one}"), f"old:{one}", "bench", b"{}", b"", Outcome.DONE, "BENCH", one, one,
                bytes(32), 0,
            )
            for one in numbers
        ]  # fmt: skip
        store.begin()
        number = store.append(Content(entries, [], 1, {}), {"BENCH": source}, []).number
        store.mark([Mark(number, 0, 0, "LEDGER", number)])
        store.commit()
    store.close()


@contextlib.asynccontextmanager
async def opened(url: str, bodies: Sequence[bytes] = ()) -> AsyncIterator[Bench]:
    other = await nats.connect(url)
    async with oncewire.connect(url) as client:
        await init_streams(client)
        inputs = bodies or [body(number) for number in range(INPUTS)]
        await client.publish_all([Outgoing(IN, one, f"in-{number}") for number, one in enumerate(inputs)])
        with tempfile.TemporaryDirectory() as folder:
            yield Bench(client, other, Path(folder))
    with contextlib.suppress(Exception):
        await other.close()


async def compare(url: str, sync: str, wanted: float) -> None:
    async with opened(url) as bench:
        contenders = {
            "plain loop": bench.plain,
            "on nats-py": bench.on_nats_py,
            "oncewire": bench.ours,
            "the client alone": bench.client_alone,
        }
        if importlib.util.find_spec("faststream"):
            contenders["FastStream, no ledger"] = bench.faststream
        runs = await take_turns(contenders, ROUNDS)
    print(table(f"inputs with one effect, {sync}", runs, "plain loop"))
    print(verdict("oncewire against the plain loop", ratio(runs, "oncewire", "plain loop")[0], 20))
    print(verdict("oncewire against the protocol on nats-py", ratio(runs, "oncewire", "on nats-py")[0], wanted))


async def queue(url: str) -> None:
    async with opened(url) as bench:
        runs = await take_turns({"from evt.>": bench.ours, "from a work queue": bench.from_a_work_queue}, ROUNDS)
    print(table("oncewire, sync_interval: always", runs, "from evt.>"))


async def growth(url: str) -> None:
    async with opened(url) as bench:
        small, large = f"{SMALL_LEDGER:,} inputs in the ledger", f"{LARGE_LEDGER:,} inputs in the ledger"
        contenders = {small: lambda: bench.with_rows(SMALL_LEDGER), large: lambda: bench.with_rows(LARGE_LEDGER)}
        runs = await take_turns(contenders, ROUNDS)
    print(table("oncewire, server default", runs, small))
    cost = ratio(runs, small, large)[0]
    reached = "reached" if cost <= GROWTH_MAX else "NOT REACHED"
    print(f"  {reached}: an input costs {cost:.2f}× with {large} (at most {GROWTH_MAX}×)")


def main(*pieces: str) -> None:
    own_the_process()
    wanted = pieces or ("default", "always", "queue", "growth")
    if "default" in wanted:
        with nats_server() as server:
            uvloop.run(compare(server.url, "server default", 4))
    if "always" in wanted:
        with nats_server(sync_always=True) as server:
            uvloop.run(compare(server.url, "sync_interval: always", 10))
    if "queue" in wanted:
        with nats_server(sync_always=True) as server:
            uvloop.run(queue(server.url))
    if "growth" in wanted:
        with nats_server() as server:
            uvloop.run(growth(server.url))


if __name__ == "__main__":
    main(*sys.argv[1:])
