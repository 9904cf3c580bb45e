"""`oncewire broker`: queues over HTTP, and a look into their log."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from oncewire._ground import http, logs, topology
from oncewire._ground.checks import split_address
from oncewire._ground.errors import InvalidSetting, Refused
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings, mask_url
from oncewire._ground.tracing import Tracer
from oncewire.broker import metrics
from oncewire.broker.engine import Engine, Limits, Router
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from oncewire.broker.local import open_local
from oncewire.broker.log import inspect as looking
from oncewire.broker.routes import BrokerRoutes
from oncewire.broker.wire import Sizes
from oncewire.cli import edge, face, observe
from oncewire.cli.board import Board, board_of

if TYPE_CHECKING:
    from oncewire.broker.log.inspect import LogShown

LIMITS = [f"broker_{name}" for name in (*Limits.__struct_fields__, *Sizes.__struct_fields__)]


@click.group()
def broker() -> None:
    """Queues over HTTP: topics, groups, leases, retries, idempotency.

    \b
    Examples:
      oncewire broker run --wal ./queue
      curl -X POST 'localhost:8080/v1/topics?name=orders'
      curl -X POST 'localhost:8080/v1/produce?topic=orders&value=hello'
      curl -N 'localhost:8080/v1/consume?topic=orders&group=g1&owner=me'
    """


@broker.command()
@click.option(
    "--engine",
    "broker_engine",
    metavar="local|jetstream",
    help="What keeps the messages: a log here, or streams that many nodes share [default local].",
)
@click.option("--listen", "broker_listen", metavar="HOST:PORT", help="Where to listen [default 127.0.0.1:8080].")
@click.option("--wal", "broker_wal", metavar="DIR", help="Folder of the log; without it everything is in memory.")
@click.option("--router", "broker_router", metavar="MODULE:CALLABLE", help="Asked about each message.")
@face.setting_options("auth_keys", "http_origins", *LIMITS, "broker_router_ms_max", "broker_owner_lease_ms")
@face.setting_options("nats_url", "env", "nats_system_key", "nats_monitor_url", *observe.OPTIONS)
@face.command
def run(*, as_json: bool, **flags: Any) -> None:
    """Serve until Ctrl-C or SIGTERM.

    \b
    Examples:
      oncewire broker run --wal ./queue
      oncewire broker run --listen 127.0.0.1:9000 --wal ./queue --broker-lease-ms 30000 --json
      oncewire broker run --engine jetstream --nats-url nats://localhost:4222 --listen 127.0.0.1:9001
    \b
    With --wal, what was answered survives a power cut. With --engine jetstream it does what the NATS server does, and
    any number of nodes serve the same topics. Without credentials (--auth-keys, or auth.jwks in the settings) it
    listens on this machine only, and everybody here may do everything.
    """
    if flags["broker_wal"] == "":  # a variable that is not set, most likely
        raise InvalidSetting(
            "--wal names no folder",
            hint="Name one, or leave --wal out: then everything is in memory, and lost at the end.",
        )
    settings = face.load(flags).settings
    logs.set_up(settings.log_format, settings.log_level)
    face.run(_run(settings, board_of(settings, as_json, "broker")))


async def _run(settings: Settings, board: Board) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with observe.tracers(settings) as tracer:
        await _serve(settings, board, stop, tracer("broker"))


async def _serve(settings: Settings, board: Board, stop: asyncio.Event, tracer: Tracer | None) -> None:
    async with (
        serving(settings, tracer) as (server, routes),
        observe.serving(observer(settings, routes)) as watched_at,
    ):
        url = url_of(settings, server)
        board.line(f"broker on {url}, {where(settings)}")
        board.event(
            "serving",
            url=url,
            engine=settings.broker_engine,
            wal=settings.broker_wal,
            wal_enabled=routes.engine.is_durable,
            metrics_url=watched_at,
        )
        await stop.wait()
    board.line("stopped")
    board.event("end", answers=sum(server.answers.values()))


def observer(settings: Settings, routes: BrokerRoutes) -> observe.Observer:
    """Its own log needs no server."""
    client = client_of(routes)
    found = observe.Observer(settings, client, part=lambda whole: whole.for_service("broker"))
    found.watch(watched(routes), client)
    return found


def watched(routes: BrokerRoutes) -> observe.Watched:
    return observe.Watched(
        "broker", lambda page: metrics.collect(page, routes), lambda: "; ".join(routes.engine.problems())
    )


def client_of(routes: BrokerRoutes) -> Client | None:
    return routes.engine.node.client if isinstance(routes.engine, JetStreamEngine) else None


@contextlib.asynccontextmanager
async def serving(settings: Settings, tracer: Tracer | None = None) -> AsyncIterator[tuple[http.Server, BrokerRoutes]]:
    """A broker that listens. At the end requests in hand are answered before the log is closed."""
    async with contextlib.AsyncExitStack() as stack:
        front = await stack.enter_async_context(edge.fronts(settings))
        engine = await _open(settings, stack)
        stack.push_async_callback(engine.stop)
        routes = BrokerRoutes(engine, _of(Sizes, settings), settings.build_commit, tracer)
        server = routes.server = front(routes.routes())
        await server.start(*_address(settings))
        try:
            yield server, routes
        finally:
            await server.stop(settings.http_stop_ms_max / 1000)


def port_of(settings: Settings) -> int:
    return _address(settings)[1]


def url_of(settings: Settings, server: http.Server) -> str:
    host, _ = _address(settings)
    return edge.url_of(settings, host, server.port)


def where(settings: Settings) -> str:
    """Where its messages are."""
    if settings.broker_engine == "jetstream":
        return f"its topics in {mask_url(settings.nats_url)}"
    return f"its log in {settings.broker_wal}" if settings.broker_wal else "in memory: a restart forgets everything"


async def _open(settings: Settings, stack: contextlib.AsyncExitStack) -> Engine:
    limits = _of(Limits, settings)
    router = load_router(settings.broker_router) if settings.broker_router else None
    if settings.broker_engine == "local":
        folder = Path(settings.broker_wal) if settings.broker_wal else None
        return await open_local(folder, limits=limits, router=router, router_timeout_ms=settings.broker_router_ms_max)
    client = await stack.enter_async_context(Client(options_from(settings, name="oncewire broker")))
    return await open_jetstream(
        client,
        limits=limits,
        router=router,
        router_timeout_ms=settings.broker_router_ms_max,
        owner_lease_ms=settings.broker_owner_lease_ms,
        declared=topology.load(settings=settings),
    )


def _of(kind: type[Any], settings: Settings) -> Any:
    """Limits are rows of the settings table, under the same names."""
    return kind(**{name: getattr(settings, f"broker_{name}") for name in kind.__struct_fields__})


def _address(settings: Settings) -> tuple[str, int]:
    address = split_address(settings.broker_listen)
    assert address is not None, "the settings table has checked it"
    return address


def load_router(target: str) -> Router:
    """The callable behind `module:name`, looked for in the current folder first."""
    found = face.load_named(target, "CALLABLE", hint="For `def route(…)` in brain.py: brain:route.")
    if not callable(found):
        raise Refused(f"{target} is {'not there' if found is None else type(found).__name__}, not a callable")
    router: Router = found
    return router


@broker.group()
def wal() -> None:
    """Look into the log of a broker.

    \b
    Examples:
      oncewire broker wal inspect ./queue
      oncewire broker wal verify ./queue
    """


@wal.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@face.command
def inspect(*, folder: Path, as_json: bool) -> None:
    """What is in a log: its files, commits and records.

    \b
    Example:
      oncewire broker wal inspect ./queue --json
    """
    _show(looking.inspect(folder), as_json)


@wal.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@face.command
def verify(*, folder: Path, as_json: bool) -> None:
    """Read every record of a log. Exit 0 when it is whole, 4 when it is damaged, and where.

    \b
    Example:
      oncewire broker wal verify ./queue
    """
    _show(looking.verify(folder), as_json)


def _show(log: LogShown, as_json: bool) -> None:
    if as_json:
        face.print_json(msgspec.to_builtins(log))
        return
    face.say(f"{log.folder}: {log.commits} commits, {'closed cleanly' if log.is_sealed else 'not closed'}")
    if log.snapshot:
        face.say(f"  {log.snapshot}  {log.snapshot_bytes} bytes")
    for one in log.segments:
        left = f", {one.unconfirmed_bytes} bytes unconfirmed" if one.unconfirmed_bytes else ""
        face.say(f"  segment {one.number}  {one.bytes} bytes, {one.commits} commits, {one.records} records{left}")
    for kind, count in log.records.items():
        face.say(f"  {count:>10}  {kind}")
    if log.torn:
        face.say(f"  torn tail: {log.torn_bytes} bytes, {log.torn}")
    if log.damage:
        face.say(f"  damaged: {log.damage}")
