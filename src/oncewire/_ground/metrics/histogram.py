"""How often something took how long. Fixed bounds, so that histograms of many processes add up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""From what a local round trip takes to what a person would call an outage."""


class Histogram:
    """Counts by upper bound; the last one has none."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """It took so long, for so many at once. Clocks of two machines may differ: before zero is zero."""
        if seconds < 0:
            seconds = 0.0
        self.counts[bisect_left(SECONDS, seconds)] += times
        self.sum += seconds * times

    def observe_all(self, many: Iterable[float]) -> None:
        counts, total = self.counts, 0.0
        for seconds in many:
            counts[bisect_left(SECONDS, seconds)] += 1
            total += seconds
        self.sum += max(0.0, total)

    def cumulative(self) -> list[tuple[str, int]]:
        """Each bound as Prometheus writes it, with the count up to it."""
        total, found = 0, []
        for bound, count in zip((*map(_shown, SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


def _shown(bound: float) -> str:
    return f"{bound:g}"
