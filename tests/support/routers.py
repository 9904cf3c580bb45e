"""Routers for the broker's scenarios: each does one thing that a router may do."""

from __future__ import annotations

import asyncio

from oncewire._ground.contracts.broker import ProduceBody
from oncewire.broker.engine import RoutingDecision


def label(topic: str, body: ProduceBody) -> RoutingDecision:
    return RoutingDecision(label=f"about {topic}", meta={"length": str(len(body.value))})


def send_away(topic: str, body: ProduceBody) -> RoutingDecision:
    """To topic `far`, partition 1, whatever the producer said."""
    return RoutingDecision(label="away", target_topic="far", partition_override=1)


def send_nowhere(topic: str, body: ProduceBody) -> RoutingDecision:
    return RoutingDecision(label="lost", target_topic="nowhere")


def fail(topic: str, body: ProduceBody) -> RoutingDecision:
    raise RuntimeError("the brain is out of order")


async def hang(topic: str, body: ProduceBody) -> RoutingDecision:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets that event")
