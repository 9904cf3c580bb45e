"""Readers of a topic whose partitions may be at any node.

    Fan    at the reader's node: has its sink, and lends its credit to the owners (loans.py)
    Guest  at an owner: what of the credit was lent to it, for all the reader's partitions there; a Seat in each cell

A guest delivers as far as its loan goes, so a group is served in turn wherever its readers are. It sends together what
one turn of the loop brings, and the next lot when that one was taken, never more than the sink has room for. What the
fan does not take, since its reader is gone, is recalled and goes to another one.

Both are the same where reader and owner are at one node. When a partition changes its owner, its guest says so, and the
fan looks for the new one. When a request between them fails, what they knew of each other is forgotten, and the fan
attaches anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from oncewire._ground.contracts.broker import Delivery
from oncewire._ground.errors import OncewireError
from oncewire.broker import rules
from oncewire.broker.credit import Credit
from oncewire.broker.dispatch import has_work
from oncewire.broker.engine import Consume, Limits, Sink
from oncewire.broker.jetstream import ops
from oncewire.broker.jetstream.catalog import Listed
from oncewire.broker.jetstream.cell import Cell, Phase
from oncewire.broker.jetstream.link import runs_of
from oncewire.broker.jetstream.loans import Account, Loans, Visits
from oncewire.broker.progress import LEASED, Progress
from oncewire.broker.state import Subscriber

NOT_TAKEN: Final = -1
"""In the place of a sink's room: the reader is not here."""


class Host(Protocol):
    """What readers need from their node."""

    limits: Limits

    def clock(self) -> int: ...
    def soon(self, work: Callable[[], None]) -> None:
        """Call it in the next turn of the loop."""

    def ask(self, node: str, request: ops.Request, done: Callable[[Any], None]) -> None:
        """Ask a node, which may be this one."""

    def attach(self, fan: Fan, partition: int) -> None:
        """Find the partition's owner and attach there, for as long as it takes."""

    def enter(self, cell: Cell, consume: Consume, done: Callable[[OncewireError | None], None]) -> None:
        """Make the group in a cell unless it is there."""

    def forget(self, fan: Fan) -> None: ...
    def detach(self, guest: Guest, partitions: list[int]) -> None:
        """Let a guest's fan look for the owners of these, as soon as it can be told."""


class Fan:
    """See the module's head. To its reader, the subscription."""

    def __init__(self, host: Host, number: int, topic: Listed, consume: Consume, sink: Sink, *, is_poll: bool) -> None:
        self._host = host
        self.number = number
        self.topic = topic
        self.consume = consume
        self._sink = sink
        credit = consume.in_flight or host.limits.reader_in_flight
        self._loans: Loans | Visits = Visits(credit) if is_poll else Loans(credit)
        self._there: dict[str, set[int]] = {}
        self._paused: set[str] = set()
        """Owners that were told that the sink has no room."""
        self._parts: dict[str, list[Delivery]] = {}
        """Of lots that have not come whole."""
        self._lots: Counter[str] = Counter()
        """How many have come from each owner."""
        self._has_begun = False
        self.is_open = True

    # ---- where its partitions are

    def attached(self, node: str, partition: int) -> None:
        if not self.is_open:
            self._host.ask(node, ops.Leave(self.number), _ignore)
            return
        self._there.setdefault(node, set()).add(partition)
        self._loans.attach(node)
        self._lend()

    def detached(self, node: str, partitions: Iterable[int]) -> None:
        """A node no longer owns these."""
        left = self._there.get(node, set())
        gone = left.intersection(partitions)
        left -= gone
        if not left:
            self._there.pop(node, None)
            self._paused.discard(node)
            self._parts.pop(node, None)
            self._lots.pop(node, None)
            self._loans.detach(node)
        for partition in gone:
            self._host.attach(self, partition)
        self._lend()

    def lost(self, node: str) -> None:
        """A node is gone, or nobody knows what it has been told."""
        self.detached(node, list(self._there.get(node, ())))

    def lost_all(self) -> None:
        for node in list(self._there):
            self.lost(node)

    # ---- its credit

    def called(self, node: str) -> None:
        """An owner has news."""
        self._loans.call(node)
        self._lend()

    def _lend(self) -> None:
        if not self._has_begun or not self.is_open:
            return
        room = self._sink.room()
        for node, limit, is_all, is_late in self._loans.due():
            self._note_room(node, room)
            request = ops.Lend(self.number, limit, is_all, is_late, self._lots[node], room)
            self._host.ask(node, request, partial(self._hear, node))

    def _note_room(self, node: str, room: int) -> None:
        if room > 0:
            self._paused.discard(node)
        else:
            self._paused.add(node)

    def _hear(self, node: str, account: Account | OncewireError) -> None:
        if not self.is_open:
            return
        if isinstance(account, OncewireError):
            self.lost(node)
        else:
            self._loans.hear(node, account)
            self._lend()

    def deliver(self, node: str, deliveries: list[Delivery], *, is_more: bool) -> int:
        """Deliveries of an owner. How many it takes next, or NOT_TAKEN."""
        if not self.is_open or node not in self._there:
            return NOT_TAKEN
        deliveries = self._parts.pop(node, []) + deliveries
        if is_more:
            self._parts[node] = deliveries
            return 0
        self._lots[node] += 1
        self._sink.deliver(deliveries)
        room = self._sink.room()
        self._note_room(node, room)
        return room

    def ended(self, error: OncewireError) -> None:
        if self.is_open:
            self.close()
            self._sink.ended(error)

    # ---- the reader's side

    @property
    def is_looking(self) -> bool:
        return not self._has_begun or self._loans.is_busy

    def begin(self) -> None:
        """It was accepted everywhere: now messages may come."""
        self._has_begun = True
        self._lend()

    def resume(self) -> None:
        for node in self._paused:
            self._loans.call(node)
        self._lend()

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for node in self._there:
            self._host.ask(node, ops.Leave(self.number), _ignore)
        self._there.clear()
        self._host.forget(self)


