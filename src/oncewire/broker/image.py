"""The durable state as a list of records, and back: what a snapshot holds. Pure.

`capture` is quick and takes references only: message bodies are immutable and their columns are copied, so the state
may go on changing while the records are made and written, in another thread.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Final

from oncewire._ground.contracts.records import (
    GroupKept,
    Heads,
    Kept,
    MessagesKept,
    ProducedKept,
    ProgressKept,
    TopicKept,
    WorkedKept,
)
from oncewire.broker.idempotency import FAILED, PENDING, RESTARTED, Produced, Work
from oncewire.broker.messages import Partition
from oncewire.broker.progress import LEASED, Flight, Progress
from oncewire.broker.state import Group, State, Topic

CHUNK: Final = 1_000
"""Messages or entries in a record."""

Image = list[Callable[[], Iterator[Kept]]]


def capture(state: State) -> Image:
    """What to write, as of now; each part yields its records when it is called."""
    heads = Heads(state.next_topic, state.next_group)
    parts: Image = [lambda: iter([heads])]
    for topic in state.topics.values():
        parts.append(_topic(topic))
        parts += [_messages(topic, partition) for partition in topic.partitions.values() if len(partition)]
        parts += [_group(group) for group in topic.groups.values()]
    for (tenant, requested), entries in state.produced.items():
        parts.append(_produced(tenant, requested, list(entries), list(entries.values())))
    return parts


def capture_progress(state: State) -> list[Kept]:
    """Groups and how far they are, without messages: for states whose messages stand elsewhere."""
    kept: list[Kept] = [Heads(state.next_topic, state.next_group)]
    for group in state.groups.values():
        kept += _group(group)()
    return kept


def _topic(topic: Topic) -> Callable[[], Iterator[Kept]]:
    trimmed = [partition.trimmed for partition in topic.partitions.values()]
    kept = TopicKept(
        topic.number, topic.tenant, topic.name, topic.created_at_ms, topic.next_offset, topic.is_graveyard, trimmed
    )
    return lambda: iter([kept])


def _messages(topic: Topic, partition: Partition) -> Callable[[], Iterator[Kept]]:
    head, number = partition.head, partition.number
    offsets, times, sizes = partition.offsets[head:], partition.times[head:], partition.sizes[head:]
    bodies = partition.bodies[head:]

    def records() -> Iterator[Kept]:
        for first in range(0, len(bodies), CHUNK):
            part = slice(first, first + CHUNK)
            columns = _little(offsets[part]), _little(times[part]), _little(sizes[part])
            yield MessagesKept(topic.number, number, *columns, bodies[part])

    return records


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _column(code: str, stored: bytes) -> array[int]:
    column = array(code)
    column.frombytes(stored)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _group(group: Group) -> Callable[[], Iterator[Kept]]:
    kept: list[Kept] = [GroupKept(group.topic.number, group.number, group.name, group.seen_at_ms, group.has_settled)]
    kept += [_progress(progress) for progress in group.progress.values()]
    entries = [
        (identity, one.status, one.owner, one.partition, one.offset, one.check_at_ms, one.last_error)
        for identity, one in group.worked.items()
    ]

    def records() -> Iterator[Kept]:
        yield from kept
        for first in range(0, len(entries), CHUNK):
            yield WorkedKept(group.topic.number, group.number, entries[first : first + CHUNK])

    return records


def _progress(progress: Progress) -> ProgressKept:
    """Retries with what a record said of them: the delivery that is out now is not durable, nor is its lease."""
    group = progress.group
    retries = [
        (flight.offset, attempts, 0 if flight.state == LEASED else flight.due_at_ms, flight.last_error)
        for flight in progress.flights.values()
        if (attempts := flight.attempts - (flight.state == LEASED)) > 0
    ]
    number = progress.partition.number
    return ProgressKept(
        group.topic.number, group.number, number, progress.floor, sorted(progress.ahead), sorted(retries)
    )


def _produced(
    tenant: str, requested: str, identities: list[bytes], expire_at_ms: list[int]
) -> Callable[[], Iterator[Kept]]:
    def records() -> Iterator[Kept]:
        for first in range(0, len(identities), CHUNK):
            part = slice(first, first + CHUNK)
            yield ProducedKept(tenant, requested, identities[part], expire_at_ms[part])

    return records


# ---- back


def restore(state: State, kept: Kept) -> None:
    """Take in a snapshot's record, in the order in which they were written."""
    if isinstance(kept, Heads):
        state.next_topic, state.next_group = kept.next_topic, kept.next_group
    elif isinstance(kept, TopicKept):
        _restore_topic(state, kept)
    elif isinstance(kept, MessagesKept):
        _restore_messages(state, kept)
    elif isinstance(kept, GroupKept):
        topic = state.numbered[kept.topic]
        group = Group(topic, kept.group, kept.name, kept.seen_at_ms)
        state.add_group(group)
        if kept.has_settled:
            state.prove(group)
    elif isinstance(kept, ProgressKept):
        _restore_progress(state, kept)
    elif isinstance(kept, ProducedKept):
        entries = state.produced.setdefault((kept.tenant, kept.requested), Produced())
        entries.update(zip(kept.identities, kept.expire_at_ms, strict=True))
        state.entries += len(kept.identities)
    else:
        worked = state.groups[kept.group].worked
        worked.update({entry[0]: Work(*entry[1:]) for entry in kept.entries})
        state.entries += len(kept.entries)


def _restore_topic(state: State, kept: TopicKept) -> None:
    topic = Topic(kept.topic, kept.tenant, kept.name, len(kept.trimmed), kept.created_at_ms)
    topic.next_offset, topic.is_graveyard = kept.next_offset, kept.is_graveyard
    for partition, trimmed in zip(topic.partitions.values(), kept.trimmed, strict=True):
        partition.trimmed = trimmed
    state.add_topic(topic)


def _restore_messages(state: State, kept: MessagesKept) -> None:
    topic = state.numbered[kept.topic]
    partition = topic.partitions[kept.partition]
    sizes = _column("I", kept.sizes)
    partition.offsets += _column("q", kept.offsets)
    partition.times += _column("q", kept.times)
    partition.sizes += sizes
    partition.bodies += kept.bodies
    partition.needed_bytes += sum(sizes)
    state.look_to_trim(topic, partition)


def _restore_progress(state: State, kept: ProgressKept) -> None:
    group = state.groups[kept.group]
    progress = group.progress[kept.partition]
    progress.floor = progress.cursor = kept.floor
    progress.ahead = set(kept.ahead)
    for offset, attempts, due_at_ms, last_error in kept.retries:
        flight = progress.flights[offset] = Flight(progress, offset)
        flight.attempts, flight.due_at_ms, flight.last_error = attempts, due_at_ms, last_error
        state.later(flight)


def settle_in(state: State) -> None:
    """After the last record of a start: what stood on leases of these partitions has none now, and what is needed is
    counted."""
    for topic in state.topics.values():
        state.hold_again(topic)
        for group in topic.groups.values():
            for work in group.worked.values():
                if work.status == PENDING and work.partition in topic.partitions:
                    work.status, work.last_error = FAILED, RESTARTED
            for progress in group.progress.values():
                progress.cursor = progress.floor
