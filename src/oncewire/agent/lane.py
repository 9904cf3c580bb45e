"""The lane of `async def` handlers: many wait side by side, one writes at a time.

A handler runs in a task of its own and holds nothing while it waits. What it writes, it writes in one last section,
`async with ctx.tx as tx:`, which the committer lets in one by one inside a group's transaction; handlers that write
nothing join the next group when they return. Commits that fall together share one sync.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from oncewire.agent.batch import GroupCommit, Item, context_of
from oncewire.agent.context import encode_result, run_call
from oncewire.agent.effects import Effect, effects_of
from oncewire.errors import Refused, Unavailable

SECTIONS_MAX = 64
"""So many sections share one commit."""

Db = Callable[..., Awaitable[Any]]
Resolve = Callable[[list[Effect]], Awaitable[None]]
"""Finds the streams of effects beforehand, so that nothing waits for the network inside a transaction."""


class _Superseded(Exception):
    """Another process has settled this input meanwhile: what this one did is dropped."""


class Task:
    """One input in an `async def` handler."""

    def __init__(self, item: Item, lane: Lane) -> None:
        self.item = item
        self.lane = lane
        self.turn: asyncio.Future[Any] | None = None
        self.finished: asyncio.Future[list[Effect]] = asyncio.get_running_loop().create_future()
        self.has_section = False
        self.is_inside = False

    # ---- what the context needs

    def open_tx(self) -> Any:
        raise Refused("an `async def` handler writes in `async with ctx.tx as tx:`")

    def section(self) -> Any:
        return self._section()

    @contextlib.asynccontextmanager
    async def _section(self) -> Any:
        if self.has_section:
            raise Refused("ctx.tx is entered once, as the last section", hint="Put all writes into one block.")
        self.has_section = True
        self.turn = asyncio.get_running_loop().create_future()
        self.lane.ask(self)
        connection = await self.turn
        self.is_inside = True
        try:
            yield connection
        finally:
            self.is_inside = False

    async def once(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.has_section:
            raise Refused("ctx.once comes before ctx.tx", hint="The section holds the transaction: it must not wait.")
        recorded = await self.lane.read(self.item.key, name)
        if recorded is None:
            recorded = encode_result(await run_call(fn, args, kwargs))
            await self.lane.record(self.item.key, name, recorded)
        return msgspec.json.decode(recorded)

    async def run(self, timeout_s: float) -> None:
        """The handler from first to last; its result or error ends in `finished`."""
        handler = self.item.handler
        assert handler is not None
        assert self.item.input is not None
        context = context_of(self.item, self, is_async=True)
        try:
            async with asyncio.timeout(timeout_s):
                payload = self.item.input.envelope.payload
                returned = await (
                    handler.run(context) if handler.every_s else handler.run(context, handler.decode(payload))
                )
            result = effects_of(returned)
        except BaseException as error:
            if not self.finished.done():
                self.finished.set_exception(error if isinstance(error, Exception) else Unavailable("stopped"))
                self.finished.exception()
            if not isinstance(error, Exception):
                raise
        else:
            if not self.finished.done():
                self.finished.set_result(result)
        finally:
            self.lane.wake()


class Lane:
    """Runs the tasks and commits what they finish, in groups."""

    def __init__(self, db: Db, store: Any, turn: asyncio.Lock, concurrency: int) -> None:
        self._db = db
        self._store = store
        self._turn = turn
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: dict[asyncio.Task[None], Task] = {}
        self._asking: list[Task] = []
        self._wake = asyncio.Event()
        self.concurrency = concurrency

    @property
    def running(self) -> int:
        return len(self._tasks)

    def wake(self) -> None:
        self._wake.set()

    def ask(self, task: Task) -> None:
        self._asking.append(task)
        self.wake()

    async def read(self, key: bytes, name: str) -> bytes | None:
        async with self._turn:
            found: bytes | None = await self._db(self._store.call_result, key, name)
        return found

    async def record(self, key: bytes, name: str, result: bytes) -> None:
        async with self._turn:
            await self._db(self._store.keep_call, key, name, result)

    async def add(self, item: Item, timeout_s: float) -> None:
        """Start a handler; waits while as many run as may."""
        await self._slots.acquire()
        task = Task(item, self)
        running = asyncio.get_running_loop().create_task(task.run(timeout_s), name="oncewire-handler")
        self._tasks[running] = task

    def take_finished(self) -> list[Task]:
        """Handlers that returned or failed without a section: they join the next group."""
        done = [
            (running, task) for running, task in self._tasks.items() if task.finished.done() and not task.has_section
        ]
        for running, _ in done:
            self._drop(running)
        return [task for _, task in done]

    def take_asking(self) -> list[Task]:
        asking, self._asking = self._asking[:SECTIONS_MAX], self._asking[SECTIONS_MAX:]
        return asking

    def _drop(self, running: asyncio.Task[None]) -> None:
        del self._tasks[running]
        self._slots.release()

    async def wait(self, timeout_s: float) -> bool:
        """Until something finished or asks for its section."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._wake.clear()
        return bool(self._asking) or any(task.finished.done() for task in self._tasks.values())

    async def let_in(self, task: Task, group: GroupCommit, resolve: Resolve, timeout_s: float) -> None:
        """One section: its writes and its outcome, or neither."""
        assert task.turn is not None
        running = next((running for running, one in self._tasks.items() if one is task), None)
        if task.turn.done() or running is None:
            return
        await self._db(self._store.savepoint)
        task.turn.set_result(self._store.connection)
        try:
            async with asyncio.timeout(timeout_s):
                effects = await asyncio.shield(task.finished)
            await resolve(effects)
            group.finish_async(task.item, effects)
            await self._db(self._store.keep)
        except Exception as error:
            await self._db(self._store.undo)
            group.fail(task.item, error)
        finally:
            self._drop(running)

    def turn_away(self, task: Task) -> None:
        """Somebody else has settled it: the handler's section is refused, and its result is dropped."""
        running = next((running for running, one in self._tasks.items() if one is task), None)
        if task.turn is not None and not task.turn.done():
            task.turn.set_exception(_Superseded())
        if running is not None:
            self._drop(running)

    async def stop(self) -> None:
        for running in list(self._tasks):
            running.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
