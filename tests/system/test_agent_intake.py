"""What an agent has taken in and not begun: where it is read, and where it goes when the agent cannot go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import Corrupt
from oncewire._ground.jetstream import Outgoing
from oncewire.agent import Agent, Runner
from oncewire.agent.flow import Bucket
from oncewire.agent.intake import FEW, Intake
from oncewire.agent.keepalive import KeepAlive
from oncewire.agent.read import Reading
from tests.support.nats import NatsServer
from tests.support.running import command, counted, new_agent, prepared, run, send, sqlite_in
from tests.support.streams import unique
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


async def test_many_are_read_in_the_ledgers_thread_and_few_where_they_arrive(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, reads = counting_agent(), list[tuple[int, str]]()
    read = Reading.read_delivered

    def watched(reading: Reading, messages: list[Any], deliveries: list[Any]) -> Any:
        reads.append((len(messages), threading.current_thread().name))
        return read(reading, messages, deliveries)

    monkeypatch.setattr(Reading, "read_delivered", watched)
    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "count"), {"n": 0})
        await counted(runner, done=1)
        assert [(1, threading.current_thread().name)] == reads
        body = b'{"type": "Test", "payload": {}}'
        many = [Outgoing(command(agent, "count"), body, unique(agent.name)) for _ in range(500)]
        await client.publish_all(many)
        await counted(runner, done=501)
    by_ledger = {name.startswith("oncewire-ledger") for count, name in reads if count >= FEW}
    assert by_ledger == {True}


async def test_what_has_no_rate_is_not_left_unread_behind_what_waits_for_a_token(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = counting_agent(batch=1)
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
            assert is_soon(lambda: len(runners[0].intakes[0].unread) == 2)

    monkeypatch.setattr(Intake, "_wait", watched)
    monkeypatch.setattr(Bucket, "take", lambda *_: not is_begun.is_set())
    async with prepared(shared_server.url) as client:
        runner = Runner(agent, client, sqlite_in(tmp_path), at=at)
        await runner.start()
        runners.append(runner)
        await send(client, command(agent, "rare"), {"n": 1})  # takes the last token
        await until(is_begun.is_set)
        await send(client, command(agent, "rare"), {"n": 2})
        await until(lambda: runner.intakes[0].unread)
        await send(client, command(agent, "count"), {"n": 3})
        await counted(runner, done=2)
        await runner.stop(timeout_s=0.1)  # the second one would wait for ever
    assert unread_at_waits
    assert not any(unread_at_waits)


async def test_what_waits_for_a_token_is_kept_in_progress_by_itself_alone(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what came together nothing is left: it would be extended long after it was settled."""
    agent, watched = new_agent(), set[int]()
    agent.on("rare", rate_per_s=2.0)(lambda ctx, payload: None)
    watch, release = KeepAlive._watch, KeepAlive.release

    def watching(keepalive: KeepAlive, verb: bytes, words: list[bytes]) -> int:
        token = watch(keepalive, verb, words)
        watched.add(token)
        return token

    def releasing(keepalive: KeepAlive, token: int) -> None:
        watched.discard(token)
        release(keepalive, token)

    monkeypatch.setattr(KeepAlive, "_watch", watching)
    monkeypatch.setattr(KeepAlive, "release", releasing)
    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        for number in range(3):
            await send(client, command(agent, "rare"), {"n": number})
        await counted(runner, done=3)
        await until(lambda: not watched)


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
