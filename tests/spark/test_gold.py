"""Gold: each table beside an answer that was computed by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

from oncewire.pipeline.gold import frames
from oncewire.pipeline.gold.refresh import Gold
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.report.page import page
from oncewire.pipeline.report.read import content
from oncewire.pipeline.tables import GOLD, SILVER, open_table
from tests.support.lakes import FakeAgent
from tests.support.lakes import Lake as Made

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2026, 11, 10, 12, tzinfo=UTC)
METERED = "platform.billing.usage.metered"


class Rows:
    """Rows of silver, made by hand."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SILVER}

    def add(self, family: str, at: datetime, **columns: Any) -> None:
        number = len(self.rows[family]) + 1
        basis = {"tenant": "acme", "stream": "S", "created_ns": 1, "incarnation": 0, "sequence": number}
        basis |= {
            "subject": "s",
            "timestamp": at,
            "event_time": at,
            "key": number.to_bytes(16, "big"),
            "id": f"m{number}",
        }
        self.rows[family].append(basis | columns)

    def frames(self, spark: SparkSession) -> dict[str, DataFrame]:
        return {
            name: spark.createDataFrame(pa.Table.from_pylist(rows, SILVER[name].schema))
            for name, rows in self.rows.items()
        }


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def listed(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.select(*columns).collect())


@pytest.fixture(scope="module")
def silver(spark: SparkSession) -> dict[str, DataFrame]:
    rows = Rows()
    usage(rows)
    runs(rows)
    deliveries(rows)
    return rows.frames(spark)


def meter(rows: Rows, at: datetime, used: datetime, quantity: float | str, identity: str, **columns: Any) -> None:
    body = {
        "tenant_id": "acme", "resource_id": "gpu-1", "meter": "gpu_hours", "quantity": quantity, "unit": "h",
        "period_start": used.isoformat(), "period_end": (used + seconds(60)).isoformat(),
    }  # fmt: skip
    told = {"identity": identity, "digest": identity.encode().ljust(32), "payload": msgspec.json.encode(body).decode()}
    rows.add("message", at, subject=METERED, stream="BILLING", **{**told, **columns})


def usage(rows: Rows) -> None:
    """Two in the hour of noon, one in the next; twenty days later one more for noon, and an edit of the second."""
    meter(rows, NOON + seconds(10), NOON, 1.5, "id:a")
    meter(rows, NOON + seconds(20), NOON + seconds(10), 2, "id:b")
    meter(rows, NOON + seconds(4000), NOON + seconds(3700), 8, "id:c")
    late = NOON + timedelta(days=20)
    meter(rows, late, NOON + seconds(30), 0.25, "id:d")
    edited = {"digest": b"edited".ljust(32), "replaces": b"id:b".ljust(32).hex()}
    meter(rows, late, NOON + seconds(10), 3, "id:b", **edited)


def test_usage_is_summed_by_identity_in_the_hour_of_use(silver: dict[str, DataFrame]) -> None:
    """1.5 + 3 (instead of 2) + 0.25 at noon, where the last two came late; 8 an hour later."""
    columns = ("tenant", "meter", "window_start", "quantity", "events", "late_events", "late_quantity")
    naive = NOON.replace(tzinfo=None)
    assert [
        ("acme", "gpu_hours", naive, Decimal("4.75"), 3, 2, Decimal("3.25")),
        ("acme", "gpu_hours", naive + seconds(3600), Decimal(8), 1, 0, Decimal(0)),
    ] == listed(frames.usage(silver), *columns)


def runs(rows: Rows) -> None:
    """a causes b and c at 100 and 300 ms, c causes d 500 ms later; b was given up at its third delivery."""
    told = [("a", None, 0.0), ("b", "a", 0.1), ("c", "a", 0.3), ("d", "c", 0.8)]
    for at, (step, parent, later) in enumerate(told, 1):
        rows.add(
            "runtime", NOON + seconds(later), stream="EVENTS", sequence=at, id=step, causation_id=parent, type=step,
            correlation_id="a" if parent else None,
        )  # fmt: skip
    rows.add("letter", NOON, origin_stream="EVENTS", origin_created_ns=1, origin_sequence=2, deliveries=3,
             consumer="biller_consumer", cause="ValueError", error="ValueError: no")  # fmt: skip


