"""Reads a range of sequences of a stream as Arrow batches: what a Spark task does.

A large range comes through an ephemeral pull consumer, whose bytes go to `frames` and `columns` without a Python object
per message; a small one by direct get, which needs no consumer. Position is everything: each batch moves it, and
whatever breaks (the server, the connection, a consumer that is gone) is answered by beginning anew from the position.

A range is complete when its last sequence came, or when the *leader* says that nothing more of it exists: a replica
that lags ends early, and a short tail is no proof.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from oncewire._ground.errors import NoResponders, ProtocolViolation, TimedOut, Unavailable
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.protocol import FRAME_BYTES_MAX, LINE_BYTES_MAX, Message
from oncewire.pipeline import rules, stream
from oncewire.pipeline.columns import Columns
from oncewire.pipeline.frames import Bytes, Cuts, Expected, Piece, split
from oncewire.pipeline.options import ReadOptions
from oncewire.pipeline.rules import Facts
from oncewire.pipeline.stream import Row
from oncewire.pipeline.wire import OUTAGE_S, REQUEST_S, RETRY_DELAY_S, Wire, connect

log = logging.getLogger("oncewire.pipeline")

BUFFER_BYTES: Final = 4 * 1024 * 1024
"""The receive buffer of a task. It grows only for a message that is larger than itself."""
WANTED_BYTES: Final = 2 * 1024 * 1024
"""As much as is gathered before it is parsed, when more is on its way."""
LINGER_S: Final = 0.002
STALL_S: Final = 10.0
DIRECT_RECORDS_MAX: Final = 1_000
PULL_BYTES: Final = 4 * 1024 * 1024
PULL_RECORDS_MAX: Final = 20_000
PULLS_AHEAD: Final = 2
PULL_EXPIRES_S: Final = 30


@dataclass(frozen=True)
class Part:
    """A range [first, end) of one stream, as it was planned."""

    first: int
    end: int
    created: str
    is_earliest: bool = False


class RangeReader:
    """Reads one part. `position` is the next sequence; `gaps` is what was not there, without filters."""

    def __init__(self, options: ReadOptions, part: Part, columns: Columns) -> None:
        self.options = options
        self.part = part
        self.columns = columns
        self.position = part.first
        self.gaps: list[tuple[int, int]] = []

    def batches(self) -> Iterator[Any]:
        deadline = time.monotonic() + OUTAGE_S
        while True:
            before = self.position
            try:
                yield from self._read()
                return
            except Unavailable as error:
                if self.position > before:
                    deadline = time.monotonic() + OUTAGE_S
                if time.monotonic() > deadline:
                    raise
                log.warning("reading %s goes on from %d: %s", self.options.stream, self.position, error)
                time.sleep(RETRY_DELAY_S)

    def _read(self) -> Iterator[Any]:
        leader = connect(self.options.access)
        try:
            while self.position < self.part.end:
                facts = stream.facts_of(leader, self.options.stream)
                self._check_created(facts)
                yield from self._read_ahead(leader, facts)
                tail = self._tail(leader)
                if tail is None:
                    break
                yield self.columns.of_rows(self._within([tail]))
            self._account(stream.facts_of(leader, self.options.stream))
        finally:
            leader.close()

    def _read_ahead(self, leader: Wire, facts: Facts) -> Iterator[Any]:
        """Everything that the server hands out at once, up to the end of the part."""
        if self.part.end - self.position <= DIRECT_RECORDS_MAX and len(self.options.subjects) <= 1:
            rows = self._within(direct(leader, self.options, self.position, self.part.end - self.position))
            if rows is not None:
                if rows:
                    yield self.columns.of_rows(rows)
                return
        delivery = Delivery(connect(self.options.access), self.options, self.position, self.part.end, facts)
        try:
            for piece in delivery.pieces():
                if isinstance(piece, Cuts):
                    yield self._cuts_within(delivery.buffer, piece)
                else:
                    yield self.columns.of_rows(self._within(piece) or [])
        finally:
            delivery.close()

    def _within(self, rows: list[Row] | None) -> Any:
        """The rows of the part, with the position behind them."""
        if rows is None:
            return None
        kept = [row for row in rows if row.sequence < self.part.end]
        self._passed(np.array([row.sequence for row in kept], np.int64))
        return kept

    def _cuts_within(self, buffer: Bytes, cuts: Cuts) -> Any:
        self._passed(cuts.sequence)
        return self.columns.of_cuts(buffer, cuts)

    def _passed(self, sequences: Any) -> None:
        if not len(sequences):
            return
        if sequences[0] < self.position or (np.diff(sequences) <= 0).any():
            raise ProtocolViolation(f"sequences of {self.options.stream} came out of order after {self.position - 1}")
        if sequences[-1] - self.position + 1 != len(sequences) and not self.options.subjects:
            edges = np.concatenate(([self.position - 1], sequences))
            for at in np.flatnonzero(np.diff(edges) > 1):
                self.gaps.append((int(edges[at]) + 1, int(edges[at + 1])))
        self.position = int(sequences[-1]) + 1

    def _tail(self, leader: Wire) -> Row | None:
        """What the leader has of the rest, when the rest looked empty: None when it really is."""
        if self.position >= self.part.end:
            return None
        found = stream.message_from(leader, self.options.stream, self.position, self.options.subjects)
        return found if found and found.sequence < self.part.end else None

    def _check_created(self, facts: Facts) -> None:
        if facts.created != self.part.created:
            loss = rules.find_loss(rules.Offset(self.position, self.part.created), facts, None)
            assert loss is not None
            raise loss.error()

    def _account(self, facts: Facts) -> None:
        """Tell what was deleted, which is legitimate, from what was trimmed away before it could be read."""
        self._check_created(facts)
        loss = rules.unread(self._missing(), facts)
        if loss is None:
            return
        if self.options.fails_on_data_loss and not loss.is_by_design:
            raise loss.error()
        log.log(logging.INFO if loss.is_by_design else logging.WARNING, "%s", loss.sentence)

    def _missing(self) -> list[tuple[int, int]]:
        """Ranges of the part that did not come. With filters nobody can say: then all of it counts as missing."""
        part = self.part
        if self.options.subjects:
            return [] if part.is_earliest else [(part.first, part.end)]
        gaps = [*self.gaps, (self.position, part.end)] if self.position < part.end else self.gaps
        return gaps[1:] if part.is_earliest and gaps and gaps[0][0] == part.first else gaps


def direct(wire: Wire, options: ReadOptions, first: int, count: int) -> list[Row] | None:
    """Up to `count` messages from `first` on by direct get; None when the stream does not offer it."""
    request: dict[str, Any] = {"seq": first, "batch": count}
    if options.subjects:
        request["next_by_subj"] = options.subjects[0]
    reply = wire.next_reply()
    subject = protocol.encode_subject(f"$JS.API.DIRECT.GET.{options.stream}")
    wire.send(protocol.encode_pub(subject, reply, msgspec.json.encode(request)))
    rows: list[Row] = []
    deadline = time.monotonic() + REQUEST_S
    while True:
        event = wire.next_event(deadline)
        if not isinstance(event, Message) or event.subject_raw != reply:
            continue
        status = event.status
        if status in (204, 404):
            return rows
        if status == 503:
            return None
        if status:
            raise Unavailable(f"reading {options.stream} from {first}: {protocol.parse_status(event.header_raw)}")
        rows.append(stream.stored_row(event))


class Delivery:
    """One ephemeral consumer and the bytes that it sends, on a connection of their own."""

    def __init__(self, wire: Wire, options: ReadOptions, first: int, end: int, facts: Facts) -> None:
        self.wire = wire
        self._stream = options.stream
        self._end = end
        self._position = first
        self._capacity = BUFFER_BYTES
        self._memory = np.empty(self._capacity, np.uint8)
        self._filled = 0
        self._expected: Expected | None = None
        self._consumer_sequence = 0
        self._asked = 0
        mean = max(1, facts.size_bytes // max(1, facts.messages))
        self._pull_records = min(PULL_RECORDS_MAX, max(10, PULL_BYTES // mean))
        try:
            self._name, self._pending = stream.create_consumer(wire, options.stream, first, options.subjects)
        except BaseException:
            wire.close()
            raise
        self._inbox = wire.next_reply()
        self._next = protocol.encode_subject(f"$JS.API.CONSUMER.MSG.NEXT.{options.stream}.{self._name}")

    @property
    def buffer(self) -> Bytes:
        return self._memory[: self._filled]

    def pieces(self) -> Iterator[Cuts | list[Row]]:
        """Messages in order until the end of the range or of what the server has. Valid until the next step."""
        while self._pending and self._position < self._end:
            self._pull()
            self._receive(LINGER_S)
            self._expected = self._expected or Expected.seen_in(self.buffer)
            pieces, used = split(self.buffer, self._expected)
            for piece in pieces:
                yield from self._checked(piece)
            self._keep_from(used)

    def close(self) -> None:
        """Remove the consumer. Unread deliveries are read and dropped first: a socket that is closed over unread
        bytes is reset, and the request could be lost with it. What fails here, the server's own timer does."""
        reply = self.wire.next_reply()
        subject = protocol.encode_subject(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}")
        try:
            self.wire.send(protocol.encode_pub(subject, reply, b""))
            self._drop_until(reply, time.monotonic() + REQUEST_S)
        except (Unavailable, ProtocolViolation) as error:
            log.info("consumer %s is left to the server's timer: %s", self._name, error)
        finally:
            self.wire.close()

    def _drop_until(self, reply: bytes, deadline: float) -> None:
        is_done = False
        while not is_done and time.monotonic() < deadline:
            pieces, used = split(self.buffer, self._expected)
            events = [event for piece in pieces if isinstance(piece, list) for event in piece]
            is_done = any(isinstance(event, Message) and event.subject_raw == reply for event in events)
            self._keep_from(used)
            if not is_done:
                self._receive()

    # ---- asking

    def _pull(self) -> None:
        """Keep some pulls ahead, but do not ask for more than the range can hold."""
        while self._asked < PULLS_AHEAD * self._pull_records:
            count = min(self._pull_records, self._end - self._position - self._asked)
            if count <= 0:
                break
            body = {"batch": count, "expires": PULL_EXPIRES_S * 1_000_000_000}
            self.wire.send(protocol.encode_pub(self._next, self._inbox, msgspec.json.encode(body)))
            self._asked += count

    # ---- receiving

    def _receive(self, linger_s: float = 0.0) -> None:
        if self._filled == self._capacity:
            self._grow()
        self._take(STALL_S)
        while self._filled < WANTED_BYTES and self.wire.is_readable(linger_s):
            self._take(0.0)

    def _take(self, timeout_s: float) -> None:
        got = self.wire.receive_into(self._memory.data[self._filled :], timeout_s)
        if not got and timeout_s:
            raise TimedOut(f"{self._stream} has {self._pending} messages more, and none came for {STALL_S} s")
        self._filled += got

    def _grow(self) -> None:
        if self._capacity > FRAME_BYTES_MAX + LINE_BYTES_MAX:
            raise ProtocolViolation(f"a message of {self._stream} does not end within {self._capacity} bytes")
        self._capacity *= 2
        larger = np.empty(self._capacity, np.uint8)
        larger[: self._filled] = self.buffer
        self._memory = larger

    def _keep_from(self, used: int) -> None:
        rest = self._memory[used : self._filled]
        if used:
            self._memory[: len(rest)] = rest.copy() if len(rest) > used else rest
        self._filled = len(rest)

    # ---- checking

    def _checked(self, piece: Piece) -> Iterator[Cuts | list[Row]]:
        if isinstance(piece, Cuts):
            self._follow(piece.consumer_sequence, int(piece.pending[-1]))
            inside = int(np.searchsorted(piece.sequence, self._end))
            self._position = int(piece.sequence[-1]) + 1
            if inside:
                yield piece if inside == len(piece) else piece.first(inside)
            return
        rows = [row for event in piece if not self.wire.handled(event) and (row := self._delivered(event))]
        if rows:
            self._position = rows[-1].sequence + 1
            yield rows

    def _delivered(self, event: object) -> Row | None:
        """A delivery that the exact parser read; a status ends its pull or the consumer."""
        if not isinstance(event, Message):
            return None
        if not event.reply.startswith(b"$JS.ACK."):
            if event.subject_raw == self._inbox:
                self._status(event)
            return None
        try:
            _, sequence, consumer_sequence, timestamp_ns, pending = map(int, event.reply.split(b".")[-5:])
        except ValueError:
            raise ProtocolViolation(f"a delivery has the reply {event.reply[:120]!r}") from None
        self._follow(np.array([consumer_sequence]), pending)
        return Row(event.subject_raw, sequence, timestamp_ns, event.header_raw, event.payload)

    def _status(self, message: Message) -> None:
        status, text = protocol.parse_status(message.header_raw)
        if status in (404, 408) or (status == 409 and "batch" in text.lower()):
            self._asked = 0  # the pull ended: the next step asks again
        elif status == 503:
            raise NoResponders(f"consumer {self._name} is gone")
        elif status != 100:
            raise Unavailable(f"reading {self._stream}: {status} {text}")

    def _follow(self, consumer_sequences: Any, pending: int) -> None:
        """Deliveries are numbered without a hole: a hole is one that was lost on the way."""
        wanted = self._consumer_sequence + 1
        last = int(consumer_sequences[-1])
        if int(consumer_sequences[0]) != wanted or last - wanted + 1 != len(consumer_sequences):
            raise Unavailable(f"a delivery of {self._stream} is missing after number {self._consumer_sequence}")
        self._consumer_sequence = last
        self._pending = pending
        self._asked -= len(consumer_sequences)
