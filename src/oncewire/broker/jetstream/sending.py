"""Messages that go to one stream together, and how that ended. Three ways lead there:

    singles  in one write, each with an answer
    ingest   fast ingest (nats-server 2.14): each is stored as it comes and checked for itself, and one answer says how
             many were stored and where the last one stands; the first that is refused ends it
    batch    one atomic batch: all or nothing, one sync

Whether a batch is quicker for as many as wait is learned (jetstream/pace.py). In a cluster only one message with an
expectation may be on its way per subject, so more than one go as a batch.

One answer for many says where each stands only if nobody else wrote to the stream meanwhile: when as many sequences
have passed since the last one that this node knew of (Tail). Else `is_vague`, and the sender reads where they are.

No task and no future: a sending reports once, in the loop's thread, when all of it is answered, or when the connection
broke or time is up: then nobody knows what of it is stored, and its sender reads the stream.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from oncewire._ground.errors import NotFound, OncewireError, OutcomeUnknown, PermissionDenied, Unavailable
from oncewire._ground.jetstream import codes, protocol
from oncewire._ground.jetstream.connection import Connection
from oncewire._ground.jetstream.fast import SINCE
from oncewire._ground.jetstream.pace import Pace
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.publish import BATCH_MESSAGES_MAX, PubAck, parse_ack

CONFIRM_S_MAX: Final = 10.0
SWEEP_S: Final = 0.25
HALVES_MIN: Final = 16
PUSH_BYTES: Final = 1_024
"""So many are worth a write of their own, while more is made; fewer go together when the turn is over."""
INGEST_MIN: Final = 4
"""Fewer go as singles: fast ingest has an answer of its own when it begins."""
PAUSE_MAX: Final = 1_024
_PLAIN_ACK: Final = b'{"stream":'
_decode = msgspec.json.Decoder(dict[str, Any]).decode

Frame = tuple[bytes, bytes]
"""Header and payload."""


class Way(Enum):
    """See the module's head."""

    SINGLES = "singles"
    INGEST = "ingest"
    BATCH = "batch"


