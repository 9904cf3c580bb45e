"""All that the broker knows, and the only function that changes what is durable of it: `apply`. Pure.

Two kinds of state are kept apart. What is durable changes in `apply` alone, with a record that is on the disk; a start
applies the same records again and gets the same state. What is tentative (an offset that was given out, a settlement
on its way, room that was promised) is in the fields named here, is looked at only to refuse or to wait, and is all
forgotten when a commit fails:

    Topic, Group.is_leaving  State.making, .entering   a topic or group on its way in or out
    Partition.reserved, .trimming                      room and trims on their way
    Flight.is_settling                                 a settlement on its way
    State.pending                                      identities on their way

Offsets that a failed commit had are not given out again: the record may be on the disk after all.

Deliveries, leases and owners are neither: they live in memory and end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappush
from typing import Any, Final

from oncewire._ground.contracts.records import (
    Acked,
    Buried,
    GroupGone,
    GroupMade,
    GroupSeen,
    Marked,
    Record,
    Retried,
    Stored,
    TopicGone,
    TopicMade,
    Trimmed,
    encode_body,
)
from oncewire.broker.credit import Credit
from oncewire.broker.engine import Limits, Sink
from oncewire.broker.idempotency import COMMITTED, Produced, Work, Worked
from oncewire.broker.messages import Partition
from oncewire.broker.progress import READY, WAITING, Flight, Progress

COUNTERS: Final = (
    "produced", "produced_bytes", "deduplicated", "refused_full", "delivered", "redelivered", "acked", "nacked",
    "lease_timeouts", "dead_lettered", "expired", "trimmed", "router_failures", "commits_failed",
)  # fmt: skip


class Subscriber:
    """A reader of a group. `room` is what it takes in a round, asked anew before each."""

    __slots__ = ("credit", "group", "is_open", "lease_ms", "owner", "room", "sink")

    def __init__(self, group: Group, owner: str, lease_ms: int, sink: Sink, credit: Credit) -> None:
        self.group = group
        self.owner = owner
        self.lease_ms = lease_ms
        self.sink = sink
        self.credit = credit
        self.room = 0
        self.is_open = True

    def look(self) -> None:
        """See how much it takes now."""
        self.room = min(self.sink.room(), self.credit.room)


class Group:
    """A group of a topic."""

    __slots__ = (
        "busy", "has_settled", "is_lapsed", "is_leaving", "name", "number", "progress", "recorded_at_ms", "seen_at_ms",
        "subscribers", "topic",
        "turn", "worked",
    )  # fmt: skip

    def __init__(self, topic: Topic, number: int, name: str, seen_at_ms: int) -> None:
        self.topic = topic
        self.number = number
        self.name = name
        self.seen_at_ms = seen_at_ms
        self.recorded_at_ms = seen_at_ms
        """What a restart would know of `seen_at_ms`."""
        self.is_lapsed = False
        self.is_leaving = False
        self.has_settled = False
        """Whether it has acked, nacked or given up a message. Until then it is on trial."""
        self.progress = {number: Progress(self, one) for number, one in topic.partitions.items()}
        self.subscribers: list[Subscriber] = []
        self.turn = 0
        self.busy: dict[int, None] = {}
        """Partitions that may have something to deliver, the one that waited longest first."""
        self.worked: Worked = Worked()


class Topic:
    """A topic of a tenant."""

    __slots__ = (
        "count", "created_at_ms", "gone", "groups", "is_graveyard", "is_leaving", "name", "next_offset", "number",
        "partitions", "readers", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        tenant: str,
        name: str,
        partitions: int,
        created_at_ms: int,
        held: Iterable[int] | None = None,
    ) -> None:
        self.number = number
        self.tenant = tenant
        self.name = name
        self.created_at_ms = created_at_ms
        kept = range(partitions) if held is None else held
        self.count = partitions
        """Of all its partitions."""
        self.partitions = {one: Partition(one) for one in kept}
        """All of them, or those that are this state's to decide about."""
        self.next_offset = 0
        self.groups: dict[str, Group] = {}
        self.readers: dict[Group, None] = {}
        """Groups with subscribers."""
        self.is_graveyard = False
        """The broker has put dead letters here, so age bounds it."""
        self.is_leaving = False
        self.gone: dict[int, int] = {}
        """Of partitions that are not this state's: the last offset that is known to be gone."""

    def home_of(self, identity: bytes) -> int:
        """The partition in which workers' entries of that key are kept, whatever partition their messages are in."""
        return int.from_bytes(identity[:8], "big") % self.count

    def is_home_of(self, identity: bytes) -> bool:
        return self.home_of(identity) in self.partitions

    def holds(self, partition: int, offset: int) -> bool:
        """Whether a message that was stored is still kept."""
        if partition in self.partitions:
            return offset > self.partitions[partition].trimmed
        return offset > self.gone.get(partition, -1)

    def find_group(self, number: int) -> Group:
        return next(group for group in self.groups.values() if group.number == number)

    def holders(self) -> list[Group]:
        """The groups that hold messages back: those in use, or all of them when none is."""
        groups = [group for group in self.groups.values() if not group.is_lapsed]
        return groups or list(self.groups.values())


