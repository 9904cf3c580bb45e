"""What the state looks like from outside: topics with their groups and lag, gauges. Pure; only durable facts count."""

from __future__ import annotations

from collections.abc import Iterable

from oncewire._ground.errors import NotFound
from oncewire.broker.engine import GroupShown, PartitionLag, PartitionShown, TopicShown, TopicStats
from oncewire.broker.messages import Partition
from oncewire.broker.progress import READY, WAITING, Progress
from oncewire.broker.rules import NO_TOPIC
from oncewire.broker.state import Group, State, Topic


def add(figures: Iterable[int | None]) -> int | None:
    """None when one of them is not known."""
    total = 0
    for figure in figures:
        if figure is None:
            return None
        total += figure
    return total


def topic_names(state: State, tenant: str) -> list[str]:
    return sorted(name for owner, name in state.topics if owner == tenant)


def show_topic(state: State, tenant: str, name: str) -> TopicShown | NotFound:
    topic = state.topics.get((tenant, name))
    if topic is None:
        return NotFound(NO_TOPIC)
    partitions = tuple(_partition(partition) for partition in topic.partitions.values())
    return TopicShown(
        topic.name,
        add(one.messages for one in partitions),
        add(one.bytes for one in partitions),
        topic.created_at_ms,
        partitions,
        tuple(_group(group) for _, group in sorted(topic.groups.items())),
    )


def show_partition(topic: Topic, number: int, owner: str) -> tuple[PartitionShown, tuple[GroupShown, ...]]:
    """One partition with the node that owns it, and how far the groups are in it."""
    return _partition(topic.partitions[number], owner), tuple(
        _group(group) for _, group in sorted(topic.groups.items())
    )


def merge_groups(parts: Iterable[tuple[str, GroupShown]]) -> tuple[GroupShown, ...]:
    """What groups are in several partitions, each with its owner, by their names. A reader's credit at an owner is for
    all its partitions there."""
    found: dict[str, list[GroupShown]] = {}
    credit: dict[str, dict[str, int]] = {}
    for owner, part in parts:
        found.setdefault(part.name, []).append(part)
        lent = credit.setdefault(part.name, {})
        lent[owner] = max(lent.get(owner, 0), part.credit)
    return tuple(
        GroupShown(
            name,
            add(one.lag for one in ones),
            sum(one.in_flight for one in ones),
            sum(one.retries for one in ones),
            max(one.consumers for one in ones),
            sum(credit[name].values()),
            all(one.is_lapsed for one in ones),
            tuple(lag for one in ones for lag in one.partitions),
        )
        for name, ones in sorted(found.items())
    )


def _partition(partition: Partition, owner: str = "") -> PartitionShown:
    if partition.behind is not None:  # older messages are still being read
        return PartitionShown(partition.number, None, None, None, None, owner)
    held = len(partition)
    return PartitionShown(
        partition.number,
        held,
        partition.needed_bytes + partition.settled_bytes,
        partition.offsets[partition.head] if held else -1,
        partition.offsets[-1] if held else -1,
        owner,
    )


def _group(group: Group) -> GroupShown:
    lags = tuple(_lag(progress) for progress in group.progress.values())
    waiting = sum(
        1
        for progress in group.progress.values()
        for flight in progress.flights.values()
        if flight.state in (WAITING, READY)
    )
    return GroupShown(
        group.name,
        add(one.lag for one in lags),
        sum(one.in_flight for one in lags),
        waiting,
        len(group.subscribers),
        sum(reader.credit.limit for reader in group.subscribers),
        group.is_lapsed,
        lags,
    )


def _lag(progress: Progress) -> PartitionLag:
    return PartitionLag(progress.partition.number, progress.floor, progress.lag, progress.leased)


def topic_stats(state: State) -> tuple[TopicStats, ...]:
    return tuple(_stats(topic) for topic in state.topics.values())


def _stats(topic: Topic) -> TopicStats:
    groups = tuple(
        (group.name, len(group.subscribers), tuple(_lag(progress) for progress in group.progress.values()))
        for group in topic.groups.values()
    )
    partitions = [_partition(partition) for partition in topic.partitions.values()]
    messages, size = add(one.messages for one in partitions), add(one.bytes for one in partitions)
    return TopicStats(topic.tenant, topic.name, messages, size, groups)


def merge_stats(parts: list[TopicStats]) -> TopicStats:
    """A topic whose partitions are counted one by one."""
    groups: dict[str, tuple[int, tuple[PartitionLag, ...]]] = {}
    for part in parts:
        for name, consumers, lags in part.groups:
            readers, before = groups.get(name, (0, ()))
            groups[name] = (max(readers, consumers), (*before, *lags))
    return TopicStats(
        parts[0].tenant,
        parts[0].name,
        add(part.messages for part in parts),
        add(part.bytes for part in parts),
        tuple((name, consumers, lags) for name, (consumers, lags) in groups.items()),
    )
