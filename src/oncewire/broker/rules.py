"""What the broker decides. Pure: a request and a `now` go in, a Step comes out.

A step holds the records to make durable, in order, and the answer. Without records it is answered at once, unless it
`waits`: then its answer speaks of something that is still on its way to the disk (a second ack while the first is being
written), and goes out when all that was proposed before it is durable. Nothing here changes what is durable: that is
`State.apply`, when the records are on the disk. What a step changes at once is tentative (state.py lists it).

    idempotency  idempotency.py has the transition table of both sides (B7)
    leases       the last owner may settle until another owner has the message (B4)
    retries      backoff_ms · 2^(attempts − 1), capped; then the graveyard `dlq.<topic>` (B6); without a policy the
                 first comes at the next tick, and the others wait ever longer, up to a cap
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

import msgspec

from oncewire._ground.contracts.broker import (
    DEAD_PREFIX,
    BrokerEnvelope,
    DeadLetter,
    DeliveredEnvelope,
    ProduceBody,
    RetryPolicy,
    Routing,
)
from oncewire._ground.contracts.records import (
    Acked,
    Body,
    Buried,
    Document,
    GroupGone,
    GroupMade,
    Marked,
    Record,
    Retried,
    Stored,
    TopicGone,
    TopicMade,
    decode_body,
)
from oncewire._ground.errors import Conflict, ContractViolation, NotFound, OncewireError, Overloaded, TooLarge
from oncewire.broker.credit import Credit
from oncewire.broker.engine import (
    BufferFull,
    Consume,
    Idempotency,
    IdempotencyStatus,
    Limits,
    Produced,
    RoutingDecision,
    Settle,
    Sink,
    TooManyReaders,
    TopicCreated,
)
from oncewire.broker.idempotency import (
    ABSENT,
    COMMITTED,
    ELSEWHERE,
    NAMES,
    PENDING,
    TRANSITIONS,
    Claim,
    Holder,
    Work,
    claim_of,
    identity_of,
)
from oncewire.broker.messages import Partition
from oncewire.broker.placing import NO_TOPIC as NO_TOPIC
from oncewire.broker.placing import place_of, routing_of
from oncewire.broker.progress import LEASED, WAITING, Flight, Progress
from oncewire.broker.state import Group, State, Subscriber, Topic, make_ready

NACKED: Final = "nack"
TIMED_OUT: Final = "ack_timeout"
EXPIRED: Final = "message deadline exceeded"
ERROR_CHARS_MAX: Final = 1_000
BACKOFF_MS_MAX: Final = 7 * 86_400_000
_DOUBLINGS_MAX: Final = 40

IN_FLIGHT_ELSEWHERE: Final = "idempotency: key already in-flight"
NOT_IN_FLIGHT: Final = "message is not in-flight"


class Step(msgspec.Struct, frozen=True):
    """See the module's head."""

    answer: Any
    records: tuple[Record, ...] = ()
    waits: bool = False


# ---- topics


def create_topic(state: State, now_ms: int, tenant: str, name: str, partitions: int) -> Step:
    """One that is there already answers with its real partition count and stays as it is."""
    if not 1 <= partitions <= state.limits.partitions_max:
        return Step(ContractViolation("invalid partitions", field="partitions"))
    topic = state.topics.get((tenant, name))
    if topic is not None and not topic.is_leaving:
        return Step(TopicCreated(name, topic.count))
    if topic is not None:
        return Step(Overloaded(f"topic {name!r} is being deleted", retry_after_s=state.limits.retry_after_ms / 1000))
    if (making := state.making.get((tenant, name))) is not None:
        return Step(TopicCreated(name, making.count), waits=True)
    if state.tenants.get(tenant, 0) + len(state.making) >= state.limits.topics_max:
        return Step(TooLarge(f"there are {state.limits.topics_max} topics already, and more are not allowed"))
    return Step(TopicCreated(name, partitions), (_make_topic(state, now_ms, tenant, name, partitions),))