def _ignore(_: object) -> None:
    """Leaving needs no answer: who is gone has no readers."""


Lot = list[tuple["Seat", Sequence[Delivery]]]


class Guest(Credit):
    """See the module's head."""

    __slots__ = (
        "_calls", "_has_begun", "_host", "_hungry", "_is_due", "_lot", "_lots", "_may_have_more", "_on_way", "_seats",
        "_told", "_window", "node", "number",
    )  # fmt: skip

    def __init__(self, host: Host, node: str, number: int) -> None:
        super().__init__(0)
        self._host = host
        self.node = node
        """The reader's."""
        self.number = number
        self._seats: dict[Cell, Seat] = {}
        self._hungry: dict[Seat, None] = {}
        """Where messages wait for the reader's credit or room, the one that waits longest first."""
        self._window = 0
        """How many the sink takes of the next lot."""
        self._lot: Lot = []
        self._on_way: Lot = []
        self._lots = 0
        """How many were sent."""
        self._told = Account()
        self._may_have_more = True
        self._has_begun = False
        self._calls = False
        """The fan was told that there is news, and has not asked for it yet."""
        self._is_due = False

    # ---- its seats

    @property
    def has_seats(self) -> bool:
        return bool(self._seats)

    def attach(self, cell: Cell, consume: Consume, done: Callable[[OncewireError | None], None]) -> None:
        def entered(error: OncewireError | None) -> None:
            if error is not None or cell in self._seats:
                done(error)
                return
            seat = Seat(self, cell)
            subscriber = cell.join(consume, seat, self)
            if isinstance(subscriber, OncewireError):
                done(subscriber)
                return
            seat.subscriber = subscriber
            self._seats[cell] = seat
            cell.on_gone.append(partial(self._left, cell))
            if seat.has_work:
                self._hungry[seat] = None
                self._feed()
            done(None)

        if cell in self._seats:  # the fan has lost this node meanwhile, and does not answer what was on its way
            self._on_way, self._lots, self._calls = [], 0, False
        self._host.enter(cell, consume, entered)

    def _left(self, cell: Cell) -> None:
        """The cell is gone, and with it what was leased there."""
        seat = self._seats.pop(cell, None)
        if seat is not None:
            self._hungry.pop(seat, None)
            self.out -= seat.leased
            self._host.detach(self, [cell.partition])

    def leave(self) -> list[int]:
        """Deliver no more; the partitions that it was at."""
        partitions = [cell.partition for cell in self._seats]
        for seat in self._seats.values():
            rules.leave(self._host.clock(), seat.subscriber)
        self._seats.clear()
        self._hungry.clear()
        lot, self._lot = self._lot, []
        self._recall(lot)
        return partitions

    def ended(self, cell: Cell) -> None:
        """The topic is gone; the fan hears of it by itself."""
        self._seats.pop(cell, None)

    # ---- its credit

    def lend(self, request: ops.Lend) -> Account:
        if not self._has_begun:  # in the order of the partitions, not of those that answered first
            self._has_begun = True
            self._hungry = dict.fromkeys(sorted(self._hungry, key=lambda seat: seat.partition))
        if request.is_late != self._told.is_late:
            self.is_late = request.is_late
        self._may_have_more = not request.is_all
        self.limit = request.limit if request.is_late == self.is_late else self._limit_of_late
        if not self._lot and request.lots == self._lots:
            self._on_way, self._window = [], request.room
        self._serve()
        self._calls = False
        self._told = Account(self.out, bool(self._hungry), self.is_late)
        return self._told

    def give_back(self) -> None:
        self.out -= 1
        self._feed()
        if self._told.out > self.limit:
            self._say_soon()

    def lapse(self) -> None:
        if not self.is_late:
            self.is_late, self.limit = True, self._limit_of_late
        self._say_soon()

    @property
    def _limit_of_late(self) -> int:
        """Until the fan has heard of it: the one message that a late reader gets may be another owner's."""
        return 0 if self._may_have_more else self.limit

    def settle(self) -> None:
        if self.is_late:
            self.is_late = False
            self._say_soon()

    def room_of(self, seat: Seat) -> int:
        """How much a seat may take now: all that there is, when its turn has come."""
        room = min(self.room, self._window)
        if room > 0 and (self._next_seat or seat) is seat:
            self._hungry.pop(seat, None)
            self._feed()  # with what it leaves
            return room
        if seat.has_work:
            self._hungry[seat] = None
            if self._may_have_more and not self._told.wants and self.room <= 0:
                self._say_soon()
        else:
            self._hungry.pop(seat, None)
        return 0

    @property
    def _next_seat(self) -> Seat | None:
        """The one that has waited longest, but for those whose cells are in doubt."""
        return next((seat for seat in self._hungry if seat.is_open), None)

    def _serve(self) -> None:
        """Fill a lot."""
        for seat in list(self._hungry):
            if self.room <= 0 or self._window <= 0:
                return
            seat.look()

    def _feed(self) -> None:
        """Let the next one look soon."""
        if (seat := self._next_seat) is not None:
            seat.wake()

    # ---- what its fan is told

    def deliver(self, seat: Seat, deliveries: Sequence[Delivery]) -> None:
        self._lot.append((seat, deliveries))
        self._window -= len(deliveries)
        self._say_soon()

    def tick(self) -> None:
        """That it wants no more is told now and then: with each message that comes and goes it would be a word each."""
        if self._has_news or (self._told.wants and not self._hungry):
            self._tell_news()

    @property
    def _has_news(self) -> bool:
        """It wants more; it is late, or no longer; it holds less of what it should not have."""
        told = self._told
        has_less = told.out > self.limit and self.out < told.out
        wants = self._may_have_more and bool(self._hungry) and self.room <= 0 and not told.wants
        return wants or self.is_late != told.is_late or has_less

    def _say_soon(self) -> None:
        """With all that this turn of the loop brings."""
        if not self._is_due:
            self._is_due = True
            self._host.soon(self._say)

    def _say(self) -> None:
        self._is_due = False
        if self._lot:
            lot, self._lot, self._window = self._lot, [], 0
            self._on_way = lot
            self._lots += 1
            runs = runs_of([one for _, part in lot for one in part], lambda one: len(one.key) + len(one.value))
            for at, run in enumerate(runs, start=1):
                done = partial(self._delivered, lot, is_last=at == len(runs))
                self._host.ask(self.node, ops.HandOver(self.number, run, is_more=at < len(runs)), done)
        if self._has_news:
            self._tell_news()

    def _tell_news(self) -> None:
        if self._seats and not self._calls:
            self._calls = True
            self._host.ask(self.node, ops.News(self.number), self._called)

    def _delivered(self, lot: Lot, room: int | OncewireError, *, is_last: bool) -> None:
        if room == NOT_TAKEN or isinstance(room, ops.Unsent):
            self._recall(lot)
        if self._on_way is not lot:
            return
        if isinstance(room, OncewireError) or room == NOT_TAKEN:
            self._on_way = []
            self._host.detach(self, self.leave())
        elif is_last:
            self._on_way, self._window = [], room
            self._serve()

    def _called(self, answer: OncewireError | None) -> None:
        if answer is not None:
            self._calls = False
            self._host.detach(self, self.leave())

    def _recall(self, lot: Lot) -> None:
        for seat, deliveries in lot:
            seat.recall([delivery.offset for delivery in deliveries])


