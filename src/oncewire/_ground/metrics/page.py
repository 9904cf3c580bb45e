"""One scrape: figures under their declared names, and the text that Prometheus reads.

A name or a label that the table does not have is a bug of ours. The number of series is bounded: a label whose values
never end (topics and groups, which clients name) would fill the memory of whoever scrapes, so what comes after the
limit is added up under `other`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Final

from oncewire._ground.metrics.histogram import Histogram
from oncewire._ground.metrics.table import TABLE, Kind, Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SERIES_MAX: Final = 1_000
OTHER: Final = "other"

_LINE: Final = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(?<![a-z_])([a-z_]++)="((?:[^"\\]|\\.)*)"')

Labels = tuple[str, ...]
"""Values, in the order of the declared names."""


class Tally:
    """Counters by label values that others choose; bounded like a page, since it lives as long as the process."""

    def __init__(self, names: int, series_max: int = SERIES_MAX) -> None:
        self._other = (OTHER,) * names
        self._max = series_max
        self.counts: Counter[Labels] = Counter()

    def add(self, *values: str, times: int = 1) -> None:
        is_there = values in self.counts or len(self.counts) < self._max
        self.counts[values if is_there else self._other] += times


class Page:
    """Filled by the parts of a process, then shown."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, float | Histogram]] = {}

    def put(self, name: str, value: float, /, **labels: str) -> None:
        """A counter or gauge. A label that is declared and left out is empty, which Prometheus takes for absent."""
        metric = TABLE[name]
        assert metric.kind is not Kind.HISTOGRAM, name
        series = self._series.setdefault(name, {})
        key = _key(metric, labels)
        if key not in series and len(series) >= SERIES_MAX:
            key = (OTHER,) * len(key)
            value += series.get(key, 0)  # type: ignore[operator]
        series[key] = value

    def put_all(self, name: str, tally: Tally, /) -> None:
        """A counter by its declared labels."""
        for values, count in tally.counts.items():
            self.put(name, count, **dict(zip(TABLE[name].labels, values, strict=True)))

    def put_text(self, text: str, prefix: str) -> None:
        """Counters and gauges with this prefix, from the page of another process of ours."""
        for line in text.splitlines():
            found = _LINE.fullmatch(line) if line.startswith(prefix) else None
            if found is not None:
                name, labels, value = found.groups()
                told = {key: _unescaped(one) for key, one in _LABEL.findall(labels or "")}
                self.put(name, float(value), **told)

    def histogram(self, name: str, found: Histogram, /, **labels: str) -> None:
        metric = TABLE[name]
        assert metric.kind is Kind.HISTOGRAM, name
        self._series.setdefault(name, {})[_key(metric, labels)] = found

    def counts(self) -> dict[str, list[int]]:
        """Of each histogram, over all its labels."""
        found: dict[str, list[int]] = {}
        for name, series in self._series.items():
            each = [one.counts for one in series.values() if isinstance(one, Histogram)]
            if each:
                found[name] = [sum(counts) for counts in zip(*each, strict=True)]
        return found

    def text(self) -> str:
        return "".join(
            f"{line}\n" for name, series in sorted(self._series.items()) for line in _lines(TABLE[name], series)
        )

    def write(self, path: Path) -> None:
        """For a textfile collector: readers see the old text or the new one."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(self.text(), "utf-8")
        beside.replace(path)


def _key(metric: Metric, labels: dict[str, str]) -> Labels:
    unknown = labels.keys() - set(metric.labels)
    assert not unknown, f"{metric.name} has no label {unknown}"
    return tuple(labels.get(name, "") for name in metric.labels)


def _lines(metric: Metric, series: dict[Labels, float | Histogram]) -> list[str]:
    found = [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
    for values, one in sorted(series.items(), key=lambda item: item[0]):
        labels = dict(zip(metric.labels, values, strict=True))
        if isinstance(one, Histogram):
            found += [
                f"{metric.name}_bucket{_shown(labels | {'le': bound})} {count}" for bound, count in one.cumulative()
            ]
            found.append(f"{metric.name}_sum{_shown(labels)} {_number(one.sum)}")
            found.append(f"{metric.name}_count{_shown(labels)} {sum(one.counts)}")
        else:
            found.append(f"{metric.name}{_shown(labels)} {_number(one)}")
    return found


def _shown(labels: dict[str, str]) -> str:
    told = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()) if value)
    return f"{{{told}}}" if told else ""


def _number(value: float) -> str:
    """In full: a counter that is rounded to six digits stands still for hours."""
    return str(int(value)) if value == int(value) else repr(value)


def _unescaped(value: str) -> str:
    return value.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
