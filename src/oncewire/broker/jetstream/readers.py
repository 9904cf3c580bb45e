"""Readers of a topic whose partitions may be anywhere.

A Fan is a reader of this node: it has a subscriber in each cell that is here, and at every other node that owns some of
the partitions a Guest, which stands for it there. A guest takes nothing by itself: it hints that there is something,
and the fan fetches as much as its reader takes. So nothing is leased that nobody has room for, and a long poll, which
may take from one place only, asks one after the other.

When a partition changes its owner, its cell says so, and the fan looks for the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from oncewire._ground.contracts.broker import Delivery
from oncewire._ground.errors import OncewireError
from oncewire.broker import rules
from oncewire.broker.dispatch import has_work
from oncewire.broker.engine import Consume, Sink
from oncewire.broker.jetstream import ops
from oncewire.broker.jetstream.catalog import Listed
from oncewire.broker.jetstream.cell import Cell
from oncewire.broker.jetstream.link import Link
from oncewire.broker.state import Subscriber

Entered = Callable[[OncewireError | None], None]


class Host(Protocol):
    """What readers need from their node."""

    link: Link

    @property
    def node(self) -> str: ...
    def clock(self) -> int: ...
    def wake(self, cell: Cell) -> None: ...
    def attach(self, fan: Fan, partition: int) -> None:
        """Find the partition's owner and attach there, for as long as it takes."""

    def enter(self, cell: Cell, consume: Consume, done: Entered) -> None:
        """Make the group in a cell unless it is there."""

    def forget(self, fan: Fan) -> None: ...


class Fan:
    """See the module's head. The sink of its subscribers; to its reader, the subscription."""

    def __init__(self, host: Host, number: int, topic: Listed, consume: Consume, sink: Sink, *, is_poll: bool) -> None:
        self._host = host
        self.number = number
        self.topic = topic
        self.consume = consume
        self._sink = sink
        self._is_poll = is_poll
        self._here: dict[Cell, Subscriber] = {}
        self._there: dict[str, set[int]] = {}
        self._hinted: dict[str, None] = {}
        self._fetching = ""
        self._has_begun = False
        self.is_open = True

    # ---- attaching

    def attach_here(self, cell: Cell, done: Callable[[Any], None]) -> None:
        def entered(error: OncewireError | None) -> None:
            if error is not None or not self.is_open or cell in self._here:
                done(error)
                return
            subscriber = cell.join(self.consume, self)
            if isinstance(subscriber, OncewireError):
                done(subscriber)
                return
            self._here[cell] = subscriber
            cell.on_gone.append(partial(self._left_here, cell))
            done(None)
            if self._has_begun:  # else all begin together, in the order of the partitions
                self._host.wake(cell)

        self._host.enter(cell, self.consume, entered)

    def attached_there(self, node: str, partition: int) -> None:
        if self.is_open:
            self._there.setdefault(node, set()).add(partition)
            self._hinted[node] = None
            self._fetch()
        else:
            self._host.link.ask(node, ops.Leave(self.number), _ignore)

    def _left_here(self, cell: Cell) -> None:
        if self._here.pop(cell, None) is not None and self.is_open:
            self._host.attach(self, cell.partition)

    def left_there(self, node: str, partition: int) -> None:
        """Another node no longer owns a partition."""
        if self.is_open and partition in self._there.get(node, ()):
            self._there[node].discard(partition)
            self._host.attach(self, partition)

    def lost(self, node: str) -> None:
        """Another node is gone."""
        self._hinted.pop(node, None)
        for partition in self._there.pop(node, ()):
            if self.is_open:
                self._host.attach(self, partition)

    def lost_all(self) -> None:
        for node in list(self._there):
            self.lost(node)

    # ---- deliveries

    def room(self) -> int:
        if not self._has_begun or not self.is_open or (self._is_poll and self._fetching):
            return 0
        return self._sink.room()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._sink.deliver(deliveries)

    def ended(self, error: OncewireError) -> None:
        if self.is_open:
            self.close()
            self._sink.ended(error)

    def hint(self, node: str) -> None:
        if node in self._there:
            self._hinted[node] = None
            self._fetch()

    def poke(self) -> None:
        """Look everywhere: a hint may have got lost."""
        self._hinted = dict.fromkeys(self._there)
        self._fetch()

    def _fetch(self) -> None:
        if not self._has_begun or not self.is_open or self._fetching or not self._hinted:
            return
        room = self._sink.room()
        if room <= 0:
            return
        node = next(iter(self._hinted))
        del self._hinted[node]
        self._fetching = node
        self._host.link.ask(node, ops.Fetch(self.number, room), partial(self._fetched, node))

    def _fetched(self, node: str, found: list[Delivery] | OncewireError) -> None:
        self._fetching = ""
        if isinstance(found, OncewireError):
            self.lost(node)
        elif found:
            self._hinted[node] = None
            if self.is_open:
                self._sink.deliver(found)
        self.resume()

    # ---- the reader's side

    @property
    def is_looking(self) -> bool:
        return not self._has_begun or bool(self._fetching)

    def begin(self) -> None:
        """It was accepted everywhere: now messages may come, in the order of the partitions."""
        self._has_begun = True
        for cell, subscriber in sorted(self._here.items(), key=lambda one: one[0].partition):
            cell.state.stirred[subscriber.group] = None
            cell.look()
        self._fetch()

    def resume(self) -> None:
        for cell, subscriber in list(self._here.items()):
            cell.resume(subscriber)
        self._fetch()

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for subscriber in self._here.values():
            rules.leave(self._host.clock(), subscriber)
        for node in self._there:
            self._host.link.ask(node, ops.Leave(self.number), _ignore)
        self._here.clear()
        self._there.clear()
        self._host.forget(self)


