"""What a group commit decides about inputs that meet in one batch, on a ledger in memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from oncewire import Agent, Effect
from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.contracts.ids import effect_id
from oncewire._ground.errors import Refused, TooLarge
from oncewire._ground.jetstream import Message
from oncewire._ground.ledger.rules import Ledger, Sending, Source
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire.agent.batch import GroupCommit, Limits, Settled
from oncewire.agent.read import Reading

SUBJECT = "evt.default.default.orders.placed"
ANY_SUBJECT = "evt.*.default.orders.*"
STREAM = "MESHFORGE_EVENTS"
NAMED = ("id", "idempotency_key", "span_id")
"""What tells the effects of one input apart."""
SOURCE = Source(STREAM, "2026-11-15T18:00:00Z", "biller_consumer", (ANY_SUBJECT,), 1, False)
SOURCES = {SOURCE.durable: SOURCE}


class Bench:
    """An agent with one handler that counts its runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.agent = Agent("biller")
        self.agent.on(ANY_SUBJECT)(self.handle)
        self.store = SqliteStore(":memory:")
        self.ledger: Ledger = self.store.open("default", "default", "biller")

    def handle(self, ctx: Any, order: dict[str, Any]) -> Effect:
        self.runs += 1
        return Effect("evt.default.default.billing.charged", order)

    def commit(self, *messages: Message) -> tuple[Settled, GroupCommit]:
        items = Reading(self.agent, self.ledger, [SOURCE]).read(list(messages))
        limits = Limits(self.ledger, 5, lambda _: STREAM, lambda _: None, 0)
        group = GroupCommit(self.store, limits, SOURCES)
        return group.run(items, {}, []), group


def message(sequence: int, key: str, cents: int = 1, deliveries: int = 1, subject: str = SUBJECT) -> Message:
    reply = f"$JS.ACK.{STREAM}.biller_consumer.{deliveries}.{sequence}.{sequence}.1700000000000000000.0"
    body = {"type": "OrderPlaced", "payload": {"cents": cents}, "idempotency_key": key}
    return Message(1, subject.encode(), reply.encode(), b"", msgspec.json.encode(body))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.store.close()


def outcomes(group: GroupCommit) -> list[Outcome]:
    return [entry.outcome for entry in group.entries]


def test_two_copies_in_one_batch_run_once(bench: Bench) -> None:
    settled, group = bench.commit(message(1, "a"), message(2, "a"))
    assert [Outcome.DONE, Outcome.DUPLICATE] == outcomes(group)
    assert (1, 1) == (bench.runs, len(settled.sendings))


def test_one_identity_with_other_content_in_the_same_batch_is_never_dropped(bench: Bench) -> None:
    """A duplicate would vanish: other content under a used key must reach a person."""
    settled, group = bench.commit(message(1, "a", cents=1), message(2, "a", cents=2))
    assert [Outcome.DONE, Outcome.DEAD] == outcomes(group)
    assert ["identity_conflict"] == [reason for _, reason in settled.terms]


def test_one_identity_with_other_content_in_a_later_batch_is_never_dropped(bench: Bench) -> None:
    bench.commit(message(1, "a", cents=1))
    _, group = bench.commit(message(2, "a", cents=2))
    assert [Outcome.DEAD] == outcomes(group)


@pytest.mark.parametrize("is_together", [True, False])
def test_the_same_key_of_another_tenant_is_another_input(bench: Bench, is_together: bool) -> None:
    copies = [message(at, "1", subject=f"evt.{tenant}.default.orders.placed") for at, tenant in ((1, "t1"), (2, "t2"))]
    batches = [copies] if is_together else [[copy] for copy in copies]
    sendings = [one for batch in batches for one in bench.commit(*batch)[0].sendings]
    assert 2 == bench.runs
    assert 2 == len({one.id for one in sendings})


@pytest.mark.parametrize("is_together", [True, False])
def test_the_same_key_on_another_subject_of_the_tenant_is_never_dropped(bench: Bench, is_together: bool) -> None:
    """A refund under the key of its charge is another message, whatever it says: a person decides."""
    copies = [message(1, "o1"), message(2, "o1", subject="evt.default.default.orders.refunded")]
    batches = [copies] if is_together else [[copy] for copy in copies]
    committed = [bench.commit(*batch) for batch in batches]
    assert [Outcome.DONE, Outcome.DEAD] == [outcome for _, group in committed for outcome in outcomes(group)]
    assert ["identity_conflict"] == [reason for settled, _ in committed for _, reason in settled.terms]
    assert 1 == bench.runs


