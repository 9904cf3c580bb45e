"""Durable messaging for agents and services on NATS JetStream: every effect happens once."""

from typing import TYPE_CHECKING

from oncewire.lazy import exports
from oncewire.version import VERSION

if TYPE_CHECKING:
    from oncewire.jetstream.client import Client, connect

__version__ = VERSION
__all__ = ["Client", "connect"]

__getattr__ = exports(
    __name__,
    {
        "Client": "oncewire.jetstream.client",
        "connect": "oncewire.jetstream.client",
    },
)
