"""Who gets which message: each delivery to one reader of the group, in turn, in offset order. Pure.

What is due again comes before what was never delivered, so a partition's messages come in offset order. New ones stop
at the in-flight limit, in which retries that wait are counted; they do not hold back those behind them. A message whose
deadline has passed is buried instead of delivered.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from oncewire.broker.rules import EXPIRED, bury
from oncewire.broker.state import LEASED, READY, Flight, Group, Progress, State, Subscriber
from oncewire.contracts.broker import Delivery
from oncewire.contracts.records import Body, Document, Record, decode_body


class Round(NamedTuple):
    """What to hand out, and what to make durable."""

    handed: dict[Subscriber, list[Delivery]]
    records: list[Record]


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
    """The readers of a group, one after the other, those without room left out."""

    def __init__(self, group: Group) -> None:
        self.readers = group.subscribers
        self.turn = group.turn
        self.have_room = any(reader.room > 0 for reader in self.readers)

    def next(self) -> Subscriber | None:
        count = len(self.readers)
        for step in range(count):
            reader = self.readers[(self.turn + step) % count]
            if reader.room > 0:
                self.turn = (self.turn + step + 1) % count
                reader.room -= 1
                return reader
        self.have_room = False
        return None


def _drain(state: State, progress: Progress, readers: _Turns, now_ms: int, turn: Round) -> bool:
    """Deliver from one partition until nothing is left or nobody takes more; True in the second case."""
    partition = progress.partition
    while (found := _next_flight(state, progress)) is not None:
        flight, index = found
        if index < 0:
            state.later(flight)  # its message is still being read
            continue
        held = decode_body(partition.bodies[index])
        envelope = held.envelope
        if envelope is not None and envelope.deadline is not None and envelope.deadline.timestamp() * 1000 <= now_ms:
            state.counters["expired"] += 1
            turn.records.extend(bury(state, now_ms, flight, EXPIRED))
            continue
        reader = readers.next()
        if reader is None:
            _put_back(progress, flight)
            return True
        deliveries = turn.handed.setdefault(reader, [])
        deliveries.append(_deliver(state, flight, reader, held, now_ms))
    return False


def _next_flight(state: State, progress: Progress) -> tuple[Flight, int] | None:
    """The lowest offset that is due again, else the next new one; and where its message is held, -1 for nowhere."""
    flights, ready = progress.flights, progress.ready
    while ready:
        flight = flights.get(heappop(ready))
        if flight is not None and flight.state == READY and not flight.is_settling:
            return flight, progress.partition.find(flight.offset)
    if len(flights) >= state.limits.in_flight_max:
        return None
    offsets, ahead = progress.partition.offsets, progress.ahead
    index = progress.partition.after(progress.cursor)
    while index < len(offsets):
        offset = progress.cursor = offsets[index]
        if offset not in ahead and offset not in flights:
            flight = flights[offset] = Flight(progress, offset)
            return flight, index
        index += 1
    return None


def _put_back(progress: Progress, flight: Flight) -> None:
    if flight.attempts:
        heappush(progress.ready, flight.offset)
    else:
        del progress.flights[flight.offset]
        progress.cursor = flight.offset - 1


def _deliver(state: State, flight: Flight, reader: Subscriber, held: Body | Document, now_ms: int) -> Delivery:
    envelope = held.envelope
    state.counters["redelivered" if flight.attempts else "delivered"] += 1
    flight.attempts += 1
    flight.state = LEASED
    flight.owner = reader.owner
    flight.lease_ms = reader.lease_ms
    flight.due_at_ms = now_ms + reader.lease_ms
    if envelope is not None:
        flight.policy = envelope.retry_policy
    state.later(flight)
    return Delivery(
        partition=flight.progress.partition.number,
        offset=flight.offset,
        attempts=flight.attempts,
        key=held.key,
        value=held.value,
        last_error=flight.last_error,
        routing=held.routing,
        envelope=envelope,
    )


def has_work(state: State, progress: Progress) -> bool:
    """Whether there is something to deliver, whoever takes it."""
    if progress.ready:
        return True
    offsets = progress.partition.offsets
    return len(progress.flights) < state.limits.in_flight_max and progress.partition.after(progress.cursor) < len(
        offsets
    )