def _make_topic(state: State, now_ms: int, tenant: str, name: str, partitions: int) -> TopicMade:
    record = TopicMade(state.next_topic, tenant, name, partitions, now_ms)
    state.next_topic += 1
    state.making[tenant, name] = Topic(record.topic, tenant, name, partitions, now_ms)
    return record


def delete_topic(state: State, tenant: str, name: str) -> Step:
    """With everything that belongs to it."""
    topic = state.topics.get((tenant, name))
    if topic is None:
        return Step(NotFound(NO_TOPIC))
    if topic.is_leaving:
        return Step(None, waits=True)
    topic.is_leaving = True
    return Step(None, (TopicGone(topic.number),))


# ---- producing


def produce(state: State, now_ms: int, tenant: str, body: ProduceBody, decision: RoutingDecision | None = None) -> Step:
    """Store a message, or say why not. A duplicate is a success that stores nothing."""
    if (late := expired(now_ms, body)) is not None:
        return Step(late)
    place = place_of(state.topics, state.counters, tenant, body, decision)
    if isinstance(place, OncewireError):
        return Step(place)
    if place.topic.is_leaving:
        return Step(NotFound(f"{NO_TOPIC} (create it first)"), waits=True)
    answer = accept(state, now_ms, tenant, body, place, routing_of(decision))
    if type(answer) is Stored:
        return Step(Produced(body.topic, answer.partition, answer.offset), (answer,))
    return Step(answer)


def expired(now_ms: int, body: ProduceBody) -> ContractViolation | None:
    envelope = body.envelope
    if envelope is not None and envelope.deadline is not None and _is_past(envelope.deadline, now_ms):
        return ContractViolation(EXPIRED, field="envelope.deadline")
    return None


def accept(
    state: State,
    now_ms: int,
    tenant: str,
    body: ProduceBody,
    place: tuple[Topic, int, BrokerEnvelope | None],
    routing: Routing | None,
) -> Stored | Produced | OncewireError:
    """What to store of a message in its place, unless its key was used or there is no room."""
    topic, number, envelope = place
    identity, requested, expires_at_ms = b"", "", 0
    if envelope is not None and envelope.idempotency_key:
        identity, requested = identity_of(envelope.tenant_id, envelope.idempotency_key), body.topic
        if (gate := _gate(state, now_ms, (tenant, requested), identity)) is not None:
            state.counters["deduplicated"] += not isinstance(gate, OncewireError)
            return Produced(requested, number, -1, is_duplicate=True) if isinstance(gate, bool) else gate
        expires_at_ms = now_ms + state.limits.idempotency_ttl_ms
    key, value = body.key, body.value
    size = (len(key) if key.isascii() else len(key.encode())) + (len(value) if value.isascii() else len(value.encode()))
    partition, limits = topic.partitions[number], state.limits
    if (
        partition.needed + partition.reserved >= limits.partition_messages_max
        or partition.needed_bytes + partition.reserved_bytes + size > limits.partition_bytes_max
    ):
        state.counters["refused_full"] += 1
        return _full(state, topic, partition)
    if identity:
        state.pending.add((tenant, requested, identity))
    held = state.encode_body((key, value, envelope, routing))
    return _reserve(topic, number, now_ms, size, held, identity, requested, expires_at_ms)


def take_back(state: State, record: Stored) -> None:
    """It was not stored after all: it stands there already."""
    topic = state.numbered[record.topic]
    partition = topic.partitions[record.partition]
    partition.reserved -= 1
    partition.reserved_bytes -= record.size
    state.pending.discard((topic.tenant, record.requested, record.identity))
    state.counters["deduplicated"] += 1


def _reserve(
    topic: Topic, number: int, now_ms: int, size: int, held: bytes, identity: bytes, requested: str, expires_at_ms: int
) -> Stored:
    """Give out the topic's next offset, and promise the room."""
    partition = topic.partitions[number]
    offset = topic.next_offset
    topic.next_offset = offset + 1
    partition.reserved += 1
    partition.reserved_bytes += size
    return Stored(topic.number, number, offset, now_ms, size, held, identity, requested, expires_at_ms)


