"""What became of each message of a topic, for each group that reads it: silver's messages and records put together.

    settled     the group acked it
    dead        it was given up, and a dead letter stands in its topic
    lapsed      forgotten before the group settled it: the group was long gone, or it was a dead letter that grew old
    pending     none of these yet

A group counts from where it was made: what had been forgotten by then was never meant for it. One that is gone, since
it settled nothing, does not count. Groups are made for each partition by itself. Where records are older than the lake,
a group is known by its first sign, and has all messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITION: Final = ("number", "partition")
SETTLING: Final = "kind in ('acked', 'retried', 'buried')"


def events(records: DataFrame) -> DataFrame:
    """One row per thing that an owner wrote down; `at` is the stream's time where it says none."""
    spread = records.selectExpr(
        "number", "partition", "sequence", "timestamp as stored_at", "posexplode(events) as (place, e)"
    )
    return spread.selectExpr(
        *PARTITION, "sequence", "place", "stored_at", "e.kind as kind", "e.`group` as `group`", "e.offset as offset",
        "e.attempts as attempts", "e.consumer as consumer", "coalesce(e.at, stored_at) as at", "e.error as error",
    )  # fmt: skip


def groups(found: DataFrame) -> DataFrame:
    """Each group of a partition that is not gone, and the last offset that was never meant for it (`floor`)."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sf

    order = Window.partitionBy(*PARTITION).orderBy("sequence", "place")
    trimmed = sf.max(sf.expr("if(kind = 'trimmed', offset, null)")).over(
        order.rowsBetween(Window.unboundedPreceding, 0)
    )
    known = found.withColumn("trimmed", sf.coalesce(trimmed, sf.lit(-1)))
    of_groups = known.where("`group` is not null").groupBy(*PARTITION, "group")
    last = sf.max_by("kind", sf.struct("sequence", "place"))
    return (
        of_groups.agg(
            sf.coalesce(sf.min(sf.expr("if(kind = 'group_made', trimmed, null)")), sf.lit(-1)).alias("floor"),
            sf.max(sf.expr("kind = 'group_made'")).alias("is_made"),
            last.alias("last"),
        )
        .where("last != 'group_gone'")
        .drop("last")
    )


def trims(found: DataFrame) -> DataFrame:
    """The last offset of each partition that is forgotten."""
    return (
        found.where("kind = 'trimmed'")
        .groupBy(*PARTITION)
        .agg({"offset": "max"})
        .withColumnRenamed("max(offset)", "trimmed")
    )


def settlements(found: DataFrame) -> DataFrame:
    """What groups said of an offset, one row each."""
    from pyspark.sql import functions as sf

    order = sf.struct("sequence", "place")
    return (
        found.where(SETTLING)
        .groupBy(*PARTITION, "group", "offset")
        .agg(
            sf.count_if(sf.expr("kind = 'acked'")).alias("acks"),
            sf.count_if(sf.expr("kind = 'buried'")).alias("burials"),
            sf.count_if(sf.expr("kind = 'retried'")).alias("failures"),
            sf.max("attempts").alias("attempts"),
            sf.max_by("consumer", order).alias("consumer"),
            sf.max_by("error", order).alias("error"),
            sf.max(sf.expr("if(kind = 'retried', null, at)")).alias("settled_at"),
            sf.min(sf.expr("if(kind = 'retried', null, sequence)")).alias("record"),
            sf.max(sf.expr("if(kind = 'retried', null, sequence)")).alias("last_record"),
            sf.max(sf.expr("if(kind = 'buried', stored_at, null)")).alias("buried_at"),
        )
    )


def numbered(messages: DataFrame, topics: DataFrame) -> DataFrame:
    """Messages with the number of their topic."""
    from pyspark.sql import functions as sf

    return messages.join(sf.broadcast(topics.select("stream", "created_ns", "number")), ["stream", "created_ns"])


def outcomes(messages: DataFrame, records: DataFrame, topics: DataFrame) -> DataFrame:
    """A row for each message and each group that it is meant for, by tables of silver (`broker`, `broker_record`) and
    the lake's table of topics."""
    from pyspark.sql import functions as sf

    found = events(records)
    meant = numbered(messages, topics).join(sf.broadcast(groups(found)), list(PARTITION)).where("offset > floor")
    told = meant.join(settlements(found), [*PARTITION, "group", "offset"], "left")
    whole = told.join(sf.broadcast(trims(found)), list(PARTITION), "left")
    return whole.selectExpr(
        "tenant", "topic", "partition", "offset", "`group`", "stream", "created_ns", "sequence", "timestamp",
        "trace_id", "run_id", "step_id", "number",
        "case when acks > 0 then 'settled' when burials > 0 then 'dead' when offset <= trimmed then 'lapsed' "
        "else 'pending' end as outcome",
        "coalesce(attempts, 0L) as attempts", "coalesce(failures, 0L) as failures", "consumer", "error", "settled_at",
    )  # fmt: skip