def header_of(lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + lines + b"\r\n"


def fence(number: int, subject: str) -> bytes:
    """Lines that let a message in only while this is the last sequence of that subject."""
    return (
        f"Nats-Expected-Last-Subject-Sequence: {number}\r\nNats-Expected-Last-Subject-Sequence-Subject: {subject}\r\n"
    ).encode()


def expect(number: int) -> bytes:
    """A line that lets a message in only while this is the last sequence of its own subject."""
    return f"Nats-Expected-Last-Subject-Sequence: {number}\r\n".encode()


class Tail:
    """The end of a stream as far as this node knows it. Where others write too, fast ingest pauses: the more often
    that is seen, the longer."""

    __slots__ = ("_pause", "_rest", "sequence")

    def __init__(self) -> None:
        self.sequence = 0
        """What this node sends from now on comes behind it."""
        self._pause = self._rest = 0

    def forget(self) -> None:
        """A server that was away may have lost the end of the stream, and give the same sequences out again."""
        self.sequence = 0

    def reach(self, sequence: int) -> None:
        self.sequence = max(self.sequence, sequence)

    def take(self, count: int, last: int) -> bool:
        """So many were stored, the last one there; True when nobody else wrote meanwhile."""
        is_alone = last - count == self.sequence
        self.reach(last)
        self._pause = self._pause // 2 if is_alone else min(self._pause * 2 + 1, PAUSE_MAX)
        self._rest = 0 if is_alone else self._pause
        return is_alone

    def choose_ingest(self) -> bool:
        """Decide for a sending."""
        if self._rest:
            self._rest -= 1
        return not self._rest


class Sending:
    """See the module's head. `sequences` are 0 where nothing is known, `duplicates` are positions."""

    __slots__ = (
        "_base", "_begun", "_done", "_outlet", "_tail", "deadline", "duplicates", "error", "is_vague", "refused",
        "sequences",
    )  # fmt: skip

    def __init__(self, outlet: Outlet, count: int, tail: Tail | None, done: Callable[[Sending], None]) -> None:
        self._outlet = outlet
        self._tail = tail
        self._done: Callable[[Sending], None] | None = done
        self._begun = time.monotonic()
        self._base = outlet.connection.take_numbers(count)
        self.deadline = self._begun + CONFIRM_S_MAX
        self.sequences = [0] * count
        self.duplicates: list[int] = []
        self.error: OncewireError | None = None
        self.refused = 0
        """How many were surely not stored."""
        self.is_vague = False
        """All are stored, and of the sequences only the last one is known."""

    @property
    def is_nothing_stored(self) -> bool:
        return self.refused == len(self.sequences)

    def begin(self, subject: bytes, frames: Sequence[Frame], guard: bytes) -> bytes:
        """Wait for the answers; returns what to write."""
        raise NotImplementedError

    def forget(self) -> None:
        """Wait for no more answers."""
        raise NotImplementedError

    def _learn(self, *, is_batch: bool = False) -> None:
        if self.error is None:
            took_us = (time.monotonic() - self._begun) * 1e6
            self._outlet.pace.learn(len(self.sequences), took_us, is_batch=is_batch)

    def _outcome(self, message: Message) -> PubAck | OncewireError:
        if message.header_raw and not message.payload:
            return Unavailable("no stream takes this message now")
        return parse_ack(message.payload, "a stream of the broker")

    def fail(self, error: OncewireError) -> None:
        """No answer will come."""
        self.error = error
        self.end()

    def end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            self.forget()
            self._outlet.ended(self)
            done(self)


class _Singles(Sending):
    __slots__ = ("_left",)

    def begin(self, subject: bytes, frames: Sequence[Frame], guard: bytes) -> bytes:  # noqa: ARG002 - each has it
        connection, base = self._outlet.connection, self._base
        self._left = len(frames)
        connection.replies.update(dict.fromkeys(range(base, base + len(frames)), self._on_reply))
        head = b"HPUB %b %b" % (subject, connection.inbox)
        return b"".join(
            [
                b"%b%d %d %d\r\n%b%b\r\n" % (head, number, len(header), len(header) + len(payload), header, payload)
                for number, (header, payload) in enumerate(frames, base)
            ]
        )

    def forget(self) -> None:
        if self._left:
            for number in range(self._base, self._base + len(self.sequences)):
                self._outlet.connection.replies.pop(number, None)

    def _on_reply(self, number: int, message: Message) -> None:
        at, payload = number - self._base, message.payload
        mark = payload.rfind(b'"seq":')
        told = payload[mark + 6 : -1]
        if told.isdigit() and payload.startswith(_PLAIN_ACK):  # an error names a sequence too
            self.sequences[at] = int(told)
        else:
            self._take(at, self._outcome(message))
        del self._outlet.connection.replies[number]
        self._left -= 1
        if self._left == 0:
            if len(self.sequences) > 1:  # one is never a batch
                self._learn()
            if self._tail is not None:
                self._tail.reach(max(self.sequences))
            self.end()

    def _take(self, at: int, outcome: PubAck | OncewireError) -> None:
        if isinstance(outcome, PubAck):
            self.sequences[at] = outcome.sequence
            if outcome.is_duplicate:
                self.duplicates.append(at)
        else:
            self.refused += 1
            self.error = outcome


class _Ingest(Sending):
    """Which message an answer is to stands in its subject:
    <inbox>i.<outlet>-<number of the sending>.<step>.<gap mode>.<number of the message>.<operation>.$FI"""

    __slots__ = ()

    def begin(self, subject: bytes, frames: Sequence[Frame], guard: bytes) -> bytes:  # noqa: ARG002 - each has it
        outlet, last = self._outlet, len(frames)
        outlet.ingests[self._base] = self
        head = b"HPUB %b %b%d.%d.fail." % (subject, outlet.ingest_inbox, self._base, BATCH_MESSAGES_MAX)
        operations = b"0" + b"1" * (last - 2) + b"2"
        return b"".join(
            [
                b"%b%d.%c.$FI %d %d\r\n%b%b\r\n"
                % (head, number, operation, len(header), len(header) + len(payload), header, payload)
                for number, operation, (header, payload) in zip(range(1, last + 1), operations, frames, strict=True)
            ]
        )

    def forget(self) -> None:
        self._outlet.ingests.pop(self._base, None)

    def on_message(self, message: Message) -> None:
        """It has begun; or all is stored; or what is wrong: then how many are stored follows, unless it is the first
        that is refused."""
        payload = message.payload
        if payload.startswith(b'{"type":"ack"'):
            return
        if payload.startswith(b'{"type":'):
            told = _decode(payload)
            failure = told.get("error")
            lost = Unavailable("the server lost a part of what was sent")
            self.error = codes.from_api(failure, "a stream of the broker") if failure else lost
            return
        outcome = self._outcome(message)
        if isinstance(outcome, PubAck):
            self._stored(outcome)
        else:
            self.refused = len(self.sequences) if _number_of(message) == 1 else 0
            self.error = self.error or outcome
        self.end()

    def _stored(self, ack: PubAck) -> None:
        count = len(self.sequences)
        if ack.count != count:
            self.refused = count - ack.count
            self.error = self.error or Unavailable(f"the server stored {ack.count} of {count} messages")
            return
        assert self._tail is not None
        self._learn()
        self.sequences = list(range(ack.sequence - count + 1, ack.sequence + 1))
        self.is_vague = not self._tail.take(count, ack.sequence)


def _number_of(message: Message) -> int:
    return int(message.subject_raw.rsplit(b".", 3)[1])


class _Batch(Sending):
    """All or nothing, so the first one's guard is enough; a second expectation would be refused."""

    __slots__ = ()

    def begin(self, subject: bytes, frames: Sequence[Frame], guard: bytes) -> bytes:
        name, last = secrets.token_hex(12), len(frames) - 1
        connection, base = self._outlet.connection, self._base
        connection.replies[base] = connection.replies[base + last] = self._on_reply
        parts: list[bytes] = []
        for at, (header, payload) in enumerate(frames):
            if at and guard:
                header = header.replace(guard, b"")
            lines = b"%bNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b\r\n" % (
                header[:-2] or b"NATS/1.0\r\n", name.encode(), at + 1,
                b"Nats-Batch-Commit: 1\r\n" if at == last else b"",
            )  # fmt: skip
            reply = connection.reply_to(base + at) if at in (0, last) else b""
            parts.append(protocol.encode_pub(subject, reply, payload, lines))
        return b"".join(parts)

    def forget(self) -> None:
        for number in (self._base, self._base + len(self.sequences) - 1):
            self._outlet.connection.replies.pop(number, None)

    def _on_reply(self, number: int, message: Message) -> None:  # noqa: ARG002 - the reply's shape
        if not message.payload and not (message.header_raw and message.status == 503):
            return  # the batch is open
        outcome = self._outcome(message)
        if isinstance(outcome, PubAck):
            first = outcome.sequence - len(self.sequences) + 1
            self.sequences = list(range(first, outcome.sequence + 1))
            self._learn(is_batch=True)
            if self._tail is not None:
                self._tail.reach(outcome.sequence)
        else:
            self.refused = len(self.sequences)
            self.error = outcome
        self.end()


_WAYS: Final = {Way.SINGLES: _Singles, Way.INGEST: _Ingest, Way.BATCH: _Batch}


class Outlet:
    """All sendings of a node. Listens to its connection for loss."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pace = Pace()
        self.tails: dict[int, Tail] = {}
        """Of topics, by their numbers."""
        self.ingests: dict[int, _Ingest] = {}
        """Those that are open, by their numbers."""
        self.ingest_inbox = b"%bi.%b-" % (connection.inbox, secrets.token_hex(6).encode())
        self._open: dict[Sending, None] = {}
        self._sweeper = connection.loop.call_later(SWEEP_S, self._sweep)
        # In its turn: what was sent later must not be known of before, or it would look like a stranger's.
        self._subscription = connection.subscribe(
            (connection.inbox + b"i.>").decode(), self._on_ingests, is_prompt=True
        )
        connection.listeners.append(self)
        self.on_connected()

    @property
    def is_clustered(self) -> bool:
        return bool(self.connection.server.cluster)

    def tail_of(self, number: int) -> Tail:
        return self.tails.setdefault(number, Tail())

    def wants_batch(self, count: int) -> bool:
        """Whether so many messages should go as one batch."""
        return count > 1 and (self.is_clustered or self.pace.choose_batch(count))

    def takes_ingest(self, count: int, tail: Tail) -> bool:
        """Whether so many messages, none with an id, should go by fast ingest, if not as a batch."""
        return count >= INGEST_MIN and self._has_ingest and tail.choose_ingest()

    def takes_halves(self, count: int) -> bool:
        """Whether so many who are told should be told in two halves, so that the server has work meanwhile."""
        return count >= HALVES_MIN and not self.is_clustered and not self.pace.is_batch_quicker(count)

    def send(
        self,
        subject: bytes,
        frames: Sequence[Frame],
        done: Callable[[Sending], None],
        way: Way,
        *,
        guard: bytes = b"",
        tail: Tail | None = None,
    ) -> Sending | OncewireError:
        """Begin; an error when nothing went out. At most BATCH_MESSAGES_MAX at a time, singles each with a header.
        `guard` is what all expect, `tail` that of the stream, if it is a topic's."""
        assert 0 < len(frames) <= BATCH_MESSAGES_MAX
        if not self.connection.takes_requests:
            return Unavailable("the broker is not connected to NATS", retry_after_s=1.0)
        sending: Sending = _WAYS[way](self, len(frames), tail, done)
        try:
            data = sending.begin(subject, frames, guard)
            self.connection.write(data)
            if len(data) >= PUSH_BYTES:
                self.connection.push()
        except OncewireError as error:
            sending.forget()
            return error
        self._open[sending] = None
        return sending

    def ended(self, sending: Sending) -> None:
        self._open.pop(sending, None)

    def close(self) -> None:
        self._sweeper.cancel()
        self.connection.unsubscribe(self._subscription)
        if self in self.connection.listeners:
            self.connection.listeners.remove(self)

    def _on_ingests(self, messages: list[Message]) -> None:
        cut = len(self.ingest_inbox)
        for message in messages:
            sending = self.ingests.get(int(message.subject_raw[cut:].split(b".", 1)[0]))
            if sending is not None:
                sending.on_message(message)

    def _sweep(self) -> None:
        self._sweeper = self.connection.loop.call_later(SWEEP_S, self._sweep)
        now = time.monotonic()
        for sending in [one for one in self._open if one.deadline <= now]:
            sending.fail(OutcomeUnknown("NATS did not confirm in time: outcome unknown", retry_after_s=1.0))

    # ---- the connection tells

    def on_connected(self) -> None:
        """Perhaps to another server. Whoever lost something reads the stream."""
        self._has_ingest = has_ingest(self.connection)

    def on_lost(self, reason: str) -> None:
        for tail in self.tails.values():
            tail.forget()
        for sending in list(self._open):
            sending.fail(OutcomeUnknown(f"the connection to NATS broke: outcome unknown ({reason})", retry_after_s=1.0))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        """The refusal names no sending; each is given up at its deadline."""

    def in_flight(self) -> int:
        return len(self._open)


def has_ingest(connection: Connection) -> bool:
    """Whether the server has fast ingest, and streams can allow it."""
    return connection.server.version_tuple >= SINCE


def for_clients(error: OncewireError) -> OncewireError:
    """A conflict is between owners: somebody else wrote where only we may. Clients only have to try again."""
    if error.server_code in (codes.WRONG_LAST_SEQUENCE, codes.WRONG_LAST_NOW):
        return Unavailable("another node has taken this partition: try again", retry_after_s=0.1)
    return error


def unknown(error: OncewireError) -> OncewireError:
    """It may be stored. What has no topic any more is gone all the same."""
    return (
        error if isinstance(error, NotFound) else OutcomeUnknown(f"outcome unknown: {error.message}", retry_after_s=1.0)
    )
