"""An agent in a process of its own: it writes rows, calls outside, returns effects, and dies where it is told to.

What each input does follows from its number (`kind_of`), so that whoever counts knows what must be there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

import oncewire
from oncewire._ground.errors import Unavailable
from oncewire._ground.ledger.stores import open_store
from oncewire._ground.settings import Settings
from oncewire.agent import Agent, Effect, Retry, Terminate, exits, outflow
from oncewire.agent.run import Runner
from oncewire.agent.ways import Ways
from tests.faults import agent_mutations
from tests.faults.agent_points import Death, Points, put_seams
from tests.faults.agent_power import note_unsynced

WORKSPACE = "faults"
AWAY_CODE = 75
"""It ended because a server or the store was away."""
KINDS = ("sync", "sync", "sync", "sync", "sync", "wait", "wait", "late", "bad", "again")
LOGS = ("out", "far")
TARGETS = dict.fromkeys(LOGS, "evt.default.{workspace}.{agent}.{part}.made") | {
    "queue": "cmd.default.{workspace}.{agent}-next.made",
    "events": "sr.events.{agent}.made",
    "commands": "sr.commands.{agent}.made",
    "latest": "latest.{agent}.{n}",
    "brief": "brief.{agent}.made",
    "foreign": "foreign.{agent}.made",
}
"""The streams that effects go to, and the subject there: one of each kind."""
CATASTROPHE = re.compile(r"(a|aa)+$")
GOLDEN = 1.618
"""One more letter takes so many times as long."""


class Plan(msgspec.Struct):
    """What a worker is told."""

    nats: str
    store: str
    agent: str
    outside_port: int
    ack_wait_s: float = 1.0
    max_deliver: int = 5
    batch: int = 200
    concurrency: int = 16
    point: str = ""
    nth: int = 1
    mutation: str = ""
    power_cut_file: str = ""
    delay_s: float = 0.5
    wait_s: float = 0.0
    handler_timeout_s: float = 60.0
    stops: bool = False
    """At the point it stands still instead of dying."""
    file_bytes_max: int = 0
    keep_s: int = 0
    clock_ahead_s: int = 0
    """So much later it is for what is forgotten."""
    many: int = outflow.MANY
    way: str = ""
    """`fast` or `atomic`: how many effects go out, instead of what was learned."""
    look: int = exits.LOOK


def kind_of(number: int) -> str:
    return KINDS[number % len(KINDS)]


def subject_of(agent: str, kind: str) -> str:
    return f"evt.default.{WORKSPACE}.{agent}.in.{kind}"


def target_subject(agent: str, part: str, number: int | str) -> str:
    return TARGETS[part].format(workspace=WORKSPACE, agent=agent, part=part, n=number)


async def call_outside(port: int, key: str) -> int:
    """The outside service answers every call with one and the same key alike, and counts them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{key}\n".encode())
    line = await reader.readline()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return int(line)


def hold_interpreter(seconds: float) -> None:
    """One match of a catastrophic expression: no other thread of this process runs meanwhile."""
    size, took = 20, 0.0
    while took < 0.05:
        size += 1
        began = time.perf_counter()
        CATASTROPHE.match("a" * size + "b")
        took = time.perf_counter() - began
    while took < seconds:
        size, took = size + 1, took * GOLDEN
    CATASTROPHE.match("a" * size + "b")


