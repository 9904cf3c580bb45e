"""Confirmed publishing for a Spark task: frames go out in chunks, some of them unanswered at a time.

A chunk is settled when the server confirmed every one of its messages. What a broken connection left open is sent
again *under the same ids* on the next one, so a message stands once as long as that happens within the stream's
duplicate window; the task gives up before the usual window of two minutes ends.

    answer                                      what happens
    PubAck                                      settled; `duplicate` counts as settled too
    an error that passes (5xx, electing)        sent again after a pause
    no responders                               sent again if a stream takes the subject (its server is starting)
    any other error                             the task fails with the server's reason
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from oncewire.errors import (
    NoResponders,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    ProtocolViolation,
    TimedOut,
    Unavailable,
)
from oncewire.jetstream.protocol import Event, Message, parse_status
from oncewire.pipeline.columns import contents
from oncewire.pipeline.frames import ANSWER_DIGITS, PUB_ACK, Answers, Bits, Ints, split_answers
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
PREFIX_BYTES: Final = 5_000
"""Enough of a frame to hold its subject."""
ANSWER_S: Final = 5.0
"""After this time without any answer the open messages are sent again: a leader may have died with them."""
BUSY_NUMBERS: Final = frozenset({10158})
"""The same id is being stored just now: the answer comes with the next try."""


@dataclass
class Chunk:
    """Frames that went out together and which of them are still open."""

    data: memoryview
    edges: Ints
    first: int
    is_open: Bits
    left: int

    def settle(self, numbers: Ints) -> int:
        """Mark what was answered; how many of these numbers were open here."""
        at = numbers[(numbers >= self.first) & (numbers < self.first + len(self.is_open))] - self.first
        count = int(np.count_nonzero(self.is_open[at]))
        self.is_open[at] = False
        self.left -= count
        return count

    def open_numbers(self) -> Ints:
        return np.flatnonzero(self.is_open) + self.first

    def frame(self, number: int) -> memoryview:
        at = number - self.first
        return self.data[int(self.edges[at]) : int(self.edges[at + 1])]


@dataclass(frozen=True)
class Published:
    """What a task published: messages confirmed, and how many of them stood there already."""

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
                for chunk in self._chunks(rows):
                    self._send(chunk)
                    self._settle(CHUNKS_OPEN_MAX - 1)
            self._settle(0)
        finally:
            self._wire.close()
        return Published(self._confirmed, self._duplicates)

    def _chunks(self, rows: Checked) -> Iterable[Chunk]:
        made = frames(rows, self._inbox, self._number)
        edges, values = contents(made)
        first = 0
        while first < len(made):
            limit = int(np.searchsorted(edges, edges[first] + CHUNK_BYTES, side="right")) - 1
            end = min(max(limit, first + 1), first + CHUNK_RECORDS, len(made))
            number = self._number + first
            part = edges[first : end + 1]
            yield Chunk(memoryview(values.data), part, number, np.ones(end - first, np.bool_), end - first)
            first = end
        self._number += len(made)

    def _send(self, chunk: Chunk) -> None:
        self._open.append(chunk)
        if len(self._open) == 1:
            self._deadline = time.monotonic() + OUTAGE_S
        try:
            self._wire.send(chunk.data[int(chunk.edges[0]) : int(chunk.edges[-1])])
        except Unavailable:
            self._send_again()

    def _settle(self, open_max: int) -> None:
        """Read answers until at most this many chunks are open."""
        while len(self._open) > open_max or (self._open and not self._open[0].left):
            if not self._open[0].left:
                self._open.popleft()
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
        """Answers to an earlier sending of the same message settle nothing."""
        settled = sum(chunk.settle(numbers) for chunk in self._open)
        self._confirmed += settled
        self._duplicates += min(duplicates, settled)

    def _read_events(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Message):
                self._wire.handled(event)
                continue
            number = np.array([int(event.subject_raw.rpartition(b".")[2])])
            if event.payload.startswith(PUB_ACK):
                self._confirm(number, int(b'"duplicate"' in event.payload))
            elif any(number[0] in chunk.open_numbers() for chunk in self._open):
                self._refused(event, int(number[0]))

    def _refused(self, answer: Message, number: int) -> None:
        status, _ = parse_status(answer.header_raw)
        if status == 503:
            self._check_home(number)
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

    def _check_home(self, number: int) -> None:
        """Nobody took the message: whether a stream could, its leader knows."""
        chunk = next(one for one in self._open if number in one.open_numbers())
        subject = bytes(chunk.frame(number)[:PREFIX_BYTES]).split(b" ", 2)[1].decode()
        asking = connect(self._access)
        try:
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
                        self._wire.send(b"".join(chunk.frame(int(number)) for number in chunk.open_numbers()))
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
