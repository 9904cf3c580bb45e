"""An agent under test: its handlers, the ledger's rules, SQLite in memory; no server, no waiting, no wall clock.

    with AgentTest(agent) as t:
        t.send("charge", {"id": "o1", "cents": 4200})
        t.redeliver()
        assert [effect.payload for effect in t.effects] == [{"order": "o1"}]

What is committed, published and acked is decided by the code that runs in production; only the streams, the clock and
the disk are stand-ins. Effects are not fed back to the agent: send what should come next.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

import msgspec

from oncewire._ground.contracts.message import MessageEnvelope
from oncewire._ground.contracts.runtime import RuntimeEnvelope
from oncewire._ground.errors import Refused
from oncewire._ground.jetstream.client import encode_payload
from oncewire._ground.jetstream.protocol import Message, encode_headers
from oncewire._ground.ledger.rules import Source
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.topology import Topology, durable_name
from oncewire.agent.agent import Agent
from oncewire.agent.batch import PowerCut, Settled
from oncewire.agent.commits import Commits
from oncewire.agent.handlers import Handler, full_subject
from oncewire.agent.lane import Lane
from oncewire.agent.read import Reading
from oncewire.agent.upkeep import tick_of
from oncewire.testing.wire import DeadLetter, Published, Streams, Wire

START_MS: Final = 1_767_225_600_000
"""The first of January 2026: where the clock of every test begins."""
CREATED: Final = "2026-01-01T00:00:00Z"
STREAM: Final = "TEST"
LIMIT_S: Final = 60.0
"""Only bounds a hang."""
STEPS: Final = {
    "receive": "fetched",
    "apply": "handled",
    "call": "called",
    "persist": "committed",
    "publish": "published",
    "ack": "acked",
}
"""The steps after which a process may die, and what the runtime calls them."""

T = TypeVar("T")


class Handled(msgspec.Struct, frozen=True):
    """What became of an input: `done`, `duplicate`, `redelivered`, `retried`, `terminated`, `dead`, `passed`, or
    `crashed`. A retry comes by itself once its time is reached by `advance`."""

    outcome: str
    error: str = ""


class _Input:
    """A message in the test's own stream, and how often it was delivered."""

    def __init__(self, sequence: int, subject: str, body: bytes, header: bytes, timestamp_ns: int) -> None:
        self.sequence = sequence
        self.subject = subject
        self.body = body
        self.header = header
        self.timestamp_ns = timestamp_ns
        self.deliveries = 0
        self.due_ms: float | None = None

    def next_delivery(self, consumer: str) -> Message:
        self.deliveries += 1
        self.due_ms = None
        place = f"{self.deliveries}.{self.sequence}.{self.sequence}.{self.timestamp_ns}.0"
        reply = f"$JS.ACK.{STREAM}.{consumer}.{place}"
        return Message(0, self.subject.encode(), reply.encode(), self.header, self.body)


