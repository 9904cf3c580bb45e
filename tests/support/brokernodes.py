"""Broker nodes over one NATS as processes, and a witness outside that counts what they promised.

The witness produces through any node, reads through every node, settles through any node, and keeps its own books:

    produced   values that were answered with success: each must come, and come again until it is settled
    acked      places that were answered 204: none may come again from a node that holds its session
    unsure     places whose settlement was answered with "unknown": they may come again or not
    tried      places that were to be acked, whatever was answered: of no other may a worker's key be done
    left       places that it did not settle on purpose when they came first
    stale      deliveries of what was acked by a node that was stopped or cut off meanwhile: they cannot be settled

At the end all nodes are killed and a new one takes everything over: what is not settled comes then, and only that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, RetryPolicy
from oncewire._ground.errors import OncewireError, Unavailable
from oncewire.broker.client import BrokerClient
from oncewire.broker.client.calls import Lease, Message
from tests.support.up import clean_environ
from tests.support.wait import until, until_async

BROKER = [sys.executable, "-m", "tests.faults.broker_node"]
ROOT = Path(__file__).parents[2]
TOPIC, GROUP = "t", "g"
NAMED = "named"
"""A topic under whose name messages are produced that go to the other one."""
KEPT_MS = 600_000
"""For so long keys are remembered and settled messages kept: longer than any run, but where that is what is tried."""
CROWD = 12
"""Messages that are produced together, without keys and to one partition: one answer of the server confirms them."""
LEASE_MS = 12 * 3_600_000
"""Longer than any run: a lease that ends buries its message at its first attempt."""
NACKED = 0.05
"""Of the deliveries; each becomes a dead letter at once."""
BEGUN = 0.1
"""Of the deliveries; their worker's key begins before they are settled."""
LEFT = 0.02
"""Of the messages are not settled when they come first: whoever owns them next must deliver them again."""
LEFT_MAX = 40
"""So many at a time: they count as in flight at their owner, who delivers nothing new when there are too many."""
EMPTY = 3
"""So many takes that bring nothing: there is nothing more."""
LAST_WORDS_S = 0.5
START_S = 60.0
SETTLED_S = 60.0
ONCE = RetryPolicy(max_attempts=1)
Place = tuple[int, int]
T = TypeVar("T")


class NodeProcess:
    """One node. `is_suspect` from a stop or cut on until it has surely begun a new session."""

    def __init__(
        self,
        url: str,
        lease_ms: int,
        *,
        step: str = "",
        count: int = 1,
        env: str = "dev",
        mutation: str = "",
        kept_ms: int = KEPT_MS,
        **settings: str,
    ) -> None:
        self._kind = (url, lease_ms, env, kept_ms)
        flags = {
            "broker_engine": "jetstream", "broker_listen": "127.0.0.1:0", "nats_url": url, "broker_tick_ms": "20",
            "broker_owner_lease_ms": str(lease_ms), "env": env, "broker_settled_age_ms": str(kept_ms),
            "broker_idempotency_ttl_ms": str(kept_ms), **settings,
        }  # fmt: skip
        self._words = [json.dumps(flags), step, str(count), mutation]
        self.process: asyncio.subprocess.Process | None = None
        self.ended: asyncio.Future[int] | None = None
        self.url = ""
        self.is_suspect = False

    async def start(self) -> NodeProcess:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *BROKER, *self._words, env=clean_environ(), stdout=pipe, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.ended = asyncio.ensure_future(self.process.wait())
        try:
            async with asyncio.timeout(START_S):
                line = await self.process.stdout.readline()
            self.url = json.loads(line)["url"]
        except BaseException:
            await self.end()
            raise
        return self

    def like(self) -> NodeProcess:
        """Another one with its settings, built as it should be."""
        url, lease_ms, env, kept_ms = self._kind
        return NodeProcess(url, lease_ms, env=env, kept_ms=kept_ms)

    async def dies_at(self, within_s: float) -> str:
        """The step at which it has killed itself; '' when it lives on, or has ended as it should."""
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                line = await self.process.stdout.readline()
        except TimeoutError:
            return ""
        code = await self.process.wait()
        assert (code == -signal.SIGKILL) == bool(line), f"a node ended with {code}"
        return str(json.loads(line)["dies_at"]) if line else ""

    def send(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self, number: int = signal.SIGKILL) -> None:
        self.send(signal.SIGCONT)
        self.send(number)
        assert self.process is not None
        async with asyncio.timeout(START_S):
            await self.process.wait()


