"""The runner: starts the parts of an agent in order, and drains them.

    intake                   ledger's thread              on disk
    fetch a batch       ──►  read it
                             BEGIN … handlers … COMMIT    block: outcomes, rows, effects as sent
    publish the effects                                   effects in their streams
    ack the inputs                                        (marks ride in the next commit)

Two batches are on their way at a time: while one commits, the one before is being published. On start, and each second
after, what any process of this ledger left open is published before it is forgotten by anybody. After an unclean stop
inputs come one by one until all that were in hand then are settled: one of them may be what killed the process.

    intake      one source: asks, holds, cuts batches        lane      async handlers
    commits     commit, publish, ack                         upkeep    each second: due, open, exhausted, marks
    lookout     what the server gave up or lost

The named steps, in the order of an input's way; `at` is called with the name right after each:

    swept       start: effects that were left open are published
    fetched     a batch is in hand                            begun      a suspect input has its durable mark
    claimed     the transaction is open, keys looked up       handled    all handlers of the batch have returned
    written     the block is written, not committed           committed  the batch is durable
    published   all effects of the block are confirmed        acked      acks and terms are written
    called      the result of a ctx.once call is durable
    due         delayed effects have become a block           marked     confirmations are durable
    buried      an exhausted input is settled as dead         forgotten  old blocks are gone, the base stands for them
    drained     all is finished, the running mark not yet gone
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from oncewire._ground.contracts import subjects
from oncewire._ground.errors import OncewireError, TimedOut
from oncewire._ground.jetstream import Client
from oncewire._ground.ledger.processes import process_name
from oncewire._ground.ledger.rules import Durable, Ledger, short_error
from oncewire._ground.ledger.store import Store
from oncewire._ground.settings import Settings, load
from oncewire._ground.tracing import Tracer
from oncewire.agent import sources as opening
from oncewire.agent.agent import Agent
from oncewire.agent.batch import Item, Point, PowerCut, nothing_happens
from oncewire.agent.commits import Commits
from oncewire.agent.forget import Forgetting, check_life
from oncewire.agent.intake import Intake
from oncewire.agent.keepalive import KeepAlive
from oncewire.agent.lane import Lane
from oncewire.agent.lookout import Lookout
from oncewire.agent.outflow import Outflow, Targets, now_ms
from oncewire.agent.read import Reading
from oncewire.agent.sources import Opened
from oncewire.agent.upkeep import Upkeep

log = logging.getLogger("oncewire.agent")

DRAIN_S = 30.0
SWITCH_S = 0.001
"""So long one thread may hold the interpreter while another waits for it, where a process is the agent's alone."""


class PartEnded(Exception):
    """A part of the agent ended although nobody asked it to, by something that is none of our errors. The log has the
    traceback; a new process may do better."""


