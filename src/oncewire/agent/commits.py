"""From a batch in hand to a settled one: commit, publish, ack, in this order.

A commit that the store refuses for now (a full disk, a database that is away, another process inside its transaction)
is tried again in place: the inputs stay in hand and in progress, so an outage costs none of their deliveries. A batch
that fails for another reason (a deadlock, a constraint that speaks up at COMMIT) is run one by one, so that only the
input that causes it is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from oncewire._ground.contracts.letters import one_line
from oncewire._ground.errors import Corrupt, NotConnected, OncewireError, Unavailable
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.pull import Delivery
from oncewire._ground.ledger.rules import Content, Durable, Ledger, Sending, Source, short_error
from oncewire._ground.ledger.store import Block, Mark, Store
from oncewire._ground.metrics import Histogram
from oncewire._ground.tracing import Tracer
from oncewire.agent import traces
from oncewire.agent.batch import GroupCommit, Item, Limits, Point, PowerCut, Settled
from oncewire.agent.flow import BATCH_S
from oncewire.agent.outflow import now_ms

log = logging.getLogger("oncewire.agent")

DUE_MAX = 1_000
COMMITS_AHEAD = 2
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
SESSION_LOSSES_MAX = 3
"""How often in a row one input may end the store's session while its handler runs."""

Db = Callable[..., Awaitable[Any]]


class Watch(Protocol):
    """Keeps inputs in progress."""

    def watch(self, replies: list[bytes]) -> int: ...
    def watch_all(self, replies: list[bytes], deliveries: Sequence[Delivery]) -> int: ...
    def release(self, token: int) -> None: ...


class Streams(Protocol):
    """Which stream takes a subject, and how far each is known to reach."""

    last: dict[str, int]

    def stream_of(self, subject: str) -> str: ...
    def check_size(self, sending: Sending) -> None: ...
    async def resolve(self, subject: str) -> str: ...


class Publishing(Protocol):
    """From the ledger to the streams: marks for what is confirmed, and the first error."""

    async def publish(self, block: int, sendings: Sequence[Sending], announcement: bytes) -> tuple[list[Mark], str]: ...
    async def resend(self, block: Block, holes: Sequence[tuple[int, int]]) -> tuple[list[Mark], str]: ...


class Settling(Protocol):
    """Where inputs came from, and are settled."""

    def ack(self, messages: Iterable[Message]) -> None: ...
    def nak(self, messages: Iterable[Message], delay_s: float = 0.0) -> None: ...
    def term(self, messages: Iterable[Message], reason: str = "") -> None: ...