def make_agent(plan: Plan, at: Points) -> Agent:
    agent = Agent(
        plan.agent,
        workspace=WORKSPACE,
        ack_wait_s=plan.ack_wait_s,
        max_deliver=plan.max_deliver,
        batch=plan.batch,
        concurrency=plan.concurrency,
        handler_timeout_s=plan.handler_timeout_s,
    )
    mark = "%s" if plan.store.startswith("postgres") else "?"
    insert = f"INSERT INTO business (n, kind) VALUES ({mark}, {mark})"

    def effect(number: int, part: str, to: str = "out", **more: Any) -> Effect:
        delay_s = more.pop("delay_s", 0.0)
        subject = target_subject(plan.agent, to, number)
        return Effect(subject, {"n": number, "part": part, **more}, delay_s=delay_s)

    @agent.on(subject_of(plan.agent, "sync"))
    def sync(ctx: Any, body: dict[str, Any]) -> list[Effect]:
        at("handler:before")
        tx = ctx.tx
        at("row:before")
        tx.execute(insert, (body["n"], "sync"))
        at("row:after")
        effects = [effect(body["n"], "a"), effect(body["n"], "b", "far")]
        at("handler:after")
        return effects

    @agent.on(subject_of(plan.agent, "late"))
    def late(ctx: Any, body: dict[str, Any]) -> Effect:
        ctx.tx.execute(insert, (body["n"], "late"))
        return effect(body["n"], "d", delay_s=plan.delay_s)

    @agent.on(subject_of(plan.agent, "bad"))
    def bad(ctx: Any, body: dict[str, Any]) -> None:
        ctx.tx.execute(insert, (body["n"], "bad"))
        raise Terminate("it is bad")

    @agent.on(subject_of(plan.agent, "fan"))
    def fan(ctx: Any, body: dict[str, Any]) -> list[Effect]:
        ctx.tx.execute(insert, (body["n"], "fan"))
        return [effect(body["n"], part, part) for part in TARGETS]

    async def charge(ctx: Any, body: dict[str, Any], kind: str) -> Effect:
        result = await ctx.once("call", outside, ctx.key("call"))
        if kind == "again" and ctx.deliveries == 1:
            raise Retry(after_s=0.05)
        async with ctx.tx as tx:
            tx.execute(insert, (body["n"], kind))
            at("section:inside")
        return effect(body["n"], "a", result=result)

    async def outside(key: str) -> int:
        at("call:before")
        result = await call_outside(plan.outside_port, key)
        at("call:made")
        return result

    @agent.on(subject_of(plan.agent, "wait"))
    async def wait(ctx: Any, body: dict[str, Any]) -> Effect:
        return await charge(ctx, body, "wait")

    @agent.on(subject_of(plan.agent, "again"))
    async def again(ctx: Any, body: dict[str, Any]) -> Effect:
        return await charge(ctx, body, "again")

    @agent.on(subject_of(plan.agent, "poison"))
    def poison(ctx: Any, body: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @agent.on(subject_of(plan.agent, "slow"))
    async def slow(ctx: Any, body: dict[str, Any]) -> Effect:
        await asyncio.sleep(plan.wait_s)  # what it stands for is a slow partner, not a wait of the test
        async with ctx.tx as tx:
            tx.execute(insert, (body["n"], "slow"))
        return effect(body["n"], "a")

    @agent.on(subject_of(plan.agent, "regex"))
    def regex(ctx: Any, body: dict[str, Any]) -> Effect:
        hold_interpreter(plan.wait_s)
        ctx.tx.execute(insert, (body["n"], "regex"))
        return effect(body["n"], "a")

    return agent


def go_one_way(way: str) -> None:
    """Many effects go out this way, whatever is quicker here."""
    Ways.wants_look = lambda *_: False  # type: ignore[method-assign]
    Ways.choose_atomic = lambda *_: way == "atomic"  # type: ignore[method-assign]


async def run(plan: Plan, at: Points) -> None:
    store = open_store(plan.store, handler_timeout_s=plan.handler_timeout_s)
    agent_mutations.apply(plan.mutation, type(store), at)
    put_seams(type(store), at)
    agent = make_agent(plan, at)
    settings = Settings(ledger_keep_s=plan.keep_s)

    def later_ms() -> int:
        return outflow.now_ms() + plan.clock_ahead_s * 1000

    async with (
        oncewire.connect(plan.nats) as client,
        Runner(agent, client, store, settings, at=at, clock_ms=later_ms) as runner,
    ):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runner.ask_to_stop)
        print("running", flush=True)
        await runner.wait()


def main(told: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    plan = msgspec.json.decode(told, type=Plan)
    before = (lambda: note_unsynced(plan.store, Path(plan.power_cut_file))) if plan.power_cut_file else (lambda: None)
    outflow.MANY = plan.many
    exits.LOOK = plan.look
    if plan.way:
        go_one_way(plan.way)
    at = Points(Death(plan.point, plan.nth, signal.SIGSTOP if plan.stops else signal.SIGKILL), before)
    if plan.file_bytes_max:
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.file_bytes_max, resource.RLIM_INFINITY))
    try:
        asyncio.run(run(plan, at))
    except Unavailable as problem:  # whoever runs it starts it again
        print(problem, file=sys.stderr)
        sys.exit(AWAY_CODE)
    finally:
        print(msgspec.json.encode(dict(at.hits)).decode(), flush=True)
