"""What an agent has taken in and not begun: when it is read, and where it goes when the agent cannot go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncewire.agent import Agent, Runner
from oncewire.agent.flow import Bucket
from oncewire.agent.intake import Intake
from oncewire.errors import Corrupt
from oncewire.ledger.sqlite import SqliteStore
from tests.support.nats import NatsServer
from tests.support.running import command, counted, new_agent, prepared, run, send, sqlite_in
from tests.support.wait import until

PATIENCE_S = 10.0


def is_soon(condition: Callable[[], Any]) -> bool:
    """In the ledger's thread, while the loop goes on."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def counting_agent(**options: Any) -> Agent:
    agent = new_agent(**options)

    @agent.on("count")
    def count(ctx: Any, payload: dict[str, Any]) -> None: ...

    return agent


class SlowDisk(SqliteStore):
    """A ledger whose next commit, once `wait_for` is set, waits for that."""

    wait_for: Callable[[], Any] | None = None
    has_seen: bool | None = None

    def commit(self) -> None:
        condition, self.wait_for = self.wait_for, None
        if condition is not None:
            self.has_seen = is_soon(condition)
        super().commit()


async def test_what_arrives_is_read_while_a_commit_waits_for_the_disk(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent, store = counting_agent(), SlowDisk(str(tmp_path / "ledger.db"))
    points: list[str] = []
    runners: list[Runner] = []

    def at(step: str) -> None:
        points.append(step)
        if step == "written" and runners and store.has_seen is None:
            intake = runners[0].intakes[0]
            assert is_soon(lambda: intake.unread)
            store.wait_for = lambda: intake.queue

    async with prepared(shared_server.url) as client, Runner(agent, client, store, at=at) as runner:
        runners.append(runner)
        await send(client, command(agent, "count"), {"n": 1})
        await until(lambda: "written" in points)
        await send(client, command(agent, "count"), {"n": 2})
        await counted(runner, done=2)
    assert store.has_seen


async def test_what_has_no_rate_is_not_left_unread_behind_what_waits_for_a_token(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, store = counting_agent(batch=1), SlowDisk(str(tmp_path / "ledger.db"))
    agent.on("rare", rate_per_s=5.0)(lambda ctx, payload: None)
    unread_at_waits: list[int] = []
    runners: list[Runner] = []
    is_begun = threading.Event()
    wait = Intake._wait

    async def watched(intake: Intake) -> None:
        unread_at_waits.append(len(intake.unread))
        await wait(intake)

    def at(step: str) -> None:
        if step == "written" and not is_begun.is_set():
            is_begun.set()
            intake = runners[0].intakes[0]
            assert is_soon(lambda: intake.unread)
            store.wait_for = lambda: intake.queue and intake.unread

    monkeypatch.setattr(Intake, "_wait", watched)
    monkeypatch.setattr(Bucket, "take", lambda *_: not is_begun.is_set())
    async with prepared(shared_server.url) as client:
        runner = Runner(agent, client, store, at=at)
        await runner.start()
        runners.append(runner)
        await send(client, command(agent, "rare"), {"n": 1})  # takes the last token
        await until(is_begun.is_set)
        await send(client, command(agent, "rare"), {"n": 2})
        await until(lambda: runner.intakes[0].queue)
        await send(client, command(agent, "count"), {"n": 3})
        await counted(runner, done=2)
        await runner.stop(timeout_s=0.1)  # the second one would wait for ever
    assert store.has_seen
    assert not any(unread_at_waits)


async def test_what_was_not_read_is_offered_to_others_when_an_agent_must_stop(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = counting_agent(ack_wait_s=300.0, handler_timeout_s=300.0)
    points: list[str] = []
    runners: list[Runner] = []

    def at(step: str) -> None:
        points.append(step)
        if points.count("written") == 1 and step == "written":
            assert is_soon(lambda: runners[0].intakes[0].unread)
            raise Corrupt("the ledger is broken")

    async with prepared(shared_server.url) as client:
        async with Runner(agent, client, sqlite_in(tmp_path), at=at) as runner:
            runners.append(runner)
            await send(client, command(agent, "count"), {"n": 1})
            await until(lambda: "written" in points)
            await send(client, command(agent, "count"), {"n": 2})
            with pytest.raises(Corrupt):
                await runner.wait()
        async with run(agent, client, sqlite_in(tmp_path)) as second:
            await counted(second, done=1)  # the first input had begun: it comes after ack_wait, which is long
