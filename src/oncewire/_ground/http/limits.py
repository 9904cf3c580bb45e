"""How much one client may ask of the front, and which web pages may use it. Each limit has a name, and a setting of the
same name under `http.`."""

from __future__ import annotations

from dataclasses import dataclass

from oncewire._ground.checks import split_origins
from oncewire._ground.settings import Settings


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds. What a client gets when it passes one stands beside it."""

    head_bytes_max: int = 16_384
    """Request line and headers together: 431."""
    headers_max: int = 64
    """Lines of the head: 431."""
    body_bytes_max: int = 8 << 20
    """A body, with or without a length given: 413."""
    connections_max: int = 4_096
    """Open at once: a further one gets 503 and is closed."""
    connections_per_address_max: int = 1_000
    """Of these from one address that is not this machine: a further one gets 503 and is closed."""
    connections_per_tenant_max: int = 0
    """Of one tenant at this listener, WebSockets and streams among them: a further one gets 429 with Retry-After, and
    is closed; 0 is no limit."""
    held_body_bytes_max: int = 256 << 20
    """Bodies that are being read, all together: the one that passes it gets 503."""
    requests_per_s_max: int = 0
    """Of one tenant at this process, for what is not open to all: 429 with Retry-After; 0 is no limit."""
    pipelined_max: int = 32
    """Requests of one connection that wait behind the one in hand: then its socket is not read on."""
    head_s_max: float = 10.0
    """From the first byte of a head to its last: 408."""
    body_s_max: float = 60.0
    """From the last byte of a head to the last of its body: 408."""
    idle_s_max: float = 75.0
    """Between two requests: closed without a word."""
    write_buffer_bytes_max: int = 1 << 20
    """Bytes that a client has not taken yet: nothing more is handled for it until it reads."""
    stalled_s_max: float = 20.0
    """A client that takes no byte for so long, with a full buffer: cut off."""
    origins: frozenset[str] = frozenset()
    """Other origins whose web pages may use the server. Pages of the rest get 403."""


def limits_of(settings: Settings) -> Limits:
    """The limits in force."""
    return Limits(
        head_bytes_max=settings.http_head_bytes_max,
        headers_max=settings.http_headers_max,
        body_bytes_max=settings.http_body_bytes_max,
        connections_max=settings.http_connections_max,
        connections_per_address_max=settings.http_connections_per_address_max,
        connections_per_tenant_max=settings.http_connections_per_tenant_max,
        held_body_bytes_max=settings.http_held_body_bytes_max,
        requests_per_s_max=settings.http_requests_per_s_max,
        pipelined_max=settings.http_pipelined_max,
        head_s_max=settings.http_head_ms_max / 1000,
        body_s_max=settings.http_body_ms_max / 1000,
        idle_s_max=settings.http_idle_ms_max / 1000,
        write_buffer_bytes_max=settings.http_write_buffer_bytes_max,
        stalled_s_max=settings.http_stalled_ms_max / 1000,
        origins=frozenset(split_origins(settings.http_origins)),
    )
