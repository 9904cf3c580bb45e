"""The broker over HTTP: produce without and with its log, full cycles, batches, and one client alone."""

from __future__ import annotations

import os
import statistics
from functools import partial

import uvloop

from benchmarks.load import BATCH, PRODUCE, cycle_rate, latencies_us, rate, served
from benchmarks.measure import ratio, table, take_turns, verdict

ROUNDS = 3
SECONDS = 1.5
PINGS = 1_000
PRODUCES_WANTED = 12_000
CYCLES_WANTED = 8_000


async def _produce(kind: str) -> float:
    async with served(kind) as port:
        await rate(port, PRODUCE, 0.2)
        return await rate(port, PRODUCE, SECONDS)


async def _cycles(kind: str) -> float:
    async with served(kind) as port:
        return await cycle_rate(port, SECONDS)


async def _batches(kind: str) -> float:
    async with served(kind) as port:
        return await rate(port, BATCH, SECONDS, per_answer=100)


async def run() -> None:
    print(f"load before: {os.getloadavg()[0]:.1f}")
    contenders = {
        "bare front": partial(_produce, "bare"),
        "produce, no log": partial(_produce, "memory"),
        "produce, fdatasync before each answer": partial(_produce, "log"),
        "cycles, no log": partial(_cycles, "memory"),
        "cycles, fdatasync": partial(_cycles, "log"),
        "messages in batches of 100, fdatasync": partial(_batches, "log"),
    }
    runs = await take_turns(contenders, ROUNDS)
    print(table("64 connections, 256-byte values, generator on the same machine", runs, "bare front"))
    median = {name: statistics.median(figures) for name, figures in runs.items()}
    synced = "produce, fdatasync before each answer"
    print(verdict("produce without log beside the bare front", ratio(runs, "produce, no log", "bare front")[0], 0.5))
    print(verdict("produce with fdatasync beside 12,000/s", median[synced] / PRODUCES_WANTED, 1.0))
    print(verdict("cycles with fdatasync beside 8,000/s", median["cycles, fdatasync"] / CYCLES_WANTED, 1.0))
    batched = "messages in batches of 100, fdatasync"
    print(verdict("batches of 100 beside single produces", ratio(runs, batched, synced)[0], 3.0))
    for kind in ("memory", "log"):
        async with served(kind) as port:
            times = await latencies_us(port, PRODUCE, PINGS)
        print(f"  one client, {kind}: p50 {times[PINGS // 2]:.0f} µs, p99 {times[PINGS * 99 // 100]:.0f} µs")


def main() -> None:
    uvloop.run(run())
