"""The NATS client beside nats-py, both on uvloop, client and server on the same machine, 256-byte messages.

A compiled client takes part when it is installed (`pip install natsrpy`). Every figure ends with the server's own
word: publishing counts confirmed messages, pulling counts messages whose acks the server has taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import nats.js.api
import uvloop

import oncewire
from benchmarks.measure import ratio, table, take_turns, verdict
from oncewire._ground.jetstream import Client, Outgoing
from tests.support.nats import nats_server

PAYLOAD = b"x" * 256
PUBLISHED = 20_000
PULLED = 20_000
PINGS = 500
ROUNDS = 5
BATCH = 500


async def make_stream(client: Client, name: str) -> None:
    allowed = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
    config = {"name": name, "subjects": [f"{name}.>"], **allowed}
    await client.api(f"STREAM.CREATE.{name}", config)


async def make_consumer(client: Client, stream: str, name: str, **extra: object) -> None:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", "max_ack_pending": 50_000, **extra}
    body = {"stream_name": stream, "config": config, "action": "create"}
    await client.api(f"CONSUMER.CREATE.{stream}.{name}", body)


class Bench:
    """One server, one connection per client, fresh consumers for each run."""

    def __init__(self, ours: Client, theirs: Any) -> None:
        self.ours = ours
        self.theirs = theirs
        self.js = theirs.jetstream(publish_async_max_pending=4_000)
        self.consumers = 0

    async def consumer(self, **extra: object) -> str:
        self.consumers += 1
        name = f"bench{self.consumers}"
        await make_consumer(self.ours, "PULL", name, **extra)
        return name

    async def all_acked(self, name: str) -> None:
        """Until the server has taken every ack: part of the measured time for everybody."""
        while True:
            info = await self.ours.api(f"CONSUMER.INFO.PULL.{name}")
            if info["num_ack_pending"] == 0:
                return

    # ---- publishing

    async def publish_ours(self) -> float:
        messages = [Outgoing("PUB.a", PAYLOAD) for _ in range(PUBLISHED)]
        started = time.perf_counter()
        await self.ours.publish_many(messages)
        return PUBLISHED / (time.perf_counter() - started)

    async def publish_fast(self) -> float:
        messages = [Outgoing("PUB.a", PAYLOAD) for _ in range(PUBLISHED)]
        started = time.perf_counter()
        await self.ours.publish_fast(messages)
        return PUBLISHED / (time.perf_counter() - started)

    async def publish_atomic(self) -> float:
        messages = [Outgoing("PUB.a", PAYLOAD) for _ in range(PUBLISHED)]
        started = time.perf_counter()
        await self.ours.publish_all(messages)
        return PUBLISHED / (time.perf_counter() - started)

    async def publish_theirs(self) -> float:
        started = time.perf_counter()
        futures = [await self.js.publish_async("PUB.a", PAYLOAD) for _ in range(PUBLISHED)]
        await asyncio.gather(*futures)
        return PUBLISHED / (time.perf_counter() - started)

    # ---- pulling

    async def pull_ours(self) -> float:
        name = await self.consumer()
        count = 0
        started = time.perf_counter()
        async with self.ours.pull("PULL", name, batch=BATCH, ahead=3) as pull:
            while count < PULLED:
                messages = await pull.fetch()
                pull.ack(messages)
                count += len(messages)
        await self.all_acked(name)
        return PULLED / (time.perf_counter() - started)

    async def pull_theirs(self) -> float:
        name = await self.consumer()
        subscription = await self.js.pull_subscribe_bind(durable=name, stream="PULL")
        count = 0
        started = time.perf_counter()
        while count < PULLED:
            messages = await subscription.fetch(BATCH)
            for message in messages:
                await message.ack()
            count += len(messages)
        await self.theirs.flush()
        await self.all_acked(name)
        elapsed = time.perf_counter() - started
        await subscription.unsubscribe()
        return PULLED / elapsed

    # ---- latency

    async def ping_ours(self) -> list[float]:
        await make_consumer(self.ours, "PING", f"o{self.consumers}", deliver_policy="new")
        times = []
        async with self.ours.pull("PING", f"o{self.consumers}", batch=10) as pull:
            self.consumers += 1
            for _ in range(PINGS):
                started = time.perf_counter()
                (_, messages) = await asyncio.gather(self.ours.publish("PING.a", PAYLOAD), pull.fetch(1))
                times.append(time.perf_counter() - started)
                pull.ack(messages)
        return times

    async def ping_theirs(self) -> list[float]:
        name = f"t{self.consumers}"
        self.consumers += 1
        await make_consumer(self.ours, "PING", name, deliver_policy="new")
        subscription = await self.js.pull_subscribe_bind(durable=name, stream="PING")
        times = []
        for _ in range(PINGS):
            started = time.perf_counter()
            (_, messages) = await asyncio.gather(self.js.publish("PING.a", PAYLOAD), subscription.fetch(1))
            times.append(time.perf_counter() - started)
            await messages[0].ack()
        await subscription.unsubscribe()
        return times


async def compiled(url: str) -> dict[str, Callable[[], Awaitable[float]]]:
    """The compiled client's turn at publishing, when it is installed."""
    if importlib.util.find_spec("natsrpy") is None:
        return {}
    from natsrpy import Nats  # type: ignore[import-not-found]

    client = Nats([url])
    await client.startup()
    js = await client.jetstream()

    async def publish() -> float:
        started = time.perf_counter()
        for start in range(0, PUBLISHED, 1000):
            await asyncio.gather(*(js.publish("PUB.a", PAYLOAD, wait=True) for _ in range(start, start + 1000)))
        return PUBLISHED / (time.perf_counter() - started)

    return {"natsrpy (compiled)": publish}


