"""What the report shows, put together from rows of gold. Pure: rows in, a page's content out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from oncewire.pipeline.auditing.verdict import Verdict

POINTS_MAX: Final = 180
"""So many intervals a plot has at most; minutes are put together until they fit."""
STREAMS_MAX: Final = 6
"""Streams that a plot tells apart; the rest is one line."""
STEPS_SHOWN: Final = 60
OTHERS: Final = "others"


@dataclass(frozen=True)
class Series:
    """A line: a name and one value per interval, None where there is nothing to say."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Axis:
    """Intervals of equal length."""

    start: datetime
    step: timedelta
    count: int

    def at(self, number: int) -> datetime:
        return self.start + number * self.step

    def place(self, when: datetime) -> int:
        return int((when - self.start) / self.step)


@dataclass(frozen=True)
class StreamLine:
    """A stream in the table."""

    stream: str
    messages: int
    peak_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    rates: tuple[float | None, ...]


@dataclass(frozen=True)
class Lineage:
    """One run."""

    run: dict[str, Any]
    steps: list[dict[str, Any]]


@dataclass(frozen=True)
class Content:
    """Everything that the page shows."""

    lake: str
    made_at: datetime
    axis: Axis | None
    throughput: list[Series]
    latency: list[Series]
    streams: list[StreamLine]
    consumers: list[dict[str, Any]]
    causes: list[tuple[str, int]]
    letters: list[dict[str, Any]]
    lineage: Lineage | None
    usage: list[dict[str, Any]]
    verdicts: list[Verdict]
    runs: int = 0
    notes: list[str] = field(default_factory=list)
    topics: list[dict[str, Any]] = field(default_factory=list)


def axis_of(windows: Iterable[datetime], window: timedelta) -> Axis | None:
    """Intervals that cover all windows, few enough for a plot."""
    found = list(windows)
    if not found:
        return None
    start, end = min(found), max(found) + window
    whole = round((end - start) / window)
    step = window * -(-whole // POINTS_MAX)
    return Axis(start, step, -(-(end - start) // step))


def throughput(rows: Sequence[dict[str, Any]], axis: Axis) -> list[Series]:
    """Messages a second by stream, the busiest first; 0 where nothing came."""
    totals = _totals(rows)
    names = sorted(totals, key=lambda name: (-totals[name], name))
    shown = names if len(names) <= STREAMS_MAX + 1 else names[:STREAMS_MAX]
    counts: dict[str, list[float]] = {name: [0.0] * axis.count for name in shown}
    if len(shown) < len(names):
        counts[OTHERS] = [0.0] * axis.count
    for row in rows:
        name = row["stream"] if row["stream"] in counts else OTHERS
        counts[name][axis.place(row["window_start"])] += row["messages"] / axis.step.total_seconds()
    return [Series(name, tuple(values)) for name, values in counts.items()]


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in rows:
        totals[row["stream"]] = totals.get(row["stream"], 0) + row["messages"]
    return totals


def latency(rows: Sequence[dict[str, Any]], axis: Axis) -> list[Series]:
    """The worst minute of each interval, over all streams: percentiles cannot be averaged."""
    made = []
    for name, key in (("p50", "p50_ms"), ("p95", "p95_ms"), ("p99", "p99_ms")):
        values: list[float | None] = [None] * axis.count
        for row in rows:
            at = axis.place(row["window_start"])
            known = values[at]
            values[at] = row[key] if known is None else max(known, row[key])
        made.append(Series(name, tuple(values)))
    return made


def stream_lines(rows: Sequence[dict[str, Any]], axis: Axis) -> list[StreamLine]:
    """One line per stream. The percentiles are those of its worst minute."""
    by_stream: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_stream.setdefault(row["stream"], []).append(row)
    lines = []
    for stream, part in by_stream.items():
        [rates] = [one.values for one in throughput(part, axis)]
        worst = {key: max(row[key] for row in part) for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms")}
        messages, peak = sum(row["messages"] for row in part), max(row["per_s"] for row in part)
        lines.append(StreamLine(stream, messages, peak, rates=rates, **worst))
    return sorted(lines, key=lambda one: (-one.messages, one.stream))


def consumer_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts by stream and consumer."""
    names = ("done", "duplicate", "terminated", "dead", "passed", "given_up", "redeliveries")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        place = (row["stream"], row["consumer"])
        line = found.setdefault(place, {"stream": place[0], "consumer": place[1]} | dict.fromkeys(names, 0))
        for name in names:
            line[name] += row[name]
    return sorted(found.values(), key=lambda one: (one["stream"], one["consumer"]))


def causes(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    found: dict[str, int] = {}
    for row in rows:
        found[row["cause"]] = found.get(row["cause"], 0) + row["letters"]
    return sorted(found.items(), key=lambda one: (-one[1], one[0]))


def letter_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Letters by stream, consumer and cause, with the newest error."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda one: one["window_start"]):
        place = (row["stream"], row["consumer"], row["cause"])
        line = found.setdefault(place, dict(zip(("stream", "consumer", "cause"), place, strict=True)) | {"letters": 0})
        line["letters"] += row["letters"]
        line["last_error"] = row["last_error"]
    return sorted(found.values(), key=lambda one: (-one["letters"], one["cause"]))


def usage_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums by tenant, meter and unit."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        place = (row["tenant"], row["meter"] or "", row["unit"] or "")
        line = found.setdefault(
            place,
            dict(zip(("tenant", "meter", "unit"), place, strict=True))
            | {"quantity": 0, "late_quantity": 0, "events": 0, "late_events": 0, "windows": 0},
        )
        for name in ("quantity", "late_quantity", "events", "late_events"):
            line[name] += row[name] or 0
        line["windows"] += 1
    return [found[place] for place in sorted(found)]


TOPICS_SHOWN: Final = 50


def topic_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Topics with what their producers stored, and a line for each group, the busiest topics first."""
    counts = ("produced", "settled", "dead", "failed")
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    totals: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row["tenant"], row["topic"], row["group"])
        empty = dict.fromkeys(counts, 0) | {"p50_ms": None, "p95_ms": None}
        line = lines.setdefault(key, {"tenant": key[0], "topic": key[1], "group": key[2]} | empty)
        for name in counts:
            line[name] += row[name]
        for name in ("p50_ms", "p95_ms"):
            line[name] = max((one for one in (line[name], row[name]) if one is not None), default=None)
        totals[key[:2]] = totals.get(key[:2], 0) + row["produced"] + row["settled"]
    return [lines[key] for key in sorted(lines, key=lambda key: (-totals[key[:2]], key))][:TOPICS_SHOWN]
