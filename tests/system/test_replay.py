"""Replay: the same handlers make the same of a ledger; anything else is named with the input where it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import NotFound
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.ledger.rules import Source
from oncewire._ground.ledger.store import Store
from oncewire.agent import Agent, Context, Effect, Retry
from oncewire.agent.batch import GroupCommit, Limits
from oncewire.agent.read import Reading
from oncewire.agent.replay import Report, recompute_hash, replay
from tests.support.ledgers import LedgerKit, PostgresKit, SqliteKit
from tests.support.nats import NatsServer
from tests.support.running import command, counted, new_agent, prepared, run, send

CREATED = "2026-01-01T00:00:00Z"
STREAM = "COMMANDS"
OUT = "evt.default.demo.billing.charged"
Handle = Callable[[Context, dict[str, Any]], Any]


@pytest.fixture(params=["sqlite", "postgres"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerKit:
    made: LedgerKit = SqliteKit(tmp_path) if request.param == "sqlite" else PostgresKit()
    made.sql("CREATE TABLE totals (name text, cents integer)")
    made.sql("CREATE TABLE prices (item text, cents integer)")
    made.sql("INSERT INTO prices VALUES ('tea', 3)")
    return made


def agent_of(handle: Handle) -> Agent:
    agent = Agent("biller", workspace="demo")
    agent.on("charge")(handle)
    return agent


def charge(ctx: Context, order: dict[str, Any]) -> list[Effect]:
    ctx.tx.execute(f"INSERT INTO charges VALUES ({int(order['n'])})")
    return [Effect(OUT, {"n": order["n"], "id": ctx.id(), "chance": ctx.random.random()})]


def settle_all(agent: Agent, store: Store, payloads: list[dict[str, Any]], *, batch: int = 2) -> None:
    """What a run would commit, without a server: one group per batch."""
    ledger = store.open(agent.tenant, agent.workspace, agent.name)
    source = Source(STREAM, CREATED, "biller_consumer", ("cmd.>",), 1, False)
    sources = {source.durable: source}
    reading = Reading(agent, ledger, [source])
    limits = Limits(ledger, 5, lambda subject: "OUT", lambda sending: None, 1_790_000_000_000)
    messages = [message_of(number, payload) for number, payload in enumerate(payloads, store.head().number * batch + 1)]
    for start in range(0, len(messages), batch):
        settled = GroupCommit(store, limits, sources).run(reading.read(messages[start : start + batch]), {}, [])
        assert [] == settled.naks
    store.close()


def message_of(number: int, payload: dict[str, Any]) -> Message:
    body = json.dumps({"type": "Charge", "payload": payload, "idempotency_key": f"k{number}"}).encode()
    reply = f"$JS.ACK.{STREAM}.biller_consumer.1.{number}.{number}.{number * 1_000_000}.0".encode()
    return Message(0, b"cmd.default.demo.biller.charge", reply, b"", body)


def numbers(count: int) -> list[dict[str, Any]]:
    return [{"n": number} for number in range(count)]


def assert_equal(report: Report) -> None:
    assert (None, None, [], True) == (report.difference, report.hash.difference, report.rows, report.is_equal)


def test_the_same_handlers_make_the_same(kit: LedgerKit) -> None:
    settle_all(agent_of(charge), kit.unopened(), numbers(7))
    report = replay(agent_of(charge), kit.unopened())
    assert_equal(report)
    assert (7, 7, ["charges"], 1, 4) == (
        report.inputs,
        report.effects,
        report.tables,
        report.hash.first,
        report.hash.last,
    )


def test_a_replay_changes_nothing(kit: LedgerKit) -> None:
    settle_all(agent_of(charge), kit.unopened(), numbers(3))
    before = {table: kit.sql(f"SELECT * FROM {table}") for table in ("charges", "ledger_blocks", "ledger_chains")}
    replay(agent_of(charge), kit.unopened())
    assert before == {table: kit.sql(f"SELECT * FROM {table}") for table in before}


def test_the_first_input_with_another_effect_is_named(kit: LedgerKit) -> None:
    def changed(ctx: Context, order: dict[str, Any]) -> list[Effect]:
        effects = charge(ctx, order)
        return [Effect(OUT, {**effects[0].payload, "n": -1})] if order["n"] >= 2 else effects

    settle_all(agent_of(charge), kit.unopened(), numbers(6))
    found = replay(agent_of(changed), kit.unopened()).difference
    assert found is not None
    assert (2, "key:default/demo/k3", "cmd.default.demo.biller.charge", STREAM, 3) == (
        found.block,
        found.identity,
        found.subject,
        found.stream,
        found.sequence,
    )
    assert "payload of effect 0" in found.what


@pytest.mark.parametrize(
    ("handle", "what"),
    [
        (lambda ctx, order: [], "1 effects stored, 0 made"),
        (lambda ctx, order: [*charge(ctx, order), Effect(OUT, {})], "1 effects stored, 2 made"),
        (lambda ctx, order: Effect("evt.default.demo.other.x", {}), "subject of effect 0"),
        (lambda ctx, order: 1 / 0, "it fails now: ZeroDivisionError"),
        (lambda ctx, order: ctx.tx.execute("SELECT * FROM nowhere"), "it fails now"),
    ],
)
def test_whatever_a_handler_does_otherwise_is_a_difference(kit: LedgerKit, handle: Handle, what: str) -> None:
    settle_all(agent_of(charge), kit.unopened(), numbers(3))
    found = replay(agent_of(handle), kit.unopened()).difference
    assert found is not None
    assert what in found.what
    assert "key:default/demo/k1" == found.identity


def test_a_subject_without_a_handler_is_a_difference(kit: LedgerKit) -> None:
    settle_all(agent_of(charge), kit.unopened(), numbers(1))
    agent = Agent("biller", workspace="demo")
    agent.on("refund")(charge)
    found = replay(agent, kit.unopened()).difference
    assert found is not None
    assert "no handler" in found.what


def test_rows_that_differ_are_shown(kit: LedgerKit) -> None:
    settle_all(agent_of(charge), kit.unopened(), numbers(3))
    kit.sql("INSERT INTO charges VALUES (77)")
    kit.sql("DELETE FROM charges WHERE id = 1")
    report = replay(agent_of(charge), kit.unopened())
    assert not report.is_equal
    (found,) = report.rows
    assert ("charges", ["(77)"], ["(1)"]) == (
        found.table,
        [row.replace(",", "") for row in found.only_stored],
        [row.replace(",", "") for row in found.only_replayed],
    )


def test_state_that_builds_on_state_is_rebuilt(kit: LedgerKit) -> None:
    """Each input reads what the ones before it wrote."""

    def add(ctx: Context, order: dict[str, Any]) -> Effect:
        (total,) = ctx.tx.execute("SELECT coalesce(sum(cents), 0) FROM totals").fetchone()
        ctx.tx.execute(f"INSERT INTO totals VALUES ('x', {total + 1})")
        return Effect(OUT, {"total": total})

    settle_all(agent_of(add), kit.unopened(), numbers(8), batch=3)
    assert_equal(replay(agent_of(add), kit.unopened()))


def test_tables_that_handlers_only_read_keep_their_rows(kit: LedgerKit) -> None:
    def price(ctx: Context, order: dict[str, Any]) -> Effect:
        (cents,) = ctx.tx.execute("SELECT cents FROM prices WHERE item = 'tea'").fetchone()
        ctx.tx.execute(f"INSERT INTO totals VALUES ('tea', {cents})")
        return Effect(OUT, {"cents": cents})

    settle_all(agent_of(price), kit.unopened(), numbers(3))
    report = replay(agent_of(price), kit.unopened())
    assert_equal(report)
    assert (["prices"], ["totals"]) == (report.filled, report.tables)


def test_a_handler_that_was_retried_is_retried_in_the_replay(kit: LedgerKit) -> None:
    def late(ctx: Context, order: dict[str, Any]) -> list[Effect]:
        effects = charge(ctx, order)
        if ctx.deliveries == 1:
            raise Retry
        return effects

    settle_all(agent_of(charge), kit.unopened(), numbers(2))
    assert_equal(replay(agent_of(late), kit.unopened()))


def test_a_delayed_effect_waits_or_was_sent(kit: LedgerKit) -> None:
    def later(ctx: Context, order: dict[str, Any]) -> list[Effect]:
        return [Effect(OUT, {"now": 1}), Effect(OUT, {"later": order["n"]}, delay_s=60)]

    settle_all(agent_of(later), kit.unopened(), numbers(2))
    assert_equal(replay(agent_of(later), kit.unopened()))
    found = replay(agent_of(lambda ctx, order: [Effect(OUT, {"now": 1}), Effect(OUT, {}, delay_s=60)]), kit.unopened())
    assert found.difference is not None
    assert "payload of effect 0" in found.difference.what
    kit.sql("DELETE FROM ledger_delayed")
    found = replay(agent_of(later), kit.unopened())
    assert found.difference is not None
    assert ("its delayed effect is nowhere", "key:default/demo/k1") == (
        found.difference.what,
        found.difference.identity,
    )


def test_a_handler_that_writes_into_a_real_table_by_its_full_name_changes_nothing() -> None:
    kit = PostgresKit()

    def full(ctx: Context, order: dict[str, Any]) -> None:
        ctx.tx.execute(f"INSERT INTO {kit.schema}.charges VALUES ({order['n']}) ON CONFLICT DO NOTHING")

    settle_all(agent_of(full), kit.unopened(), numbers(2))
    kit.sql("DELETE FROM charges")
    replay(agent_of(full), kit.unopened())
    assert [] == kit.rows()


def test_a_serial_column_counts_for_itself_in_a_replay() -> None:
    kit = PostgresKit()
    kit.sql("CREATE TABLE rows (id serial PRIMARY KEY, n integer)")

    def insert(ctx: Context, order: dict[str, Any]) -> Effect:
        (id_,) = ctx.tx.execute("INSERT INTO rows (n) VALUES (%s) RETURNING id", (order["n"],)).fetchone()
        return Effect(OUT, {"row": id_})

    settle_all(agent_of(insert), kit.unopened(), numbers(3))
    assert_equal(replay(agent_of(insert), kit.unopened()))
    assert [(3,)] == kit.sql("SELECT last_value FROM rows_id_seq")


# ---- the hash


def test_the_hash_is_what_the_entries_add_up_to(kit: LedgerKit) -> None:
    settle_all(agent_of(charge), kit.unopened(), numbers(5))
    report = recompute_hash(agent_of(charge), kit.unopened())
    assert report.is_equal
    assert (report.stored, 1, 3) == (report.recomputed, report.first, report.last)


FIRST = "(SELECT {0} FROM ledger_blocks WHERE number = 1)"


@pytest.mark.parametrize(
    ("damage", "what", "block"),
    [
        (f"UPDATE ledger_blocks SET content = {FIRST.format('content')} WHERE number = 2", "entries add up to", 2),
        (f"UPDATE ledger_blocks SET announcement = {FIRST.format('announcement')} WHERE number = 3", "that it is 1", 3),
        ("UPDATE ledger_chains SET hash = base_hash", "the chain's end", 3),
    ],
)
def test_a_ledger_that_was_altered_is_found_out(kit: LedgerKit, damage: str, what: str, block: int) -> None:
    settle_all(agent_of(charge), kit.unopened(), numbers(5))
    kit.sql(damage)
    report = recompute_hash(agent_of(charge), kit.unopened())
    assert not report.is_equal
    assert report.difference is not None
    assert what in report.difference.what
    assert block == report.difference.block


def test_an_agent_that_has_done_nothing_is_not_found(kit: LedgerKit) -> None:
    for ask in (replay, recompute_hash):
        with pytest.raises(NotFound, match="has done nothing"):
            ask(agent_of(charge), kit.unopened())


# ---- a whole run


class Counting:
    """An adapter: what it answers depends on all before."""

    def __init__(self) -> None:
        self.total = 0

    def receive(self, envelope: Any) -> Effect:
        return Effect(OUT, {"total": self.total + envelope.payload["n"]})

    def apply(self, envelope: Any) -> None:
        self.total += envelope.payload["n"]

    def get_state(self) -> dict[str, int]:
        return {"total": self.total}


async def test_a_run_with_calls_sections_and_delays_is_replayed(server: NatsServer, kit: LedgerKit) -> None:
    """Nobody outside is called again: what they answered is in the ledger."""
    agent = new_agent(workspace="demo")
    asked: list[int] = []

    def ask(number: int) -> int:
        asked.append(number)
        return len(asked)

    @agent.on("wait")
    async def wait(ctx: Context, order: dict[str, Any]) -> list[Effect]:
        answer = await ctx.once("ask", ask, order["n"])
        async with ctx.tx as tx:
            tx.execute(f"INSERT INTO charges VALUES ({order['n']})")
        return [Effect(OUT, {"answer": answer}), Effect(OUT, {"late": answer}, delay_s=0.01)]

    @agent.on("plain")
    def plain(ctx: Context, order: dict[str, Any]) -> Effect:
        return Effect(OUT, {"key": ctx.key("x"), "ts": ctx.ts})

    async with prepared(server.url) as client, run(agent, client, kit.unopened()) as runner:
        for number in range(6):
            await send(client, command(agent, "wait" if number % 2 else "plain"), {"n": number})
        await counted(runner, done=6)
    report = await asyncio.to_thread(replay, agent, kit.unopened())
    assert_equal(report)
    assert (6, 9, 3) == (report.inputs, report.effects, len(asked))


async def test_an_adapter_is_folded_again(server: NatsServer, kit: LedgerKit) -> None:
    agent = Agent.from_adapter(Counting, name="counter", workspace="demo", ack_wait_s=5.0)
    async with prepared(server.url) as client, run(agent, client, kit.unopened()) as runner:
        for number in range(5):
            await send(client, command(agent, "add"), {"n": number})
        await counted(runner, done=5)
    fresh = Agent.from_adapter(Counting, name="counter", workspace="demo")
    report = await asyncio.to_thread(replay, fresh, kit.unopened())
    assert_equal(report)
    assert (5, {"total": 10}) == (report.inputs, report.state)
