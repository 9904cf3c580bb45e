"""The run loop: pull, commit, publish, ack, in this order, for ever.

    loop                     ledger's thread              on disk
    fetch a batch, read it
                        ──►  BEGIN … handlers … COMMIT    block: outcomes, rows, effects as sent
    publish the effects                                   effects in their streams
    ack the inputs                                        (marks ride in the next commit)

Two batches are on their way at a time: while one commits, the one before is being published. On start, and each second
after, what any process of this ledger left open is published before it is forgotten by anybody. After an unclean stop
inputs come one by one until all that were in hand then are settled: one of them may be what killed the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from oncewire.agent import sources as opening
from oncewire.agent.agent import Agent
from oncewire.agent.batch import GroupCommit, Item, Limits, Point, Settled, attempt_of, nothing_happens
from oncewire.agent.effects import Effect
from oncewire.agent.handlers import Handler
from oncewire.agent.keepalive import KeepAlive
from oncewire.agent.lane import Lane
from oncewire.agent.outflow import Outflow, Targets, now_ms
from oncewire.agent.read import Reading
from oncewire.agent.sources import Opened
from oncewire.errors import NotConnected, OncewireError, Unavailable
from oncewire.jetstream import Client, Pull
from oncewire.jetstream.protocol import Message
from oncewire.ledger.rules import Content, Ledger, Source
from oncewire.ledger.sqlite import process_name
from oncewire.ledger.store import Mark, Store
from oncewire.settings import Settings

log = logging.getLogger("oncewire.agent")

HOUSEKEEPING_S = 1.0
SWEEP_AFTER_MS = 10_000
"""A block that another living process has just written is left to it for so long."""
COMMITS_AHEAD = 2
DRAIN_S = 30.0
DUE_MAX = 1_000
FETCH_S = 0.5


class Runner:
    """One agent, one store, one connection. `async with` starts it; leaving drains it."""

    def __init__(
        self, agent: Agent, client: Client, store: Store, settings: Settings | None = None, at: Point = nothing_happens
    ) -> None:
        self.agent = agent
        self.client = client
        self.store = store
        self.settings = settings or Settings()
        self.at = at
        self.counts: dict[str, int] = {}
        self.last_error = ""
        self.is_unclean = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oncewire-ledger")
        self._turn = asyncio.Lock()
        self._slots = asyncio.Semaphore(COMMITS_AHEAD)
        self._marks: list[Mark] = []
        self._closing_marks: list[Mark] = []
        self._open: set[int] = set()
        self._resumes: deque[tuple[int, Pull, Message]] = deque()
        self._finishing: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._process = process_name()
        self._busy_at = time.monotonic()
        self._is_closed_off = True
        self._pulls: dict[bytes, tuple[Pull, int]] = {}
        self._left_open: set[int] = set()

    # ---- life

    async def __aenter__(self) -> Runner:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def db(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something of the store in the ledger's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def start(self) -> None:
        agent = self.agent
        self._failed = asyncio.get_running_loop().create_future()
        self.ledger: Ledger = await self.db(self.store.open, agent.tenant, agent.workspace, agent.name)
        self.opened: dict[str, Opened] = {}
        for stream, patterns in (await opening.patterns_by_stream(self.client, agent)).items():
            consumer = opening.durable_of(agent, stream, self.settings)
            opened = await opening.open_source(self.client, agent, stream, patterns, consumer)
            await opening.own(self.client, opened.source, self.store.identity())
            self.opened[stream] = opened
        await opening.check_not_behind(self.client, self.store, self.ledger)
        self.sources: dict[str, Source] = {stream: opened.source for stream, opened in self.opened.items()}
        self.reading = Reading(agent, self.ledger, self.sources)
        self.targets = Targets(self.client)
        self.outflow = Outflow(self.client, self.ledger, self.targets)
        await self.outflow.start()
        self.is_unclean = await self.db(self.store.enter, self._process, now_ms())
        await self._sweep(is_start=True)
        ack_wait_s = min((opened.ack_wait_s for opened in self.opened.values()), default=agent.ack_wait_s)
        self.keepalive = KeepAlive(self.client.connection.options, ack_wait_s / 3, agent.handler_timeout_s)
        await self.keepalive.start()
        self.lane = Lane(self.db, self.store, self._turn, agent.concurrency)
        self._begin_tasks()

    def _begin_tasks(self) -> None:
        work = [self._pull_loop(opened) for opened in self.opened.values()]
        work += [self._housekeep(), self._commit_lane()]
        work += [self._tick(handler) for handler in self.agent.handlers if handler.every_s]
        for one in work:
            task = asyncio.get_running_loop().create_task(self._guard(one))
            self._tasks.append(task)

    async def _guard(self, work: Any) -> None:
        """A part that fails for good stops the whole: half an agent is worse than none."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.last_error = str(error)
            log.exception("agent %s stops", self.agent.full_name)
            self._stopping.set()
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)

    async def wait(self) -> None:
        """Until it is asked to stop, or a part failed for good: then that error is raised."""
        assert self._failed is not None
        stopping = asyncio.ensure_future(self._stopping.wait())
        either: list[asyncio.Future[Any]] = [stopping, self._failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._failed.done():
            self._failed.result()

    def ask_to_stop(self) -> None:
        self._stopping.set()

    async def stop(self, timeout_s: float = DRAIN_S) -> None:
        """Drain: take nothing new, finish what is in hand, leave the ledger closed off."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        while (self._finishing or self.lane.running) and time.monotonic() < deadline:
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0.02)), *self._finishing], timeout=0.1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lane.stop()
        is_clean = not self._finishing and not self.lane.running
        for finishing in list(self._finishing):
            finishing.cancel()
        await asyncio.gather(*self._finishing, return_exceptions=True)
        with contextlib.suppress(OncewireError):
            await self._flush_marks()
            await self._close_off()
            if is_clean:
                await self.db(self.store.leave, self._process)
        await self.keepalive.stop()
        await self.db(self.store.close)
        self._thread.shutdown(wait=False)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()

    # ---- pulling

    async def _pull_loop(self, opened: Opened) -> None:
        source = opened.source
        if self.is_unclean:
            async with self.client.pull(source.stream, source.consumer, batch=1, ahead=1) as pull:
                await self._carefully(pull, opened)
        ahead = 1 if self.agent.is_ordered else 3
        async with self.client.pull(source.stream, source.consumer, batch=self.agent.batch, ahead=ahead) as pull:
            while not self._stopping.is_set():
                messages = await pull.fetch(self.agent.batch, timeout_s=FETCH_S)
                if messages:
                    await self._take(pull, opened, messages, is_careful=self.agent.is_ordered)

    async def _carefully(self, pull: Pull, opened: Opened) -> None:
        """One at a time until everything that was in hand at the crash is settled."""
        source = opened.source
        while not self._stopping.is_set():
            info = await self.client.api(f"CONSUMER.INFO.{source.stream}.{source.consumer}")
            if info["ack_floor"]["stream_seq"] >= opened.delivered:
                return
            messages = await pull.fetch(1, timeout_s=FETCH_S)
            if messages:
                await self._take(pull, opened, messages, is_careful=True)

    async def _take(self, pull: Pull, opened: Opened, messages: list[Message], *, is_careful: bool) -> None:
        self.at("fetched")
        self._busy_at = time.monotonic()
        self._is_closed_off = False
        token = self.keepalive.watch([message.reply for message in messages])
        items = self.reading.read(messages)
        again = [item for item in items if item.delivery.deliveries > 1 or self.is_unclean]
        if again:
            async with self._turn:
                await self.db(self.store.begun, [attempt_of(item, now_ms(), "") for item in again])
            self.at("begun")
        await self._slots.acquire()
        try:
            settled = await self._commit(items, opened)
        except BaseException:
            self._slots.release()
            self.keepalive.release(token)
            raise
        finishing = asyncio.get_running_loop().create_task(self._finish(pull, settled, token))
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finishing.discard)
        for item in settled.later:
            await self._start_async(pull, item)
        if is_careful:
            await asyncio.wait([finishing])

    async def _start_async(self, pull: Pull, item: Item) -> None:
        assert item.handler is not None
        self._pulls[item.message.reply] = (pull, self.keepalive.watch([item.message.reply]))
        await self.lane.add(item, item.handler.timeout_s or self.agent.handler_timeout_s)

    def _limits(self, max_deliver: int) -> Limits:
        return Limits(self.ledger, max_deliver, self.targets.stream_of, self.targets.check_size, now_ms(), self.at)

    async def _commit(self, items: list[Item], opened: Opened) -> Settled:
        group = GroupCommit(self.store, self._limits(opened.max_deliver), self.sources)
        async with self._turn:
            marks = self._take_marks()
            try:
                settled: Settled = await self.db(group.run, items, dict(self.targets.last), marks)
            except OncewireError:
                self._marks = marks + self._marks
                raise
            if settled.block:
                self._open.add(settled.block)
        self._count(settled)
        return settled

    def _take_marks(self) -> list[Mark]:
        marks = self._marks + self._closing_marks
        self._marks, self._closing_marks = [], []
        return marks

    # ---- publishing and settling

    async def _finish(self, pull: Pull, settled: Settled, token: int) -> None:
        """After the commit: publish, then ack. What cannot be published now stays open and is swept."""
        try:
            self._nak(pull, settled)
            if settled.block and not await self._publish(settled):
                return
            self.at("published")
            self._ack(pull, settled)
            self.at("acked")
            for block, message in settled.resumes:
                self._resumes.append((block, pull, message))
            self._settle_resumes()
        finally:
            self._slots.release()
            self.keepalive.release(token)

    async def _publish(self, settled: Settled) -> bool:
        try:
            marks, error = await self.outflow.publish(settled.block, settled.sendings, settled.announcement)
        except OncewireError as problem:
            marks, error = [], problem.message
        self._marks += marks
        self._open.discard(settled.block)
        if error:
            self.last_error = error
            log.warning("agent %s: block %d is not published yet: %s", self.agent.full_name, settled.block, error)
        return not error

    @staticmethod
    def _nak(pull: Pull, settled: Settled) -> None:
        by_delay: dict[float, list[Message]] = {}
        for message, delay in settled.naks:
            by_delay.setdefault(delay, []).append(message)
        with contextlib.suppress(NotConnected):  # they come back after ack_wait
            for delay, messages in by_delay.items():
                pull.nak(messages, delay)

    @staticmethod
    def _ack(pull: Pull, settled: Settled) -> None:
        with contextlib.suppress(NotConnected):  # they come back and are found settled
            pull.ack(settled.acks)
            for message, reason in settled.terms:
                pull.term([message], reason)

    def _settle_resumes(self) -> None:
        """Inputs that were settled before: acked once the effects of their block are out."""
        waiting = deque(self._resumes)
        self._resumes.clear()
        marked = {mark.block for mark in self._marks}
        for block, pull, message in waiting:
            if block in self._open or (block in self._left_open and block not in marked):
                self._resumes.append((block, pull, message))
            else:
                with contextlib.suppress(NotConnected):
                    pull.ack([message])

    def _count(self, settled: Settled) -> None:
        for name, count in settled.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    # ---- async handlers

    async def _commit_lane(self) -> None:
        """Group commits of what `async def` handlers finish or ask to write."""
        while True:
            if not await self.lane.wait(1.0):
                continue
            finished, asking = self.lane.take_finished(), self.lane.take_asking()
            if finished or asking:
                settled = await self._commit_async(finished, asking)
                await self._finish_async(settled, [task.item for task in (*finished, *asking)])

    async def _commit_async(self, finished: list[Any], asking: list[Any]) -> Settled:
        tasks = [*finished, *asking]
        group = GroupCommit(self.store, self._limits(self.agent.max_deliver), self.sources)
        async with self._turn:
            marks = self._take_marks()
            try:
                found = await self.db(group.begin, [task.item for task in tasks])
                for task in tasks:
                    await self._settle_task(group, task, found, is_asking=task in asking)
                settled: Settled = await self.db(group.end, dict(self.targets.last), marks)
            except BaseException:
                self._marks = marks + self._marks
                await self.db(self.store.rollback)
                raise
            if settled.block:
                self._open.add(settled.block)
        self._count(settled)
        return settled

    async def _settle_task(self, group: GroupCommit, task: Any, found: dict[bytes, Any], *, is_asking: bool) -> None:
        item = task.item
        if item.key in found or item.at_key in found:
            self.lane.turn_away(task)
            group.decide(item, found)
        elif is_asking:
            await self.lane.let_in(task, group, self._resolve, self.agent.handler_timeout_s)
        else:
            try:
                effects = task.finished.result()
                await self._resolve(effects)
                group.finish_async(item, effects)
            except Exception as error:
                group.fail(item, error)

    async def _resolve(self, effects: list[Effect]) -> None:
        for effect in effects:
            await self.targets.resolve(effect.subject)

    async def _finish_async(self, settled: Settled, items: list[Item]) -> None:
        held = [self._pulls.pop(item.message.reply) for item in items]
        if held:
            await self._slots.acquire()
            await self._finish(held[0][0], settled, held[0][1])
        for _, token in held[1:]:
            self.keepalive.release(token)

    # ---- housekeeping

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            try:
                await self._send_due()
                await self._sweep()
                if time.monotonic() - self._busy_at > HOUSEKEEPING_S:
                    await self._flush_marks()
                    await self._close_off()
            except Unavailable as problem:
                self.last_error = problem.message
                log.warning("agent %s: %s", self.agent.full_name, problem.message)

    async def _flush_marks(self) -> None:
        """Marks of an idle agent get a commit of their own."""
        if not self._marks:
            return
        async with self._turn:
            marks, self._marks = self._marks, []
            await self.db(self._write_marks, marks)
        self.at("marked")

    def _write_marks(self, marks: list[Mark]) -> None:
        self.store.begin()
        try:
            self.store.mark(marks)
            self.store.commit()
        except BaseException:
            self.store.rollback()
            raise

    async def _close_off(self) -> None:
        """One closing block before idling, so that the last announcement says that all before it is confirmed."""
        if self._is_closed_off or self._marks or self._open or self._finishing:
            return
        confirmed = await self.db(self.store.confirmed)
        self._is_closed_off = True
        if confirmed.block == 0:
            return
        settled = await self._append(Content([], [], now_ms(), dict(self.targets.last)), [])
        before = len(self._marks)
        await self._publish(settled)
        self._closing_marks += self._marks[before:]  # it waits for the next real commit
        del self._marks[before:]

    async def _append(self, content: Content, dropped: list[str]) -> Settled:
        """A block without inputs."""

        def write() -> Settled:
            self.store.begin()
            try:
                appended = self.store.append(content, self.sources, [])
                if dropped:
                    self.store.drop_due(dropped)
                self.store.commit()
            except BaseException:
                self.store.rollback()
                raise
            return Settled(appended.number, content.effects, appended.announcement)

        async with self._turn:
            settled: Settled = await self.db(write)
            self._open.add(settled.block)
        return settled

    async def _send_due(self) -> None:
        """Delayed effects whose time has come: sent in a commit of their own, then published."""
        async with self._turn:
            due = await self.db(self.store.due, now_ms(), DUE_MAX)
        if due:
            sendings = [one.sending for one in due]
            content = Content([], sendings, now_ms(), dict(self.targets.last))
            settled = await self._append(content, [sending.id for sending in sendings])
            self.at("due")
            await self._publish(settled)

    async def _sweep(self, *, is_start: bool = False) -> None:
        """Publish what any process of this ledger left open."""
        async with self._turn:
            open_ = await self.db(self.store.unconfirmed)
        mine = {mark.block for mark in (*self._marks, *self._closing_marks)} | self._open
        self._left_open = {number for number, _ in open_}
        for number, holes in open_:
            if number in mine:
                continue
            async with self._turn:
                block = await self.db(self.store.block, number)
            if block is None or (not is_start and now_ms() - block.content.sent_ms < SWEEP_AFTER_MS):
                continue
            marks, error = await self.outflow.resend(block, holes, now_ms())
            self._marks += marks
            if error:
                self.last_error = error
                if is_start:
                    raise Unavailable(f"effects of block {number} cannot be published: {error}")
        if is_start:
            await self._flush_marks()
            self.at("swept")
        self._settle_resumes()

    # ---- ticks

    async def _tick(self, handler: Handler) -> None:
        """One command per time slot: all processes publish it, the id lets one through."""
        while True:
            slot = int(time.time() // handler.every_s) + 1
            await asyncio.sleep(max(0.0, slot * handler.every_s - time.time()))
            payload = {"handler": handler.name, "slot": slot}
            body = {"type": "tick", "payload": payload, "ts": int(slot * handler.every_s * 1000)}
            id_ = f"tick.{self.agent.full_name}.{handler.name}.{slot}"
            with contextlib.suppress(Unavailable):
                await self.client.publish(handler.pattern, body | {"id": id_}, msg_id=id_)


@contextlib.asynccontextmanager
async def running(agent: Agent, client: Client, store: Store, **options: Any) -> AsyncIterator[Runner]:
    """An agent inside somebody's own service; the lifespan hook is around it."""
    async with agent.lifespan(agent), Runner(agent, client, store, **options) as runner:
        yield runner
