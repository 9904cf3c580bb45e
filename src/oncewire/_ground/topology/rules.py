"""Declared against found: what to do, what it would cost, and what only a person may allow. Pure.

The server adds keys and metadata of its own to what it stores, so both sides are brought into one form first: every
key that we judge, with its default where it is not shown. Keys that a newer server invents are listed, never judged
and never erased; operators' keys (placement, metadata, a pause) are theirs.

A difference is changed in place where JetStream can. Where it cannot, the thing must be deleted and made anew
(`--recreate`): a stream loses its messages, a durable its position. Some changes are possible and still lose: a lower
limit drops messages, a wider filter skips what the durable has passed, fewer replicas are less safe (`--accept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from oncewire._ground.contracts import subjects
from oncewire._ground.contracts.subjects import READER_PREFIX
from oncewire._ground.topology.model import CONSUMER_DEFAULTS, STREAM_DEFAULTS, Consumer, Stream, Topology, Wire
from oncewire._ground.topology.units import show_bytes, show_duration

NONE: frozenset[str] = frozenset()
ATOMIC_API_LEVEL, BATCHED_API_LEVEL = 2, 4
"""The first levels of JetStream's API that know allow_atomic (2.12) and allow_batched (2.14); older servers refuse or
ignore the keys."""

_OPERATORS = frozenset(
    {"name", "durable_name", "metadata", "placement", "pause_until", "first_seq", "mirror_direct", "filter_subject"}
)
_LIMITS = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject")
_ONE_WAY = ("deny_delete", "deny_purge", "sealed", "allow_msg_ttl", "allow_msg_schedules")
_STREAM_FIXED = ("storage", "mirror", "persist_mode", "allow_msg_counter")
_CONSUMER_FIXED = (
    "ack_policy",
    "deliver_policy",
    "replay_policy",
    "max_waiting",
    "mem_storage",
    "deliver_subject",
)


class FoundConsumer(Struct, frozen=True, kw_only=True):
    name: str
    config: Wire
    created: str = ""
    delivered: int = 0
    """The last stream sequence that went out, 0 for none."""
    unacked: int = 0
    pending: int = 0
    """What it has not sent out yet."""
    redelivered: int = 0
    """Of the unacknowledged, those that went out more than once."""
    deliveries: int = 0
    """All that ever went out, redeliveries included."""
    acked: int = 0
    """All up to this stream sequence is settled."""
    waiting: int = 0
    """Pull requests that wait for messages: 0 when nobody works."""


class FoundStream(Struct, frozen=True, kw_only=True):
    name: str
    config: Wire
    created: str = ""
    messages: int = 0
    bytes: int = 0
    oldest_ns: int = 0
    """The age of the first message."""
    first: int = 0
    last: int = 0
    last_at: str = ""
    """When the last message came, '' before the first."""
    consumers: Mapping[str, FoundConsumer] = {}


class Found(Struct, frozen=True, kw_only=True):
    """What the server has. `others` are streams that nobody declared, by name with their subjects; `strangers` are the
    same with all that there is to see, for who asked for it."""

    streams: Mapping[str, FoundStream] = {}
    others: Mapping[str, tuple[str, ...]] = {}
    strangers: Mapping[str, FoundStream] = {}
    api_level: int = 0


class Act(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    RECREATE = "recreate"


class Need(StrEnum):
    """Which flag must name an item before it is touched."""

    NOTHING = ""
    ACCEPT = "accept"
    RECREATE = "recreate"
    IMPOSSIBLE = "impossible"


class Change(Struct, frozen=True, kw_only=True):
    """One key. `need` is what changing it asks for, `cost` what it would lose."""

    key: str
    found: Any
    declared: Any
    need: Need = Need.NOTHING
    cost: str = ""


class Step(Struct, frozen=True, kw_only=True):
    """One thing to do. `config` is the body to send, `created` identifies what may be deleted for it."""

    item: str
    act: Act
    stream: str
    consumer: str = ""
    changes: tuple[Change, ...] = ()
    need: Need = Need.NOTHING
    cost: str = ""
    config: Wire = {}
    created: str = ""

    @property
    def flag(self) -> str:
        """What a person must write to have it done, '' when nothing."""
        return f"--{self.need} {self.item}" if self.need in (Need.ACCEPT, Need.RECREATE) else ""


class Plan(Struct, frozen=True, kw_only=True):
    """`same` are the items as declared, `extras` what nobody declared, `notes` what was not judged."""

    steps: tuple[Step, ...] = ()
    same: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan(part: Topology, found: Found, known: Topology | None = None) -> Plan:
    """What stands between the server and `part`. `known` is the whole topology when `part` is a service's."""
    looked = [*(_stream(one, found) for one in part.streams), *(_consumer(one, found) for one in part.consumers)]
    steps = sorted((one for one in looked if isinstance(one, Step)), key=_order)
    return Plan(
        steps=tuple(steps),
        same=tuple(one for one in looked if isinstance(one, str)),
        extras=tuple(_extras(known or part, found)),
        notes=tuple(_notes(part, found)),
    )


