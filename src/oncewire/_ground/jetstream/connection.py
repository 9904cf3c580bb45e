"""One connection to NATS that keeps itself alive: handshake, reconnect, keep-alive, numbered replies, joined writes.

Everything that waits for an answer from the server registers a number and gets the answer by it: one inbox
subscription serves all requests and all publish confirmations of the process. When the socket breaks, the connection
finds another server by itself, subscribes again, and tells its listeners (publisher, pulls), who know what must be
sent again and what must be reported as unknown.

What it never does: hold data for a server that is not there. `write` on a broken connection raises NotConnected;
whoever wants to wait calls `ready` first, with a deadline.

    CONNECTING ──► CONNECTED ──► RECONNECTING ──► CONNECTED …
         │             │ drain        │
         ▼             ▼              ▼
       CLOSED ◄─── DRAINING         CLOSED   (closed by us, or the credentials are refused for good)

A server in lame-duck mode is left before it closes: new work is held back, what is in flight is awaited for a moment,
then the connection moves to another server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from oncewire._ground.errors import (
    AuthenticationFailed,
    NotConnected,
    OncewireError,
    Overloaded,
    PermissionDenied,
    ProtocolViolation,
    TimedOut,
    TooLarge,
    Unavailable,
)
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.handshake import greet, worst
from oncewire._ground.jetstream.options import Options, State, address_of
from oncewire._ground.jetstream.protocol import Event, Info, Message, Ping, Pong, ServerError
from oncewire._ground.jetstream.servers import Servers
from oncewire._ground.jetstream.wire import ServerInfo, Wire

log = logging.getLogger("oncewire.jetstream")

INBOX_SID = 1
FLUSH_BYTES = 64 * 1024
MOVE_WAIT_S = 2.0
CLOSE_WAIT_S = 1.0
AUTH_REFUSALS_MAX = 3
"""So many rounds in which a server refused the credentials or the inbox, and a reconnecting client gives up."""

OnReply = Callable[[int, Message], None]
OnMessage = Callable[[Message], None]
OnMessages = Callable[[list[Message]], None]
"""Gets what one read of the socket brought, in the order of arrival."""


class Listener(Protocol):
    """Who must act when the socket comes and goes. Called from the event loop; must not block or raise."""

    def on_connected(self) -> None: ...
    def on_lost(self, reason: str) -> None: ...
    def on_denied(self, subject: str, error: PermissionDenied) -> None: ...
    def in_flight(self) -> int: ...


class Subscription(msgspec.Struct, gc=False):
    """An interest that outlives reconnects."""

    sid: int
    subject: bytes
    queue: bytes
    deliver: OnMessages
    denied: Callable[[PermissionDenied], None] | None = None
    is_prompt: bool = False
    """Told in its turn among the replies, message by message; others get what one read brought, after the replies."""


class Connection:
    """See the module's head. Made inside a running event loop."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.state = State.CONNECTING
        self.server = ServerInfo()
        self.server_url = ""
        self.reconnects = 0
        self.listeners: list[Listener] = []
        self.replies: dict[int, OnReply] = {}
        self.inbox = protocol.encode_subject(f"{options.inbox_prefix}.{secrets.token_hex(11)}") + b"."
        self._inbox_len = len(self.inbox)
        self._number = 0
        self._sid = INBOX_SID
        self._subs: dict[int, Subscription] = {}
        self._servers = Servers(options.servers, random.Random())  # noqa: S311 - spreads load, guards nothing
        self._wire: Wire | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_flush_due = False
        self._is_writable = True
        self._is_moving = False
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self._pings_out = 0
        self._auth_refusals = 0
        self._close_error: OncewireError | None = None

    # ---- life

    async def open(self) -> None:
        """Connect to the first server that answers; each is tried once."""
        problems: list[tuple[str, OncewireError]] = []
        for server in self._servers.in_order():
            try:
                await self._attach(server)
            except OncewireError as error:
                problems.append((address_of(server), error))
            else:
                return
        self._set_state(State.CLOSED, "no server could be reached")
        raise worst(problems)

    async def close(self) -> None:
        """Let go of everything. What still waits is told so."""
        if self.state is State.CLOSED and self._task is None:
            return
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        wire = self._wire
        self._shut("closed by this process")
        if wire is not None:
            await self._end(wire)

    async def _end(self, wire: Wire) -> None:
        """Until the socket is gone. What a server that stopped reading has not taken by then is given up."""
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await asyncio.shield(wire.lost)
        except TimeoutError:
            wire.abort()
            await wire.lost

    def _shut(self, reason: str, error: OncewireError | None = None) -> None:
        self._close_error = error
        wire, self._wire = self._wire, None
        self._stop_ping()
        self._set_state(State.CLOSED, reason)
        if wire is not None and wire.transport is not None:
            self._flush_to(wire)
            wire.transport.close()
        self._tell_lost(reason)
        self._ready.set()  # wakes who waits, to be told that it is closed

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Stop taking new work, wait for what is in flight, then close."""
        if self.state is State.CONNECTED:
            self._set_state(State.DRAINING, "drain was asked for")
            deadline = time.monotonic() + timeout_s
            while self._in_flight() and time.monotonic() < deadline and self._wire is not None:
                with contextlib.suppress(OncewireError):
                    await self.flush(max(0.01, min(0.05, deadline - time.monotonic())))
                await asyncio.sleep(0.005)
            with contextlib.suppress(OncewireError):
                await self.flush(max(0.05, deadline - time.monotonic()))
        await self.close()

    @property
    def is_ready(self) -> bool:
        """Connected, with room to write and not about to move."""
        return self._ready.is_set() and self.state is State.CONNECTED

    @property
    def takes_requests(self) -> bool:
        """Connected and not about to move: a small request may go out behind larger writes that still wait."""
        return self.state is State.CONNECTED and not self._is_moving

    async def ready(self, deadline: float) -> None:
        """Wait until there is a server that takes data. `deadline` is on the monotonic clock."""
        while not self.is_ready:
            self.check_open()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"not connected to NATS in time (state {self.state}, last: {self._last_problem()})")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._ready.wait()

    def _last_problem(self) -> str:
        return (self._wire.error if self._wire else "") or self.server_url or "no server answered"

    def check_open(self) -> None:
        """Raise why there is no connection and will be none."""
        if self.state is State.CLOSED or self.state is State.DRAINING:
            if self._close_error is not None:
                raise self._close_error
            raise NotConnected(f"the connection to NATS is {self.state}")

    def _set_state(self, state: State, reason: str) -> None:
        if state is self.state:
            return
        self.state = state
        level = logging.INFO if state in (State.CONNECTED, State.CLOSED, State.DRAINING) else logging.WARNING
        log.log(level, "nats %s: %s", state.value, reason)
        if self.options.on_change is not None:
            try:
                self.options.on_change(state, reason)
            except Exception:  # the user's code: it must not stop a reconnect
                log.exception("on_change failed on %s", state.value)

    # ---- handshake

    async def _attach(self, server: str) -> None:
        """One attempt at one server, bounded in time. Leaves no socket behind when it fails."""
        wire = Wire(self)
        await greet(wire, server, self.options, protocol.encode_sub(self.inbox + b"*", INBOX_SID))
        self._adopt(wire, server)

    def _adopt(self, wire: Wire, server: str) -> None:
        """The handshake is done: this is the connection from now on."""
        if wire.is_lost:
            raise Unavailable(wire.error or "the server closed the connection")
        self._wire = wire
        self.server_url = server
        self._auth_refusals = 0
        self._pings_out = 0
        self._is_moving = False
        self._is_writable = True
        self._learn(self.server)
        subs = [protocol.encode_sub(sub.subject, sub.sid, sub.queue) for sub in self._subs.values()]
        self._out[:] = subs
        self._out_bytes = sum(map(len, subs))
        self._flush()
        self._start_ping()
        self._set_state(State.CONNECTED, f"to {address_of(server)} ({self.server.server_name})")
        self._update_ready()
        for listener in list(self.listeners):
            listener.on_connected()

    # ---- what the server says

    def on_events(self, wire: Wire, events: list[Event]) -> None:
        """Hand out what one read brought. A callback that raises is a bug of ours: it must not stop the others."""
        replies, subs, cut = self.replies, self._subs, self._inbox_len
        delivered: dict[int, list[Message]] = {}
        for event in events:
            try:
                if type(event) is Message:
                    sid = event.sid
                    if sid in delivered:
                        delivered[sid].append(event)
                    elif sid != INBOX_SID:
                        if sid in subs and subs[sid].is_prompt:
                            subs[sid].deliver([event])
                        else:
                            delivered[sid] = [event]
                    else:
                        number = int(event.subject_raw[cut:])
                        on_reply = replies.get(number)
                        if on_reply is not None:
                            on_reply(number, event)
                else:
                    self._on_control(wire, event)
            except Exception:
                log.exception("a handler failed on %r", type(event).__name__)
        for sid, messages in delivered.items():
            sub = subs.get(sid)
            if sub is not None:
                _guarded(sub.deliver, messages)

    def _on_control(self, wire: Wire, event: Event) -> None:
        if isinstance(event, Ping):
            if wire.transport is not None:
                wire.transport.write(protocol.PONG)
        elif isinstance(event, Pong):
            self._on_pong(wire)
        elif isinstance(event, Info):
            self._on_info(wire, event)
        elif isinstance(event, ServerError):
            self._on_error(wire, event.text)

    def _on_pong(self, wire: Wire) -> None:
        self._pings_out = 0
        if not wire.greeted.done():
            wire.greeted.set_result(None)
        elif wire.pongs:
            waiting = wire.pongs.pop(0)
            if not waiting.done():
                waiting.set_result(None)

    def _on_info(self, wire: Wire, event: Info) -> None:
        try:
            info = msgspec.convert(event.body, ServerInfo, strict=True)
        except msgspec.ValidationError as error:
            wire.fail(ProtocolViolation(f"INFO of the NATS server is wrong: {error}"))
            return
        if not wire.info.done():
            self.server = info
            wire.info.set_result(info)
        elif wire is self._wire:
            self.server = msgspec.structs.replace(info, nonce="")
            self._learn(info)
            if info.ldm and not self._is_moving:
                self._start_move()
        else:
            self.server = info  # a second INFO during the handshake: after TLS, or with the account's limits

    def _on_error(self, wire: Wire, text: str) -> None:
        low = text.lower()
        if low.startswith("permissions violation"):
            self._on_denied(wire, text)
            return
        wire.error = text
        log.warning("nats says: %s", text)
        error: OncewireError = Unavailable(text)
        if "authorization" in low or "authentication" in low:
            error = AuthenticationFailed(
                f"the NATS server refuses the credentials: {text}",
                hint="Check nats.user and nats.password, nats.token, nats.creds or nats.nkey (NATS_NKEY names a file).",
            )
        if not wire.greeted.done():
            wire.greeted.set_exception(error)

    def _on_denied(self, wire: Wire, text: str) -> None:
        """The connection stays; only who used that subject is told. Without an inbox no answer is ever heard, and there
        is no connection."""
        if not wire.greeted.done():
            prefix = self.options.inbox_prefix
            hint = f"Let this user subscribe to {prefix}.>, or set nats.inbox_prefix to what it may subscribe to."
            wire.greeted.set_exception(PermissionDenied(text, hint=hint))
            return
        log.warning("nats says: %s", text)
        subject = text.split('"')[1] if text.count('"') >= 2 else ""
        error = PermissionDenied(text, hint="Give this user the permission, or use another subject.")
        if "subscription" in text.lower():
            for sub in list(self._subs.values()):
                if sub.subject.decode() == subject and sub.denied is not None:
                    sub.denied(error)
            return
        for listener in list(self.listeners):
            listener.on_denied(subject, error)

    def _learn(self, info: ServerInfo) -> None:
        self._servers.learn(self.server_url, info.connect_urls, is_tls=info.tls_required)

    # ---- loss, moving, reconnecting

    def on_wire_lost(self, wire: Wire, reason: str) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        self._stop_ping()
        self._out.clear()
        self._out_bytes = 0
        if self.state is State.DRAINING:
            self._shut(f"lost while draining: {reason}")
            return
        self._set_state(State.RECONNECTING, reason)
        self._update_ready()
        self._tell_lost(reason)
        self._task = self.loop.create_task(self._reconnect(), name="oncewire-reconnect")

    def _tell_lost(self, reason: str) -> None:
        for listener in list(self.listeners):
            listener.on_lost(reason)

    async def _reconnect(self) -> None:
        """Try server after server, for ever, with a growing and jittered pause after each round."""
        self._servers.put_last(self.server_url)
        delay = self.options.reconnect_delay_min_s
        while True:
            refused: OncewireError | None = None
            for server in self._servers.in_order():
                try:
                    await self._attach(server)
                except (AuthenticationFailed, PermissionDenied) as error:
                    refused = error
                    log.warning("nats %s: %s", address_of(server), error.message)
                except OncewireError as error:
                    log.info("nats %s: %s", address_of(server), error.message)
                except Exception:  # a bug of ours or of a library: not a reason to stay disconnected for ever
                    log.exception("nats %s: connecting failed", address_of(server))
                else:
                    self.reconnects += 1
                    self._task = None
                    return
            self._auth_refusals = self._auth_refusals + 1 if refused else 0
            if refused and self._auth_refusals >= AUTH_REFUSALS_MAX:
                self._task = None
                self._shut(refused.message, refused)
                return
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
            delay = min(delay * 2, self.options.reconnect_delay_max_s)

    def _start_move(self) -> None:
        """Lame duck: leave before the server closes, when there is somewhere to go."""
        if not self._servers.has_other_than(self.server_url):
            return
        log.warning("nats %s is going away: moving to another server", address_of(self.server_url))
        self._is_moving = True
        self._update_ready()
        self._task = self.loop.create_task(self._move(), name="oncewire-move")

    async def _move(self) -> None:
        wire = self._wire
        deadline = time.monotonic() + MOVE_WAIT_S
        while self._in_flight() and time.monotonic() < deadline and self._wire is wire:  # noqa: ASYNC110 - rare, bounded
            await asyncio.sleep(0.005)
        if wire is not None and self._wire is wire:
            self._flush_to(wire)
            if wire.transport is not None:
                wire.error = "left a server in lame-duck mode"
                wire.transport.close()

    def _in_flight(self) -> int:
        return sum(listener.in_flight() for listener in self.listeners)

    # ---- keep-alive

    def _start_ping(self) -> None:
        self._stop_ping()
        self._ping_timer = self.loop.call_later(self.options.ping_interval_s, self._ping)

    def _stop_ping(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None

    def _ping(self) -> None:
        wire = self._wire
        if wire is None or wire.transport is None:
            return
        if self._pings_out >= self.options.pings_unanswered_max:
            wire.error = f"the server did not answer {self._pings_out} pings"
            wire.abort()
            return
        self._pings_out += 1
        self._send_ping(wire, self.loop.create_future())
        self._start_ping()

    def _send_ping(self, wire: Wire, answered: asyncio.Future[None]) -> None:
        answered.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        wire.pongs.append(answered)
        self._out.append(protocol.PING)  # past the limit on what waits: it is how a server that stopped is noticed
        self._flush_to(wire)

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until the server has read everything written so far."""
        wire = self._wire
        if wire is None:
            raise NotConnected(f"the connection to NATS is {self.state}")
        answered: asyncio.Future[None] = self.loop.create_future()
        self._send_ping(wire, answered)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(answered)
        except TimeoutError:
            raise TimedOut(f"the NATS server did not answer within {timeout_s} s") from None
        except NotConnected:
            self.check_open()  # closed for a reason says more
            raise

    # ---- writing

    def write(self, data: bytes) -> None:
        """Queue bytes for the socket; what is written within one turn of the loop goes out in one piece."""
        if self._wire is None:
            raise NotConnected(f"the connection to NATS is {self.state}")
        if not self._is_writable:
            self._check_room(len(data))
        self._queue(data)

    def _queue(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= FLUSH_BYTES:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush_due)

    def push(self) -> None:
        """Let go what was written in this turn: the server has work while more is made."""
        if self._out:
            self._flush()

    def _check_room(self, size: int) -> None:
        transport = self._wire.transport if self._wire else None
        waiting = (transport.get_write_buffer_size() if transport else 0) + self._out_bytes + size
        if waiting > self.options.write_bytes_max:
            raise Overloaded(
                f"{waiting} bytes wait for the NATS server, {self.options.write_bytes_max} are allowed",
                hint="The server does not read fast enough: wait with `ready`, or send less.",
            )

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        if self._wire is not None and self._out:
            self._flush_to(self._wire)

    def _flush_to(self, wire: Wire) -> None:
        out = self._out
        if wire.transport is not None and out:
            wire.transport.write(b"".join(out) if len(out) > 1 else out[0])
        out.clear()
        self._out_bytes = 0

    def on_writable(self, wire: Wire, *, is_writable: bool) -> None:
        if wire is self._wire:
            self._is_writable = is_writable
            self._update_ready()

    def _update_ready(self) -> None:
        if self.state is State.CONNECTED and self._is_writable and not self._is_moving:
            self._ready.set()
        elif self.state is not State.CLOSED:
            self._ready.clear()

    # ---- subscriptions and numbered replies

    def subscribe(
        self,
        subject: str,
        deliver: OnMessages,
        *,
        queue: str = "",
        denied: Callable[[PermissionDenied], None] | None = None,
        is_prompt: bool = False,
    ) -> Subscription:
        """Interest that is renewed after each reconnect. With `is_prompt` it is told message by message."""
        self.check_open()
        self._sid += 1
        encoded_queue = protocol.encode_subject(queue) if queue else b""
        sub = Subscription(self._sid, protocol.encode_filter(subject), encoded_queue, deliver, denied, is_prompt)
        self._subs[sub.sid] = sub
        if self._wire is not None:
            self._queue(protocol.encode_sub(sub.subject, sub.sid, sub.queue))  # small, and half done would be worse
        return sub

    def unsubscribe(self, sub: Subscription) -> None:
        if self._subs.pop(sub.sid, None) is not None and self._wire is not None:
            self._queue(protocol.encode_unsub(sub.sid))

    def take_numbers(self, count: int = 1) -> int:
        """The first of `count` fresh reply numbers."""
        first = self._number + 1
        self._number += count
        return first

    def reply_to(self, number: int) -> bytes:
        return self.inbox + b"%d" % number

    def check_size(self, size: int, reserve: int = 0) -> None:
        """Refuse what the server would cut the connection for."""
        limit = self.server.max_payload - reserve
        if size > limit:
            raise TooLarge(
                f"the message has {size} bytes with headers, {limit} are allowed",
                hint="Store large content elsewhere and send its address.",
            )


def each(deliver: OnMessage) -> OnMessages:
    """For those who take one message at a time. One that makes them fail does not hold up the next."""

    def deliver_each(messages: list[Message]) -> None:
        for message in messages:
            _guarded(deliver, message)

    return deliver_each


def _guarded(deliver: Callable[[Any], None], what: Message | list[Message]) -> None:
    try:
        deliver(what)
    except Exception:
        log.exception("a handler failed on what was delivered")
