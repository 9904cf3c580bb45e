"""The audit of the broker's topics as a DataFrame function: every message has an outcome per group, or is pending.

Messages and records are read from bronze's bytes. A settlement is wrong when its record is (partitions.py), when it
stands twice, when it speaks of no message or for a group that was never made, when a burial has no letter, and when it
is not there although the broker forgot the message as settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from oncewire._ground.contracts.broker import DEAD_PREFIX
from oncewire._ground.contracts.topics import RECORDS
from oncewire.pipeline import settled
from oncewire.pipeline.auditing import partitions
from oncewire.pipeline.auditing.frames import Cut, Keep, result, union
from oncewire.pipeline.auditing.partitions import Record
from oncewire.pipeline.auditing.rules import RESULT
from oncewire.pipeline.auditing.workers import RESULT_SCHEMA, batches, parts_of, tuples
from oncewire.pipeline.deriving import silver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IDLE_MS: Final = 7 * 86_400_000
"""After which a silent group holds nothing back, unless the broker is set otherwise (`broker.group_idle_ms`)."""
LETTER_SLACK: Final = "interval 1 minute"
"""A letter is stored before its burial is written down. So much later its topic must show it."""


def messages_of(bronze: DataFrame) -> DataFrame:
    """Messages of topics, read from their bytes."""
    return silver(bronze.where("startswith(subject, 'owb.')"), "broker")


def records_of(bronze: DataFrame) -> DataFrame:
    """What owners of partitions decided, read from its bytes."""
    return silver(bronze.where("startswith(subject, 'broker_records.')"), "broker_record")


def audit_settlements(
    messages: DataFrame,
    records: DataFrame,
    topics: DataFrame,
    gaps: DataFrame,
    cut: Cut,
    idle_ms: int = IDLE_MS,
    keep: Keep = lambda frame: frame,
) -> DataFrame:
    """Every message of a topic has an outcome for each group that it is meant for, or is pending. `keep` is given what
    is used several times, to be cached as the caller likes."""
    holes = gaps.where(f"stream = '{RECORDS}'").select("first", "last").collect()
    walked = keep(_walk(records, idle_ms, [(row["first"], row["last"]) for row in holes]))
    settlements = keep(_settlements(records, messages, topics, gaps, walked, cut))
    outcomes = keep(_outcomes(messages, records, topics, walked))
    detail = "case " + " ".join(f"when problem = '{name}' then {text}" for name, text in _WRONG.items()) + " end"
    is_wrong = f"problem in ({', '.join(repr(name) for name in _WRONG)})"
    found = union([settlements, outcomes.select(*settlements.columns)])
    return union(
        [
            walked.where("what != 'alive'"),
            result(found.where(is_wrong), "error", "settlements", "", **_MESSAGE, detail=detail),
            result(
                found.where(f"not {is_wrong}").groupBy("problem", "topic").count(), "count", "settlements", "",
                chain="coalesce(topic, '')", amount="count",
            ),
        ]
    )  # fmt: skip


_WRONG: Final = {
    "two_outcomes": "concat('group ', `group`, ' settled it ', times, ' times: records ', record, ', ', last_record)",
    "unknown_group": "concat('record ', record, ' speaks for group ', `group`, ', which was never made')",
    "no_message": "concat('record ', record, ' settles it for group ', `group`, ', and no message stands there')",
    "no_letter": "concat('record ', record, ' gives it up for group ', `group`, ', and there is no dead letter')",
    "no_outcome": "concat('the broker forgot it as settled, and group ', `group`, ' has no outcome for it')",
}
_AT = "cast(cast(position as string) as int) as partition"
_LABEL = "concat(coalesce(topic, concat('topic ', number)), '/', partition)"
_WHERE = {"stream": f"coalesce(stream, '{RECORDS}')", "created_ns": "coalesce(created_ns, 0L)"}
_MESSAGE = {**_WHERE, "chain": _LABEL, "first": "offset + 1", "last": "offset + 1", "id": "`group`", "amount": "1L"}
"""A finding about a message is named by where it stands in its topic's stream."""


def _reached(topics: DataFrame, cut: Cut) -> DataFrame:
    """Topics by number, with how far bronze has each."""
    spark = topics.sparkSession
    reached = spark.createDataFrame(
        [(*lifetime[:2], at) for lifetime, at in cut.items()] or [("", 0, 0)],
        "stream string, created_ns long, reached long",
    )
    return topics.selectExpr("number", "stream", "created_ns", "tenant as of_tenant", "topic").join(
        reached, ["stream", "created_ns"], "left"
    )


def _walk(records: DataFrame, idle_ms: int, gaps: list[tuple[int, int]]) -> DataFrame:
    rows = records.selectExpr(
        "number", "partition", "sequence", "created_ns", "incarnation", "unix_millis(timestamp) as at_ms",
        "coalesce(topic, concat('topic ', number)) as topic", "owner", "taken", "after",
        "transform(events, e -> named_struct('kind', e.kind, 'group', e.`group`, 'offset', e.offset, 'at_ms', "
        "unix_millis(e.at))) as events",
    )  # fmt: skip
    ordered = rows.repartition("number", "partition").sortWithinPartitions("number", "partition", "sequence")
    return ordered.mapInArrow(_walking(idle_ms, gaps), RESULT)