def test_a_run_has_the_chain_that_its_end_waited_for(silver: dict[str, DataFrame]) -> None:
    found, steps = frames.lineage(silver, days=30)
    [run] = found.where("run = 'a'").collect()
    assert (4, 800.0, 2, 2) == (run.steps, run.duration_ms, run.depth, run.retries)
    assert (["a", "c", "d"], 800.0, False) == (run.critical_path, run.critical_ms, run.is_cut)
    told = listed(steps.where("run = 'a'"), "step", "wait_ms", "depth", "retries", "is_critical")
    assert [
        ("a", 0.0, 0, 0, True),
        ("b", 100.0, 1, 2, False),
        ("c", 300.0, 1, 0, True),
        ("d", 500.0, 2, 0, True),
    ] == told


def test_lineage_is_that_of_the_last_days(silver: dict[str, DataFrame]) -> None:
    """Usage that came twenty days later is the newest message, so the run is too old."""
    found, _ = frames.lineage(silver)
    assert 2 == found.count()


def deliveries(rows: Rows) -> None:
    """100 messages within a minute, whose latencies are 1 to 100 ms; a block that settled 7 and gave up 2."""
    for number in range(1, 101):
        at = NOON + seconds(number / 10)
        rows.add("realtime", at, stream="CHAT_EVENTS", sequence=number, event_time=at - timedelta(milliseconds=number))
    done = [{"first": 1, "last": 5}, {"first": 9, "last": 10}]
    inputs = {"stream": "EVENTS", "consumer": "biller_consumer", "done": done}
    rows.add("ledger", NOON + seconds(1), stream="LEDGER", inputs=[inputs | {"dead": [{"first": 6, "last": 7}]}])
    rows.add("advisory", NOON, stream="DLQ_ADVISORIES", origin_stream="BILLING", consumer="old", deliveries=5)


def test_health_counts_each_minute_and_how_long_events_took(silver: dict[str, DataFrame]) -> None:
    found = frames.health(silver).where("stream = 'CHAT_EVENTS'")
    [told] = listed(found, "messages", "per_s", "p50_ms", "p95_ms", "p99_ms", "max_ms")
    assert (100, 100 / 60, 50.0, 95.0, 99.0, 100.0) == told


def test_consumers_show_outcomes_and_what_was_given_up(silver: dict[str, DataFrame]) -> None:
    columns = ("stream", "consumer", "done", "dead", "given_up", "redeliveries")
    assert [("BILLING", "old", 0, 0, 1, 0), ("EVENTS", "biller_consumer", 7, 2, 0, 2)] == listed(
        frames.consumers(silver), *columns
    )


def test_dead_letters_are_counted_by_cause(silver: dict[str, DataFrame]) -> None:
    columns = ("stream", "consumer", "cause", "letters", "last_error")
    assert [("EVENTS", "biller_consumer", "ValueError", 1, "ValueError: no")] == listed(
        frames.dead_letters(silver), *columns
    )


def test_gold_is_replaced_never_added_to_and_shown(spark: SparkSession, tmp_path: Path) -> None:
    """A pass over an unchanged silver does nothing; one over a newer silver puts new rows in the place of the old."""
    made = Made(tmp_path)
    agent = FakeAgent(made, "biller")
    agent.settle(agent.orders(3), effects=1)
    made.write()
    gold = Gold(spark, Lake(tmp_path))
    gold.refresh(1)
    gold.refresh(1)
    versions = {name: open_table(tmp_path, name).version() for name in DERIVED}
    assert {1} == set(versions.values())  # version 0 made the table
    assert 6 == sum(row["messages"] for row in rows_of(tmp_path, "gold/health"))
    agent.settle(agent.orders(1), effects=1)
    made.derive()
    made.write()
    gold.refresh(2)
    assert 8 == sum(row["messages"] for row in rows_of(tmp_path, "gold/health"))
    assert 4 == sum(row["done"] for row in rows_of(tmp_path, "gold/consumers"))
    assert 8 == len(rows_of(tmp_path, "gold/steps"))
    shown = content(tmp_path, NOON)
    assert [("MESHFORGE_EVENTS", 8)] == [(one.stream, one.messages) for one in shown.streams]
    assert shown.lineage is not None
    assert (4, ["OrderPlaced", "BillMade"]) == (shown.runs, [step["type"] for step in shown.lineage.steps])
    assert "BillMade" in page(shown)


DERIVED = [name for name in GOLD if name != "gold/audits"]


def rows_of(lake: Path, name: str) -> list[dict[str, Any]]:
    return open_table(lake, name).to_pyarrow_table().to_pylist()
