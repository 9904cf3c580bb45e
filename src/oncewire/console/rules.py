"""What the console says of what was found: rows for its tables, rates between two looks, what needs a person. Pure.

All that came from elsewhere goes through `shown`: bounded, and text that every JSON parser takes. That it is also
harmless in a page is the page's own work: it makes text nodes, never markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from oncewire._ground.contracts.subjects import READER_PREFIX
from oncewire._ground.contracts.topics import RECORDS, SNAPSHOTS, STREAM_PREFIXES
from oncewire._ground.metrics.histogram import SECONDS
from oncewire._ground.topology.model import Stream, Topology
from oncewire._ground.topology.rules import Found, FoundConsumer, FoundStream, Plan, Step, show
from oncewire.dlq.rules import DLQ, UNREAD

TEXT_CHARS_MAX: Final = 400
STREAMS_MAX: Final = 1_000
"""Streams that are shown; what goes beyond is counted."""
CONSUMERS_MAX: Final = 2_000


def shown(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Foreign text, bounded; bytes that were no UTF-8 become the sign for that."""
    cut = text if len(text) <= chars_max else f"{text[:chars_max]}…"
    return cut.encode("utf-8", "replace").decode("utf-8")


# ---- streams and consumers


class ConsumerRow(Struct, frozen=True, kw_only=True):
    name: str
    stream: str
    filters: tuple[str, ...]
    is_declared: bool
    is_unread: bool
    """Kept for tools: no process is expected to read it, so nothing is behind."""
    pending: int
    unacked: int
    redelivered: int
    waiting: int
    delivered: int
    acked: int
    deliveries: int
    rate: float = 0.0
    drift: str = ""


class StreamRow(Struct, frozen=True, kw_only=True):
    """`kind` is how it is used: stream, queue, bucket, topic. `drift` says in one line what is not as declared."""

    name: str
    kind: str
    is_declared: bool
    is_internal: bool
    is_there: bool
    description: str
    subjects: tuple[str, ...]
    messages: int = 0
    bytes: int = 0
    first: int = 0
    last: int = 0
    last_at: str = ""
    bytes_max: int = -1
    replicas: int = 1
    rate: float = 0.0
    drift: str = ""
    consumers: tuple[ConsumerRow, ...] = ()


class Look(Struct, frozen=True):
    """One look at the server, and when it was."""

    at_s: float
    found: Found


def rows(topology: Topology, look: Look, before: Look | None, plan: Plan) -> list[StreamRow]:
    """Declared streams in their order, then what else is there."""
    declared = {one.name: one for one in topology.streams}
    steps = {step.item: step for step in plan.steps}
    named = {(one.stream, one.name) for one in topology.consumers}
    made = [_row(name, one, look, before, steps, named) for name, one in declared.items()]
    strangers = sorted(look.found.strangers)
    made += [_row(name, None, look, before, steps, named) for name in strangers]
    return made[:STREAMS_MAX]


def _row(
    name: str,
    stream: Stream | None,
    look: Look,
    before: Look | None,
    steps: Mapping[str, Step],
    named: set[tuple[str, str]],
) -> StreamRow:
    there = _stream_in(look.found, name)
    was = _stream_in(before.found, name) if before else None
    passed_s = look.at_s - before.at_s if before else 0.0
    drift = drift_line(steps.get(f"stream:{name}"))
    facts: dict[str, Any] = {}
    if there is not None:
        facts = {
            "messages": there.messages,
            "bytes": there.bytes,
            "first": there.first,
            "last": there.last,
            "last_at": there.last_at,
            "bytes_max": there.config.get("max_bytes", -1),
            "replicas": there.config.get("num_replicas", 1),
            "rate": rate(was.last if was else there.last, there.last, passed_s),
            "consumers": tuple(_consumers(there, was, passed_s, steps, named)),
        }
    subjects = stream.subjects if stream else tuple(there.config.get("subjects") or ()) if there else ()
    return StreamRow(
        name=shown(name),
        kind=_kind(name, stream, there),
        is_declared=stream is not None,
        is_internal=bool(stream and stream.internal) or name.startswith((*STREAM_PREFIXES, "KV_", RECORDS, SNAPSHOTS)),
        is_there=there is not None,
        description=shown(stream.description if stream else (there.config.get("description") or "" if there else "")),
        subjects=tuple(shown(one) for one in subjects[:50]),
        drift=drift,
        **facts,
    )


def _stream_in(found: Found, name: str) -> FoundStream | None:
    return found.streams.get(name) or found.strangers.get(name)


def _kind(name: str, stream: Stream | None, there: FoundStream | None) -> str:
    if name.startswith("KV_") or (stream and stream.is_bucket):
        return "bucket"
    if stream is None and name.startswith(STREAM_PREFIXES):
        return "topic"
    retention = stream.retention if stream else (there.config.get("retention") if there else "")
    return "queue" if retention == "workqueue" else "stream"


