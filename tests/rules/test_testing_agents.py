"""What AgentTest promises to those who test with it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from oncewire._ground.contracts.message import new_message
from oncewire._ground.errors import Refused
from oncewire.agent import Agent, Context, Effect, Retry, Terminate
from oncewire.testing import AgentTest
from oncewire.testing.agents import START_MS, STEPS

pytest_plugins = ["oncewire.testing.fixtures"]

OUT = "evt.default.default.out"


@dataclass
class Order:
    id: str
    cents: int = 0


def echoing(**options: Any) -> Agent:
    agent = Agent("echo", **options)

    @agent.on("sync")
    def sync(ctx: Context, order: Order) -> Effect:
        return Effect(OUT, {"order": order.id})

    @agent.on("wait")
    async def wait(ctx: Context, order: Order) -> Effect:
        await asyncio.sleep(0)
        async with ctx.tx as tx:
            tx.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT)")
            tx.execute("INSERT INTO orders VALUES (?)", (order.id,))
        return Effect(OUT, {"order": order.id})

    return agent


@pytest.mark.parametrize("name", ["sync", "wait"])
@pytest.mark.parametrize("payload", [{"id": "o1"}, Order("o1"), b'{"type": "T", "payload": {"id": "o1"}}'])
def test_an_input_has_its_effect(name: str, payload: Any) -> None:
    with AgentTest(echoing()) as t:
        assert t.send(name, payload).outcome == "done"
        (effect,) = t.effects
        assert (effect.subject, effect.payload, effect.type) == (OUT, {"order": "o1"}, "out")
        assert effect.id == effect.envelope["id"]
        assert effect.headers["traceparent"].split("-")[1] == effect.envelope["trace_id"]


@pytest.mark.parametrize("name", ["sync", "wait"])
@pytest.mark.parametrize("step", [step for step in STEPS if step != "call"])
def test_a_crash_after_any_step_is_healed_by_the_redelivery(name: str, step: str) -> None:
    with AgentTest(echoing()) as t:
        t.crash_after(step)
        assert t.send(name, {"id": "o1"}).outcome == "crashed"
        is_published = step in ("publish", "ack")
        assert len(t.effects) == is_published
        assert t.redeliver().outcome in ("done", "redelivered")
        assert len(t.effects) == 1
        assert t.redeliver().outcome == "redelivered"
        assert len(t.effects) == 1
        if name == "wait":
            assert t.rows("SELECT id FROM orders") == [("o1",)]


def test_a_restart_publishes_what_was_persisted() -> None:
    with AgentTest(echoing()) as t:
        t.crash_after("persist")
        t.send("sync", {"id": "o1"})
        assert t.effects == []
        t.restart()
        assert len(t.effects) == 1


def test_the_state_hash_is_the_same_for_any_order_and_redelivery() -> None:
    with AgentTest(echoing()) as one, AgentTest(echoing()) as two:
        for id_ in ("a", "b", "c"):
            one.send("sync", {"id": id_}, key=id_)
        for id_ in ("c", "a", "a", "b"):
            two.send("sync", {"id": id_}, key=id_)
            two.redeliver()
        assert one.state_hash == two.state_hash
        two.send("sync", {"id": "d"}, key="d")
        assert one.state_hash != two.state_hash


def test_outcomes_are_told() -> None:
    agent = Agent("moody", max_deliver=2)

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect | None:
        if payload["do"] == "terminate":
            raise Terminate("no")
        if payload["do"] == "retry" and ctx.deliveries == 1:
            raise Retry(after_s=10, reason="later")
        if payload["do"] == "never":
            raise ValueError("broken")
        return None

    with AgentTest(agent) as t:
        assert t.send("go", {"do": "well"}, key="k").outcome == "done"
        assert t.send("go", {"do": "well"}, key="k").outcome == "duplicate"
        conflict = t.send("go", {"do": "other"}, key="k")
        assert (conflict.outcome, conflict.error) == ("dead", "identity_conflict")
        gone = t.send("go", {"do": "terminate"})
        assert (gone.outcome, gone.error) == ("terminated", "no")
        again = t.send("go", {"do": "retry"})
        assert (again.outcome, again.error) == ("retried", "Retry: later")
        assert t.redeliver().outcome == "done"
        assert t.send("go", {"do": "never"}).outcome == "retried"
        assert t.redeliver().outcome == "dead"
        assert t.send("go", b"garbage").outcome == "terminated"
        assert t.send("unknown", {}).outcome == "retried"
        causes = [letter.cause for letter in t.dead_letters]
        assert causes[:3] == ["identity_conflict", "no", "ValueError: broken"]


def test_time_brings_retries_delays_and_ticks() -> None:
    agent = Agent("timely")
    tried: list[int] = []

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        tried.append(ctx.deliveries)
        if ctx.deliveries < 3:
            raise Retry(after_s=10)
        return Effect(OUT, {"late": True}, delay_s=100)

    @agent.every(60)
    def beat(ctx: Context) -> Effect:
        return Effect(OUT, {"ts": ctx.ts})

    with AgentTest(agent) as t:
        t.send("go", {})
        t.advance(9)
        assert tried == [1]
        t.advance(11)
        assert tried == [1, 2, 3]
        t.advance(90)
        assert [effect.payload for effect in t.effects] == [{"ts": START_MS + 60_000}]
        t.advance(10)
        assert [effect.payload for effect in t.effects] == [
            {"ts": START_MS + 60_000},
            {"late": True},
            {"ts": START_MS + 120_000},
        ]
        assert t.now_ms == START_MS + 120_000


def test_a_call_happens_once_even_when_the_process_dies_after_it() -> None:
    agent = Agent("caller")
    calls: list[str] = []

    @agent.on("go")
    async def go(ctx: Context, payload: dict[str, Any]) -> Effect:
        async def call(key: str) -> int:
            calls.append(key)
            return len(calls)

        return Effect(OUT, {"result": await ctx.once("pay", call, ctx.key("pay"))})

    with AgentTest(agent) as t:
        t.crash_after("call")
        assert t.send("go", {}).outcome == "crashed"
        assert t.redeliver().outcome == "done"
        assert len(calls) == 1
        assert t.effects[0].payload == {"result": 1}


async def test_it_works_inside_an_async_test_too() -> None:
    with AgentTest(echoing()) as t:
        assert t.send("wait", {"id": "o1"}).outcome == "done"


def test_the_fixture_makes_and_closes_them(agent_test: Any) -> None:
    t = agent_test(echoing())
    t.send("sync", {"id": "o1"})
    assert len(t.effects) == 1


def test_the_lifespan_hook_is_around_it() -> None:
    order: list[str] = []

    @asynccontextmanager
    async def lifespan(agent: Agent) -> Any:
        order.append("open")
        yield
        order.append("closed")

    with AgentTest(echoing(lifespan=lifespan)) as t:
        assert t.send("sync", {"id": "o1"}).outcome == "done"
    assert order == ["open", "closed"]


def test_message_envelopes_go_as_they_are() -> None:
    from datetime import UTC, datetime

    agent = Agent("loops")

    @agent.on("sr.commands.loop.start")
    def start(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect("sr.events.loop", {"by": ctx.envelope.actor.role}, type="LoopStarted")

    when = datetime(2026, 1, 1, tzinfo=UTC)
    with AgentTest(agent) as t:
        sent = new_message("Start", {}, message_id="m1", timestamp=when, actor_id="ann", actor_kind="HUMAN")
        assert t.send("sr.commands.loop.start", sent).outcome == "done"
        (effect,) = t.effects
        assert (effect.type, effect.payload) == ("LoopStarted", {"by": "user"})
        assert effect.id == effect.envelope["idempotency_key"]
        assert effect.envelope["message_id"].startswith("fx.")


@pytest.mark.parametrize(
    ("subject", "type_"),
    [
        ("evt.acme.demo.billing.charged", "billing.charged"),
        ("sr.events.iteration", "iteration"),
        ("sr.commands.oracle.run", "oracle.run"),
        ("platform.billing.usage.metered", "usage.metered"),
        ("storage.attachment.requested", "requested"),
    ],
)
def test_an_effect_without_a_type_is_called_by_the_end_of_its_subject(subject: str, type_: str) -> None:
    agent = Agent("named")
    agent.on("go")(lambda ctx, payload: Effect(subject, {}))
    with AgentTest(agent) as t:
        t.send("go", {})
        assert [type_] == [effect.type for effect in t.effects]


@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_an_effect_that_would_be_a_dead_letter_is_given_up(delay_s: float) -> None:
    agent = Agent("rogue")
    agent.on("go")(lambda ctx, payload: Effect("dlq.billing.rogue", {}, delay_s=delay_s))
    with AgentTest(agent) as t:
        told = t.send("go", {})
        assert told.outcome == "terminated"
        assert "where only Oncewire itself writes" in told.error
        t.advance(2)
        assert t.effects == []


def test_an_effect_to_nowhere_and_one_too_large_are_given_up_as_in_production() -> None:
    agent = Agent("wrong", max_deliver=1)

    @agent.on("nowhere")
    def nowhere(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect("no.stream.takes.this", {})

    @agent.on("large")
    def large(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(OUT, {"text": "x" * 2_000_000})

    with AgentTest(agent) as t:
        assert "no stream captures" in t.send("nowhere", {}).error
        assert "bytes" in t.send("large", {}).error
        assert t.effects == []


def test_what_makes_no_sense_is_refused() -> None:
    with AgentTest(echoing()) as t:
        with pytest.raises(Refused, match="nothing was sent"):
            t.redeliver()
        with pytest.raises(Refused, match="no step is called 'lunch'") as caught:
            t.crash_after("lunch")
        assert "persist" in caught.value.hint


def test_chance_and_ids_repeat() -> None:
    agent = Agent("lucky")
    seen: list[Any] = []

    @agent.on("go")
    def go(ctx: Context, payload: dict[str, Any]) -> None:
        seen.append((ctx.random.random(), ctx.id(), ctx.id(), ctx.key("x"), ctx.ts))
        if ctx.deliveries == 1:
            raise Retry

    with AgentTest(agent) as t:
        t.send("go", {})
        t.redeliver()
    assert seen[0] == seen[1]
    assert seen[0][1] != seen[0][2]


def test_wrong_uses_of_the_context_say_what_to_do() -> None:
    agent = Agent("hasty", max_deliver=1)

    @agent.on("twice")
    async def twice(ctx: Context, payload: dict[str, Any]) -> None:
        async with ctx.tx:
            pass
        async with ctx.tx:
            pass

    @agent.on("late")
    async def late(ctx: Context, payload: dict[str, Any]) -> None:
        async with ctx.tx:
            await ctx.once("x", lambda: 1)

    @agent.on("odd")
    async def odd(ctx: Context, payload: dict[str, Any]) -> None:
        await ctx.once("x", lambda: object())

    @agent.on("nan")
    async def nan(ctx: Context, payload: dict[str, Any]) -> None:
        await ctx.once("x", lambda: {"rate": float("nan")})

    @agent.on("inside")
    async def inside(ctx: Context, payload: dict[str, Any]) -> None:
        await ctx.once("x", lambda: ctx.once("x", lambda: 1))

    @agent.on("named")
    async def named(ctx: Context, payload: dict[str, Any]) -> None:
        await ctx.once("a\0b", lambda: 1)

    @agent.on("unnamed")
    def unnamed(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.once("x", lambda: 1)

    @agent.on("commit")
    async def commit(ctx: Context, payload: dict[str, Any]) -> None:
        async with ctx.tx as tx:
            tx.execute("COMMIT")

    with AgentTest(agent) as t:
        assert "entered once" in t.send("twice", {}).error
        assert "comes before ctx.tx" in t.send("late", {}).error
        assert "cannot be recorded" in t.send("odd", {}).error
        assert "NaN or an infinite number" in t.send("nan", {}).error
        assert "is called inside itself" in t.send("inside", {}).error
        assert "name 'a\\x00b' has a NUL" in t.send("named", {}).error
        assert "needs an `async def` handler" in t.send("unnamed", {}).error
        assert "may not end or begin the ledger's transaction" in t.send("commit", {}).error


def test_calls_of_one_name_side_by_side_are_one_call() -> None:
    agent, calls = Agent("caller", max_deliver=1), list[str]()

    async def call(who: str) -> str:
        calls.append(who)
        await asyncio.sleep(0)
        return who

    @agent.on("both")
    async def both(ctx: Context, payload: dict[str, Any]) -> Effect:
        results = await asyncio.gather(ctx.once("pay", call, "a"), ctx.once("pay", call, "b"), ctx.once("x", call, "c"))
        return Effect(OUT, {"results": results})

    @agent.on("fails")
    async def fails(ctx: Context, payload: dict[str, Any]) -> Effect:
        async def broken() -> None:
            raise ValueError("no")

        results = await asyncio.gather(ctx.once("pay", broken), ctx.once("pay", call, "d"), return_exceptions=True)
        return Effect(OUT, {"results": [str(result) for result in results]})

    with AgentTest(agent) as t:
        assert t.send("both", {}).outcome == t.send("fails", {}).outcome == "done"
        assert [one.payload["results"] for one in t.effects] == [["a", "a", "c"], ["no", "d"]]
    assert calls == ["a", "c", "d"]


def test_effects_are_plain_values() -> None:
    with AgentTest(echoing()) as t:
        t.send("sync", {"id": "o1"})
        assert msgspec.to_builtins(t.effects[0])["payload"] == {"order": "o1"}


def test_keys_count_within_their_tenant_and_on_one_subject() -> None:
    agent = Agent("shop")

    @agent.on("evt.*.demo.multi.>")
    def any_order(ctx: Context, payload: dict[str, Any]) -> Effect:
        return Effect(OUT, payload)

    with AgentTest(agent) as t:
        sent = [
            t.send(f"evt.{tenant}.demo.multi.x", {"cents": 5}, type="Paid", key="1") for tenant in ("t1", "t2", "t1")
        ]
        refund = t.send("evt.t1.demo.multi.refund", {"cents": 5}, type="Paid", key="1")
        assert [one.outcome for one in sent] == ["done", "done", "duplicate"]
        assert (refund.outcome, refund.error) == ("dead", "identity_conflict")
        assert len({effect.id for effect in t.effects}) == 2


def test_an_effect_on_a_stream_that_confirms_nothing_is_refused() -> None:
    agent = Agent("asking")
    agent.on("go")(lambda ctx, payload: Effect("sr.queries.stock", {}))

    with AgentTest(agent) as t:
        assert "confirms nothing" in t.send("go", {}).error


@pytest.mark.parametrize("form", ["def", "async def", "task"])
def test_a_handler_that_exits_or_panics_fails_in_the_test_too(form: str) -> None:
    class PanicException(BaseException):
        """What PyO3 raises."""

    agent = Agent("leaving", max_deliver=2)

    def act(payload: dict[str, Any]) -> None:
        if payload["exits"]:
            raise SystemExit(5)
        raise PanicException("index out of bounds")

    async def leave(payload: dict[str, Any]) -> None:
        act(payload)

    if form == "def":
        agent.on("go")(lambda ctx, payload: act(payload))
    else:

        @agent.on("go")
        async def go(ctx: Context, payload: dict[str, Any]) -> None:
            await (asyncio.create_task(leave(payload)) if form == "task" else leave(payload))

    with AgentTest(agent) as t:
        first, panic = t.send("go", {"exits": True}), t.send("go", {"exits": False})
        assert ("retried", "SystemExit: 5") == (first.outcome, first.error)
        assert ("retried", "PanicException: index out of bounds") == (panic.outcome, panic.error)
        assert ("dead", "PanicException: index out of bounds") == (t.redeliver().outcome, t.dead_letters[0].cause)


@pytest.mark.parametrize("subject", [OUT, "sr.events.loop"])
@pytest.mark.parametrize("number", [1_705_329_000_123_456_789, 2**64 - 1, -(2**80)])
def test_large_whole_numbers_go_through(subject: str, number: int) -> None:
    agent = Agent("clock")
    agent.on("go")(lambda ctx, payload: Effect(subject, payload))
    with AgentTest(agent) as t:
        assert t.send("go", {"at_ns": number}).outcome == "done"
        assert [effect.payload for effect in t.effects] == [{"at_ns": number}]