def _gate(state: State, now_ms: int, requested: tuple[str, str], identity: bytes) -> OncewireError | bool | None:
    """True for a message that is stored already, None for one that may be."""
    entries = state.produced.get(requested)
    if entries is not None and entries.get(identity, 0) > now_ms:
        return True
    if (*requested, identity) in state.pending:
        return ContractViolation(IN_FLIGHT_ELSEWHERE, field="envelope.idempotency_key")
    if state.entries + len(state.pending) >= state.limits.idempotency_entries_max:
        return Overloaded("too many idempotency keys are remembered", retry_after_s=state.limits.retry_after_ms / 1000)
    return None


def _full(state: State, topic: Topic, partition: Partition) -> BufferFull:
    limits = state.limits
    if partition.needed + partition.reserved >= limits.partition_messages_max:
        reason, what = "partition_buffer_full", f"{limits.partition_messages_max} messages"
    else:
        reason, what = "partition_buffer_bytes_full", f"{limits.partition_bytes_max} bytes"
    message = f"partition {partition.number} of topic {topic.name!r} is full: {what} is the limit"
    return BufferFull(message, reason=reason, retry_after_s=limits.retry_after_ms / 1000)


def _is_past(deadline: datetime, now_ms: int) -> bool:
    return deadline.timestamp() * 1000 <= now_ms


# ---- reading


def enter(state: State, now_ms: int, tenant: str, consume: Consume) -> Step:
    """Make the group if it is new. The answer is None: it may be joined."""
    topic = state.topics.get((tenant, consume.topic))
    if topic is None or topic.is_leaving:
        return Step(NotFound(NO_TOPIC), waits=topic is not None)
    if not 0 <= consume.lease_ms <= state.limits.lease_ms_max:
        return Step(ContractViolation("invalid lease_ms", field="lease_ms"))
    group = topic.groups.get(consume.group)
    if group is not None and not group.is_leaving:
        return Step(_crowded(state, group))
    if (topic.number, consume.group) in state.entering:
        return Step(None, waits=True)
    entering = sum(1 for number, _ in state.entering if number == topic.number)
    if len(topic.groups) + entering >= state.limits.groups_max:
        return Step(TooLarge(f"topic {topic.name!r} has {state.limits.groups_max} groups, and more are not allowed"))
    record = GroupMade(topic.number, state.next_group, consume.group, now_ms)
    state.next_group += 1
    state.entering[topic.number, consume.group] = record
    return Step(None, (record,))


def forget_group(now_ms: int, group: Group) -> list[Record]:
    """A group that has settled nothing and that nobody reads: mistyped, most likely, or made to look at messages. When
    it comes again it is a new one."""
    if group.has_settled or group.is_leaving or group.topic.is_leaving or is_in_use(group):
        return []
    group.is_leaving = True
    return [GroupGone(group.topic.number, group.number, now_ms)]


def is_in_use(group: Group) -> bool:
    """Whether anybody reads it, works on something or waits for a retry."""
    if group.subscribers or group.worked:
        return True
    progress = group.progress.values()
    return any(one.leased or any(flight.state == WAITING for flight in one.flights.values()) for one in progress)


def _crowded(state: State, group: Group) -> OncewireError | None:
    if len(group.subscribers) < state.limits.subscriptions_max:
        return None
    return TooManyReaders(
        f"group {group.name!r} has {state.limits.subscriptions_max} readers already",
        retry_after_s=state.limits.retry_after_ms / 1000,
    )


