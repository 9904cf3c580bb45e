"""Messages that go to one stream together, and how that ended: singles in one write, or one atomic batch.

Which of both is quicker for as many as wait is learned (jetstream/pace.py). In a cluster only one message with an
expectation may be on its way per subject, so more than one go as a batch.

No task and no future: a sending reports once, in the loop's thread, when all of it is answered, or when the connection
broke or time is up: then nobody knows what of it is stored, and its sender reads the stream.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from oncewire.errors import NotFound, OncewireError, OutcomeUnknown, PermissionDenied, Unavailable
from oncewire.jetstream import codes, protocol
from oncewire.jetstream.connection import Connection
from oncewire.jetstream.pace import Pace
from oncewire.jetstream.protocol import Message
from oncewire.jetstream.publish import BATCH_MESSAGES_MAX, PubAck, parse_ack

CONFIRM_S_MAX: Final = 10.0
SWEEP_S: Final = 0.25
HALVES_MIN: Final = 16
_PLAIN_ACK: Final = b'{"stream":'

Frame = tuple[bytes, bytes]
"""Header and payload."""


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


class Sending:
    """See the module's head. `sequences` are 0 where nothing is known, `duplicates` are positions."""

    __slots__ = (
        "_base", "_begun", "_done", "_is_batch", "_left", "_outlet", "deadline", "duplicates", "error", "refused",
        "sequences",
    )  # fmt: skip

    def __init__(self, outlet: Outlet, count: int, is_batch: bool, done: Callable[[Sending], None]) -> None:
        self._outlet = outlet
        self._is_batch = is_batch
        self._done: Callable[[Sending], None] | None = done
        self._begun = time.monotonic()
        self._base = 0
        self._left = 1 if is_batch else count
        self.deadline = self._begun + CONFIRM_S_MAX
        self.sequences = [0] * count
        self.duplicates: list[int] = []
        self.error: OncewireError | None = None
        self.refused = 0
        """How many were surely not stored."""

    @property
    def is_nothing_stored(self) -> bool:
        return self.refused == len(self.sequences)

    def begin(self, subject: bytes, frames: Sequence[Frame], guard: bytes) -> bytes:
        connection = self._outlet.connection
        self._base = base = connection.take_numbers(len(frames))
        if self._is_batch:
            connection.replies[base] = connection.replies[base + len(frames) - 1] = self._on_batch
            return self._batch(subject, frames, guard)
        connection.replies.update(dict.fromkeys(range(base, base + len(frames)), self._on_reply))
        head = b"HPUB %b %b" % (subject, connection.inbox)
        return b"".join(
            [
                b"%b%d %d %d\r\n%b%b\r\n" % (head, number, len(header), len(header) + len(payload), header, payload)
                for number, (header, payload) in enumerate(frames, base)
            ]
        )

    def _batch(self, subject: bytes, frames: Sequence[Frame], guard: bytes) -> bytes:
        """All or nothing, so the first one's guard is enough; a second expectation would be refused."""
        name, last = secrets.token_hex(12), len(frames) - 1
        connection = self._outlet.connection
        parts: list[bytes] = []
        for at, (header, payload) in enumerate(frames):
            if at and guard:
                header = header.replace(guard, b"")
            lines = b"%bNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b\r\n" % (
                header[:-2] or b"NATS/1.0\r\n", name.encode(), at + 1,
                b"Nats-Batch-Commit: 1\r\n" if at == last else b"",
            )  # fmt: skip
            reply = connection.reply_to(self._base + at) if at in (0, last) else b""
            parts.append(protocol.encode_pub(subject, reply, payload, lines))
        return b"".join(parts)

    # ---- answers

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
            self._learn()
            self.end()

    def _take(self, at: int, outcome: PubAck | OncewireError) -> None:
        if isinstance(outcome, PubAck):
            self.sequences[at] = outcome.sequence
            if outcome.is_duplicate:
                self.duplicates.append(at)
        else:
            self.refused += 1
            self.error = outcome

    def _on_batch(self, number: int, message: Message) -> None:  # noqa: ARG002 - the reply's shape
        if not message.payload and not (message.header_raw and message.status == 503):
            return  # the batch is open
        outcome = self._outcome(message)
        if isinstance(outcome, PubAck):
            first = outcome.sequence - len(self.sequences) + 1
            self.sequences = list(range(first, outcome.sequence + 1))
            self._learn()
        else:
            self.refused = len(self.sequences)
            self.error = outcome
        self.end()

    def _learn(self) -> None:
        if self.error is None:
            took_us = (time.monotonic() - self._begun) * 1e6
            self._outlet.pace.learn(len(self.sequences), took_us, is_batch=self._is_batch)

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
        if done is None:
            return
        if self._left or self._is_batch:
            for number in range(self._base, self._base + len(self.sequences)):
                self._outlet.connection.replies.pop(number, None)
        self._outlet.ended(self)
        done(self)


class Outlet:
    """All sendings of a node. Listens to its connection for loss."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pace = Pace()
        self._open: dict[Sending, None] = {}
        self._sweeper = connection.loop.call_later(SWEEP_S, self._sweep)
        connection.listeners.append(self)

    @property
    def is_clustered(self) -> bool:
        return bool(self.connection.server.cluster)

    def wants_batch(self, count: int) -> bool:
        """Whether so many messages should go as one batch."""
        return count > 1 and (self.is_clustered or self.pace.choose_batch(count))

    def takes_halves(self, count: int) -> bool:
        """Whether so many who are told should be told in two halves, so that the server has work meanwhile."""
        return count >= HALVES_MIN and not self.is_clustered and not self.pace.is_batch_quicker(count)

    def send(
        self,
        subject: bytes,
        frames: Sequence[Frame],
        done: Callable[[Sending], None],
        *,
        is_batch: bool,
        guard: bytes = b"",
    ) -> Sending | OncewireError:
        """Begin; an error when nothing went out. At most BATCH_MESSAGES_MAX at a time, singles each with a header.
        `guard` is what all expect."""
        assert 0 < len(frames) <= BATCH_MESSAGES_MAX
        if not self.connection.takes_requests:
            return Unavailable("the broker is not connected to NATS", retry_after_s=1.0)
        sending = Sending(self, len(frames), is_batch, done)
        try:
            self.connection.write(sending.begin(subject, frames, guard))
        except OncewireError as error:
            return error
        self._open[sending] = None
        return sending

    def ended(self, sending: Sending) -> None:
        self._open.pop(sending, None)

    def close(self) -> None:
        self._sweeper.cancel()
        if self in self.connection.listeners:
            self.connection.listeners.remove(self)

    def _sweep(self) -> None:
        self._sweeper = self.connection.loop.call_later(SWEEP_S, self._sweep)
        now = time.monotonic()
        for sending in [one for one in self._open if one.deadline <= now]:
            sending.fail(OutcomeUnknown("NATS did not confirm in time: outcome unknown", retry_after_s=1.0))

    # ---- the connection tells

    def on_connected(self) -> None:
        """Whoever lost something reads the stream."""

    def on_lost(self, reason: str) -> None:
        for sending in list(self._open):
            sending.fail(OutcomeUnknown(f"the connection to NATS broke: outcome unknown ({reason})", retry_after_s=1.0))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        """The refusal names no sending; each is given up at its deadline."""

    def in_flight(self) -> int:
        return len(self._open)


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
