"""What the state looks like from outside: topics with their groups and lag, gauges. Pure; only durable facts count."""

from __future__ import annotations

from oncewire.broker.engine import GroupShown, PartitionLag, PartitionShown, TopicShown, TopicStats
from oncewire.broker.messages import Partition
from oncewire.broker.rules import NO_TOPIC
from oncewire.broker.state import READY, WAITING, Group, Progress, State, Topic
from oncewire.errors import NotFound


def topic_names(state: State, tenant: str) -> list[str]:
    return sorted(name for owner, name in state.topics if owner == tenant)


def show_topic(state: State, tenant: str, name: str) -> TopicShown | NotFound:
    topic = state.topics.get((tenant, name))
    if topic is None:
        return NotFound(NO_TOPIC)
    partitions = tuple(_partition(partition) for partition in topic.partitions)
    return TopicShown(
        topic.name,
        sum(one.messages for one in partitions),
        sum(one.bytes for one in partitions),
        topic.created_at_ms,
        partitions,
        tuple(_group(group) for _, group in sorted(topic.groups.items())),
    )


def _partition(partition: Partition) -> PartitionShown:
    held = len(partition)
    return PartitionShown(
        partition.number,
        held,
        partition.needed_bytes + partition.settled_bytes,
        partition.offsets[partition.head] if held else -1,
        partition.offsets[-1] if held else -1,
    )


def _group(group: Group) -> GroupShown:
    lags = tuple(_lag(progress) for progress in group.progress)
    waiting = sum(
        1 for progress in group.progress for flight in progress.flights.values() if flight.state in (WAITING, READY)
    )
    return GroupShown(
        group.name,
        sum(one.lag for one in lags),
        sum(one.in_flight for one in lags),
        waiting,
        len(group.subscribers),
        group.is_lapsed,
        lags,
    )


def _lag(progress: Progress) -> PartitionLag:
    return PartitionLag(progress.partition.number, progress.floor, progress.lag, len(progress.flights))


def topic_stats(state: State) -> tuple[TopicStats, ...]:
    return tuple(_stats(topic) for topic in state.topics.values())


def _stats(topic: Topic) -> TopicStats:
    groups = tuple(
        (group.name, len(group.subscribers), tuple(_lag(progress) for progress in group.progress))
        for group in topic.groups.values()
    )
    return TopicStats(
        topic.tenant,
        topic.name,
        sum(len(partition) for partition in topic.partitions),
        sum(partition.needed_bytes + partition.settled_bytes for partition in topic.partitions),
        groups,
    )