def test_the_same_position_twice_in_one_batch_adds_nothing(bench: Bench) -> None:
    """Redelivered while the first copy is still in hand: one outcome, and an ack for both."""
    settled, group = bench.commit(message(1, "a"), message(1, "a", deliveries=2))
    assert [Outcome.DONE] == outcomes(group)
    assert 1 == bench.runs
    assert [settled.block] == [block for block, _ in settled.resumes]


def test_the_same_position_in_a_later_batch_adds_nothing(bench: Bench) -> None:
    first, _ = bench.commit(message(1, "a"))
    again, group = bench.commit(message(1, "a", deliveries=2))
    assert ([], 0) == (outcomes(group), again.block)
    assert [first.block] == [block for block, _ in again.resumes]


def test_a_payload_is_written_when_its_handler_returns(bench: Bench) -> None:
    """One that a handler keeps and changes later must go out as it was."""
    kept: dict[str, Any] = {"total": 0}

    def add(ctx: Any, order: dict[str, Any]) -> Effect:
        kept["total"] += order["cents"]
        return Effect("evt.default.default.billing.charged", kept)

    bench.agent.handlers.clear()
    bench.agent.on(SUBJECT)(add)
    settled, _ = bench.commit(*(message(at, f"k{at}", cents=at) for at in (1, 2, 3)))
    assert [1, 3, 6] == [msgspec.json.decode(one.payload)["payload"]["total"] for one in settled.sendings]


def test_effects_keep_their_order_and_their_ids_however_they_are_written(bench: Bench) -> None:
    """Some are written together at the end, some one by one: the ledger and a replay must not see a difference."""

    def answer(ctx: Any, order: dict[str, Any]) -> list[Effect]:
        plain = Effect("evt.default.default.billing.charged", {"cents": order["cents"]})
        return [plain, Effect(plain.subject, plain.payload, headers={"a": "b"}), plain]

    bench.agent.handlers.clear()
    bench.agent.on(SUBJECT)(answer)
    messages = [message(at, f"k{at}", cents=at) for at in (1, 2, 3)]
    settled, group = bench.commit(*messages)
    bodies = [msgspec.json.decode(one.payload) for one in settled.sendings]

    expected = [
        effect_id("default", "default", "biller", f"key:default/default/k{at}", index)
        for at in (1, 2, 3)
        for index in range(3)
    ]
    assert expected == [one.id for one in settled.sendings] == [body["id"] for body in bodies]
    assert [1, 1, 1, 2, 2, 2, 3, 3, 3] == [body["payload"]["cents"] for body in bodies]
    assert [3, 3, 3] == [entry.effects for entry in group.entries]
    alike = [{name: value for name, value in body.items() if name not in NAMED} for body in bodies]
    assert alike[0] == alike[1] == alike[2]
    assert [{"a": "b"} if at % 3 == 1 else None for at in range(9)] == [one.headers for one in settled.sendings]


def test_an_input_whose_effect_is_refused_leaves_its_neighbours_alone(bench: Bench) -> None:
    def answer(ctx: Any, order: dict[str, Any]) -> list[Effect]:
        good = Effect("evt.default.default.billing.charged", {"cents": order["cents"]})
        return [good, Effect(good.subject, {"rate": float("nan")})] if order["cents"] == 2 else [good]

    bench.agent.handlers.clear()
    bench.agent.on(SUBJECT)(answer)
    settled, group = bench.commit(*(message(at, f"k{at}", cents=at) for at in (1, 2, 3)))
    assert [Outcome.DONE, Outcome.TERMINATED, Outcome.DONE] == outcomes(group)
    assert [1, 3] == [msgspec.json.decode(one.payload)["payload"]["cents"] for one in settled.sendings[::2]]


