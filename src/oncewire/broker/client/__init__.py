"""The typed client of the broker: async and sync, and a worker that follows the consumer contract."""

from oncewire.broker.client.asynchronous import BrokerClient
from oncewire.broker.client.calls import Message
from oncewire.broker.client.synchronous import SyncBrokerClient
from oncewire.broker.client.worker import Worker

__all__ = ["BrokerClient", "Message", "SyncBrokerClient", "Worker"]
