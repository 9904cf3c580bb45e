"""The local engine: the rules, a log on this machine's disk, a clock and the event loop. Without a log it forgets.

The loop's thread holds all state; journal.py has the threads that wait for the disk while the next group fills.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from oncewire._ground.contracts.broker import Delivery, ProduceBody
from oncewire._ground.contracts.records import Record, encode
from oncewire._ground.errors import OncewireError, Overloaded, Unavailable
from oncewire.broker import rules, upkeep, view
from oncewire.broker.desk import Desk
from oncewire.broker.engine import (
    Consume,
    Done,
    Idempotency,
    IdempotencyStatus,
    Limits,
    Produced,
    Router,
    RoutingDecision,
    Settle,
    Sink,
    Stats,
    Subscription,
    TopicCreated,
    TopicShown,
)
from oncewire.broker.journal import Journal, replay_into
from oncewire.broker.log.files import Disk
from oncewire.broker.log.writer import Log
from oncewire.broker.routing import Routers
from oncewire.broker.rules import Step
from oncewire.broker.state import State, Subscriber
from oncewire.broker.taking import Take

ROUTER_TIMEOUT_MS: Final = 500

Clock = Callable[[], int]
_log = logging.getLogger(__name__)


def steady_clock() -> Clock:
    """Unix time in ms that never goes back and does not jump: a lease must not end because somebody set the clock."""
    monotonic_ns = time.monotonic_ns
    shift_ns = time.time_ns() - monotonic_ns()
    return lambda: (monotonic_ns() + shift_ns) // 1_000_000


async def open_local(
    folder: Path | None,
    *,
    limits: Limits | None = None,
    router: Router | None = None,
    router_timeout_ms: int = ROUTER_TIMEOUT_MS,
    clock: Clock | None = None,
) -> LocalEngine:
    """An engine that is ready. With a folder, what was acknowledged survives; one process may have it at a time.

    Raises Corrupt when the log is damaged, Conflict when another process has it.
    """
    state = State(limits or Limits())
    if folder is None:
        return LocalEngine(state, None, None, clock or steady_clock(), router, router_timeout_ms)
    disk = Disk(folder)
    try:
        log = Log(disk, lambda: secrets.randbits(64))
        replay = await asyncio.get_running_loop().run_in_executor(None, replay_into, state, log)
    except BaseException:
        disk.close()
        raise
    journal = Journal(log, replay)
    return LocalEngine(state, journal, disk, clock or steady_clock(), router, router_timeout_ms)


class LocalEngine:
    """See the module's head, and engine.py for what each call does."""

    def __init__(
        self,
        state: State,
        journal: Journal | None,
        disk: Disk | None,
        clock: Clock,
        router: Router | None,
        router_timeout_ms: int,
    ) -> None:
        self.is_durable = journal is not None
        self.limits = state.limits
        self._state = state
        self._desk = Desk(state, encode if self.is_durable else None)
        self._journal = journal
        self._disk = disk
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._routers = Routers(router, router_timeout_ms, self._loop, state.counters) if router else None
        self._problem = ""
        self._is_waking = False
        self._is_stopping = False
        self._drained: asyncio.Event | None = None
        self._ticker = self._loop.call_later(self.limits.tick_ms / 1000, self._tick)

    # ---- topics

    def create_topic(self, tenant: str, name: str, partitions: int, done: Done[TopicCreated]) -> None:
        self._ask(lambda: rules.create_topic(self._state, self._clock(), tenant, name, partitions), done)

    def list_topics(self, tenant: str, done: Done[list[str]]) -> None:
        done(view.topic_names(self._state, tenant))

    def show_topic(self, tenant: str, name: str, done: Done[TopicShown]) -> None:
        done(view.show_topic(self._state, tenant, name))

    def delete_topic(self, tenant: str, name: str, done: Done[None]) -> None:
        self._ask(lambda: rules.delete_topic(self._state, tenant, name), done)

    # ---- messages

    def produce(self, tenant: str, body: ProduceBody, done: Done[Produced]) -> None:
        if self._routers is not None:
            self._routers.ask(body.topic, body, lambda decision: self._produce(tenant, body, decision, done))
        else:
            self._produce(tenant, body, None, done)

    def _produce(self, tenant: str, body: ProduceBody, decision: RoutingDecision | None, done: Done[Produced]) -> None:
        if (refused := self._refused()) is not None:
            done(refused)
            return
        self._submit(rules.produce(self._state, self._clock(), tenant, body, decision), done)

    def produce_many(
        self, tenant: str, bodies: Sequence[ProduceBody], done: Done[list[Produced | OncewireError]]
    ) -> None:
        if self._routers is None or not bodies:
            self._produce_many(tenant, bodies, [None] * len(bodies), done)
            return
        decisions: list[RoutingDecision | None] = [None] * len(bodies)
        left = len(bodies)

        def decided(index: int, decision: RoutingDecision | None) -> None:
            nonlocal left
            decisions[index] = decision
            left -= 1
            if left == 0:
                self._produce_many(tenant, bodies, decisions, done)

        for index, body in enumerate(bodies):
            self._routers.ask(body.topic, body, partial(decided, index))

    def _produce_many(
        self,
        tenant: str,
        bodies: Sequence[ProduceBody],
        decisions: Sequence[RoutingDecision | None],
        done: Done[list[Produced | OncewireError]],
    ) -> None:
        state, now_ms = self._state, self._clock()
        pairs = zip(bodies, decisions, strict=True)
        self._ask_many((rules.produce(state, now_ms, tenant, body, decision) for body, decision in pairs), done)

    def settle(self, tenant: str, settle: Settle, done: Done[None]) -> None:
        if (refused := self._refused()) is not None:
            done(refused)
            return
        self._submit(rules.settle(self._state, self._clock(), tenant, settle), done)

    def settle_many(self, tenant: str, settles: Sequence[Settle], done: Done[list[OncewireError | None]]) -> None:
        state, now_ms = self._state, self._clock()
        self._ask_many((rules.settle(state, now_ms, tenant, one) for one in settles), done)

    def idempotency(self, tenant: str, step: Idempotency, done: Done[IdempotencyStatus]) -> None:
        self._ask(lambda: rules.idempotency(self._state, self._clock(), tenant, step), done)

    # ---- readers

    def subscribe(self, tenant: str, consume: Consume, sink: Sink, done: Done[Subscription]) -> None:
        def joined(refused: OncewireError | None) -> None:
            if refused is not None:
                done(refused)
                return
            subscriber = rules.join(self._state, self._clock(), tenant, consume, sink)
            if isinstance(subscriber, OncewireError):
                done(subscriber)
                return
            done(_Subscription(self, subscriber))
            self._desk.hand_out(self._clock())
            if self._desk.can_cut:
                self._wake()

        self._ask(lambda: rules.enter(self._state, self._clock(), tenant, consume), joined)

    def take(
        self, tenant: str, consume: Consume, messages_max: int, wait_ms: int, done: Done[list[Delivery]]
    ) -> Subscription:
        take = Take(self._loop, messages_max, wait_ms, done)
        self.subscribe(tenant, msgspec.structs.replace(consume, in_flight=messages_max), take, take.joined)
        return take

    # ---- what an operator sees

    def stats(self) -> Stats:
        state = self._state
        log = self._journal.stats() if self._journal else None
        return Stats(dict(state.counters), view.topic_stats(state), state.entries, log)

    def problems(self) -> list[str]:
        if self._is_stopping:
            return ["the broker is stopping"]
        return [self._problem] if self._problem else []

    # ---- asking the rules

    def _refused(self) -> OncewireError | None:
        if self._is_stopping:
            return Unavailable("the broker is stopping", retry_after_s=1.0)
        if self._desk.is_full:
            retry_after_s = self.limits.retry_after_ms / 1000
            return Overloaded("too much waits to be written", retry_after_s=retry_after_s)
        return None

    def _ask(self, step: Callable[[], Step], done: Callable[[Any], None]) -> None:
        refused = self._refused()
        if refused is not None:
            done(refused)
        else:
            self._submit(step(), done)

    def _ask_many(self, steps: Iterable[Step], done: Callable[[Any], None]) -> None:
        """One commit for all; each has its own answer."""
        if (refused := self._refused()) is not None:
            done(refused)
            return
        answers: list[Any] = []
        records: list[Record] = []
        waits = False
        for step in steps:
            answers.append(step.answer)
            records += step.records
            waits |= step.waits
        self._submit(Step(answers, tuple(records), waits), done)

    def _submit(self, step: Step, done: Callable[[Any], None]) -> None:
        self._desk.submit(step, done)
        if self._desk.can_cut:
            self._wake()

    def _wake(self) -> None:
        """Look once the requests that came together are all in: they share a commit."""
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._awake)

    def _awake(self) -> None:
        self._is_waking = False
        self._go()
        self._desk.hand_out(self._clock())
        self._go()

    # ---- making durable

    def _go(self) -> None:
        """Send the next group on its way, if none is."""
        desk = self._desk
        if self._journal is not None:
            if desk.can_cut:
                self._journal.commit(desk.cut(), self._committed)
            return
        if desk.can_cut:
            desk.cut()
            desk.applied()
            desk.answered()
            if desk.can_cut:
                self._wake()  # who was answered asks again: others get their turn first

    def _committed(self, error: OncewireError | None) -> None:
        desk, journal = self._desk, self._journal
        assert journal is not None
        if error is not None:
            if not self._problem:
                _log.error("%s", error.message)
            self._problem = error.message
            desk.failed(error)
        else:
            self._problem = ""
            desk.applied()
            if journal.log.is_snapshot_due and not journal.is_snapshotting:
                journal.snapshot(self._state)
            self._go()  # the disk works while those who waited are told
            desk.answered()
        desk.hand_out(self._clock())
        self._go()
        if self._drained is not None and desk.is_idle:
            self._drained.set()

    def _tick(self) -> None:
        now_ms = self._clock()
        self._ticker = self._loop.call_later(self.limits.tick_ms / 1000, self._tick)
        self._desk.propose(upkeep.tick(self._state, now_ms))
        if self._problem and self._desk.is_idle and self._journal is not None:
            self._journal.commit(self._desk.cut(), self._committed)  # is the disk back? an empty group tells
        self._awake()

    # ---- stop

    async def stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._ticker.cancel()
        for group in list(self._state.groups.values()):
            for subscriber in list(group.subscribers):
                rules.leave(self._clock(), subscriber)
                subscriber.sink.ended(Unavailable("the broker is stopping", retry_after_s=1.0))
        if self._routers is not None:
            self._routers.close()
        self._awake()
        if self._journal is not None:
            if not self._desk.is_idle:
                self._drained = asyncio.Event()
                await self._drained.wait()
            await self._journal.close()
        if self._disk is not None:
            self._disk.close()

    def leave(self, subscriber: Subscriber) -> None:
        rules.leave(self._clock(), subscriber)

    def resume(self, subscriber: Subscriber) -> None:
        if subscriber.is_open and subscriber.group.busy:
            self._state.stirred[subscriber.group] = None
            self._wake()


class _Subscription:
    """A reader's handle."""

    __slots__ = ("_engine", "_subscriber")

    def __init__(self, engine: LocalEngine, subscriber: Subscriber) -> None:
        self._engine = engine
        self._subscriber = subscriber

    @property
    def is_looking(self) -> bool:
        return False

    def resume(self) -> None:
        self._engine.resume(self._subscriber)

    def close(self) -> None:
        self._engine.leave(self._subscriber)
