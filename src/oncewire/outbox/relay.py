"""The relay: empties both outboxes, each by a loop of its own, until it is stopped.

    async with relaying(client, url) as relay: …

Several relays may run side by side, in one process or on many machines. Each loop reconnects to PostgreSQL by itself;
while NATS or PostgreSQL is away nothing is claimed and no attempt is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oncewire._ground.database import postgres
from oncewire._ground.errors import OncewireError, Unavailable
from oncewire._ground.jetstream import Client
from oncewire._ground.metrics import Histogram
from oncewire._ground.settings import Settings, load
from oncewire._ground.tracing import Tracer
from oncewire.outbox import purge
from oncewire.outbox.conversations import Conversations
from oncewire.outbox.inspect import Count
from oncewire.outbox.messages import Messages
from oncewire.outbox.publish import OnStep
from oncewire.outbox.rules import PAUSE_MS_MAX, Pace, pause_ms, retry_ms
from oncewire.outbox.source import Source, Taken, transaction
from oncewire.outbox.wake import Wake

log = logging.getLogger("oncewire.outbox")

STOP_S_MAX: Final = 15.0
READY_S_MAX: Final = 5.0
PURGE_EVERY_S: Final = 60.0
DEAD_LETTER_RESERVE: Final = 16 * 1024
"""Kept free below max_payload by every publisher: enqueue refuses what would not leave it."""

SQL = postgres.queries("oncewire.outbox")


def _no_step(_: str) -> None:
    """Nobody watches."""


def _chosen(name: str) -> Any:
    """A field that is taken from the settings of this process unless it is passed."""
    return field(default_factory=lambda: getattr(load().settings, name))


@dataclass(frozen=True)
class RelayOptions:
    """`on_step` is told each step by its name before the next one; tests stop a process there."""

    poll_ms: int = _chosen("outbox_poll_interval_ms")
    batch_size: int = _chosen("outbox_batch_size")
    keep_s: int = _chosen("outbox_keep_s")
    prefix: str = _chosen("chat_events_prefix")
    schema: str = ""
    on_step: OnStep = _no_step
    tracer: Tracer | None = None


def options_of(settings: Settings, schema: str = "", tracer: Tracer | None = None) -> RelayOptions:
    """The options that the settings ask for."""
    return RelayOptions(
        poll_ms=settings.outbox_poll_interval_ms,
        batch_size=settings.outbox_batch_size,
        keep_s=settings.outbox_keep_s,
        prefix=settings.chat_events_prefix,
        schema=schema,
        tracer=tracer,
    )


class Relay:
    """Made by `relaying`, or run by itself with `run`."""

    def __init__(self, client: Client, url: str, options: RelayOptions) -> None:
        self._client = client
        self.url = url
        self.options = options
        self._wake = Wake(url, schema=options.schema, poll_ms=options.poll_ms)
        self._stopping = asyncio.Event()
        self._problems: dict[str, str] = {}
        self._is_idle: dict[str, bool] = {}
        self._helper: asyncio.Task[None] | None = None
        self.rows = dict.fromkeys((Conversations.name, Messages.name), 0)
        """Published so far, by outbox."""
        self.stored = {name: Histogram() for name in self.rows}
        self.waiting: Sequence[Count] = ()
        """What was found to wait when somebody last looked."""

    @property
    def published(self) -> int:
        return sum(self.rows.values())

    @property
    def problem(self) -> str:
        """What keeps it from its work just now, '' when nothing does."""
        return next(iter(self._problems.values()), "")

    @property
    def wake_ups(self) -> int:
        """Notifications of writers so far."""
        return self._wake.heard

    @property
    def is_notified(self) -> bool:
        """Whether writers can wake it; else it polls."""
        return self._wake.hears

    def stop(self) -> None:
        """Finish the pass at hand, then end."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until `stop`."""
        options = self.options
        messages = Messages(self._client, schema=options.schema, on_step=options.on_step, tracer=options.tracer)
        sources: list[Source] = [self._conversations(), messages]
        self._is_idle = {source.name: False for source in sources}
        others = [asyncio.create_task(self._wake.run()), asyncio.create_task(self._purge_now_and_then())]
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    group.create_task(self._keep_draining(source))
        finally:
            others += [self._helper] if self._helper else []
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _conversations(self) -> Conversations:
        options = self.options
        return Conversations(
            self._client,
            prefix=options.prefix,
            batch_size=options.batch_size,
            schema=options.schema,
            on_step=options.on_step,
            tracer=options.tracer,
        )

    async def _keep_draining(self, source: Source) -> None:
        """Drain on one connection after another."""
        failures = 0
        while not self._stopping.is_set():
            try:
                await self._client.connection.ready(time.monotonic() + READY_S_MAX)
                async with self._connected() as connection:
                    await self._drain(source, connection)
            except Exception as error:
                failures = failures + 1 if source.name in self._problems else 1
                self._tell(source.name, error)
                await self._wait(retry_ms(failures))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """A connection that this relay can use: prepared statements only where no pooler is in between."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S_MAX):
                await self._wake.is_known.wait()
        async with postgres.connected(self.url, cache_statements=self._wake.hears) as connection:
            body_bytes = self._client.server.max_payload - DEAD_LETTER_RESERVE
            async with transaction(connection, SQL["begin_claim"], self.options.schema):
                await connection.execute(SQL["set_body_bytes_max"], body_bytes)
            yield connection

    async def _drain(self, source: Source, connection: Any) -> None:
        """Pass after pass until it is stopped or something goes wrong."""
        pace, is_woken = Pace(), False
        while not self._stopping.is_set():
            began = _now_ms()
            is_idle = pace.is_idle(began) and not is_woken
            heard = self._wake.heard
            if is_idle and self._all_idle_but(source):
                await self._wake.advertise(connection)
            taken = await source.relay_once(connection)
            now = _now_ms()
            self._count(source, taken)
            self._problems.pop(source.name, None)
            is_busy = taken.rows > 0 or is_woken  # woken for nothing: another relay is quicker, and writers are busy
            pace = pace.after(is_busy, now)
            self._is_idle[source.name] = is_idle and not is_busy
            if is_busy:
                await self._wake.work_has_come(connection)
            if taken.has_more and isinstance(source, Conversations):
                self._call_for_help()
            is_woken = await self._rest(source, taken, now - began, heard)

    def _all_idle_but(self, source: Source) -> bool:
        """Whether a wake-up is welcome: while one outbox is busy, its writers would pay for the other's sleep."""
        return all(idle for name, idle in self._is_idle.items() if name != source.name)

    async def _rest(self, source: Source, taken: Taken, took_ms: float, heard: int) -> bool:
        """Wait before the next pass; returns whether a writer cut the wait short."""
        if taken.has_more:
            return False
        if not self._is_idle[source.name]:
            await self._wait(min(pause_ms(took_ms), self.options.poll_ms))
            return False
        longest = self._wake.sleep_ms_max if all(self._is_idle.values()) else PAUSE_MS_MAX
        return await self._sleep(min(longest, self._wake.sleep_ms_max), heard)

    def _call_for_help(self) -> None:
        """A backlog: a second pair of hands claims while the first one publishes. It goes when the backlog is gone."""
        if self._helper is None or self._helper.done():
            self._helper = asyncio.create_task(self._help())

    async def _help(self) -> None:
        source = self._conversations()
        with contextlib.suppress(OncewireError):  # the first pair of hands meets the same, and tells it
            async with self._connected() as connection:
                has_more = True
                while has_more and not self._stopping.is_set():
                    taken = await source.relay_once(connection)
                    self._count(source, taken)
                    has_more = taken.has_more

    def _count(self, source: Source, taken: Taken) -> None:
        self.rows[source.name] += taken.rows
        self.stored[source.name].observe_all(taken.ages_s)

    async def _wait(self, wait_ms: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                await self._stopping.wait()

    async def _sleep(self, wait_ms: float, heard: int) -> bool:
        """Wait, and be woken by a writer or by `stop`; returns whether a writer did it."""
        woken = asyncio.create_task(self._wake.sleep(wait_ms, heard))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((woken, stopped), return_when=asyncio.FIRST_COMPLETED)
            return woken.done() and woken.result()
        finally:
            woken.cancel()
            stopped.cancel()
            await asyncio.gather(woken, stopped, return_exceptions=True)

    def _tell(self, name: str, error: Exception) -> None:
        """Once per problem, not once per attempt. A bug of ours is told with its traceback, and does not end a relay:
        the other outbox, and every conversation that does not meet it, can go on."""
        told = f"{error.message} {error.hint}".strip() if isinstance(error, OncewireError) else repr(error)
        if self._problems.get(name) == told:
            return
        self._problems[name] = told
        level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
        bug = None if isinstance(error, OncewireError) else error
        log.log(level, "the relay of %s waits: %s", name, told, exc_info=bug)

    async def _purge_now_and_then(self) -> None:
        while True:
            try:
                async with postgres.connected(self.url, cache_statements=False) as connection:
                    await purge.purge(connection, self.options.keep_s, schema=self.options.schema)
            except OncewireError as error:
                log.info("purging waits: %s", error.message)
            await asyncio.sleep(PURGE_EVERY_S)


def _now_ms() -> float:
    return time.monotonic() * 1000


@contextlib.asynccontextmanager
async def relaying(client: Client, url: str, options: RelayOptions | None = None) -> AsyncIterator[Relay]:
    """A relay for the length of a block; it ends with the pass at hand."""
    relay = Relay(client, url, options or RelayOptions())
    task = asyncio.create_task(relay.run(), name="oncewire-relay")
    try:
        yield relay
    finally:
        relay.stop()
        await asyncio.wait((task,), timeout=STOP_S_MAX)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
