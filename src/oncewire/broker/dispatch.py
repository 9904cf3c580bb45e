"""Who gets which message: each delivery to one reader of the group that has credit, in turn, in offset order. Pure.

What is due again comes before what was never delivered, so a partition's messages come in offset order. Deliveries stop
at the in-flight limit. A retry that waits is not in flight: it holds back nothing. A message whose deadline has passed
is buried instead of delivered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

from oncewire._ground.contracts.broker import Delivery
from oncewire._ground.contracts.records import Body, Document, Record, decode_body
from oncewire.broker.progress import LEASED, READY, Flight, Progress
from oncewire.broker.rules import EXPIRED, bury
from oncewire.broker.state import Group, State, Subscriber


class Round(NamedTuple):
    """What to hand out, and what to make durable."""

    handed: dict[Subscriber, list[Delivery]]
    records: list[Record]

    def of(self, reader: Subscriber) -> list[Delivery]:
        """What that one is handed, to be added to."""
        deliveries = self.handed.get(reader)
        if deliveries is None:
            deliveries = self.handed[reader] = []
        return deliveries


def dispatch(state: State, group: Group, now_ms: int) -> Round:
    """Hand out all that can be, as far as the readers' `room` goes."""
    turn = Round({}, [])
    readers = _Turns(group)
    if group.topic.is_leaving:
        return turn
    for number in list(group.busy):
        if not readers.have_room:
            break
        progress = group.progress[number]
        del group.busy[number]
        if _drain(state, progress, readers, now_ms, turn):
            group.busy[number] = None  # behind the others: it was cut short by the readers' room
    group.turn = readers.turn
    return turn


class _Turns:
    """The readers of a group that have room, one after the other; those that are late when no other one has any."""

    def __init__(self, group: Group) -> None:
        self._readers = readers = group.subscribers
        self.turn = group.turn
        places = [place for place, reader in enumerate(readers) if reader.room > 0]
        begin = bisect_left(places, self.turn)
        places = places[begin:] + places[:begin]
        self._punctual = deque([place for place in places if not readers[place].credit.is_late])
        self._late = deque([place for place in places if readers[place].credit.is_late])

    @property
    def have_room(self) -> bool:
        return bool(self._punctual or self._late)

    def next(self) -> Subscriber | None:
        places = self._punctual or self._late
        if not places:
            return None
        place = places[0]
        reader = self._readers[place]
        self.turn = place + 1
        reader.room -= 1
        if reader.room <= 0:
            places.popleft()
        elif len(places) > 1:
            places.rotate(-1)
        return reader


def _drain(state: State, progress: Progress, readers: _Turns, now_ms: int, turn: Round) -> bool:
    """Deliver from one partition until nothing is left or nobody takes more; True in the second case."""
    return _drain_ready(state, progress, readers, now_ms, turn) or _drain_new(state, progress, readers, now_ms, turn)


def _drain_ready(state: State, progress: Progress, readers: _Turns, now_ms: int, turn: Round) -> bool:
    """What is due again, the lowest offset first."""
    partition, ready, in_flight_max = progress.partition, progress.ready, state.limits.in_flight_max
    while ready and progress.leased < in_flight_max:
        flight = progress.flights.get(heappop(ready))
        if flight is None or flight.state != READY or flight.is_settling:
            continue
        index = partition.find(flight.offset)
        if index < 0:
            state.later(flight)  # its message is still being read
            continue
        held = decode_body(partition.bodies[index])
        if _is_expired(held, now_ms):
            _bury(state, flight, now_ms, turn)
            continue
        reader = readers.next()
        if reader is None:
            heappush(ready, flight.offset)
            return True
        _lease(flight, reader, held, now_ms)
        state.later(flight)
        turn.of(reader).append(_delivery(flight, held))
        state.counters["redelivered" if flight.attempts > 1 else "delivered"] += 1
    return False


def _drain_new(state: State, progress: Progress, readers: _Turns, now_ms: int, turn: Round) -> bool:
    """What was never given out, in offset order, up to the in-flight limit."""
    flights, ahead, partition = progress.flights, progress.ahead, progress.partition
    offsets, bodies = partition.offsets, partition.bodies
    room, delivered, due_at_ms, due = state.limits.in_flight_max - progress.leased, 0, -1, {}
    last: Subscriber | None = None
    deliveries: list[Delivery] = []
    tick = 0
    is_cut_short = False
    for index in range(partition.after(progress.cursor), len(offsets)):
        if room <= 0:
            break
        offset = offsets[index]
        if offset in ahead or offset in flights:
            progress.cursor = offset
            continue
        held = decode_body(bodies[index])
        policy = None
        if (envelope := held.envelope) is not None:
            if _is_expired(held, now_ms):
                flight = flights[offset] = Flight(progress, offset)
                progress.cursor = offset
                _bury(state, flight, now_ms, turn)
                continue
            policy = envelope.retry_policy
        reader = readers.next()
        if reader is None:
            is_cut_short = True
            break
        progress.cursor = offset
        room -= 1
        lease_ms = reader.lease_ms
        if now_ms + lease_ms != due_at_ms:
            due_at_ms = now_ms + lease_ms
            tick = state.tick_of(due_at_ms)
            due = state.due(tick)
        credit = reader.credit
        credit.out += 1
        flight = Flight(progress, offset, LEASED, 1, reader.owner, credit, lease_ms, due_at_ms, tick, policy)
        flights[offset] = flight
        due[flight] = None
        if reader is not last:
            last, deliveries = reader, turn.of(reader)
        deliveries.append(_delivery(flight, held))
        delivered += 1
    progress.leased += delivered
    state.counters["delivered"] += delivered
    return is_cut_short


def _is_expired(held: Body | Document, now_ms: int) -> bool:
    envelope = held.envelope
    return envelope is not None and envelope.deadline is not None and envelope.deadline.timestamp() * 1000 <= now_ms


def _bury(state: State, flight: Flight, now_ms: int, turn: Round) -> None:
    state.counters["expired"] += 1
    turn.records.extend(bury(state, now_ms, flight, EXPIRED))


def _lease(flight: Flight, reader: Subscriber, held: Body | Document, now_ms: int) -> None:
    flight.attempts += 1
    flight.state = LEASED
    flight.progress.leased += 1
    flight.owner = reader.owner
    flight.credit = reader.credit
    flight.credit.out += 1
    flight.lease_ms = reader.lease_ms
    flight.due_at_ms = now_ms + reader.lease_ms
    if held.envelope is not None:
        flight.policy = held.envelope.retry_policy


def _delivery(flight: Flight, held: Body | Document) -> Delivery:
    return Delivery(
        partition=flight.progress.partition.number,
        offset=flight.offset,
        attempts=flight.attempts,
        key=held.key,
        value=held.value,
        last_error=flight.last_error,
        routing=held.routing,
        envelope=held.envelope,
    )


def has_work(state: State, progress: Progress) -> bool:
    """Whether there is something to deliver, whoever takes it."""
    if progress.leased >= state.limits.in_flight_max:
        return False
    return bool(progress.ready) or progress.partition.after(progress.cursor) < len(progress.partition.offsets)
