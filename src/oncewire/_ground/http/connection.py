"""One client's connection: bytes in, requests in order, answers in order.

Requests that arrive together are handled one after the other, so that their answers need no sorting and a client's
order is kept. What arrived in one read is answered in one write.

    reading   ──head whole──► reading the body ──whole──► waiting ──its turn──► in hand ──answered──► (next)
    anything that must not be read on: its refusal is answered in its turn, the rest of the input is thrown away until
    the client closes (else the kernel would cut our answer off), and the connection ends

Nothing here waits: deadlines are numbers that the server's sweep looks at.

A handler may take the socket over (`Request.take_over`): for another protocol that the client offered to upgrade to,
or for an answer that goes on for hours and must not cost a parser. The bytes after an upgrade go to whoever took over.
Offers that no handler takes are ignored, which HTTP allows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from oncewire._ground.errors import OncewireError
from oncewire._ground.http.origins import cors_lines, is_foreign, is_navigation
from oncewire._ground.http.principal import NOBODY
from oncewire._ground.http.request import Request, Stream
from oncewire._ground.http.rules import (
    Headers,
    Refusal,
    answer_of,
    is_loopback_authority,
    read_head,
    read_target,
    refusal,
)

if TYPE_CHECKING:
    from oncewire._ground.http.limits import Limits
    from oncewire._ground.http.principal import Principal
    from oncewire._ground.http.server import Server
    from oncewire._ground.http.takeover import MakeHeir

SLICE_BYTES = 16_384
"""Parsed at a time: between two slices the number of waiting requests is looked at."""
CORKED_BYTES_MAX = 65_536
LINGER_S = 2.0
"""How long a refused client may go on sending before it is cut off."""
NEVER = float("inf")

_log = logging.getLogger("oncewire.http")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(asyncio.Protocol):
    """The protocol of one socket."""

    __slots__ = (
        "_body", "_body_bytes", "_corked", "_corked_bytes", "_current", "_farewell", "_head_bytes", "_heir", "_held",
        "_is_corked", "_is_deaf", "_is_in_head", "_is_lingering", "_is_pumping", "_is_rereading",
        "_offered", "_pairs", "_parser", "_raw_bytes", "_reading", "_stream", "_transport",
        "_url", "_waiting", "_wants_continue", "deadline", "is_ending", "is_write_paused", "server", "stalled_bytes",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self.server = server
        self.deadline = NEVER
        self.is_ending = False
        """No further request is taken; once the waiting ones are answered it closes."""
        self.is_write_paused = False
        self.stalled_bytes = 0
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._raw_bytes = self._body_bytes = 0
        self._body: list[bytes] = []
        self._reading: Request | None = None
        self._wants_continue = False
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._stream: Stream | None = None
        self._offered: Request | None = None
        """The request whose last byte was just read and behind which another protocol may begin."""
        self._heir: asyncio.Protocol | None = None
        """Who has taken the socket over."""
        self._farewell: bytes | None = None
        self._held = b""
        self._is_deaf = False
        """What comes in is thrown away."""
        self._is_in_head = False
        self._is_lingering = False
        self._is_rereading = False
        self._is_pumping = False
        self._is_corked = False
        self._corked: list[bytes] = []
        self._corked_bytes = 0

    # --- the socket ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self.server.limits.write_buffer_bytes_max)
        self.deadline = self.server.now + self.server.limits.head_s_max
        if not self.server.opened(self):
            self._refuse(Refusal(503, "UNAVAILABLE", "too many connections, try again later"))

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._held:  # read before the pause took hold
            self._held += data
            return
        self._is_corked = True
        self._feed(data)
        self._uncork()

    def eof_received(self) -> bool:
        """A half-closed client still gets the answers to what it sent, but nobody waits or streams for it."""
        if self._stream is not None or (self._current is not None and self._current.on_close is not None):
            return False
        self._is_deaf = self.is_ending = True
        return self._current is not None or bool(self._waiting)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._is_deaf = self.is_ending = True
        self._waiting.clear()
        self._held = b""
        self._body = []
        self._release_body()
        self.server.closed(self)
        gone = self._stream or self._current
        self._stream = self._current = self._reading = None
        told = gone.forget() if gone is not None else None
        if told is not None:
            self.server.call(told)

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.stalled_bytes = self.buffered_bytes
        self.deadline = self.server.now + self.server.limits.stalled_s_max

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self.deadline = NEVER
        if self._stream is not None:
            if self._stream.on_drain is not None:
                self.server.call(self._stream.on_drain)
            return
        self._pump()

    # --- the parser's events ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_rereading:
            return
        self._url = b""
        self._pairs = []
        self._head_bytes = 0
        self._is_in_head = True
        self._reading = None
        if self._current is None and not self.is_write_paused:
            self.deadline = self.server.now + self.server.limits.head_s_max

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is None:  # else it is a trailer, which nobody reads
            self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_deaf or self._is_rereading:
            return
        try:
            self._reading = self._begin_request()
        except Refusal as refused:
            self._refuse(refused)

    def on_body(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._body_bytes += len(data)
        self.server.held_body_bytes += len(data)
        if self._body_bytes > self.server.limits.body_bytes_max:
            self._refuse(self._too_large())
            return
        if self.server.held_body_bytes > self.server.limits.held_body_bytes_max:
            self._refuse(Refusal(503, "UNAVAILABLE", "too many large requests at once, try again later"))
            return
        self._body.append(data)

    def on_message_complete(self) -> None:
        request = self._reading
        if self._is_deaf or request is None:
            return
        if b"upgrade" in request.headers and not self._body and self._parser.should_upgrade() and _has_body(request):
            return  # the parser stopped at the head: see _decline_upgrade
        if self._body:
            request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
        self._reading = None
        self._wants_continue = False
        self._raw_bytes = 0
        self._release_body()
        if request.is_last:
            self._is_deaf = self.is_ending = True
        self._waiting.append(request)
        self._offered = request if b"upgrade" in request.headers and self._parser.should_upgrade() else None
        self._pump()
        self._offered = None

    def _release_body(self) -> None:
        """The body is whole, or nobody wants it any more."""
        self.server.held_body_bytes -= self._body_bytes
        self._body_bytes = 0

    # --- reading ------------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        limits = self.server.limits
        while data and not self._is_deaf:
            if len(self._waiting) >= limits.pipelined_max:
                self._hold(data)
                return
            piece = data if len(data) <= SLICE_BYTES else data[:SLICE_BYTES]
            taken = len(piece)
            was_in_head = self._is_in_head
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offered:
                taken = offered.args[0]
                if self._heir is not None:
                    self._hand_over(data[taken:])
                    return
                self._decline_upgrade()
            except httptools.HttpParserError as wrong:
                self._refuse(refusal(f"this is not HTTP/1.1: {wrong}"))
                return
            self._weigh(taken, was_in_head)
            data = data[taken:]

    def _decline_upgrade(self) -> None:
        """Go on in HTTP. The parser takes the body for the other protocol: a new one is told that a body comes."""
        self._parser = httptools.HttpRequestParser(self)
        if self._reading is not None:
            self._is_rereading = True
            length = self._reading.headers.get(b"content-length")
            framing = b"Content-Length: " + length if length else b"Transfer-Encoding: chunked"
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
            self._is_rereading = False

    def _weigh(self, taken: int, was_in_head: bool) -> None:
        """The parser keeps a head until it is whole, and drops what stands between chunks: both have an end here."""
        limits = self.server.limits
        if self._is_in_head:
            # The piece in which it began may hold other requests: not counted, so the bound is one piece wider.
            self._head_bytes += taken if was_in_head else 0
            if self._head_bytes > limits.head_bytes_max or len(self._pairs) > limits.headers_max:
                self._refuse(_head_too_large(limits))
        elif self._reading is not None:
            self._raw_bytes += taken
            if self._raw_bytes > 2 * SLICE_BYTES + limits.head_bytes_max + 8 * self._body_bytes:
                self._refuse(refusal("the chunks hold more framing than content"))

    def _hold(self, data: bytes) -> None:
        self._held = data
        self._transport.pause_reading()

    def _begin_request(self) -> Request:
        server, parser = self.server, self._parser
        limits = server.limits
        size = len(self._url)
        for name, value in self._pairs:
            size += len(name) + len(value) + 4
        if size > limits.head_bytes_max or len(self._pairs) > limits.headers_max:
            raise _head_too_large(limits)
        version = parser.get_http_version()
        headers = read_head(self._pairs, version)
        path, query, authority = read_target(self._url)
        authority = authority or headers.get(b"host", b"localhost")
        if server.is_loopback_only:
            self._check_host(authority)
        if is_foreign(headers, authority, server.origins):
            self._check_navigation(headers, path)
        is_last = not parser.should_keep_alive()
        request = Request(self, parser.get_method(), version, path, query, headers, is_last)
        if server.origins:
            request.cors = cors_lines(headers, server.origins)
        if server.authenticate is not None:
            self._authenticate(request)
        length = headers.get(b"content-length")
        if length is not None and int(length) > limits.body_bytes_max:
            raise self._too_large()
        if self._current is None and not self.is_write_paused:
            self.deadline = server.now + limits.body_s_max
        if b"expect" in headers and version == "1.1":
            self._wants_continue = True
            self._continue()
        return request

    def _check_host(self, authority: bytes) -> None:
        known = self.server.known_hosts
        if authority in known:
            return
        if not is_loopback_authority(authority):
            raise Refusal(403, "PERMISSION_DENIED", "this server answers to localhost only: the host is another")
        if len(known) < 64:
            known.add(authority)

    def _check_navigation(self, headers: Headers, path: bytes) -> None:
        """A page of another origin may link to a page of ours. It may use nothing that a route answers."""
        if not is_navigation(self._parser.get_method(), headers) or self.server.routes.has(path):
            raise Refusal(
                403, "PERMISSION_DENIED", "a web page of another origin sent this, and http.origins does not name it"
            )

    def _authenticate(self, request: Request) -> None:
        assert self.server.authenticate is not None
        try:
            request.principal = self.server.authenticate(request)
        except OncewireError as error:
            status, code = answer_of(error)
            if status < 500 and self.server.routes.tells_pages and request.is_offer_of_a_page:
                request.principal, request.refused = NOBODY, error
                return
            if status >= 500:
                _log.error("it cannot be said who asks: %s", error)
            raise Refusal(status, code, error.message if status < 500 else "internal error") from None

    def _too_large(self) -> Refusal:
        return refusal(f"the body is larger than {self.server.limits.body_bytes_max} bytes", 413)

    def _continue(self) -> None:
        """Ask for the body that a client holds back, once everything before it is answered."""
        if self._wants_continue and self._current is None and not self._waiting:
            self._wants_continue = False
            self.write(_CONTINUE)

    # --- handling -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Hand out what waits, one at a time, as long as each is answered at once."""
        if self._is_pumping:
            return
        self._is_pumping = True
        while self._waiting and self._current is None and self._stream is None and not self.is_write_paused:
            self._current = request = self._waiting.popleft()
            self.deadline = NEVER
            self.server.dispatch(request)
        self._is_pumping = False
        if self._current is None and self._stream is None and not self._waiting:
            self._rest()

    def _rest(self) -> None:
        """Everything that was asked is answered."""
        if self._is_lingering or self._heir is not None:
            return
        if self._farewell is not None:
            self._say_farewell()
        elif self.is_ending and (self._is_deaf or self._reading is None):
            self._end()
        elif self._held:
            self._resume()
        elif not self.is_write_paused:
            limits = self.server.limits
            wait_s = (
                limits.body_s_max if self._reading else limits.head_s_max if self._is_in_head else limits.idle_s_max
            )
            self.deadline = self.server.now + wait_s
            self._continue()

    def _resume(self) -> None:
        held, self._held = self._held, b""
        self._transport.resume_reading()
        was_corked, self._is_corked = self._is_corked, True
        self._feed(held)
        if not was_corked:
            self._uncork()

    def is_last_answer(self) -> bool:
        """Whether nothing follows the answer to the request in hand, as far as that is known."""
        return self.is_ending and not self._waiting and self._farewell is None

    def answer(self, request: Request, data: bytes, status: int) -> None:
        """The request in hand is answered with these bytes."""
        assert request is self._current, "a request is answered in its turn"
        self.server.count(status)
        self._current = None
        self.write(data)
        if not self._is_pumping:
            self._pump()

    def begin_stream(self, stream: Stream, head: bytes) -> None:
        self.server.count(200)
        self._current = None
        self._stream = stream
        self.read_no_more()
        self.write(head)

    def end_stream(self, tail: bytes) -> None:
        self._stream = None
        if tail:
            self.write(tail)
        self._end()

    def read_no_more(self) -> None:
        """The answer to the request in hand is the last."""
        self._is_deaf = self.is_ending = True
        self._waiting.clear()

    def can_upgrade(self, request: Request) -> bool:
        """Whether the bytes behind this request may belong to another protocol."""
        return request is self._offered

    def take_over(self, request: Request, status: int, head: bytes, make: MakeHeir) -> None:
        """The request in hand is answered with this head; the rest of the connection is the heir's."""
        assert request is self._current, "a request is answered in its turn"
        self.server.count(status)
        self._current = None
        self.read_no_more()
        self._flush()
        self._transport.write(head)
        self._transport.resume_reading()
        heir = self._heir = make(self._transport)
        self._transport.set_protocol(heir)
        self.server.inherited(self, heir)

    def _hand_over(self, data: bytes) -> None:
        """What arrived in one read with the request, and is not HTTP any more."""
        if data and self._heir is not None and not self._transport.is_closing():
            self._heir.data_received(data)

    @property
    def address(self) -> str:
        """The other machine's; '' when the socket has none."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    # --- writing ------------------------------------------------------------------------------------------------------

    @property
    def buffered_bytes(self) -> int:
        return self._transport.get_write_buffer_size() + self._corked_bytes

    def write(self, data: bytes) -> None:
        if not self._is_corked:
            self._transport.write(data)
            return
        self._corked.append(data)
        self._corked_bytes += len(data)
        if self._corked_bytes > CORKED_BYTES_MAX:
            self._flush()

    def _uncork(self) -> None:
        self._is_corked = False
        self._flush()

    def _flush(self) -> None:
        if self._corked:
            corked, self._corked = self._corked, []
            self._corked_bytes = 0
            self._transport.write(corked[0] if len(corked) == 1 else b"".join(corked))

    # --- ending -------------------------------------------------------------------------------------------------------

    def _refuse(self, refused: Refusal) -> None:
        """The last answer of this connection, in its turn."""
        if self._farewell is not None:
            return
        self._is_deaf = self.is_ending = True
        self._reading = None
        self._body = []
        self._release_body()
        self._farewell = self.server.farewell(refused, {name.lower(): value for name, value in self._pairs})
        self.server.count(refused.status)
        if self._current is None and not self._waiting:
            self._say_farewell()

    def _say_farewell(self) -> None:
        assert self._farewell is not None
        self.write(self._farewell)
        self._flush()
        self._is_lingering = True
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
            self._transport.resume_reading()
            self.deadline = self.server.now + LINGER_S
        else:
            self._end()

    def _end(self) -> None:
        self._is_deaf = True  # a request behind the last answer must not have an effect
        self._flush()
        self.deadline = self.server.now + self.server.limits.stalled_s_max
        self._transport.close()

    @property
    def is_idle(self) -> bool:
        """Nothing of a request is here."""
        busy = self._current or self._stream or self._reading or self._waiting or self._farewell
        return not busy

    def stop(self) -> None:
        """The server stops: finish what is in hand, take nothing more."""
        if self._stream is not None:
            told = self._stream.on_close
            self._stream.end()
            if told is not None:
                self.server.call(told)
            return
        self.is_ending = True
        if self._current is not None and self._current.on_close is not None:
            told, self._current.on_close = self._current.on_close, None
            self.server.call(told)
        elif self.is_idle:
            self._end()

    @property
    def principal(self) -> Principal | None:
        """Who is being answered, if somebody is. Between two requests there is nobody to ask about."""
        asked = self._stream or self._current
        return asked.principal if asked is not None else None

    def revoke(self) -> None:
        """Who is being answered is no longer let in: a stream ends, a poll that waits is refused. What was handed to
        a part is finished: it was asked while the credential was good."""
        current = self._current
        if self._stream is not None:
            self.stop()
        elif current is not None and current.on_close is not None:
            told, current.on_close = current.on_close, None
            self.is_ending = True
            current.refuse(401, "UNAUTHENTICATED", "the credential is no longer good")
            self.server.call(told)

    def overdue(self) -> None:
        """The deadline has passed: who is to blame, and what do they get?"""
        if self.is_write_paused and not self._transport.is_closing():
            left = self.buffered_bytes
            if left < self.stalled_bytes:
                self.stalled_bytes = left
                self.deadline = self.server.now + self.server.limits.stalled_s_max
                return
            self.abort()
        elif self._is_lingering or self._transport.is_closing():
            self.abort()
        elif self._reading is not None or self._is_in_head:
            self._refuse(Refusal(408, "DEADLINE_EXCEEDED", "the request did not arrive in time"))
        else:
            self._end()

    def abort(self) -> None:
        self._transport.abort()


def _head_too_large(limits: Limits) -> Refusal:
    return refusal(f"the head is larger than {limits.head_bytes_max} bytes or {limits.headers_max} headers", 431)


def _has_body(request: Request) -> bool:
    return b"transfer-encoding" in request.headers or request.headers.get(b"content-length", b"0").strip(b"0") != b""
