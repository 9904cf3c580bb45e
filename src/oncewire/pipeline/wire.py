"""One blocking connection to NATS for a Spark task: connect, authenticate, TLS, send, receive. Nothing of asyncio.

A task lives for seconds and does one thing at a time, so there is no reconnect inside: a connection that breaks raises
NotConnected, and whoever reads or publishes knows its position and begins anew from there (`attempts`).

What the socket gave is handed out in two ways: `next_event` with the client's exact parser, for requests and their
answers; `receive_into` as raw bytes, for the bulk reader.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from oncewire._ground.errors import (
    AuthenticationFailed,
    Conflict,
    InvalidSetting,
    NoResponders,
    NotConnected,
    NotFound,
    OncewireError,
    PermissionDenied,
    ProtocolViolation,
    Refused,
    TimedOut,
    Unavailable,
)
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.protocol import Event, Info, Message, Parser, Ping, Pong, ServerError
from oncewire.pipeline.options import Access

CONNECT_S: Final = 5.0
REQUEST_S: Final = 10.0
OUTAGE_S: Final = 60.0
"""How long a task waits for a server that is away. Below the usual duplicate window of two minutes, so that what is
sent again after it is still recognised."""
RETRY_DELAY_S: Final = 0.1
RETRY_DELAY_MAX_S: Final = 2.0
RECEIVE_BYTES: Final = 256 * 1024
DEFAULT_PORT: Final = 4222
INBOX_SID: Final = 1


class Wire:
    """A connection that has said hello. `inbox` is where its answers come, under sid 1."""

    def __init__(self, access: Access, server: str, inbox: bytes = b"") -> None:
        self.address = address_of(server)
        self.inbox = inbox or f"{access.inbox_prefix}.ow{os.urandom(9).hex()}".encode()
        self._parser = Parser()
        self._events: deque[Event] = deque()
        self._number = 0
        self._socket = _dial(server)
        try:
            self.info = self._hello(access, server)
        except BaseException:
            self.close()
            raise

    @property
    def payload_bytes_max(self) -> int:
        found = self.info.get("max_payload")
        return found if isinstance(found, int) else 1024 * 1024

    def _hello(self, access: Access, server: str) -> dict[str, Any]:
        if access.is_tls_first:
            self._socket = _secure(self._socket, access, server)
        info: dict[str, Any] = self._await(Info, CONNECT_S).body
        if not access.is_tls_first and (access.wants_tls or info.get("tls_required") or server.startswith("tls://")):
            self._socket = _secure(self._socket, access, server)
        body = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "oncewire",
            "name": "oncewire-spark",
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            **credentials(access, server, str(info.get("nonce") or "")),
        }
        self.send(protocol.encode_connect(body) + protocol.encode_sub(self.inbox + b".*", INBOX_SID) + protocol.PING)
        self._await(Pong, CONNECT_S)
        return info

    def _await(self, kind: type[Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            event = self.next_event(deadline)
            if isinstance(event, kind):
                return event

    # ---- bytes

    def send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.settimeout(OUTAGE_S)
            self._socket.sendall(data)
        except OSError as error:
            raise NotConnected(f"the connection to {self.address} broke while sending: {error}") from None

    def receive_into(self, view: memoryview, timeout_s: float) -> int:
        """What is there, at least one byte; 0 when nothing came in time."""
        try:
            self._socket.settimeout(max(timeout_s, 0.0))
            got = self._socket.recv_into(view)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return 0
        except OSError as error:
            raise NotConnected(f"the connection to {self.address} broke: {error}") from None
        if got == 0:
            raise NotConnected(f"{self.address} closed the connection")
        return got

    def is_readable(self, timeout_s: float) -> bool:
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def close(self) -> None:
        self._socket.close()

    # ---- events

    def next_event(self, deadline: float) -> Event:
        """The next event that is not a PING. Raises TimedOut at the deadline, and what the server says is wrong."""
        while True:
            while self._events:
                event = self._events.popleft()
                if not self.handled(event):
                    return event
            self.fill(deadline)

    def fill(self, deadline: float) -> None:
        buffer = bytearray(RECEIVE_BYTES)
        got = self.receive_into(memoryview(buffer), deadline - time.monotonic())
        if not got:
            raise TimedOut(f"{self.address} did not answer in time")
        self._events.extend(self._parser.feed(bytes(memoryview(buffer)[:got])))

    def handled(self, event: Event) -> bool:
        """Answer a PING; raise what the server complains about."""
        if isinstance(event, Ping):
            self.send(protocol.PONG)
            return True
        if isinstance(event, ServerError):
            raise server_error(event.text, self.address)
        return False

    def take_events(self) -> list[Event]:
        """What was parsed and not yet taken: whoever turns to raw bytes takes it first."""
        events = list(self._events)
        self._events.clear()
        return events

    # ---- requests

    def next_reply(self) -> bytes:
        self._number += 1
        return b"%b.%d" % (self.inbox, self._number)

    def request(self, subject: str, body: object = None, timeout_s: float = REQUEST_S) -> Message:
        reply = self.next_reply()
        payload = b"" if body is None else msgspec.json.encode(body)
        self.send(protocol.encode_pub(protocol.encode_subject(subject), reply, payload))
        deadline = time.monotonic() + timeout_s
        while True:
            event = self.next_event(deadline)
            if isinstance(event, Message) and event.subject_raw == reply:
                if event.status == 503 and not event.payload:
                    raise NoResponders(f"nobody answers on {subject}", hint="Is JetStream on, does the stream exist?")
                return event

    def api(self, verb: str, body: object = None) -> dict[str, Any]:
        """An answer of the JetStream API; its error as one of ours."""
        payload = self.request(f"$JS.API.{verb}", body).payload
        try:
            answer = msgspec.json.decode(payload, type=dict[str, Any])
        except msgspec.DecodeError:
            raise ProtocolViolation(f"{verb} was answered with {payload[:80]!r}") from None
        if "error" in answer:
            raise api_error(answer["error"], verb)
        return answer


def connect(access: Access, timeout_s: float = OUTAGE_S, *, inbox: bytes = b"") -> Wire:
    """A connection to the first server that answers; tried again until the time is over. `inbox`: one to keep."""
    last: OncewireError = NotConnected("no NATS server is given")
    for _ in attempts(timeout_s):
        for server in access.servers:
            try:
                return Wire(access, server, inbox)
            except Unavailable as error:
                last = error
    raise last


def attempts(timeout_s: float) -> Iterator[float]:
    """Turns of a retry, at once and then after growing pauses, until the time is over. At least one."""
    deadline = time.monotonic() + timeout_s
    pause = RETRY_DELAY_S
    while True:
        yield deadline
        if time.monotonic() + pause > deadline:
            return
        time.sleep(pause)
        pause = min(pause * 2, RETRY_DELAY_MAX_S)


def address_of(server: str) -> str:
    """host:port, without credentials."""
    return server.rpartition("://")[2].rpartition("@")[2]


def _host_and_port(server: str) -> tuple[str, int]:
    parts = urlsplit(server)
    return parts.hostname or "localhost", parts.port or DEFAULT_PORT


def _dial(server: str) -> socket.socket:
    try:
        dialed = socket.create_connection(_host_and_port(server), CONNECT_S)
    except OSError as error:
        raise NotConnected(f"{address_of(server)} cannot be reached: {error}", hint="Is the NATS server up?") from None
    dialed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    dialed.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return dialed


def _secure(plain: socket.socket, access: Access, server: str) -> socket.socket:
    try:
        context = ssl.create_default_context(cafile=access.tls_ca or None)
        if access.tls_cert:
            context.load_cert_chain(access.tls_cert, access.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSetting(f"the TLS files cannot be used: {error}", hint="Check tlsCa, tlsCert, tlsKey.") from None
    try:
        plain.settimeout(CONNECT_S)
        return context.wrap_socket(plain, server_hostname=_host_and_port(server)[0])
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationFailed(
            f"the certificate of {address_of(server)} is not trusted: {error.verify_message}", hint="Set tlsCa."
        ) from None
    except OSError as error:
        raise NotConnected(f"TLS with {address_of(server)} failed: {error}") from None


def credentials(access: Access, server: str, nonce: str) -> dict[str, str]:
    """The fields of CONNECT that authenticate. What an address itself carries wins for that server."""
    parts = urlsplit(server)
    if parts.username and parts.password is not None:
        return {"user": unquote(parts.username), "pass": unquote(parts.password)}
    if parts.username:
        return {"auth_token": unquote(parts.username)}
    if access.token:
        return {"auth_token": access.token}
    if access.user:
        return {"user": access.user, "pass": access.password}
    if access.creds:
        from oncewire._ground.jetstream.nkeys import NKey  # signing needs cryptography: only who has a key pays for it

        jwt, seed = access.creds
        return {"jwt": jwt, "sig": NKey(seed).sign(nonce)} if nonce else {"jwt": jwt}
    if access.nkey:
        from oncewire._ground.jetstream.nkeys import NKey

        key = NKey(access.nkey)
        return {"nkey": key.public, "sig": key.sign(nonce)}
    return {}


def server_error(text: str, address: str) -> OncewireError:
    """An -ERR line as one of our errors."""
    lower = text.lower()
    if "authorization" in lower or "authentication" in lower:
        return AuthenticationFailed(
            f"{address} refuses the credentials: {text}", hint="Check user, password, token, credentials or nkey."
        )
    if "permissions violation" in lower:
        return PermissionDenied(f"{address}: {text}", hint="The docs list the subjects that source and sink need.")
    return NotConnected(f"{address}: {text}")


_BY_CODE: Final[dict[int, type[OncewireError]]] = {403: PermissionDenied, 404: NotFound, 409: Conflict}
STREAM_NOT_FOUND: Final = 10059


def api_error(problem: dict[str, Any], what: str) -> OncewireError:
    """JetStream's error as one of ours: by its HTTP-like code, with its own number kept."""
    code = problem.get("code") or 0
    kind = _BY_CODE.get(code) or (Unavailable if code >= 500 else Refused)
    error = kind(f"{what}: {problem.get('description') or 'no description'}")
    error.server_code = problem.get("err_code") or 0
    return error