EncodeBody = Callable[[Any], bytes]


class State:
    """See the module's head."""

    def __init__(self, limits: Limits, encode: EncodeBody = encode_body, *, is_whole: bool = True) -> None:
        self.limits = limits
        self.encode_body = encode
        self.is_whole = is_whole
        """Whether all partitions are this state's, those of dead letters too; else others know what groups do there."""
        self.topics: dict[tuple[str, str], Topic] = {}
        self.numbered: dict[int, Topic] = {}
        self.groups: dict[int, Group] = {}
        self.produced: dict[tuple[str, str], Produced] = {}
        self.entries = 0
        """Idempotency entries of producers and workers together."""
        self.next_topic = 1
        self.next_group = 1
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.tenants: dict[str, int] = {}
        """How many topics each has."""
        self.wheel: dict[int, dict[Flight, None]] = {}
        """Which flights are looked at, by tick."""
        self.ticked = 0
        self.began_at_ms = 0
        """The first tick."""
        # Where there may be something to do.
        self.stirred: dict[Group, None] = {}
        self.ended: list[Subscriber] = []
        """Readers of topics that are gone."""
        self.trimmable: dict[tuple[int, int], None] = {}
        self.proven: list[Group] = []
        """Groups that have settled something; kept only where others must hear of it."""
        self.doubted: dict[Group, None] = {}
        """Groups whose trial is over here, and that may have settled something elsewhere."""
        self.moved: dict[Progress, None] = {}
        """Whose floors moved since it was last counted what is needed; empty outside `apply_all`."""
        # Tentative.
        self.making: dict[tuple[str, str], Topic] = {}
        self.entering: dict[tuple[int, str], GroupMade] = {}
        self.pending: set[tuple[object, ...]] = set()

    def later(self, flight: Flight) -> None:
        """Look at a flight when its time has come, and not before."""
        self.close((flight,))
        flight.tick = self.tick_of(flight.due_at_ms)
        self.due(flight.tick)[flight] = None

    def tick_of(self, at_ms: int) -> int:
        return max(-(-at_ms // self.limits.tick_ms), self.ticked + 1)

    def due(self, tick: int) -> dict[Flight, None]:
        """What is looked at then; never left empty."""
        flights = self.wheel.get(tick)
        if flights is None:
            flights = self.wheel[tick] = {}
        return flights

    def close(self, flights: Iterable[Flight]) -> None:
        """Nobody looks at them again: what is settled must not stay until its lease would have ended."""
        wheel, tick, due = self.wheel, -1, None
        for flight in flights:
            if flight.tick != tick:  # those of one round have the same
                if due is not None and not due:
                    del wheel[tick]
                tick = flight.tick
                due = wheel.get(tick)
            if due is not None:
                due.pop(flight, None)
        if due is not None and not due:
            del wheel[tick]

    def flights(self) -> Iterator[Flight]:
        """All that are out."""
        for group in self.groups.values():
            for progress in group.progress.values():
                yield from progress.flights.values()

    def stir(self, group: Group, partition: int) -> None:
        group.busy[partition] = None
        self.stirred[group] = None

    def forget_tentative(self) -> None:
        """A commit failed: nothing that was on its way will arrive."""
        for topic in self.topics.values():
            topic.is_leaving = False
            for group in topic.groups.values():
                group.is_leaving = False
            for partition in topic.partitions.values():
                partition.reserved = partition.reserved_bytes = 0
                partition.trimming = -1
        for flight in [one for one in self.flights() if one.is_settling]:
            flight.is_settling = False
            self.later(flight)  # not at once: a disk that fails must not be asked without a pause
        self.making.clear()
        self.entering.clear()
        self.pending.clear()

    # ---- what is durable

    def apply(self, record: Record) -> None:
        """Let a record that is on the disk count."""
        self.apply_all((record,))

    def add_topic(self, topic: Topic) -> None:
        self.topics[topic.tenant, topic.name] = topic
        self.numbered[topic.number] = topic
        self.tenants[topic.tenant] = self.tenants.get(topic.tenant, 0) + 1
        self.next_topic = max(self.next_topic, topic.number + 1)

    def add_group(self, group: Group) -> None:
        group.topic.groups[group.name] = group
        self.groups[group.number] = group
        self.next_group = max(self.next_group, group.number + 1)
        self.hold_again(group.topic)

    def prove(self, group: Group) -> None:
        """The group settles something: it is in earnest."""
        if not group.has_settled:
            group.has_settled = True
            if not self.is_whole:
                self.proven.append(group)

    def hold_again(self, topic: Topic) -> None:
        """Groups came, lapsed or came back: which messages are still needed is counted anew."""
        holders = topic.holders()
        for partition in topic.partitions.values():
            if holders:
                partition.hold_from(min(group.progress[partition.number].floor for group in holders))
                self.look_to_trim(topic, partition)

    def apply_all(self, records: Iterable[Record]) -> None:
        """Let records count that became durable together."""
        acked: list[Acked] = []  # of one group and partition, one behind the other
        for record in records:
            if type(record) is Acked and not record.identity:
                if acked and (acked[0].group != record.group or acked[0].partition != record.partition):
                    _all_acked(self, acked)
                    acked = []
                acked.append(record)
            else:
                if acked:
                    _all_acked(self, acked)
                    acked = []
                _APPLY[type(record)](self, record)
        if acked:
            _all_acked(self, acked)
        while self.moved:
            self._move(self.moved.popitem()[0])

    def _move(self, progress: Progress) -> None:
        """A floor moved: what no group needs any more is counted as settled."""
        partition, topic = progress.partition, progress.group.topic
        holders = topic.holders() if len(topic.groups) > 1 else ()
        floor = min(group.progress[partition.number].floor for group in holders) if holders else progress.floor
        if floor > partition.hold:
            partition.hold_from(floor)
            self.look_to_trim(topic, partition)

    def look_to_trim(self, topic: Topic, partition: Partition) -> None:
        if partition.settled or topic.is_graveyard:
            self.trimmable[topic.number, partition.number] = None

    def store(self, topic: Topic, record: Stored) -> None:
        partition = topic.partitions[record.partition]
        partition.append(record.offset, record.at_ms, record.size, record.body)
        if partition.reserved:
            partition.reserved -= 1
            partition.reserved_bytes -= record.size
        topic.next_offset = max(topic.next_offset, record.offset + 1)
        for group in topic.readers:
            self.stir(group, record.partition)

    def store_all(self, topic: Topic, records: list[Stored]) -> None:
        """What `apply` does with messages of one partition, all at once."""
        if not records:
            return
        partition = topic.partitions[records[0].partition]
        size = partition.extend(records)
        partition.reserved = max(0, partition.reserved - len(records))
        partition.reserved_bytes = max(0, partition.reserved_bytes - size)
        topic.next_offset = max(topic.next_offset, records[-1].offset + 1)
        for group in topic.readers:
            self.stir(group, partition.number)
        self.counters["produced"] += len(records)
        self.counters["produced_bytes"] += size
        for record in records:
            if record.requested:
                self.remember(topic, record)

    def remember(self, topic: Topic, record: Stored) -> None:
        """The idempotency entry of a producer."""
        key = (topic.tenant, record.requested)
        entries = self.produced.setdefault(key, Produced())
        self.entries += record.identity not in entries
        entries[record.identity] = record.expires_at_ms
        entries.move_to_end(record.identity)
        self.pending.discard((*key, record.identity))


def _topic_made(state: State, record: TopicMade) -> None:
    topic = state.making.pop((record.tenant, record.name), None)
    if topic is None:
        topic = Topic(record.topic, record.tenant, record.name, record.partitions, record.at_ms)
    state.add_topic(topic)


def _topic_gone(state: State, record: TopicGone) -> None:
    topic = state.numbered.pop(record.topic)
    del state.topics[topic.tenant, topic.name]
    state.tenants[topic.tenant] -= 1
    state.entries -= len(state.produced.pop((topic.tenant, topic.name), ()))
    for group in topic.groups.values():
        del state.groups[group.number]
        state.stirred.pop(group, None)
        state.doubted.pop(group, None)
        state.entries -= len(group.worked)
        state.ended += group.subscribers
        for progress in group.progress.values():
            state.close(progress.flights.values())


def _group_made(state: State, record: GroupMade) -> None:
    state.entering.pop((record.topic, record.name), None)
    state.add_group(Group(state.numbered[record.topic], record.group, record.name, record.at_ms))


def _group_seen(state: State, record: GroupSeen) -> None:
    group = state.groups[record.group]
    group.recorded_at_ms = record.at_ms
    group.seen_at_ms = max(group.seen_at_ms, record.at_ms)


def _group_gone(state: State, record: GroupGone) -> None:
    group = state.groups.pop(record.group)
    topic = group.topic
    del topic.groups[group.name]
    state.stirred.pop(group, None)
    state.doubted.pop(group, None)
    state.entries -= len(group.worked)
    for progress in group.progress.values():
        state.close(progress.flights.values())
    state.hold_again(topic)


def _stored(state: State, record: Stored) -> None:
    topic = state.numbered[record.topic]
    state.store(topic, record)
    state.counters["produced"] += 1
    state.counters["produced_bytes"] += record.size
    if record.requested:
        state.remember(topic, record)


def _settle(state: State, group: Group, partition: int, offsets: Sequence[int]) -> None:
    progress = group.progress[partition]
    state.prove(group)
    state.close(progress.land(offsets))
    if progress.settle(offsets):
        state.moved[progress] = None
    if group.subscribers:
        state.stir(group, partition)


def _acked(state: State, record: Acked) -> None:
    group = state.groups[record.group]
    if work := group.worked.get(record.identity):
        work.status = COMMITTED
    _all_acked(state, [record])


def _all_acked(state: State, records: Sequence[Acked]) -> None:
    """Of one group and partition."""
    group = state.groups[records[0].group]
    group.seen_at_ms = max(group.seen_at_ms, records[-1].at_ms)
    _settle(state, group, records[0].partition, [record.offset for record in records])
    state.counters["acked"] += len(records)


def _retried(state: State, record: Retried) -> None:
    group = state.groups[record.group]
    group.seen_at_ms = max(group.seen_at_ms, record.at_ms)
    if record.is_nacked:
        state.prove(group)
    progress = group.progress[record.partition]
    flight = progress.flights.get(record.offset)
    if flight is None:
        if record.offset <= progress.floor or record.offset in progress.ahead:
            return  # trimmed meanwhile
        flight = progress.flights[record.offset] = Flight(progress, record.offset)
    flight.is_settling = False
    progress.release(flight)
    if group.subscribers:
        state.stir(group, record.partition)
    flight.attempts, flight.last_error, flight.due_at_ms = record.attempts, record.last_error, record.due_at_ms
    if record.due_at_ms <= record.at_ms:
        make_ready(state, flight)
    else:
        flight.state = WAITING
        state.later(flight)


def make_ready(state: State, flight: Flight) -> None:
    """Its next attempt is due."""
    progress = flight.progress
    flight.state = READY
    heappush(progress.ready, flight.offset)
    if progress.group.subscribers:
        state.stir(progress.group, progress.partition.number)


def _buried(state: State, record: Buried) -> None:
    if record.letter is not None:
        graveyard = state.numbered[record.letter.topic]
        graveyard.is_graveyard = True
        state.store(graveyard, record.letter)
        state.look_to_trim(graveyard, graveyard.partitions[record.letter.partition])
    _settle(state, state.groups[record.group], record.partition, (record.offset,))
    state.counters["dead_lettered"] += 1


def _trimmed(state: State, record: Trimmed) -> None:
    topic = state.numbered[record.topic]
    partition = topic.partitions[record.partition]
    partition.trimming = -1
    state.counters["trimmed"] += partition.trim(record.offset)
    for group in topic.groups.values():
        state.close(group.progress[record.partition].trim(record.offset))
    if topic.groups:
        partition.hold_from(min(group.progress[partition.number].floor for group in topic.holders()))


def _marked(state: State, record: Marked) -> None:
    group = state.groups[record.group]
    state.pending.discard((record.group, record.identity))
    state.entries += record.identity not in group.worked
    group.worked[record.identity] = Work(
        record.status, record.owner, record.partition, record.offset, record.check_at_ms, record.last_error
    )
    group.worked.move_to_end(record.identity)


_APPLY: Final[dict[type, Callable[[State, Any], None]]] = {
    TopicMade: _topic_made,
    TopicGone: _topic_gone,
    GroupMade: _group_made,
    GroupSeen: _group_seen,
    GroupGone: _group_gone,
    Stored: _stored,
    Acked: _acked,
    Retried: _retried,
    Buried: _buried,
    Trimmed: _trimmed,
    Marked: _marked,
}
