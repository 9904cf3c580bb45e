"""What else can go wrong for agents, as scenes with real processes. Each ends in the count; sizes are arguments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import asyncpg
from nats.errors import Error as NatsError

from oncewire._ground.jetstream import Outgoing
from tests.faults import agent_links
from tests.faults.agent_crash import chain, with_ledger
from tests.faults.agent_links import Link, event_subject
from tests.faults.agent_worker import TARGETS
from tests.support.agents import AWAY_CODE, DEADLINE_S, KILLED, ROWS, WorkerProcess, World, execute, world
from tests.support.nats import NatsServer, nats_server
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.running import EVENTS, payload_of, prepared, stored
from tests.support.streams import unique
from tests.support.wait import LOOK_S, until, until_async

AWAY = (OSError, TimeoutError, NatsError, sqlite3.OperationalError)
AWAY += (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
AHEAD = 200
"""So many inputs may wait for the workers under load."""


class Crew:
    """So many workers at a time: whoever dies is replaced. Who ends for a reason of its own is remembered."""

    def __init__(self, one: World, size: int, **options: Any) -> None:
        self._world = one
        self._options = options
        self.workers = [one.start(**options) for _ in range(size)]
        self.deaths = 0
        self.broken: list[str] = []

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[Crew]:
        task = asyncio.create_task(self._replace())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _replace(self) -> None:
        while True:
            for index, worker in enumerate(self.workers):
                if worker.code is not None:
                    self.deaths += worker.code == KILLED
                    if worker.code not in (KILLED, AWAY_CODE):
                        self.broken.append(f"a worker ended with {worker.code}: {worker.tail()[-600:]}")
                    self.workers[index] = self._world.start(**self._options)
            await asyncio.sleep(LOOK_S)

    async def drain(self) -> None:
        await until(lambda: all(worker.is_running for worker in self.workers), "running workers", deadline_s=DEADLINE_S)
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        codes = [await worker.ended() for worker in self.workers]
        assert codes == [0] * len(codes), [worker.tail() for worker in self.workers]


async def storm(store: str, folder: Path, *, kills: int, seed: int, sync_always: bool = False) -> list[str]:
    """Workers, nats-server and PostgreSQL are killed at random while inputs keep coming. Returns the count."""
    chance = random.Random(seed)
    with nats_server(sync_always=sync_always) as server, contextlib.ExitStack() as stack:
        database = stack.enter_context(postgres_server()) if store == "postgresql" else None
        url = await with_ledger(await database.migrated().new_database()) if database else ""
        async with world(server.url, folder, url, options={"max_deliver": 100}) as one:
            crew = Crew(one, 2)
            async with crew.working():
                await _kill_at_random(one, crew, server, database, kills, chance)
                await one.settled(2 * DEADLINE_S)
            await crew.drain()
            return crew.broken + await one.count()


async def _kill_at_random(
    one: World, crew: Crew, server: NatsServer, database: PostgresServer | None, kills: int, chance: random.Random
) -> None:
    victims = ["postgresql", "worker", "nats", "worker"] if database else ["worker", "worker", "nats"]
    stopping = asyncio.Event()
    sending = asyncio.create_task(_keep_sending(one, stopping))
    try:
        for number in range(kills):
            seen, more = await rows_of(one), chance.randint(3, 60)
            await until_async(lambda seen=seen, more=more: _has_grown(one, seen + more), "work", deadline_s=DEADLINE_S)
            match victims[number] if number < len(victims) else chance.choice(victims):
                case "worker":
                    chance.choice(crew.workers).kill()
                case "nats":
                    server.kill()
                    server.start()
                case _:
                    assert database is not None
                    database.kill()
                    database.start()
            one.kills += 1
    finally:
        stopping.set()
        await sending


async def _keep_sending(one: World, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        await one.send(20)
        behind = sum(kind in ROWS for kind in one.sent.values()) - AHEAD
        while not stopping.is_set() and await rows_of(one) < behind:
            await asyncio.sleep(LOOK_S)


async def rows_of(one: World) -> int:
    """How many rows there are; 0 while nobody can tell."""
    with contextlib.suppress(*AWAY):
        return int((await one.execute("SELECT count(*) FROM business"))[0][0])
    return 0


async def _has_grown(one: World, rows: int) -> bool:
    return await rows_of(one) >= rows


async def stopped_and_taken_over(one: World, point: str) -> None:
    """A machine is paused at a step for longer than ack_wait. Another process does its work; then it wakes up."""
    await one.send(30)
    paused = one.start(point, 1, stops=True)
    await until(lambda: paused.is_stopped, f"a pause at {point}", deadline_s=DEADLINE_S)
    paused.signal_all(signal.SIGSTOP)
    other = one.start()
    await one.send(30)
    await one.settled()
    paused.signal_all(signal.SIGCONT)
    await one.send(30)
    await one.settled()
    await _drained(paused, other)


async def stopped_and_waited_for(one: World, point: str) -> None:
    """The same on SQLite, inside the transaction: it holds the file, and nobody gets past it."""
    await one.send(30)
    paused = one.start(point, 1, stops=True)
    await until(lambda: paused.is_stopped, f"a pause at {point}", deadline_s=DEADLINE_S)
    paused.signal_all(signal.SIGSTOP)
    before = await rows_of(one)
    other = one.start()
    past = time.monotonic() + 3 * one.options["ack_wait_s"]
    await until(lambda: time.monotonic() > past, "a few ack_waits")
    told = f"agents on it: {paused.pid} (stopped"
    await until(lambda: told in other.tail(), "the waiting process to name the other", deadline_s=DEADLINE_S)
    assert before == await rows_of(one)
    paused.signal_all(signal.SIGCONT)
    await one.settled()
    await _drained(paused, other)


async def _drained(*workers: WorkerProcess) -> None:
    await until(lambda: all(one.is_running for one in workers), "running workers", deadline_s=DEADLINE_S)
    for worker in workers:
        worker.signal(signal.SIGTERM)
    assert [await worker.ended() for worker in workers] == [0] * len(workers), [one.tail() for one in workers]


async def another_file(one: World) -> str:
    """A second ledger on the same durable: what it says when it refuses."""
    await one.send(10)
    first = one.start()
    await until(lambda: first.is_running, "the first worker", deadline_s=DEADLINE_S)
    mine, one.store = one.store, f"{one.store}.other.db"
    await one.execute("CREATE TABLE business (n INTEGER, kind TEXT)")
    second = one.start()
    one.store = mine
    assert await second.ended() == 1
    await one.settled()
    await _drained(first)
    return second.tail()


async def poison(one: World, count: int, processes: int) -> int:
    """One input kills every process that takes it. Returns how many it killed."""
    kinds = ["sync"] * (count - 1)
    kinds.insert(count // 2, "poison")
    await one.send(kinds=kinds)
    crew = Crew(one, processes)
    async with crew.working():
        await one.settled(2 * DEADLINE_S)
        one.kills += crew.deaths
    await crew.drain()
    assert not crew.broken, crew.broken
    return crew.deaths


async def full_disk(one: World, file_bytes_max: int) -> None:
    """Nothing more fits; the same process goes on once there is room."""
    worker = one.start(file_bytes_max=file_bytes_max)
    await until(lambda: worker.is_running, "the worker", deadline_s=DEADLINE_S)

    async def is_full() -> bool:
        await one.send(60)
        return "ledger" in worker.tail() or worker.code is not None

    await until_async(is_full, "a full disk", deadline_s=DEADLINE_S)
    assert worker.code is None, worker.tail()
    assert not await one.is_drained()
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await one.settled()
    await _drained(worker)


async def outage_past_the_window(one: World, point: str) -> None:
    """Dead between publish and mark for longer than the server remembers ids."""
    await one.die(point)
    assert [] == await one.autopsy()
    forgotten_at = time.monotonic() + 2.5 * one.window_s
    await until(lambda: time.monotonic() > forgotten_at, "the server to forget")
    await one.finish()


async def deaths_with_effects_everywhere(
    url: str, folder: Path, store: str, points: Iterable[tuple[str, int]], *, window_s: float = 120.0
) -> list[str]:
    """Each input sends an effect to a stream of each kind; a process dies at these points. Past the window only
    receivers with a ledger see a repeat. Returns the count."""
    repeating = frozenset({"queue", "brief"}) if window_s < DEADLINE_S else frozenset[str]()
    async with world(
        url,
        folder,
        store,
        window_s=window_s,
        targets=tuple(TARGETS),
        repeating=repeating,
        options={"max_deliver": 1_000},
    ) as one:
        await chain(one, points, kind="fan")
        return await one.count()


class Links:
    """The processes of a chain of agents. A link that dies is started again."""

    def __init__(self, url: str, folder: Path, store: str, count: int) -> None:
        name = unique("chain")
        self.links = [Link(url, store or f"sqlite:///{folder}/{name}-{at}.db", name, at, count) for at in range(count)]
        self._folder = folder
        self._starts = 0
        self.workers: list[WorkerProcess] = []
        self.broken: list[str] = []
        self.is_draining = False

    def _start(self, link: Link) -> WorkerProcess:
        self._starts += 1
        return WorkerProcess(link, self._folder / f"{link.name}-{self._starts}.log", agent_links.main)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[Links]:
        for store in {link.store for link in self.links}:
            await execute(store, "CREATE TABLE passed (link INTEGER NOT NULL, n INTEGER NOT NULL)")
        self.workers = [self._start(link) for link in self.links]
        replacing = asyncio.create_task(self._replace())
        try:
            yield self
        finally:
            replacing.cancel()
            await asyncio.gather(replacing, return_exceptions=True)
            for worker in self.workers:
                worker.kill()

    async def _replace(self) -> None:
        while not self.is_draining:
            for link, worker in zip(self.links, list(self.workers), strict=True):
                if worker.code is not None:
                    if worker.code != KILLED:
                        self.broken.append(f"{link.name} ended with {worker.code}: {worker.tail()[-600:]}")
                    self.workers[link.at] = self._start(link)
            await asyncio.sleep(LOOK_S)

    async def drain(self) -> None:
        """Each of them has started again, and finishes."""
        await until(
            lambda: self.broken or all(worker.is_running for worker in self.workers),
            "running links",
            deadline_s=DEADLINE_S,
        )
        self.is_draining = True
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
            self.broken += [worker.tail()[-600:]] if await worker.ended() else []

    async def passed(self) -> Counter[tuple[int, int]]:
        """How often each input has passed each link."""
        found: Counter[tuple[int, int]] = Counter()
        for store in {link.store for link in self.links}:
            with contextlib.suppress(*AWAY):
                found.update([(at, n) for at, n in await execute(store, "SELECT link, n FROM passed")])
        return found


async def killed_links(
    server: NatsServer, folder: Path, store: str, *, count: int, inputs: int, kills: int, seed: int
) -> list[str]:
    """Links of a chain are killed at random while inputs pass through it. What is wrong at the end."""
    chance, links = random.Random(seed), Links(server.url, folder, store, count)
    name = links.links[0].chain
    async with prepared(server.url) as client, links.working():
        for first in range(0, inputs, 10):
            numbers = range(first, min(first + 10, inputs))
            bodies = {n: json.dumps({"type": "Test", "payload": {"n": n}}).encode() for n in numbers}
            subject = event_subject(name, "in")
            await client.publish_all([Outgoing(subject, body, f"{name}-{n}") for n, body in bodies.items()])
        for kill in range(1, kills + 1):
            progress = kill * inputs * count // (kills + 1)
            await until_async(lambda progress=progress: _have_passed(links, progress), "work", deadline_s=DEADLINE_S)
            victim = kill - 1 if kill <= count else chance.randrange(count)  # each of them at least once
            links.workers[victim].kill()
        await until_async(lambda: _have_passed(links, inputs * count), "the rest", deadline_s=2 * DEADLINE_S)
        out = event_subject(name, "out")

        async def arrived() -> list[int]:
            messages = [payload_of(one)["n"] for one in await stored(server.url, EVENTS, out)]
            return messages if len(messages) >= inputs else []

        numbers = await until_async(arrived, "the last effects", deadline_s=DEADLINE_S)
        passed = await links.passed()
        await links.drain()
    problems = [f"link {at} handled {n} {times} times" for (at, n), times in sorted(passed.items()) if times > 1]
    problems += [f"{n} came out {times} times" for n, times in sorted(Counter(numbers).items()) if times > 1]
    return links.broken + problems


async def _have_passed(links: Links, count: int) -> bool:
    assert not links.broken, links.broken
    return len(await links.passed()) >= count


async def long_waits(one: World, kind: str, count: int, look: Callable[[], None]) -> None:
    """Handlers that take longer than ack_wait: every input is delivered once, and `look` works all the time."""
    worker = one.start()
    await one.send(kinds=[kind] * count)

    async def is_done() -> bool:
        look()
        return await one.is_drained()

    await until_async(is_done, "long handlers", deadline_s=4 * DEADLINE_S)
    await one.settled()
    info = await one.info()
    assert (count, 0) == (info["delivered"]["consumer_seq"], info["num_redelivered"])
    await _drained(worker)


def takes_the_write_lock(store: str) -> None:
    """Fails when somebody holds the file for longer than a commit takes."""
    connection = sqlite3.connect(store.removeprefix("sqlite:///"), timeout=2, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    finally:
        connection.close()


async def restored_stream(one: World, server: NatsServer) -> str:
    """The input stream goes back to an older state; what a worker says then."""
    await one.send(20)
    await one.finish()
    older = one.folder / "older"
    server.stop()
    files = next(server.folder.glob(f"jetstream/**/streams/{one.stream('in')}"))
    shutil.copytree(files, older)
    server.start()
    await one.send(20)
    await one.finish()
    server.stop()
    shutil.rmtree(files)
    shutil.copytree(older, files)
    server.start()
    refused = one.start()
    assert await refused.ended() not in (0, -9)
    return refused.tail()
