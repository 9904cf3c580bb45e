"""Reading a token stream: bytes to events, by the WHATWG rules of event streams, and events to answers. Pure."""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Struct

from oncewire._ground.contracts.realtime import RealtimeEnvelope, StreamLifecycle, TokenChunk

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_CHUNK_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,9})")
"""The attempt at an answer and the chunk's number there: so producers of ours name theirs."""
ENDED_MAX = 100
"""Answers whose text is remembered, so that a chunk that comes late does not open them again."""


class SseEvent(Struct, frozen=True):
    """One event of a stream."""

    id: str
    name: str
    data: str


class EventParser:
    """Bytes in, events out. Lines may be cut anywhere."""

    def __init__(self, last_event_id: str = "") -> None:
        self.last_event_id = last_event_id
        self._left = b""
        self._data: list[str] = []
        self._name = ""
        self._id: str | None = None

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that these bytes complete."""
        *lines, self._left = _LINE_END.split(self._left + data)  # a CR at the very end may be half of a CRLF: it waits
        found = [self._line(line) for line in lines]
        return [event for event in found if event is not None]

    def _line(self, line: bytes) -> SseEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> SseEvent | None:
        if self._id is not None:
            self.last_event_id = self._id
        event = SseEvent(self.last_event_id, self._name or "message", "\n".join(self._data)) if self._data else None
        self._data, self._name, self._id = [], "", None
        return event


class Token(Struct, frozen=True):
    """A piece of an answer."""

    message_id: str
    token: str
    text: str
    """All pieces so far."""
    is_final: bool
    metadata: dict[str, Any] | None = None
    """What goes with the piece and is not part of the text, such as reasoning or a call of a tool."""
    is_whole: bool = True
    """No piece before this one is missing: the stream keeps only so many."""


class Lifecycle(Struct, frozen=True):
    """An answer began, was blocked, or ended."""

    message_id: str
    status: Literal["started", "blocked", "completed", "errored"]
    text: str
    """What there was of it."""
    detail: Any = None
    is_whole: bool = True


class _Answer:
    def __init__(self) -> None:
        self.text = ""
        self.seen: set[str] = set()
        self.attempt = ""
        self.number = 0
        self.is_whole = True

    def take(self, chunk: TokenChunk) -> None:
        self.seen.add(chunk.chunk_id)
        self.text += chunk.token
        counted = _CHUNK_ID.fullmatch(chunk.chunk_id)
        if counted is not None:
            attempt, number = counted[1], int(counted[2])
            follows = number == (self.number + 1 if attempt == self.attempt else 1)
            self.is_whole = self.is_whole and follows
            self.attempt, self.number = attempt, number


class Answers:
    """Puts chunks together until the final one. Chunks that were seen before change nothing."""

    def __init__(self) -> None:
        self._open: dict[str, _Answer] = {}
        self._ended: dict[str, _Answer] = {}

    def take(self, envelope: RealtimeEnvelope) -> Token | Lifecycle | None:
        """What an envelope of the stream means, None when it says nothing new."""
        match envelope.event:
            case TokenChunk() as chunk:
                return self._chunk(chunk)
            case StreamLifecycle(message_id=message_id, status=status, detail=detail):
                if status == "started":  # also when somebody else begins it anew: what there was counts no more
                    self._open[message_id] = _Answer()
                    self._ended.pop(message_id, None)
                    return Lifecycle(message_id, status, "", detail)
                self._end(message_id)
                answer = self._ended[message_id]
                return Lifecycle(message_id, status, answer.text, detail, answer.is_whole)
        return None

    def _chunk(self, chunk: TokenChunk) -> Token | None:
        if chunk.message_id in self._ended:
            return None
        answer = self._open.setdefault(chunk.message_id, _Answer())
        if chunk.chunk_id in answer.seen:
            return None
        answer.take(chunk)
        if chunk.is_final:
            self._end(chunk.message_id)
        return Token(chunk.message_id, chunk.token, answer.text, chunk.is_final, chunk.metadata, answer.is_whole)

    def _end(self, message_id: str) -> None:
        if message_id not in self._ended:
            self._ended[message_id] = self._open.pop(message_id, _Answer())
            self._ended[message_id].seen.clear()
            if len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]
