"""Gold: each table beside an answer that was computed by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

from oncewire.pipeline.gold import frames, topics
from oncewire.pipeline.gold.refresh import Gold
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.report.page import page
from oncewire.pipeline.report.read import content
from oncewire.pipeline.tables import GOLD, SILVER, TOPICS, dataset, open_table
from tests.support.lakes import FakeAgent
from tests.support.lakes import Lake as Made

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2026, 11, 10, 12, tzinfo=UTC)
METERED = "platform.billing.usage.metered"


class Rows:
    """Rows of silver, made by hand."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in (*SILVER, "topics")}

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
            name: spark.createDataFrame(pa.Table.from_pylist(rows, {**SILVER, "topics": TOPICS}[name].schema))
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
    topic(rows)
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


def topic(rows: Rows) -> None:
    """A run of three steps on a topic: b and c follow a. c is done at its second attempt 6 s after a was stored, b is
    given up a minute later. Group h came when a was forgotten, and has settled nothing."""
    rows.rows["topics"].append({"tenant": "acme", "stream": "T", "created_ns": 1, "number": 5, "topic": "orders"})
    for at, (step, parent, later) in enumerate([("a", None, 0.0), ("b", "a", 1.0), ("c", "a", 2.0)]):
        rows.add(
            "broker", NOON + seconds(later), stream="T", sequence=at + 1, offset=at, topic="orders", partition=0,
            value="12345", run_id="r", step_id=step, parent_step_id=parent,
        )  # fmt: skip

    def wrote(sequence: int, later: float, *events: tuple[str, str | None, int | None, int | None]) -> None:
        at = NOON + seconds(later)
        told = [
            {"kind": kind, "group": group, "offset": offset, "attempts": attempts, "at": at, "error": kind}
            for kind, group, offset, attempts in events
        ]
        rows.add("broker_record", at, stream="R", sequence=sequence, number=5, partition=0, events=told)

    wrote(1, 0.0, ("group_made", "g", None, None))
    wrote(2, 3.0, ("acked", "g", 0, 1), ("retried", "g", 1, 1), ("retried", "g", 2, 1))
    wrote(3, 4.0, ("trimmed", None, 0, None), ("group_made", "h", None, None))
    wrote(4, 6.0, ("acked", "g", 2, 2))
    wrote(5, 66.0, ("buried", "g", 1, 2))


def test_what_goes_through_a_topic_is_counted_by_minute(silver: dict[str, DataFrame]) -> None:
    """Three of 5 characters come in the first minute, where g settles two (3 s and 4 s after they came) and fails
    at two; in the next it gives one up."""
    columns = ("group", "produced", "bytes", "settled", "dead", "failed", "per_s", "p50_ms", "max_ms")
    naive = NOON.replace(tzinfo=None)
    found = topics.throughput(silver).select("topic", "window_start", *columns).orderBy("window_start", "group")
    assert [
        ("orders", naive, "", 3, 15, 0, 0, 0, 0.05, None, None),
        ("orders", naive, "g", 0, 0, 2, 0, 2, 2 / 60, 3000.0, 4000.0),
        ("orders", naive + seconds(60), "g", 0, 0, 0, 1, 1, 1 / 60, None, None),
    ] == [tuple(row) for row in found.collect()]


def test_each_message_has_an_outcome_for_each_group_that_it_is_meant_for(silver: dict[str, DataFrame]) -> None:
    found = listed(topics.outcomes(silver), "offset", "group", "outcome", "attempts", "error")
    assert [
        (0, "g", "settled", 1, "acked"),
        (1, "g", "dead", 2, "buried"),
        (1, "h", "pending", 0, None),
        (2, "g", "settled", 2, "acked"),
        (2, "h", "pending", 0, None),
    ] == found


def test_a_run_on_a_topic_ends_when_its_groups_have_settled_it(silver: dict[str, DataFrame]) -> None:
    """Group h has not settled b and c, so only a has an end; without h the run ends with b, 66 s after it began."""
    alone = dict(silver)
    alone["broker_record"] = silver["broker_record"].where("sequence != 3")
    ended = {name: frames.lineage(told, days=30) for name, told in (("both", silver), ("alone", alone))}
    assert [("r", 3, 3.0, 2, ["a"]), ("r", 3, 66.0, 2, ["a", "b"])] == [
        (run.run, run.steps, run.duration_ms / 1000, run.retries, run.critical_path)
        for runs, _ in ended.values()
        for run in runs.where("run = 'r'").collect()
    ]
    told = listed(ended["alone"][1].where("run = 'r'"), "step", "wait_ms", "retries", "is_critical", "done_at")
    naive = NOON.replace(tzinfo=None)
    assert [
        ("a", 0.0, 0, True, naive + seconds(3)),
        ("b", 1000.0, 1, True, naive + seconds(66)),
        ("c", 2000.0, 1, False, naive + seconds(6)),
    ] == told


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
    return dataset(open_table(lake, name)).to_table().to_pylist()