class AgentTest:
    """See the module's head. `with` runs the agent's lifespan hook and closes the ledger at the end."""

    def __init__(self, agent: Agent, *, topology: Topology | None = None) -> None:
        self.agent = agent
        self.now_ms = START_MS
        self._wire = Wire()
        self._streams = Streams(topology)
        self._store = SqliteStore(":memory:")
        self._inputs: list[_Input] = []
        self._step = ""
        self._has_crashed = False
        self._commits: Commits | None = None
        self._committing: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="oncewire-agent-test", daemon=True)
        self._thread.start()
        self._is_closed = False
        try:
            self._run(self._open())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> AgentTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_loop(self) -> None:
        """A task that a handler started and that calls `sys.exit()` breaks off a loop. Its handler is told, so the loop
        goes on."""
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
                return

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """In a loop of its own, so that it works in sync and in async tests alike."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    # ---- what a test does

    def send(
        self,
        subject: str,
        payload: Any,
        *,
        type: str = "",  # noqa: A002 - the envelope's own name
        key: str = "",
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Handled:
        """A message arrives. A name without dots is the agent's own command. Bytes and envelopes go as they are, all
        else as the payload of an envelope: `key` is its idempotency key, `fields` are further fields of it."""
        full = full_subject(subject, self.agent.tenant, self.agent.workspace, self.agent.name)
        if isinstance(payload, bytes | MessageEnvelope | RuntimeEnvelope):
            body = encode_payload(payload)
        else:
            built = payload.model_dump(mode="json") if hasattr(payload, "model_dump") else msgspec.to_builtins(payload)
            named = {"idempotency_key": key} if key else {}
            body = encode_payload({"type": type or full.rpartition(".")[2], "payload": built, **named, **fields})
        header = encode_headers(headers) if headers else b""
        input_ = _Input(len(self._inputs) + 1, full, body, header, self.now_ms * 1_000_000 + len(self._inputs))
        self._inputs.append(input_)
        return self._run(self._deliver(input_))

    def redeliver(self) -> Handled:
        """The last input comes again, as after a crash or a lost ack."""
        if not self._inputs:
            raise Refused("nothing was sent yet", hint="Call send first.")
        return self._run(self._deliver(self._inputs[-1]))

    def crash_after(self, step: str) -> None:
        """The next input makes the process die right after this step; the one after that starts it again."""
        if step not in STEPS:
            raise Refused(f"no step is called {step!r}", hint=f"There are: {', '.join(STEPS)}.")
        self._step = STEPS[step]

    def restart(self) -> None:
        """Start the process again: what was persisted and not published goes out."""
        self._run(self._start())

    def advance(self, seconds: float) -> None:
        """Let time pass: delayed effects go out, retries come again, `every` handlers run once per slot."""
        self._run(self._advance(self.now_ms + int(seconds * 1000)))

    # ---- what a test looks at

    @property
    def effects(self) -> list[Published]:
        """What stands in the streams, in order, each once."""
        return list(self._wire.effects)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        return list(self._wire.dead_letters)

    @property
    def state_hash(self) -> str:
        return self._store.head().state.hex()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of the handlers' own tables."""
        return [tuple(row) for row in self._store.connection.execute(query, values)]

    def execute(self, statement: str, *values: Any) -> None:
        """Set something up in the handlers' database."""
        self._store.connection.execute(statement, values)

    # ---- how it works

    async def _open(self) -> None:
        await self._stack.enter_async_context(self.agent.lifespan(self.agent))
        agent = self.agent
        self._ledger = self._store.open(agent.tenant, agent.workspace, agent.name)
        self._consumer = durable_name(agent.name, agent.tenant, agent.workspace)
        filters = tuple(handler.pattern for handler in agent.handlers)
        source = Source(STREAM, CREATED, self._consumer, filters, 1, False)
        self._sources = {source.durable: source}
        self._reading = Reading(agent, self._ledger, [source])
        await self._start()

    async def _start(self) -> None:
        """A fresh process on the same ledger: what was left open is published first."""
        await self._stop()
        self._has_crashed = False
        commits = Commits(
            self._store, _at_once, self._ledger, self._sources, self._streams, self._wire, self._wire, self._at,
            lambda: self.now_ms,
        )  # fmt: skip
        self._lane = Lane(commits, self.agent.concurrency, self.agent.handler_timeout_s)
        self._committing = asyncio.get_running_loop().create_task(self._lane.run())
        self._commits = commits
        for number, holes in self._store.unconfirmed():
            block = self._store.block(number)
            assert block is not None
            marks, _ = await self._wire.resend(block, holes)
            commits.marks += marks

    async def _stop(self) -> None:
        if self._committing is not None:
            await self._lane.stop()
            self._committing.cancel()
            await asyncio.gather(self._committing, *self._finishing(), return_exceptions=True)
            self._store.rollback()

    def _finishing(self) -> list[asyncio.Task[None]]:
        return list(self._commits.finishing) if self._commits else []

    def _at(self, step: str) -> None:
        if step == self._step:
            self._step = ""
            self._has_crashed = True
            self._lane.idle.set()
            raise PowerCut

    async def _deliver(self, input_: _Input) -> Handled:
        if self._has_crashed:
            await self._start()
        commits = self._commits
        assert commits is not None
        before = dict(commits.counts)
        message = input_.next_delivery(self._consumer)
        try:
            self._at("fetched")
            async for settled in commits.commit(self._reading.read([message]), self.agent.max_deliver):
                await self._finish(commits, settled)
        except PowerCut:
            pass
        if self._has_crashed:
            return Handled("crashed")
        delay_s = self._wire.nakked.pop(message.reply, None)
        if delay_s is not None:
            input_.due_ms = self.now_ms + delay_s * 1000
        return self._handled(input_, before, commits.counts)

    async def _finish(self, commits: Commits, settled: Settled) -> None:
        await commits.finish(self._wire, settled)
        for item in settled.later:
            self._lane.add(item, self._wire, 0, self.agent.max_deliver)
        await self._lane.idle.wait()
        for finishing in self._finishing():
            with contextlib.suppress(PowerCut):
                await finishing

    def _handled(self, input_: _Input, before: dict[str, int], after: dict[str, int]) -> Handled:
        outcome = next((name for name, count in after.items() if count > before.get(name, 0)), "")
        if outcome in ("dead", "terminated"):
            return Handled(outcome, self._wire.dead_letters[-1].cause)
        errors = [one.error for one in self._store.attempts() if one.sequence == input_.sequence]
        return Handled(outcome, errors[-1] if outcome == "retried" and errors else "")

    async def _advance(self, until_ms: int) -> None:
        while (next_ms := self._next_ms()) <= until_ms:
            self.now_ms = max(self.now_ms, int(next_ms))
            if self._has_crashed:
                await self._start()
            assert self._commits is not None
            for input_ in [one for one in self._inputs if one.due_ms is not None and one.due_ms <= next_ms]:
                await self._deliver(input_)
            with contextlib.suppress(PowerCut):
                await self._commits.send_due()
            for handler in self.agent.handlers:
                if handler.every_s and self.now_ms % int(handler.every_s * 1000) == 0:
                    await self._tick(handler)
        self.now_ms = until_ms

    def _next_ms(self) -> float:
        """When something happens next."""
        times: list[float] = [one.due_ms for one in self._inputs if one.due_ms is not None]
        if (due_ms := self._store.next_due_ms()) is not None:
            times.append(due_ms)
        spans = [int(handler.every_s * 1000) for handler in self.agent.handlers if handler.every_s]
        times += [(self.now_ms // span + 1) * span for span in spans]
        return min(times, default=float("inf"))

    async def _tick(self, handler: Handler) -> None:
        _, body = tick_of(self.agent, handler, self.now_ms // int(handler.every_s * 1000))
        timestamp_ns = self.now_ms * 1_000_000
        input_ = _Input(len(self._inputs) + 1, handler.pattern, encode_payload(body), b"", timestamp_ns)
        self._inputs.append(input_)
        await self._deliver(input_)

    # ---- the end

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self._run(self._close())
            finally:
                self._end_loop()

    async def _close(self) -> None:
        await self._stop()
        await self._stack.aclose()
        self._store.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _at_once(function: Any, *args: Any) -> Any:
    return function(*args)
