"""GET /metrics of a gateway node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oncewire.metrics import Registry

if TYPE_CHECKING:
    from oncewire.gateway.service import Gateway

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS: Final = {
    "writes": "Writes to clients: each carries what came together.",
    "pages": "Pages read from the stream for clients that were behind.",
    "refused_bodies": "Stored bodies that are no envelope of their conversation.",
    "refused_frames": "Frames of clients that were refused.",
    "slow_clients": "Clients cut off because they did not read.",
    "revoked_clients": "Clients cut off because their credential was no longer good.",
}


def text(gateway: Gateway) -> str:
    """The whole page, as things stand now."""
    registry = Registry()
    node = gateway.node
    registry.gauge("oncewire_gateway_sockets", "WebSocket connections.").set(len(gateway.sockets))
    registry.gauge("oncewire_gateway_sources", "SSE connections.").set(gateway.sources)
    registry.gauge("oncewire_gateway_rooms", "Rooms that are kept in memory.").set(len(node.rooms))
    registry.gauge("oncewire_gateway_channels", "Conversations whose tokens are listened to.").set(len(node.channels))
    registry.gauge("oncewire_gateway_ready", "1 while the stream is followed.").set(0 if node.problem else 1)
    registry.gauge("oncewire_gateway_place", "Stream sequence up to which all is handed out.").set(node.place)
    dropped = sum(room.dropped for room in node.rooms.values())
    registry.gauge("oncewire_gateway_held_dropped", "Unnumbered envelopes that waited in vain.").set(dropped)
    for name, about in COUNTERS.items():
        registry.counter(f"oncewire_gateway_{name}_total", about).set(node.counts[name])
    registry.counter("oncewire_gateway_acks_written_total", "Acks written.").set(gateway.acks.written)
    server = gateway.server
    if server is not None:
        registry.gauge("oncewire_http_connections", "Connections open.").set(len(server.connections))
        registry.counter("oncewire_http_accepted_total", "Connections accepted.").set(server.accepted)
        answers = registry.counter("oncewire_http_responses_total", "Responses by status.")
        for status, count in server.answers.items():
            answers.set(count, status=str(status))
    return registry.text()