class Commits:
    """The one writer of a process, and what must happen after each of its commits."""

    def __init__(
        self,
        store: Store,
        db: Db,
        ledger: Ledger,
        sources: dict[Durable, Source],
        targets: Streams,
        outflow: Publishing,
        keepalive: Watch,
        at: Point,
        now_ms: Callable[[], int] = now_ms,
        tracer: Tracer | None = None,
    ) -> None:
        self.store = store
        self.db = db
        self.ledger = ledger
        self.sources = sources
        self.targets = targets
        self.outflow = outflow
        self.keepalive = keepalive
        self.at = at
        self.now_ms = now_ms
        self.tracer = tracer
        self.turn = asyncio.Lock()
        self.slots = asyncio.Semaphore(COMMITS_AHEAD)
        self.stopping = asyncio.Event()
        self.counts: dict[str, int] = {}
        self.effects = self.commits = 0
        self.stored, self.delivery = Histogram(), Histogram()
        self.handling, self.publishing = Histogram(), Histogram()
        self.last_error = ""
        self.trouble = ""
        """Why nothing can be committed right now; readiness says it."""
        self.marks: list[Mark] = []
        self.closing_marks: list[Mark] = []
        self.open: set[int] = set()
        self.unfinished: dict[int, str] = {}
        """By block what went wrong after its commit. Readiness says it, and each sweep tries again."""
        self.left_open: set[int] = set()
        self.resumes: deque[tuple[int, Settling, Message]] = deque()
        self.finishing: set[asyncio.Task[None]] = set()
        self.is_closed_off = True
        self.busy_at = time.monotonic()

    def limits(self, max_deliver: int, *, is_careful: bool = False) -> Limits:
        return Limits(
            self.ledger,
            max_deliver,
            self.targets.stream_of,
            self.targets.check_size,
            self.now_ms(),
            self.at,
            BATCH_S,
            is_careful,
            partial(traces.around, self.tracer) if self.tracer is not None else None,
        )

    def group(self, max_deliver: int, *, is_careful: bool = False) -> GroupCommit:
        return GroupCommit(self.store, self.limits(max_deliver, is_careful=is_careful), self.sources)

    def arrived(self, items: Sequence[Item], now_ns: int) -> None:
        """How long they took: from their own time into the stream, and from there to here. The first and the last of
        what came together stand for all of it; redeliveries say nothing."""
        half = len(items) // 2
        for item, times in ((items[0], len(items) - half), (items[-1], half)):
            if times and item.delivery.deliveries == 1:
                stored_ns = item.delivery.timestamp_ns
                self.delivery.observe((now_ns - stored_ns) * 1e-9, times)
                if item.input is not None:
                    self.stored.observe(stored_ns * 1e-9 - item.input.envelope.ts * 1e-3, times)

    # ---- committing

    async def commit(
        self, items: Sequence[Item], max_deliver: int, *, is_careful: bool = False
    ) -> AsyncIterator[Settled]:
        """Settle them all: in one commit, or one by one after that failed. Ends early when the agent stops."""
        if not items:  # all of a batch may be suspects, which run alone
            return
        try:
            yield await self._run(self.group(max_deliver, is_careful=is_careful), items)
            return
        except Corrupt:
            raise
        except Exception as error:
            self.note(error)
            problem = error
        if len(items) > 1:
            for item in items:
                async for settled in self.commit([item], max_deliver, is_careful=is_careful):
                    yield settled
            return
        if isinstance(problem, Unavailable):
            settled_later = await self._again(items[0], max_deliver, is_careful=is_careful)
        else:
            settled_later = await self.fail(items[0], problem, max_deliver)
        if settled_later is not None:
            yield settled_later

    async def _again(self, item: Item, max_deliver: int, *, is_careful: bool) -> Settled | None:
        """Until it works, however long that takes; the input is in hand all the time. An input that loses the session
        each time its handler runs has failed: the store is not away."""
        delay_s, losses = RETRY_FIRST_S, 0
        token = self.keepalive.watch([item.message.reply])
        try:
            while not await self.stopped_within(delay_s):
                delay_s = min(2 * delay_s, RETRY_MAX_S)
                self.keepalive.release(token)
                token = self.keepalive.watch([item.message.reply])
                group = self.group(max_deliver, is_careful=is_careful)
                try:
                    return await self._run(group, [item])
                except Unavailable as problem:
                    self.note(problem)
                    losses = losses + 1 if isinstance(problem, NotConnected) and group.is_begun else 0
                    if losses >= SESSION_LOSSES_MAX:
                        return await self.fail(item, problem, max_deliver)
                except Corrupt:
                    raise
                except Exception as error:
                    return await self.fail(item, error, max_deliver)
            return None
        finally:
            self.keepalive.release(token)

    async def fail(self, item: Item, error: Exception, max_deliver: int) -> Settled | None:
        """Its handler ran, and the commit refuses what it did: the same as if the handler had raised it."""
        try:
            return await self.settle_without_running(item, max_deliver, lambda group: group.fail(item, error))
        except Unavailable as problem:
            self.note(problem)
            return None

    async def settle_without_running(
        self, item: Item, max_deliver: int, decide: Callable[[GroupCommit], None]
    ) -> Settled:
        """A commit with one outcome that needs no handler, unless the input is settled already."""
        group = self.group(max_deliver, is_careful=True)

        def run() -> Settled:
            try:
                found = group.begin([item])
                if item.at_key in found or item.key in found:
                    group.decide(item, found)
                else:
                    decide(group)
                return group.end(self.targets.last, [])
            except BaseException:
                self.store.rollback()
                raise

        async with self.turn:
            settled: Settled = await self.db(run)
            self.opened(settled)
        return settled

    async def _run(self, group: GroupCommit, items: Sequence[Item]) -> Settled:
        async with self.turn:
            marks = self.take_marks()
            try:
                settled: Settled = await self.db(group.run, items, self.targets.last, marks)
            except BaseException:
                self.marks = marks + self.marks
                raise
            self.opened(settled)
        return settled

    def opened(self, settled: Settled) -> None:
        """A commit is durable: its block is open until all its effects are confirmed."""
        self.trouble = ""
        self.commits += 1
        if settled.block:
            self.open.add(settled.block)
            self.is_closed_off = False
        for name, count in settled.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def take_marks(self) -> list[Mark]:
        marks = self.marks + self.closing_marks
        self.marks, self.closing_marks = [], []
        return marks

    def note(self, error: BaseException) -> None:
        """Remember what is wrong, where status and readiness find it."""
        self.last_error = one_line(error.message) if isinstance(error, OncewireError) else short_error(error)
        if isinstance(error, Unavailable):
            self.trouble = self.last_error
        log.warning("agent %s: %s", self.ledger.name, self.last_error)

    async def stopped_within(self, seconds: float) -> bool:
        """Wait, but not longer than until the agent stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        return self.stopping.is_set()

    async def insist(self, function: Callable[..., Any], *args: Any) -> bool:
        """Something of the store that must be durable before going on; False when the agent stops before it is."""
        delay_s = RETRY_FIRST_S
        while True:
            try:
                async with self.turn:
                    await self.db(function, *args)
                return True
            except Unavailable as problem:
                self.note(problem)
            if await self.stopped_within(delay_s):
                return False
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def append(self, make: Callable[[], Content | None]) -> Settled | None:
        """A block without inputs, made of what its transaction finds; None when that is nothing."""

        def write() -> Settled | None:
            self.store.begin()
            try:
                content = make()
                if content is None:
                    self.store.rollback()
                    return None
                appended = self.store.append(content, self.sources, [])
                self.store.commit()
            except BaseException:
                self.store.rollback()
                raise
            return Settled(appended.number, content.effects, appended.announcement)

        async with self.turn:
            settled: Settled | None = await self.db(write)
            if settled is not None:
                self.opened(settled)
        return settled

    async def send_due(self) -> None:
        """Delayed effects whose time has come: sent in a commit of their own, then published."""
        async with self.turn:
            next_ms = await self.db(self.store.next_due_ms)
        if next_ms is None or next_ms > self.now_ms():
            return
        settled = await self.append(self._take_due)
        if settled is not None:
            self.at("due")
            await self.publish(settled)

    def _take_due(self) -> Content | None:
        """Those that this transaction drops: no other process sends them too."""
        due = self.store.due(self.now_ms(), DUE_MAX)
        dropped = self.store.drop_due([one.sending.id for one in due])
        sendings = [one.sending for one in due if one.sending.id in dropped]
        return Content([], sendings, self.now_ms(), dict(self.targets.last)) if sendings else None

    # ---- publishing and settling

    async def finish_soon(self, pull: Settling, settled: Settled, tokens: Sequence[int] = ()) -> asyncio.Task[None]:
        """Publish and ack beside the next commit; waits while two are on their way."""
        await self.slots.acquire()
        task = asyncio.get_running_loop().create_task(self.finish(pull, settled))
        self.finishing.add(task)
        task.add_done_callback(partial(self._finished, settled, tokens))
        return task

    def _finished(self, settled: Settled, tokens: Sequence[int], task: asyncio.Task[None]) -> None:
        """However it ended: what it left open is swept."""
        self.finishing.discard(task)
        self.slots.release()
        self.open.discard(settled.block)
        for token in tokens:
            self.keepalive.release(token)
        if task.cancelled():
            if not self.stopping.is_set():
                self.fault(settled.block, "finishing was cancelled", asyncio.CancelledError())
        elif (problem := task.exception()) is not None and not isinstance(problem, PowerCut):
            self.fault(settled.block, "finishing failed", problem)

    async def finish(self, pull: Settling, settled: Settled) -> None:
        """After the commit: publish, then ack. What cannot be published now stays open and is swept. A step that fails
        stops none of those beside it."""
        if self.tracer is not None:
            with self._step("tracing", settled):
                traces.tell_worked(self.tracer, settled, self.ledger.name)
        by_delay: dict[float, list[Message]] = {}
        for message, delay in settled.naks:
            by_delay.setdefault(delay, []).append(message)
        for delay, messages in by_delay.items():
            with self._step("asking for a redelivery", settled):
                pull.nak(messages, delay)
        if settled.block:
            if not await self.publish(settled):
                return
            self.at("published")
            with self._step("acknowledging", settled):
                _ack(pull, settled)
            self.at("acked")
        self.resumes += [(block, pull, message) for block, message in settled.resumes]
        self.settle_resumes()

    @contextlib.contextmanager
    def _step(self, what: str, settled: Settled) -> Iterator[None]:
        """What its inputs need next. When the server is away, or this fails, they come back after ack_wait, and are
        found settled."""
        try:
            yield
        except NotConnected:
            pass
        except Exception as problem:
            self.fault(settled.block, f"{what} failed", problem)

    def fault(self, block: int, what: str, problem: BaseException) -> None:
        """Something that should never happen to a block after its commit: a person must see it, and it goes on."""
        text = f"block {block}: {what}: {short_error(problem)}"
        if self.unfinished.get(block) != text:
            log.error("agent %s: %s", self.ledger.name, text, exc_info=problem)
        self.unfinished[block] = self.last_error = text

    async def publish(self, settled: Settled) -> bool:
        began = time.monotonic()
        try:
            marks, error = await self.outflow.publish(settled.block, settled.sendings, settled.announcement)
        except OncewireError as problem:
            marks, error = [], one_line(problem.message)
        except Exception as problem:
            self.fault(settled.block, "publishing failed", problem)
            return False
        finally:  # also when a drain cuts it short: then the last sweep has to find it
            self.open.discard(settled.block)
        self.marks += marks
        if error:
            self.unpublished(settled.block, error)
            return False
        took_s = time.monotonic() - began
        self.effects += len(settled.sendings)
        self.publishing.observe(took_s)
        if self.tracer is not None:
            with self._step("tracing", settled):
                traces.tell_sent(self.tracer, settled, self.ledger.name, took_s)
        return True

    def unpublished(self, block: int, error: str) -> None:
        """Effects that are durable and that their stream has not taken: readiness says so until a sweep succeeds."""
        text = f"block {block} is not published yet: {error}"
        if self.unfinished.get(block) != text:
            log.warning("agent %s: %s", self.ledger.name, text)
        self.unfinished[block] = self.last_error = text

    def settle_resumes(self) -> None:
        """Inputs that were settled before: acked once the effects of their block are out."""
        waiting, self.resumes = self.resumes, deque()
        marked = {mark.block for mark in self.marks}
        for block, pull, message in waiting:
            if block in self.open or block in self.unfinished or (block in self.left_open and block not in marked):
                self.resumes.append((block, pull, message))
            else:
                with contextlib.suppress(NotConnected):
                    pull.ack([message])


def _ack(pull: Settling, settled: Settled) -> None:
    pull.ack(settled.acks)
    for message, reason in settled.terms:
        pull.term([message], reason)
