"""Gold as DataFrame functions: tables of silver in, one table of gold out.

Each is computed from all of silver, so what comes late corrects its window by itself, and what silver dropped as a copy
is never counted. The cost is one pass over the narrow columns of the tables named; nothing is kept between two passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from oncewire.pipeline.gold import rules
from oncewire.pipeline.gold.rules import Message
from oncewire.pipeline.gold.shapes import shaped, union
from oncewire.pipeline.gold.tables import CONSUMERS, DEAD_LETTERS, HEALTH, RUNS, STEPS, USAGE
from oncewire.pipeline.settled import outcomes as outcomes_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Silver = Mapping[str, "DataFrame"]
"""Tables of silver by family, and the lake's own table of topics as `topics`."""

WINDOW: Final = "1 minute"
WINDOW_S: Final = 60
USAGE_WINDOW: Final = "1 hour"
LATE: Final = "interval 1 hour"
"""Usage that comes in so long after its window's end is late."""
_ENVELOPES: Final = ("runtime", "message")
_TIMED: Final = ("runtime", "message", "realtime")
LINEAGE_DAYS: Final = 7
METERED: Final = "platform.billing.usage.metered"


# ---- delivery health


def health(silver: Silver) -> DataFrame:
    """Per tenant, stream and minute of the stream's time: messages, rate, and how long events took into the stream."""
    rows = union(
        [
            silver[name].selectExpr(
                "coalesce(tenant, '') as tenant", "stream", "timestamp",
                "(unix_micros(timestamp) - unix_micros(event_time)) / 1000.0d as latency_ms",
            )
            for name in _TIMED
        ]
    )  # fmt: skip
    from pyspark.sql import functions as sf

    shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    windowed = rows.selectExpr("*", f"window(timestamp, '{WINDOW}').start as window_start")
    found = windowed.groupBy("tenant", "stream", "window_start").agg(
        sf.count("*").alias("messages"),
        (sf.count("*") / sf.lit(float(WINDOW_S))).alias("per_s"),
        *(sf.percentile_approx("latency_ms", share).alias(name) for name, share in shares.items()),
        sf.max("latency_ms").alias("max_ms"),
    )
    return shaped(found, HEALTH)


def consumers(silver: Silver) -> DataFrame:
    """Per consumer and minute: what agents settled, by outcome, and what was given up. Retries that went well in the
    end are nobody's record: redeliveries are those of inputs that were given up."""
    from pyspark.sql import functions as sf

    outcomes = ("done", "duplicate", "terminated", "dead", "passed")
    inputs = silver["ledger"].selectExpr("tenant", "timestamp", "explode(inputs) as i")
    settled = inputs.selectExpr(
        "tenant", "i.stream as stream", "i.consumer as consumer", "timestamp",
        *(f"aggregate(i.{name}, 0L, (sum, r) -> sum + r.last - r.first + 1) as {name}" for name in outcomes),
        "0L as given_up", "0L as redeliveries",
    )  # fmt: skip
    nothing = [f"0L as {name}" for name in outcomes]
    given_up = silver["advisory"].selectExpr(
        "tenant", "origin_stream as stream", "consumer", "timestamp", *nothing, "1L as given_up",
        "0L as redeliveries",
    )  # fmt: skip
    buried = silver["letter"].selectExpr(
        "tenant", "origin_stream as stream", "consumer", "timestamp", *nothing, "0L as given_up",
        "greatest(deliveries - 1, 0L) as redeliveries",
    )  # fmt: skip
    counts = (*outcomes, "given_up", "redeliveries")
    rows = union([settled, given_up, buried]).selectExpr(
        "coalesce(tenant, '') as tenant", "stream", "consumer", *counts,
        f"window(timestamp, '{WINDOW}').start as window_start",
    )  # fmt: skip
    grouped = rows.groupBy("tenant", "stream", "consumer", "window_start")
    return shaped(grouped.agg(*(sf.sum(name).alias(name) for name in counts)), CONSUMERS)


def dead_letters(silver: Silver) -> DataFrame:
    """Per consumer, cause and hour: letters, with the last error as an example."""
    from pyspark.sql import functions as sf

    rows = silver["letter"].selectExpr(
        "coalesce(tenant, '') as tenant", "origin_stream as stream", "consumer", "cause", "error", "timestamp",
        "window(timestamp, '1 hour').start as window_start",
    )  # fmt: skip
    grouped = rows.groupBy("tenant", "stream", "consumer", "cause", "window_start")
    return shaped(
        grouped.agg(sf.count("*").alias("letters"), sf.max_by("error", "timestamp").alias("last_error")), DEAD_LETTERS
    )


# ---- lineage


def lineage(silver: Silver, days: int = LINEAGE_DAYS) -> tuple[DataFrame, DataFrame]:
    """Runs and their steps, of messages that came within so many days before the newest. A message alone, which nothing
    caused and which caused nothing, is a run of one step."""
    from pyspark.sql.pandas.types import from_arrow_schema

    messages = _messages(silver)
    newest = messages.agg({"at_us": "max"}).first()
    since_us = (newest[0] or 0) - days * 86_400_000_000 if newest else 0
    recent = messages.where(f"at_us > {since_us}").repartition("tenant", "run")
    ordered = recent.sortWithinPartitions("tenant", "run", "at_us", "sequence")
    runs = ordered.mapInArrow(_Runs(is_steps=False), from_arrow_schema(RUNS.schema))
    steps = ordered.mapInArrow(_Runs(is_steps=True), from_arrow_schema(STEPS.schema))
    return runs, steps


