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
ENDED_MAX: Final = 100
"""Answers that have ended and are remembered, so that an older word about one does not count."""


class Event(NamedTuple):
    """An event as it goes to every listener. Place and stored time together are its id: a place that is used again,
    in a stream that was restored or made anew, has another time."""

    place: int
    stored_ns: int
    data: bytes


class Owner(Protocol):
    """The connection behind a listener."""

    def missed(self, message: str) -> None:
        """Events that it should have are gone: say so, and go on."""

    def lost(self, message: str) -> None:
        """The stream is another: say so, and end."""


class Listener:
    """One client. `place` is what it has."""

    __slots__ = ("is_full", "is_live", "is_ready", "owner", "place", "write")

    def __init__(self, owner: Owner, write: Write, place: int) -> None:
        self.owner = owner
        self.write = write
        self.place = place
        self.is_live = False
        self.is_full = False
        self.is_ready = False
        """Its place is known."""


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
        self.running: dict[str, int] = {}
        """Answers that have begun and not ended, by message: the place of their `started`."""
        self._ended: dict[str, int] = {}
        self._last_lifecycle = 0

    # ---- answers

    def learn(self, envelopes: Iterable[Envelope]) -> None:
        """Lifecycle envelopes, in any order: of each answer the latest counts."""
        for one in envelopes:
            if one.place <= max(self.running.get(one.message_id, 0), self._ended.get(one.message_id, 0)):
                continue
            self._last_lifecycle = max(self._last_lifecycle, one.place)
            self.running.pop(one.message_id, None)
            self._ended.pop(one.message_id, None)
            if one.status == "started":
                self.running[one.message_id] = one.place
            else:
                self._ended[one.message_id] = one.place
                if len(self._ended) > ENDED_MAX:
                    del self._ended[next(iter(self._ended))]

    @property
    def begin(self) -> int:
        """Where a new listener begins: right before the `started` of the running answer, else before the last lifecycle
        event, else at what is recent."""
        places = [*self.running.values(), *([self._last_lifecycle] if self._last_lifecycle else [])]
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
