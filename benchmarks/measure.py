"""How benchmarks here compare: the contenders take turns in one run, and the answer is a ratio with its spread.

The machine is shared and noisy, so no figure stands alone: each round runs every contender once, the ratio is taken
within the round, and the table shows the median over the rounds with the smallest and the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence

Runs = Mapping[str, Sequence[float]]
"""By contender: one figure per round (a rate: more is better)."""


async def take_turns(contenders: Mapping[str, Callable[[], Awaitable[float]]], rounds: int) -> dict[str, list[float]]:
    """Run every contender once per round, the order turned round by round."""
    runs: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            runs[name].append(await contenders[name]())
    return runs


def ratio(runs: Runs, name: str, beside: str) -> tuple[float, float, float]:
    """Median, smallest and largest ratio of `name` to `beside`, taken round by round."""
    ratios = [ours / theirs for ours, theirs in zip(runs[name], runs[beside], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def table(title: str, runs: Runs, beside: str, unit: str = "/s") -> str:
    """Each contender's median figure and its ratio to the yardstick."""
    lines = [title]
    width = max(len(name) for name in runs)
    for name, figures in runs.items():
        middle, low, high = ratio(runs, name, beside)
        shown = "the yardstick" if name == beside else f"{middle:.2f}× ({low:.2f}–{high:.2f})"
        lines.append(f"  {name:<{width}}  {statistics.median(figures):>12,.0f}{unit}  {shown}")
    return "\n".join(lines)


def verdict(what: str, measured: float, wanted: float) -> str:
    """One line that says whether the figure is reached, either way."""
    return f"  {'reached' if measured >= wanted else 'NOT REACHED'}: {what} {measured:.2f}× (wanted {wanted}×)"