class Runner:
    """One agent, one store, one connection. `async with` starts it; leaving drains it."""

    def __init__(
        self,
        agent: Agent,
        client: Client,
        store: Store,
        settings: Settings | None = None,
        at: Point = nothing_happens,
        clock_ms: Callable[[], int] = now_ms,
        tracer: Tracer | None = None,
    ) -> None:
        self.agent = agent
        self.client = client
        self.store = store
        self.settings = settings or load().settings
        self.at = at
        self.tracer = tracer
        self.clock_ms = clock_ms
        """Only what is forgotten goes by it."""
        self.is_unclean = False
        self.is_started = False
        self.failure = ""
        """Which part ended although nobody asked it to, and how; the agent stops then."""
        self.waits_for = ""
        """What its start waits for, '' when it goes on."""
        self.opened: dict[Durable, Opened] = {}
        self.intakes: list[Intake] = []
        self.lags: dict[str, int] = {}
        """Messages that wait for the agent in each stream, as somebody last asked."""
        self._keepalive: KeepAlive | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oncewire-ledger")
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] | None = None
        self._process = process_name()

    # ---- what it says of itself

    @property
    def counts(self) -> dict[str, int]:
        """Inputs by outcome, since the start of this process."""
        return self.commits.counts

    @property
    def last_error(self) -> str:
        return self.commits.last_error

    @property
    def trouble(self) -> str:
        """Why it cannot work right now, '' when it can: what readiness says."""
        if self.failure:
            return self.failure
        if not self.is_started:
            return self.waits_for or "it has not started yet"
        away = "" if self.client.connection.is_ready else "NATS is away"
        unfinished = next(iter(self.commits.unfinished.values()), "")
        return self.commits.trouble or away or unfinished or self.lookout.trouble

    @property
    def in_flight(self) -> int:
        """Inputs in hand."""
        return sum(intake.held for intake in self.intakes) + self.lane.in_hand

    def health(self) -> dict[str, Any]:
        """For a readiness endpoint; what an adapter says of itself stands beside."""
        told = self.agent.adapted.health() if self.agent.adapted else {}
        facts = {"counts": dict(self.counts), "in_flight": self.in_flight, "last_error": self.last_error}
        return {**told, **facts, "trouble": self.trouble, "is_ready": not self.trouble}

    # ---- life

    async def __aenter__(self) -> Runner:
        try:
            await self.start()
        except BaseException:
            await self._let_go()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def db(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something of the store in the ledger's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def start(self) -> None:
        agent, client = self.agent, self.client
        self._failed = asyncio.get_running_loop().create_future()
        self.ledger: Ledger = await self._open_ledger()
        self.opened = await opening.open_all(client, agent, self.settings)
        keep_s = self.settings.ledger_keep_s
        await check_life(client, agent, self.opened.values(), keep_s)
        await self._check_ownership()
        sources = {durable: opened.source for durable, opened in self.opened.items()}
        reading = Reading(agent, self.ledger, sources.values())
        targets = Targets(client)
        outflow = Outflow(client, self.ledger, targets)
        await outflow.start()
        await targets.resolve(subjects.dlq_request(agent.name))
        ack_wait_s = min((opened.ack_wait_s for opened in self.opened.values()), default=agent.ack_wait_s)
        keepalive = self._keepalive = KeepAlive(client, ack_wait_s / 3, agent.handler_timeout_s)
        await keepalive.start()
        self.commits = Commits(
            self.store, self.db, self.ledger, sources, targets, outflow, keepalive, self.at, tracer=self.tracer
        )
        feeds: dict[Durable, Intake] = {}
        self.lookout = Lookout(client, self.commits, reading, feeds, agent.handler_timeout_s)
        forgetting = Forgetting(client, self.commits, self.opened.values(), keep_s, self.clock_ms)
        chores = (self.lookout, forgetting, keepalive)
        self.upkeep = Upkeep(client, agent, self.commits, reading, self.opened, self._in_hand, *chores)
        self.lane = Lane(self.commits, agent.concurrency, agent.handler_timeout_s)
        self.is_unclean = await self.db(self.store.enter, self._process, now_ms())
        await self.upkeep.sweep(is_start=True)
        await self.lookout.start(self.opened.values(), self._seen)
        await keepalive.ready()
        self.intakes = [
            Intake(client, agent, opened, reading, self.commits, self.lane, is_unclean=self.is_unclean)
            for opened in self.opened.values()
        ]
        feeds.update({intake.opened.source.durable: intake for intake in self.intakes})
        self._begin_tasks()
        self.is_started = True

    async def _open_ledger(self) -> Ledger:
        """A file that another process holds is waited for."""
        while True:
            try:
                ledger: Ledger = await self.db(self._open_and_try)
            except TimedOut as problem:
                if problem.message != self.waits_for:
                    log.warning("agent %s waits: %s", self.agent.full_name, problem.message)
                self.waits_for = problem.message
            else:
                self.waits_for = ""
                return ledger

    def _open_and_try(self) -> Ledger:
        """In the ledger's thread: opened, and free to be written."""
        ledger = self.store.open(self.agent.tenant, self.agent.workspace, self.agent.name)
        self.store.begin()
        self.store.rollback()
        return ledger

    async def _check_ownership(self) -> None:
        """Before anything is touched: the ledger owns the durables and is whole, the streams are those it knows."""
        owner = await self.db(opening.owner_of, self.store, self.agent)
        for opened in self.opened.values():
            await opening.own(self.client, opened.source, owner)
        announced = await opening.last_announced(self.client, self.ledger)
        head = await self.db(self.store.head)
        opening.check_not_behind(head, announced)
        all_opened = list(self.opened.values())
        settled = await self.db(opening.last_settled, self.store, head.number, all_opened)
        self._seen = await self.db(opening.last_seen, self.store, all_opened)
        for durable, known in (*settled.items(), *self._seen.items()):
            await opening.check_not_back(self.client, self.opened[durable].source, known, self.ledger.id)

    def _in_hand(self) -> list[Item]:
        working = [item for intake in self.intakes for item in intake.working]
        return [*self.lane.items(), *working, *self.lookout.taken()]

    def _begin_tasks(self) -> None:
        self._intake_tasks = [
            self._begin(f"the intake of {intake.opened.source.stream}", intake.run()) for intake in self.intakes
        ]
        self._tasks = [self._begin("the upkeep", self.upkeep.run()), self._begin("the lane", self.lane.run())]
        self._tasks += [
            self._begin(f"the clock of {one.name}", self.upkeep.tick(one)) for one in self.agent.handlers if one.every_s
        ]

    def _begin(self, part: str, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(partial(self._ended, part))
        return task

    def _ended(self, part: str, task: asyncio.Task[None]) -> None:
        """A part that ends although nobody asked it to stops the whole: half an agent is worse than none."""
        is_asked = self.commits.stopping.is_set()
        if task.cancelled():
            if not is_asked:
                self._part_ended(f"{part} was cancelled", None)
            return
        error = task.exception()
        if error is not None and not isinstance(error, PowerCut):
            self._part_ended(f"{part} failed: {short_error(error)}", error)
        elif error is None and not is_asked:
            self._part_ended(f"{part} returned", None)

    def _part_ended(self, text: str, error: BaseException | None) -> None:
        log.error("agent %s stops: %s", self.agent.full_name, text, exc_info=error)
        self.failure = self.failure or text
        self.commits.last_error = text
        self.commits.stopping.set()
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error if isinstance(error, OncewireError) else PartEnded(text))
            self._failed.exception()

    async def wait(self) -> None:
        """Until it is asked to stop, or a part ended unasked: then its error is raised, or PartEnded."""
        assert self._failed is not None
        stopping = asyncio.ensure_future(self.commits.stopping.wait())
        either: list[asyncio.Future[Any]] = [stopping, self._failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._failed.done():
            self._failed.result()

    def ask_to_stop(self) -> None:
        self.commits.stopping.set()

    async def stop(self, timeout_s: float = DRAIN_S) -> None:
        """Drain: take nothing new, finish what is in hand, leave the ledger closed off."""
        self.commits.stopping.set()
        is_clean = await self._finished_within(timeout_s)
        await _cancelled([*self._intake_tasks, *self._tasks])
        await self.lane.stop()
        await _cancelled(list(self.commits.finishing))
        with contextlib.suppress(OncewireError):
            await self.upkeep.sweep(is_end=True)
        with contextlib.suppress(OncewireError):
            await self.upkeep.flush_marks()
            await self.upkeep.close_off()
            await self.lookout.note()
            self.at("drained")
            if is_clean:
                await self.db(self.store.leave, self._process)
        await self._let_go()

    async def _finished_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(self._intake_tasks)
                await self.lane.idle.wait()
                await asyncio.gather(*self.commits.finishing, return_exceptions=True)
        except TimeoutError:
            return False
        return True

    async def _let_go(self) -> None:
        if self._keepalive is not None:
            await self._keepalive.stop()
        await self.db(self.store.close)
        self._thread.shutdown(wait=False)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def running(agent: Agent, client: Client, store: Store, **options: Any) -> AsyncIterator[Runner]:
    """An agent inside somebody's own service; the lifespan hook is around it."""
    async with agent.lifespan(agent), Runner(agent, client, store, **options) as runner:
        yield runner


def own_the_process() -> None:
    """For a process that does nothing but run an agent. The loop reads and writes the socket while the ledger's thread
    computes; at Python's own 5 ms each of its turns would wait longer than it takes, and the server with it."""
    sys.setswitchinterval(SWITCH_S)