def join(
    state: State, now_ms: int, tenant: str, consume: Consume, sink: Sink, credit: Credit | None = None
) -> Subscriber | OncewireError:
    """A reader of a group that was entered. From now on it may be given messages, as far as its credit goes."""
    topic = state.topics.get((tenant, consume.topic))
    group = topic.groups.get(consume.group) if topic else None
    if topic is None or group is None:
        return NotFound(NO_TOPIC)
    if (crowded := _crowded(state, group)) is not None:
        return crowded
    limits = state.limits
    credit = credit or Credit(consume.in_flight or limits.reader_in_flight)
    subscriber = Subscriber(group, consume.owner, consume.lease_ms or limits.lease_ms, sink, credit)
    group.subscribers.append(subscriber)
    topic.readers[group] = None
    group.seen_at_ms = now_ms
    if group.is_lapsed:
        group.is_lapsed = False
        state.hold_again(topic)
    for partition in topic.partitions.values():
        state.stir(group, partition.number)
    return subscriber


def leave(now_ms: int, subscriber: Subscriber) -> None:
    """Give it no more. What it was given stays leased."""
    group = subscriber.group
    subscriber.is_open = False
    if subscriber in group.subscribers:
        group.subscribers.remove(subscriber)
        group.seen_at_ms = now_ms
    if not group.subscribers:
        group.topic.readers.pop(group, None)


def recall(state: State, progress: Progress, offsets: Iterable[int], credit: Credit) -> None:
    """Deliveries that did not reach their reader: they count no attempt, and may go to another one."""
    for offset in offsets:
        flight = progress.flights.get(offset)
        if flight is not None and flight.state == LEASED and flight.credit is credit and not flight.is_settling:
            progress.release(flight)
            flight.attempts -= 1
            flight.owner = ""
            make_ready(state, flight)


# ---- settling


def settle(state: State, now_ms: int, tenant: str, request: Settle) -> Step:
    """An ack, a nack or a renewed lease."""
    flight = held(state, tenant, request)
    if isinstance(flight, Step):
        return flight
    if request.act == "extend":
        return _extend(state, now_ms, flight, request.lease_ms)
    if flight.credit is not None:
        flight.credit.settle()
    if request.act == "nack":
        state.counters["nacked"] += 1
        reason = request.reason[:ERROR_CHARS_MAX] or NACKED
        return Step(None, tuple(failed(state, now_ms, flight, reason, is_nacked=True)))
    return _ack(now_ms, flight)


def held(state: State, tenant: str, request: Settle | Idempotency) -> Flight | Step:
    """The delivery that the owner speaks of, or why it has none."""
    topic = state.topics.get((tenant, request.topic))
    if topic is None:
        return Step(NotFound(NO_TOPIC))
    if not 0 <= request.partition < topic.count:
        return Step(ContractViolation("partition out of range", field="partition"))
    group = topic.groups.get(request.group)
    if group is not None and group.is_leaving:
        return Step(ContractViolation(NOT_IN_FLIGHT), waits=True)
    flight = group.progress[request.partition].flights.get(request.offset) if group else None
    if flight is None or not flight.owner:
        return Step(ContractViolation(NOT_IN_FLIGHT))
    if flight.is_settling or topic.is_leaving:
        return Step(ContractViolation(NOT_IN_FLIGHT), waits=True)
    if flight.owner != request.owner:
        return Step(Conflict("not owner"))
    return flight


def _ack(now_ms: int, flight: Flight) -> Step:
    progress = flight.progress
    group = progress.group
    flight.is_settling = True
    number, topic = progress.partition.number, group.topic.number
    identity = _begun(group, flight) if flight.identity else b""
    record = Acked(topic, group.number, number, flight.offset, now_ms, identity, flight.attempts, flight.owner)
    return Step(None, (record,))


def _begun(group: Group, flight: Flight) -> bytes:
    """The key that the ack commits: one that is pending for this message, or whose entry is kept elsewhere."""
    identity = flight.identity
    if not group.topic.is_home_of(identity):
        return identity
    work = group.worked.get(identity)
    return identity if work is not None and work.status == PENDING and work.offset == flight.offset else b""


