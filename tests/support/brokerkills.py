"""A broker process that is killed under load over HTTP, and the ledger of the client that talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery
from oncewire._ground.errors import OncewireError
from oncewire.broker.client import BrokerClient
from tests.support.up import clean_environ

BROKER = [sys.executable, "-c", "from oncewire.cli.broker import broker; broker()"]
TOPIC, GROUP = "t", "g"
PRODUCERS = 24
ACKERS = 8
LEASE_MS = 60_000
SECONDS_MAX = 60


class Kills:
    """A client's life over many kills of its broker."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.next = 0
        self.produced: set[str] = set()
        self.values: dict[int, str] = {}
        self.offsets: dict[str, int] = {}
        self.acked: set[int] = set()
        self.problems: list[str] = []
        self.kills = 0
        self._left = 0
        self._is_struck = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None

    @contextlib.asynccontextmanager
    async def _broker(self) -> AsyncIterator[BrokerClient]:
        """A running one with its log; gone at the end of the block, whatever is left of it."""
        words = ["run", "--listen", "127.0.0.1:0", "--wal", str(self.folder), "--broker-settled-age-ms", "0", "--json"]
        self._child = await asyncio.create_subprocess_exec(
            *BROKER, *words, env=clean_environ(), stdout=asyncio.subprocess.PIPE
        )
        assert self._child.stdout is not None
        try:
            async with asyncio.timeout(SECONDS_MAX):
                serving = json.loads(await self._child.stdout.readline())
                async with BrokerClient(serving["url"], timeout_s=SECONDS_MAX) as client:
                    await client.create_topic(TOPIC)
                    yield client
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()

    async def until_killed(self) -> None:
        """Load, and a kill -9 in the middle of it: at the very answer that makes the number full."""
        self._left = self.chance.randint(1, 400)
        self._is_struck.clear()
        async with self._broker() as client:
            waiting: asyncio.Queue[Delivery] = asyncio.Queue()
            work = [self._produce(client) for _ in range(PRODUCERS)]
            work += [self._ack(client, waiting) for _ in range(ACKERS)]
            tasks = [asyncio.create_task(one) for one in [*work, self._consume(client, waiting)]]
            try:
                await self._is_struck.wait()
                await asyncio.sleep(0.01)  # what it answered before is in the sockets, and counts
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        self.kills += 1

    def _step(self) -> None:
        self._left -= 1
        if self._left == 0:
            assert self._child is not None
            self._child.kill()
            self._is_struck.set()

    async def _produce(self, client: BrokerClient) -> None:
        while True:
            value, self.next = f"v{self.next}", self.next + 1
            await client.produce(TOPIC, value, envelope=BrokerEnvelope(idempotency_key=value))
            self.produced.add(value)
            self._step()

    async def _consume(self, client: BrokerClient, waiting: asyncio.Queue[Delivery]) -> None:
        async for delivery in client.consume(TOPIC, GROUP, in_flight=1_000, lease_ms=LEASE_MS):
            self._got(delivery)
            if self.chance.random() < 0.9:
                waiting.put_nowait(delivery)
            self._step()

    async def _ack(self, client: BrokerClient, waiting: asyncio.Queue[Delivery]) -> None:
        while True:
            delivery = await waiting.get()
            with contextlib.suppress(OncewireError):  # unknown: it may come again
                await client.ack(client.lease(TOPIC, GROUP, delivery))
                self.acked.add(delivery.offset)
                self._step()

    def _got(self, delivery: Delivery) -> None:
        offset, value = delivery.offset, delivery.value
        if offset in self.acked:
            self.problems.append(f"{offset} was acked and came again")
        if self.values.setdefault(offset, value) != value:
            self.problems.append(f"{offset} was {self.values[offset]} and is {value}")
        if self.offsets.setdefault(value, offset) != offset:
            self.problems.append(f"{value} stands at {self.offsets[value]} and {offset}")

    async def finish(self) -> list[str]:
        """Read and ack everything; then nothing that was acknowledged may be missing."""
        async with self._broker() as client:
            stream = client.consume(TOPIC, GROUP, lease_ms=LEASE_MS)
            while any(group.lag for group in (await client.topic(TOPIC)).groups):
                delivery = await anext(stream)
                self._got(delivery)
                await client.ack(client.lease(TOPIC, GROUP, delivery))
        missing = self.produced - self.offsets.keys()
        return self.problems + [f"{value} was acknowledged and never came" for value in sorted(missing)]
