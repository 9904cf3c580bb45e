"""The biller under test: no server, the same rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples import biller
from oncewire.testing import AgentTest


@pytest.fixture
def t() -> Iterator[AgentTest]:
    with AgentTest(biller.agent) as t:
        yield t


def test_an_order_is_charged_once_however_often_it_comes(t: AgentTest) -> None:
    t.send("charge", {"id": "o1", "cents": 4200}, key="order-o1")
    t.redeliver()
    t.send("charge", {"id": "o1", "cents": 4200}, key="order-o1")
    assert [effect.payload for effect in t.effects] == [{"order": "o1", "cents": 4200}]
    assert t.rows("SELECT * FROM charges") == [("o1", 4200)]


@pytest.mark.parametrize("step", ["receive", "apply", "persist", "publish", "ack"])
def test_a_crash_after_any_step_changes_nothing(t: AgentTest, step: str) -> None:
    t.crash_after(step)
    assert t.send("charge", biller.Order("o1", 4200)).outcome == "crashed"
    t.redeliver()
    assert [effect.subject for effect in t.effects] == ["evt.default.demo.billing.charged"]
    assert t.rows("SELECT * FROM charges") == [("o1", 4200)]


def test_a_free_order_is_given_up(t: AgentTest) -> None:
    assert t.send("charge", {"id": "o2", "cents": 0}).outcome == "terminated"
    assert t.dead_letters[0].cause == "order o2 costs 0 cents"


def test_a_refund_calls_the_bank_once_and_asks_later(t: AgentTest, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    async def bank(order: str, *, idempotency_key: str) -> dict[str, object]:
        calls.append((order, idempotency_key))
        return {"accepted": True, "number": "r1"}

    monkeypatch.setattr(biller, "pay_back", bank)
    t.send("charge", {"id": "o1", "cents": 4200})
    t.crash_after("call")
    t.send("refund", {"id": "o1"})
    t.redeliver()
    assert len(calls) == 1
    assert [effect.type for effect in t.effects] == ["billing.charged", "billing.refunded"]
    t.advance(3 * 24 * 3600)
    assert "mail.survey" in [effect.type for effect in t.effects]


def test_the_summary_comes_once_an_hour(t: AgentTest) -> None:
    t.send("charge", {"id": "o1", "cents": 4200})
    t.advance(2 * 3600)
    sums = [effect.payload["cents"] for effect in t.effects if effect.type == "billing.summary"]
    assert sums == [4200, 4200]