def _consumers(
    there: FoundStream,
    was: FoundStream | None,
    passed_s: float,
    steps: Mapping[str, Step],
    named: set[tuple[str, str]],
) -> Iterable[ConsumerRow]:
    """Readers that keep no position are somebody's business for a moment: not shown."""
    missing = {name: FoundConsumer(name=name, config={}) for of, name in named if of == there.name}
    known = [
        one for name, one in sorted((missing | dict(there.consumers)).items()) if not name.startswith(READER_PREFIX)
    ]
    for one in known[:CONSUMERS_MAX]:
        old = was.consumers.get(one.name) if was else None
        yield ConsumerRow(
            name=shown(one.name),
            stream=there.name,
            filters=tuple(shown(each) for each in filters_of(one)[:50]),
            is_declared=(there.name, one.name) in named,
            is_unread=one.name in UNREAD,
            pending=one.pending,
            unacked=one.unacked,
            redelivered=one.redelivered,
            waiting=one.waiting,
            delivered=one.delivered,
            acked=one.acked,
            deliveries=one.deliveries,
            rate=rate(old.deliveries if old else one.deliveries, one.deliveries, passed_s),
            drift=drift_line(steps.get(f"consumer:{there.name}/{one.name}")),
        )


def filters_of(consumer: FoundConsumer) -> list[str]:
    single = consumer.config.get("filter_subject")
    return [single] if single else list(consumer.config.get("filter_subjects") or ())


def rate(before: int, now: int, passed_s: float) -> float:
    """Per second; 0 when the count went back, which is a new beginning."""
    return round(max(0, now - before) / passed_s, 1) if passed_s > 0 else 0.0


def drift_line(step: Step | None) -> str:
    """What is not as declared, in one line; '' when all is."""
    if step is None:
        return ""
    if not step.changes:
        return shown(step.cost or "is missing")
    told = [f"{one.key} is {show(one.key, one.found)}, not {show(one.key, one.declared)}" for one in step.changes]
    return shown("; ".join(told))


# ---- totals


class Totals(Struct, frozen=True, kw_only=True):
    """The figures at the top. Rates are per second and leave out buckets and what parts write for themselves; letters
    that nobody has looked at are no lag: they are counted apart. Nor is a lag that the broker does not know yet."""

    published: float
    delivered: float
    lag: int
    in_flight: int
    messages: int
    bytes: int
    letters: int
    answer_ms: float
    """How long the server took for a small request."""


def totals(streams: Sequence[StreamRow], topics: Sequence[Mapping[str, Any]], letters: int, ms: float) -> Totals:
    own = [one for one in streams if one.kind != "bucket" and not (one.is_internal and one.kind != "topic")]
    consumers = [each for one in streams if one.name != DLQ for each in one.consumers]
    groups = [group for topic in topics for group in topic.get("groups", ())]
    return Totals(
        published=round(sum(one.rate for one in own), 1),
        delivered=round(sum(one.rate for one in consumers), 1),
        lag=sum(consumer.pending for consumer in consumers if not consumer.is_unread)
        + sum(group["lag"] or 0 for group in groups),
        in_flight=sum(one.unacked for one in consumers) + sum(group["in_flight"] for group in groups),
        messages=sum(one.messages for one in own),
        bytes=sum(one.bytes for one in streams),
        letters=letters,
        answer_ms=round(ms, 2),
    )


# ---- latency

LATENCIES: Final = {
    "oncewire_relay_stored_seconds": "outbox row to stream",
    "oncewire_broker_produce_seconds": "produce to its answer",
    "oncewire_gateway_delivery_seconds": "stream to browsers",
}
"""Histograms of parts that `up` runs, and what each is from and to."""


class Latency(Struct, frozen=True, kw_only=True):
    """How long a part of the way took over the last while. Upper bounds of a histogram, so never too small."""

    name: str
    count: int
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None


def latencies(before: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> list[Latency]:
    """What was counted between two looks. A way that nobody took is there, without figures."""
    found = []
    for name, text in LATENCIES.items():
        if name in now:
            passed = [one - other for one, other in zip(now[name], before.get(name, [0] * len(now[name])), strict=True)]
            told = {f"p{q}_ms": quantile_ms(passed, q) for q in (50, 95, 99)}
            found.append(Latency(name=text, count=sum(passed), **told))
    return found


def quantile_ms(counts: Sequence[int], percent: int) -> float | None:
    """Between the bounds of its bucket, as Prometheus takes it; the last bucket has no end, and counts as its begin."""
    total = sum(counts)
    if total <= 0:
        return None
    wanted, below = total * percent / 100, 0
    for at, count in enumerate(counts):
        if count and below + count >= wanted:
            low = SECONDS[at - 1] if at else 0.0
            high = SECONDS[at] if at < len(SECONDS) else low
            return round((low + (high - low) * (wanted - below) / count) * 1000, 2)
        below += count
    return None


# ---- what needs a person


class Notice(Struct, frozen=True, kw_only=True):
    """One thing to look at: `level` is broken or warning, `command` what to type, `link` where to look."""

    level: str
    title: str
    text: str
    command: str = ""
    link: str = ""


_TROUBLES: Final = {"missing": "is missing", "filling": "is filling", "drift": "is not as declared"}


def of_problem(item: str, trouble: str, text: str, remedy: str) -> Notice:
    """A problem of the topology."""
    name = item.partition(":")[2] or item
    stream = name.partition("/")[0]
    level = "broken" if trouble in ("missing", "jetstream") else "warning"
    return Notice(
        level=level,
        title=shown(f"{name} {_TROUBLES.get(trouble, trouble)}"),
        text=shown(text.removeprefix("is not as declared: ")),
        command=command_in(remedy),
        link=f"/streams/{stream}",
    )


def command_in(remedy: str) -> str:
    """The command that a remedy names between backticks, '' when it names none."""
    parts = remedy.split("`")
    return parts[1] if len(parts) > 2 else ""