async def run(url: str, sync: str) -> None:
    theirs = await nats.connect(url)
    async with oncewire.connect(url) as ours:
        for stream in ("PUB", "PULL", "PING"):
            await make_stream(ours, stream)
        await ours.publish_many([Outgoing("PULL.a", PAYLOAD) for _ in range(PULLED)])
        bench = Bench(ours, theirs)
        others: dict[str, Callable[[], Awaitable[float]]] = {}
        with contextlib.suppress(Exception):  # an optional guest must not spoil the run
            others = await compiled(url)
        publishing = await take_turns(
            {
                "nats-py": bench.publish_theirs,
                "oncewire, pipelined": bench.publish_ours,
                "oncewire, fast ingest": bench.publish_fast,
                "oncewire, atomic batches": bench.publish_atomic,
                **others,
            },
            ROUNDS,
        )
        print(table(f"confirmed publishing, {sync}", publishing, "nats-py"))
        pulling = await take_turns({"nats-py": bench.pull_theirs, "oncewire": bench.pull_ours}, ROUNDS)
        print(table(f"pull and ack, {sync}", pulling, "nats-py"))
        if sync == "server default":
            print(verdict("confirmed publishing", ratio(publishing, "oncewire, pipelined", "nats-py")[0], 2.0))
            print(verdict("pull and ack", ratio(pulling, "oncewire", "nats-py")[0], 4.0))
            await latency(bench)
    await theirs.close()


async def latency(bench: Bench) -> None:
    """Publish one message and have it in hand, p50 and p99 over rounds that take turns."""
    figures: dict[str, list[float]] = {"nats-py": [], "oncewire": []}
    for _ in range(ROUNDS):
        figures["nats-py"] += await bench.ping_theirs()
        figures["oncewire"] += await bench.ping_ours()
    print("publish → confirmed and in hand, one at a time")
    quantiles = {name: statistics.quantiles(times, n=100) for name, times in figures.items()}
    for name, cuts in quantiles.items():
        print(f"  {name:<10}  p50 {cuts[49] * 1e6:>7,.0f} µs   p99 {cuts[98] * 1e6:>7,.0f} µs")
    for at, label in ((49, "p50"), (98, "p99")):
        print(verdict(f"{label} against nats-py", quantiles["nats-py"][at] / quantiles["oncewire"][at], 1.0))


def main() -> None:
    with nats_server() as server:
        uvloop.run(run(server.url, "server default"))
    with nats_server(sync_always=True) as server:
        uvloop.run(run(server.url, "sync_interval: always"))


if __name__ == "__main__":
    main()
