"""The pipeline beside `up`: a process of its own, which neither holds the servers up nor takes them down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import click

from oncewire.cli.board import Board
from oncewire.embedded.folder import Server
from oncewire.embedded.process import Child, Log
from oncewire.embedded.stack import State
from oncewire.errors import OncewireError
from oncewire.settings import Settings

NAME = "pipeline"
STOP_S = 60.0
"""A batch may end; what is cut off comes again."""


@contextlib.asynccontextmanager
async def pipeline(chosen: Settings, nats: Server, board: Board) -> AsyncIterator[None]:
    """`oncewire pipeline run` on the servers of `up`. Where it cannot run, one line says so and the rest runs."""
    from oncewire.cli.pipeline import lake_of, require_spark

    board.part(NAME, State.STARTING)
    try:
        require_spark()
    except OncewireError as error:
        board.part(NAME, State.STOPPED, text=f"not started: {error.message}. {error.hint}", warning="not started")
        yield
        return
    log = Log(chosen.data.absolute() / "pipeline.log")
    child = await Child.start(NAME, _command(chosen), log, death_signal=signal.SIGTERM, environ=_environ(chosen, nats))
    lake = lake_of(chosen).path
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


def _command(chosen: Settings) -> list[str]:
    """The child starts in the root folder: its paths are whole."""
    context = click.get_current_context(silent=True)
    config = context.find_root().obj if context else None
    start = "from oncewire.cli import main; main(prog_name='oncewire')"
    named = ["--config", str(Path(config).absolute())] if config else []
    paths = ["--data", str(chosen.data.absolute())]
    if chosen.lake:
        paths += ["--lake", str(Path(chosen.lake).expanduser().absolute())]
    if chosen.topology_files:
        files = [str(Path(one.strip()).absolute()) for one in chosen.topology_files.split(",") if one.strip()]
        paths += ["--topology-files", ",".join(files)]
    return [sys.executable, "-c", start, *named, "pipeline", "run", "--json", *paths]


def _environ(chosen: Settings, nats: Server) -> dict[str, str]:
    """A server that `up` started is found, with the pipeline's own key, through the data folder. Another's address may
    hold a password, which does not belong into a command line."""
    address = {} if nats.mark else {"NATS_URL": chosen.nats_url}
    return {**os.environ, **address, "ONCEWIRE_SPARK_MASTER": chosen.master}
