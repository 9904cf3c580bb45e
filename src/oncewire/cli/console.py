"""`oncewire console`: the web console, on its own beside servers that run already."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import click

from oncewire._ground import http, logs, topology, trust
from oncewire._ground.checks import split_address
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings, mask_url
from oncewire.cli import edge, face, facts
from oncewire.cli.board import Board, board_of
from oncewire.console import Sources
from oncewire.console import serving as serving_at
from oncewire.console.sessions import Sessions
from oncewire.embedded.folder import DataFolder

if TYPE_CHECKING:
    from oncewire.console.watch import Figures, Watch

SETTINGS = (
    "data",
    "nats_url",
    "nats_system_key",
    "nats_monitor_url",
    "topology_files",
    "env",
    "lake",
    "auth_keys",
    "log_format",
    "log_level",
)


@click.group()
def console() -> None:
    """A page that shows what the parts do, live, and lets people decide about dead letters.

    \b
    Examples:
      oncewire console run
      oncewire console run --listen 127.0.0.1:9088 --console-broker-url http://127.0.0.1:8080
    """


@console.command()
@click.option("--listen", "console_listen", metavar="HOST:PORT", help="Where to listen [default 127.0.0.1:8088].")
@face.setting_options(*SETTINGS, "console_broker_url", "console_broker_key", "console_broker_ca", "console_tenant")
@face.command
def run(*, as_json: bool, **flags: Any) -> None:
    """Serve until Ctrl-C or SIGTERM. `oncewire up` serves one already.

    \b
    Examples:
      oncewire console run
      NATS_URL=nats://prod:4222 NATS_MONITOR_URL=http://prod:8222 oncewire console run
    \b
    Without credentials (--auth-keys, or auth.jwks in the settings) it listens on this machine only, and everybody here
    may do what the command line may. With them a person logs in with a key of the tenant that --console-tenant names:
    `read` to look, `replay` to bring dead letters back or drop them.
    """
    settings = face.load_here(flags).settings
    logs.set_up(settings.log_format, settings.log_level)
    face.run(_run(settings, broker_of(settings), board_of(settings, as_json, "console")))


async def _run(settings: Settings, broker_url: str, board: Board) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with (
        Client(options_from(settings, name="oncewire-console")) as client,
        serving(client, settings, broker_url) as (_, url),
    ):
        board.line(f"console on {url}, looking at {mask_url(settings.nats_url)}")
        board.event("serving", url=url, nats_url=mask_url(settings.nats_url))
        await stop.wait()
    board.line("stopped")
    board.event("end")


@contextlib.asynccontextmanager
async def serving(
    client: Client, settings: Settings, broker_url: str, figures: Callable[[], Figures] = dict
) -> AsyncIterator[tuple[Watch, str]]:
    """A console by the settings, and its address. `client` may do what the command line's user may."""
    host, port = address_of(settings)
    async with trust.open_gate(settings) as gate:
        certificate = http.certificate_of(settings.http_tls_cert, settings.http_tls_key)
        is_secure = certificate is not None
        sessions = Sessions(gate, settings.console_tenant, is_secure=is_secure) if gate is not None else None

        limits = dataclasses.replace(http.limits_of(settings), origins=frozenset())  # for its own page alone

        def front(routes: http.Routes) -> http.Server:
            vouches = gate.vouches_for if gate is not None else None
            return http.Server(routes, limits, sessions, certificate, vouches)

        stop_s = settings.http_stop_ms_max / 1000
        async with serving_at(_sources(client, settings, broker_url, figures), host, port, front, sessions, stop_s) as (
            server,
            watch,
        ):
            yield watch, edge.url_of(settings, host, server.port)


def _sources(client: Client, settings: Settings, broker_url: str, figures: Callable[[], Figures]) -> Sources:
    from oncewire.cli.pipeline import place_for

    def standing() -> dict[str, Any]:
        from oncewire.cli.pipeline import lake_of, require_lake, standing_of  # Arrow is loaded where there is a lake

        require_lake()
        return standing_of(settings, lake_of(settings))

    return Sources(
        client,
        topology.load(settings=settings),
        functools.partial(facts.ask_servers, settings, client.connection.options),
        place_for(settings),
        standing,
        broker_url,
        settings.console_broker_key,
        lambda: trust_of(settings),
        figures,
    )


def trust_of(settings: Settings) -> ssl.SSLContext:
    """Whom to take for the broker. That of the same settings has their certificate, whatever name stands in it."""
    is_own = not settings.console_broker_url and not settings.console_broker_ca and bool(settings.http_tls_cert)
    return http.trusting(settings.http_tls_cert if is_own else settings.console_broker_ca, is_exact=is_own)


def broker_of(settings: Settings) -> str:
    """The broker that is named, else that of the `up` that runs here, else the one that the settings say."""
    folder = DataFolder.at(settings.data)
    running = folder.read() if folder.holder() is not None else None
    served = running.services.get("broker", "") if running else ""
    scheme = "https" if settings.http_tls_cert else "http"
    return settings.console_broker_url or served or f"{scheme}://{settings.broker_listen}"


def address_of(settings: Settings) -> tuple[str, int]:
    address = split_address(settings.console_listen)
    assert address is not None, "the settings table has checked it"
    return address