def _walking(idle_ms: int, gaps: list[tuple[int, int]]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]:
    def work(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        records = (Record(*row) for part in parts_of(found) for row in tuples(part))
        yield from batches(partitions.walk(records, idle_ms, gaps), RESULT_SCHEMA)

    return work


_TOLD: Final = (
    "stream", "created_ns", "topic", "number", "partition", "offset", "`group`", "times", "record", "last_record",
)  # fmt: skip
_MESSAGE_OF = """case when times = 0 or is_there then null when reached is null then 'out_of_sight'
    when offset + 1 > reached then 'pending' when g_stream is not null then 'in_gaps' else 'no_message' end"""
_LETTER_OF = f"""case when burials = 0 then null when has_letter then 'with_letter'
    when unburied <= holed then 'letter_perhaps_in_gap' when grave_at > buried_at + {LETTER_SLACK} then 'no_letter'
    else 'letter_pending' end"""


def _settlements(
    records: DataFrame, messages: DataFrame, topics: DataFrame, gaps: DataFrame, walked: DataFrame, cut: Cut
) -> DataFrame:
    """What is to be said of each settlement: whether it stands once, for a group that was made, on a message, and with
    a letter where it gave the message up."""
    from pyspark.sql import functions as sf

    found = settled.events(records)
    told = settled.settlements(found).selectExpr("*", "acks + burials as times")
    known = messages.select("stream", "created_ns", "partition", "offset", sf.lit(True).alias("is_there"))
    unproven = walked.where("problem = 'unproven'").selectExpr("block as number", _AT)
    unmade = settled.groups(found).where("not is_made").join(unproven, list(settled.PARTITION), "left_anti")
    unmade = unmade.select(*settled.PARTITION, "group", sf.lit(True).alias("is_unmade"))
    holes = gaps.selectExpr("stream as g_stream", "created_ns as g_created", "first as g_first", "last as g_last")
    in_hole = "g_stream = stream and g_created = created_ns and offset + 1 between g_first and g_last"
    letters, graves = _letters(messages, topics, gaps)
    alike = "partition by of_tenant, topic, burials > 0 and has_letter is null order by partition, offset"
    whole = (
        told.join(sf.broadcast(_reached(topics, cut)), "number", "left")
        .join(known, ["stream", "created_ns", "partition", "offset"], "left")
        .join(sf.broadcast(holes), sf.expr(in_hole), "left")
        .join(sf.broadcast(unmade), [*settled.PARTITION, "group"], "left")
        .join(letters, ["of_tenant", "topic", "partition", "offset"], "left")
        .join(sf.broadcast(graves), ["of_tenant", "topic"], "left")
        .selectExpr("*", f"row_number() over ({alike}) as unburied")
    )
    problems = f"if(times > 1, 'two_outcomes', null), if(is_unmade, 'unknown_group', null), {_MESSAGE_OF}, {_LETTER_OF}"
    return whole.selectExpr(*_TOLD, f"explode(array_compact(array({problems}))) as problem")


def _letters(messages: DataFrame, topics: DataFrame, gaps: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Which messages have a dead letter, how far the letters of each topic were read, and how many of them may have
    stood in known gaps."""
    from pyspark.sql import functions as sf

    owners = topics.selectExpr("stream", "created_ns", "tenant as of_tenant")
    dead = messages.where(f"startswith(topic, '{DEAD_PREFIX}')").join(sf.broadcast(owners), ["stream", "created_ns"])
    letters = dead.where("original_topic is not null").selectExpr(
        "of_tenant", "original_topic as topic", "original_partition as partition", "original_offset as offset",
        "true as has_letter",
    ).distinct()  # fmt: skip
    holed = gaps.groupBy("stream").agg(sf.expr("sum(last - first + 1)").alias("holed"))
    graves = (
        dead.selectExpr("of_tenant", f"substr(topic, {len(DEAD_PREFIX) + 1}) as topic", "stream", "timestamp")
        .join(sf.broadcast(holed), "stream", "left")
        .groupBy("of_tenant", "topic")
        .agg(sf.max("timestamp").alias("grave_at"), sf.max("holed").alias("holed"))
    )
    return letters, graves


def _outcomes(messages: DataFrame, records: DataFrame, topics: DataFrame, walked: DataFrame) -> DataFrame:
    """The outcome of each message and group; `no_outcome` where the broker forgot a message as settled, and a group
    that was alive has none for it. Dead letters may grow old."""
    from pyspark.sql import functions as sf

    alive = walked.where("what = 'alive'").selectExpr(
        "block as number", _AT, "id as `group`", "first", "last", "true as is_due"
    )
    found = settled.outcomes(messages, records, topics).alias("m")
    same = " and ".join(f"m.{name} = a.{name}" for name in (*settled.PARTITION, "`group`"))
    is_within = sf.expr(f"{same} and offset between first and last")
    whole = found.join(sf.broadcast(alive.alias("a")), is_within, "left").selectExpr("m.*", "is_due")
    problem = f"if(outcome = 'lapsed' and is_due and not startswith(topic, '{DEAD_PREFIX}'), 'no_outcome', outcome)"
    nothing = {"times": "0L", "record": "0L", "last_record": "0L"}
    return whole.selectExpr(
        *(f"{nothing[name]} as {name}" if name in nothing else name for name in _TOLD), f"{problem} as problem"
    )
