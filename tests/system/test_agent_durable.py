"""An agent over restarts, outages, several processes and everything that must be refused."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import Corrupt, NotFound, Refused, Unavailable
from oncewire._ground.jetstream import Client, Outgoing, losses
from oncewire._ground.jetstream.keyvalue import KeyValue
from oncewire._ground.ledger.rules import Sending
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.settings import Settings
from oncewire.agent import Agent, Context, Effect, Retry, Runner
from oncewire.agent import upkeep as housekeeping
from oncewire.agent.batch import PowerCut
from oncewire.agent.intake import Intake
from oncewire.agent.outflow import now_ms
from oncewire.agent.sources import adopt
from tests.support.nats import NatsServer
from tests.support.running import (
    COMMANDS,
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
from tests.support.streams import consumer_info, state_of, unique, window_passed
from tests.support.wait import until, until_async

OUT = "evt.default.demo.out"
NOW_MS = 1_790_000_000_000


def echo(agent: Agent, subject: str) -> Agent:
    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(subject, payload)

    return agent


def ends_of(agent: Agent, folder: Path) -> tuple[int, int]:
    """The last block with inputs, and how far the ledger knows all to be confirmed."""
    store = sqlite_in(folder)
    store.open(agent.tenant, agent.workspace, agent.name)
    try:
        blocks = [store.block(number) for number in range(1, store.head().number + 1)]
        return max(block.number for block in blocks if block and block.content.entries), store.confirmed().block
    finally:
        store.close()


class Crash(PowerCut):
    """The process ends right here."""


async def crash_at(agent: Agent, server: NatsServer, folder: Path, step: str, *, clock_off_ms: int = 0) -> None:
    """Run until the step, then drop everything as a killed process would."""
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def at(name: str) -> None:
        if name == step:
            loop.call_soon_threadsafe(reached.set)
            raise Crash

    async with prepared(server.url) as client:
        runner = Runner(agent, client, sqlite_in(folder), at=at)
        await runner.start()
        runner.commits.now_ms = lambda: now_ms() + clock_off_ms
        await asyncio.wait_for(reached.wait(), 20)
        tasks = [*runner._intake_tasks, *runner._tasks, *runner.commits.finishing]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        unexpected = [one for one in results if not isinstance(one, Crash | asyncio.CancelledError | None)]
        assert [] == unexpected
        await runner.lane.stop()
        await runner._let_go()
        forget_process(folder)


def forget_process(folder: Path) -> None:
    """The running mark names this living process: let it look like a dead one."""
    with sqlite3.connect(folder / "ledger.db") as db:
        db.execute("UPDATE OR REPLACE ledger_processes SET process = '999999999:0:gone'")


@pytest.mark.parametrize("step", ["handled", "written", "committed", "published"])
async def test_a_crash_after_any_step_leaves_one_effect(server: NatsServer, tmp_path: Path, step: str) -> None:
    agent = echo(new_agent(), f"{OUT}.x")
    async with prepared(server.url) as client:
        await send(client, command(agent, "go"), {"n": 1})
        await crash_at(agent, server, tmp_path, step)
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            assert runner.is_unclean
            await until_async(lambda: _is_settled(client, agent), "the redelivered input to be acked")
    assert [payload_of(one) for one in await stored(server.url, EVENTS)] == [{"n": 1}]


async def _is_settled(client: Any, agent: Agent) -> bool:
    info = await consumer_info(client, COMMANDS, f"{agent.name}_consumer")
    return not info["num_ack_pending"] and not info["num_pending"]


async def test_effects_left_unpublished_for_longer_than_the_duplicate_window_stand_once(
    server: NatsServer, tmp_path: Path
) -> None:
    """Published, then the process died before the mark, and the server has forgotten the ids when it is back."""
    agent = new_agent()
    subject = "short.out"

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> list[Effect]:
        return [Effect(subject, {"n": n}) for n in range(40)]

    async with prepared(server.url) as client:
        window = {"duplicate_window": 100_000_000, "allow_direct": True, "allow_atomic": True}
        await client.api("STREAM.CREATE.SHORT", {"name": "SHORT", "subjects": ["short.>"], **window})
        await send(client, command(agent, "go"), {})
        await crash_at(agent, server, tmp_path, "published")
        probe = Outgoing("short.probe", b"", "probe")
        await client.publish_one(probe)
        await until_async(lambda: _is_forgotten(client, probe), "the server to forget an id")
        async with run(agent, client, sqlite_in(tmp_path)):
            await until_async(lambda: _is_settled(client, agent))
    assert len(await stored(server.url, "SHORT", subject)) == 40


async def _is_forgotten(client: Any, probe: Outgoing) -> bool:
    return not (await client.publish_one(probe)).is_duplicate


async def test_a_process_that_knows_no_target_sends_what_another_left(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has run all the time, and has never published to that work queue itself."""
    agent = echo(new_agent(), "cmd.default.demo.next.step")
    async with prepared(server.url) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Intake, "_ask", lambda _: None)  # it leaves the input to the other
            patched.setattr(housekeeping, "SWEEP_AFTER_S", 0.0)
            async with run(agent, client, sqlite_in(tmp_path)) as runner:
                patched.setattr(Intake, "_ask", ASK)
                runner.intakes[0]._ask = lambda: None  # type: ignore[method-assign]
                await send(client, command(agent, "go"), {"n": 1})
                await crash_at(agent, server, tmp_path, "committed")

                subject = "cmd.default.demo.next.step"
                (effect,) = await until_async(lambda: stored(server.url, COMMANDS, subject), "the effect")
    assert {"n": 1} == payload_of(effect)


