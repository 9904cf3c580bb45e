"""What an agent knows of its past holds against a copy of the ledger and against a stream that is not what it was."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import Corrupt
from oncewire._ground.jetstream import losses
from oncewire._ground.jetstream.losses import Cause
from oncewire.agent import Agent, Context, Effect, Runner
from oncewire.agent.sources import last_announced
from tests.support.nats import NatsServer
from tests.support.running import EVENTS, command, counted, new_agent, prepared, run, send, sqlite_in
from tests.support.wait import until, until_async

OUT = "evt.default.demo.history"


def echo(agent: Agent) -> Agent:
    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(f"{OUT}.{agent.name}", payload)

    return agent


async def test_a_ledger_restored_one_block_back_is_refused(shared_server: NatsServer, tmp_path: Path) -> None:
    """The last block alone is missing, and it would run again."""
    agent, ledger, backup = echo(new_agent()), tmp_path / "ledger.db", tmp_path / "backup.db"

    def back_up(step: str) -> None:
        """Once, right behind the commit of the block with the input; its closing block comes after that."""
        if step == "committed" and not backup.exists():
            with (
                contextlib.closing(sqlite3.connect(ledger)) as source,
                contextlib.closing(sqlite3.connect(backup)) as to,
            ):
                source.backup(to)

    async with prepared(shared_server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path), at=back_up) as runner:
            await send(client, command(agent, "go"), {"n": 1})
            await counted(runner, done=1)
            identity = runner.ledger
        with contextlib.closing(sqlite3.connect(backup)) as restored:
            [(head,)] = restored.execute("SELECT number FROM ledger_chains").fetchall()
        assert head + 1 == await last_announced(client, identity)

        ledger.write_bytes(backup.read_bytes())
        with pytest.raises(Corrupt, match=f"ends at block {head}, but has announced block {head + 1}"):
            async with run(agent, client, sqlite_in(tmp_path)):
                pass


async def test_an_agent_that_runs_stops_when_its_stream_goes_back_under_it(server: NatsServer, tmp_path: Path) -> None:
    """Not only its next start finds out: sequences that it settled are given out again from now on."""
    agent, subject = new_agent(), "evt.default.demo.in"
    seen: list[int] = []

    @agent.on(subject)
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        seen.append(payload["n"])

    files = server.folder / "jetstream" / "jetstream" / "$G" / "streams" / EVENTS
    async with prepared(server.url) as client, run(agent, client, sqlite_in(tmp_path)) as first:
        await send(client, subject, {"n": 1})
        await counted(first, done=1)
    server.stop()
    shutil.copytree(files, tmp_path / "backup")
    server.start()
    async with prepared(server.url) as client:
        runner = Runner(agent, client, sqlite_in(tmp_path))
        await runner.start()
        try:
            for n in (2, 3):
                await send(client, subject, {"n": n})
            await counted(runner, done=2)
            await until(lambda: min(map(runner.lookout.seen, runner.opened)) == 3, "all to be seen as settled")
            server.stop()
            shutil.rmtree(files)
            shutil.copytree(tmp_path / "backup", files)
            server.start()
            with pytest.raises(Corrupt, match="went back"):
                async with asyncio.timeout(30):
                    await runner.wait()
        finally:
            await runner.stop()
        await until_async(lambda: losses.losses(client, EVENTS), "the loss to be recorded")
        assert [(Cause.WENT_BACK, 2, 3)] == [(one.cause, one.first, one.last) for one in await losses.losses(client)]
    assert [1, 2, 3] == seen
