"""Durable messaging for agents and services on NATS JetStream: every effect happens once."""

from typing import TYPE_CHECKING

from oncewire.lazy import exports
from oncewire.version import VERSION

if TYPE_CHECKING:
    from oncewire.agent.agent import Agent
    from oncewire.agent.context import Context
    from oncewire.agent.effects import Effect, Retry, Terminate
    from oncewire.broker.client import BrokerClient, SyncBrokerClient
    from oncewire.contracts.message import MessageEnvelope
    from oncewire.contracts.realtime import RealtimeEnvelope
    from oncewire.contracts.runtime import RuntimeEnvelope
    from oncewire.gateway.client import GatewayClient
    from oncewire.jetstream.client import Client, connect
    from oncewire.topology.service import ensure_consumers, init_streams

__version__ = VERSION
__all__ = [
    "Agent",
    "BrokerClient",
    "Client",
    "Context",
    "Effect",
    "GatewayClient",
    "MessageEnvelope",
    "RealtimeEnvelope",
    "Retry",
    "RuntimeEnvelope",
    "SyncBrokerClient",
    "Terminate",
    "connect",
    "ensure_consumers",
    "init_streams",
]

__getattr__ = exports(
    __name__,
    {
        "Agent": "oncewire.agent.agent",
        "BrokerClient": "oncewire.broker.client",
        "Client": "oncewire.jetstream.client",
        "Context": "oncewire.agent.context",
        "Effect": "oncewire.agent.effects",
        "GatewayClient": "oncewire.gateway.client",
        "MessageEnvelope": "oncewire.contracts.message",
        "RealtimeEnvelope": "oncewire.contracts.realtime",
        "Retry": "oncewire.agent.effects",
        "RuntimeEnvelope": "oncewire.contracts.runtime",
        "SyncBrokerClient": "oncewire.broker.client",
        "Terminate": "oncewire.agent.effects",
        "connect": "oncewire.jetstream.client",
        "ensure_consumers": "oncewire.topology.service",
        "init_streams": "oncewire.topology.service",
    },
)