ASK = Intake._ask


@pytest.mark.parametrize("hours", [-3, 3])
async def test_a_wall_clock_that_was_set_doubles_no_effect(server: NatsServer, tmp_path: Path, hours: int) -> None:
    """The process that died had another time: how old its effects are cannot be told by that."""
    agent = echo(new_agent(), "short.out")
    async with prepared(server.url) as client:
        window = {"duplicate_window": 100_000_000, "allow_direct": True}
        await client.api("STREAM.CREATE.SHORT", {"name": "SHORT", "subjects": ["short.>"], **window})
        await send(client, command(agent, "go"), {"n": 1})
        await crash_at(agent, server, tmp_path, "published", clock_off_ms=hours * 3_600_000)
        await window_passed(client, "short.probe")
        async with run(agent, client, sqlite_in(tmp_path)):
            await until_async(lambda: _is_settled(client, agent))
    assert 1 == len(await stored(server.url, "SHORT", "short.out"))


async def test_an_effect_that_would_never_be_confirmed_is_given_up_with_its_input(
    server: NatsServer, tmp_path: Path
) -> None:
    """Committed, it would stop each later start."""
    agent = echo(new_agent(), "sr.queries.stock")
    async with prepared(server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "go"), {"n": 1})
        await counted(runner, terminated=1)
    (letter,) = await stored(server.url, "DLQ_REQUESTS")
    assert "confirms nothing" in letter.headers["Oncewire-Dlq-Cause"]


async def test_a_block_knows_where_the_streams_ended_that_its_handlers_named_first(
    server: NatsServer, tmp_path: Path
) -> None:
    """Or the next process would read such a stream from its beginning, to look for one effect."""
    agent, store = echo(new_agent(), f"{OUT}.x"), sqlite_in(tmp_path)
    async with prepared(server.url) as client:
        for n in range(3):
            await send(client, f"{OUT}.before", {"n": n})
        async with run(agent, client, store) as runner:
            await send(client, command(agent, "go"), {"n": 1})
            await counted(runner, done=1)
            block = await runner.db(store.block, 1)
    assert 3 == block.content.targets[EVENTS]


async def test_a_target_that_was_deleted_is_named_at_the_start(server: NatsServer, tmp_path: Path) -> None:
    agent = echo(new_agent(), "brief.out")
    async with prepared(server.url) as client:
        config = {"name": "BRIEF", "subjects": ["brief.>"]}
        await client.api("STREAM.CREATE.BRIEF", config)
        await send(client, command(agent, "go"), {"n": 1})
        await crash_at(agent, server, tmp_path, "committed")
        await client.api("STREAM.DELETE.BRIEF")
        with pytest.raises(Unavailable, match=r"effects of block 1 cannot be published: brief\.out"):
            async with run(agent, client, sqlite_in(tmp_path)):
                pass
        await client.api("STREAM.CREATE.BRIEF", config)
        async with run(agent, client, sqlite_in(tmp_path)):
            pass
    assert 1 == len(await stored(server.url, "BRIEF"))