class Seat:
    """A guest in one cell: the sink of its subscriber there."""

    __slots__ = ("_cell", "_guest", "subscriber")

    def __init__(self, guest: Guest, cell: Cell) -> None:
        self._guest = guest
        self._cell = cell
        self.subscriber: Subscriber

    @property
    def partition(self) -> int:
        return self._cell.partition

    @property
    def _progress(self) -> Progress:
        return self.subscriber.group.progress[self._cell.partition]

    @property
    def is_open(self) -> bool:
        return self._cell.phase is Phase.OPEN

    @property
    def has_work(self) -> bool:
        return has_work(self._cell.state, self._progress)

    @property
    def leased(self) -> int:
        """How many of its deliveries are out."""
        flights = self._progress.flights.values()
        return sum(flight.state == LEASED and flight.credit is self._guest for flight in flights)

    def look(self) -> None:
        self._cell.state.stirred[self.subscriber.group] = None
        self._cell.look()

    def wake(self) -> None:
        self._cell.state.stirred[self.subscriber.group] = None
        self._cell.home.wake(self._cell)

    def recall(self, offsets: Sequence[int]) -> None:
        if self._cell.phase is not Phase.GONE:  # else nothing is leased there any more
            rules.recall(self._cell.state, self._progress, offsets, self._guest)
            self._cell.home.wake(self._cell)

    def room(self) -> int:
        return self._guest.room_of(self)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._guest.deliver(self, deliveries)

    def ended(self, error: OncewireError) -> None:  # noqa: ARG002 - the fan hears of it by itself
        self._guest.ended(self._cell)
