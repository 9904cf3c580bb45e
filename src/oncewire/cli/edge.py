"""What every server of ours has in front: limits, a certificate, a gate. And where browsers buy tickets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from oncewire._ground import http, trust
from oncewire._ground.settings import Settings

Front = Callable[[http.Routes], http.Server]


@contextlib.asynccontextmanager
async def fronts(settings: Settings, *, tickets_at: str = "") -> AsyncIterator[Front]:
    """Makes servers as the settings want them. With a path, who has a credential can buy a ticket there."""
    async with trust.open_gate(settings) as gate:
        certificate = http.certificate_of(settings.http_tls_cert, settings.http_tls_key)

        def front(routes: http.Routes) -> http.Server:
            if gate is not None and tickets_at:
                routes.add("POST", tickets_at, gate.sell, action=http.KNOWN)
            vouches = gate.vouches_for if gate is not None else None
            return http.Server(routes, http.limits_of(settings), gate, certificate, vouches)

        yield front


def asks_who(settings: Settings) -> bool:
    """Whether a credential is wanted of clients."""
    return any((settings.auth_keys, settings.auth_issuer, settings.auth_audience, settings.auth_jwks))


def url_of(settings: Settings, host: str, port: int) -> str:
    """Where a server of ours is found."""
    scheme = "https" if settings.http_tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