async def test_a_delayed_effect_survives_a_restart_and_goes_out_once(shared_server: NatsServer, tmp_path: Path) -> None:
    agent, subject = new_agent(), f"{OUT}.{unique('t')}"

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(subject, payload, delay_s=1.0)

    async with prepared(shared_server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await send(client, command(agent, "go"), {"n": 1})
            await counted(runner, done=1)
            await until_async(lambda: _is_settled(client, agent), "complete once the row is committed")
        assert await stored(shared_server.url, EVENTS, subject) == []
        async with (
            run(agent, client, sqlite_in(tmp_path)),
            run(agent, client, sqlite_in(tmp_path)),
        ):
            await until_async(lambda: stored(shared_server.url, EVENTS, subject))
    assert len(await stored(shared_server.url, EVENTS, subject)) == 1
    blocks = [one.data for one in await stored(shared_server.url, "LEDGER") if agent.name.encode() in one.data]
    id_ = (await stored(shared_server.url, EVENTS, subject))[0].headers["Nats-Msg-Id"].encode()
    assert sum(id_ in block for block in blocks) == 1, "one process took it, not both"


async def test_a_tick_runs_once_per_slot_with_two_processes(shared_server: NatsServer, tmp_path: Path) -> None:
    agent, subject = new_agent(), f"{OUT}.{unique('t')}"
    seen: list[int] = []

    @agent.every(1)
    def beat(ctx: Context) -> Effect:
        seen.append(ctx.ts)
        return Effect(subject, {"ts": ctx.ts})

    async with (
        prepared(shared_server.url) as client,
        run(agent, client, sqlite_in(tmp_path)),
        run(agent, client, sqlite_in(tmp_path)),
    ):
        await until(lambda: len(seen) >= 2, "two slots")
    slots = [payload_of(one)["ts"] for one in await stored(shared_server.url, EVENTS, subject)]
    assert slots == sorted(set(seen)) == seen
    assert all(ts % 1000 == 0 for ts in slots)


async def test_draining_finishes_what_is_in_hand(shared_server: NatsServer, tmp_path: Path) -> None:
    agent = new_agent()
    begun, may_end = asyncio.Event(), asyncio.Event()

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> None:
        begun.set()
        await may_end.wait()

    async with prepared(shared_server.url) as client:
        runner = Runner(agent, client, sqlite_in(tmp_path))
        await runner.start()
        await send(client, command(agent, "go"), {})
        await begun.wait()
        stopping = asyncio.ensure_future(runner.stop())
        await until(lambda: runner._intake_tasks[0].done(), "it to take nothing more")
        await send(client, command(agent, "go"), {"too": "late"})
        may_end.set()
        await stopping
        assert runner.counts == {"done": 1}
        assert (await consumer_info(client, COMMANDS, f"{agent.name}_consumer"))["num_ack_pending"] == 0
        async with run(agent, client, sqlite_in(tmp_path)) as again:
            assert not again.is_unclean
            await counted(again, done=1)


async def test_two_sqlite_files_on_one_durable_are_refused(shared_server: NatsServer, tmp_path: Path) -> None:
    agent = echo(new_agent(), f"{OUT}.x")
    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path, "one.db")):
        with pytest.raises(Refused, match=f"belongs to another ledger of agent {agent.full_name}"):
            async with run(agent, client, sqlite_in(tmp_path, "two.db")):
                pass
        shutil.copy(tmp_path / "one.db", tmp_path / "copy.db")
        with pytest.raises(Refused, match="belongs to another ledger"):
            async with run(agent, client, sqlite_in(tmp_path, "copy.db")):
                pass


@pytest.mark.parametrize("is_one_store", [True, False])
async def test_two_agents_whose_durables_have_one_name_are_refused_whatever_their_ledgers(
    shared_server: NatsServer, tmp_path: Path, is_one_store: bool
) -> None:
    """On one store too: each would run half of the messages, and no word about sharing a ledger may lead there."""
    topic = unique("topic")
    agents = [new_agent(f"acme_eu_{topic}"), new_agent(topic, tenant="acme", workspace="eu")]
    for agent in agents:
        agent.on(f"evt.*.demo.{topic}.>")(lambda ctx, payload: None)
    async with prepared(shared_server.url) as client, run(agents[0], client, sqlite_in(tmp_path)):
        with pytest.raises(Refused, match=f"belongs to agent default/default/acme_eu_{topic}") as refused:
            async with run(agents[1], client, sqlite_in(tmp_path, "ledger.db" if is_one_store else "other.db")):
                pass
        assert "ledger" not in refused.value.hint.lower()
        with pytest.raises(Refused, match="belongs to agent"), contextlib.closing(sqlite_in(tmp_path)) as store:
            await adopt(client, agents[1], Settings(), store)


