"""The rules of a token channel: one conversation's tokens and lifecycle on one node, for its SSE clients. Pure.

Everything stands in the stream at a place (its stream sequence), and a listener gets it in that order from its own
place on: what a listener has is one number. The channel keeps the last events; from before them a listener is brought
up page by page. Like a room's member, a listener is live (same write as all others) or behind; nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from oncewire.gateway.frames import Conversation
from oncewire.gateway.rooms import Say, Write

RECENT_MAX: Final = 512
RECENT_BYTES_MAX: Final = 1 << 20


class Event(NamedTuple):
    """An event as it goes to every listener."""

    place: int
    data: bytes


class Listener:
    """One client. `place` is what it has."""

    __slots__ = ("fetch", "is_full", "is_live", "owner", "place", "write")

    def __init__(self, owner: object, write: Write, place: int) -> None:
        self.owner = owner
        self.write = write
        self.place = place
        self.is_live = False
        self.is_full = False
        self.fetch = 0
        """The number of the `Look` that is under way, 0 for none."""


class Look:
    """Read events behind the listener's place, at most up to `up_to`, and answer with `found`."""

    __slots__ = ("listener", "number", "up_to")

    def __init__(self, listener: Listener, number: int, up_to: int) -> None:
        self.listener = listener
        self.number = number
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
        self._fetches = 0
        self.listeners: dict[Listener, None] = {}
        self.live: dict[Listener, Write] = {}

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
        self.listeners[listener] = None

    def leave(self, listener: Listener) -> None:
        self.listeners.pop(listener, None)
        self.live.pop(listener, None)

    def full(self, listener: Listener) -> None:
        listener.is_full = True
        listener.is_live = False
        self.live.pop(listener, None)

    def step(self, listener: Listener) -> Say | Look | None:
        """The next thing for a listener that is behind; None when there is nothing to do for it now."""
        if listener.is_live or listener.is_full or listener.fetch or listener not in self.listeners:
            return None
        if listener.place < self.floor:
            self._fetches += 1
            listener.fetch = self._fetches
            return Look(listener, listener.fetch, self.floor)
        fresh = [one for one in self.recent if one.place > listener.place]
        if fresh:
            listener.place = fresh[-1].place
            return Say((listener.write,), b"".join([one.data for one in fresh]))
        if listener.place <= self.place:  # else it has been elsewhere, further than this node is
            listener.is_live = True
            self.live[listener] = listener.write
        return None

    def found(self, listener: Listener, number: int, events: Sequence[Event], up_to: int) -> Say | None:
        """A page: everything behind the listener's place up to `up_to`."""
        if listener.fetch != number or listener not in self.listeners:
            return None
        listener.fetch = 0
        fresh = [one.data for one in events if listener.place < one.place <= up_to]
        listener.place = max(listener.place, up_to)
        return Say((listener.write,), b"".join(fresh)) if fresh else None