class Proxy:
    """Between a node and its NATS server; `cut` lets nothing through any more, `mend` all that waited."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while chunk := await source.read(1 << 16):
                    await self._open.wait()
                    target.write(chunk)
                    await target.drain()
        finally:
            target.close()

    def cut(self) -> None:
        self._open.clear()

    def drop(self) -> None:
        """Break all connections."""
        for task in self._tasks:
            task.cancel()

    def mend(self) -> None:
        self._open.set()


class Witness:
    """See the module's head."""

    def __init__(self, seed: int, partitions: int = 4, *, has_keys: bool = True) -> None:
        """`has_keys`: not where they are forgotten during the run, since a client tries with a key for long."""
        self.chance = random.Random(seed)
        self._has_keys = has_keys
        self.partitions = partitions
        self.nodes: list[NodeProcess] = []
        self.produced: set[str] = set()
        self.places: dict[str, Place] = {}
        self.acked: set[Place] = set()
        self.unsure: set[Place] = set()
        self.left: set[Place] = set()
        self.tried: set[Place] = set()
        self.refused: dict[Place, str] = {}
        self.stale = 0
        self.buried: set[str] = set()
        self.gap_s = 0.0
        self.problems: list[str] = []
        self._stories: defaultdict[Place, list[str]] = defaultdict(list)
        """What was seen of each place, for who has to find out why."""
        self._clients: dict[str, BrokerClient] = {}
        self._next = 0
        self._delivered_at = 0.0
        self._is_over = self._is_last = False
        self._tasks: list[asyncio.Task[None]] = []
        self._producers: list[asyncio.Task[None]] = []
        self._waiting: asyncio.Queue[tuple[NodeProcess, Delivery]] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def watching(self, *nodes: NodeProcess, producers: int = 4) -> AsyncIterator[Witness]:
        """Load on these nodes, until the block ends; then all nodes that were added are ended too."""
        self.nodes += nodes
        try:
            for node in nodes:
                self._listen(node)
            await until_async(partial(self._has_topic, nodes[0]), "the topic", deadline_s=START_S)
            works = [*(self._produce() for _ in range(producers)), self._produce_crowds()]
            if self._has_keys:
                works.append(self._produce_elsewhere())
            self._producers = [asyncio.create_task(work) for work in works]
            self._tasks += self._producers
            self._tasks += [asyncio.create_task(self._settle()) for _ in range(4)]
            yield self
        finally:
            self._is_over = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for client in self._clients.values():
                await client.close()
            await asyncio.gather(*(node.end() for node in self.nodes))

    async def _has_topic(self, node: NodeProcess) -> bool:
        try:
            await self._client(node).create_topic(TOPIC, partitions=self.partitions)
            await self._client(node).create_topic(NAMED)
        except Unavailable:
            return False
        return True

    def add(self, node: NodeProcess) -> None:
        self.nodes.append(node)
        self._listen(node)

    def _listen(self, node: NodeProcess) -> None:
        self._clients[node.url] = BrokerClient(node.url, timeout_s=30.0)
        self._tasks.append(asyncio.create_task(self._read(node)))

    def _client(self, node: NodeProcess) -> BrokerClient:
        return self._clients[node.url]

    def _any(self) -> NodeProcess:
        """Of a node that is there; of one that is not sure of itself only when there is no other."""
        live = [node for node in self.nodes if node.process and node.process.returncode is None]
        sure = [node for node in live if not node.is_suspect]
        if not live:
            raise Unavailable("no node is there")
        return self.chance.choice(sure or live)

    async def _asked(self, node: NodeProcess, work: Coroutine[Any, Any, T]) -> T:
        """What a node answers. Its client would ask one that died for long whether it is back."""
        asking = asyncio.ensure_future(work)
        try:
            assert node.ended is not None
            await asyncio.wait([asking, node.ended], return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(LAST_WORDS_S if node.ended.done() else None):
                return await asking
        except TimeoutError:
            raise Unavailable("the node has died: outcome unknown") from None
        finally:
            asking.cancel()

    def check(self) -> None:
        """A witness that died sees nothing: say so at once."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise AssertionError("the witness itself failed") from error

    async def settled(self, count: int) -> None:
        """So many more are settled: what came before is over."""
        before = len(self.acked)

        def is_over() -> bool:
            self.check()
            return len(self.acked) >= before + count

        await until(is_over, f"{count} more acks than {before}", deadline_s=SETTLED_S)

    def _value(self) -> str:
        self._next += 1
        return f"v{self._next}"

    async def _produce_crowds(self) -> None:
        while True:
            values = [self._value() for _ in range(CROWD)]
            messages = [Message(TOPIC, value, "crowd", BrokerEnvelope(retry_policy=ONCE)) for value in values]
            try:
                node = self._any()
                told = await self._asked(node, self._client(node).produce_many(messages))
                self.produced |= {value for value, one in zip(values, told, strict=True) if one.problem is None}
            except OncewireError:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)

    async def _produce_elsewhere(self) -> None:
        """Under another topic's name, again with the same key until it is answered."""
        while True:
            value = self._value()
            envelope = BrokerEnvelope(idempotency_key=value, target_topic=TOPIC, retry_policy=ONCE)
            while value not in self.produced:
                try:
                    node = self._any()
                    await self._asked(node, self._client(node).produce(NAMED, value, key=value, envelope=envelope))
                    self.produced.add(value)
                except OncewireError:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)

    async def _produce(self) -> None:
        while True:
            value = self._value()
            envelope = BrokerEnvelope(idempotency_key=value if self._has_keys else "", retry_policy=ONCE)
            try:
                node = self._any()
                await self._asked(node, self._client(node).produce(TOPIC, value, key=value, envelope=envelope))
                self.produced.add(value)
            except OncewireError:
                await asyncio.sleep(0.02)  # unknown, or nobody there just now: another value
            await asyncio.sleep(0.002)

    async def _read(self, node: NodeProcess) -> None:
        while not self._is_over and node.process and node.process.returncode is None:
            try:
                async for delivery in self._client(node).consume(TOPIC, GROUP, in_flight=1_000, lease_ms=LEASE_MS):
                    self._got(node, delivery)
            except OncewireError:
                await asyncio.sleep(0.02)

    def _got(self, node: NodeProcess, delivery: Delivery) -> None:
        now = time.monotonic()
        if self._delivered_at:
            self.gap_s = max(self.gap_s, now - self._delivered_at)
        self._delivered_at = now
        place = (delivery.partition, delivery.offset)
        self._note(place, f"came from {node.url}, attempt {delivery.attempts}")
        if place in self.acked:
            if node.is_suspect:
                self.stale += 1
            else:
                self.problems.append(f"{place} was acked and came again: {self._stories[place]}")
        if self.places.setdefault(delivery.value, place) != place:
            self.problems.append(f"{delivery.value} stands at {self.places[delivery.value]} and {place}")
        self._waiting.put_nowait((node, delivery))

    def _note(self, place: Place, what: str) -> None:
        self._stories[place].append(f"{time.monotonic():.4f} {what}")

    async def _settle(self) -> None:
        while True:
            node, delivery = await self._waiting.get()
            place = (delivery.partition, delivery.offset)
            was_acked = place in self.acked
            if self._leaves(place):
                self.left.add(place)
                continue
            try:
                lease, settler = self._client(node).lease(TOPIC, GROUP, delivery), self._any()
                if self.chance.random() < BEGUN:
                    await self._begin(settler, lease, delivery)
                if self.chance.random() < NACKED:
                    await self._asked(settler, self._client(settler).nack(lease, "broken"))
                    self.buried.add(delivery.value)
                else:
                    self.tried.add(place)
                    self._note(place, f"acked at {settler.url} as {lease.owner}")
                    await self._asked(settler, self._client(settler).ack(lease))
            except OncewireError as error:
                self.refused[place] = error.message
                if isinstance(error, Unavailable):
                    self.unsure.add(place)
                continue  # it comes again, from whoever owns it next
            self._note(place, "settled")
            if was_acked:
                self.problems.append(f"{place} was settled twice: {self._stories[place]}")
            self.acked.add(place)

    async def _begin(self, settler: NodeProcess, lease: Lease, delivery: Delivery) -> None:
        place = (delivery.partition, delivery.offset)
        stands = await self._asked(settler, self._client(settler).begin(lease, delivery.value))
        if stands.status == "COMMITTED" and place not in self.tried:
            self.problems.append(f"the key of {place} counts as done, and nobody acked it")

    def _leaves(self, place: Place) -> bool:
        """Nothing once the last node has it: nobody comes after that one."""
        may_leave = place not in self.left and len(self.left - self.acked) < LEFT_MAX and not self._is_last
        return may_leave and self.chance.random() < LEFT

    async def finish(self) -> list[str]:
        """No more is produced; wait until everything that was acknowledged has come and is settled."""
        self.check()
        for task in self._producers:
            task.cancel()
        await asyncio.gather(*self._producers, return_exceptions=True)

        with contextlib.suppress(AssertionError):
            await until(lambda: self.produced <= self.places.keys() and self._waiting.empty(), deadline_s=SETTLED_S)
        await self._replace_all()
        with contextlib.suppress(AssertionError):
            await until(lambda: not self._open(), "all settled", deadline_s=SETTLED_S)
        self.check()
        missing, left = self.produced - self.places.keys(), self._open()
        self.problems += await self._letters()
        return [
            *self.problems,
            *(f"{value} was acknowledged and never came" for value in sorted(missing)[:20]),
            *(self._lost(value) for value in sorted(left - missing)[:20]),
        ]

    def _lost(self, value: str) -> str:
        place = self.places[value]
        why = self.refused.get(place) or ("left on purpose" if place in self.left else "still waits")
        return f"{value} at {place} came, was not settled ({why}), and came not again"

    def _open(self) -> set[str]:
        """Values that are not settled as far as anybody was told."""
        done = self.acked | self.unsure
        return {value for value in self.produced if self.places.get(value) not in done}

    async def _replace_all(self) -> None:
        """Everything is taken over by a node that knows nothing."""
        last = next(node for node in self.nodes if not node.is_suspect)
        self._is_last = True
        await asyncio.gather(*(node.end() for node in self.nodes))
        self.add(await last.like().start())

    async def _letters(self) -> list[str]:
        """Each message that was given up has one letter."""
        found: dict[Place, str] = {}
        if self.buried:
            with contextlib.suppress(AssertionError):
                await until_async(partial(self._is_read, f"dlq.{TOPIC}", found), deadline_s=SETTLED_S)
        times = Counter(found.values())
        return [f"{value} has {count} letters" for value, count in times.items() if count > 1] + [
            f"{value} has no letter" for value in self.buried - times.keys()
        ]

    async def _is_read(self, topic: str, found: dict[Place, str]) -> bool:
        """Whether nothing more comes. A node that was starved of its lease says that it is not there just now; what it
        had delivered comes again then."""
        client = self._client(self._any())
        try:
            for _ in range(EMPTY):
                taken = await client.take(topic, GROUP, most=500, wait_s=0.3, lease_ms=LEASE_MS)
                for one in taken:
                    found[one.partition, one.offset] = one.value
                    await client.ack(client.lease(topic, GROUP, one))
                if taken:
                    return False
        except OncewireError:
            return False
        return True
