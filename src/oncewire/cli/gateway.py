"""`oncewire gateway`: rooms over WebSocket and tokens over SSE, for browsers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import click

from oncewire._ground import http
from oncewire._ground.checks import split_address
from oncewire._ground.errors import InvalidSetting
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings, mask_url
from oncewire._ground.tracing import Tracer
from oncewire.cli import edge, face, observe
from oncewire.cli.board import Board, board_of
from oncewire.demo import Chat
from oncewire.gateway import metrics
from oncewire.gateway.limits import limits_of
from oncewire.gateway.run import serving as serving_at
from oncewire.gateway.service import Gateway
from oncewire.outbox.archive import ConversationArchive

WEB = ("oncewire.gateway", "web")
DEMO = ("oncewire.demo", "page")
LIMITS = [
    f"gateway_{name}"
    for name in (
        "backlog_size", "frame_bytes_max", "fragments_max", "rooms_per_client_max", "clients_per_room_max",
        "frames_per_s_max", "buffer_bytes_max", "slow_ms_max", "ping_ms",
    )
]  # fmt: skip


@click.group()
def gateway() -> None:
    """Rooms over WebSocket and tokens over SSE, for browsers.

    \b
    Examples:
      oncewire gateway run
      curl -N localhost:3005/stream/6f9619ff-8b86-4d01-b42d-00cf4fc964ff
    """


@gateway.command()
@click.option("--listen", metavar="HOST:PORT", help="Where to listen [default 127.0.0.1 and GATEWAY_PORT, 3005].")
@face.setting_options(
    "data", "nats_url", "postgres_url", "auth_keys", "http_connections_max", "http_origins", *LIMITS, *observe.OPTIONS
)
@face.command
def run(*, listen: str | None, as_json: bool, **flags: Any) -> None:
    """Serve until Ctrl-C or SIGTERM. Run as many as you like, on as many machines.

    \b
    Examples:
      oncewire gateway run
      oncewire gateway run --listen 127.0.0.1:3006 --json
    \b
    It needs NATS with the declared streams. With PostgreSQL, history is complete.
    """
    settings = face.load_service(flags)
    address = split_address(listen) if listen else ("127.0.0.1", settings.gateway_port)
    if address is None:
        raise InvalidSetting(f"--listen must be host:port, not {listen!r}", hint="For example 127.0.0.1:3005.")
    face.run(_run(settings, *address, board_of(settings, as_json, "gateway")))


async def _run(settings: Settings, host: str, port: int, board: Board) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with observe.tracers(settings) as tracer:
        await _serve(settings, host, port, board, stop, tracer("gateway"))


async def _serve(
    settings: Settings, host: str, port: int, board: Board, stop: asyncio.Event, tracer: Tracer | None
) -> None:
    async with (
        Client(options_from(settings, name="oncewire-gateway")) as client,
        serving(client, settings, host, port, tracer=tracer) as (running, url),
        observe.serving(observer(settings, client, running)) as watched_at,
    ):
        board.line(f"gateway on {url}, reading {running.node.stream} of {mask_url(settings.nats_url)}")
        facts = {"url": url, "nats_url": mask_url(settings.nats_url), "stream": running.node.stream}
        board.event("serving", **facts, metrics_url=watched_at)
        await stop.wait()
    board.line("stopped")
    board.event("end", answers=sum(running.server.answers.values()) if running.server else 0)


def observer(settings: Settings, client: Client, running: Gateway) -> observe.Observer:
    found = observe.Observer(settings, client, part=lambda whole: whole.for_service("gateway"))
    found.watch(watched(running), client)
    return found


def watched(running: Gateway) -> observe.Watched:
    return observe.Watched("gateway", lambda page: metrics.collect(page, running), lambda: running.node.problem)


@contextlib.asynccontextmanager
async def serving(
    client: Client,
    settings: Settings,
    host: str,
    port: int,
    *,
    chat: Chat | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway by the settings, and its address. With `chat` it serves the demo too."""
    async with (
        edge.fronts(settings, tickets_at="/tickets") as front,
        serving_at(
            client,
            host,
            port,
            limits=limits_of(settings),
            front=front,
            events_prefix=settings.chat_events_prefix,
            tokens_prefix=settings.chat_tokens_prefix,
            archive=ConversationArchive(settings.postgres_url) if settings.postgres_url else None,
            pages=http.Pages(WEB, DEMO) if chat else http.Pages(WEB),
            extend=chat.add_to if chat else None,
            tracer=tracer,
            stop_s=settings.http_stop_ms_max / 1000,
        ) as running,
    ):
        assert running.server is not None
        yield running, edge.url_of(settings, host, running.server.port)
