"""An agent that forgets what is complete and old: what is kept still counts, replays and adds up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import Refused
from oncewire._ground.settings import Settings
from oncewire.agent import Agent, Context, Effect, replay
from oncewire.agent.forget import DAY_S
from oncewire.agent.status import ledger_status
from tests.support.nats import NatsServer
from tests.support.running import command, counted, new_agent, prepared, run, send, sqlite_in
from tests.support.streams import unique
from tests.support.wait import until, until_async

KEEP_S = 60 * DAY_S


def later_ms() -> int:
    return time.time_ns() // 1_000_000 + 2 * KEEP_S * 1000


def echo(subject: str, **options: Any) -> Agent:
    agent = new_agent(**options)

    @agent.on(subject)
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect("evt.default.demo.forget.out", payload)

    return agent


async def test_old_blocks_go_and_what_is_kept_can_be_replayed(shared_server: NatsServer, tmp_path: Path) -> None:
    subject = f"evt.default.demo.{unique('f')}"
    agent = echo(subject)
    async with prepared(shared_server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            for n in range(6):
                await send(client, subject, {"n": n}, key=f"k{n}")
                await counted(runner, done=n + 1)
            state = (await runner.db(runner.store.head)).state
        keeping = {"settings": Settings(ledger_keep_s=KEEP_S), "clock_ms": later_ms}
        async with run(agent, client, sqlite_in(tmp_path), **keeping) as runner:

            async def is_forgotten() -> bool:
                base = await runner.db(
                    runner.store.base
                )  # in its own thread: two on one connection may lock each other
                return bool(base.number >= 5)

            await until_async(is_forgotten, "old blocks to be forgotten")
            assert (await runner.db(runner.store.head)).state == state
            await send(client, subject, {"n": 7}, key="k7")
            await counted(runner, done=1)
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await send(client, subject, {"n": 7}, key="k7")
            await counted(runner, duplicate=1)
    status = ledger_status(sqlite_in(tmp_path), agent)
    report = replay.recompute_hash(agent, sqlite_in(tmp_path))

    assert status.base >= 5
    assert (report.first, report.is_equal) == (status.base + 1, True)


async def test_a_message_that_waits_in_a_work_queue_holds_back_what_came_after_it(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    """A copy of something done may wait behind it."""
    agent = echo("go")
    async with prepared(shared_server.url) as client:
        await send(client, f"cmd.default.demo.{unique('nobody')}.go", {})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            for n in range(3):
                await send(client, command(agent, "go"), {"n": n})
                await counted(runner, done=n + 1)
        keeping = {"settings": Settings(ledger_keep_s=KEEP_S), "clock_ms": later_ms}
        async with run(agent, client, sqlite_in(tmp_path), **keeping) as runner:
            await until(lambda: runner.upkeep.forgetting.rounds > 0, "a look at what is old")
            assert (await runner.db(runner.store.base)).number == 0


async def test_a_setting_that_is_too_short_is_refused(shared_server: NatsServer, tmp_path: Path) -> None:
    agent = echo(f"evt.default.demo.{unique('f')}")
    async with prepared(shared_server.url) as client:
        with pytest.raises(Refused, match=r"ledger\.keep_s is 86400, but an input may come again for"):
            async with run(agent, client, sqlite_in(tmp_path), settings=Settings(ledger_keep_s=DAY_S)):
                pass
