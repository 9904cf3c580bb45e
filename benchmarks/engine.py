"""The broker's engine without HTTP: produce and full cycles, with and without a log, few and many messages held.

64 clients, each with one request out: a produce (200 bytes), or produce → delivery → ack. The log is synced before each
answer. `held` shows that the cost of a message does not grow with what is held, and what a held message takes.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.measure import table, take_turns
from oncewire._ground.contracts.broker import Delivery, ProduceBody
from oncewire._ground.errors import OncewireError
from oncewire.broker.engine import Consume, Limits, Settle
from oncewire.broker.local import LocalEngine, open_local

CLIENTS = 64
SECONDS = 1.5
ROUNDS = 3
FEW, MANY = 10_000, 1_000_000
BODY = ProduceBody(topic="t", value="x" * 192, key="user:123")
LIMITS = Limits(partition_messages_max=10**9, partition_bytes_max=10**12, in_flight_max=10_000, settled_age_ms=0)


class Reader:
    """Acks what it gets."""

    def __init__(self, engine: LocalEngine, acked: Callable[[Any], None]) -> None:
        self._engine, self._acked = engine, acked

    def room(self) -> int:
        return 10_000

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for one in deliveries:
            self._engine.settle("", Settle("ack", "t", "g", one.partition, one.offset, "a"), self._acked)

    def ended(self, error: OncewireError) -> None:
        pass


async def asked(call: Callable[..., Any], *args: Any) -> Any:
    done = asyncio.get_running_loop().create_future()
    call(*args, done.set_result)
    return await done


async def rate(engine: LocalEngine, *, is_cycle: bool) -> float:
    """Requests (or cycles) a second over SECONDS."""
    ended = asyncio.get_running_loop().create_future()
    count, begun = 0, time.perf_counter()

    def again(_: Any) -> None:
        nonlocal count
        count += 1
        if time.perf_counter() - begun < SECONDS:
            engine.produce("", BODY, ignore if is_cycle else again)
        elif not ended.done():
            ended.set_result(None)

    def ignore(_: Any) -> None:
        pass

    subscription = None
    if is_cycle:
        subscription = await asked(engine.subscribe, "", Consume("t", "g", "a", 600_000, 10_000), Reader(engine, again))
    for _ in range(CLIENTS):
        engine.produce("", BODY, ignore if is_cycle else again)
    await ended
    took = time.perf_counter() - begun
    if subscription is not None:
        subscription.close()
    return count / took


async def contender(folder: Path | None, *, is_cycle: bool) -> float:
    engine = await open_local(folder, limits=LIMITS)
    await asked(engine.create_topic, "", "t", 1)
    try:
        return await rate(engine, is_cycle=is_cycle)
    finally:
        await engine.stop()
        if folder is not None:
            shutil.rmtree(folder)


async def held() -> None:
    """The same produce with few and with many messages held, in one engine without a log."""
    engine = await open_local(None, limits=LIMITS)
    await asked(engine.create_topic, "", "t", 1)
    rates = {}
    before = _resident_bytes()
    for count in (FEW, MANY):
        while (stored := engine.stats().counters["produced"]) < count:
            await asked(engine.produce_many, "", [BODY] * min(10_000, count - stored))
        gc.collect()
        if count == MANY:
            each = (_resident_bytes() - before) / engine.stats().counters["produced"]
        rates[count] = statistics.median([await rate(engine, is_cycle=False) for _ in range(ROUNDS)])
    await engine.stop()
    print(f"  produce with {FEW:,} held {rates[FEW]:>12,.0f}/s")
    print(f"  produce with {MANY:,} held {rates[MANY]:>10,.0f}/s  {rates[MANY] / rates[FEW]:.2f}×")
    print(f"  a held message of 200 bytes takes {each:.0f} bytes")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def run() -> None:
    await held()  # first: what others have freed would be used again, and not be counted
    base = Path(tempfile.mkdtemp(prefix="oncewire-bench-"))
    try:
        runs = await take_turns(
            {
                "produce, in memory": lambda: contender(None, is_cycle=False),
                "produce, synced": lambda: contender(base / "produce", is_cycle=False),
                "cycle, in memory": lambda: contender(None, is_cycle=True),
                "cycle, synced": lambda: contender(base / "cycle", is_cycle=True),
            },
            ROUNDS,
        )
    finally:
        shutil.rmtree(base)
    print(table(f"the engine without HTTP, {CLIENTS} clients, 200 bytes", runs, "produce, in memory"))


def main() -> None:
    uvloop.run(run())
