"""One request in a handler's hands, and the two ways to answer it: whole (`respond`) or bit by bit (`stream`).

A handler may keep a request and answer later from any callback of the loop: there is no task or future behind it. An
answer to a client that went away goes nowhere, in silence; who waits for long sets `on_close` and is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from oncewire._ground.errors import OncewireError, Unavailable
from oncewire._ground.http.principal import ANYONE, Principal
from oncewire._ground.http.rules import REASONS, Headers, answer_of, is_request_id, read_query

if TYPE_CHECKING:
    from oncewire._ground.http.connection import Connection
    from oncewire._ground.http.shares import Shares
    from oncewire._ground.http.takeover import Heir, MakeHeir

JSON = "application/json"
NDJSON = "application/x-ndjson; charset=utf-8"

_encode = msgspec.json.Encoder().encode
_BARE = (204, 304)
"""Answers without a body, and without a word about one."""
_heads: dict[tuple[int, str], bytes] = {}


class Request:
    """What a client asked, and its answer. Query and names are parsed when they are first looked at."""

    __slots__ = (
        "_connection", "_query", "body", "cors", "headers", "is_last", "method", "on_close", "params", "path",
        "principal", "query_string", "refused", "review", "version",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        method: bytes,
        version: str,
        path: bytes,
        query_string: bytes,
        headers: Headers,
        is_last: bool,
    ) -> None:
        self._connection: Connection | None = connection
        self._query: dict[str, str] | None = None
        self.method = method
        self.version = version
        self.path = path
        self.query_string = query_string
        self.headers = headers
        self.is_last = is_last
        self.body = b""
        self.params: dict[str, str] = {}
        self.principal: Principal = ANYONE
        self.refused: OncewireError | None = None
        """Why its credential is not accepted, where the handler is to say so: see `Routes.tells_pages`."""
        self.cors = b""
        """Header lines for pages of allowed origins; they go with every answer."""
        self.review = connection.server.reviews
        """The last review before its credential was looked at."""
        self.on_close: Callable[[], None] | None = None
        """Called once if the client goes away, or the server stops, before there is an answer; one that is given then
        is still sent if it can be. Nobody who sets it waits for a half-closed client: the end of its input counts as
        its going."""

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the query, decoded. ContractViolation when they cannot be."""
        if self._query is None:
            self._query = read_query(self.query_string) if self.query_string else {}
        return self._query

    @property
    def is_open(self) -> bool:
        """Whether somebody still waits for the answer."""
        return self._connection is not None

    def header(self, name: bytes) -> str:
        """A header by its name in lower case, '' when it is not there."""
        return self.headers.get(name, b"").decode("latin-1")

    def respond(self, status: int, body: bytes = b"", content_type: str = JSON, extra: bytes = b"") -> None:
        """Answer. `extra` holds further header lines, each ending in CRLF, made by us and never by a client."""
        connection = self._connection
        if connection is None:
            return
        self._connection = None
        self.on_close = None
        connection.answer(self, self._encode(connection, status, body, content_type, extra), status)

    def _encode(self, connection: Connection, status: int, body: bytes, content_type: str, extra: bytes) -> bytes:
        start = _heads.get((status, content_type)) or _start(status, content_type)
        if self.is_last or connection.is_last_answer():
            extra += b"Connection: close\r\n"
        elif self.version == "1.0":
            extra += b"Connection: keep-alive\r\n"
        length = b"" if status in _BARE else b"Content-Length: %d\r\n" % len(body)
        if self.method == b"HEAD":
            body = b""
        return b"%bX-Request-Id: %b\r\n%b%b%b\r\n%b" % (
            start, self._id(connection), connection.server.date_line, self.cors + extra, length, body,
        )  # fmt: skip

    def _id(self, connection: Connection) -> bytes:
        sent = self.headers.get(b"x-request-id")
        return sent if sent is not None and is_request_id(sent) else connection.server.make_request_id()

    def refuse(self, status: int, code: str, message: str, extra: bytes = b"") -> None:
        """Answer with an error in the one shape that they all have."""
        self.respond(status, error_body(code, message), extra=extra)

    def fail(self, error: OncewireError) -> None:
        """Answer with what an error of ours means to the caller."""
        status, code = answer_of(error)
        extra = b""
        if isinstance(error, Unavailable):
            extra = b"Retry-After: %d\r\n" % max(1, round(error.retry_after_s or 1))
        message = error.message if status != 500 else "internal error"
        self.refuse(status, code, message, extra)

    def stream(self, content_type: str, extra: bytes = b"") -> Stream | None:
        """Begin an answer that goes on; its head is sent at once. None when the client is gone.

        It is the last answer of its connection: what the client sends after it is not read.
        """
        connection = self._connection
        if connection is None:
            return None
        self._connection = None
        self.on_close = None
        stream = Stream(connection, self.principal, is_chunked=self.version != "1.0")
        framing = b"Transfer-Encoding: chunked\r\n" if stream.is_chunked else b""
        start = _heads.get((200, content_type)) or _start(200, content_type)
        head = b"%bX-Request-Id: %b\r\n%b%b%bConnection: close\r\n\r\n" % (
            start, self._id(connection), connection.server.date_line, framing, self.cors + extra,
        )  # fmt: skip
        connection.begin_stream(stream, head)
        return stream

    @property
    def is_offer_of_a_page(self) -> bool:
        """Whether a web page offers another protocol."""
        return b"upgrade" in self.headers and b"origin" in self.headers

    @property
    def can_upgrade(self) -> bool:
        """Whether the client offered another protocol, and nothing else is in its way. True only while the handler is
        called: who answers later answers in HTTP."""
        return self._connection is not None and self._connection.can_upgrade(self)

    def take_over(self, status: int, lines: bytes, make: MakeHeir) -> None:
        """Answer with this status and these header lines, and let what `make` returns have the socket from then on."""
        connection = self._connection
        if connection is None:
            return
        self._connection = None
        self.on_close = None
        head = b"HTTP/1.1 %d %b\r\nX-Request-Id: %b\r\n%b%b\r\n" % (
            status, REASONS[status].encode(), self._id(connection), connection.server.date_line, self.cors + lines,
        )  # fmt: skip
        connection.take_over(self, status, head, make)

    def is_counted_for(self, tenants: Shares[Connection | Heir]) -> bool:
        """Whether its tenant may have the connection that it came on."""
        return self._connection is None or tenants.take(self._connection, self.principal.tenant)

    def end_after_answer(self) -> None:
        """Read nothing more of its connection, and close that once this is answered."""
        if self._connection is not None:
            self.is_last = True
            self._connection.read_no_more()

    def forget(self) -> Callable[[], None] | None:
        """The client is gone: the front's side of `on_close`."""
        self._connection, told = None, self.on_close
        self.on_close = None
        return told


