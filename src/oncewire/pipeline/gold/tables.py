"""The tables of gold as data: what is concluded from silver, each with its grain and keys."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from oncewire.pipeline.lake.table import TIMESTAMP, Table

HEALTH: Final = Table(
    "gold/health",
    (
        ("tenant", pa.string()),
        ("stream", pa.string()),
        ("window_start", TIMESTAMP),  # a minute of the stream's time
        ("messages", pa.int64()),
        ("per_s", pa.float64()),
        ("p50_ms", pa.float64()),  # from what the message says as its time to when the stream took it in
        ("p95_ms", pa.float64()),
        ("p99_ms", pa.float64()),
        ("max_ms", pa.float64()),
    ),
    ("tenant", "stream", "window_start"),
    "a minute of a stream",
)
CONSUMERS: Final = Table(
    "gold/consumers",
    (
        ("tenant", pa.string()),
        ("stream", pa.string()),
        ("consumer", pa.string()),
        ("window_start", TIMESTAMP),  # a minute
        *((name, pa.int64()) for name in ("done", "duplicate", "terminated", "dead", "passed")),
        ("given_up", pa.int64()),  # advisories of the server
        ("redeliveries", pa.int64()),  # of inputs that became letters
    ),
    ("tenant", "stream", "consumer", "window_start"),
    "a minute of a consumer",
)
DEAD_LETTERS: Final = Table(
    "gold/dead_letters",
    (
        ("tenant", pa.string()),
        ("stream", pa.string()),  # where the originals stood
        ("consumer", pa.string()),
        ("cause", pa.string()),
        ("window_start", TIMESTAMP),  # an hour
        ("letters", pa.int64()),
        ("last_error", pa.string()),
    ),
    ("tenant", "stream", "consumer", "cause", "window_start"),
    "an hour of a cause of letters",
)
RUNS: Final = Table(
    "gold/runs",
    (
        ("tenant", pa.string()),
        ("run", pa.string()),  # the correlation id
        ("steps", pa.int64()),
        ("started_at", TIMESTAMP),
        ("ended_at", TIMESTAMP),
        ("duration_ms", pa.float64()),
        ("depth", pa.int64()),
        ("retries", pa.int64()),
        ("critical_path", pa.list_(pa.field("element", pa.string()))),  # steps, from the root to the last one
        ("critical_ms", pa.float64()),
        ("is_cut", pa.bool_()),  # it has more steps than are told
    ),
    ("tenant", "run"),
    "all messages with one correlation id or run id",
)
STEPS: Final = Table(
    "gold/steps",
    (
        ("tenant", pa.string()),
        ("run", pa.string()),
        ("step", pa.string()),  # the message's id
        ("parent", pa.string()),  # the id of what caused it
        ("type", pa.string()),
        ("subject", pa.string()),
        ("stream", pa.string()),
        ("sequence", pa.int64()),
        ("at", TIMESTAMP),  # when its stream took it in
        ("wait_ms", pa.float64()),  # since its parent was there
        ("depth", pa.int64()),
        ("retries", pa.int64()),
        ("is_critical", pa.bool_()),
        ("done_at", TIMESTAMP),  # when all groups of its topic had settled it; null elsewhere, and before
    ),
    ("stream", "sequence", "step"),
    "a message in its run",
)
USAGE: Final = Table(
    "gold/usage",
    (
        ("tenant", pa.string()),
        ("resource_id", pa.string()),
        ("meter", pa.string()),
        ("unit", pa.string()),
        ("window_start", TIMESTAMP),  # an hour of the time of use
        ("quantity", pa.decimal128(38, 9)),
        ("events", pa.int64()),
        ("late_events", pa.int64()),  # came in more than an hour behind the window
        ("late_quantity", pa.decimal128(38, 9)),
        ("last_at", TIMESTAMP),
    ),
    ("tenant", "resource_id", "meter", "unit", "window_start"),
    "an hour of a tenant's use of a resource",
)
AUDITS: Final = Table(
    "gold/audits",
    (
        ("at", TIMESTAMP),
        ("is_good", pa.bool_()),
        ("errors", pa.int64()),
        ("pending", pa.int64()),  # inputs in progress and what lies above the cut
        ("took_s", pa.float64()),
        ("verdict", pa.string()),  # JSON: cut, versions, counts, findings
    ),
    ("at",),
    "a verdict of an audit",
)
THROUGHPUT: Final = Table(
    "gold/throughput",
    (
        ("tenant", pa.string()),
        ("topic", pa.string()),
        ("group", pa.string()),  # '' for what producers stored
        ("window_start", TIMESTAMP),  # a minute
        ("produced", pa.int64()),
        ("bytes", pa.int64()),  # characters of the values
        ("settled", pa.int64()),
        ("dead", pa.int64()),
        ("failed", pa.int64()),  # attempts, the last one of the dead included
        ("per_s", pa.float64()),
        ("p50_ms", pa.float64()),  # from stored to settled
        ("p95_ms", pa.float64()),
        ("p99_ms", pa.float64()),
        ("max_ms", pa.float64()),
    ),
    ("tenant", "topic", "group", "window_start"),
    "a minute of a topic, as its producers or one of its groups see it",
)
OUTCOMES: Final = Table(
    "gold/outcomes",
    (
        ("tenant", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("group", pa.string()),
        ("stream", pa.string()),
        ("created_ns", pa.int64()),
        ("timestamp", TIMESTAMP),  # when it was stored
        ("trace_id", pa.string()),
        ("run_id", pa.string()),
        ("step_id", pa.string()),
        ("outcome", pa.string()),  # settled, dead, pending · lapsed: forgotten before this group settled it
        ("attempts", pa.int64()),
        ("consumer", pa.string()),  # who held the last delivery that was written down
        ("error", pa.string()),
        ("settled_at", TIMESTAMP),
    ),
    ("stream", "created_ns", "offset", "group"),
    "a message of a topic and a group that it is meant for",
)
_ALL: Final = (HEALTH, CONSUMERS, DEAD_LETTERS, RUNS, STEPS, USAGE, THROUGHPUT, OUTCOMES, AUDITS)
GOLD: Final = {table.name: table for table in _ALL}
