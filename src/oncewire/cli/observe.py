"""What a service tells whoever watches it, on a listener of its own: /metrics, /healthz, /readyz.

    /healthz   200 as long as this process answers at all: what restarts a process looks here, and only here. A server
               that is away is not mended by a restart.
    /readyz    200 while work may be sent here (`ready`, or `degraded` with what does not hold), else 503. Each check
               with its remedy, by doctor's own judgement.
    /metrics   Prometheus' text, of all parts in this process

Nothing is asked of anybody before somebody looks, and then at most once in a while: many watchers cost what one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

import oncewire
from oncewire._ground import doctor, http
from oncewire._ground.checks import OFF, split_address
from oncewire._ground.doctor import Check, Verdict
from oncewire._ground.errors import OncewireError, PermissionDenied
from oncewire._ground.http import metrics as http_metrics
from oncewire._ground.jetstream import Client
from oncewire._ground.jetstream import metrics as jetstream_metrics
from oncewire._ground.metrics import CONTENT_TYPE, Page
from oncewire._ground.monitor import Promise, durability
from oncewire._ground.settings import Settings, mask_url
from oncewire._ground.tracing import Tracer
from oncewire._ground.tracing.otel import exporting
from oncewire.cli import edge, facts
from oncewire.embedded.folder import DataFolder

OPTIONS: Final = ("metrics_listen", "log_format", "log_level", "traces")
"""Settings that every command has that runs a service."""
UP_LISTEN: Final = "127.0.0.1:9464"
"""Where `up` serves them unless told otherwise."""
FRESH_S: Final = 2.0
"""So old an answer of servers may be."""
LOOK_S_MAX: Final = 5.0
STOP_S: Final = 1.0
STATUS: Final = {Verdict.OK: "ready", Verdict.WARNING: "degraded", Verdict.BROKEN: "not ready"}
_LEVELS: Final = {Verdict.OK: 0, Verdict.WARNING: 1, Verdict.BROKEN: 2}
_PROMISES: Final = {Promise.UNKNOWN: 0, Promise.CRASH: 1, Promise.POWER: 2}
_BEGAN: Final = time.time()
_log = logging.getLogger("oncewire.observe")


TracerOf = Callable[[str], Tracer | None]
"""Gives each part its tracer, None where traces are off."""


async def _nothing_to_ask() -> None:
    """Most parts know all they tell."""


@dataclass(frozen=True)
class Watched:
    """A part of this process. `trouble` says why it cannot work, `look` asks servers for what `collect` shows."""

    name: str
    collect: Callable[[Page], None]
    trouble: Callable[[], str]
    look: Callable[[], Awaitable[None]] = _nothing_to_ask


@dataclass
class Seen:
    """What servers said when they were last asked."""

    nats: doctor.Nats | None = None
    postgres: doctor.Postgres | None = None
    losses: dict[str, list[str]] | None = None
    at: float = -1e9


class Observer:
    """Made by whoever runs a service; parts are added as they begin."""

    def __init__(
        self,
        settings: Settings,
        client: Client | None = None,
        *,
        part: facts.Part = lambda whole: whole,
        postgres_url: str = "",
        sees_losses: bool = False,
        tracer: TracerOf = lambda _: None,
    ) -> None:
        self.settings = settings
        self.client = client
        """By which servers are asked; None for a service that needs none."""
        self._part = part
        self._postgres_url = postgres_url
        self._sees_losses = sees_losses
        self.tracer = tracer
        self._parts: dict[str, Watched] = {}
        self._clients: dict[str, Client] = {}
        self._seen = Seen()
        self._looking: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self.server: http.Server | None = None

    def watch(self, part: Watched, client: Client | None = None) -> None:
        self._parts[part.name] = part
        if client is not None:
            self._clients[part.name] = client

    # ---- asking

    async def look(self) -> None:
        """Ask servers, unless somebody just did."""
        if time.monotonic() - self._seen.at < FRESH_S:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="oncewire-observe")
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        seen = Seen()
        asked = [self._within(self._ask_nats(seen)), self._within(self._ask_postgres(seen))]
        asked += [self._within(part.look()) for part in list(self._parts.values())]
        await asyncio.gather(*asked)
        if seen.nats is None and self.client is not None:
            seen.nats = doctor.Nats(facts.shown(self.settings), error="NATS did not answer in time")
        if seen.postgres is None and self._postgres_url:
            seen.postgres = doctor.Postgres(mask_url(self._postgres_url), error="PostgreSQL did not answer in time")
        seen.at = time.monotonic()
        self._seen = seen

    async def _within(self, asked: Awaitable[None]) -> None:
        """A server that is slow or away is a fact, not a reason to hang; and watchers are answered whatever happens."""
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                await asked
        except (TimeoutError, OncewireError):
            return
        except Exception:
            _log.exception("what a service tells could not be looked up")

    async def _ask_nats(self, seen: Seen) -> None:
        if self.client is None:
            return
        seen.nats = await facts.nats_facts_by(self.client, self.settings, self._part)
        if self._sees_losses and not seen.nats.error:
            seen.losses = await facts.open_losses(self.client)

    async def _ask_postgres(self, seen: Seen) -> None:
        if self._postgres_url:
            seen.postgres = await facts.postgres_facts(self._postgres_url)

    # ---- telling

    def checks(self) -> list[Check]:
        """The judgement over what was seen last."""
        seen, parts = self._seen, {name: part.trouble() for name, part in self._parts.items()}
        if seen.nats is None:
            return doctor.own(parts)
        folder = facts.folder_facts(DataFolder.at(self.settings.data))
        losses = None if seen.losses is None else [one for told in seen.losses.values() for one in told]
        return doctor.ready(seen.nats, seen.postgres, folder, losses, parts)

    def histograms(self) -> dict[str, list[int]]:
        """What the parts of this process have counted so far, without asking anybody."""
        page = Page()
        for part in self._parts.values():
            part.collect(page)
        return page.counts()

    def collect(self, page: Page) -> None:
        self._collect_process(page)
        checks = self.checks()
        page.put("oncewire_readiness_ready", doctor.worst(checks) is not Verdict.BROKEN)
        for check in checks:
            page.put("oncewire_readiness_check", _LEVELS[check.verdict], check=check.name)
        seen = self._seen
        if seen.nats is not None and not seen.nats.error:
            promise = durability(seen.nats.jsz, seen.nats.server_id).promise
            page.put("oncewire_readiness_durability", _PROMISES[promise])
            for name, held in seen.nats.held.items():
                page.put("oncewire_stream_messages", held.messages, stream=name)
                page.put("oncewire_stream_bytes", held.bytes, stream=name)
                page.put(
                    "oncewire_stream_full_ratio", held.bytes / held.bytes_max if held.bytes_max else 0, stream=name
                )
            self._collect_losses(page, seen.losses, seen.nats.held)
        for part in self._parts.values():
            part.collect(page)
        for name, client in self._clients.items():
            jetstream_metrics.collect(page, client, name)
        if self.server is not None:
            http_metrics.collect(page, self.server, "metrics")

    @staticmethod
    def _collect_losses(page: Page, losses: dict[str, list[str]] | None, streams: Iterable[str]) -> None:
        if losses is not None:
            for name in {*streams, *losses}:
                page.put("oncewire_stream_losses", len(losses.get(name, ())), stream=name)

    @staticmethod
    def _collect_process(page: Page) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        page.put("oncewire_process_info", 1, version=oncewire.__version__)
        page.put("oncewire_process_start_time_seconds", _BEGAN)
        page.put("oncewire_process_cpu_seconds_total", used.ru_utime + used.ru_stime)
        page.put("oncewire_process_resident_bytes", _resident_bytes(used.ru_maxrss))

    # ---- over HTTP

    def routes(self) -> http.Routes:
        table = http.Routes(lambda request: request.refuse(404, "NOT_FOUND", "there are /metrics, /healthz, /readyz"))
        table.add("GET", "/healthz", lambda request: request.respond(200, b'{"status":"ok"}'), action=http.OPEN)
        table.add("GET", "/readyz", lambda request: self._answer(self._readyz(request)), action=http.OPEN)
        table.add("GET", "/metrics", self._figures, action="metrics")
        return table

    def _figures(self, request: http.Request) -> None:
        """All of this process, whoever's it is."""
        if request.principal is not http.ANYONE and not request.principal.holds(http.EVERY_TENANT):
            raise PermissionDenied("these figures are those of every tenant", hint=f"Grant {http.EVERY_TENANT}.")
        self._answer(self._metrics(request))

    def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _readyz(self, request: http.Request) -> None:
        await self.look()
        checks = self.checks()
        worst = doctor.worst(checks)
        body = msgspec.json.encode({"status": STATUS[worst], "checks": [asdict(one) for one in checks]})
        request.respond(503 if worst is Verdict.BROKEN else 200, body)

    async def _metrics(self, request: http.Request) -> None:
        await self.look()
        page = Page()
        self.collect(page)
        request.respond(200, page.text().encode(), CONTENT_TYPE)


