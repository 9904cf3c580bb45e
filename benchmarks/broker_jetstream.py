"""The broker over JetStream beside the local engine, without HTTP: one, two and three nodes, on a default server and on
one that syncs always; how long a takeover takes, and what thousands of topics cost.

Clients have one request out each: a produce (200 bytes), or produce → delivery → ack. Several nodes are processes of
their own, each with its share of the clients and of the partitions. On two cores with the server on the same machine
they share what there is: the figure shows what more nodes cost, not what more machines give.

    python -m benchmarks broker_jetstream              all of it
    python -m benchmarks.broker_jetstream rates        one part of it: rates, nodes, takeover, topics
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from oncewire._ground.contracts.broker import Delivery, ProduceBody
from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import connect
from oncewire.broker.engine import Consume, Engine, Limits, Settle
from oncewire.broker.jetstream import names
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from oncewire.broker.local import open_local
from tests.support.nats import nats_server

SECONDS = 1.5
TOPIC, GROUP = "t", "g"
VALUE = "x" * 192
LIMITS = Limits(partition_messages_max=10**9, partition_bytes_max=10**12, in_flight_max=10_000, topics_max=10**6)
OWNER_LEASE_MS = 1_000
FEW, MANY = 10_000, 1_000_000
TOPICS = 2_000


async def asked(call: Callable[..., Any], *args: Any) -> Any:
    done = asyncio.get_running_loop().create_future()
    call(*args, done.set_result)
    answer = await done
    if isinstance(answer, OncewireError):
        raise answer
    return answer


class Acks:
    """A reader that acks what it gets."""

    def __init__(self, engine: Engine, acked: Callable[[Any], None]) -> None:
        self._engine, self._acked = engine, acked

    def room(self) -> int:
        return 10_000

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for one in deliveries:
            self._engine.settle("", Settle("ack", TOPIC, GROUP, one.partition, one.offset, "a"), self._acked)

    def ended(self, error: OncewireError) -> None:
        pass


class Rate:
    """Requests a second, and what one of them costs this process in CPU."""

    def __init__(self, engine: Engine, clients: int, *, is_cycle: bool, keys: int = 1) -> None:
        self._engine, self._clients, self._is_cycle = engine, clients, is_cycle
        bodies = [ProduceBody(topic=TOPIC, value=VALUE, key=f"k{n}" if keys > 1 else "") for n in range(keys)]
        self._bodies = itertools.cycle(bodies)
        self._answered = self._stored if is_cycle else self._again
        self._count = 0
        self._is_over = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> tuple[float, float]:
        subscription = None
        if self._is_cycle:
            consume = Consume(TOPIC, GROUP, "a", 600_000, 10_000)
            subscription = await asked(self._engine.subscribe, "", consume, Acks(self._engine, self._again))
        begun, cpu = time.perf_counter(), time.process_time()
        asyncio.get_running_loop().call_later(SECONDS, self._end)
        for _ in range(self._clients):
            self._produce()
        await self._ended
        took, used = time.perf_counter() - begun, time.process_time() - cpu
        if subscription is not None:
            subscription.close()
        return self._count / took, used / max(1, self._count) * 1e6

    def _end(self) -> None:
        self._is_over = True
        if not self._ended.done():
            self._ended.set_result(None)

    def _produce(self) -> None:
        self._engine.produce("", next(self._bodies), self._answered)

    def _stored(self, answer: Any) -> None:
        if isinstance(answer, OncewireError) and not self._is_over:
            self._fail(answer)  # behind the end the topic may be gone

    def _again(self, answer: Any) -> None:
        if self._is_over:
            return
        if isinstance(answer, OncewireError):
            self._fail(answer)
        else:
            self._count += 1
            self._engine.produce("", next(self._bodies), self._answered)

    def _fail(self, error: OncewireError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


@contextlib.asynccontextmanager
async def engine_on(url: str) -> AsyncIterator[JetStreamEngine]:
    async with connect(url) as client:
        engine = await open_jetstream(client, limits=LIMITS, owner_lease_ms=OWNER_LEASE_MS)
        try:
            yield engine
        finally:
            await engine.stop()


async def _rates(engine: Engine, clients: int) -> tuple[float, float, float, float]:
    await asked(engine.create_topic, "", TOPIC, 1)
    produce, produce_us = await Rate(engine, clients, is_cycle=False).run()
    await asked(engine.delete_topic, "", TOPIC)
    await asked(engine.create_topic, "", TOPIC, 1)
    cycle, cycle_us = await Rate(engine, clients, is_cycle=True).run()
    await asked(engine.delete_topic, "", TOPIC)
    return produce, cycle, produce_us, cycle_us


async def rates() -> None:
    rows = []
    for clients in (64, 256):
        local = await open_local(None, limits=LIMITS)
        rows.append(_row("local, in memory", clients, await _rates(local, clients)))
        await local.stop()
        for name, is_always in (("jetstream, default", False), ("jetstream, always", True)):
            with nats_server(sync_always=is_always) as server:
                async with engine_on(server.url) as engine:
                    rows.append(_row(name, clients, await _rates(engine, clients)))
    head = ["engine", "clients", "produce/s", "cycles/s", "µs CPU a produce", "µs CPU a cycle"]
    print(table("One node, one partition, without HTTP", head, rows))


def _row(name: str, clients: int, found: tuple[float, float, float, float]) -> list[str]:
    produce, cycle, produce_us, cycle_us = found
    return [name, str(clients), f"{produce:,.0f}", f"{cycle:,.0f}", f"{produce_us:.1f}", f"{cycle_us:.1f}"]


async def node(url: str, clients: int) -> None:
    """A node of its own process: says when it is there, runs when it is told, prints what it reached."""
    async with engine_on(url) as engine:
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        cycles, _ = await Rate(engine, clients, is_cycle=True, keys=64).run()
        print(json.dumps(cycles), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def _nodes(url: str, count: int) -> float:
    async with engine_on(url) as engine:
        await asked(engine.create_topic, "", TOPIC, 12)
    command = [sys.executable, "-m", "benchmarks.broker_jetstream", "node", url, str(64 // count)]
    pipe = asyncio.subprocess.PIPE
    children = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        for child in children:
            assert child.stdout
            await child.stdout.readline()
        await asyncio.sleep(OWNER_LEASE_MS / 1000)  # until all know of each other
        for child in children:
            assert child.stdin
            child.stdin.write(b"go\n")
        found = [json.loads(await child.stdout.readline()) for child in children if child.stdout]
        return float(sum(found))
    finally:
        for child in children:
            if child.stdin:
                child.stdin.close()
            await child.wait()


async def nodes() -> None:
    local = await open_local(None, limits=LIMITS)
    await asked(local.create_topic, "", TOPIC, 12)
    cycles, _ = await Rate(local, 64, is_cycle=True, keys=64).run()
    await local.stop()
    rows = [["local, in memory", f"{cycles:,.0f}"]]
    for count in (1, 2, 3):
        with nats_server() as server:
            rows.append([str(count), f"{await _nodes(server.url, count):,.0f}"])
    print(table("Nodes as processes, 12 partitions, 64 clients in all, cycles/s", ["nodes", "cycles/s"], rows))


class First:
    """Until something comes, once it is wanted."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        self.came: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.is_wanted = is_wanted

    def room(self) -> int:
        return 1 if self.is_wanted and not self.came.done() else 0

    def deliver(self, deliveries: Sequence[Delivery]) -> None:  # noqa: ARG002 - the first is enough
        if not self.came.done():
            self.came.set_result(time.monotonic())

    def ended(self, error: OncewireError) -> None:
        pass


