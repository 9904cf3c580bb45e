"""`oncewire up`: the servers of one machine, and what serves on them, from start to an orderly stop.

This is where parts are wired: `serve` is what runs once the servers do, and the place to add a service.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import click

import oncewire
from oncewire import dlq, outbox
from oncewire._ground import doctor as rules
from oncewire._ground import logs, monitor, settings, topology
from oncewire._ground.checks import split_address
from oncewire._ground.database.migrate import migrate
from oncewire._ground.errors import NotConnected, Refused
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Resolved, Settings, mask_url
from oncewire._ground.users import DEVELOPER, OPERATOR, key_path
from oncewire.cli import broker, console, edge, face, facts, gateway, lakeside, observe, relay
from oncewire.cli import dlq as cli_dlq
from oncewire.cli.access import as_user, authorization, healthy_version, takes_anybody
from oncewire.cli.board import Board, board_of
from oncewire.cli.hints import next_commands
from oncewire.demo import Chat
from oncewire.embedded.folder import DataFolder, Server
from oncewire.embedded.nats import Nats
from oncewire.embedded.postgres import Postgres
from oncewire.embedded.process import pick_ports
from oncewire.embedded.stack import Embedded, Stack, State, clear

NATS_PORT = "embedded_nats_port"
MONITOR_PORT = "embedded_monitor_port"
POSTGRES_PORT = "embedded_postgres_port"
GATEWAY_PORT = "gateway_port"
BROKER_LISTEN = "--broker-listen (ONCEWIRE_BROKER_LISTEN)"
CONSOLE_LISTEN = "--console-listen (ONCEWIRE_CONSOLE_LISTEN)"
METRICS_LISTEN = "--metrics-listen (ONCEWIRE_METRICS_LISTEN)"


@click.command()
@click.option("--pipeline", "has_pipeline", is_flag=True, help="Also keep the lake (needs Spark and Java).")
@click.option("--demo", "has_shop", is_flag=True, help="Also run a small shop, so that there is something to watch.")
@face.setting_options("data", "env", "topology_files")
@face.setting_options("nats_url", "nats_system_key", "nats_monitor_url", "postgres_url")
@face.setting_options(NATS_PORT, MONITOR_PORT, POSTGRES_PORT, GATEWAY_PORT, "embedded_nats_access")
@click.option(
    "--engine",
    "broker_engine",
    metavar="local|jetstream",
    help="What keeps the broker's messages: a log in the data folder, or streams [default jetstream].",
)
@face.setting_options("broker_listen", "console_listen", *observe.OPTIONS)
@face.command
def up(*, has_pipeline: bool, has_shop: bool, as_json: bool, **flags: Any) -> None:
    """Start a NATS JetStream and a PostgreSQL on this machine, and serve until Ctrl-C.

    All data stays in the data folder and survives restarts, crashes and power cuts. With NATS_URL or
    ONCEWIRE_POSTGRES_URL those servers are used, and none is started for them.

    \b
    Examples:
      oncewire up
      oncewire up --pipeline --demo
      oncewire up --data /var/lib/oncewire --json
      NATS_URL=nats://prod:4222 NATS_MONITOR_URL=http://prod:8222 oncewire up
    \b
    Ctrl-C and SIGTERM stop everything in order (exit code 0); a second Ctrl-C does not wait (130).
    A server that dies stops the rest: exit code 3.
    """
    resolved = face.load(flags)
    logs.set_up(resolved.settings.log_format, resolved.settings.log_level)
    board = board_of(resolved.settings, as_json, "up")
    folder = DataFolder.at(resolved.settings.data)
    board.line(f"oncewire {oncewire.__version__}, data in {folder.path}")
    folder.create()
    with folder.lock():
        folder.check_room()
        with observe.tracers(resolved.settings) as tracer:
            face.run(_run(resolved, folder, board, tracer, has_pipeline=has_pipeline, has_shop=has_shop))


async def serve(
    stack: Stack, chosen: Settings, board: Board, tracer: observe.TracerOf, *, has_pipeline: bool, has_shop: bool
) -> None:
    """What runs on the servers, until it is cancelled or something dies. `chosen` names the servers in use.

    A service belongs here, in the `async with` around the last two lines: entered in order once the servers are ready,
    left in reverse before they stop. Each connects as its own user, and the observer watches it.
    """
    nats = stack.servers["nats"]
    observer = observe.Observer(chosen, postgres_url=chosen.postgres_url, sees_losses=True, tracer=tracer)

    def connected(user: str) -> Client:
        return Client(options_from(as_user(chosen, nats, user), name=f"oncewire-{user}"))

    shown = functools.partial(_shown, stack, board)
    async with connected(OPERATOR) as operator:
        await _declare(operator, chosen, board)
    if nats.keys:
        board.part("access", State.READY, text=_access(chosen, Path(nats.keys)))
    async with (
        connected("relay") as for_relay,
        shown("relay", _relaying(for_relay, chosen, observer)),
        connected("dlq") as for_dlq,
        shown("dlq", _dead_letters(for_dlq, chosen, observer)),
        connected("gateway") as for_gateway,
        connected("tokens") as for_chat,
        shown("gateway", _gateway(for_gateway, for_chat, chosen, observer)),
        shown("broker", _broker(as_user(chosen, nats, "broker"), observer)) as served,
        connected(OPERATOR) as for_console,
        shown("console", _console(for_console, chosen, served["url"], observer)),
        lakeside.pipeline(chosen, nats, board, observer) if has_pipeline else contextlib.nullcontext(),
        connected("agent") as for_shop,
        shown("shop", _shop(for_shop, chosen)) if has_shop else contextlib.nullcontext(),
        connected(OPERATOR) as observer.client,
        shown("metrics", _observed(observer)),
    ):
        board.ready(pid=os.getpid(), data=str(chosen.data), nats_url=mask_url(chosen.nats_url))
        board.line(next_commands(chosen, has_shop=has_shop))
        await stack.watch()


def _access(chosen: Settings, keys: Path) -> str:
    """Who gets into the embedded nats-server."""
    if takes_anybody(chosen):
        return "every program on this machine may use NATS without a key"
    why = "credentials are configured, so programs" if edge.asks_who(chosen) else "programs"
    return f"{why} need a key for NATS: NATS_NKEY={key_path(keys, DEVELOPER)}"


async def _declare(client: Client, chosen: Settings, board: Board) -> None:
    """Create what the catalogs declare and is missing. What differs stays as it is, and is said."""
    declared = topology.load(settings=chosen)
    board.part("topology", State.STARTING)
    problems = await topology.ensure(client, topology=declared)
    text = f"{len(declared.streams)} streams, {len(declared.consumers)} consumers"
    if problems:
        text += f"; {len(problems)} not as declared, see `oncewire topology plan`"
    warning = {"warning": "drift"} if problems else {}
    board.part("topology", State.READY, text=text, **warning)


@contextlib.asynccontextmanager
async def _shown(
    stack: Stack, board: Board, name: str, part: contextlib.AbstractAsyncContextManager[dict[str, str]]
) -> AsyncIterator[dict[str, str]]:
    """A service from its start to its end, as the board shows it: what it yields, and its address if it has one."""
    board.part(name, State.STARTING)
    try:
        async with part as told:
            board.part(name, State.READY, **told)
            if "url" in told:
                stack.serves(name, told["url"])
            try:
                yield told
            finally:
                board.part(name, State.STOPPING)
    finally:
        board.part(name, State.STOPPED)


@contextlib.asynccontextmanager
async def _relaying(client: Client, chosen: Settings, observer: observe.Observer) -> AsyncIterator[dict[str, str]]:
    """The outbox: its tables, and a relay that publishes what is committed there."""
    applied = await migrate(chosen.postgres_url)
    made = f", {len(applied)} migrations applied" if applied else ""
    options = outbox.options_of(chosen, tracer=observer.tracer("relay"))
    async with outbox.relaying(client, chosen.postgres_url, options) as running:
        observer.watch(relay.watched(running), client)
        yield {"text": f"publishes what PostgreSQL commits to the outbox{made}"}


@contextlib.asynccontextmanager
async def _dead_letters(client: Client, chosen: Settings, observer: observe.Observer) -> AsyncIterator[dict[str, str]]:
    """The dead-letter service."""
    async with dlq.serving(client, dlq.options_of(chosen, observer.tracer("dlq"))) as running:
        observer.watch(cli_dlq.watched(running), client)
        yield {"text": "keeps what is given up as dead letters"}


@contextlib.asynccontextmanager
async def _gateway(
    client: Client, for_chat: Client, chosen: Settings, observer: observe.Observer
) -> AsyncIterator[dict[str, str]]:
    """The realtime gateway, and a chat that shows what it does; it knows no users, so not where they are asked for."""
    chat = None if edge.asks_who(chosen) else Chat(for_chat, chosen)
    what = "rooms and tokens for browsers" + ("; a chat to try:" if chat else " on")
    async with (
        chat.running() if chat else contextlib.nullcontext(),
        gateway.serving(
            client, chosen, "127.0.0.1", chosen.gateway_port, chat=chat, tracer=observer.tracer("gateway")
        ) as (running, url),
    ):
        observer.watch(gateway.watched(running), client)
        yield {"text": f"{what} {url}", "url": url}


@contextlib.asynccontextmanager
async def _shop(client: Client, chosen: Settings) -> AsyncIterator[dict[str, str]]:
    """Loaded only when it is asked for: nobody else needs an agent here."""
    from oncewire.demo.shop import Shop, agent

    async with Shop(client, chosen.postgres_url).running():
        yield {"text": f"a demo: customers place orders, the agent {agent.name} charges them"}


@contextlib.asynccontextmanager
async def _broker(chosen: Settings, observer: observe.Observer) -> AsyncIterator[dict[str, str]]:
    """A node of the broker, on a connection of its own: nobody else's load may cost it its session."""
    async with broker.serving(chosen, observer.tracer("broker")) as (server, routes):
        observer.watch(broker.watched(routes), broker.client_of(routes))
        url = broker.url_of(chosen, server)
        yield {"text": f"queues on {url}, {broker.where(chosen)}", "url": url}