def _order(step: Step) -> tuple[bool, bool]:
    """Streams before their consumers; subjects are given up before another stream takes them."""
    gives_up = any(change.key == "subjects" and set(change.found) - set(change.declared) for change in step.changes)
    return bool(step.consumer), not gives_up


def _stream(stream: Stream, found: Found) -> Step | str:
    wire = stream.wire()
    if found.api_level < ATOMIC_API_LEVEL:
        wire["allow_atomic"] = False
    if found.api_level < BATCHED_API_LEVEL:
        wire["allow_batched"] = False
    there = found.streams.get(stream.name)
    blocked = _blocked(stream, found)
    if there is None:
        config = to_send(wire, {"name": stream.name})
        return Step(item=stream.item, act=Act.CREATE, stream=stream.name, config=config, **blocked)
    changes = diff(wire, normal_stream(there.config), lambda key, was, wanted: _stream_cost(there, key, was, wanted))
    if not changes:
        return stream.item
    need = max((change.need for change in changes), key=list(Need).index)
    act = Act.RECREATE if need is Need.RECREATE else Act.UPDATE
    cost = _stream_loss(there) if act is Act.RECREATE else _joined(changes)
    return Step(
        item=stream.item,
        act=act,
        stream=stream.name,
        changes=changes,
        config=to_send(wire, _foreign(there.config, STREAM_DEFAULTS)),
        created=there.created,
        **({"need": need, "cost": cost} | blocked),
    )


def _blocked(stream: Stream, found: Found) -> dict[str, Any]:
    """A stream that nobody declared and that has our subjects: the server would refuse."""
    for name, taken in found.others.items():
        for subject in taken:
            if any(subjects.overlaps(subject, own) for own in stream.subjects):
                cost = f"the stream {name} captures {subject} and is not part of this: take it away there first"
                return {"need": Need.IMPOSSIBLE, "cost": cost}
    return {}


def _consumer(consumer: Consumer, found: Found) -> Step | str:
    wire = consumer.wire()
    stream = found.streams.get(consumer.stream)
    there = stream.consumers.get(consumer.name) if stream else None
    facts: dict[str, Any] = {"item": consumer.item, "stream": consumer.stream, "consumer": consumer.name}
    names = {"name": consumer.name, "durable_name": consumer.name}
    if there is None:
        return Step(act=Act.CREATE, config=to_send(wire, names), **facts)
    changes = diff(
        wire, normal_consumer(there.config), lambda key, was, wanted: _consumer_cost(there, key, was, wanted)
    )
    if not changes:
        return consumer.item
    need = max((change.need for change in changes), key=list(Need).index)
    act = Act.RECREATE if need is Need.RECREATE else Act.UPDATE
    cost = _position_loss(there) if act is Act.RECREATE else _joined(changes)
    config = to_send(wire, _foreign(there.config, CONSUMER_DEFAULTS) | names)
    return Step(act=act, changes=changes, need=need, cost=cost, config=config, created=there.created, **facts)


class Permitted(Struct, frozen=True, kw_only=True):
    todo: tuple[Step, ...]
    refused: tuple[Step, ...]


