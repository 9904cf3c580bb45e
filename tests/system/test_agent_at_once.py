"""Two who do the same at the same moment, a call, an input or a delayed effect: one of them counts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oncewire._ground.contracts.blocks import Announcement, read_announcement
from oncewire._ground.jetstream import Message, StoredMessage
from oncewire._ground.ledger.postgres import PostgresStore
from oncewire._ground.ledger.rules import Delayed
from oncewire.agent import Agent, Context, Effect
from oncewire.agent.lookout import as_delivered
from tests.support.ledgers import PostgresKit
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
from tests.support.wait import until, until_async

OUT = "evt.default.demo.at-once"


async def announced(url: str, agent: Agent) -> list[Announcement]:
    found = [read_announcement(one.data) for one in await stored(url, "LEDGER")]
    return [one for one in found if one.agent == agent.name]


async def test_of_two_processes_in_one_call_both_go_on_with_the_result_that_was_recorded(
    server: NatsServer, tmp_path: Path
) -> None:
    """The second one has called too, and is the first to settle the input: what it sends must be what is recorded."""
    agent = new_agent(concurrency=1)
    called, answered = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
    recorded, may_end = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    async def bank(number: int) -> str:
        called[number].set()
        await answered[number].wait()
        return f"receipt {number}"

    @agent.on("pay")
    async def pay(ctx: Context, payload: dict[str, Any]) -> Effect:
        number = len(handled)
        handled.append(number)
        receipt = await ctx.once("bank", bank, number)
        if number == 0:
            await may_end.wait()
        return Effect(OUT, {"receipt": receipt})

    @agent.on("wait")
    async def wait(ctx: Context, payload: dict[str, Any]) -> None:
        """It fills the first process, which then asks for nothing more."""
        await may_end.wait()

    def note(step: str) -> None:
        if step == "called":
            recorded.set()

    async with (
        prepared(server.url) as client,
        prepared(server.url) as second_client,
        run(agent, client, sqlite_in(tmp_path), at=note) as first,
    ):
        await send(client, command(agent, "pay"), {}, key="order-1")
        await called[0].wait()
        await send(client, command(agent, "wait"), {})
        await until(lambda: first.lane.in_hand == 2, "the first process to be full")
        async with run(agent, second_client, sqlite_in(tmp_path)) as second:
            await send(client, command(agent, "pay"), {}, key="order-1")
            await called[1].wait()
            answered[0].set()
            await recorded.wait()
            answered[1].set()
            await counted(second, done=1)
            may_end.set()
            await counted(first, done=1, duplicate=1)
    assert [{"receipt": "receipt 0"}] == [payload_of(one) for one in await stored(server.url, EVENTS, OUT)]


class Pull:
    """Settles nothing: what it would settle is counted by the runner."""

    def ack(self, messages: Sequence[Message]) -> None: ...
    def nak(self, messages: Sequence[Message], delay_s: float = 0.0) -> None: ...
    def term(self, messages: Sequence[Message], reason: str = "") -> None: ...


async def test_the_same_input_twice_in_one_group_of_async_handlers_is_settled_once(
    server: NatsServer, tmp_path: Path
) -> None:
    """Two positions of one identity that return in the same moment, into the same commit."""
    agent, may_end = new_agent(), asyncio.Event()
    subject = f"evt.default.demo.{agent.name}"

    @agent.on(subject)
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        await may_end.wait()
        return Effect(OUT, payload)

    body = json.dumps({"type": "Test", "payload": {}, "idempotency_key": "order-1"}).encode()
    copies = [StoredMessage(EVENTS, subject, at, "2026-11-19T00:00:00Z", {}, body) for at in (1_001, 1_002)]
    async with prepared(server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        [intake] = runner.intakes
        source, max_deliver = intake.opened.source, intake.opened.max_deliver
        messages = [as_delivered(copy, source, max_deliver) for copy in copies]
        for item in intake.reading.read(messages):
            runner.lane.add(item, Pull(), runner.commits.keepalive.watch([item.message.reply]), max_deliver)
        await until(lambda: runner.lane.running == 2, "both handlers to run")
        may_end.set()
        await counted(runner, done=1, duplicate=1)
    blocks = await announced(server.url, agent)
    assert 1 == sum(len(block.effects) for block in blocks)
    assert ([[(1_001, 1_001)]], [[(1_002, 1_002)]]) == (
        [inputs.done for block in blocks for inputs in block.inputs if inputs.done],
        [inputs.duplicate for block in blocks for inputs in block.inputs if inputs.duplicate],
    )


class Meeting(PostgresStore):
    """Both processes have seen what is due before either takes it: no lock hides it from the second one."""

    def __init__(self, url: str, both: threading.Barrier) -> None:
        super().__init__(url)
        self._both: threading.Barrier | None = both

    def due(self, now_ms: int, limit: int) -> list[Delayed]:
        found = [one for one in self.waiting() if one.due_ms <= now_ms][:limit]
        both, self._both = self._both, None
        if both is not None:
            both.wait(30)
        return found


async def test_of_two_processes_that_find_one_delayed_effect_due_one_sends_it(server: NatsServer) -> None:
    agent, kit, both = new_agent(), await asyncio.to_thread(PostgresKit), threading.Barrier(2)
    subject = f"{OUT}.{agent.name}"

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(subject, payload, delay_s=0.5)

    async with (
        prepared(server.url) as client,
        prepared(server.url) as second_client,
        run(agent, client, Meeting(kit.url, both)),
        run(agent, second_client, Meeting(kit.url, both)),
    ):
        await send(client, command(agent, "go"), {"n": 1})
        await until_async(lambda: stored(server.url, EVENTS, subject), "the effect")
    [effect] = await stored(server.url, EVENTS, subject)
    naming = [one.number for one in await announced(server.url, agent) if effect.headers["Nats-Msg-Id"] in one.effects]
    assert (1, False) == (len(naming), both.broken)
