"""The broker's rules at a desk without a loop: requests in, answers and deliveries out, the disk is what you say."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody
from oncewire._ground.contracts.records import decode_record, encode
from oncewire._ground.errors import OncewireError, OutcomeUnknown
from oncewire.broker import rules, upkeep
from oncewire.broker.desk import Desk
from oncewire.broker.engine import Consume, Idempotency, Limits, RoutingDecision, Settle
from oncewire.broker.image import settle_in
from oncewire.broker.rules import Step
from oncewire.broker.state import State, Subscriber

START_MS = 1_800_000_000_000


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


class Reader:
    """A sink that keeps what it gets."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.space = room
        self.got: list[Delivery] = []
        self.end: OncewireError | None = None

    def room(self) -> int:
        return self.space

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        assert 0 < len(deliveries) <= self.space
        self.space -= len(deliveries)
        self.got += deliveries

    def ended(self, error: OncewireError) -> None:
        self.end = error

    @property
    def values(self) -> list[str]:
        return [one.value for one in self.got]

    @property
    def offsets(self) -> list[int]:
        return [one.offset for one in self.got]


class Table:
    """A desk whose commits succeed at once, unless `is_holding`: then they wait for `commit` or `lose`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.state = State(limits or Limits())
        self.desk = Desk(self.state, encode)
        self.now_ms = START_MS
        self.is_holding = False
        self.log: list[bytes] = []

    def ask(self, step: Step) -> Any:
        """The answer, or None when it has not come yet."""
        answers: list[Any] = []
        self.desk.submit(step, answers.append)
        if not self.is_holding:
            self.commit()
        return answers[0] if answers else _NOTHING

    def commit(self) -> None:
        while self.desk.can_cut:
            self.log += self.desk.cut()
            self.desk.applied()
            self.desk.answered()
            self.desk.hand_out(self.now_ms)
        self.desk.hand_out(self.now_ms)
        if self.desk.can_cut:
            self.commit()

    def lose(self) -> None:
        """The commit fails, and nobody knows what is on the disk."""
        self.desk.cut()
        self.desk.failed(OutcomeUnknown("outcome unknown"))

    def tick(self, ms: int = 0) -> None:
        """Let time pass and the tick come."""
        self.now_ms += ms or self.state.limits.tick_ms
        self.desk.propose(upkeep.tick(self.state, self.now_ms))
        if not self.is_holding:
            self.commit()

    def restart(self) -> Table:
        """Another process that reads the same log."""
        other = Table(self.state.limits)
        other.now_ms, other.log = self.now_ms, list(self.log)
        for record in self.log:
            other.state.apply(decode_record(record))
        settle_in(other.state)
        return other

    # ---- requests

    def create(self, name: str = "t", partitions: int = 1, tenant: str = "") -> Any:
        return self.ask(rules.create_topic(self.state, self.now_ms, tenant, name, partitions))

    def delete(self, name: str = "t", tenant: str = "") -> Any:
        return self.ask(rules.delete_topic(self.state, tenant, name))

    def produce(
        self,
        value: str = "v",
        topic: str = "t",
        key: str = "",
        tenant: str = "",
        decision: RoutingDecision | None = None,
        **envelope: Any,
    ) -> Any:
        sent = ProduceBody(topic=topic, key=key, value=value, envelope=BrokerEnvelope(**envelope) if envelope else None)
        return self.ask(rules.produce(self.state, self.now_ms, tenant, sent, decision))

    def read(
        self,
        owner: str = "a",
        group: str = "g",
        topic: str = "t",
        lease_ms: int = 0,
        room: int = 1_000_000,
        tenant: str = "",
        in_flight: int = 1_000_000,
    ) -> Reader:
        reader = Reader(room)
        self.join(reader, owner, group, topic, lease_ms, tenant, in_flight)
        return reader

    def join(
        self,
        reader: Reader,
        owner: str = "a",
        group: str = "g",
        topic: str = "t",
        lease_ms: int = 0,
        tenant: str = "",
        in_flight: int = 1_000_000,
    ) -> Subscriber:
        consume = Consume(topic, group, owner, lease_ms, in_flight)
        entered = self.ask(rules.enter(self.state, self.now_ms, tenant, consume))
        assert entered is None, entered
        subscriber = rules.join(self.state, self.now_ms, tenant, consume, reader)
        assert isinstance(subscriber, Subscriber), subscriber
        self.desk.hand_out(self.now_ms)
        if not self.is_holding:
            self.commit()
        return subscriber

    def enter(self, topic: str = "t", group: str = "g", lease_ms: int = 0, tenant: str = "") -> Any:
        return self.ask(rules.enter(self.state, self.now_ms, tenant, Consume(topic, group, "a", lease_ms)))

    def ack(self, offset: int, owner: str = "a", partition: int = 0, group: str = "g", topic: str = "t") -> Any:
        return self.settle("ack", offset, owner, partition, group, topic)

    def nack(self, offset: int, owner: str = "a", reason: str = "", partition: int = 0, group: str = "g") -> Any:
        return self.settle("nack", offset, owner, partition, group, reason=reason)

    def settle(
        self,
        act: Literal["ack", "nack", "extend"],
        offset: int,
        owner: str = "a",
        partition: int = 0,
        group: str = "g",
        topic: str = "t",
        tenant: str = "",
        **more: Any,
    ) -> Any:
        request = Settle(act, topic, group, partition, offset, owner, **more)
        return self.ask(rules.settle(self.state, self.now_ms, tenant, request))

    def mark(
        self,
        act: Literal["begin", "success", "failure"],
        offset: int,
        key: str = "k",
        owner: str = "a",
        error: str = "",
        tenant_id: str = "",
        group: str = "g",
    ) -> Any:
        request = Idempotency(act, "t", group, owner, 0, offset, key, tenant_id, error)
        return self.ask(rules.idempotency(self.state, self.now_ms, "", request))


class _Nothing:
    def __repr__(self) -> str:
        return "NOTHING"


_NOTHING = _Nothing()
NOTHING = _NOTHING
"""No answer yet."""


def message(answer: Any) -> str:
    """The message of a refusal."""
    assert isinstance(answer, OncewireError), answer
    return answer.message
