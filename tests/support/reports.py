"""Content for the report's page, made by hand: busy, with letters, a run, and audits of both kinds."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from oncewire.pipeline.auditing.verdict import Chain, Count, Finding, Known, Stop, Verdict
from oncewire.pipeline.report import rules
from oncewire.pipeline.report.read import in_order
from oncewire.pipeline.report.rules import Content, Lineage

BEGIN = datetime(2026, 11, 15, 9, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
EVIL = '<script>alert("x")</script>'


def health(minutes: int = 240) -> list[dict[str, Any]]:
    rows = []
    for number, stream in enumerate(["MESHFORGE_EVENTS", "BILLING", "CHAT_EVENTS", "DLQ"]):
        for minute in range(0, minutes, 1 if number < 3 else 17):
            wave = 1 + math.sin(minute / 23 + number) / 2
            messages = int(9_000 * wave / 4**number) + 1
            row = {"tenant": "acme", "stream": stream, "window_start": BEGIN + minute * MINUTE, "messages": messages}
            spread = {"p50_ms": 4 * wave, "p95_ms": 21 * wave, "p99_ms": 48 * wave**2, "max_ms": 90 * wave**2}
            rows.append(row | {"per_s": messages / 60} | spread)
    return rows


def verdict(*, is_good: bool, at: datetime = BEGIN) -> Verdict:
    findings = [] if is_good else [
        Finding("sequences", "missing", "MESHFORGE_EVENTS", 4711, 4713, detail="not in bronze, and no gap is recorded"),
        Finding("effects", "missing", "MESHFORGE_EVENTS", chain="default/demo/biller@9f2c", block=88, id="fx.0b1c"),
    ]  # fmt: skip
    counts = [
        Count("sequences", "rows", "MESHFORGE_EVENTS", 1_204_311),
        Count("chain", "blocks", "default/demo/biller@9f2c", 4_712),
        Count("outcomes", "done", "default/demo/biller", 1_201_870),
        Count("outcomes", "in_progress", "default/demo/biller", 64),
        Count("sums", "inputs", "MESHFORGE_EVENTS", 1_201_870),
        Count("state", "blocks", "default/demo/biller@9f2c", 4_712),
        Count("effects", "once", "default/demo/biller@9f2c", 1_201_600),
        Count("letters", "with_origin", "", 57),
    ]
    return Verdict(
        is_good=is_good, at_ms=int(at.timestamp() * 1000), took_s=41.3,
        cut=[Stop("LEDGER", 1, 0, 4_712), Stop("MESHFORGE_EVENTS", 1, 0, 1_204_311, 210)],
        versions={"bronze": 311}, chains=[Chain("default/demo/biller@9f2c", 4_712, 4_709)], counts=counts,
        errors=len(findings), findings=findings, notes=[], known=Known(),
    )  # fmt: skip


def lineage() -> Lineage:
    told = [
        ("a", None, "OrderPlaced", 0.0), ("b", "a", "StockReserved", 140.0), ("c", "a", "PaymentRequested", 90.0),
        ("d", "c", "PaymentTaken", 1_210.0), ("e", "d", "BillMade", 60.0), ("f", "d", "OrderConfirmed", 35.0),
        ("g", "e", "MailSent", 480.0), ("h", "b", "PickListMade", 300.0),
    ]  # fmt: skip
    at: dict[str | None, float] = {None: 0.0}
    depth: dict[str | None, int] = {None: -1}
    steps = []
    for number, (step, parent, kind, wait) in enumerate(told, 1):
        at[step], depth[step] = at[parent] + wait, depth[parent] + 1
        steps.append(
            {
                "step": step, "parent": parent, "type": kind, "subject": f"evt.acme.shop.{kind.lower()}",
                "stream": "MESHFORGE_EVENTS", "sequence": number, "at": BEGIN + timedelta(milliseconds=at[step]),
                "wait_ms": wait, "depth": depth[step], "retries": 2 if step == "d" else 0,
                "is_critical": step in "acdeg",
            }
        )  # fmt: skip
    run = {
        "tenant": "acme", "run": "01JCORDER", "steps": len(steps), "started_at": BEGIN, "duration_ms": at["g"],
        "retries": 2, "critical_path": list("acdeg"), "critical_ms": at["g"],
    }  # fmt: skip
    return Lineage(run, in_order(steps))


def letters() -> list[dict[str, Any]]:
    told = [("ContractViolation", 31), ("max_deliveries", 14), ("no_handler", 9), (EVIL, 2), ("identity_conflict", 1)]
    return [
        {
            "tenant": "acme", "stream": "BILLING", "consumer": "billing_consumer", "cause": cause, "letters": count,
            "window_start": BEGIN, "last_error": f"{cause}: payload.amount is missing",
        }
        for cause, count in told
    ]  # fmt: skip


def topics() -> list[dict[str, Any]]:
    """Two minutes of a busy topic with one group, and a quiet one that nobody reads."""
    none = {"settled": 0, "dead": 0, "failed": 0, "p50_ms": None, "p95_ms": None}
    stored = {"tenant": "acme", "topic": "orders", "group": "", "produced": 4_000} | none
    settled = {"produced": 0, "settled": 3_990, "dead": 4, "failed": 31, "p50_ms": 8.0, "p95_ms": 40.0}
    worse = settled | {"p50_ms": 12.0, "p95_ms": 55.0}
    quiet = stored | {"topic": EVIL, "produced": 3}
    return [quiet, stored, stored, stored | {"group": "billing"} | settled, stored | {"group": "billing"} | worse]


def content(*, is_good: bool = True) -> Content:
    rows = health()
    axis = rules.axis_of((row["window_start"] for row in rows), MINUTE)
    assert axis is not None
    outcome = {"done": 1_201_870, "duplicate": 312, "terminated": 4, "dead": 57, "passed": 0, "given_up": 3}
    consumer = {"stream": "MESHFORGE_EVENTS", "consumer": "biller_consumer", **outcome, "redeliveries": 228}
    use = {"quantity": Decimal("1284.75"), "late_quantity": Decimal("3.25"), "events": 5_139, "late_events": 13}
    later = [BEGIN + number * timedelta(hours=1) for number in range(9)]
    return Content(
        lake="/srv/lake", made_at=BEGIN + timedelta(hours=9), axis=axis, throughput=rules.throughput(rows, axis),
        latency=rules.latency(rows, axis), streams=rules.stream_lines(rows, axis), consumers=[consumer],
        causes=rules.causes(letters()), letters=rules.letter_lines(letters()), lineage=lineage(),
        usage=[{"tenant": "acme", "meter": "gpu_hours", "unit": "h", "windows": 300, **use}],
        verdicts=[verdict(is_good=is_good, at=at) for at in reversed(later)], runs=1_033,
        topics=rules.topic_lines(topics()),
    )  # fmt: skip