@contextlib.contextmanager
def tracers(settings: Settings) -> Iterator[TracerOf]:
    """For the length of a block; then what waits goes out."""
    with exporting(settings.traces) as found:
        yield found.tracer if found is not None else lambda _: None


@contextlib.asynccontextmanager
async def serving(observer: Observer) -> AsyncIterator[str]:
    """The listener that the settings ask for, and its address; '' without one."""
    settings = observer.settings
    address = split_address(settings.metrics_listen)
    if address is None:
        yield ""
        return
    async with edge.fronts(settings) as front:
        observer.server = server = front(observer.routes())
        await server.start(*address)
        try:
            yield edge.url_of(settings, address[0], server.port)
        finally:
            await server.stop(STOP_S)


@contextlib.contextmanager
def serving_beside(observer: Observer) -> Iterator[None]:
    """The same for a service that is no coroutine: in a thread of its own, as long as the block lasts."""
    if observer.settings.metrics_listen == OFF:
        yield
        return
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        try:
            async with serving(observer):
                begun.set_result((asyncio.get_running_loop(), stop))
                await stop.wait()
        except OncewireError as error:
            if begun.done():
                raise
            begun.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="oncewire-observe", daemon=True)
    thread.start()
    loop, stop = begun.result()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_S + LOOK_S_MAX)


def _resident_bytes(most: int) -> int:
    """Now, where the kernel says it; else the most that it ever was."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return most * (1 if sys.platform == "darwin" else 1024)
