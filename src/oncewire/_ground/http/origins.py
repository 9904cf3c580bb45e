"""Which web pages may use a server: those of its own origin, and those whose origin a setting names. Pure.

A browser says where a request comes from, and a page can neither leave that out nor forge it. `Origin` is on
WebSockets, on all methods but GET and HEAD, and on what `fetch` sends elsewhere to read the answer. `Sec-Fetch-Site` is
on every request (Chromium since 2019, Firefox since 2021, Safari since 2023). Without credentials an attack needs no
more than to send a request, so neither its method nor its body matters. Programs that are not browsers send neither
header.
"""

from __future__ import annotations

from collections.abc import Set

from oncewire._ground.http.rules import Headers

VARY = b"Vary: Origin\r\n"


def is_foreign(headers: Headers, authority: bytes, allowed: Set[bytes]) -> bool:
    """Whether a browser sent this for a page of another origin that no setting allows. `authority` is the server's
    own name as the client knows it."""
    origin = headers.get(b"origin")
    if origin is not None:
        if origin in allowed:
            return False
        if not _is_own(origin, authority):
            return True
    return headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")


def _is_own(origin: bytes, authority: bytes) -> bool:
    scheme, _, rest = origin.partition(b"://")
    return scheme in (b"http", b"https") and bool(authority) and rest.lower() == authority.lower()


def is_navigation(method: bytes, headers: Headers) -> bool:
    """Whether somebody follows a link in a tab of their own: the page that has the link learns nothing from it."""
    mode, place = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    return method in (b"GET", b"HEAD") and mode == b"navigate" and place == b"document" and b"origin" not in headers


def cors_lines(headers: Headers, allowed: Set[bytes]) -> bytes:
    """Header lines that let a page of an allowed origin read the answer: for its origin, never for everybody's."""
    if not allowed:
        return b""
    origin = headers.get(b"origin")
    if origin is None or origin not in allowed:
        return VARY
    return b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Allow-Credentials: true\r\n%b" % (origin, VARY)


def preflight_lines(methods: bytes) -> bytes:
    """The answer to a browser that asks before it sends."""
    return (
        b"Access-Control-Allow-Methods: %b\r\n"
        b"Access-Control-Allow-Headers: authorization, content-type, idempotency-key, last-event-id, x-api-key, "
        b"x-request-id\r\nAccess-Control-Max-Age: 600\r\n" % methods
    )
