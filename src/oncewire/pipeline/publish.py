"""Confirmed publishing for a Spark task: frames go out in chunks, some of them unanswered at a time.

The messages of a chunk share one reply, `<inbox>.<number>`, and a chunk is settled when the server confirmed as many
messages as it has: a reply that the server has seen before costs it less than a new one for each message. Every
sending has a number of its own, so a late answer to an earlier one counts for nothing.

What a broken connection left open is sent again *under the same ids* on the next one, so a message stands once as long
as that happens within the stream's duplicate window; the task gives up before the usual window of two minutes ends.

    answer                                      what happens
    PubAck                                      settled; `duplicate` counts as settled too
    an error that passes (5xx, electing)        sent again after a pause
    no responders                               sent again if a stream takes the subject (its server is starting)
    any other error                             the task fails with the server's reason
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import pyarrow.compute as pc

from oncewire._ground.errors import (
    NoResponders,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    ProtocolViolation,
    TimedOut,
    Unavailable,
)
from oncewire._ground.jetstream.protocol import Event, Message, parse_status
from oncewire.pipeline.columns import contents
from oncewire.pipeline.frames import ANSWER_DIGITS, PUB_ACK, Answers, Ints, split_answers
from oncewire.pipeline.options import Access
from oncewire.pipeline.outgoing import Checked, frames
from oncewire.pipeline.wire import OUTAGE_S, RETRY_DELAY_S, Wire, api_error, connect

CHUNK_RECORDS: Final = 2_000
CHUNK_BYTES: Final = 2 * 1024 * 1024
CHUNKS_OPEN_MAX: Final = 4
BUFFER_BYTES: Final = 1024 * 1024
"""The receive buffer: far more than the answers of all open chunks take."""
WANTED_BYTES: Final = 64 * 1024
LINGER_S: Final = 0.001
ANSWER_S: Final = 5.0
"""After this time without any answer the open messages are sent again: a leader may have died with them."""
BUSY_NUMBERS: Final = frozenset({10158})
"""The same id is being stored just now: the answer comes with the next try."""


@dataclass
class Chunk:
    """Rows that go out together, the number of their last sending, and how many answers to it are to come."""

    rows: Checked
    number: int = 0
    left: int = 0


def chunks(rows: Checked) -> Iterator[Chunk]:
    """The rows in parts of limited length and size; a single large row is a part of its own."""
    sizes = np.asarray(pc.binary_length(rows.payload)).astype(np.int64) + np.asarray(pc.binary_length(rows.lines))
    ends = np.cumsum(sizes)
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        limit = int(np.searchsorted(ends, before + CHUNK_BYTES, side="right"))
        end = min(max(limit, first + 1), first + CHUNK_RECORDS, len(rows))
        yield Chunk(rows.slice(first, end - first))
        first = end


@dataclass(frozen=True)
class Published:
    """What a task published: messages confirmed, and how many answers said that theirs stood there already."""

    confirmed: int
    duplicates: int


class Publisher:
    """Publishes checked rows and returns when the server has every one."""

    def __init__(self, access: Access, wire: Wire) -> None:
        self._access = access
        self._wire = wire
        self._inbox = wire.inbox
        self._number = 10 ** (ANSWER_DIGITS - 1)  # above the numbers of ordinary requests, and always as wide
        self._memory = np.empty(BUFFER_BYTES, np.uint8)
        self._filled = 0
        self._open: deque[Chunk] = deque()
        self._confirmed = 0
        self._duplicates = 0
        self._problem: OncewireError | None = None
        self._deadline = 0.0

    def publish(self, batches: Iterable[Checked]) -> Published:
        try:
            for rows in batches:
                for chunk in chunks(rows):
                    self._send(chunk)
                    self._settle(CHUNKS_OPEN_MAX - 1)
            self._settle(0)
        finally:
            self._wire.close()
        return Published(self._confirmed, self._duplicates)

    def _send(self, chunk: Chunk) -> None:
        self._open.append(chunk)
        if len(self._open) == 1:
            self._deadline = time.monotonic() + OUTAGE_S
        try:
            self._send_rows(chunk)
        except Unavailable:
            self._send_again()

    def _send_rows(self, chunk: Chunk) -> None:
        self._number += 1
        chunk.number, chunk.left = self._number, len(chunk.rows)
        edges, values = contents(frames(chunk.rows, b"%b.%d" % (self._inbox, chunk.number)))
        self._wire.send(memoryview(values.data)[int(edges[0]) : int(edges[-1])])

    def _settle(self, open_max: int) -> None:
        """Read answers until at most this many chunks are open."""
        while len(self._open) > open_max or (self._open and not self._open[0].left):
            if not self._open[0].left:
                self._confirmed += len(self._open.popleft().rows)
                self._deadline = time.monotonic() + OUTAGE_S
                continue
            try:
                self._read_answers()
            except Unavailable as error:
                self._problem = self._problem or error
                self._send_again()

    def _read_answers(self) -> None:
        """What is there, and a little more when it is on its way: many answers are read as cheaply as few."""
        self._receive(ANSWER_S)
        while self._filled < WANTED_BYTES and self._wire.is_readable(LINGER_S):
            self._receive(0.0)
        buffer = self._memory[: self._filled]
        pieces, used = split_answers(buffer, self._inbox)
        for piece in pieces:
            if isinstance(piece, Answers):
                between = buffer[int(piece.payload_start[0]) : int(piece.payload_end[-1])].tobytes()
                self._confirm(piece.number, between.count(b'"duplicate"'))
            else:
                self._read_events(piece)
        rest = buffer[used:].copy()
        self._memory[: len(rest)] = rest
        self._filled = len(rest)

    def _receive(self, timeout_s: float) -> None:
        got = self._wire.receive_into(self._memory.data[self._filled :], timeout_s)
        if not got and timeout_s:
            raise TimedOut(f"no answer came for {ANSWER_S:.0f} s")
        self._filled += got

    def _confirm(self, numbers: Ints, duplicates: int) -> None:
        for chunk in self._open:
            chunk.left -= int(np.count_nonzero(numbers == chunk.number))
            if chunk.left < 0:
                raise ProtocolViolation("more messages were confirmed than were sent", hint="Who else answers there?")
        self._duplicates += duplicates

    def _read_events(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Message):
                self._wire.handled(event)
                continue
            number = int(event.subject_raw.rpartition(b".")[2])
            if event.payload.startswith(PUB_ACK):
                self._confirm(np.array([number]), int(b'"duplicate"' in event.payload))
                continue
            for chunk in self._open:
                if chunk.number == number:
                    self._refused(event, chunk)

    def _refused(self, answer: Message, chunk: Chunk) -> None:
        status, _ = parse_status(answer.header_raw)
        if status == 503:
            self._check_homes(chunk)
            raise NoResponders("a stream takes the subject, and does not answer yet")
        try:
            problem = msgspec.json.decode(answer.payload).get("error")
        except (msgspec.DecodeError, AttributeError):
            problem = None
        if not isinstance(problem, dict):
            raise ProtocolViolation(
                f"a publish was answered with {answer.payload[:80]!r}, which is no PubAck",
                hint="Is something other than a stream listening on that subject?",
            )
        error = api_error(problem, "publish")
        raise Unavailable(str(error)) if error.server_code in BUSY_NUMBERS else error

    def _check_homes(self, chunk: Chunk) -> None:
        """Nobody took a message: whether a stream could, its leader knows."""
        asking = connect(self._access)
        try:
            for subject in {subject.decode() for subject in chunk.rows.subject.to_pylist()}:
                if not asking.api("STREAM.NAMES", {"subject": subject}).get("total"):
                    raise NotFound(
                        f"no stream takes the subject {subject}",
                        hint="Declare a stream for it, and run `oncewire topology apply`.",
                    )
        finally:
            asking.close()

    def _send_again(self) -> None:
        """Connect anew and send what is open under the same ids, until the time is over."""
        while True:
            if time.monotonic() > self._deadline:
                raise self._given_up()
            self._wire.close()
            time.sleep(RETRY_DELAY_S)
            try:
                self._wire = connect(self._access, max(1.0, self._deadline - time.monotonic()), inbox=self._inbox)
                self._filled = 0
                for chunk in self._open:
                    if chunk.left:
                        self._send_rows(chunk)
                return
            except Unavailable as error:
                self._problem = error

    def _given_up(self) -> OncewireError:
        count = sum(chunk.left for chunk in self._open)
        reason = self._problem or "no answer came"
        return OutcomeUnknown(
            f"{count} messages were sent and not confirmed within {OUTAGE_S:.0f} s: {reason}",
            hint="Run the same batch again within the stream's duplicate window: the ids keep it from standing twice.",
        )
