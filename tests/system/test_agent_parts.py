"""Every task of an agent is watched. One that ends although nobody asked it to is logged, makes the agent not ready,
and is started again or ends the process with a documented exit code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncewire.agent import Agent, Context, Effect, Runner
from oncewire.agent import keepalive as extending
from oncewire.agent.commits import Commits
from oncewire.agent.intake import Intake
from oncewire.agent.keepalive import KeepAlive
from oncewire.agent.lane import Lane
from oncewire.agent.run import PartEnded
from oncewire.agent.upkeep import Upkeep
from oncewire.cli import face
from tests.support.nats import NatsServer
from tests.support.running import (
    EVENTS,
    command,
    counted,
    new_agent,
    payload_of,
    prepared,
    run,
    send,
    sqlite_in,
    stored,
)
from tests.support.streams import unique
from tests.support.wait import until, until_async, within
from tests.system.test_agent_cli import running

PARTS: dict[str, tuple[type, str]] = {
    "the intake of MESHFORGE_COMMANDS": (Intake, "run"),
    "the upkeep": (Upkeep, "run"),
    "the lane": (Lane, "run"),
    "the clock of ": (Upkeep, "tick"),
}


def ticking(**options: Any) -> Agent:
    agent = new_agent(**options)

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(f"evt.default.demo.{agent.name}", payload)

    @agent.every(3600)
    def beat(ctx: Context) -> None: ...

    return agent


async def fail(*_: object, **__: object) -> None:
    raise PanicException("a bug")


async def end(*_: object) -> None:
    """Without a word."""


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


class PanicException(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize("how", [fail, end, hang], ids=["failed", "returned", "was cancelled"])
@pytest.mark.parametrize("part", PARTS)
async def test_a_part_that_ends_unasked_is_logged_and_seen_and_ends_the_agent(
    shared_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    how: Callable[..., Any],
) -> None:
    monkeypatch.setattr(*PARTS[part], how)
    async with prepared(shared_server.url) as client, run(ticking(), client, sqlite_in(tmp_path)) as runner:
        if how is hang:
            tasks = [task for task in (*runner._intake_tasks, *runner._tasks) if task.get_coro().__name__ == "hang"]
            tasks[0].cancel()
        with pytest.raises(PartEnded) as caught:
            await within(runner.wait())
        assert runner.trouble == str(caught.value)
        assert not runner.health()["is_ready"]
        assert part in runner.trouble
    what = {fail: "failed: PanicException: a bug", end: "returned", hang: "was cancelled"}[how]
    (record,) = [one for one in caplog.records if "stops:" in one.getMessage()]
    assert (logging.ERROR, True) == (record.levelno, what in record.getMessage() and what in runner.failure)
    assert (how is fail) == bool(record.exc_info and record.exc_info[0] is PanicException)


async def test_the_reader_inside_an_intake_is_watched_as_well(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Intake, "_feed", fail)
    async with prepared(shared_server.url) as client, run(ticking(), client, sqlite_in(tmp_path)) as runner:
        with pytest.raises(PartEnded, match="the intake of MESHFORGE_COMMANDS failed: PanicException: a bug"):
            await within(runner.wait())


@pytest.mark.parametrize("how", ["cancelled early", "cancelled", "failed"])
async def test_finishing_that_is_broken_off_is_seen_and_swept(
    shared_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    """Its block is durable: the agent goes on, and the effect goes out."""
    agent, finish, troubles = ticking(), Commits.finish, list[str]()

    async def broken(commits: Commits, pull: Any, settled: Any) -> None:
        monkeypatch.setattr(Commits, "finish", finish)
        if how == "failed":
            raise PanicException("a bug")
        await asyncio.Event().wait()

    async def watch(runner: Runner) -> None:
        while True:
            troubles.append(runner.trouble)
            await asyncio.sleep(0)

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        watching = asyncio.create_task(watch(runner))
        if how == "cancelled early":
            finish_soon = Commits.finish_soon

            async def cancelled(commits: Commits, pull: Any, settled: Any, tokens: Any = ()) -> Any:
                monkeypatch.setattr(Commits, "finish_soon", finish_soon)
                task = await finish_soon(commits, pull, settled, tokens)
                task.cancel()
                return task

            monkeypatch.setattr(Commits, "finish_soon", cancelled)
        else:
            monkeypatch.setattr(Commits, "finish", broken)
        await send(client, command(agent, "go"), {"n": 1})
        if how == "cancelled":
            await until(lambda: Commits.finish is finish and runner.commits.finishing)
            next(iter(runner.commits.finishing)).cancel()
        subject = f"evt.default.demo.{agent.name}"
        await until_async(lambda: stored(shared_server.url, EVENTS, subject), "the sweep")
        await until(lambda: "" == runner.trouble)
        watching.cancel()
        await send(client, command(agent, "go"), {"n": 2})
        await counted(runner, done=2)
    effects = [payload_of(one)["n"] for one in await stored(shared_server.url, EVENTS, subject)]
    assert [1, 2] == sorted(effects)
    assert any("finishing" in trouble for trouble in troubles)
    assert [one for one in caplog.records if "block 1: finishing" in one.getMessage()]


async def test_a_keep_alive_that_fails_is_started_again(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extend = extending._extend
    monkeypatch.setattr(extending, "_extend", fail)
    async with prepared(shared_server.url) as client:
        keepalive = KeepAlive(client, 1.0, 60.0)
        keepalive._start_task()
        assert keepalive._extending is not None
        await asyncio.wait([keepalive._extending])
        monkeypatch.setattr(extending, "_extend", extend)
        await keepalive.check()
        await keepalive.check()
        assert not keepalive._extending.done()
        await keepalive.stop()
    (record,) = [one for one in caplog.records if "keep-alive task ended" in one.getMessage()]
    assert record.exc_info is not None


BROKEN = """
from oncewire.agent import Agent
from oncewire.agent.lane import Lane

agent = Agent("broken", ack_wait_s=1, handler_timeout_s=30)
agent.on("go")(lambda ctx, payload: None)

async def fail(lane):
    raise ZeroDivisionError("a bug")

Lane.run = fail
"""


async def test_the_process_ends_with_a_code_of_its_own(server: NatsServer, tmp_path: Path) -> None:
    module = unique("broken")
    (tmp_path / f"{module}.py").write_text(BROKEN)
    async with (
        prepared(server.url),
        running(server.url, f"sqlite:///{tmp_path}/l.db", f"{module}:agent", tmp_path) as agent,
    ):
        assert face.EXIT_FAILED == await within(agent.process.wait())
        log = agent.log()
    assert "the lane failed: ZeroDivisionError: a bug" in log
    assert 'in fail\\n    raise ZeroDivisionError("a bug")' in log
    assert '"code": "part_ended"' in log
