"""What time does: leases end, retries come due, settled messages and old entries are forgotten. Pure.

Called once a tick. Each call looks at a bounded number of partitions, groups and entries and goes on from there at the
next, so that a tick costs the same whatever is held.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from oncewire._ground.contracts.records import GroupSeen, Record, Trimmed
from oncewire.broker.idempotency import forget_produced
from oncewire.broker.messages import Partition
from oncewire.broker.progress import LEASED, READY, WAITING, Flight
from oncewire.broker.rules import TIMED_OUT, failed, forget_group, is_in_use, is_kept
from oncewire.broker.state import Group, State, Topic, make_ready

LOOKS_MAX: Final = 1_000
"""Partitions and groups that a tick looks at."""
FORGET_MAX: Final = 10_000
"""Idempotency entries that a tick drops."""
SEEN_SHARE: Final = 50
"""A group in use is written down anew after this part of the time in which it would lapse."""


def tick(state: State, now_ms: int) -> list[Record]:
    """All that is due by now, as records to make durable."""
    records: list[Record] = []
    state.began_at_ms = state.began_at_ms or now_ms
    for flight in _due(state, now_ms):
        records += _look(state, now_ms, flight)
    records += _trim(state, now_ms)
    records += _see(state, now_ms)
    _forget(state, now_ms)
    return records


def _due(state: State, now_ms: int) -> list[Flight]:
    """The flights whose tick has come."""
    tick = now_ms // state.limits.tick_ms
    if tick <= state.ticked:
        return []
    if tick - state.ticked <= len(state.wheel):
        ticks = [one for one in range(state.ticked + 1, tick + 1) if one in state.wheel]
    else:
        ticks = sorted(one for one in state.wheel if one <= tick)
    state.ticked = tick
    return [flight for one in ticks for flight in state.wheel.pop(one)]


def _look(state: State, now_ms: int, flight: Flight) -> list[Record]:
    """A flight that was due: it may be settled, renewed or on its way to the disk meanwhile."""
    if flight.is_settling:
        return []
    is_leaving = flight.progress.group.topic.is_leaving  # it may stay after all
    if flight.state in (LEASED, WAITING) and (is_leaving or flight.due_at_ms > now_ms):
        state.later(flight)
    elif flight.state == LEASED:
        state.counters["lease_timeouts"] += 1
        if flight.credit is not None:
            flight.credit.lapse()
        return failed(state, now_ms, flight, TIMED_OUT)
    elif flight.state in (WAITING, READY):
        make_ready(state, flight)
    return []


# ---- messages


def _trim(state: State, now_ms: int) -> list[Record]:
    records: list[Record] = []
    for key in list(islice(state.trimmable, LOOKS_MAX)):
        del state.trimmable[key]
        topic = state.numbered.get(key[0])
        if topic is None:
            continue
        partition = topic.partitions[key[1]]
        offset = _trim_to(state, topic, partition, now_ms)
        if offset > max(partition.trimmed, partition.trimming) and not topic.is_leaving:
            partition.trimming = offset
            records.append(Trimmed(topic.number, partition.number, offset))
        if len(partition) and (partition.settled or topic.is_graveyard):
            state.trimmable[key] = None
    return records


def _trim_to(state: State, topic: Topic, partition: Partition, now_ms: int) -> int:
    """The last offset that may go: settled and old enough, or settled and too many; or simply too old a dead letter."""
    limits, head = state.limits, partition.head
    index = head
    settled_end = head + partition.settled
    oldest_ms = now_ms - limits.settled_age_ms
    surplus = partition.settled - limits.partition_messages_max
    surplus_bytes = partition.settled_bytes - limits.partition_bytes_max
    while index < settled_end and (partition.times[index] <= oldest_ms or index - head < surplus or surplus_bytes > 0):
        surplus_bytes -= partition.sizes[index]
        index += 1
    if topic.is_graveyard:
        oldest_ms = now_ms - limits.dead_letter_age_ms
        while index < len(partition.offsets) and partition.times[index] <= oldest_ms:
            index += 1
    return partition.offsets[index - 1] if index > head else -1


# ---- groups


def _see(state: State, now_ms: int) -> list[Record]:
    """Groups in use are written down now and then, those that nobody uses lapse or are forgotten, old entries go."""
    records: list[Record] = []
    limits = state.limits
    for number in list(islice(state.groups, LOOKS_MAX)):
        group = state.groups[number] = state.groups.pop(number)  # behind the others
        _forget_worked(state, group, now_ms)
        if group.subscribers:
            group.seen_at_ms = now_ms
        if group.seen_at_ms - group.recorded_at_ms > limits.group_idle_ms // SEEN_SHARE and not group.topic.is_leaving:
            group.recorded_at_ms = group.seen_at_ms
            records.append(GroupSeen(group.topic.number, group.number, group.seen_at_ms))
        if not group.has_settled and not group.is_leaving:
            records += _try(state, now_ms, group)
        is_lapsed = now_ms - group.seen_at_ms > limits.group_idle_ms
        if is_lapsed != group.is_lapsed:
            group.is_lapsed = is_lapsed
            state.hold_again(group.topic)
    return records


def _try(state: State, now_ms: int, group: Group) -> list[Record]:
    """A group on trial holds messages back for a short time after its last reader. After a start readers may return."""
    if now_ms - max(group.seen_at_ms, state.began_at_ms) <= state.limits.group_trial_ms:
        return []
    if is_in_use(group):
        group.seen_at_ms = now_ms
        return []
    if state.is_whole:
        return forget_group(now_ms, group)
    state.doubted[group] = None
    return []


# ---- idempotency entries


def _forget(state: State, now_ms: int) -> None:
    left = FORGET_MAX
    for key, entries in list(state.produced.items()):
        dropped = forget_produced(entries, now_ms, left)
        state.entries -= dropped
        left -= dropped
        if not entries:
            del state.produced[key]


def _forget_worked(state: State, group: Group, now_ms: int) -> None:
    """Drop entries whose time is over; one that its message keeps is looked at again a TTL later."""
    looked = 0
    while group.worked and looked < FORGET_MAX:
        identity, work = next(iter(group.worked.items()))
        if work.check_at_ms > now_ms:
            break
        looked += 1
        if is_kept(group, work, now_ms) or (group.number, identity) in state.pending:
            work.check_at_ms = now_ms + state.limits.idempotency_ttl_ms
            group.worked.move_to_end(identity)
        else:
            del group.worked[identity]
            state.entries -= 1
