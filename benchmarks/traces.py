"""What traces cost an agent: CPU time of its process per input with one effect, two spans each.

    off              the agent as it is
    otlp, one in 10  every tenth trace, by OpenTelemetry's own sampler
    otlp             every trace; the queue holds all spans, so that none is dropped and all are paid for

The collector is a process of its own on loopback that reads and counts; its CPU time does not count. A figure is taken
once all spans have left.

    python -m benchmarks.traces
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import uvloop

from benchmarks.agent import BATCH, IN, Bench, body, handle, opened
from benchmarks.measure import take_turns
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.tracing.otel import exporting
from oncewire.agent import Agent
from oncewire.agent.run import Runner, own_the_process
from tests.support.nats import nats_server

COUNT = 20_000
ROUNDS = 5
SPANS_EACH = 2
RATIO = 0.1


def trace_of(number: int) -> str:
    """Spread over all ids, as samplers expect them."""
    return hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()


def bodies() -> list[bytes]:
    return [body(one).replace(f"{one + 1:032x}".encode(), trace_of(one).encode()) for one in range(COUNT)]


def collect() -> None:
    """The collector's process: says its address, then, asked for so many spans, when it has them."""
    from tests.support.collector import collecting

    with collecting() as found:
        print(found.url, flush=True)
        for line in sys.stdin:
            while len(found.spans) < int(line):
                time.sleep(0.01)
            print(len(found.spans), flush=True)
            found.spans.clear()


class Collector:
    """That process, seen from here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def wait_for(self, spans: int) -> int:
        """Until it has so many; how many it has then."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{spans}\n")
        self._process.stdin.flush()
        return int(self._read())


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    words = [sys.executable, "-c", "from benchmarks.traces import collect; collect()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Collector(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


async def cpu_us(bench: Bench, traces: str, found: Collector, ratio: float) -> float:
    """Microseconds of CPU per input, from the first pull until the last span has left."""
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = str(ratio)
    agent = Agent(f"bench{next(bench.numbers)}", workspace="bench", batch=BATCH)
    agent.on(IN)(handle)
    with exporting(traces) as spans:
        tracer = spans.tracer("agent") if spans is not None else None
        kept = SPANS_EACH * sum(spans.is_sampled(trace_of(one)) for one in range(COUNT)) if spans is not None else 0
        async with Runner(agent, bench.client, SqliteStore(bench.file()), tracer=tracer) as runner:
            began = time.process_time()
            while runner.counts.get("done", 0) < COUNT:
                await asyncio.sleep(0.005)
            await bench.all_acked(f"default_bench_{agent.name}_consumer", COUNT)
            if spans is not None:
                assert kept == await asyncio.to_thread(found.wait_for, kept)
            return (time.process_time() - began) / COUNT * 1e6


async def compare(url: str) -> None:
    with collector() as found:
        os.environ |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": found.url,
            "OTEL_BSP_MAX_QUEUE_SIZE": str(1_000_000),
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_TRACES_SAMPLER": "traceidratio",
        }
        async with opened(url, bodies()) as bench:
            contenders = {
                "off": lambda: cpu_us(bench, "off", found, 1.0),
                "otlp, one in 10": lambda: cpu_us(bench, "otlp", found, RATIO),
                "otlp": lambda: cpu_us(bench, "otlp", found, 1.0),
            }
            runs = await take_turns(contenders, ROUNDS)
    print("CPU of an agent per input with one effect")
    for name, figures in runs.items():
        print(f"  {name:<16} {statistics.median(figures):>6.1f} µs ({min(figures):.1f}–{max(figures):.1f})")


def main() -> None:
    own_the_process()
    with nats_server() as server:
        uvloop.run(compare(server.url))


if __name__ == "__main__":
    main()
