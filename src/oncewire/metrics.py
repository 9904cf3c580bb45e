"""Counters and gauges of a process, as Prometheus reads them (text format 0.0.4).

A registry is made by whoever runs a part and handed to it; there is no global one. `write` puts the text into a file
for a textfile collector, whole or not at all. The number of series is bounded: a label whose values never end would
fill the memory, so what comes after the limit is added up under `other`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SERIES_MAX: Final = 1_000
OTHER: Final = "other"
_NAME = re.compile(r"[a-z][a-z0-9_]*")

Labels = tuple[tuple[str, str], ...]


class Metric:
    """One name with its help and its series."""

    def __init__(self, name: str, kind: str, about: str) -> None:
        assert _NAME.fullmatch(name), name
        self.name = name
        self.kind = kind
        self.about = about
        self._series: dict[Labels, float] = {}

    def add(self, value: float = 1, /, **labels: str) -> None:
        """For counters."""
        key = self._key(labels)
        self._series[key] = self._series.get(key, 0) + value

    def set(self, value: float, /, **labels: str) -> None:
        """For gauges, and for counters that somebody else counts."""
        self._series[self._key(labels)] = value

    def replace(self, values: Mapping[Labels, float]) -> None:
        """All series of a gauge anew: what is not in `values` is gone."""
        self._series = {}
        for labels, value in values.items():
            self.set(value, **dict(labels))

    def value(self, **labels: str) -> float:
        return self._series.get(tuple(sorted(labels.items())), 0)

    def _key(self, labels: Mapping[str, str]) -> Labels:
        key = tuple(sorted(labels.items()))
        if key in self._series or len(self._series) < SERIES_MAX:
            return key
        return tuple((name, OTHER) for name, _ in key)

    def lines(self) -> list[str]:
        head = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"]
        return head + [
            f"{self.name}{_shown(labels)} {_number(value)}" for labels, value in sorted(self._series.items())
        ]


class Registry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, about: str) -> Metric:
        return self._metrics.setdefault(name, Metric(name, "counter", about))

    def gauge(self, name: str, about: str) -> Metric:
        return self._metrics.setdefault(name, Metric(name, "gauge", about))

    def text(self) -> str:
        return "".join(f"{line}\n" for metric in self._metrics.values() for line in metric.lines())

    def write(self, path: Path) -> None:
        """Replace the file; readers see the old text or the new one."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(self.text(), "utf-8")
        beside.replace(path)


def _shown(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _number(value: float) -> str:
    """In full: a counter that is rounded to six digits stands still for hours."""
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
