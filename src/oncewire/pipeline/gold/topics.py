"""Gold of the broker's topics as DataFrame functions: what goes through each, and what became of each message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from oncewire.pipeline import settled as joined
from oncewire.pipeline.gold.shapes import shaped, union
from oncewire.pipeline.gold.tables import OUTCOMES, THROUGHPUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WINDOW: Final = "1 minute"
WINDOW_S: Final = 60
OUTCOME_DAYS: Final = 7


def throughput(silver: Mapping[str, DataFrame]) -> DataFrame:
    """Per topic and minute: what producers stored (`group` is ''), and what each group settled, gave up and failed at,
    with the time from stored to settled. Dead letters are messages of their own topic."""
    from pyspark.sql import functions as sf

    stored = silver["broker"].selectExpr(
        "tenant", "topic", "'' as `group`", "timestamp as at", "1L as produced", "length(value) as bytes",
        "0L as settled", "0L as dead", "0L as failed", "cast(null as double) as took_ms",
    )  # fmt: skip
    messages = joined.numbered(silver["broker"], silver["topics"]).select(
        "tenant", "topic", "number", "partition", "offset", "timestamp"
    )
    found = joined.events(silver["broker_record"]).where(joined.SETTLING)
    told = found.join(messages, ["number", "partition", "offset"])
    settled = told.selectExpr(
        "tenant", "topic", "`group`", "at", "0L as produced", "0L as bytes", "cast(kind = 'acked' as long) as settled",
        "cast(kind = 'buried' as long) as dead", "cast(kind != 'acked' as long) as failed",
        "if(kind = 'acked', (unix_micros(at) - unix_micros(timestamp)) / 1000.0d, null) as took_ms",
    )  # fmt: skip
    rows = union([stored, settled]).selectExpr("*", f"window(at, '{WINDOW}').start as window_start")
    shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    found = rows.groupBy("tenant", "topic", "group", "window_start").agg(
        *(sf.sum(name).alias(name) for name in ("produced", "bytes", "settled", "dead", "failed")),
        ((sf.sum("produced") + sf.sum("settled") + sf.sum("dead")) / sf.lit(float(WINDOW_S))).alias("per_s"),
        *(sf.percentile_approx("took_ms", share).alias(name) for name, share in shares.items()),
        sf.max("took_ms").alias("max_ms"),
    )
    return shaped(found, THROUGHPUT)


def outcomes(silver: Mapping[str, DataFrame], days: int = OUTCOME_DAYS) -> DataFrame:
    """What became of each message of the last days, for each group that reads its topic."""
    messages = silver["broker"]
    newest = messages.agg({"timestamp": "max"}).first()
    if newest is not None and newest[0] is not None:
        from pyspark.sql import functions as sf

        messages = messages.where(sf.col("timestamp") > sf.lit(newest[0]) - sf.expr(f"interval {days} days"))
    return shaped(joined.outcomes(messages, silver["broker_record"], silver["topics"]), OUTCOMES)
