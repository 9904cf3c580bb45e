"""What the front accepts and how it answers: heads, hosts, targets, request ids, errors. Pure.

The parser (llhttp, in its strict mode) refuses what is not HTTP: bare line feeds, folded headers, two lengths, a length
beside chunks, chunk sizes that are none. What is HTTP but must not reach a handler is refused here, because two servers
in a row could read it differently (that is how requests are smuggled) or because a web page could have sent it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import parse_qsl

from oncewire._ground.errors import (
    AuthenticationFailed,
    Conflict,
    ContractViolation,
    NotFound,
    OncewireError,
    Overloaded,
    PermissionDenied,
    Refused,
    TooLarge,
    Unavailable,
)

Headers = dict[bytes, bytes]
"""By name in lower case. A header that stands several times is joined by commas, where it may."""

REQUEST_ID_CHARS_MAX = 128
QUERY_FIELDS_MAX = 64

REASONS = {
    101: "Switching Protocols", 200: "OK", 201: "Created", 202: "Accepted", 204: "No Content", 304: "Not Modified",
    400: "Bad Request", 401: "Unauthorized", 403: "Forbidden",
    404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout", 409: "Conflict", 413: "Content Too Large",
    417: "Expectation Failed", 426: "Upgrade Required", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip

_ONCE = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization", b"expect", b"x-request-id"}
    | {b"idempotency-key"}
)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,%d}" % REQUEST_ID_CHARS_MAX)
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")
_LOOPBACK = re.compile(r"localhost\.?|127\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}|\[?::1\]?", re.IGNORECASE)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class Refusal(Exception):
    """A request that no handler sees: its status, its code, its sentence. The connection ends with it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Target(NamedTuple):
    """What a request line asks for. `authority` is set when it names the host too."""

    path: bytes
    query: bytes
    authority: bytes


def refusal(message: str, status: int = 400) -> Refusal:
    return Refusal(status, "INVALID_ARGUMENT", message)


def read_head(pairs: Iterable[tuple[bytes, bytes]], version: str) -> Headers:
    """The headers by name, or Refusal where another server might read this head differently."""
    headers: Headers = {}
    for sent, value in pairs:
        name = sent.lower()
        if name in headers:
            if name in _ONCE:
                raise refusal(f"the header {name.decode()} stands twice")
            headers[name] += b", " + value
        else:
            headers[name] = value
    if version != "1.1" and version != "1.0":
        raise refusal("this server speaks HTTP/1.1 and HTTP/1.0")
    if b"transfer-encoding" in headers:
        if headers[b"transfer-encoding"].lower() != b"chunked":
            raise refusal("the only transfer encoding is chunked")
        if version == "1.0":
            raise refusal("HTTP/1.0 has no transfer encodings")
    if b"host" not in headers and version == "1.1":
        raise refusal("the header host is missing")
    if b"expect" in headers and headers[b"expect"].lower() != b"100-continue":
        raise refusal("the only expectation is 100-continue", 417)
    return headers


def read_target(target: bytes) -> Target:
    """Split a request target; the form with a scheme and a host is allowed, as proxies send it."""
    authority = b""
    if target[:1] != b"/":
        found = _ABSOLUTE.match(target)
        if found is None:
            return Target(target, b"", b"")  # `*`, or CONNECT's host and port: no route has such a path
        authority = found.group(1)
        target = target[found.end() :]
        if target[:1] != b"/":
            target = b"/" + target
    path, _, query = target.partition(b"#")[0].partition(b"?")
    return Target(path, query, authority)


def is_loopback(host: str) -> bool:
    """Whether a name or address can only mean this machine."""
    return _LOOPBACK.fullmatch(host) is not None


def is_loopback_authority(authority: bytes) -> bool:
    """The same for a Host header: a web page that rebinds its name to 127.0.0.1 still sends that name."""
    found = _HOST.fullmatch(authority)
    return found is not None and is_loopback(found.group(1).decode())


def is_request_id(sent: bytes) -> bool:
    """Whether a client's request id may be echoed and logged as it is."""
    return _REQUEST_ID.fullmatch(sent) is not None


def read_query(query: bytes) -> dict[str, str]:
    """The parameters; of one that stands twice the first counts. ContractViolation when it is not UTF-8."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX
        )
    except UnicodeDecodeError:
        raise ContractViolation("the query is not UTF-8, percent-encoded") from None
    except ValueError:
        raise ContractViolation(f"the query has more than {QUERY_FIELDS_MAX} parameters") from None
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields.setdefault(name, value)
    return fields


_ANSWERS: tuple[tuple[type[OncewireError], int, str], ...] = (
    (PermissionDenied, 403, "PERMISSION_DENIED"),
    (AuthenticationFailed, 401, "UNAUTHENTICATED"),
    (NotFound, 404, "NOT_FOUND"),
    (Conflict, 409, "FAILED_PRECONDITION"),
    (TooLarge, 413, "INVALID_ARGUMENT"),
    (Refused, 400, "INVALID_ARGUMENT"),
    (Overloaded, 429, "RESOURCE_EXHAUSTED"),
    (Unavailable, 503, "UNAVAILABLE"),
)


def answer_of(error: OncewireError) -> tuple[int, str]:
    """The status and the code that say what the caller should do. What is corrupt is nobody's business outside."""
    for kind, status, code in _ANSWERS:
        if isinstance(error, kind):
            return status, code
    return 500, "INTERNAL"
