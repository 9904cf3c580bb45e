"""How much one client may ask of the gateway. Each limit has a name, and a setting of that name under `gateway.`."""

from __future__ import annotations

from dataclasses import dataclass

from oncewire._ground.settings import Settings


@dataclass(frozen=True)
class Limits:
    """What a client gets when it passes one stands beside it."""

    backlog_size: int = 200
    """Messages of a room that are kept in memory; older ones are read from the stream."""
    frame_bytes_max: int = 65_536
    """A client's message, in all its fragments: closed with 1009."""
    fragments_max: int = 64
    """Fragments of a client's message: closed with 1009."""
    rooms_per_client_max: int = 100
    """Rooms of one connection: an error frame."""
    clients_per_room_max: int = 20_000
    """Connections of one room on one node: an error frame."""
    frames_per_s_max: int = 500
    """WebSocket frames of one connection, fragments and pings included: beyond that it is not read until the second is
    over."""
    buffer_bytes_max: int = 1 << 20
    """Bytes that a client has not taken: nothing more is written to it."""
    slow_s_max: float = 5.0
    """How long it may stay so: closed with 4008."""
    ping_s: float = 25.0
    """A client that was silent for so long is asked whether it lives; after as long again it is closed with 4000."""


def limits_of(settings: Settings) -> Limits:
    """The limits in force."""
    return Limits(
        backlog_size=settings.gateway_backlog_size,
        frame_bytes_max=settings.gateway_frame_bytes_max,
        fragments_max=settings.gateway_fragments_max,
        rooms_per_client_max=settings.gateway_rooms_per_client_max,
        clients_per_room_max=settings.gateway_clients_per_room_max,
        frames_per_s_max=settings.gateway_frames_per_s_max,
        buffer_bytes_max=settings.gateway_buffer_bytes_max,
        slow_s_max=settings.gateway_slow_ms_max / 1000,
        ping_s=settings.gateway_ping_ms / 1000,
    )
