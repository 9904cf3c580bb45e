"""Where an agent's time goes: each stage of its way alone, one thread, nothing beside it, and the whole way as it runs.

    python -m benchmarks agent_stages

The stages take the same batches of a thousand, one after the other; a figure is the least processor time of all rounds,
per input. The disk's time is no processor time. `running` is an agent with the server beside it, both sides counted.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from benchmarks.agent import BATCH, IN, INPUTS, OUT, body, handle, opened
from oncewire._ground.jetstream.plain import Numbered, plain_frames
from oncewire._ground.jetstream.protocol import Message, Parser, encode_acks
from oncewire._ground.ledger.rules import Source
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.ledger.store import Mark
from oncewire.agent import Agent
from oncewire.agent.batch import GroupCommit, Limits
from oncewire.agent.outflow import outgoing
from oncewire.agent.read import Reading
from oncewire.agent.run import own_the_process
from tests.support.nats import nats_server

ROUNDS = 60
RUNS = 5
CREATED = "2026-01-01T00:00:00Z"
STREAM = "MESHFORGE_EVENTS"
CONSUMER = "default_bench_stages_consumer"
STEPS = {
    "claimed": "keys of a batch",
    "handled": "handlers",
    "written": "block: entries, effects, sums",
    "committed": "commit",
}
"""What is done when a batch comes to one of its named steps."""
REPLY = Numbered("_INBOX.stages.f.0.500.fail.", ".0.$FI", ".1.$FI", ".2.$FI")


def socket_bytes(first: int) -> bytes:
    """A batch as the server sends it."""
    pieces = []
    for sequence in range(first, first + BATCH):
        reply = f"$JS.ACK.{STREAM}.{CONSUMER}.1.{sequence}.{sequence}.1700000000000000000.0"
        payload = body(sequence)
        pieces.append(f"MSG {IN} 1 {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
    return b"".join(pieces)


class Stages:
    """The least time of each stage so far, in the order of an input's way."""

    def __init__(self) -> None:
        self.least_us: dict[str, float] = {}
        self._since = 0.0

    def begin(self) -> None:
        self._since = time.thread_time()

    def end(self, stage: str) -> None:
        took_us = (time.thread_time() - self._since) * 1e6 / BATCH
        self.least_us[stage] = min(took_us, self.least_us.get(stage, took_us))
        self._since = time.thread_time()


def alone(folder: Path) -> dict[str, float]:
    agent = Agent("stages", workspace="bench", batch=BATCH)
    agent.on(IN)(handle)
    store = SqliteStore(str(folder / "ledger.db"))
    ledger = store.open("default", "bench", agent.name)
    source = Source(STREAM, CREATED, CONSUMER, (IN,), 1, False)
    sources = {source.durable: source}
    reading, stages = Reading(agent, ledger, [source]), Stages()
    marks: list[Mark] = []

    def at(step: str) -> None:
        stages.end(STEPS[step])

    for first in range(1, ROUNDS * BATCH, BATCH):
        data = socket_bytes(first)
        stages.begin()
        messages = [one for one in Parser().feed(data) if isinstance(one, Message)]
        stages.end("frames of the socket")
        items = reading.read(messages)
        stages.end("reading: contract, digest, keys")
        limits = Limits(ledger, 5, lambda _: STREAM, lambda _: None, 1_700_000_000_000, at)
        settled = GroupCommit(store, limits, sources).run(items, {STREAM: first}, marks)
        stages.begin()
        frames = plain_frames(outgoing(settled.sendings), first=1, extra=None, reply=REPLY, step=500)
        acks = encode_acks([message.reply for message in settled.acks])
        stages.end("frames of effects, acks")
        assert frames is not None
        assert acks.count(b"+ACK") == len(settled.sendings) == BATCH
        assert settled.sendings[0].subject == OUT
        marks = [Mark(settled.block, 0, BATCH - 1, STREAM, first)]
    store.close()
    return stages.least_us


async def running(url: str, server: psutil.Process) -> list[tuple[float, float, float]]:
    """Inputs per second, and microseconds of both sides per input."""
    found = []
    async with opened(url) as bench:
        for _ in range(RUNS + 1):  # the first one warms both up
            before, ours = server.cpu_times(), time.process_time()
            rate = await bench.ours()
            after = server.cpu_times()
            spent = after.user + after.system - before.user - before.system
            found.append((rate, (time.process_time() - ours) * 1e6 / INPUTS, spent * 1e6 / INPUTS))
    return found[1:]


def main() -> None:
    own_the_process()
    with tempfile.TemporaryDirectory() as folder:
        stages = alone(Path(folder))
    print("µs of processor time per input, each stage alone")
    for stage, took_us in stages.items():
        print(f"  {stage:<32} {took_us:5.2f}")
    print(f"  {'sum':<32} {sum(stages.values()):5.2f}")
    for sync_always in (False, True):
        with nats_server(sync_always=sync_always) as server:
            assert server.process is not None
            runs = sorted(uvloop.run(running(server.url, psutil.Process(server.process.pid))))
        rate, ours, theirs = runs[len(runs) // 2]
        name = "sync_interval: always" if sync_always else "server default"
        print(f"running, {name}: {rate:,.0f} inputs/s, agent {ours:.1f} µs, server {theirs:.1f} µs per input")
