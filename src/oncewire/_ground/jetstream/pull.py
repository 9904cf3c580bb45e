"""Pulling from a durable consumer, and settling what was pulled.

A Pull keeps up to `ahead` requests open at the server, so that the next batch is on its way while this one is worked
on; with `ahead=0` nothing is asked for but by `ask`, for those who must not hold more than they can work on. Messages
arrive on one subscription; which request they belong to does not matter, only how many are still owed:

    owed  =  asked for  -  received  -  what the server says it will not send (408, 409 with Nats-Pending-Messages)

When the connection breaks, or nothing (no message, no heartbeat) came for two heartbeats, everything owed is written
off and asked for again. What was delivered and not settled comes back by itself after the consumer's ack_wait.

Settling is a publish to the message's reply subject. Unconfirmed it is cheap and may get lost, which means that the
message comes back. Nak does not adhere to the consumer's backoff: give the delay. A confirmed ack is not durable
either: a killed server redelivers some of them. Only a ledger makes an effect happen once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Final

import msgspec

from oncewire._ground import native
from oncewire._ground.errors import (
    ContractViolation,
    NotConnected,
    NotFound,
    OncewireError,
    PermissionDenied,
    Refused,
    TooLarge,
    Unavailable,
)
from oncewire._ground.fields import columns
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.options import State
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.requests import Requests

log = logging.getLogger("oncewire.jetstream")

BATCH: Final = 256
AHEAD: Final = 2
EXPIRES_S: Final = 30.0
HEARTBEAT_S: Final = 5.0
BATCH_MAX: Final = 10_000
BYTES_MAX: Final = 16 * 1024 * 1024
ASK_AGAIN_S: Final = 0.25
TERM_REASON_BYTES_MAX: Final = 1_024
NAK_DELAY_S_MAX: Final = 366.0 * 24 * 3600
"""The server reads no delay beyond the nanoseconds that 63 bits hold, and redelivers at once instead."""

ACK: Final = b"+ACK"
NAK: Final = b"-NAK"
TERM: Final = b"+TERM"
IN_PROGRESS: Final = b"+WPI"


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """Where a delivered message stands, read from its reply subject."""

    stream: str
    consumer: str
    deliveries: int
    sequence: int
    timestamp_ns: int
    _reply: bytes

    @property
    def consumer_sequence(self) -> int:
        return _number(_numbers(self._reply)[2])

    @property
    def pending(self) -> int:
        return _number(_numbers(self._reply)[4])


_CONSUMERS: dict[bytes, tuple[str, str]] = {}
"""Stream and consumer by what the replies of their deliveries begin with."""
_CONSUMERS_MAX: Final = 1_024


def parse_reply(reply: bytes) -> Delivery:
    """`$JS.ACK.` stream, consumer, deliveries, stream sequence, consumer sequence, time, pending. Newer servers put
    domain and account before them and may add tokens behind."""
    head, *tokens = reply.rsplit(b".", 5)
    known = _CONSUMERS.get(head)
    if known is None:
        known, tokens = _look_closer(reply)
    try:
        deliveries, sequence, _, timestamp_ns, _ = tokens
        return Delivery(*known, int(deliveries), int(sequence), int(timestamp_ns), reply)
    except ValueError:
        raise _no_delivery(reply) from None


def _numbers(reply: bytes) -> list[bytes]:
    """Deliveries, stream sequence, consumer sequence, time, pending."""
    head, *tokens = reply.rsplit(b".", 5)
    return tokens if head in _CONSUMERS else _look_closer(reply)[1]


def parse_replies(replies: list[bytes]) -> list[Delivery]:
    """What `parse_reply` gives for each. Those of one consumer begin alike: their numbers are taken apart together."""
    head = replies[0].rsplit(b".", 5)[0] if replies else b""
    known = _CONSUMERS.get(head)
    if known is not None:
        begin = head + b"."
        if native.replies is not None and (found := native.replies(replies, begin, Delivery, *known)) is not None:
            return found
        rest = [reply[len(begin) :] for reply in replies if reply.startswith(begin)]
        if len(rest) == len(replies) and {4}.issuperset([one.count(b".") for one in rest]):
            tokens = b".".join(rest).split(b".")
            numbers = (map(int, tokens[at::5]) for at in (0, 1, 3))
            with contextlib.suppress(ValueError):
                return list(map(Delivery, repeat(known[0]), repeat(known[1]), *numbers, replies))
    return [parse_reply(reply) for reply in replies]


def _look_closer(reply: bytes) -> tuple[tuple[str, str], list[bytes]]:
    """A reply of a consumer that was not seen before, or of a newer server: stream and consumer, and the numbers."""
    tokens = reply.split(b".")
    if len(tokens) != 9:
        tokens = tokens[:2] + tokens[4:11]
    if len(tokens) != 9 or tokens[:2] != [b"$JS", b"ACK"] or not all(map(bytes.isdigit, tokens[4:])):
        raise _no_delivery(reply)
    try:
        known = (tokens[2].decode(), tokens[3].decode())
    except UnicodeDecodeError:
        raise _no_delivery(reply) from None
    if reply.count(b".") == 8 and len(_CONSUMERS) < _CONSUMERS_MAX:
        _CONSUMERS[b".".join(tokens[:4])] = known
    return known, tokens[4:]


def _number(token: bytes) -> int:
    if not token.isdigit():
        raise _no_delivery(token)
    return int(token)


def _no_delivery(reply: bytes) -> ContractViolation:
    return ContractViolation(f"{reply[:80]!r} is not the reply subject of a JetStream delivery")


def nak_verb(delay_s: float = 0.0) -> bytes:
    """Redeliver after `delay_s`; 0 means at once, whatever the consumer's backoff says."""
    if not 0 <= delay_s <= NAK_DELAY_S_MAX:
        raise ContractViolation(f"a nak's delay is from 0 to {NAK_DELAY_S_MAX:.0f} seconds, not {delay_s!r}")
    delay_ns = int(delay_s * 1e9)
    return b'-NAK {"delay": %d}' % delay_ns if delay_ns > 0 else NAK


