"""The pipeline beside `up`: a process of its own, which neither holds the servers up nor takes them down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import click

from oncewire._ground import monitor
from oncewire._ground.checks import OFF
from oncewire._ground.doctor import Verdict
from oncewire._ground.errors import OncewireError
from oncewire._ground.metrics import Page
from oncewire._ground.settings import Settings
from oncewire.cli import face, observe
from oncewire.cli.board import Board
from oncewire.embedded.folder import Server
from oncewire.embedded.process import LOOPBACK, Child, Log, pick_ports
from oncewire.embedded.stack import State
from oncewire.pipeline.lake.place import place_of

NAME = "pipeline"
STOP_S = 60.0
"""A batch may end; what is cut off comes again."""


@contextlib.asynccontextmanager
async def pipeline(
    chosen: Settings, nats: Server, board: Board, observer: observe.Observer | None = None
) -> AsyncIterator[None]:
    """`oncewire pipeline run` on the servers of `up`. Where it cannot run, one line says so and the rest runs."""
    from oncewire.cli.pipeline import place_for, require_spark

    board.part(NAME, State.STARTING)
    try:
        require_spark()
        lake = place_for(chosen)
    except OncewireError as error:
        board.part(NAME, State.STOPPED, text=f"not started: {error.message}. {error.hint}", warning="not started")
        yield
        return
    log = Log(chosen.data.absolute() / "pipeline.log")
    figures = _Figures(chosen)
    if observer is not None:
        observer.watch(observe.Watched(NAME, figures.collect, figures.trouble, figures.look))
    command = _command(chosen, figures.listen)
    child = await Child.start(NAME, command, log, death_signal=signal.SIGTERM, environ=_environ(chosen, nats))
    figures.child = child
    board.part(NAME, State.READY, text=f"streams become tables in {lake}, log in {log.path}")
    watching = asyncio.create_task(_watch(child, board))
    try:
        yield
    finally:
        watching.cancel()
        if child.is_running:
            board.part(NAME, State.STOPPING)
            await child.stop((signal.SIGTERM, STOP_S))
            board.part(NAME, State.STOPPED)


async def _watch(child: Child, board: Board) -> None:
    await child.wait()
    error = child.died("while the rest goes on")
    board.part(NAME, State.STOPPED, text=f"{error.message} {error.hint}", warning="stopped")


class _Figures:
    """What the child tells on a listener of its own, which `up` shows as its own."""

    def __init__(self, chosen: Settings) -> None:
        port = pick_ports({NAME: (0, "")})[NAME] if chosen.metrics_listen != OFF else 0
        self.listen = f"{LOOPBACK}:{port}" if port else OFF
        self.child: Child | None = None
        self._text = self._trouble = ""

    async def look(self) -> None:
        if self.listen == OFF:
            return
        _, metrics = await monitor.ask(f"http://{self.listen}", "/metrics")
        _, ready = await monitor.ask(f"http://{self.listen}", "/readyz")
        self._text = metrics.decode("utf-8", "replace")
        broken = [one for one in json.loads(ready)["checks"] if one["verdict"] == Verdict.BROKEN]
        self._trouble = "; ".join(one["text"] for one in broken)

    def collect(self, page: Page) -> None:
        page.put_text(self._text, f"oncewire_{NAME}_")

    def trouble(self) -> str:
        if self.child is not None and not self.child.is_running:
            return "the pipeline's process has ended"
        return self._trouble


def _command(chosen: Settings, listen: str) -> list[str]:
    """The child starts in the root folder: its paths are whole."""
    context = click.get_current_context(silent=True)
    config = context.find_root().obj if context else None
    start = "from oncewire.cli import main; main(prog_name='oncewire')"
    named = ["--config", str(Path(config).absolute())] if config else []
    paths = ["--data", str(chosen.data.absolute())]
    if chosen.lake:
        paths += ["--lake", str(place_of(chosen.lake))]
    if chosen.checkpoints:
        paths += ["--checkpoints", str(Path(chosen.checkpoints).expanduser().absolute())]
    if chosen.topology_files:
        files = [str(Path(one.strip()).absolute()) for one in chosen.topology_files.split(",") if one.strip()]
        paths += ["--topology-files", ",".join(files)]
    watched = ["--metrics-listen", listen, "--log-format", chosen.log_format, "--log-level", chosen.log_level]
    return [sys.executable, "-c", start, *named, "pipeline", "run", "--json", *paths, *watched]


def _environ(chosen: Settings, nats: Server) -> dict[str, str]:
    """A server that `up` started is found, with the pipeline's own key, through the data folder. Another's address may
    hold a password, which does not belong into a command line."""
    address = {} if nats.mark else {"NATS_URL": chosen.nats_url}
    needed = face.without_secrets(os.environ, "nats_password", "nats_token")
    return {**needed, **address, "ONCEWIRE_SPARK_MASTER": chosen.master}