def _extend(state: State, now_ms: int, flight: Flight, lease_ms: int) -> Step:
    """Leases are not durable, so neither is their renewal."""
    if flight.state != LEASED:
        return Step(ContractViolation(NOT_IN_FLIGHT))
    if not 0 <= lease_ms <= state.limits.lease_ms_max:
        return Step(ContractViolation("invalid lease_ms", field="lease_ms"))
    is_shorter = now_ms + (lease_ms or flight.lease_ms) < flight.due_at_ms
    flight.lease_ms = lease_ms or flight.lease_ms
    flight.due_at_ms = now_ms + flight.lease_ms
    if is_shorter:
        state.later(flight)
    return Step(None)


def failed(state: State, now_ms: int, flight: Flight, reason: str, *, is_nacked: bool = False) -> list[Record]:
    """A delivery did not succeed: try again later, or bury it. A late nack of a waiting one only tells its reason."""
    if flight.state != LEASED:
        return [_retry(now_ms, flight, flight.due_at_ms, reason, is_nacked)]
    policy, attempts = flight.policy, flight.attempts
    if policy is not None and policy.max_attempts:
        wait_ms = backoff_ms(policy, attempts)
    else:
        policy = _policy_of(state.limits, flight.progress.group.topic)
        wait_ms = backoff_ms(policy, attempts - 1)
    if 0 < policy.max_attempts <= attempts:
        return bury(state, now_ms, flight, reason)
    tick_ms = state.limits.tick_ms
    next_tick_ms = now_ms if reason == TIMED_OUT else (now_ms // tick_ms + 1) * tick_ms
    return [_retry(now_ms, flight, max(now_ms + wait_ms, next_tick_ms), reason, is_nacked)]


def _retry(now_ms: int, flight: Flight, due_at_ms: int, reason: str, is_nacked: bool) -> Retried:
    flight.is_settling = True
    progress = flight.progress
    group = progress.group
    return Retried(
        group.topic.number,
        group.number,
        progress.partition.number,
        flight.offset,
        flight.attempts,
        due_at_ms,
        reason,
        now_ms,
        flight.owner,
        is_nacked,
    )


def _policy_of(limits: Limits, topic: Topic) -> RetryPolicy:
    """Of messages whose producer sent none. A dead letter is never given up."""
    is_grave = topic.name.startswith(DEAD_PREFIX)
    return RetryPolicy(
        max_attempts=0 if is_grave else limits.retry_max_attempts,
        backoff_ms=limits.retry_backoff_ms,
        max_backoff_ms=limits.retry_max_backoff_ms,
    )


def backoff_ms(policy: RetryPolicy, attempts: int) -> int:
    """How long to wait after so many attempts."""
    if policy.backoff_ms == 0 or attempts < 1:
        return 0
    wait_ms = policy.backoff_ms << min(attempts - 1, _DOUBLINGS_MAX)
    return min(wait_ms, policy.max_backoff_ms or BACKOFF_MS_MAX, BACKOFF_MS_MAX)


def bury(state: State, now_ms: int, flight: Flight, reason: str) -> list[Record]:
    """Settle a message by a dead letter, in one record. Nothing when the graveyard is just being deleted."""
    progress = flight.progress
    group, number = progress.group, progress.partition.number
    topic = group.topic
    index = progress.partition.find(flight.offset)
    if index < 0:
        return []
    body = _letter(decode_body(progress.partition.bodies[index]), topic, flight, number, reason, now_ms)
    size, held = progress.partition.sizes[index], state.encode_body((body.key, body.value, body.envelope, body.routing))
    records: list[Record] = []
    if not state.is_whole:
        flight.is_settling = True
        letter = Stored(0, number, -1, now_ms, size, held)
        told = (flight.attempts, reason, now_ms, flight.owner)
        return [Buried(topic.number, group.number, number, flight.offset, letter, *told)]
    name = (topic.tenant, DEAD_PREFIX + topic.name)
    graveyard = state.topics.get(name) or state.making.get(name)
    if graveyard is None:
        records.append(_make_topic(state, now_ms, *name, topic.count))
        graveyard = state.making[name]
    elif graveyard.is_leaving:
        state.later(flight)
        return []
    to = number % graveyard.count
    stored = _reserve(graveyard, to, now_ms, size, held, b"", "", 0)
    flight.is_settling = True
    records.append(Buried(topic.number, group.number, number, flight.offset, stored))
    return records


def _letter(held: Body | Document, topic: Topic, flight: Flight, number: int, reason: str, now_ms: int) -> Body:
    from_ = DeadLetter(
        original_topic=topic.name,
        original_partition=number,
        original_offset=flight.offset,
        attempts=flight.attempts,
        last_error=reason,
        routed_at_ms=now_ms,
    )
    envelope = msgspec.structs.replace(
        held.envelope or DeliveredEnvelope(),
        target_topic="",
        partition_override=None,
        retry_policy=None,
        deadline=None,
        dlq=from_,
    )
    return Body(held.key, held.value, envelope, held.routing)


# ---- the worker's helper


def idempotency(state: State, now_ms: int, tenant: str, request: Idempotency) -> Step:
    """A step for a delivery that the caller holds, by the transition table."""
    flight = held(state, tenant, request)
    if isinstance(flight, Step):
        return flight
    claim, group = claim_of(request), flight.progress.group
    rival = rival_of(now_ms, group, claim)
    freed = rival if rival is not None and not is_leased(group, rival) else None
    step = mark(state, now_ms, group, claim, freed)
    if step.records:
        note_begun(flight, claim)
    return step


def note_begun(flight: Flight, claim: Claim) -> None:
    """An ack commits what was begun and is not marked."""
    if claim.act == "begin":
        flight.identity = claim.identity
    elif flight.identity == claim.identity:
        flight.identity = b""


def rival_of(now_ms: int, group: Group, claim: Claim) -> Holder | None:
    """Another delivery that has begun with the key. It keeps it as long as its owner has the lease."""
    work = group.worked.get(claim.identity)
    if work is None or work.status != PENDING or not is_kept(group, work, now_ms):
        return None
    is_same = (work.partition, work.offset) == claim.holder[:2]
    return None if is_same else Holder(work.partition, work.offset, work.owner)


def is_leased(group: Group, holder: Holder) -> bool:
    flight = group.progress[holder.partition].flights.get(holder.offset)
    return flight is not None and flight.state == LEASED and flight.owner == holder.owner


def mark(state: State, now_ms: int, group: Group, claim: Claim, freed: Holder | None) -> Step:
    """What a step makes of its entry. `freed` is a rival whose lease has ended."""
    identity, holder = claim.identity, claim.holder
    if (group.number, identity) in state.pending:
        return Step(ContractViolation(IN_FLIGHT_ELSEWHERE), waits=claim.act != "begin")
    work = group.worked.get(identity)
    rival = rival_of(now_ms, group, claim)
    before = work.status if work is not None and is_kept(group, work, now_ms) else ABSENT
    after = TRANSITIONS.get((before if rival in (None, freed) else ELSEWHERE, claim.act))
    if after is None:
        return Step(ContractViolation(IN_FLIGHT_ELSEWHERE))
    last_error = work.last_error if work else ""
    if before == COMMITTED:
        return Step(IdempotencyStatus("COMMITTED", last_error))
    if work is None and state.entries + len(state.pending) >= state.limits.idempotency_entries_max:
        return Step(Overloaded("too many idempotency keys are remembered"))
    if claim.act == "failure":
        last_error = claim.error[:ERROR_CHARS_MAX]
    state.pending.add((group.number, identity))
    check_at_ms = now_ms + state.limits.idempotency_ttl_ms
    place = (holder.owner, holder.partition, holder.offset)
    record = Marked(group.topic.number, group.number, identity, after, *place, check_at_ms, last_error)
    return Step(IdempotencyStatus(NAMES[after], last_error), (record,))


def is_kept(group: Group, work: Work, now_ms: int) -> bool:
    """Whether an entry still counts: for its TTL, and COMMITTED as long as its message is held."""
    if work.check_at_ms > now_ms:
        return True
    return work.status == COMMITTED and group.topic.holds(work.partition, work.offset)
