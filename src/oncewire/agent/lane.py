"""The lane of `async def` handlers: many wait side by side, one writes at a time.

A handler runs in a task of its own and holds nothing while it waits. What it writes, it writes in one last section,
`async with ctx.tx as tx:`, which the lane lets in one by one inside a group's transaction; handlers that write nothing
join the next group when they return. Commits that fall together share one sync.

When the store refuses a group for now, handlers that had returned join a later one; those whose section was undone run
again from the start, in place: what they called outside is recorded, and the input stays in hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import msgspec

from oncewire._ground import logs
from oncewire._ground.errors import Corrupt, NotConnected, Refused, TimedOut, Unavailable
from oncewire._ground.ledger.tx import Tx, ended
from oncewire.agent import traces
from oncewire.agent.batch import GroupCommit, Item, PowerCut, Settled, context_of
from oncewire.agent.commits import RETRY_FIRST_S, RETRY_MAX_S, SESSION_LOSSES_MAX, Commits, Settling
from oncewire.agent.context import Section, encode_result, run_call
from oncewire.agent.effects import Effect, effects_of
from oncewire.agent.ends import failure_of, is_signal

SECTIONS_MAX = 64
"""So many sections share one commit."""
SECTION_S = 5.0
"""So long a section may hold the transaction: it is for writing, not for waiting."""
WAIT_S = 1.0


_calling: ContextVar[frozenset[str]] = ContextVar("_calling", default=frozenset())
"""Names of the calls that this code runs inside of."""


class _Superseded(Exception):
    """Another process has settled this input meanwhile: what this one did is dropped."""


class Task:
    """One input in an `async def` handler."""

    def __init__(self, item: Item, lane: Lane, pull: Settling, token: int, max_deliver: int) -> None:
        self.item = item
        self.lane = lane
        self.pull = pull
        self.token = token
        self.max_deliver = max_deliver
        self.running: asyncio.Task[None] | None = None
        self.turn: asyncio.Future[Tx] | None = None
        self.undone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Its section raised, or was given up before its turn: nothing of it stays."""
        self.finished: asyncio.Future[list[Effect]] = asyncio.get_running_loop().create_future()
        self.is_inside = False
        self.losses = 0
        """How often the store's session ended inside its section."""
        self.is_ended = False
        """We stop it: what it raises then is not its own."""
        self._calls: dict[str, asyncio.Lock] = {}
        self.begun = time.monotonic()
        self.began_ns = time.time_ns()

    # ---- what the context needs

    @property
    def history(self) -> Any:
        raise Refused("an `async def` handler does not hold the ledger")

    def tx(self, _: object) -> Section:
        return Section(self._enter, self._leave)

    async def _enter(self) -> Tx:
        if self.finished.done():
            raise ended()
        if self.turn is not None:
            raise Refused("ctx.tx is entered once, as the last section", hint="Put all writes into one block.")
        self.turn = asyncio.get_running_loop().create_future()
        self.lane.ask(self)
        try:
            tx = await self.turn
        except BaseException:
            self._leave(is_good=False)
            raise
        self.is_inside = True
        return tx

    def _leave(self, is_good: bool) -> None:
        self.is_inside = False
        if not is_good and not self.undone.done():
            self.undone.set_result(None)

    @property
    def has_section(self) -> bool:
        """Whether it waits for its turn to write, or has written what may stay."""
        return self.turn is not None and not self.undone.done()

    def refuse_turn(self) -> None:
        """It is settled: a background task of it that still asks to write is too late."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_exception(ended())
            self.turn.exception()

    async def once(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under one name it is one call, also for those who ask side by side."""
        if self.turn is not None:
            raise Refused("ctx.once comes before ctx.tx", hint="The section holds the transaction: it must not wait.")
        outer = _calling.get()
        if name in outer:
            raise Refused(f"ctx.once({name!r}) is called inside itself", hint="Give the inner call another name.")
        token = _calling.set(outer | {name})
        try:
            async with self._calls.setdefault(name, asyncio.Lock()):
                recorded = await self._recorded(name, fn, args, kwargs)
        finally:
            _calling.reset(token)
        return msgspec.json.decode(recorded)

    async def _recorded(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bytes:
        recorded = await self.lane.read_call(self.item.key, name)
        if recorded is None:
            made = self.lane.made.get((self.item.key, name))
            if made is None:
                made = encode_result(await run_call(fn, args, kwargs))
            recorded = await self.lane.record_call(self.item.key, name, made)
        return recorded

    # ---- running

    def start(self, timeout_s: float) -> None:
        self.running = asyncio.get_running_loop().create_task(self._run(timeout_s), name="oncewire-handler")

    async def _run(self, timeout_s: float) -> None:
        """The handler from first to last; its result or error ends in `finished`. Nothing that it raises leaves its
        task, or it would end the loop."""
        try:
            result = effects_of(await self._handle(timeout_s))
        except PowerCut:
            self._fail(Unavailable("stopped"))
            raise
        except BaseException as error:
            is_stopped = self.is_ended and isinstance(error, asyncio.CancelledError)
            self._fail(Unavailable("stopped") if is_stopped or is_signal(error) else failure_of(error))
            if is_stopped or is_signal(error):
                raise
        else:
            if not self.finished.done():
                self.finished.set_result(result)
        finally:
            self.lane.wake()

    def _fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
            self.finished.exception()

    async def _handle(self, timeout_s: float) -> object:
        handler, input_ = self.item.handler, self.item.input
        assert handler is not None
        assert input_ is not None
        context = context_of(self.item, self)
        logs.trace_id.set(input_.envelope.trace_id)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                with traces.around(self.lane.commits.tracer, self.item):
                    return await handler.run(context, handler.decode(input_.envelope.payload))
        except TimeoutError:
            if limit.expired():
                raise TimedOut(f"handler {handler.name} took longer than {timeout_s:g} s") from None
            raise

    async def end(self) -> None:
        """Nothing of it may run on: it could still write into the transaction."""
        self.is_ended = True
        if self.running is not None and not self.running.done():
            self.running.cancel()
            await asyncio.wait([self.running])


class Lane:
    """Runs the tasks and commits what they finish, in groups."""

    def __init__(self, commits: Commits, concurrency: int, handler_timeout_s: float) -> None:
        self.commits = commits
        self.concurrency = concurrency
        self.handler_timeout_s = handler_timeout_s
        self.listeners: list[Callable[[], None]] = []
        self._waiting: deque[Task] = deque()
        self._tasks: dict[bytes, Task] = {}
        self._asking: list[Task] = []
        self._keys: dict[bytes, int] = {}
        self.made: dict[tuple[bytes, str], bytes] = {}
        """Results of calls that the store has not taken yet."""
        self._wake = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self._singly = 0
        """After a group failed: so many tasks are to be committed one by one."""

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def in_hand(self) -> int:
        return len(self._tasks) + len(self._waiting)

    @property
    def room(self) -> int:
        """How many more may come: those that can run, and a few that wait for the next free place."""
        return self.concurrency + max(1, self.concurrency // 4) - self.in_hand

    def items(self) -> list[Item]:
        """All inputs in hand."""
        return [task.item for task in (*self._tasks.values(), *self._waiting)]

    def has(self, key: bytes) -> bool:
        """Whether this input is in a handler here: a copy of it must wait, or both would call outside."""
        return key in self._keys

    def wake(self) -> None:
        self._wake.set()

    def ask(self, task: Task) -> None:
        self._asking.append(task)
        self.wake()

    async def read_call(self, key: bytes, name: str) -> bytes | None:
        async with self.commits.turn:
            found: bytes | None = await self.commits.db(self.commits.store.call_result, key, name)
        return found

    async def record_call(self, key: bytes, name: str, result: bytes) -> bytes:
        """The result that counts: the first one recorded, whoever called. A store that is full or away is waited for,
        and a handler that runs out of time meanwhile finds the result here at its next delivery: as long as this
        process lives, the call is not made again."""
        store, recorded = self.commits.store, list[bytes]()

        def keep() -> None:
            store.keep_call(key, name, result)
            recorded.append(store.call_result(key, name) or result)

        self.made[key, name] = result
        if not await self.commits.insist(keep):
            raise Unavailable("the agent stops before the result of a call is recorded")
        del self.made[key, name]
        self.commits.at("called")
        return recorded[0]

    # ---- tasks

    def add(self, item: Item, pull: Settling, token: int, max_deliver: int) -> None:
        """Start a handler, or let it wait while as many run as may."""
        self.idle.clear()
        self._waiting.append(Task(item, self, pull, token, max_deliver))
        self._keys[item.key] = self._keys.get(item.key, 0) + 1
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._tasks) < self.concurrency:
            self._start(self._waiting.popleft())

    def _start(self, task: Task) -> None:
        handler = task.item.handler
        assert handler is not None
        keepalive, reply = self.commits.keepalive, task.item.message.reply
        keepalive.release(task.token)
        task.token = keepalive.watch([reply])
        self._tasks[reply] = task
        task.start(handler.timeout_s or self.handler_timeout_s)

    def _drop(self, task: Task) -> None:
        """It has left the lane; its message is settled by whoever calls this."""
        self._tasks.pop(task.item.message.reply, None)
        task.refuse_turn()
        key = task.item.key
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
        self._start_waiting()
        if not self.in_hand:
            self.idle.set()
        for tell in self.listeners:
            tell()

    # ---- committing

    async def run(self) -> None:
        """Group commits of what handlers finish or ask to write, for ever."""
        delay_s = RETRY_FIRST_S
        while True:
            finished, asking = await self._next_group()
            if not finished and not asking:
                continue
            try:
                settled = await self._commit(finished, asking)
            except Corrupt:
                raise
            except Exception as problem:
                self.commits.note(problem)
                await self._undo(finished, asking, problem)
                await self.commits.stopped_within(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
            else:
                delay_s = RETRY_FIRST_S
                self._singly = max(0, self._singly - len(finished) - len(asking))
                await self._finish(settled, [*finished, *asking])

    async def _next_group(self) -> tuple[list[Task], list[Task]]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._wake.wait()
        self._wake.clear()
        ready = [task for task in self._tasks.values() if task.finished.done() and not task.has_section]
        finished = ready[:1] if self._singly else ready
        count = max(0, 1 - len(finished)) if self._singly else SECTIONS_MAX
        asking, self._asking = self._asking[:count], self._asking[count:]
        if self._asking or len(ready) > len(finished):
            self.wake()
        return finished, [
            task for task in asking if self._tasks.get(task.item.message.reply) is task and task.has_section
        ]

    async def _commit(self, finished: list[Task], asking: list[Task]) -> Settled:
        commits = self.commits
        group = commits.group(finished[0].max_deliver if finished else asking[0].max_deliver)
        if commits.tracer is not None:
            group.began_ns = {task.item.at_key: task.began_ns for task in (*finished, *asking)}
        async with commits.turn:
            marks = commits.take_marks()
            try:
                found = await commits.db(group.begin, [task.item for task in (*finished, *asking)])
                for task in finished:
                    await self._settle(group, task, found)
                for task in [*asking]:
                    if not await self._let_in(group, task, found):
                        asking.remove(task)
                settled: Settled = await commits.db(group.end, commits.targets.last, marks)
            except BaseException as problem:
                commits.marks = marks + commits.marks
                if isinstance(problem, NotConnected):
                    for task in asking:
                        task.losses += task.turn is not None and task.turn.done()
                await commits.db(commits.store.rollback)
                raise
            commits.opened(settled)
        return settled

    async def _is_settled(self, group: GroupCommit, task: Task, found: dict[bytes, Any]) -> bool:
        """Settled by somebody else meanwhile: what this handler did is dropped."""
        item = task.item
        group.limits = group.limits._replace(max_deliver=task.max_deliver)
        if item.key in found or item.at_key in found or group.has_settled(item.key):
            await self.commits.db(group.decide, item, found)
            return True
        return False

    async def _settle(self, group: GroupCommit, task: Task, found: dict[bytes, Any]) -> None:
        """A handler that wrote nothing has returned or failed."""
        if await self._is_settled(group, task, found):
            return
        try:
            effects = task.finished.result()
            await self._resolve(effects)
        except Exception as error:
            await self.commits.db(group.fail, task.item, error)
        else:
            await self.commits.db(group.finish_async, task.item, effects)

    async def _let_in(self, group: GroupCommit, task: Task, found: dict[bytes, Any]) -> bool:
        """One section: its writes and its outcome, or neither. False when its section was undone and it is still
        running: it is settled in a later group, like one that wrote nothing."""
        assert task.turn is not None
        commits = self.commits
        if await self._is_settled(group, task, found):
            await task.end()
            return True
        if task.finished.done():  # it ran out of time while it waited for its turn
            await self._settle(group, task, found)
            return True
        if task.turn.done():
            return False
        task.turn.set_result(await commits.db(commits.store.savepoint))
        effects: list[Effect] = []
        try:
            await self._section_of(task)
            if not task.undone.done():
                effects = task.finished.result()
                await self._resolve(effects)
        except Exception as error:
            await task.end()
            await commits.db(commits.store.undo)
            await commits.db(group.fail, task.item, error)
            return True
        if not task.undone.done():
            is_good = await commits.db(group.finish_async, task.item, effects)
            await commits.db(commits.store.keep if is_good else commits.store.undo)
            return True
        await commits.db(commits.store.undo)
        if task.finished.done():
            await self._settle(group, task, found)
        return task.finished.done()

    async def _section_of(self, task: Task) -> None:
        """Until the handler returns, or its section raised."""
        ends: list[asyncio.Future[Any]] = [task.finished, task.undone]
        await asyncio.wait(ends, timeout=SECTION_S, return_when=asyncio.FIRST_COMPLETED)
        if not task.finished.done() and not task.undone.done():
            raise TimedOut(
                f"ctx.tx was held for more than {SECTION_S:g} s", hint="Wait before the section, write inside it."
            )
        if task.is_inside:
            raise Refused(
                "the handler returned before its section of ctx.tx had ended",
                hint="Wait for what writes in it before the return.",
            )

    async def _resolve(self, effects: list[Effect]) -> None:
        """Find the streams of effects beforehand: nothing waits for the network in the ledger's thread."""
        for effect in effects:
            await self.commits.targets.resolve(effect.subject)

    async def _undo(self, finished: list[Task], asking: list[Task], problem: Exception) -> None:
        """Nothing of the group is durable. Its tasks join later groups, one by one; sections run again."""
        tasks = [*finished, *asking]
        self._singly = max(self._singly, len(tasks))
        has_failed = not isinstance(problem, Unavailable) or tasks[0].losses >= SESSION_LOSSES_MAX
        if len(tasks) == 1 and has_failed:
            await tasks[0].end()
            settled = await self.commits.fail(tasks[0].item, problem, tasks[0].max_deliver)
            if settled is not None:
                self._singly -= 1
                await self._finish(settled, tasks)
                return
        for task in asking:
            await task.end()
            again = Task(task.item, self, task.pull, task.token, task.max_deliver)
            again.losses = task.losses
            self._start(again)
        self.wake()

    async def _finish(self, settled: Settled, tasks: list[Task]) -> None:
        """Publish and ack beside the next group; then the places are free."""
        if not tasks:
            return
        now = time.monotonic()
        self.commits.handling.observe_all([now - task.begun for task in tasks])
        await self.commits.finish_soon(tasks[0].pull, settled, [task.token for task in tasks])
        for task in tasks:
            self._drop(task)

    async def stop(self) -> list[Task]:
        """Cancel what still runs; those inputs come back."""
        left = [*self._tasks.values(), *self._waiting]
        for task in left:
            await task.end()
        self._tasks.clear()
        self._waiting.clear()
        return left