@contextlib.asynccontextmanager
async def _console(
    client: Client, chosen: Settings, broker_url: str, observer: observe.Observer
) -> AsyncIterator[dict[str, str]]:
    """The web console. It does what people decide, so it connects as the operator does."""
    broker_url = chosen.console_broker_url or broker_url
    async with console.serving(client, chosen, broker_url, observer.histograms) as (_, url):
        yield {"text": f"watch all of this: {url}", "url": url}


@contextlib.asynccontextmanager
async def _observed(observer: observe.Observer) -> AsyncIterator[dict[str, str]]:
    """What all of these tell whoever watches, in one place."""
    async with observe.serving(observer) as url:
        yield {"text": f"/metrics, /healthz and /readyz on {url}", "url": url} if url else {"text": "off"}


def _with_defaults(resolved: Resolved, chosen: Settings, folder: DataFolder) -> Settings:
    if not resolved.is_set("metrics_listen"):
        chosen = dataclasses.replace(chosen, metrics_listen=observe.UP_LISTEN)
    return _with_broker(resolved, chosen, folder)


def _with_broker(resolved: Resolved, chosen: Settings, folder: DataFolder) -> Settings:
    """On the streams that all parts share, unless told otherwise; its own log belongs to the data."""
    if not resolved.is_set("broker_engine"):
        return dataclasses.replace(chosen, broker_engine="jetstream")
    if chosen.broker_engine == "local" and not chosen.broker_wal:
        return dataclasses.replace(chosen, broker_wal=str(folder.path / "broker"))
    return chosen