async def test_a_ledger_that_was_moved_goes_on_once_a_person_says_so(shared_server: NatsServer, tmp_path: Path) -> None:
    agent = new_agent()
    echo(agent, f"{OUT}.{agent.name}")
    async with prepared(shared_server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path, "one.db")) as runner:
            await send(client, command(agent, "go"), {"n": 1})
            await counted(runner, done=1)
        shutil.copy(tmp_path / "one.db", tmp_path / "moved.db")
        with pytest.raises(Refused, match="at another place"):
            async with run(agent, client, sqlite_in(tmp_path, "moved.db")):
                pass

        consumer = f"{COMMANDS}/{agent.name}_consumer"
        assert [consumer] == await adopted(client, agent, tmp_path / "moved.db")
        assert [] == await adopted(client, agent, tmp_path / "moved.db")

        async with run(agent, client, sqlite_in(tmp_path, "moved.db")) as runner:
            await send(client, command(agent, "go"), {"n": 2})
            await counted(runner, done=1)
        with pytest.raises(Refused, match="at another place"):
            async with run(agent, client, sqlite_in(tmp_path, "one.db")):
                pass
    effects = await stored(shared_server.url, EVENTS, f"{OUT}.{agent.name}")
    assert [{"n": 1}, {"n": 2}] == [payload_of(one) for one in effects]


async def test_a_ledger_takes_no_place_that_is_in_use_or_not_its_own(shared_server: NatsServer, tmp_path: Path) -> None:
    agent = echo(new_agent(), f"{OUT}.x")
    async with prepared(shared_server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path, "one.db")) as runner:
            await send(client, command(agent, "go"), {})
            await counted(runner, done=1)
        shutil.copy(tmp_path / "one.db", tmp_path / "moved.db")
        async with run(agent, client, sqlite_in(tmp_path, "one.db")) as runner:
            with pytest.raises(Refused, match="somebody pulls"):
                await adopted(client, agent, tmp_path / "moved.db")
            await send(client, command(agent, "go"), {})
            await counted(runner, done=1)
        with pytest.raises(Corrupt, match="has announced block"):
            await adopted(client, agent, tmp_path / "moved.db")
        with pytest.raises(Refused, match="belongs to another ledger"):
            await adopted(client, agent, tmp_path / "other.db")
        async with run(agent, client, sqlite_in(tmp_path, "one.db")):
            pass


async def test_adopting_goes_on_where_it_was_cut_off(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = echo(new_agent(), f"{OUT}.x")
    agent.on(f"evt.default.demo.{agent.name}")(lambda ctx, payload: None)
    update, written = KeyValue.update, list[str]()

    async def dies_at_the_second(bucket: KeyValue, key: str, value: bytes, revision: int) -> int:
        if written:
            raise Crash
        written.append(key)
        return await update(bucket, key, value, revision)

    async with prepared(shared_server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path, "one.db")):
            pass
        shutil.copy(tmp_path / "one.db", tmp_path / "moved.db")
        with monkeypatch.context() as patched:
            patched.setattr(KeyValue, "update", dies_at_the_second)
            with pytest.raises(Crash):
                await adopted(client, agent, tmp_path / "moved.db")
        for name in ("one.db", "moved.db"):  # each lacks one
            with pytest.raises(Refused, match="at another place"):
                async with run(agent, client, sqlite_in(tmp_path, name)):
                    pass
        assert 1 == len(await adopted(client, agent, tmp_path / "moved.db"))
        async with run(agent, client, sqlite_in(tmp_path, "moved.db")):
            pass


async def adopted(client: Client, agent: Agent, path: Path) -> list[str]:
    with contextlib.closing(SqliteStore(str(path))) as store:
        return await adopt(client, agent, Settings(), store)


async def test_a_ledger_restored_from_a_backup_is_refused(shared_server: NatsServer, tmp_path: Path) -> None:
    """Over the very same file: the inode is the same, only the announcements know better."""
    agent = echo(new_agent(), f"{OUT}.x")
    async with prepared(shared_server.url) as client:
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await send(client, command(agent, "go"), {})
            await counted(runner, done=1)
        backup = (tmp_path / "ledger.db").read_bytes()
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await send(client, command(agent, "go"), {})
            await counted(runner, done=1)
        (tmp_path / "ledger.db").write_bytes(backup)
        with pytest.raises(Corrupt, match="has announced block"):
            async with run(agent, client, sqlite_in(tmp_path)):
                pass


