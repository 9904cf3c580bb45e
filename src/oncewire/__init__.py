"""Durable messaging for agents and services on NATS JetStream: every effect happens once."""

__version__ = "0.1.0"

from oncewire.jetstream import Client, connect

__all__ = ["Client", "connect"]