async def _run(
    resolved: Resolved,
    folder: DataFolder,
    board: Board,
    tracer: observe.TracerOf,
    *,
    has_pipeline: bool,
    has_shop: bool,
) -> None:
    stop = _Stop(board)
    await clear(folder)
    stack = Stack(folder, _embedded(resolved, folder), _others(resolved), board.part)
    stop.stack = stack
    try:
        if not await stop.comes_before(_start(stack, resolved, board)):
            chosen = face.with_servers(resolved, stack.servers, "up", OPERATOR).settings
            served = _with_defaults(resolved, chosen, folder)
            await stop.comes_before(serve(stack, served, board, tracer, has_pipeline=has_pipeline, has_shop=has_shop))
    finally:
        begun = time.monotonic()
        await stack.stop()
        board.line(f"stopped in {time.monotonic() - begun:.1f} s, the data is kept")
        board.event("end")


def _embedded(resolved: Resolved, folder: DataFolder) -> dict[str, Embedded]:
    """The servers to start: those that no setting names."""
    needs_nats, needs_postgres = not resolved.is_set("nats_url"), not resolved.settings.postgres_url
    for_nats = [NATS_PORT, *([MONITOR_PORT] if resolved.settings.embedded_monitor_port else [])]
    needed = [*(for_nats if needs_nats else ()), *([POSTGRES_PORT] if needs_postgres else []), GATEWAY_PORT]
    rows = [row for row in settings.table() if row.name in needed]
    wanted = {row.name: (getattr(resolved.settings, row.name), f"{row.flag} ({row.variables[0]})") for row in rows}
    wanted["broker"] = (broker.port_of(resolved.settings), BROKER_LISTEN)
    address = split_address(
        resolved.settings.metrics_listen if resolved.is_set("metrics_listen") else observe.UP_LISTEN
    )
    wanted |= {"metrics": (address[1], METRICS_LISTEN)} if address else {}
    wanted["console"] = (console.address_of(resolved.settings)[1], CONSOLE_LISTEN)
    ports = pick_ports(wanted)
    parts: dict[str, Embedded] = {}
    if needs_nats:
        port, monitor_port = ports[NATS_PORT], ports.get(MONITOR_PORT, 0)
        rights = authorization(resolved.settings, folder)
        parts["nats"] = Nats(folder, port, monitor_port, rights, functools.partial(healthy_version, folder))
    if needs_postgres:
        parts["postgres"] = Postgres(folder, ports[POSTGRES_PORT])
    return parts