def permit(steps: Iterable[Step], *, recreate: frozenset[str] = NONE, accept: frozenset[str] = NONE) -> Permitted:
    """What may be done with these flags, and what not."""
    return _split([_permitted(step, recreate, accept) for step in steps])


def _split(judged: list[tuple[Step, bool]]) -> Permitted:
    return Permitted(
        todo=tuple(step for step, is_allowed in judged if is_allowed),
        refused=tuple(step for step, is_allowed in judged if not is_allowed),
    )


def _permitted(step: Step, recreate: frozenset[str], accept: frozenset[str]) -> tuple[Step, bool]:
    is_durable_to_start_over = step.consumer and step.need is Need.ACCEPT and step.item in recreate
    if is_durable_to_start_over:
        return replace(step, act=Act.RECREATE), True
    allowed = {Need.NOTHING: True, Need.ACCEPT: step.item in accept, Need.RECREATE: step.item in recreate}
    return step, allowed.get(step.need, False)


def creates(steps: Iterable[Step]) -> Permitted:
    """What a service may do by itself: make what is missing, change nothing."""
    judged = [(step, step.act is Act.CREATE and step.need is Need.NOTHING) for step in steps]
    return _split(judged)


def diff(declared: Wire, found: Wire, cost: Callable[[str, Any, Any], tuple[Need, str]]) -> tuple[Change, ...]:
    changes = []
    for key, wanted in declared.items():
        was = found[key]
        if not _same(was, wanted):
            need, lost = cost(key, was, wanted)
            changes.append(Change(key=key, found=was, declared=wanted, need=need, cost=lost))
    return tuple(changes)


def _same(was: Any, wanted: Any) -> bool:
    """Subjects have no order."""
    if isinstance(was, tuple) and isinstance(wanted, tuple):
        return sorted(was) == sorted(wanted)
    return bool(was == wanted)


def normal_stream(config: Wire) -> Wire:
    """What the server shows, as `Stream.wire` would say it."""
    normal = {key: config.get(key, default) for key, default in STREAM_DEFAULTS.items()}
    normal["subjects"] = tuple(config.get("subjects") or ())
    normal["consumer_limits"] = config.get("consumer_limits") or None  # shown as {} when there are none
    return normal


def normal_consumer(config: Wire) -> Wire:
    normal = {key: config.get(key, default) for key, default in CONSUMER_DEFAULTS.items()}
    single = config.get("filter_subject")
    normal["filter_subjects"] = (single,) if single else tuple(config.get("filter_subjects") or ())
    return normal


def to_send(wire: Wire, extra: Mapping[str, Any]) -> Wire:
    """The body of a request. What is off or empty is left out: an older server may not know the key."""
    body = {**extra, **{key: value for key, value in wire.items() if value not in (None, False, "", ())}}
    filters = body.pop("filter_subjects", ())
    if len(filters) == 1:
        body["filter_subject"] = filters[0]  # the form that every client library reads
    elif filters:
        body["filter_subjects"] = filters
    for key in ("priority_policy", "persist_mode"):
        if body.get(key) in ("none", "default"):
            del body[key]
    return body


def _foreign(config: Wire, judged: Mapping[str, Any]) -> Wire:
    """What a new config must carry along untouched: operators' keys, and keys that we do not know."""
    kept = {key: value for key, value in config.items() if key not in judged and key != "filter_subject"}
    if "metadata" in kept:
        kept["metadata"] = {key: value for key, value in kept["metadata"].items() if not key.startswith("_nats.")}
    return kept


def _stream_cost(there: FoundStream, key: str, was: Any, wanted: Any) -> tuple[Need, str]:
    if key in _STREAM_FIXED or (key == "retention" and "workqueue" in (was, wanted)) or (key in _ONE_WAY and was):
        return Need.RECREATE, ""
    if key == "num_replicas" and wanted < was:
        return Need.ACCEPT, f"keeps {wanted} of {was} copies"
    if key == "retention" and wanted == "interest" and there.messages:
        return Need.ACCEPT, "drops messages that all consumers have acknowledged"
    if key in _LIMITS and _drops(there, key, was, wanted):
        return Need.ACCEPT, f"drops messages beyond {show(key, wanted)}"
    return Need.NOTHING, ""


