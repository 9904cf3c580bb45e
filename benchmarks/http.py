# ruff: noqa: A005 (named after the part that it measures)
"""The HTTP front beside uvicorn with a raw ASGI application: 64 connections, the same body, the same checks."""

from __future__ import annotations

import os
from functools import partial

import uvloop

from benchmarks.load import PRODUCE, rate, served
from benchmarks.measure import table, take_turns

ROUNDS = 5
SECONDS = 1.5


async def _one(kind: str) -> float:
    async with served(kind) as port:
        await rate(port, PRODUCE, 0.2)
        return await rate(port, PRODUCE, SECONDS)


async def run() -> None:
    print(f"load before: {os.getloadavg()[0]:.1f}")
    runs = await take_turns({kind: partial(_one, kind) for kind in ("uvicorn", "decoding", "bare")}, ROUNDS)
    print(table(f"POST with {len(PRODUCE)} bytes, 64 connections, generator on the same machine", runs, "uvicorn"))


def main() -> None:
    uvloop.run(run())
