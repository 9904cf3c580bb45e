"""What did not come is asked for once more, by another way, before it is called a gap.

Messages come through a consumer or by batches of direct get. Here the stream's leader is asked, for each range that did
not come, which message it has next from the range's first sequence on. If that lies in the range, the message is there:
the batch was read wrongly and is read again. If not, how the stream stands at that moment is kept with the gap.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from oncewire._ground.errors import Corrupt, Unavailable
from oncewire._ground.jetstream import protocol
from oncewire._ground.jetstream.protocol import Message
from oncewire.pipeline.lake.rules import Closed, Second, sizes
from oncewire.pipeline.options import Access
from oncewire.pipeline.stream import NO_MESSAGE, facts_of
from oncewire.pipeline.tables import Lifetime
from oncewire.pipeline.wire import REQUEST_S, Wire, api_error, connect

log = logging.getLogger("oncewire.pipeline")

ASKED_AT_ONCE: Final = 64
"""Requests that wait for their answers: each answer is a whole message."""


class Unread(Unavailable):
    """The stream has what did not come: it must be read again."""


class SecondLook:
    """Asks for the ranges of one stream, over a connection of its own: it is used by another thread than the one that
    looks after the streams."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._wire: Wire | None = None

    def __call__(self, lifetime: Lifetime, ranges: Sequence[Closed]) -> Second:
        try:
            self._wire = self._wire or connect(self._access)
            return look_again(self._wire, lifetime, ranges)
        except Unavailable:
            self.close()
            raise

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = None


def look_again(wire: Wire, lifetime: Lifetime, ranges: Sequence[Closed]) -> Second:
    """That nothing is stored in these ranges; Unread when something is. Corrupt when the stream is not the one that
    they were read from."""
    stream, next_stored = lifetime[0], 0
    for (first, last), next_stored in zip(ranges, _next_stored(wire, stream, [one[0] for one in ranges]), strict=True):
        if 0 < next_stored <= last:
            log.error("sequence %d of %s is stored, and was not read: the batch is read again", next_stored, stream)
            raise Unread(
                f"sequences {first} to {last} of stream {stream} did not come, and the stream has {next_stored}",
                hint="The batch is read again. If this stays, the reader or the server is broken: please report it.",
            )
    facts = facts_of(wire, stream)
    if protocol.parse_time_ns(facts.created) != lifetime[1]:
        raise Corrupt(f"stream {stream} was recreated while it was read")
    return Second(
        time.time_ns() // 1_000_000, facts.first, facts.last, facts.messages, facts.deleted, facts.limits,
        facts.has_subject_limits, len(ranges), sizes(ranges), next_stored,
    )  # fmt: skip


class _Stored(msgspec.Struct):
    seq: int


class _Failed(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct):
    message: _Stored | None = None
    error: _Failed | None = None


_read: Final = msgspec.json.Decoder(_Answer).decode


def _next_stored(wire: Wire, stream: str, firsts: Sequence[int]) -> Iterator[int]:
    """The first sequence that is stored from each of these on, as the leader has it; 0 where nothing is."""
    subject = protocol.encode_subject(f"$JS.API.STREAM.MSG.GET.{stream}")
    waiting: deque[bytes] = deque()
    answers: dict[bytes, int] = {}
    for first in firsts:
        waiting.append(wire.next_reply())
        wire.send(protocol.encode_pub(subject, waiting[-1], msgspec.json.encode({"seq": first, "next_by_subj": ">"})))
        if len(waiting) == ASKED_AT_ONCE:
            yield _answer(wire, waiting.popleft(), answers, stream)
    while waiting:
        yield _answer(wire, waiting.popleft(), answers, stream)


def _answer(wire: Wire, reply: bytes, answers: dict[bytes, int], stream: str) -> int:
    deadline = time.monotonic() + REQUEST_S
    while reply not in answers:
        event = wire.next_event(deadline)
        if isinstance(event, Message):
            answers[event.subject_raw] = _sequence(event.payload, stream)
    return answers.pop(reply)


def _sequence(payload: bytes, stream: str) -> int:
    told = _read(payload)
    if told.message is not None:
        return told.message.seq
    failed = told.error or _Failed()
    if failed.err_code == NO_MESSAGE:
        return 0
    raise api_error(msgspec.to_builtins(failed), f"STREAM.MSG.GET.{stream}")
