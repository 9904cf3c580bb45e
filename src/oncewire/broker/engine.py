"""What the broker's routes need from an engine: one protocol, and the few values that go through it.

An engine is asked by calls and answers through `done`, which it calls exactly once, in the event loop's thread, when
the effect is durable (or at once, when nothing had to be written). There is no task and no future per request: many
requests share one commit, and all their `done` run in a row after it. `done` may run before the call returns.

Errors are values, not exceptions: `done(error)` gets one from our tree, and its class says which answer it is.

    Conflict          409  "not owner", nothing else
    BufferFull        429  with `reason` and `retry_after_s`
    Overloaded        429  reason "overloaded": too much waits for a commit, or a group has too many readers
    any other Refused 400  its message is the one that clients match on
    OutcomeUnknown    503  it was written and not confirmed
    Unavailable       503  it was not written: the disk is full, the engine stops
    Corrupt           500

Deliveries go to a `Sink`. A reader has credit: as many deliveries as it may hold unsettled, in all partitions together.
The engine asks for the sink's room before every round and never exceeds it either, so a reader that stops reading is
bounded: what it was given before is redelivered when its leases lapse. When room was short and comes back, the reader
says `subscription.resume()`.

Every store key starts with the tenant; names and bodies are checked by the caller (contracts/broker.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from oncewire._ground.contracts.broker import Delivery, ProduceBody
from oncewire._ground.errors import OncewireError, Overloaded

T = TypeVar("T")
Done: TypeAlias = Callable[[T | OncewireError], None]


class Limits(Struct, frozen=True, kw_only=True):
    """Every limit and age of an engine, with its default."""

    topics_max: int = 10_000
    """Per tenant. Dead-letter topics that the broker makes are not counted."""
    partitions_max: int = 1_024
    """Per topic."""
    groups_max: int = 100
    """Per topic."""
    subscriptions_max: int = 1_000
    """Per group, long polls included."""
    in_flight_max: int = 256
    """Deliveries that are leased at a time, per topic, group and partition."""
    reader_in_flight: int = 2
    """Of a reader that asks for nothing else, in all partitions together."""
    partition_messages_max: int = 100_000
    """Messages that some group still needs. As many settled ones are kept besides, for `settled_age_ms` at most."""
    partition_bytes_max: int = 64 << 20
    """Of keys and values, counted like the messages."""
    lease_ms: int = 2_000
    lease_ms_max: int = 12 * 3_600_000
    tick_ms: int = 250
    """How often leases and retries are looked at."""
    retry_max_attempts: int = 0
    """With the two below, the retry policy of messages whose producer sent none. 0: they are never given up."""
    retry_backoff_ms: int = 250
    """After the second attempt, doubled with each further one. The second comes at the next tick."""
    retry_max_backoff_ms: int = 60_000
    retry_after_ms: int = 1_000
    """What a refused producer is told to wait."""
    idempotency_ttl_ms: int = 600_000
    idempotency_entries_max: int = 5_000_000
    """Of producers and workers together."""
    settled_age_ms: int = 60_000
    """For so long a settled message stays for groups that are still to come."""
    group_idle_ms: int = 7 * 86_400_000
    """A group that nobody uses for so long no longer holds messages back."""
    group_trial_ms: int = 60_000
    """One that has never settled anything is forgotten so soon after its last reader."""
    dead_letter_age_ms: int = 30 * 86_400_000
    commit_bytes_max: int = 64 << 20
    """What may wait for the next commit."""


class BufferFull(Overloaded):
    """A partition holds as much as it may: produce again after `retry_after_s`."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason
        """`partition_buffer_full` or `partition_buffer_bytes_full`."""


class TooManyReaders(Overloaded):
    """A group has as many readers as it may."""


# ---- topics


class TopicCreated(Struct, frozen=True):
    """A topic as it is: one that was there already keeps its partition count."""

    name: str
    partitions: int


class PartitionLag(Struct, frozen=True):
    """Where a group stands in a partition. `last_acked` is -1 when nothing is; messages up to it are settled. `lag` is
    None while the partition's messages are read by its new owner."""

    partition: int
    last_acked: int
    lag: int | None
    in_flight: int


class GroupShown(Struct, frozen=True):
    """A group of a topic. `lag` counts the held messages that it has not settled, `in_flight` those that are leased. It
    is None while that of a partition is not known."""

    name: str
    lag: int | None
    in_flight: int
    retries: int
    """Messages that wait for their next attempt."""
    consumers: int
    credit: int
    """How many its consumers may hold in flight together."""
    is_lapsed: bool
    partitions: tuple[PartitionLag, ...]


class PartitionShown(Struct, frozen=True):
    """A partition of a topic. Offsets are -1 when it holds nothing; all is None while its new owner reads it."""

    partition: int
    messages: int | None
    bytes: int | None
    oldest_offset: int | None
    newest_offset: int | None
    owner: str = ""
    """The node that serves it; '' where there is only one."""


class TopicShown(Struct, frozen=True):
    """A topic with everything that an operator asks. What is None is not known yet."""

    name: str
    messages: int | None
    bytes: int | None
    created_at_ms: int
    partitions: tuple[PartitionShown, ...]
    groups: tuple[GroupShown, ...]


# ---- messages


class Produced(Struct, frozen=True):
    """Where a message stands. `topic` is the requested one; a duplicate is not stored again and has offset -1."""

    topic: str
    partition: int
    offset: int
    is_duplicate: bool = False


class Consume(Struct, frozen=True):
    """Who wants messages. 0 stands for the engine's default."""

    topic: str
    group: str
    owner: str
    lease_ms: int = 0
    in_flight: int = 0
    """The reader's credit. A long poll has as much as it takes."""


