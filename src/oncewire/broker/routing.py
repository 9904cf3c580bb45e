"""Asking the router: a user's callable, run beside the loop and given up after its timeout.

A router that fails, is late, is asked too much or answers nonsense is left out: the message goes where it would go
without one, and the failure is counted. It never fails a produce.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec

from oncewire._ground.contracts.broker import ProduceBody, check_name
from oncewire.broker.engine import Router, RoutingDecision

THREADS: Final = 8
WAITING_MAX: Final = 1_000
"""Calls that may be out; with more, messages go without the router."""
DECISION_BYTES_MAX: Final = 4_096

_log = logging.getLogger(__name__)

Decided = Callable[[RoutingDecision | None], None]


class Routers:
    """Calls of one router. Each message that goes without a decision is counted in `counters`, and logged with why."""

    def __init__(
        self, router: Router, timeout_ms: int, loop: asyncio.AbstractEventLoop, counters: dict[str, int]
    ) -> None:
        self._router = router
        self._timeout_s = timeout_ms / 1000
        self._loop = loop
        self._counters = counters
        self._is_async = inspect.iscoroutinefunction(router)
        self._threads = ThreadPoolExecutor(THREADS, "router") if not self._is_async else None
        self._out = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, topic: str, body: ProduceBody, decided: Decided) -> None:
        """Call `decided` once, within the timeout."""
        if self._out >= WAITING_MAX:
            self._failed(f"{WAITING_MAX} calls are out already")
            decided(None)
            return
        self._out += 1
        call = _Call(self, decided)
        timer = self._loop.call_later(self._timeout_s, call.end, None, f"no answer within {self._timeout_s} s")
        call.timer = timer
        if self._threads is None:
            task = self._loop.create_task(self._ask_async(topic, body, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._threads.submit(self._router, topic, body).add_done_callback(
                lambda future: self._loop.call_soon_threadsafe(self._answered, future, call)
            )

    def _answered(self, future: Future[Any], call: _Call) -> None:
        error = future.exception()
        call.end(None if error else future.result(), repr(error) if error else "")

    async def _ask_async(self, topic: str, body: ProduceBody, call: _Call) -> None:
        try:
            answer: Any = self._router(topic, body)
            call.end(await asyncio.wait_for(answer, self._timeout_s), "")
        except Exception as error:
            call.end(None, repr(error))

    def ended(self, answer: Any, problem: str, decided: Decided) -> None:
        self._out -= 1
        decision = None
        if not problem:
            try:
                decision = checked(answer)
            except Exception as error:
                problem = f"its answer cannot be used: {error}"
        if problem:
            self._failed(problem)
        decided(decision)

    def _failed(self, reason: str) -> None:
        self._counters["router_failures"] += 1
        _log.warning("a message goes without the router: %s", reason)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class _Call:
    """One question; the first end counts."""

    __slots__ = ("_decided", "_routers", "timer")

    def __init__(self, routers: Routers, decided: Decided) -> None:
        self._routers = routers
        self._decided: Decided | None = decided
        self.timer: asyncio.TimerHandle | None = None

    def end(self, answer: Any, problem: str) -> None:
        decided, self._decided = self._decided, None
        if decided is None:
            return
        if self.timer is not None:
            self.timer.cancel()
        self._routers.ended(answer, problem, decided)


def checked(answer: Any) -> RoutingDecision:
    """A decision that may be stored: of the right types, and small."""
    decision = msgspec.convert(msgspec.to_builtins(answer), RoutingDecision)
    if decision.target_topic:
        check_name(decision.target_topic, "target_topic")
    size = len(msgspec.json.encode(decision))
    if size > DECISION_BYTES_MAX:
        raise ValueError(f"it has {size} bytes, and {DECISION_BYTES_MAX} is the limit")
    return decision