def _cut(text: str, bytes_max: int) -> bytes:
    """At most so many bytes, without half a character at the end."""
    return text.encode("utf-8", "replace")[:bytes_max].decode("utf-8", "ignore").encode()


def term_verb(reason: str = "") -> bytes:
    """Never redeliver. The reason stands in the server's advisory."""
    cleaned = _cut(" ".join(reason.split()), TERM_REASON_BYTES_MAX)
    return TERM + b" " + cleaned if cleaned else TERM


def _is_for_good(text: str, *, is_untouched: bool) -> bool:
    """Whether the same request would be refused for ever. A byte limit ends each request: only when it ends one that
    brought nothing, the next message alone is too large for it."""
    return "exceeded maxrequest" in text or ("exceeds maxbytes" in text and is_untouched)


def _refusal(text: str) -> type[Refused]:
    return TooLarge if "exceeds maxbytes" in text else Refused


class Pull:
    """See the module's head. An async context manager; made by `Client.pull`."""

    def __init__(
        self,
        requests: Requests,
        stream: str,
        consumer: str,
        *,
        batch: int = BATCH,
        ahead: int = AHEAD,
        batch_bytes: int = 0,
        expires_s: float = EXPIRES_S,
        heartbeat_s: float = HEARTBEAT_S,
        fails_on_loss: bool = False,
    ) -> None:
        if not 1 <= batch <= BATCH_MAX or ahead < 0 or heartbeat_s * 2 > expires_s:
            raise ContractViolation(f"a pull asks for 1 to {BATCH_MAX} messages and expires after two heartbeats")
        self._calls = requests
        connection = self._connection = requests.connection
        self.stream = stream
        self.consumer = consumer
        self._batch = batch
        self._ahead = ahead
        self._heartbeat_s = heartbeat_s
        self._fails_on_loss = fails_on_loss
        self._terms: dict[str, object] = {
            "expires": int(expires_s * 1e9),
            "idle_heartbeat": int(heartbeat_s * 1e9),
        }
        if batch_bytes:
            self._terms["max_bytes"] = batch_bytes
        self._next = protocol.encode_subject(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}")
        self._acks = f"$JS.ACK.{stream}.{consumer}."
        number = connection.take_numbers()
        self._inbox = connection.inbox + b"p%d." % number
        self._requests = 0
        self._owed = 0
        self._waiting: deque[Message] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._error: OncewireError | None = None
        self._heard_at = time.monotonic()
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._ask_timer: asyncio.TimerHandle | None = None
        self._is_probing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.missed_heartbeats = 0
        self._sub = connection.subscribe((self._inbox + b"*").decode(), self._deliver, denied=self._fail)
        connection.listeners.append(self)
        self._watch()

    async def __aenter__(self) -> Pull:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop asking. What waits here unread is handed back by the server after ack_wait."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._timer, self._ask_timer):
            if timer is not None:
                timer.cancel()
        with contextlib.suppress(ValueError):
            self._connection.listeners.remove(self)
        with contextlib.suppress(OncewireError):
            self._connection.unsubscribe(self._sub)
        for task in self._tasks:
            task.cancel()
        self._stir()

    # ---- reading

    async def fetch(self, count: int = 0, *, timeout_s: float | None = None) -> list[Message]:
        """What is there, at most `count` (default: one batch); waits for the first message.

        An empty list means that nothing came within `timeout_s`. Raises NotFound when the consumer is gone, and
        NotConnected once the pull or the connection is closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        waiting = self._waiting
        while not waiting:
            if self._error is not None:
                raise self._error
            if self._connection.state is State.CLOSED:
                self._connection.check_open()
            if self._is_closed:
                raise NotConnected("the pull is closed")
            self._ask()
            if not await self._wait(deadline):
                return []
            if self._ahead == 0 and not self._owed and not waiting:
                return []  # whoever asks by hand must ask again
        count = count or self._batch
        if len(waiting) <= count:
            taken = list(waiting)
            waiting.clear()
        else:
            taken = [waiting.popleft() for _ in range(count)]
        self._ask()
        return taken

    async def _wait(self, deadline: float | None) -> bool:
        self._wake = self._connection.loop.create_future()
        try:
            if deadline is None:
                await self._wake
            else:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._wake
        except TimeoutError:
            return bool(self._waiting)
        finally:
            self._wake = None
        return True

    def _stir(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # ---- asking

    def _ask(self) -> None:
        """Keep the requests ahead filled, as long as the server can hear them and what waits here is bounded."""
        if self._is_closed or self._error is not None or self._is_probing or self._ask_timer is not None:
            return
        if not self._connection.is_ready:  # no room to write, moving, or lost: nobody else would ask again
            self._later()
            return
        goal = self._batch * self._ahead
        while self._owed + len(self._waiting) <= goal - self._batch:
            self._request(self._batch)

    def _request(self, count: int) -> None:
        reply = self._inbox + b"%d" % (self._requests + 1)
        body = msgspec.json.encode({"batch": count, **self._terms})
        self._connection.write(protocol.encode_pub(self._next, reply, body))
        self._requests += 1
        self._owed += count

    def ask(self, count: int) -> None:
        """Ask for so many more, at most one batch. Does nothing while the server cannot hear it: ask again later.

        It does not wait for room to write: who asks by hand asks before its own publishes are out, and would have no
        other occasion until something arrives.
        """
        is_able = not self._is_closed and self._error is None and not self._is_probing and self._ask_timer is None
        if count > 0 and is_able and self._connection.takes_requests:
            with contextlib.suppress(Unavailable):  # too much waits for the server, or it is just gone
                self._request(min(count, self._batch))

    @property
    def is_fed(self) -> bool:
        """Whether the pull can still bring messages, and the server's last sign is not too old."""
        return self._error is None and time.monotonic() - self._heard_at <= 2 * self._heartbeat_s

    @property
    def expected(self) -> int:
        """Messages that were asked for and not fetched yet."""
        return self._owed + len(self._waiting)

    def _deliver(self, messages: list[Message]) -> None:
        self._heard_at = time.monotonic()
        told = [message for message in messages if not message.payload and message.status]
        if told:
            messages = [message for message in messages if message.payload or not message.status]
        # Less is owed when a request was written off and its messages came all the same.
        self._owed = max(0, self._owed - len(messages))
        self._waiting.extend(messages)
        for message in told:
            self._on_status(*protocol.parse_status(message.header_raw), message)
        if messages:
            self._stir()

    def _on_status(self, status: int, text: str, message: Message) -> None:
        if status == 100:
            return
        low = text.lower()
        if status == 409 and ("consumer deleted" in low or "push based" in low):
            self._fail(NotFound(f"consumer {self.consumer} on {self.stream}: {text}"))
            return
        if status == 400:
            self._fail(ContractViolation(f"pull from {self.consumer} on {self.stream} refused: {text}"))
            return
        told = message.headers.get("Nats-Pending-Messages", "")
        unsent = int(told) if told.isdigit() else self._batch
        if status == 409 and _is_for_good(low, is_untouched=unsent >= self._batch):
            self._fail(_refusal(low)(f"pull from {self.consumer} on {self.stream} refused: {text}"))
            return
        self._owed = max(0, self._owed - unsent)
        if status == 503 or (status == 409 and ("leadership" in low or "shutdown" in low)):
            self._probe()
        elif status == 409 and "maxbytes" not in low:  # too many wait: asking again at once would only spin
            self._later()
        self._ask()
        self._stir()

    def _probe(self) -> None:
        """Nobody answered the request: is the consumer gone, or is its leader being elected?"""
        if self._is_probing or self._is_closed:
            return
        self._is_probing = True
        self._owed = 0
        task = self._connection.loop.create_task(self._look(), name="oncewire-pull-probe")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self) -> None:
        subject = f"$JS.API.CONSUMER.INFO.{self.stream}.{self.consumer}"
        delay = ASK_AGAIN_S
        while not self._is_closed:
            try:
                reply = await self._calls.call(subject, timeout_s=2.0, repeat=True)
            except PermissionDenied:  # it may pull but not look: asking again in a moment must do
                break
            except OncewireError:
                reply = None
            if reply is not None:
                if b'"err_code":10014' in reply.payload or b'"err_code":10059' in reply.payload:
                    self._fail(NotFound(f"consumer {self.consumer} on stream {self.stream} does not exist"))
                    return
                if b'"error"' not in reply.payload:
                    break
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)
        self._is_probing = False
        self._owed = 0
        self._later()

    def _later(self) -> None:
        """Ask again in a moment, and not before."""
        if self._ask_timer is None and not self._is_closed:
            self._ask_timer = self._connection.loop.call_later(ASK_AGAIN_S, self._ask_now)

    def _ask_now(self) -> None:
        self._ask_timer = None
        self._ask()

    def _watch(self) -> None:
        """Two heartbeats of silence while something is owed: the requests are lost."""
        if self._is_closed:
            return
        now = time.monotonic()
        if self._owed and self._connection.is_ready and now - self._heard_at > 2 * self._heartbeat_s:
            self.missed_heartbeats += 1
            log.warning("pull %s/%s: no heartbeat, asking again", self.stream, self.consumer)
            self._heard_at = now
            self._owed = 0
            self._on_loss("no heartbeat")
            self._ask()
        self._timer = self._connection.loop.call_later(self._heartbeat_s, self._watch)

    def _fail(self, error: OncewireError) -> None:
        self._error = error
        self._stir()

    # ---- the connection tells

    def on_connected(self) -> None:
        self._heard_at = time.monotonic()
        self._owed = 0
        if self._ask_timer is not None:
            self._ask_timer.cancel()
            self._ask_timer = None
        self._ask()

    def on_lost(self, reason: str) -> None:
        self._owed = 0
        if self._connection.state is State.CLOSED:
            self.close()
        self._on_loss(reason)
        self._stir()

    def _on_loss(self, reason: str) -> None:
        """What was on its way may be gone. Without acks nobody sends it again: an ordered reader must begin anew."""
        if self._fails_on_loss and self._error is None:
            self._fail(NotFound(f"deliveries of {self.consumer} may be lost: {reason}"))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        """Who may pull and not settle would be given the same messages again and again."""
        if subject.encode() == self._next or subject.startswith(self._acks):
            self._fail(error)

    def in_flight(self) -> int:
        return 0

    # ---- settling

    def ack(self, messages: Iterable[Message]) -> None:
        """Settle many as done, in one write."""
        self.settle(messages, ACK)

    def nak(self, messages: Iterable[Message], delay_s: float = 0.0) -> None:
        """Ask for redelivery, after the delay."""
        self.settle(messages, nak_verb(delay_s))

    def term(self, messages: Iterable[Message], reason: str = "") -> None:
        """Give up: never redeliver. On a work queue the message is gone, so store it elsewhere first."""
        self.settle(messages, term_verb(reason))

    def in_progress(self, messages: Iterable[Message]) -> None:
        """Still at it: the ack_wait of each starts anew."""
        self.settle(messages, IN_PROGRESS)

    def settle(self, messages: Iterable[Message], verb: bytes) -> None:
        """Unconfirmed. Raises NotConnected when there is no server: the messages come back."""
        (replies,) = columns(list(messages), Message, "reply")
        data = protocol.encode_acks(replies, verb)
        if data:
            self._connection.write(data)

    async def settle_confirmed(self, messages: Iterable[Message], verb: bytes = ACK, timeout_s: float = 5.0) -> None:
        """Wait until the server has taken each settlement. It answers the same to a second and to a late one."""
        calls = [
            self._calls.call(message.reply.decode(), verb, timeout_s=timeout_s, repeat=True) for message in messages
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, Unavailable):
                raise Unavailable(f"a settlement was not confirmed: {outcome.message}")
            if isinstance(outcome, BaseException):
                raise outcome