class Settle(Struct, frozen=True):
    """An ack, a nack or a renewed lease, by the owner of a delivery."""

    act: Literal["ack", "nack", "extend"]
    topic: str
    group: str
    partition: int
    offset: int
    owner: str
    reason: str = ""
    """Of a nack; empty is recorded as "nack"."""
    lease_ms: int = 0
    """Of an extend; 0 stands for the lease of the delivery."""


class Idempotency(Struct, frozen=True):
    """A step of the worker's helper for the delivery (partition, offset) that `owner` holds in `group`."""

    act: Literal["begin", "success", "failure"]
    topic: str
    group: str
    owner: str
    partition: int
    offset: int
    idempotency_key: str
    tenant_id: str = ""
    error: str = ""
    """Of a failure."""


class IdempotencyStatus(Struct, frozen=True):
    """Where the operation stands now. After a begin, COMMITTED means: done already, skip the effect and ack."""

    status: Literal["PENDING", "COMMITTED", "FAILED"]
    last_error: str = ""
    """Why the attempt before failed."""


class Sink(Protocol):
    """A reader's end. All three are called in the loop's thread and must not raise."""

    def room(self) -> int:
        """How many deliveries it takes now; 0 pauses it until `resume`."""

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Never more than `room` said, never none."""

    def ended(self, error: OncewireError) -> None:
        """No more will come: the topic was deleted or the engine stops. Not called after `close`."""


class Subscription(Protocol):
    """The engine's end of a reader."""

    @property
    def is_looking(self) -> bool:
        """Whether it has asked for messages elsewhere and has no answer yet."""

    def resume(self) -> None:
        """There is room again."""

    def close(self) -> None:
        """Deliver no more. What was delivered stays leased to its owner. May be called twice."""


# ---- the router


class RoutingDecision(Struct, frozen=True, kw_only=True):
    """What a router says about a message. What it leaves out is decided as without a router."""

    label: str = ""
    target_topic: str = ""
    partition_override: int | None = None
    meta: dict[str, str] = {}


Router: TypeAlias = Callable[[str, ProduceBody], RoutingDecision | Awaitable[RoutingDecision]]
"""Called with the requested topic and the message before anything is stored; a plain function runs in a thread."""


# ---- what an operator sees


class TopicStats(Struct, frozen=True):
    """Gauges of a topic, and of its groups as (name, consumers, where it stands in each partition). What is None is not
    known yet."""

    tenant: str
    name: str
    messages: int | None
    bytes: int | None
    groups: tuple[tuple[str, int, tuple[PartitionLag, ...]], ...]


class LogStats(Struct, frozen=True):
    """The log on disk since the start."""

    segments: int
    bytes: int
    commits: int
    records: int
    commit_us_last: int
    """From the end of filling to durable."""
    commit_us_total: int
    failures: int
    snapshots: int
    replayed_records: int
    replay_ms: int
    cut_bytes: int
    """Of a torn tail, at the start."""


class NodeStats(Struct, frozen=True):
    """A node among others that share their topics."""

    nodes: int
    partitions: int
    sessions: int


class Stats(Struct, frozen=True):
    """Counters since the start, and gauges."""

    counters: dict[str, int]
    """produced, produced_bytes, deduplicated, refused_full, delivered, redelivered, acked, nacked, lease_timeouts,
    dead_lettered, expired, trimmed, router_failures, commits_failed."""
    topics: tuple[TopicStats, ...]
    idempotency_entries: int
    log: LogStats | None
    """None without a log."""
    node: NodeStats | None = None
    """None where there is one broker alone."""


class Engine(Protocol):
    """See the module's head."""

    is_durable: bool
    """Whether what was acknowledged survives a crash: `wal_enabled`."""
    limits: Limits

    def create_topic(self, tenant: str, name: str, partitions: int, done: Done[TopicCreated]) -> None: ...
    def list_topics(self, tenant: str, done: Done[list[str]]) -> None:
        """Sorted."""

    def show_topic(self, tenant: str, name: str, done: Done[TopicShown]) -> None: ...
    def delete_topic(self, tenant: str, name: str, done: Done[None]) -> None:
        """With its messages, groups and idempotency entries. Its readers are ended."""

    def produce(self, tenant: str, body: ProduceBody, done: Done[Produced]) -> None: ...
    def produce_many(
        self, tenant: str, bodies: Sequence[ProduceBody], done: Done[list[Produced | OncewireError]]
    ) -> None:
        """One commit, and a result for each in its place."""

    def subscribe(self, tenant: str, consume: Consume, sink: Sink, done: Done[Subscription]) -> None:
        """A group that is new starts at the oldest kept message. Deliveries may begin before `done` returns."""

    def take(
        self, tenant: str, consume: Consume, messages_max: int, wait_ms: int, done: Done[list[Delivery]]
    ) -> Subscription:
        """Up to `messages_max` at once, as soon as there is one, none after `wait_ms`. `close` gives up: `done` is
        then called with none."""

    def settle(self, tenant: str, settle: Settle, done: Done[None]) -> None: ...
    def settle_many(self, tenant: str, settles: Sequence[Settle], done: Done[list[OncewireError | None]]) -> None:
        """One commit, and a result for each in its place: None, or why not."""

    def idempotency(self, tenant: str, step: Idempotency, done: Done[IdempotencyStatus]) -> None: ...

    def stats(self) -> Stats: ...
    def problems(self) -> list[str]:
        """Why the engine is not ready, in sentences; empty when it is."""

    async def stop(self) -> None:
        """End all readers, commit what waits, seal the log. Calls after this are answered Unavailable."""
