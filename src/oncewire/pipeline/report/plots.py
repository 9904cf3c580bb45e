"""Plots as SVG text: lines, bars, and the steps of a run. Colours come from the page's style, so both themes fit.

Pure. Every plot has a name for those who cannot see it; its numbers stand in a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Any, Final

from oncewire.pipeline.report.rules import Axis, Series

WIDTH: Final = 860
HEIGHT: Final = 260
LEFT: Final = 64
RIGHT: Final = 12
TOP: Final = 12
BOTTOM: Final = 30
TICKS: Final = 4
BAR: Final = 30
STEP: Final = 26


def short(value: float) -> str:
    """A number for an axis or a table."""
    if value == 0:
        return "0"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def duration(ms: float) -> str:
    if abs(ms) >= 60_000:
        return f"{ms / 60_000:.3g} min"
    return f"{ms / 1000:.3g} s" if abs(ms) >= 1000 else f"{ms:.3g} ms"


def nice_top(value: float) -> float:
    """The end of an axis, so that its quarters are round numbers."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return float(
        next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if value <= step * power * (1 + 1e-9))
    )


def _frame(name: str, height: int, body: str, kind: str = "img") -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="{kind}" aria-label="{escape(name)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def lines(name: str, axis: Axis, series: Sequence[Series], show: Callable[[float], str] = short) -> str:
    """Lines over time, from zero."""
    top = nice_top(max((value or 0 for one in series for value in one.values), default=0))
    body = _grid(top, show) + _times(axis)
    for number, one in enumerate(series):
        body += _line(axis, one, number, top, show)
    return _frame(name, HEIGHT, body)


def _x(axis: Axis, number: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * ((number + 0.5) / axis.count)


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)


def _grid(top: float, show: Callable[[float], str]) -> str:
    made = ""
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        y = _y(value, top)
        made += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        made += f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(show(value))}</text>'
    return made


def _times(axis: Axis) -> str:
    form = "%H:%M" if axis.step * axis.count <= timedelta(days=1) else "%d %b %H:%M"
    count = min(6, axis.count)
    made = ""
    for tick in range(count):
        number = round(tick * (axis.count - 1) / max(1, count - 1))
        anchor = "middle" if 0 < tick < count - 1 or count == 1 else "start" if tick == 0 else "end"
        x = _x(axis, number)
        made += (
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{axis.at(number):{form}}</text>'
        )
    return made


def _line(axis: Axis, one: Series, number: int, top: float, show: Callable[[float], str]) -> str:
    made, path, is_open = "", "", False
    for at, value in enumerate(one.values):
        if value is None:
            is_open = False
            continue
        x, y = _x(axis, at), _y(value, top)
        path += f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}"
        alone = not is_open and (at + 1 == len(one.values) or one.values[at + 1] is None)
        is_open = True
        told = f"<title>{escape(one.name)} {axis.at(at):%H:%M} · {escape(show(value))}</title>"
        made += f'<circle class="{"dot" if alone else "hit"} s{number}" cx="{x:.1f}" cy="{y:.1f}" r="4">{told}</circle>'
    return f'<path class="line s{number}" d="{path}"/>{made}'


def spark(values: Sequence[float | None]) -> str:
    """A line without words, for a table."""
    top = max((value or 0 for value in values), default=0) or 1
    count = max(1, len(values) - 1)
    points = " ".join(
        f"{1 + 98 * at / count:.1f},{23 - 21 * (value or 0) / top:.1f}" for at, value in enumerate(values)
    )
    if len(values) == 1:
        points += f" 99,{23 - 21 * (values[0] or 0) / top:.1f}"
    return (
        '<svg class="spark" viewBox="0 0 100 24" aria-hidden="true" preserveAspectRatio="none">'
        f'<polyline points="{points}"/></svg>'
    )


def bars(name: str, counts: Sequence[tuple[str, int]]) -> str:
    """Horizontal bars with their words inside the plot."""
    top = max((count for _, count in counts), default=1) or 1
    label, room = 240, 70
    body = ""
    for number, (word, count) in enumerate(counts):
        y = number * BAR + 4
        width = max(2.0, (WIDTH - label - room) * count / top)
        shown = word if len(word) <= 32 else f"{word[:31]}…"
        body += (
            f'<text class="word" x="{label - 10}" y="{y + 16}" text-anchor="end">{escape(shown)}</text>'
            f'<rect class="bar" x="{label}" y="{y}" width="{width:.1f}" height="{BAR - 8}" rx="4">'
            f"<title>{escape(word)}: {count:,}</title></rect>"
            f'<text class="count" x="{label + width + 8:.1f}" y="{y + 16}">{count:,}</text>'
        )
    return _frame(name, len(counts) * BAR + 4, body)


def run_steps(name: str, steps: Sequence[dict[str, Any]], started: datetime, duration_ms: float) -> str:
    """Each step as a bar from when its parent was there to when it was; the critical path stands out."""
    label, room = 250, 90
    scale = (WIDTH - label - room) / max(duration_ms, 1e-3)
    body = ""
    for number, step in enumerate(steps):
        y = number * STEP + 6
        end_ms = (step["at"] - started) / timedelta(milliseconds=1)
        x = label + max(0.0, end_ms - step["wait_ms"]) * scale
        width = max(3.0, step["wait_ms"] * scale)
        indent = 8 + 14 * min(step["depth"], 8)
        room_chars = max(8, 30 - 2 * min(step["depth"], 8))
        word = step["type"] or step["subject"]
        shown = word if len(word) <= room_chars else f"{word[: room_chars - 1]}…"
        kind = "step critical" if step["is_critical"] else "step"
        told = f"{word} on {step['subject']}, {duration(step['wait_ms'])} after its cause"
        again = f" · {step['retries']} retries" if step["retries"] else ""
        x = min(x, WIDTH - room - 3)
        body += (
            f'<line class="grid" x1="{label}" x2="{WIDTH - room}" y1="{y + 20}" y2="{y + 20}"/>'
            f'<text class="word" x="{indent}" y="{y + 13}">{"└ " if step["depth"] else ""}{escape(shown)}</text>'
            f'<rect class="{kind}" x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="14" rx="3">'
            f"<title>{escape(told)}{escape(again)}</title></rect>"
            f'<text class="count" x="{min(x + width + 6, WIDTH - room + 6):.1f}" y="{y + 13}">'
            f"{duration(end_ms)}{escape(again)}</text>"
        )
    return _frame(name, len(steps) * STEP + 8, body)
