"""Which web pages may use the gateway: those of its own origin, and those that a setting names.

A browser sends the page's origin with every WebSocket, and with every request to another origin; a page cannot forge
it. Programs that are no browsers send none, and are not held back by this.
"""

from __future__ import annotations

from collections.abc import Set
from urllib.parse import urlsplit

from oncewire._ground.http import Headers


def is_allowed(headers: Headers, origins: Set[str]) -> bool:
    origin = headers.get(b"origin", b"").decode("latin-1")
    return not origin or origin in origins or _is_own(origin, headers.get(b"host", b"").decode("latin-1"))


def _is_own(origin: str, host: str) -> bool:
    parts = urlsplit(origin)
    return parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == host.lower()


def cors_lines(headers: Headers, origins: Set[str]) -> bytes:
    """Headers that let a page of an allowed origin read the answer: its origin, never everybody's."""
    origin = headers.get(b"origin", b"")
    if not origin or not is_allowed(headers, origins):
        return b"Vary: Origin\r\n"
    return b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Allow-Credentials: true\r\nVary: Origin\r\n" % origin
