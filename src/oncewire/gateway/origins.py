"""Which web pages may use the gateway: those of its own origin, and those that a setting names.

A browser sends the page's origin with every WebSocket, and with every request to another origin; a page cannot forge
it. Programs that are no browsers send none, and are not held back by this.
"""

from __future__ import annotations

from collections.abc import Set
from urllib.parse import urlsplit

from oncewire._ground.http import Request


def is_allowed(request: Request, origins: Set[str]) -> bool:
    origin = request.header(b"origin")
    return not origin or origin in origins or _is_own(origin, request.header(b"host"))


def _is_own(origin: str, host: str) -> bool:
    parts = urlsplit(origin)
    return parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == host.lower()


def cors_lines(request: Request) -> bytes:
    """Headers that let a page of an allowed origin read the answer: its origin, never everybody's."""
    origin = request.headers.get(b"origin", b"")
    if not origin:
        return b"Vary: Origin\r\n"
    return b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Allow-Credentials: true\r\nVary: Origin\r\n" % origin
