"""`oncewire relay`: publishes what PostgreSQL committed."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import click

from oncewire import outbox
from oncewire._ground.jetstream import Client, options_from
from oncewire._ground.settings import Settings, mask_url
from oncewire.cli import face, observe
from oncewire.cli.board import Board, board_of
from oncewire.cli.migrate import require_postgres
from oncewire.outbox import metrics


@click.group()
def relay() -> None:
    """Publish what PostgreSQL committed, in order, once.

    \b
    Example:
      oncewire relay run
    """


@relay.command()
@click.option("--schema", default="", help="Schema of the tables (else the search path's first).")
@face.setting_options("data", "nats_url", "postgres_url", "outbox_poll_interval_ms", "outbox_batch_size")
@face.setting_options(*observe.OPTIONS)
@face.command
def run(*, schema: str, as_json: bool, **flags: Any) -> None:
    """Relay until Ctrl-C or SIGTERM. Run as many as you like, on as many machines.

    \b
    Examples:
      oncewire relay run
      ONCEWIRE_POSTGRES_URL=postgresql://app@db1,db2/app oncewire relay run --json
    \b
    While NATS or PostgreSQL is away it waits and counts no attempts. What it cannot publish is
    shown by `oncewire outbox status`.
    """
    settings = face.load_service(flags)
    face.run(_run(settings, require_postgres(settings), schema, as_json))


async def _run(settings: Settings, url: str, schema: str, as_json: bool) -> None:
    stop, board = asyncio.Event(), board_of(settings, as_json, "relay")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with observe.tracers(settings) as tracer:
        options = outbox.options_of(settings, schema, tracer("relay"))
        await _relay(settings, url, options, stop, board)


async def _relay(settings: Settings, url: str, options: outbox.RelayOptions, stop: asyncio.Event, board: Board) -> None:
    async with (
        Client(options_from(settings, name="oncewire-relay")) as client,
        outbox.relaying(client, url, options) as relay,
        observe.serving(observer(settings, client, relay)) as watched,
    ):
        board.line(f"relaying from {mask_url(url)} to {mask_url(settings.nats_url)}")
        board.event("serving", nats_url=mask_url(settings.nats_url), postgres_url=mask_url(url), metrics_url=watched)
        await stop.wait()
    board.line(f"published {relay.published} messages")
    board.event("end", published=relay.published)


def observer(settings: Settings, client: Client, relay: outbox.Relay) -> observe.Observer:
    found = observe.Observer(settings, client, part=lambda whole: whole.for_service("relay"), postgres_url=relay.url)
    found.watch(watched(relay), client)
    return found


def watched(relay: outbox.Relay) -> observe.Watched:
    return observe.Watched(
        "relay", lambda page: metrics.collect(page, relay), lambda: relay.problem, lambda: metrics.look(relay)
    )