def _others(resolved: Resolved) -> dict[str, Server]:
    """The servers that a setting names, without their secrets."""
    chosen = resolved.settings
    others = {"postgres": Server(mask_url(chosen.postgres_url))} if chosen.postgres_url else {}
    if resolved.is_set("nats_url"):
        others["nats"] = Server(mask_url(chosen.nats_url), mask_url(chosen.nats_monitor_url))
    return others


async def _start(stack: Stack, resolved: Resolved, board: Board) -> None:
    """Look at the servers that are there, start the others, say what they promise."""
    named = await _check_nats(resolved.settings, board) if resolved.is_set("nats_url") else None
    if resolved.settings.postgres_url:
        await _check_postgres(resolved.settings, board)
    await stack.start()
    if named is not None:
        found = monitor.durability(named.jsz, named.server_id)
    else:
        chosen = face.with_servers(resolved, stack.servers, "up", OPERATOR).settings
        answers, _ = await facts.ask_servers(chosen, options_from(chosen, name="oncewire up"))
        found = monitor.durability(answers)
    warning = {} if found.promise is monitor.Promise.POWER else {"warning": found.promise.value}
    board.part("durability", State.READY, text=found.text, **warning)


async def _check_nats(chosen: Settings, board: Board) -> rules.Nats:
    nats = await facts.nats_facts(chosen)
    if nats.error:
        raise NotConnected(nats.error, hint=nats.hint or "Start that server, or unset NATS_URL to get one here.")
    if nats.jetstream_error:
        raise Refused(f"JetStream cannot be used on {nats.url}: {nats.jetstream_error}", hint=rules.JETSTREAM_REMEDY)
    board.part("NATS", State.READY, version=nats.version, url=f"{nats.url} (not started here)")
    return nats


async def _check_postgres(chosen: Settings, board: Board) -> None:
    postgres = await facts.postgres_facts(chosen.postgres_url)
    assert postgres is not None
    if postgres.error:
        raise NotConnected(postgres.error, hint=postgres.hint)
    board.part("PostgreSQL", State.READY, version=postgres.version, url=f"{postgres.url} (not started here)")


class _Stop:
    """Ctrl-C, SIGTERM and a closed terminal ask for an orderly stop; a second Ctrl-C does not wait for it."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._asked = asyncio.Event()
        self.stack: Stack | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # `nohup oncewire up` stays
                asyncio.get_running_loop().add_signal_handler(number, self._ask, number)

    def _ask(self, number: int) -> None:
        if not self._asked.is_set():
            self._asked.set()
            self._board.line("\nstopping; Ctrl-C again does not wait")
        elif number == signal.SIGINT:
            if self.stack is not None:
                self.stack.force()
            os._exit(face.EXIT_INTERRUPTED)  # a service that hangs must not keep us

    async def comes_before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` to its end, or until a stop is asked for: then it is cancelled, and the answer is True."""
        asked, task = asyncio.create_task(self._asked.wait()), asyncio.create_task(work)
        try:
            await asyncio.wait((asked, task), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return self._asked.is_set()
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.gather(asked, task, return_exceptions=True)
