"""Reads gold for the report, without Spark: the tables are small, or are read row by row."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from oncewire._ground.errors import NotFound
from oncewire.pipeline import tables
from oncewire.pipeline.auditing.run import last_verdicts
from oncewire.pipeline.gold.tables import CONSUMERS, DEAD_LETTERS, HEALTH, RUNS, STEPS, THROUGHPUT, USAGE
from oncewire.pipeline.lake.place import Place
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.report import rules
from oncewire.pipeline.report.rules import Content, Lineage

MINUTE: Final = timedelta(minutes=1)
VERDICTS_MAX: Final = 30
DAYS: Final = 7


def content(lake: str | Path | Place, made_at: datetime, *, run: str = "", days: int = DAYS) -> Content:
    """All that the page shows: the last days that the lake knows, and one run (the one given, or the longest of them
    all)."""
    health = rows(lake, HEALTH)
    newest = max((row["window_start"] for row in health), default=made_at)
    since = newest - timedelta(days=days)
    health = [row for row in health if row["window_start"] > since]
    axis = rules.axis_of((row["window_start"] for row in health), MINUTE)
    consumers = [row for row in rows(lake, CONSUMERS) if row["window_start"] > since]
    letters = [row for row in rows(lake, DEAD_LETTERS) if row["window_start"] > since]
    lineage, count = _lineage(lake, run)
    return Content(
        str(lake),
        made_at,
        axis,
        rules.throughput(health, axis) if axis else [],
        rules.latency(health, axis) if axis else [],
        rules.stream_lines(health, axis) if axis else [],
        rules.consumer_lines(consumers),
        rules.causes(letters),
        rules.letter_lines(letters),
        lineage,
        rules.usage_lines(rows(lake, USAGE)),
        last_verdicts(lake, VERDICTS_MAX),
        count,
        topics=rules.topic_lines([row for row in rows(lake, THROUGHPUT) if row["window_start"] > since]),
    )


def rows(lake: str | Path | Place, table: Table) -> list[dict[str, Any]]:
    """All rows of a small table; none when there is no such table yet."""
    return [row for batch in _batches(lake, table) for row in batch.to_pylist()]


def _batches(lake: str | Path | Place, table: Table, where: Any = None) -> Iterator[Any]:
    try:
        opened = tables.open_table(lake, table.name)
    except NotFound:
        return
    for batch in tables.dataset(opened).to_batches():
        # Not by the dataset: it takes columns without statistics in the log for empty, and skips their files.
        yield from [batch] if where is None else pa.Table.from_batches([batch]).filter(where).to_batches()


def _lineage(lake: str | Path | Place, wanted: str) -> tuple[Lineage | None, int]:
    """The run to show, and how many there are with more than one step."""
    import pyarrow.compute as pc

    count = 0
    best: list[tuple[float, int, str, dict[str, Any]]] = []
    for batch in _batches(lake, RUNS, pc.field("steps") > 1):
        for row in batch.to_pylist():
            count += 1
            if not wanted or row["run"] == wanted:
                heapq.heappush(best, (row["steps"], count, row["run"], row))
                if len(best) > 1:
                    heapq.heappop(best)
    if not best:
        if wanted:
            raise NotFound(f"gold/runs has no run {wanted} with more than one step")
        return None, count
    run = best[0][3]
    where = (pc.field("run") == run["run"]) & (pc.field("tenant") == run["tenant"])
    steps = [row for batch in _batches(lake, STEPS, where) for row in batch.to_pylist()]
    return Lineage(run, in_order(steps)[: rules.STEPS_SHOWN]), count


def newest_runs(lake: str | Path | Place, most: int) -> list[dict[str, Any]]:
    """Those with more than one step that began last, the newest first."""
    import pyarrow.compute as pc

    found = (row for batch in _batches(lake, RUNS, pc.field("steps") > 1) for row in batch.to_pylist())
    return heapq.nlargest(most, found, key=lambda row: row["started_at"])


def one_run(lake: str | Path | Place, run: str, tenant: str) -> Lineage:
    """One run with all its steps, each behind its parent."""
    import pyarrow.compute as pc

    where = (pc.field("run") == run) & (pc.field("tenant") == tenant)
    for batch in _batches(lake, RUNS, where):
        for row in batch.to_pylist():
            steps = [step for part in _batches(lake, STEPS, where) for step in part.to_pylist()]
            return Lineage(row, in_order(steps))
    raise NotFound(f"gold/runs has no run {run[:80]!r}")


def in_order(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step behind its parent, with all that follows from it, in order of time."""
    by_parent: dict[str | None, list[dict[str, Any]]] = {}
    known = {step["step"] for step in steps}
    for step in sorted(steps, key=lambda one: (one["at"], one["sequence"])):
        parent = step["parent"] if step["parent"] in known and step["parent"] != step["step"] else None
        by_parent.setdefault(parent, []).append(step)
    ordered: list[dict[str, Any]] = []
    waiting = by_parent.pop(None, [])[::-1]
    while waiting:
        step = waiting.pop()
        ordered.append(step)
        waiting += by_parent.pop(step["step"], [])[::-1]
    return ordered
