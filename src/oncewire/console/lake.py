"""The pipeline's side: how the lake stands, its last verdict, its lineage, its report. Read in a thread, by the
pipeline's own functions, and only when one of its tables has a new version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from oncewire._ground.errors import NotFound
from oncewire.console import rules
from oncewire.pipeline.lake.place import Place

RUNS_MAX: Final = 200
STEPS_MAX: Final = 500
FINDINGS_MAX: Final = 20

Standing = Callable[[], dict[str, Any]]
"""What `oncewire pipeline status --json` says. Blocks."""


class LakeSide:
    """`standing` is given by who knows the settings."""

    def __init__(self, place: Place, standing: Standing) -> None:
        self.place = place
        self._standing = standing
        self._seen: object = None
        self.told: dict[str, Any] | None = None

    async def is_there(self) -> bool:
        return await asyncio.to_thread(lambda: (self.place / "bronze").has_table)

    async def has_runs(self) -> bool:
        return await asyncio.to_thread(lambda: (self.place / "gold/runs").has_table)

    async def look(self) -> None:
        """Once more, if anything has changed since."""
        seen = await asyncio.to_thread(self.place.stamp)
        if seen == self._seen and self.told is not None:
            return
        if not await self.is_there():
            self.told = None
            return
        self.told = await asyncio.to_thread(self._tell)
        self._seen = seen

    def forget(self) -> None:
        self._seen = None

    def _tell(self) -> dict[str, Any]:
        from oncewire.pipeline.auditing.run import last_verdicts
        from oncewire.pipeline.auditing.verdict import CHECKS
        from oncewire.pipeline.lake import hold

        told = self._standing()
        told["held_by"] = hold.shown(told["held_by"])
        for one in last_verdicts(self.place):
            told["verdict"] = {
                "is_good": one.is_good, "at_ms": one.at_ms, "took_s": one.took_s, "errors": one.errors,
                "pending": one.pending, "cut": sum(stop.sequence for stop in one.cut), "streams": len(one.cut),
                "chains": len(one.chains),
                "checks": [
                    {"promise": promise, "wrong": sum(1 for each in one.findings if each.check == name)}
                    for name, promise in CHECKS.items()
                ],
                "findings": [rules.shown(each.sentence) for each in one.findings[:FINDINGS_MAX]],
            }  # fmt: skip
        latency = self._latency()
        return told | ({"latency": latency} if latency else {})

    def _latency(self) -> dict[str, Any] | None:
        """How long events took into their streams, over the newest minutes that gold knows."""
        from oncewire.pipeline.gold.tables import HEALTH
        from oncewire.pipeline.report.read import rows

        found = rows(self.place, HEALTH)
        if not found:
            return None
        newest = max(row["window_start"] for row in found)
        last = [row for row in found if row["window_start"] == newest]
        names = ("p50_ms", "p95_ms", "p99_ms")
        worst = {name: max((row[name] for row in last if row.get(name) is not None), default=None) for name in names}
        return {"at_ms": int(newest.timestamp() * 1000), **worst} if any(worst.values()) else None

    # ---- lineage

    async def runs(self) -> list[dict[str, Any]]:
        from oncewire.pipeline.report.read import newest_runs

        found = await asyncio.to_thread(newest_runs, self.place, RUNS_MAX)
        return [run_row(row) for row in found]

    async def run(self, tenant: str, run: str) -> dict[str, Any]:
        from oncewire.pipeline.report.read import one_run

        found = await asyncio.to_thread(one_run, self.place, run, tenant)
        return {"run": run_row(found.run), "steps": [step_row(one) for one in found.steps[:STEPS_MAX]]}

    async def report(self) -> str:
        if not await self.is_there():
            raise NotFound(f"there is no lake {self.place}", hint="`oncewire pipeline run --once` makes one.")
        return await asyncio.to_thread(self._page)

    def _page(self) -> str:
        from oncewire.pipeline.report.page import page
        from oncewire.pipeline.report.read import content

        return page(content(self.place, datetime.now(UTC)))


def run_row(row: dict[str, Any]) -> dict[str, Any]:
    """A run of gold as the page has it."""
    return {
        "tenant": rules.shown(row["tenant"]), "run": rules.shown(row["run"]), "steps": row["steps"],
        "started_ms": _ms(row["started_at"]), "duration_ms": row["duration_ms"], "depth": row["depth"],
        "retries": row["retries"], "critical_ms": row["critical_ms"], "is_cut": row["is_cut"],
    }  # fmt: skip


def step_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": rules.shown(row["step"]), "parent": rules.shown(row["parent"] or ""), "type": rules.shown(row["type"]),
        "subject": rules.shown(row["subject"]), "stream": row["stream"], "sequence": row["sequence"],
        "at_ms": _ms(row["at"]), "wait_ms": row["wait_ms"], "depth": row["depth"], "retries": row["retries"],
        "is_critical": row["is_critical"],
    }  # fmt: skip


def _ms(at: datetime) -> float:
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000