def test_where_the_server_takes_little_each_effect_is_measured(bench: Bench) -> None:
    def check_size(sending: Sending) -> None:
        if len(sending.payload) > 1_000:
            raise TooLarge("too large")

    def answer(ctx: Any, order: dict[str, Any]) -> Effect:
        return Effect("evt.default.default.billing.charged", {"text": "x" * 100 * order["cents"]})

    bench.agent.handlers.clear()
    bench.agent.on(SUBJECT)(answer)
    items = Reading(bench.agent, bench.ledger, [SOURCE]).read([message(at, f"k{at}", cents=at) for at in (1, 9, 2)])
    group = GroupCommit(bench.store, Limits(bench.ledger, 5, lambda _: STREAM, check_size, 0), SOURCES)
    group.run(items, {}, [])
    assert [Outcome.DONE, Outcome.TERMINATED, Outcome.DONE] == outcomes(group)


class Order(msgspec.Struct):
    cents: int


def test_an_input_that_does_not_fit_its_type_leaves_its_neighbours_alone(bench: Bench) -> None:
    """They are decoded together, and the entries stand in the order of their effects."""
    seen: list[int] = []

    def handle(ctx: Any, order: Order) -> list[Effect]:
        seen.append(order.cents)
        return [Effect("evt.default.default.billing.charged", {"cents": order.cents})] * order.cents

    bench.agent = Agent("biller")
    bench.agent.on(SUBJECT)(handle)
    odd: Any = "many"

    settled, group = bench.commit(message(1, "a", 2), message(2, "b", odd), message(3, "c", 0), message(4, "d", 1))

    assert [Outcome.DONE, Outcome.TERMINATED, Outcome.DONE, Outcome.DONE] == outcomes(group)
    assert [2, 0, 1] == seen
    assert [1, 2, 3, 4] == [entry.sequence for entry in group.entries]
    assert [2, 1, 0, 1] == [entry.effects for entry in group.entries]
    charged = "evt.default.default.billing.charged"
    assert [charged, charged, "dlq_requests.biller", charged] == [one.subject for one in settled.sendings]
    assert ["contract_violation: payload.cents: Expected `int`, got `str`"] == [reason for _, reason in settled.terms]


def test_a_context_that_was_kept_opens_no_transaction(bench: Bench) -> None:
    """Neither in the next handler, nor after the batch, nor first of all in a thread."""
    kept: list[Any] = []
    said: list[str] = []

    def use(ctx: Any) -> None:
        try:
            ctx.tx.execute("SELECT 1")
        except Refused as error:
            said.append(error.message)

    def handle(ctx: Any, order: dict[str, Any]) -> None:
        for context in kept:
            use(context)
        thread = threading.Thread(target=use, args=(ctx,))
        thread.start()
        thread.join()
        ctx.tx.execute("SELECT 1")
        kept.append(ctx)

    bench.agent.handlers.clear()
    bench.agent.on(SUBJECT)(handle)
    bench.commit(message(1, "a"), message(2, "b"))
    use(kept[-1])
    first, over = "ctx.tx is first used in a thread", "ctx.tx was used after its transaction had ended"
    assert [first, over, first, over] == said


@dataclass
class Inner:
    cents: int

    def __post_init__(self) -> None:
        if self.cents == 2:
            sys.exit(4)


class Outer(msgspec.Struct):
    cents: int
    inner: list[Inner] = []


def test_a_type_whose_own_code_exits_leaves_its_neighbours_alone(bench: Bench) -> None:
    """They are decoded together: who it was shows when each is decoded alone."""

    def handle(ctx: Any, order: Outer) -> None:
        """Only its payload matters."""

    bench.agent = Agent("biller")
    bench.agent.on(SUBJECT)(handle)
    messages = [message(at, f"k{at}") for at in (1, 2, 3)]
    bodies = [{"type": "T", "payload": {"cents": 1, "inner": [{"cents": at}]}} for at in (1, 2, 3)]
    messages = [
        msgspec.structs.replace(one, payload=msgspec.json.encode(body | {"idempotency_key": f"k{at}"}))
        for at, (one, body) in enumerate(zip(messages, bodies, strict=True))
    ]

    _, group = bench.commit(*messages)

    assert [Outcome.DONE, Outcome.DONE] == outcomes(group)
    assert [2] == [one.sequence for one in group.failed]
    assert ["SystemExit: 4"] == [one.error for one in group.failed]
