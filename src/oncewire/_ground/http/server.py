"""The front: listens, hands requests to handlers, sweeps what is overdue, stops in order.

Shared by every part that speaks HTTP. It knows no part: it is given routes, and calls them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate

from oncewire._ground.errors import AuthenticationFailed, InvalidSetting, OncewireError, Overloaded, Unavailable
from oncewire._ground.http.connection import Connection
from oncewire._ground.http.limits import Limits
from oncewire._ground.http.origins import cors_lines, preflight_lines
from oncewire._ground.http.principal import NOBODY, Principal
from oncewire._ground.http.rates import Rates
from oncewire._ground.http.request import JSON, Request, error_body
from oncewire._ground.http.routes import Routes
from oncewire._ground.http.rules import REASONS, Headers, Refusal, is_loopback, is_request_id
from oncewire._ground.http.shares import Shares
from oncewire._ground.http.takeover import Heir
from oncewire._ground.http.tls import Certificate

TICK_S = 0.25
BACKLOG = 1_024
CROWDED_S = 5.0
"""When a tenant with too many connections is told to come again: nobody knows when it will close one."""

Authenticate = Callable[[Request], Principal]
"""Who asks, by the head alone. Raises AuthenticationFailed (401) or PermissionDenied (403)."""

Vouches = Callable[[Principal], bool]
"""Whether who was let in before would be let in now."""
REVIEW_S = 1.0
"""How often that is asked for whoever holds a connection open. With the second that a change of the keys may take to be
seen and a tick, a connection outlives its credential by less than three seconds."""

_log = logging.getLogger("oncewire.http")


class Server:
    """One listening address. `async with` it, or `start` and `stop`."""

    def __init__(
        self,
        routes: Routes,
        limits: Limits | None = None,
        authenticate: Authenticate | None = None,
        certificate: Certificate | None = None,
        vouches: Vouches | None = None,
    ) -> None:
        self.routes = routes
        self.limits = limits or Limits()
        self.authenticate = authenticate
        self.certificate = certificate
        self._vouches = vouches
        self.reviews = 0
        """How often it was asked who is still good: a request that is older than the last time is asked for again."""
        self._review_at = 0.0
        self.held_body_bytes = 0
        """Of bodies that are being read."""
        self._rates = Rates(self.limits.requests_per_s_max)
        self._addresses: Shares[Connection | Heir] = Shares(self.limits.connections_per_address_max)
        self._tenants: Shares[Connection | Heir] = Shares(self.limits.connections_per_tenant_max)
        self.is_loopback_only = True
        self.known_hosts: set[bytes] = set()
        self.origins = frozenset(origin.encode() for origin in self.limits.origins)
        self.connections: set[Connection | Heir] = set()
        self.answers: Counter[int] = Counter()
        """Answers by status, for the metrics."""
        self.accepted = 0
        self.now = 0.0
        """The loop's time, at most a tick old: good enough for deadlines, and free."""
        self.date_line = b""
        self._made = 0
        self._mark = secrets.token_hex(6).encode()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_empty: asyncio.Event | None = None

    @property
    def port(self) -> int:
        assert self._listener is not None, "the server does not listen"
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def start(self, host: str, port: int) -> None:
        """Listen. Elsewhere than on loopback only with credentials to ask for."""
        self.is_loopback_only = is_loopback(host)
        if self.authenticate is None and not self.is_loopback_only:
            raise InvalidSetting(
                f"listening on {host} without authentication would let everybody in",
                hint="Make keys (oncewire keys create) and set auth.keys, or auth.issuer, auth.audience and auth.jwks.",
            )
        loop = asyncio.get_running_loop()
        self._tick(loop)
        try:
            # A handshake is no connection yet that the sweep could see: it has the time of a head, and no more.
            slow_s = self.limits.head_s_max if self.certificate else None
            self._listener = await loop.create_server(
                lambda: Connection(self),
                host,
                port,
                backlog=BACKLOG,
                ssl=self.certificate.context if self.certificate else None,
                ssl_handshake_timeout=slow_s,
                ssl_shutdown_timeout=slow_s,
            )
        except OSError as error:
            self._stop_ticking()
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror or error}", hint="Is another server running there?"
            ) from None

    async def stop(self, grace_s: float = 10.0) -> None:
        """Take no new connection, finish what is in hand, end streams, close; after `grace_s` cut off the rest."""
        if self._listener is None:
            return
        self._listener.close()
        self._is_empty = asyncio.Event()
        for connection in list(self.connections):
            connection.stop()
        if self.connections:
            try:
                await asyncio.wait_for(self._is_empty.wait(), grace_s)
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()
                await self._is_empty.wait()
        self._stop_ticking()
        self._listener = None

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- what connections call ------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        self.accepted += 1
        self.connections.add(connection)
        address = connection.address
        if address and not is_loopback(address) and not self._addresses.take(connection, address):
            return False
        return len(self.connections) <= self.limits.connections_max

    def inherited(self, connection: Connection, heir: Heir) -> None:
        """A handler has taken the socket of a connection over."""
        self.connections.discard(connection)
        self.connections.add(heir)
        self._addresses.pass_on(connection, heir)
        self._tenants.pass_on(connection, heir)

    def closed(self, connection: Connection | Heir) -> None:
        self.connections.discard(connection)
        self._addresses.leave(connection)
        self._tenants.leave(connection)
        if self._is_empty is not None and not self.connections:
            self._is_empty.set()

    def count(self, status: int) -> None:
        self.answers[status] += 1

    def make_request_id(self) -> bytes:
        self._made += 1
        return b"%b-%x" % (self._mark, self._made)

    def farewell(self, refused: Refusal, headers: Headers) -> bytes:
        """The answer to a request that is not read to its end, by what there is of its head."""
        body = error_body(refused.code, refused.message)
        head = (
            f"HTTP/1.1 {refused.status} {REASONS[refused.status]}\r\nContent-Type: {JSON}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        )
        sent_id = headers.get(b"x-request-id", b"")
        shown_id = sent_id if is_request_id(sent_id) else self.make_request_id()
        lines = cors_lines(headers, self.origins)
        return b"%b%bX-Request-Id: %b\r\n%b\r\n%b" % (head.encode(), self.date_line, shown_id, lines, body)

    def dispatch(self, request: Request) -> None:
        """Find the handler and let it work. Nothing that it raises reaches the connection."""
        try:
            methods, request.params = self.routes.find(request.path)
            if methods is None:
                self._admit(request)
                self.routes.unknown(request)
                return
            handler = methods.get(request.method)
            if handler is None:
                allow = b", ".join(sorted(methods))
                if request.method == b"OPTIONS" and b"access-control-request-method" in request.headers:
                    request.respond(204, extra=preflight_lines(allow))
                    return
                request.refuse(405, "METHOD_NOT_ALLOWED", "method not allowed", b"Allow: %b\r\n" % allow)
                return
            if handler in self.routes.guarded or b"upgrade" in request.headers:
                self._admit(request)
            handler(request)
        except OncewireError as error:
            request.fail(error)
        except Exception:
            _log.exception("a handler failed: %s %s", request.method.decode(), request.path.decode("latin-1"))
            request.refuse(500, "INTERNAL", "internal error")

    def _admit(self, request: Request) -> None:
        """Whether who asks is still let in, and not too often, nor on too many connections: for all that is not open, a
        WebSocket's beginning on whichever path included. Who brought no credential is refused further on, at no cost to
        a tenant."""
        principal = request.principal
        if request.review != self.reviews and self._vouches is not None and not self._vouches(principal):
            raise AuthenticationFailed("the credential is no longer good")
        if principal is NOBODY:
            return
        if not request.is_counted_for(self._tenants):
            request.end_after_answer()  # else it would be one more that is held open
            raise Overloaded("this tenant has too many connections open", retry_after_s=CROWDED_S)
        if wait_s := self._rates.wait_s(principal.tenant, self.now):
            raise Overloaded("this tenant asks too often", retry_after_s=wait_s)

    def call(self, told: Callable[[], None]) -> None:
        """Tell a part what happened to its answer; its own failure must not reach the connection."""
        try:
            told()
        except Exception:
            _log.exception("a handler failed when it was told about its client")

    # --- the sweep ------------------------------------------------------------------------------------------------

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = now = loop.time()
        self.date_line = f"Date: {formatdate(time.time(), usegmt=True)}\r\n".encode()
        for connection in [one for one in self.connections if one.deadline < now]:
            connection.overdue()
        if self.certificate is not None:
            self.certificate.refresh(now)
        if self._vouches is not None and now >= self._review_at:
            self._review_at = now + REVIEW_S
            self._review(self._vouches)
        limits = self.limits
        shortest = min(limits.head_s_max, limits.body_s_max, limits.idle_s_max, limits.stalled_s_max)
        self._sweeper = loop.call_later(min(TICK_S, shortest / 4), self._tick, loop)

    def _review(self, vouches: Vouches) -> None:
        """End what is open for those whose credential is no longer good. Many share one: each is asked for once."""
        self.reviews += 1
        known: dict[int, bool] = {}
        for connection in list(self.connections):
            principal = connection.principal
            if principal is None:
                continue
            if id(principal) not in known:
                known[id(principal)] = vouches(principal)
            if not known[id(principal)]:
                connection.revoke()

    def _stop_ticking(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