def _messages(silver: Silver) -> DataFrame:
    from pyspark.sql import functions as sf

    place = ["origin_stream", "origin_created_ns", "origin_sequence"]
    retries = silver["letter"].groupBy(*place).agg(sf.max("deliveries").alias("deliveries"))
    retries = retries.withColumnsRenamed(dict(zip(place, ("stream", "created_ns", "sequence"), strict=True)))
    rows = union(
        [
            silver[name].selectExpr(
                "coalesce(tenant, '') as tenant", "coalesce(correlation_id, id) as run", "id as step",
                "causation_id as parent", "type", "subject", "stream", "created_ns", "sequence",
                "unix_micros(timestamp) as at_us",
            )
            for name in _ENVELOPES
        ]
    )  # fmt: skip
    told = rows.join(sf.broadcast(retries), ["stream", "created_ns", "sequence"], "left")
    enveloped = told.selectExpr(*_TOLD, "greatest(coalesce(deliveries, 1) - 1, 0) as retries", "0L as done_us")
    return enveloped.unionByName(_topic_messages(silver))


_TOLD: Final = Message._fields[:-2]


def _topic_messages(silver: Silver) -> DataFrame:
    """Messages of topics that name a run. A dead letter is no step of its own: it tells of one."""
    from pyspark.sql import functions as sf

    place = ["stream", "created_ns", "sequence"]
    named = silver["broker"].where("run_id is not null and original_topic is null")
    ends = (
        outcomes_of(named, silver["broker_record"], silver["topics"])
        .groupBy(*place)
        .agg(
            sf.sum("failures").alias("retries"),
            sf.expr("if(bool_or(outcome = 'pending'), 0L, unix_micros(max(settled_at)))").alias("done_us"),
        )
    )
    return named.join(ends, place, "left").selectExpr(
        "tenant", "run_id as run", "coalesce(step_id, concat_ws('/', topic, partition, offset)) as step",
        "parent_step_id as parent", "topic as type", "subject", "stream", "sequence",
        "unix_micros(timestamp) as at_us", "coalesce(retries, 0L) as retries", "coalesce(done_us, 0L) as done_us",
    )  # fmt: skip


class _Runs:
    """On the executors: ordered messages become runs or steps."""

    ROWS_MAX = 8_192

    def __init__(self, *, is_steps: bool) -> None:
        self._is_steps = is_steps

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        messages = (
            Message(*row)
            for batch in batches
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        )
        schema = STEPS.schema if self._is_steps else RUNS.schema
        rows: list[dict[str, Any]] = []
        for run, steps in rules.runs(messages):
            rows += [step_row(one) for one in steps] if self._is_steps else [run_row(run)]
            if len(rows) >= self.ROWS_MAX:
                yield pa.RecordBatch.from_pylist(rows, schema=schema)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=schema)


def step_row(step: rules.Step) -> dict[str, Any]:
    told = step.message._asdict() | step._asdict()
    del told["message"]
    told["at"], told["done_at"] = told.pop("at_us"), told.pop("done_us") or None
    return told


def run_row(run: rules.Run) -> dict[str, Any]:
    told = run._asdict()
    told["started_at"], told["ended_at"] = told.pop("started_us"), told.pop("ended_us")
    return told


# ---- usage


def usage(silver: Silver) -> DataFrame:
    """Per tenant, resource, meter and hour in which it was used: the sum over identities, each counted once however
    often and however late it comes. An edited replay counts instead of what it replaces."""
    from pyspark.sql import functions as sf

    metered = silver["message"].where(f"subject = '{METERED}'")
    replaced = metered.where("replaces is not null").selectExpr("tenant", "identity", "replaces as content").distinct()
    kept = metered.selectExpr("*", "lower(hex(digest)) as content").join(
        replaced, ["tenant", "identity", "content"], "left_anti"
    )
    told = kept.selectExpr(
        "tenant", "timestamp",
        *(f"get_json_object(payload, '$.{name}') as {name}" for name in ("resource_id", "meter", "unit")),
        "try_cast(get_json_object(payload, '$.quantity') as decimal(38, 9)) as quantity",
        "coalesce(try_cast(get_json_object(payload, '$.period_start') as timestamp), event_time) as used_at",
    )  # fmt: skip
    rows = told.selectExpr("*", f"window(used_at, '{USAGE_WINDOW}') as w").selectExpr(
        "*", "w.start as window_start", f"timestamp > w.end + {LATE} as is_late"
    )
    grouped = rows.groupBy("tenant", "resource_id", "meter", "unit", "window_start")
    return shaped(
        grouped.agg(
            sf.sum("quantity").alias("quantity"),
            sf.count("*").alias("events"),
            sf.count_if("is_late").alias("late_events"),
            sf.expr("coalesce(sum(quantity) filter (where is_late), 0)").alias("late_quantity"),
            sf.max("timestamp").alias("last_at"),
        ),
        USAGE,
    )