async def test_a_stream_that_went_back_is_refused_until_a_person_accepts_the_loss(
    server: NatsServer, tmp_path: Path
) -> None:
    """A restore keeps the creation time and gives sequences out again."""
    agent, subject = new_agent(), "evt.default.demo.in"
    seen: list[int] = []

    @agent.on(subject)
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        seen.append(payload["n"])

    settings = Settings()
    async with prepared(server.url) as client:
        await send(client, subject, {"n": 0})
    server.stop()
    backup = tmp_path / "backup"
    shutil.copytree(server.folder / "jetstream", backup)
    server.start()
    async with prepared(server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        await send(client, subject, {"n": 1})
        await counted(runner, done=2)
    server.stop()
    store = server.folder / "jetstream" / "jetstream" / "$G" / "streams" / EVENTS
    shutil.rmtree(store)
    shutil.copytree(backup / "jetstream" / "$G" / "streams" / EVENTS, store)
    server.start()
    async with prepared(server.url) as client:
        with pytest.raises(Corrupt, match="went back"):
            async with run(agent, client, sqlite_in(tmp_path)):
                pass
        await send(client, subject, {"n": 2})
        with pytest.raises(Corrupt, match="went back"):
            async with run(agent, client, sqlite_in(tmp_path)):
                pass
        (loss,) = await losses.losses(client)
        assert (loss.stream, loss.reader, loss.first, loss.last) == (EVENTS, f"{agent.name}_consumer", 2, 2)
        assert [1] == [one.incarnation for one in await losses.acknowledge(client, EVENTS, NOW_MS)]
        with pytest.raises(NotFound):
            await losses.acknowledge(client, EVENTS, NOW_MS)
        async with run(agent, client, sqlite_in(tmp_path), settings=settings) as runner:
            await until(lambda: 2 in seen, "the message at a sequence that was settled before")
    assert seen.count(1) == 1


async def test_the_closing_block_of_one_process_does_not_hold_up_the_marks_of_another(
    server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent()

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        """Only its block matters."""

    async with (
        prepared(server.url) as client,
        prepared(server.url) as second_client,
        run(agent, client, sqlite_in(tmp_path)) as first,
        run(agent, second_client, sqlite_in(tmp_path)) as second,
    ):
        runners = (first, second)

        def done() -> list[int]:
            return [runner.counts.get("done", 0) for runner in runners]

        async def one_more() -> None:
            wanted = sum(done()) + 1
            await send(client, command(agent, "go"), {})
            await until(lambda: sum(done()) == wanted)

        while not all(done()):
            await one_more()
        await until(lambda: all(runner.commits.closing_marks for runner in runners), "both to be closed off")
        await one_more()
    last, confirmed = ends_of(agent, tmp_path)
    assert confirmed >= last


async def test_a_closing_block_takes_no_mark_of_a_block_that_was_settled_beside_it(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = echo(new_agent(), f"{OUT}.{unique('x')}")
    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        commits, publish, closing = runner.commits, runner.commits.outflow.publish, asyncio.Event()

        async def hold_closing_block(block: int, sendings: Sequence[Sending], announcement: bytes) -> Any:
            if not sendings and not closing.is_set():
                closing.set()
                await until(lambda: any(mark.block > block for mark in commits.marks), "the block beside it")
            return await publish(block, sendings, announcement)

        monkeypatch.setattr(commits.outflow, "publish", hold_closing_block)
        await send(client, command(agent, "go"), {"n": 1})
        await asyncio.wait_for(closing.wait(), 20)
        await send(client, command(agent, "go"), {"n": 2})
        await until(lambda: commits.closing_marks, "the closing block to be out")
        assert not commits.is_closed_off
    last, confirmed = ends_of(agent, tmp_path)
    assert confirmed >= last


async def test_a_drain_publishes_what_it_cut_short(
    shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = echo(new_agent(), f"{OUT}.{unique('x')}")
    async with prepared(shared_server.url) as client:
        runner = Runner(agent, client, sqlite_in(tmp_path))
        await runner.start()
        publish, begun = runner.commits.outflow.publish, asyncio.Event()

        async def hang(block: int, sendings: Sequence[Sending], announcement: bytes) -> Any:
            if sendings:
                begun.set()
                await asyncio.Event().wait()
            return await publish(block, sendings, announcement)

        monkeypatch.setattr(runner.commits.outflow, "publish", hang)
        await send(client, command(agent, "go"), {"n": 1})
        await asyncio.wait_for(begun.wait(), 20)
        await runner.stop(timeout_s=0.1)
    last, confirmed = ends_of(agent, tmp_path)
    assert confirmed >= last


async def test_a_lost_connection_loses_nothing(server: NatsServer, tmp_path: Path) -> None:
    agent, count = echo(new_agent(), f"{OUT}.x"), 60
    async with prepared(server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        for n in range(count // 2):
            await send(client, command(agent, "go"), {"n": n})
        await until(lambda: runner.counts.get("done", 0) > 5)
        server.kill()
        await until(lambda: runner.trouble == "NATS is away")
        server.start()
        await until(lambda: client.connection.is_ready)
        for n in range(count // 2, count):
            await send(client, command(agent, "go"), {"n": n})
        await until_async(lambda: _is_settled(client, agent), "everything to be settled")
        await until(lambda: runner.counts.get("done", 0) == count)
    effects = [payload_of(one)["n"] for one in await stored(server.url, EVENTS)]
    assert sorted(effects) == list(range(count))


async def test_a_store_that_is_away_costs_no_deliveries(shared_server: NatsServer, tmp_path: Path) -> None:
    """Another process inside its transaction holds the file: the batch waits in hand, readiness says why."""
    agent = echo(new_agent(max_deliver=2), f"{OUT}.{unique('t')}")
    deliveries: list[int] = []

    @agent.on("waits")
    async def waits(ctx: Context, payload: dict[str, Any]) -> None:
        deliveries.append(ctx.deliveries)
        async with ctx.tx as tx:
            tx.execute("CREATE TABLE IF NOT EXISTS t (n)")

    store = sqlite_in(tmp_path)
    async with prepared(shared_server.url) as client, run(agent, client, store) as runner:
        store.connection.execute("PRAGMA busy_timeout = 10")
        with sqlite3.connect(tmp_path / "ledger.db", isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            for n in range(5):
                await send(client, command(agent, "go"), {"n": n})
                await send(client, command(agent, "waits"), {"n": n})
            await until(lambda: "locked" in runner.trouble, "readiness to name it")
            began = time.monotonic()
            await until(lambda: time.monotonic() - began > 2.5, "more than two ack_waits to pass")
            other.execute("ROLLBACK")
        other.close()
        await counted(runner, done=10)
        await until(lambda: not runner.trouble)
        assert "retried" not in runner.counts
        assert "dead" not in runner.counts
    assert set(deliveries) == {1}


async def test_a_full_disk_leaves_neither_rows_without_outcome_nor_outcomes_without_rows(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent(max_deliver=2)

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.tx.execute("CREATE TABLE IF NOT EXISTS blobs (n INTEGER, body BLOB)")
        ctx.tx.execute("INSERT INTO blobs VALUES (?, zeroblob(?))", (payload["n"], payload["size"]))

    store = sqlite_in(tmp_path)
    async with prepared(shared_server.url) as client, run(agent, client, store) as runner:
        await send(client, command(agent, "go"), {"n": 0, "size": 10})
        await counted(runner, done=1)
        pages = await runner.db(lambda: store.connection.execute("PRAGMA page_count").fetchone()[0])
        await runner.db(lambda: store.connection.execute(f"PRAGMA max_page_count = {pages + 5}").fetchall())
        for n in range(1, 6):
            await send(client, command(agent, "go"), {"n": n, "size": 10 if n % 2 else 200_000})
        await until(lambda: "full" in runner.trouble or "ended" in runner.trouble, "readiness to name it")
        await runner.db(lambda: store.connection.execute("PRAGMA max_page_count = 1000000").fetchall())
        await counted(runner, done=6)
        rows = await runner.db(lambda: store.connection.execute("SELECT n FROM blobs ORDER BY n").fetchall())
        assert "dead" not in runner.counts
    assert rows == [(n,) for n in range(6)]


async def test_a_rate_is_kept_and_nothing_is_redelivered_while_it_waits(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent()
    at: list[float] = []
    deliveries: set[int] = set()

    @agent.on("go", rate_per_s=20)
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        at.append(time.monotonic())
        deliveries.add(ctx.deliveries)

    async with prepared(shared_server.url) as client:
        for n in range(50):
            await send(client, command(agent, "go"), {"n": n})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=50)
    assert deliveries == {1}
    assert at[-1] - at[0] >= (50 - 3) / 20


async def test_async_handlers_wait_side_by_side_longer_than_ack_wait(shared_server: NatsServer, tmp_path: Path) -> None:
    """No lock is held, nothing is redelivered, and sync inputs go on meanwhile."""
    agent = new_agent(concurrency=16)
    deliveries: list[int] = []
    may_end = asyncio.Event()

    @agent.on("wait")
    async def wait(ctx: Context, payload: dict[str, Any]) -> None:
        deliveries.append(ctx.deliveries)
        await may_end.wait()

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        pass

    async with prepared(shared_server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        for n in range(18):
            await send(client, command(agent, "wait"), {"n": n})
        await until(lambda: len(deliveries) == 16, "as many as may to run")
        began = time.monotonic()
        await send(client, command(agent, "go"), {})
        await counted(runner, done=1)
        await until(lambda: time.monotonic() - began > 2.5, "more than two ack_waits to pass")
        assert (await consumer_info(client, COMMANDS, f"{agent.name}_consumer"))["num_redelivered"] == 0
        may_end.set()
        await counted(runner, done=19)
    assert deliveries == [1] * 18


@pytest.mark.parametrize("others", [0, 4])
async def test_a_handler_that_holds_the_interpreter_past_ack_wait_keeps_its_input_and_those_behind_it(
    shared_server: NatsServer, tmp_path: Path, others: int
) -> None:
    """No thread of the process can say anything meanwhile: another process does."""
    agent = new_agent()
    deliveries: list[int] = []

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        deliveries.append(ctx.deliveries)
        if len(deliveries) == 1:
            ctypes.PyDLL(None).usleep(2_500_000)  # a PyDLL call does not let go of the interpreter

    async with prepared(shared_server.url) as client:
        for _ in range(1 + others):
            await send(client, command(agent, "go"), {})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await counted(runner, done=1 + others)
            info = await until_async(lambda: _info_when_settled(client, agent))
            assert info["delivered"]["consumer_seq"] == 1 + others
            assert runner._keepalive is not None
            assert runner._keepalive._process is not None
            runner._keepalive._process.kill()
            gone = runner._keepalive._process
            await until(lambda: runner._keepalive._process is not gone, "a killed keep-alive to be replaced")
    assert deliveries == [1] * (1 + others)


async def _info_when_settled(client: Any, agent: Agent) -> dict[str, Any] | None:
    info = await consumer_info(client, COMMANDS, f"{agent.name}_consumer")
    return None if info["num_ack_pending"] else info


async def test_a_slow_handler_neither_holds_the_ledger_for_a_batch_nor_hoards(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent()
    blocked = 0.1

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        time.sleep(blocked)

    async with prepared(shared_server.url) as client:
        for n in range(200):
            await send(client, command(agent, "go"), {"n": n})
        async with run(agent, client, sqlite_in(tmp_path)) as runner:
            await until(lambda: runner.counts.get("done", 0) >= 8)
            assert runner.counts["done"] < 60, "the first batch ended long before it was through"
            await until(lambda: runner.intakes[0].pace.hold <= 20)


async def test_ordered_means_stream_order_retries_included_over_processes(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    agent = new_agent(ordered=True)
    seen: list[int] = []

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if payload["n"] % 4 == 1 and ctx.deliveries == 1:
            raise Retry(after_s=0.02)
        seen.append(payload["n"])

    async with prepared(shared_server.url) as client:
        for n in range(20):
            await send(client, command(agent, "go"), {"n": n})
        async with (
            run(agent, client, sqlite_in(tmp_path)),
            run(agent, client, sqlite_in(tmp_path)),
        ):
            await until(lambda: len(seen) >= 20)
    assert seen == list(range(20))


async def test_several_processes_share_the_work_and_each_effect_stands_once(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    subject = f"{OUT}.{unique('t')}"
    agent = echo(new_agent(batch=10), subject)
    async with prepared(shared_server.url) as one, prepared(shared_server.url) as two:
        for n in range(200):
            await send(one, command(agent, "go"), {"n": n})
        async with (
            run(agent, one, sqlite_in(tmp_path)) as first,
            run(agent, two, sqlite_in(tmp_path)) as second,
        ):
            await until(lambda: first.counts.get("done", 0) + second.counts.get("done", 0) == 200)
    effects = [payload_of(one)["n"] for one in await stored(shared_server.url, EVENTS, subject)]
    assert sorted(effects) == list(range(200))


POISON = """
import asyncio, os, sys
from pathlib import Path
from oncewire.agent import Context, Effect
from tests.support.running import new_agent, prepared, run, sqlite_in

agent = new_agent(sys.argv[2], max_deliver=3)

@agent.on("go")
def go(ctx, payload):
    if payload["n"] == 17:
        os._exit(9)
    return Effect("evt.default.demo.poison", payload)

async def main():
    async with prepared(sys.argv[1]) as client, run(agent, client, sqlite_in(Path(sys.argv[3]))) as runner:
        while runner.counts.get("dead", 0) < 1 or runner.in_flight:
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


async def test_one_poison_message_is_given_up_and_all_its_neighbours_are_done(
    server: NatsServer, tmp_path: Path
) -> None:
    agent, count = new_agent(), 100
    async with prepared(server.url) as client:
        for n in range(count):
            await send(client, command(agent, "go"), {"n": n})
        deaths = 0
        while True:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", POISON, server.url, agent.name, str(tmp_path), env=environment
            )
            code = await asyncio.wait_for(process.wait(), 60)
            if code == 0:
                break
            assert code == 9
            deaths += 1
            assert deaths <= 3, "no more deaths than deliveries"
        assert deaths == 3
        assert (await state_of(client, COMMANDS))["messages"] == 0, "nothing is left in the work queue"
    effects = [payload_of(one)["n"] for one in await stored(server.url, EVENTS, "evt.default.demo.poison")]
    assert sorted(effects) == [n for n in range(count) if n != 17]
    (letter,) = await stored(server.url, "DLQ_REQUESTS")
    assert payload_of(letter) == {"n": 17}
    assert letter.headers["Oncewire-Dlq-Cause"] == housekeeping.GIVEN_UP


async def test_an_exhausted_input_whose_body_is_gone_is_still_reported(server: NatsServer, tmp_path: Path) -> None:
    agent, subject = new_agent(max_deliver=1), "evt.default.demo.in"

    @agent.on(subject)
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        pass

    async with prepared(server.url) as client, run(agent, client, sqlite_in(tmp_path)) as runner:
        (opened,) = runner.opened.values()
        key = sources_key(runner, 5)
        attempt = housekeeping.Attempt(key, *opened.source.durable, 5, opened.max_deliver, 1, "")
        await runner.db(runner.store.begun, [attempt])
        await counted(runner, dead=1)
        assert await runner.db(runner.store.attempts) == []
    (letter,) = await stored(server.url, "DLQ_REQUESTS")
    assert letter.headers["Oncewire-Dlq-Payload"] == "gone"
    assert letter.headers["Oncewire-Dlq-Sequence"] == "5"


def sources_key(runner: Runner, sequence: int) -> bytes:
    from oncewire._ground.ledger import rules

    (opened,) = runner.opened.values()
    return rules.position_key(runner.ledger.name, EVENTS, opened.source.created, sequence)


async def test_an_adapters_state_is_a_fold_over_the_ledger(shared_server: NatsServer, tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def receive(self, envelope: Any) -> Effect:
            return Effect(subject, {"before": self.total, "add": envelope.payload["add"]})

        def apply(self, envelope: Any) -> None:
            self.total += envelope.payload["add"]

        def get_state(self) -> dict[str, int]:
            return {"total": self.total}

        def health(self) -> dict[str, str]:
            return {"mood": "good"}

    subject, name = f"{OUT}.{unique('t')}", unique("counter")
    async with prepared(shared_server.url) as client:
        for add in range(1, 11):
            await send(client, f"cmd.default.default.{name}.add", {"add": add})
        for _ in range(2):
            agent = Agent.from_adapter(Counter, name=name, ack_wait_s=1.0, tick_s=3600)
            async with run(agent, client, sqlite_in(tmp_path)) as runner:
                await send(client, f"cmd.default.default.{name}.add", {"add": 0})
                await until_async(lambda: _is_settled(client, agent))  # noqa: B023
                assert agent.adapted is not None
                await runner.db(agent.adapted.catch_up, runner.store)
                assert agent.adapted.get_state() == {"total": 55}
                assert runner.health()["mood"] == "good"
                assert runner.health()["is_ready"]
    effects = [payload_of(one) for one in await stored(shared_server.url, EVENTS, subject)]
    totals = [sum(one["add"] for one in effects[:index]) for index in range(len(effects))]
    assert [one["before"] for one in effects] == totals


async def test_a_missing_stream_is_named_at_the_start(server: NatsServer, tmp_path: Path) -> None:
    from oncewire._ground.jetstream import connect

    agent = echo(new_agent(), f"{OUT}.x")
    async with connect(server.url) as client:
        with pytest.raises(NotFound, match="no stream captures"):
            async with run(agent, client, sqlite_in(tmp_path)):
                pass
        with pytest.raises(Refused, match="has no handlers"):
            async with run(new_agent(), client, sqlite_in(tmp_path)):
                pass


async def test_the_lifespan_hook_is_around_the_run(shared_server: NatsServer, tmp_path: Path) -> None:
    from contextlib import asynccontextmanager

    order: list[str] = []

    @asynccontextmanager
    async def pool(agent: Agent) -> Any:
        order.append("open")
        yield
        order.append("closed")

    agent = new_agent(lifespan=pool)

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        order.append("handled")

    async with prepared(shared_server.url) as client, agent.running(client, sqlite_in(tmp_path)) as runner:
        await send(client, command(agent, "go"), {})
        await counted(runner, done=1)
    assert order == ["open", "handled", "closed"]
