"""Handlers as users write them: which subject, which payload, what is refused at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from oncewire._ground.errors import ContractViolation, Refused, TimedOut
from oncewire.agent import Agent, Context
from oncewire.agent.handlers import UNREAD, decoders_of, find_handler, make_handler


@dataclass
class Line:
    sku: str
    count: int = 1


@dataclass
class AsDataclass:
    id: str
    lines: list[Line]


class AsStruct(msgspec.Struct):
    id: str
    lines: list[Line]


class AsModel(pydantic.BaseModel):
    id: str
    lines: list[Line]


class AsTyped(TypedDict):
    id: str
    lines: list[dict[str, Any]]


@pytest.mark.parametrize("kind", [AsDataclass, AsStruct, AsModel])
def test_a_payload_is_decoded_by_the_hint(kind: type) -> None:
    order = decoders_of(kind)[0]({"id": "o1", "lines": [{"sku": "a"}]})
    assert isinstance(order, kind)
    assert (order.id, order.lines[0].count) == ("o1", 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [dict, dict[str, Any], Any, AsTyped])
def test_a_dict_stays_a_dict(kind: Any) -> None:
    assert decoders_of(kind)[0]({"id": "o1", "lines": []}) == {"id": "o1", "lines": []}


@pytest.mark.parametrize("kind", [AsDataclass, AsStruct, AsModel])
@pytest.mark.parametrize(
    ("payload", "field"),
    [({"lines": []}, "id"), ({"id": "o1", "lines": [{"sku": "a", "count": "many"}]}, "count"), ({"id": 1}, "id")],
)
def test_a_payload_that_does_not_fit_names_the_field(kind: type, payload: dict[str, Any], field: str) -> None:
    with pytest.raises(ContractViolation) as caught:
        decoders_of(kind)[0](payload)
    assert field in str(caught.value)


@pytest.mark.parametrize("kind", [AsDataclass, AsStruct, AsModel, AsTyped, dict, Any])
def test_many_payloads_are_decoded_like_one_or_left_to_it(kind: Any) -> None:
    payloads = [{"id": f"o{one}", "lines": [{"sku": "a"}]} for one in range(3)]
    one, many = decoders_of(kind)
    assert many(payloads) in ([one(payload) for payload in payloads], [UNREAD] * 3)


@pytest.mark.parametrize("kind", [AsDataclass, AsStruct, AsModel])
def test_where_one_does_not_fit_each_is_tried_by_itself(kind: type) -> None:
    assert [UNREAD] * 2 == decoders_of(kind)[1]([{"id": "o1", "lines": []}, {"id": 1, "lines": []}])


@dataclass
class Slow:
    """Runs something of its own."""

    id: str

    def __post_init__(self) -> None:
        self.id = self.id.upper()


def test_a_type_that_runs_something_of_its_own_does_so_in_its_turn() -> None:
    one, many = decoders_of(Slow)
    assert (Slow("o1"), [UNREAD]) == (one({"id": "o1"}), many([{"id": "o1"}]))


def test_a_name_is_the_agents_own_command_and_a_subject_stays() -> None:
    agent = Agent("biller", tenant="acme", workspace="shop")

    @agent.on("charge")
    def charge(ctx: Context, payload: dict[str, Any]) -> None: ...

    @agent.on("evt.acme.shop.orders.>")
    def seen(ctx: Context, payload: dict[str, Any]) -> None: ...

    @agent.every(60)
    def sweep(ctx: Context) -> None: ...

    assert [one.pattern for one in agent.handlers] == [
        "cmd.acme.shop.biller.charge",
        "evt.acme.shop.orders.>",
        "cmd.acme.shop.biller.tick.sweep",
    ]


def test_the_most_particular_handler_wins() -> None:
    agent = Agent("a")

    def handler(ctx: Context, payload: dict[str, Any]) -> None: ...

    patterns = ["evt.default.default.>", "evt.default.default.orders.*", "evt.default.default.orders.placed"]
    for pattern in patterns:
        agent.on(pattern)(handler)
    found = [find_handler(agent.handlers, f"evt.default.default.{name}") for name in ("x", "orders.y", "orders.placed")]
    assert [one.pattern for one in found if one] == patterns
    assert find_handler(agent.handlers, "cmd.default.default.a.x") is None


def test_what_could_never_work_is_refused_when_it_is_written() -> None:
    agent = Agent("a")
    with pytest.raises(Refused, match="takes 0 parameters"):
        agent.on("x")(lambda: None)
    agent.on("y")(lambda ctx, payload: None)
    with pytest.raises(Refused, match="has two handlers"):
        agent.on("y")(lambda ctx, payload: None)
    with pytest.raises(Refused, match=r"every: seconds 0\.1 is not a number"):
        agent.every(0.1)
    with pytest.raises(Refused, match="rate_per_s -1 is not a number"):
        agent.on("z", rate_per_s=-1)(lambda ctx, payload: None)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"concurrency": 0}, {"max_deliver": 0}, {"ack_wait_s": 0.5}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        Agent("a", **wrong)


@pytest.mark.parametrize("named", ["", [], ["a", "a"], ["a", ""]])
def test_consumers_name_at_least_one_durable_and_none_twice(named: Any) -> None:
    with pytest.raises(Refused, match="consumers of S"):
        Agent("a", consumers={"S": named})


def test_an_ordered_agent_reads_a_stream_by_one_durable() -> None:
    assert {"S": ("a",)} == Agent("a", ordered=True, consumers={"S": ["a"]}).consumers
    with pytest.raises(Refused, match="by one durable"):
        Agent("a", ordered=True, consumers={"S": ["a", "b"]})


def test_a_hint_that_cannot_be_read_is_refused() -> None:
    def handler(ctx: Context, payload: NotThere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(Refused, match="NotThere"):
        make_handler(handler, "cmd.a.b.c.d")


def test_a_sync_handler_that_took_too_long_is_refused_afterwards() -> None:
    def handler(ctx: Context, payload: dict[str, Any]) -> int:
        return sum(range(1_000))

    with pytest.raises(TimedOut, match="took longer"):
        make_handler(handler, "cmd.a.b.c.d", timeout_s=1e-9).run(None, {})
    assert make_handler(handler, "cmd.a.b.c.d", timeout_s=60).run(None, {}) == 499_500


def test_an_ordered_agent_takes_one_at_a_time() -> None:
    agent = Agent("a", ordered=True, batch=100, concurrency=100)
    assert (agent.batch, agent.concurrency) == (1, 1)


class Receives:
    def receive(self, envelope: Any) -> None: ...


class Waits:
    async def receive(self, envelope: Any) -> None: ...


def test_an_adapter_has_its_commands_and_its_tick() -> None:
    agent = Agent.from_adapter(Receives(), name="counter", tick_s=60, tenant="acme")
    patterns = [one.pattern for one in agent.handlers]
    assert patterns == ["cmd.acme.default.counter.>", "cmd.acme.default.counter.tick.tick"]
    with pytest.raises(Refused, match="no receive"):
        Agent.from_adapter(object(), name="counter")  # type: ignore[arg-type]
    with pytest.raises(Refused, match="are `def`"):
        Agent.from_adapter(Waits(), name="counter")  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 1.5}, "Agent: batch 1.5 is not a whole number from 1 to 10,000"),
        ({"batch": True}, "Agent: batch True is not a whole number"),
        ({"batch": 0}, "Agent: batch 0 is not a whole number"),
        ({"concurrency": 1.5}, "Agent: concurrency 1.5 is not a whole number from 1 to 10,000"),
        ({"concurrency": "4"}, "Agent: concurrency '4' is not a whole number"),
        ({"concurrency": 10**400}, "Agent: concurrency 1000"),
        ({"max_deliver": NAN}, "Agent: max_deliver nan is not a whole number from 1 to 1,000"),
        ({"ack_wait_s": NAN}, "Agent: ack_wait_s nan is not a number of seconds from 1 to 604,800"),
        ({"ack_wait_s": 1e12}, "Agent: ack_wait_s 1000000000000.0 is not a number of seconds"),
        ({"ack_wait_s": None}, "Agent: ack_wait_s None is not a number of seconds"),
        ({"handler_timeout_s": NAN}, "Agent: handler_timeout_s nan is not a number of seconds from 30.0 to 604,800"),
        ({"handler_timeout_s": INF}, "Agent: handler_timeout_s inf is not a number of seconds"),
        ({"handler_timeout_s": 10}, "Agent: handler_timeout_s 10 is not a number of seconds from 30.0"),
        ({"name": 5}, "Agent: name 5 is not text but int"),
        ({"tenant": b"t"}, "Agent: tenant b't' is not text but bytes"),
        ({"workspace": None}, "Agent: workspace None is not text but NoneType"),
        ({"name": "\ud800"}, "Agent: name '\\ud800' has a lone surrogate"),
    ],
)
def test_an_option_that_is_no_number_is_refused_where_the_agent_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as caught:
        Agent(**{"name": "a"} | options)
    assert said == caught.value.message[: len(said)]


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda agent: agent.on("x", rate_per_s=NAN), "rate_per_s nan is not a number from 0 to 1,000,000"),
        (lambda agent: agent.on("x", rate_per_s=INF), "rate_per_s inf is not a number"),
        (lambda agent: agent.on("x", rate_per_s=-1), "rate_per_s -1 is not a number"),
        (lambda agent: agent.on("x", rate_per_s=1e-300), "rate_per_s 1e-300 is less than"),
        (lambda agent: agent.on("x", timeout_s=NAN), "timeout_s nan is not a number of seconds from 0 to 604,800"),
        (lambda agent: agent.on("x", timeout_s="1"), "timeout_s '1' is not a number of seconds"),
        (lambda agent: agent.on(5), "on: subject 5 is not text but int"),
        (lambda agent: agent.every(NAN), "every: seconds nan is not a number of seconds from 1 to 31,622,400"),
        (lambda agent: agent.every(INF), "every: seconds inf is not a number of seconds"),
        (lambda agent: agent.every("1"), "every: seconds '1' is not a number of seconds"),
        (lambda agent: agent.every(1, timeout_s=INF), "timeout_s inf is not a number of seconds"),
    ],
)
def test_an_option_of_a_handler_that_is_no_number_is_refused(register: Callable[[Agent], Any], said: str) -> None:
    agent = Agent("a")
    with pytest.raises(Refused, match=re.escape(said)):
        register(agent)(lambda ctx, payload=None: None)
    assert agent.handlers == []
