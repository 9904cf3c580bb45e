"""What a client of NATS counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncewire._ground.jetstream.options import State
from oncewire._ground.metrics import Page

if TYPE_CHECKING:
    from oncewire._ground.jetstream.client import Client


def collect(page: Page, client: Client, name: str) -> None:
    """`name` says whose connection of the process it is."""
    publisher = client.publisher
    page.put("oncewire_jetstream_connected", client.state is State.CONNECTED, client=name)
    page.put("oncewire_jetstream_reconnects_total", client.connection.reconnects, client=name)
    page.put("oncewire_jetstream_published_total", publisher.confirmed, client=name)
    page.put("oncewire_jetstream_publish_failures_total", publisher.failed, client=name)
    page.put("oncewire_jetstream_unconfirmed", publisher.in_flight(), client=name)
    page.histogram("oncewire_jetstream_publish_seconds", publisher.seconds, client=name)
