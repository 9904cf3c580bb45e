"""The rules of a token channel: one conversation's tokens and lifecycle on one node, for those who listen. Pure.

Everything is at a place in the stream (its stream sequence), and a listener gets it in that order from its own place
on: what a listener has is one number. The channel keeps the last events; from before them listeners are brought up page
by page, each page read once for all that need it. Like a room's member, a listener is live (same write as all others)
or behind; nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from oncewire.gateway.frames import Conversation, Envelope
from oncewire.gateway.rooms import Say, Write

RECENT_MAX: Final = 512
RECENT_BYTES_MAX: Final = 1 << 20
SILENT_S: Final = 5.0
"""An answer of which nothing was heard for so long is asked about, and then again."""
MISSES_MAX: Final = 2
"""Its producer is gone when nobody answers so often in a row: it may just be reconnecting."""
ENDED_MAX: Final = 100
"""Answers that have ended and are remembered, so that an older word about one does not count."""


class Event(NamedTuple):
    """An event as it goes to every listener. Place and stored time together are its id: a place that is used again,
    in a stream that was restored or made anew, has another time."""

    place: int
    stored_ns: int
    data: bytes


class Answer:
    """One that is being written: where it began, when it was heard of, and how often its producer did not answer."""

    __slots__ = ("heard_s", "misses", "place")

    def __init__(self, place: int, heard_s: float) -> None:
        self.place = place
        self.heard_s = heard_s
        self.misses = 0


class Owner(Protocol):
    """The connection behind a listener."""

    def missed(self, message: str) -> None:
        """Events that it should have are gone: say so, and go on."""

    def lost(self, message: str) -> None:
        """The stream is another: say so, and end."""


class Listener:
    """One client. `place` is what it has."""

    __slots__ = ("is_full", "is_live", "is_ready", "owner", "place", "told", "write")

    def __init__(self, owner: Owner, write: Write, place: int) -> None:
        self.owner = owner
        self.write = write
        self.place = place
        self.is_live = False
        self.is_full = False
        self.is_ready = False
        """Its place is known."""
        self.told: set[str] = set()
        """Answers of which it was told that their producer is gone."""


class Look:
    """Read events behind the place `after`, at most up to `up_to`, and answer with `found`."""

    __slots__ = ("after", "up_to")

    def __init__(self, after: int, up_to: int) -> None:
        self.after = after
        self.up_to = up_to


class Channel:
    """See the module's head. `place` is the node's position in the stream when the channel begins."""

    def __init__(self, conversation: Conversation, place: int) -> None:
        self.conversation = conversation
        self.place = place
        """Everything up to here has been told."""
        self.floor = place
        """Everything behind this place is among the recent."""
        self.recent: deque[Event] = deque()
        self._recent_bytes = 0
        self.listeners: dict[Listener, None] = {}
        self.live: dict[Listener, Write] = {}
        self._needing: dict[Listener, None] = {}
        """Listeners that need what only the stream has."""
        self._looking: Look | None = None
        self.is_scanned = False
        """The answers that began before the channel are known."""
        self.running: dict[str, Answer] = {}
        """Answers that have begun and not ended, by message."""
        self._ended: dict[str, int] = {}
        self._lost: dict[str, bytes] = {}
        """Answers whose producer is gone, by what is said of it: that is not in the stream."""
        self._last_lifecycle = 0

    # ---- answers

    def learn(self, envelopes: Iterable[Envelope], now_s: float) -> None:
        """Lifecycle envelopes, in any order: of each answer the latest counts."""
        for one in envelopes:
            running = self.running.get(one.message_id)
            if one.place <= (running.place if running is not None else self._ended.get(one.message_id, 0)):
                continue
            self._last_lifecycle = max(self._last_lifecycle, one.place)
            self.running.pop(one.message_id, None)
            self._ended.pop(one.message_id, None)
            self._lost.pop(one.message_id, None)
            if one.status == "started":
                self.running[one.message_id] = Answer(one.place, now_s)
            else:
                self._end(one.message_id, one.place)

    def _end(self, message_id: str, place: int) -> None:
        self._ended[message_id] = place
        if len(self._ended) > ENDED_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._lost.pop(oldest, None)

    def heard(self, message_id: str, now_s: float) -> None:
        """A token of an answer, or its producer says that it lives."""
        answer = self.running.get(message_id)
        if answer is not None:
            answer.heard_s, answer.misses = now_s, 0

    def silent(self, now_s: float) -> list[str]:
        """Answers whose producers are to be asked now whether they live."""
        found = [id_ for id_, answer in self.running.items() if now_s - answer.heard_s >= SILENT_S]
        for message_id in found:
            self.running[message_id].heard_s = now_s
        return found

    def unheard(self, message_id: str) -> bool:
        """Nobody answered for an answer: whether its producer counts as gone."""
        answer = self.running.get(message_id)
        if answer is None:
            return False
        answer.misses += 1
        return answer.misses >= MISSES_MAX

    def lose(self, message_id: str, data: bytes) -> Say | None:
        """Its producer is gone: said to all who listen, now or when they are live."""
        self._end(message_id, self.running.pop(message_id).place)
        self._lost[message_id] = data
        for listener in self.live:
            listener.told.add(message_id)
        return Say(tuple(self.live.values()), data) if self.live else None

    @property
    def begin(self) -> int:
        """Where a new listener begins: right before the `started` of the running answer, else before the last lifecycle
        event, else at what is recent."""
        places = [answer.place for answer in self.running.values()]
        if self._last_lifecycle:
            places.append(self._last_lifecycle)
        return min([self.floor, *(place - 1 for place in places)])

    # ---- events

    def arrived(self, events: Sequence[Event]) -> Say | None:
        """What the node's reader brought, in the order of the stream. `behind` are to be stepped afterwards."""
        fresh = [one for one in events if one.place > self.place]
        if not fresh:
            return None
        for one in fresh:
            self.recent.append(one)
            self._recent_bytes += len(one.data)
        self.place = fresh[-1].place
        while len(self.recent) > RECENT_MAX or self._recent_bytes > RECENT_BYTES_MAX:
            oldest = self.recent.popleft()
            self._recent_bytes -= len(oldest.data)
            self.floor = oldest.place
        if not self.live:
            return None
        for listener in self.live:
            listener.place = self.place
        return Say(tuple(self.live.values()), b"".join([one.data for one in fresh]))

    @property
    def behind(self) -> list[Listener]:
        if len(self.live) == len(self.listeners):
            return []
        return [one for one in self.listeners if not one.is_live]

    def join(self, listener: Listener) -> None:
        """It is stepped once its place is known: see `ready`."""
        self.listeners[listener] = None

    def ready(self, listener: Listener, place: int) -> None:
        listener.place, listener.is_ready = place, True

    def leave(self, listener: Listener) -> None:
        self.listeners.pop(listener, None)
        self.live.pop(listener, None)
        self._needing.pop(listener, None)

    def full(self, listener: Listener) -> None:
        listener.is_full = True
        listener.is_live = False
        self.live.pop(listener, None)

    def step(self, listener: Listener) -> Say | Look | None:
        """The next thing for a listener that is behind; None when there is nothing to do for it now."""
        is_waiting = not listener.is_ready or listener.is_full or listener in self._needing
        if listener.is_live or is_waiting or listener not in self.listeners:
            return None
        if listener.place < self.floor:
            self._needing[listener] = None
            return self._look_next()
        fresh = [one for one in self.recent if one.place > listener.place]
        if fresh:
            listener.place = fresh[-1].place
            return Say((listener.write,), b"".join([one.data for one in fresh]))
        if listener.place <= self.place:  # else it has been elsewhere, further than this node is
            listener.is_live = True
            self.live[listener] = listener.write
            lost = [data for message_id, data in self._lost.items() if message_id not in listener.told]
            listener.told.update(self._lost)
            return Say((listener.write,), b"".join(lost)) if lost else None
        return None

    def _look_next(self) -> Look | None:
        """One page at a time, from the listener on that is furthest behind."""
        if self._looking is not None or not self._needing:
            return None
        self._looking = Look(min(listener.place for listener in self._needing), self.floor)
        return self._looking

    def is_waiting_for(self, look: Look) -> bool:
        """Whether the answer to this reading still counts."""
        return self._looking is look

    def found(self, look: Look, events: Sequence[Event], up_to: int) -> list[Say | Look]:
        """A page: everything behind the place that was looked from up to `up_to`. All that needed it are to be stepped
        afterwards."""
        if self._looking is not look:
            return []
        self._looking = None
        by_place: dict[int, list[Listener]] = {}
        for listener in list(self._needing):
            if look.after <= listener.place < max(up_to, look.after + 1):
                del self._needing[listener]
                by_place.setdefault(listener.place, []).append(listener)
        acts: list[Say | Look] = []
        for place, listeners in by_place.items():
            data = b"".join([one.data for one in events if place < one.place <= up_to])
            if data:
                acts.append(Say([listener.write for listener in listeners], data))
            for listener in listeners:
                listener.place = max(place, up_to)
        following = self._look_next()
        return [*acts, following] if following is not None else acts
