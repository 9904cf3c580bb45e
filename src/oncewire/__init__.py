"""Durable messaging for agents and services on NATS JetStream: every effect happens once."""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports
from oncewire._ground.version import VERSION

if TYPE_CHECKING:
    from oncewire._ground import errors, topology
    from oncewire._ground.contracts import new_message
    from oncewire._ground.contracts.message import MessageEnvelope
    from oncewire._ground.contracts.realtime import RealtimeEnvelope
    from oncewire._ground.contracts.runtime import RuntimeEnvelope
    from oncewire._ground.jetstream.client import Client, connect
    from oncewire._ground.topology.service import ensure_consumers, init_streams
    from oncewire.agent.agent import Agent
    from oncewire.agent.context import Context
    from oncewire.agent.effects import Effect, Retry, Terminate
    from oncewire.broker.client import BrokerClient, SyncBrokerClient
    from oncewire.gateway import producer as tokens
    from oncewire.gateway.client import GatewayClient

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
    "errors",
    "init_streams",
    "new_message",
    "tokens",
    "topology",
]

__getattr__ = exports(
    __name__,
    {
        "Agent": "oncewire.agent.agent",
        "BrokerClient": "oncewire.broker.client",
        "Client": "oncewire._ground.jetstream.client",
        "Context": "oncewire.agent.context",
        "Effect": "oncewire.agent.effects",
        "GatewayClient": "oncewire.gateway.client",
        "MessageEnvelope": "oncewire._ground.contracts.message",
        "RealtimeEnvelope": "oncewire._ground.contracts.realtime",
        "Retry": "oncewire.agent.effects",
        "RuntimeEnvelope": "oncewire._ground.contracts.runtime",
        "SyncBrokerClient": "oncewire.broker.client",
        "Terminate": "oncewire.agent.effects",
        "connect": "oncewire._ground.jetstream.client",
        "ensure_consumers": "oncewire._ground.topology.service",
        "init_streams": "oncewire._ground.topology.service",
        "new_message": "oncewire._ground.contracts",
    },
    modules={
        "errors": "oncewire._ground.errors",
        "tokens": "oncewire.gateway.producer",
        "topology": "oncewire._ground.topology",
    },
)
