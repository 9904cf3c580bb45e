"""The `/v1` broker: topics, partitions, groups, leases, retries and idempotency, over HTTP."""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports

if TYPE_CHECKING:
    from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery
    from oncewire.broker.client import BrokerClient, Message, SyncBrokerClient, Worker

__all__ = ["BrokerClient", "BrokerEnvelope", "Delivery", "Message", "SyncBrokerClient", "Worker"]

__getattr__ = exports(
    __name__,
    {
        "BrokerClient": "oncewire.broker.client",
        "BrokerEnvelope": "oncewire._ground.contracts.broker",
        "Delivery": "oncewire._ground.contracts.broker",
        "Message": "oncewire.broker.client",
        "SyncBrokerClient": "oncewire.broker.client",
        "Worker": "oncewire.broker.client",
    },
)