async def takeover() -> None:
    rows = []
    for count in (FEW, MANY):
        with nats_server() as server:
            waited, opened = await _takeover(server.url, count)
        rows.append([f"{count:,}", f"{opened * 1000:.0f}", f"{waited * 1000:.0f}"])
    head = ["messages", "handed over: take and deliver, ms", "died: until another delivers, ms"]
    print(table(f"Takeover of a partition (lease {OWNER_LEASE_MS} ms)", head, rows))


async def _takeover(url: str, count: int) -> tuple[float, float]:
    """From the death of an owner to the first delivery by another node, and how long an orderly takeover takes."""
    async with engine_on(url) as second, connect(url) as dying:
        first = await open_jetstream(dying, limits=LIMITS, owner_lease_ms=OWNER_LEASE_MS)
        topic = await _topic_of(first, second)
        reader = First(is_wanted=False)
        await asked(second.subscribe, "", Consume(topic, GROUP, "b", 600_000), reader)
        for _ in range(0, count, 1_000):
            await asked(first.produce_many, "", [ProduceBody(topic=topic, value=VALUE)] * 1_000)
        reader.is_wanted = True
        await dying.close()
        died_at = time.monotonic()
        waited = await reader.came - died_at
        await first.stop()
        await second.stop()
    async with engine_on(url) as third:
        begun = time.monotonic()
        reader = First()
        await asked(third.subscribe, "", Consume(topic, GROUP, "c", 600_000), reader)
        opened = await reader.came - begun
    return waited, opened


async def _topic_of(first: JetStreamEngine, second: JetStreamEngine) -> str:
    """A topic whose one partition is the first node's."""
    nodes = [first.node.node, second.node.node]
    while len(first.node.session.nodes) < 2 or len(second.node.session.nodes) < 2:
        await asyncio.sleep(0.01)
    for attempt in itertools.count():
        name = f"{TOPIC}{attempt}"
        await asked(first.create_topic, "", name, 1)
        number = first.node.catalog.topics["", name].number
        if names.preferred(nodes, number, 0) == first.node.node:
            return name
    raise AssertionError("unreachable")


async def topics() -> None:
    with nats_server() as server:
        before = _server_rss(server.process.pid) if server.process else 0
        async with engine_on(server.url) as engine:
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begun = time.perf_counter()
            for first in range(0, TOPICS, 50):
                await asyncio.gather(*(asked(engine.create_topic, "", f"t{n}", 1) for n in range(first, first + 50)))
            made = time.perf_counter() - begun
            idle = (_server_rss(server.process.pid) if server.process else 0) - before
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own
            begun = time.perf_counter()
            await asked(engine.create_topic, "", TOPIC, 1_000)
            await asked(engine.subscribe, "", Consume(TOPIC, GROUP, "a", 600_000, 10_000), First())
            opened = time.perf_counter() - begun
    rows = [
        [f"{TOPICS:,} topics made", f"{made:.1f} s", f"{idle / TOPICS:.0f} KB of the server's memory each"],
        ["idle, at a node", "", f"{own / TOPICS:.1f} KB each"],
        ["1,000 partitions taken by a new group", f"{opened:.1f} s", ""],
    ]
    print(table("Many topics and partitions", ["what", "time", "memory"], rows))


def _server_rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


PARTS = {part.__name__: part for part in (rates, nodes, takeover, topics)}


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n  ".join([title, *lines]) + "\n"


def main(*names: str) -> None:
    for name in names or PARTS:
        uvloop.run(PARTS[name]())


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        uvloop.run(node(sys.argv[2], int(sys.argv[3])))
    else:
        main(*sys.argv[1:])
