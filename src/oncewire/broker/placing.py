"""Where a message goes: the router's choice, else the producer's own, else the hash of its key (B8). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from oncewire._ground.contracts.broker import BrokerEnvelope, ProduceBody, Routing
from oncewire._ground.errors import ContractViolation, NotFound, OncewireError
from oncewire.broker.engine import RoutingDecision
from oncewire.broker.messages import partition_of

NO_TOPIC: Final = "topic does not exist"


class Spread(Protocol):
    """A topic, as far as a place is chosen by it."""

    @property
    def count(self) -> int: ...


P = TypeVar("P", bound=Spread)


class Place(NamedTuple, Generic[P]):
    """Where a message goes, and the envelope that its readers will see."""

    topic: P
    partition: int
    envelope: BrokerEnvelope | None


def routing_of(decision: RoutingDecision | None) -> Routing | None:
    if decision is None or not (decision.label or decision.meta):
        return None
    return Routing(label=decision.label, meta=decision.meta)


def place_of(
    topics: Mapping[tuple[str, str], P],
    counters: dict[str, int],
    tenant: str,
    body: ProduceBody,
    decision: RoutingDecision | None,
) -> Place[P] | OncewireError:
    """The router's choice where it holds; else the producer's own, whose mistakes are the producer's."""
    own = body.envelope
    if decision is not None and (decision.target_topic or decision.partition_override is not None):
        routed = msgspec.structs.replace(
            own or BrokerEnvelope(),
            target_topic=decision.target_topic or (own.target_topic if own else ""),
            partition_override=(
                decision.partition_override
                if decision.partition_override is not None
                else (own.partition_override if own else None)
            ),
        )
        place = _place(topics, tenant, body, routed)
        if isinstance(place, Place):
            return place
        counters["router_failures"] += 1
    return _place(topics, tenant, body, own)


def _place(
    topics: Mapping[tuple[str, str], P], tenant: str, body: ProduceBody, envelope: BrokerEnvelope | None
) -> Place[P] | OncewireError:
    name = envelope.target_topic if envelope is not None and envelope.target_topic else body.topic
    topic = topics.get((tenant, name))
    if topic is None:
        return NotFound(f"{NO_TOPIC} (create it first)")
    override = envelope.partition_override if envelope is not None else None
    if override is None:
        return Place(topic, partition_of(body.key, topic.count), envelope)
    if not 0 <= override < topic.count:
        return ContractViolation("partition_override out of range", field="envelope.partition_override")
    return Place(topic, override, envelope)