def _ignore(_: object) -> None:
    """Leaving needs no answer: who is gone has no readers."""


class Guest:
    """A reader of another node, in the cells of this one."""

    def __init__(self, host: Host, node: str, number: int) -> None:
        self._host = host
        self._node = node
        self._number = number
        self._here: dict[Cell, Subscriber] = {}
        self._space = 0
        self._got: list[Delivery] = []
        self._has_hinted = False

    def attach(self, cell: Cell, consume: Consume, done: Callable[[Any], None]) -> None:
        def entered(error: OncewireError | None) -> None:
            if error is not None or cell in self._here:
                done(error or self._host.node)
                return
            subscriber = cell.join(consume, self)
            if isinstance(subscriber, OncewireError):
                done(subscriber)
                return
            self._here[cell] = subscriber
            cell.on_gone.append(partial(self._left, cell))
            self._has_hinted = False
            done(self._host.node)
            self._host.wake(cell)

        self._host.enter(cell, consume, entered)

    def _left(self, cell: Cell) -> None:
        if self._here.pop(cell, None) is not None:
            self._host.link.tell(self._node, ops.Detached(self._number, cell.partition))

    def leave(self) -> None:
        for subscriber in self._here.values():
            rules.leave(self._host.clock(), subscriber)
        self._here.clear()

    def fetch(self, count: int) -> list[Delivery]:
        """As much as there is now, at most so many."""
        self._space, self._got = count, []
        for cell, subscriber in list(self._here.items()):
            cell.state.stirred[subscriber.group] = None
            cell.hand_out()
            self._host.wake(cell)  # what was too late to deliver is written
            if not self._space:
                break
        self._space, self._has_hinted = 0, False
        return self._got

    def room(self) -> int:
        if not self._space and not self._has_hinted and self._has_work():
            self._has_hinted = True
            self._host.link.tell(self._node, ops.Hint(self._number))
        return self._space

    def _has_work(self) -> bool:
        return any(has_work(cell.state, one.group.progress[cell.partition]) for cell, one in self._here.items())

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._space -= len(deliveries)
        self._got += deliveries

    def ended(self, error: OncewireError) -> None:  # noqa: ARG002 - the fan hears of it by itself
        self._here.clear()
