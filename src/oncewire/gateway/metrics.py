"""What a gateway node counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oncewire._ground.http import metrics as http
from oncewire._ground.metrics import Page

if TYPE_CHECKING:
    from oncewire.gateway.service import Gateway

COUNTERS: Final = (
    "handed_out", "writes", "pages", "refused_bodies", "refused_frames", "slow_clients", "revoked_clients",
)  # fmt: skip


def collect(page: Page, gateway: Gateway) -> None:
    node = gateway.node
    page.put("oncewire_gateway_ready", 0 if node.problem else 1)
    page.put("oncewire_gateway_sockets", len(gateway.sockets))
    page.put("oncewire_gateway_sources", gateway.sources)
    page.put("oncewire_gateway_rooms", len(node.rooms))
    page.put("oncewire_gateway_channels", len(node.channels))
    page.put("oncewire_gateway_stream_sequence", node.place)
    page.put("oncewire_gateway_held_dropped", sum(room.dropped for room in node.rooms.values()))
    for name in COUNTERS:
        page.put(f"oncewire_gateway_{name}_total", node.counts[name])
    page.put("oncewire_gateway_acks_written_total", gateway.acks.written)
    page.histogram("oncewire_gateway_delivery_seconds", node.delivery)
    if gateway.server is not None:
        http.collect(page, gateway.server, "gateway")