class Stream:
    """An answer that goes on until one side ends it. A writer looks at `buffered_bytes` before it writes more."""

    __slots__ = ("_connection", "is_chunked", "on_close", "on_drain", "principal")

    def __init__(self, connection: Connection, principal: Principal, *, is_chunked: bool) -> None:
        self._connection: Connection | None = connection
        self.principal = principal
        self.is_chunked = is_chunked
        self.on_close: Callable[[], None] | None = None
        """Called once when the client or a stopping server ends it."""
        self.on_drain: Callable[[], None] | None = None
        """Called each time a client that was behind has caught up."""

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    @property
    def is_full(self) -> bool:
        """The client is behind by more than the limit: hold back until `on_drain`."""
        return self._connection is not None and self._connection.is_write_paused

    @property
    def buffered_bytes(self) -> int:
        """What was written and the client has not taken yet, as far as this process holds it."""
        return self._connection.buffered_bytes if self._connection else 0

    def write(self, data: bytes) -> None:
        if self._connection is not None and data:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked else data)

    def end(self) -> None:
        """The proper end, as the client's parser sees it. `on_close` is not called: the writer knows."""
        connection = self._connection
        if connection is not None:
            self._connection = None
            self.on_close = self.on_drain = None
            connection.end_stream(b"0\r\n\r\n" if self.is_chunked else b"")

    def forget(self) -> Callable[[], None] | None:
        """The client is gone: the front's side of `on_close`."""
        self._connection, told = None, self.on_close
        self.on_close = self.on_drain = None
        return told


def error_body(code: str, message: str) -> bytes:
    return _encode({"error": code, "message": message})


def _start(status: int, content_type: str) -> bytes:
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\n"
    if status not in _BARE:
        head += f"Content-Type: {content_type}\r\n"
    _heads[status, content_type] = head.encode()
    return _heads[status, content_type]