def _drops(there: FoundStream, key: str, was: int, wanted: int) -> bool:
    """Whether a lower limit would drop messages that are stored now."""
    if wanted <= 0 or (0 < was <= wanted):
        return False
    stored = {"max_age": there.oldest_ns, "max_bytes": there.bytes}.get(key, there.messages)
    return stored > wanted


def _consumer_cost(there: FoundConsumer, key: str, was: Any, wanted: Any) -> tuple[Need, str]:
    if key in _CONSUMER_FIXED:
        return Need.RECREATE, ""
    if key == "filter_subjects" and there.delivered and not _narrows(was, wanted):
        cost = f"keeps its position: what it now filters and lies before sequence {there.delivered:,} is skipped"
        return Need.ACCEPT, cost
    return Need.NOTHING, ""


def _narrows(was: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """All that it will get it was getting before, so its position is still right. No filter is everything."""
    return not was or (bool(wanted) and all(any(subjects.covers(a, b) for a in was) for b in wanted))


def _stream_loss(there: FoundStream) -> str:
    lost = f"deletes {there.messages:,} message{'s' * (there.messages != 1)} ({show_bytes(there.bytes)})"
    names = [name for name in there.consumers if not name.startswith(READER_PREFIX)]
    return f"{lost} and the positions of {', '.join(sorted(names))}" if names else lost


def _position_loss(there: FoundConsumer) -> str:
    waiting = f" and {there.unacked:,} unacknowledged" if there.unacked else ""
    return f"loses its position (sequence {there.delivered:,}{waiting}): it starts again at the first message"


def _joined(changes: Iterable[Change]) -> str:
    return "; ".join(change.cost for change in changes if change.cost)


def _extras(known: Topology, found: Found) -> Iterator[str]:
    """What nobody declared: agents' durables, other people's streams. Never touched."""
    declared = {(one.stream, one.name) for one in known.consumers}
    for name, stream in found.streams.items():
        for consumer in stream.consumers:
            if (name, consumer) not in declared and not consumer.startswith(READER_PREFIX):
                yield f"consumer:{name}/{consumer}"
    streams = {one.name for one in known.streams}
    yield from (f"stream:{name}" for name in found.others if name not in streams)


def _notes(part: Topology, found: Found) -> Iterator[str]:
    if found.api_level < ATOMIC_API_LEVEL and any(stream.allow_atomic for stream in part.streams):
        yield "this server is too old for atomic batches (2.12 has them): publishing is slower where it syncs always"
    if found.api_level < BATCHED_API_LEVEL and any(stream.allow_batched for stream in part.streams):
        yield "this server is too old for fast ingest (2.14 has it): agents publish slower than they could"
    for stream in part.streams:
        there = found.streams.get(stream.name)
        yield from _unjudged(stream.item, there.config if there else {}, STREAM_DEFAULTS)
    for consumer in part.consumers:
        around = found.streams.get(consumer.stream)
        durable = around.consumers.get(consumer.name) if around else None
        yield from _unjudged(consumer.item, durable.config if durable else {}, CONSUMER_DEFAULTS)


def _unjudged(item: str, config: Wire, judged: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key not in judged and key not in _OPERATORS and value:
            yield f"{item} has {key} = {value!r}, a key that this version does not judge"


def show(key: str, value: Any) -> str:
    """A value of a config as a person reads it."""
    if key in ("max_age", "duplicate_window", "ack_wait", "inactive_threshold", "subject_delete_marker_ttl"):
        return show_duration(value)
    if key in ("max_bytes", "max_msg_size"):
        return show_bytes(value)
    if key in ("max_msgs", "max_msgs_per_subject", "max_deliver", "max_ack_pending", "max_consumers"):
        return "unlimited" if value < 0 else f"{value:,}"
    if isinstance(value, tuple | list) and all(isinstance(one, str) for one in value):
        return ", ".join(value) or "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, "") else str(value)
