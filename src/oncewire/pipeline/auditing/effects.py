"""The audits of what came of inputs, as DataFrame functions: effects by their ids, dead letters and their originals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oncewire._ground.contracts import letters
from oncewire._ground.contracts.headers import MSG_ID
from oncewire.pipeline.auditing.excuses import Group, unexcused
from oncewire.pipeline.auditing.frames import Chains, Cut, Keep, claims, header, literal, newest, result, union

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EFFECT_PREFIXES: Final = ("fx.", "sha256:")
"""Of ids that effects have; the second is that of a message on `sr.>`, whoever sent it."""
GROUPS_MAX: Final = 10_000
"""Blocks that miss effects, for which room is looked for in known gaps. Of more none is excused."""


def audit_effects(
    bronze: DataFrame, once: DataFrame, gaps: DataFrame, chains: Chains, cut: Cut, keep: Keep = lambda frame: frame
) -> DataFrame:
    """Every effect of a confirmed block stands in bronze at least once, or known gaps have room for it where it must
    have stood. A second copy was published again: readers drop it by its id."""
    from pyspark.sql import functions as sf

    spark = bronze.sparkSession
    known = spark.createDataFrame(list(chains.horizons.items()) or [("", 0)], "chain string, horizon long")
    effects = once.join(sf.broadcast(known), "chain").select(
        "chain", "number", "horizon", sf.explode("effects").alias("e")
    )
    wanted = effects.where("number <= horizon").selectExpr("e.id as id", "e.target as target", "chain", "number")
    is_effect = " or ".join(f"startswith(id, '{prefix}')" for prefix in EFFECT_PREFIXES)
    copies = bronze.select(header(MSG_ID).alias("id")).where(is_effect)
    counted = copies.groupBy("id").agg(sf.count("*").alias("copies"))
    joined = keep(wanted.join(counted, "id", "left").withColumn("seen", sf.expr(_sight(cut))))
    groups = _groups(joined, once, gaps)
    judged = joined.join(sf.broadcast(groups), ["chain", "number", "target"], "left").selectExpr(
        "id", "target", "chain", "number", "room", "things",
        "case when copies = 1 then 'once' when copies > 1 then 'republished' when seen != 'missing' then seen "
        "when room >= things then 'perhaps_in_gap' else 'missing' end as problem",
    )  # fmt: skip
    room = "if(room > 0, concat(': known gaps have room for ', room, ' of the ', things, ' that its block misses'), '')"
    wrong = "problem in ('missing', 'no_target')"
    return union(
        [
            result(
                judged.where(wrong), "error", "effects", "", stream="coalesce(target, '')", chain="chain",
                block="number", id="id", amount="1L", detail=f"concat('confirmed, and not in bronze', {room})",
            ),
            result(
                judged.where(f"not {wrong}").groupBy("chain", "problem").count(), "count", "effects", "",
                chain="chain", amount="count",
            ),
            result(
                effects.where("number > horizon").groupBy("chain").count(), "count", "effects", "pending",
                chain="chain", amount="count",
            ),
        ]
    )  # fmt: skip


def _groups(joined: DataFrame, once: DataFrame, gaps: DataFrame) -> DataFrame:
    """The effects that each block misses in each stream, and for how many of them known gaps have room. They were
    published behind what was confirmed when the block was made, and before what was confirmed with it."""
    from pyspark.sql import functions as sf

    missing = joined.where("copies is null and seen = 'missing'").groupBy("chain", "number", "target").count()
    heads = once.selectExpr("chain", "number as at", "confirmed_block", "confirmed")
    last = "get(filter(confirmed, c -> c.stream = target), 0).sequence"
    spans = missing.join(heads, "chain").groupBy("chain", "number", "target", "count")
    told = spans.agg(
        sf.expr(f"coalesce(max(if(at = number, {last}, null)), 0L)").alias("low"),
        sf.expr(f"min_by({last}, at) filter (where confirmed_block >= number)").alias("high"),
    ).limit(GROUPS_MAX)
    rows = told.collect()
    ranges: dict[str, list[tuple[int, int]]] = {row.target: [] for row in rows}
    for gap in gaps.where(sf.col("stream").isin(sorted(ranges))).collect() if ranges else ():
        ranges[gap.stream].append((gap.first, gap.last))
    found = []
    for target, known in ranges.items():
        mine = [row for row in rows if row.target == target]
        spread = [Group(row.low + 1 if row.high > row.low else 1, row.high, row["count"]) for row in mine]
        left = unexcused(spread, known)
        found += [(row.chain, row.number, target, row["count"], row["count"] - rest)
                  for row, rest in zip(mine, left, strict=True)]  # fmt: skip
    ddl = "chain string, number long, target string, things long, room long"
    return once.sparkSession.createDataFrame(found, ddl)


def _sight(cut: Cut) -> str:
    """What it means that an effect is not in bronze, by its target: a stream that is not in the lake is out of
    sight."""
    seen = ", ".join(literal(one) for one in sorted(newest(cut)))
    is_seen = f"target in ({seen})" if seen else "false"
    return f"case when target is null then 'no_target' when {is_seen} then 'missing' else 'out_of_sight' end"


def audit_letters(
    bronze: DataFrame, once: DataFrame, gaps: DataFrame, cut: Cut, keep: Keep = lambda frame: frame
) -> DataFrame:
    """Every dead letter has its origin, byte for byte, and no agent calls that one done."""
    from pyspark.sql import functions as sf

    named = {
        "origin": header(letters.STREAM),
        "origin_created_ns": header(letters.CREATED).try_cast("long"),
        "origin_sequence": header(letters.SEQUENCE).try_cast("long"),
        "consumer": header(letters.CONSUMER),
        "body": header(letters.PAYLOAD),
        "injected": header(letters.INJECTED),
        "id": header(MSG_ID),
    }
    found = bronze.where("startswith(subject, 'dlq.')").withColumns(named)
    place = {"stream": "stream", "created_ns": "created_ns", "incarnation": "incarnation", "first": "sequence"}
    real = found.where("injected is null")
    spark = bronze.sparkSession
    limits = spark.createDataFrame(
        [(*lifetime[:2], reached) for lifetime, reached in cut.items()] or [("", 0, 0)],
        "origin string, origin_created_ns long, reached long",
    )
    limits = limits.groupBy("origin", "origin_created_ns").agg(sf.max("reached").alias("reached"))
    originals = bronze.selectExpr(
        "stream as origin", "created_ns as origin_created_ns", "sequence as origin_sequence", "payload as original"
    )
    holes = gaps.selectExpr("stream as g_stream", "created_ns as g_created", "first as g_first", "last as g_last")
    in_hole = sf.expr(
        "g_stream = origin and g_created = origin_created_ns and origin_sequence between g_first and g_last"
    )
    there = originals.join(sf.broadcast(real.select(*_ORIGIN).distinct()), _ORIGIN)
    there = there.selectExpr(*_ORIGIN, "sha2(original, 256) as digest", "true as is_there")
    judged = keep(
        real.join(sf.broadcast(limits), ["origin", "origin_created_ns"], "left")
        .join(there, _ORIGIN, "left")
        .join(sf.broadcast(holes), in_hole, "left")
        .withColumn("problem", sf.expr(_LETTER))
    )
    claimed = claims(once).selectExpr(
        "stream as origin", "created_ns as origin_created_ns", "consumer", "first as c_first", "last as c_last",
        "outcome", "number", "chain",
    )  # fmt: skip
    contradicted = judged.join(claimed, ["origin", "origin_created_ns", "consumer"]).where(
        "origin_sequence between c_first and c_last and outcome in ('done', 'duplicate', 'passed')"
    )
    origin = "concat(origin, ' ', origin_sequence, ' for ', consumer)"
    bad = judged.where("problem in ('no_origin', 'other_bytes')")
    return union(
        [
            result(
                bad, "error", "letters", "", **place, last="sequence", id="id", amount="1L",
                detail=origin,
            ),
            result(
                contradicted, "error", "letters", "contradicted", **place, last="sequence", id="id", chain="chain",
                block="number", amount="1L", detail=f"concat({origin}, ' is ', outcome, ' in block ', number)",
            ),
            result(
                judged.where("problem not in ('no_origin', 'other_bytes')").groupBy("problem").count(), "count",
                "letters", "", amount="count",
            ),
            result(
                found.where("injected is not null").groupBy().count().where("count > 0"), "count", "letters",
                "injected", amount="count",
            ),
        ]
    )  # fmt: skip


_ORIGIN = ["origin", "origin_created_ns", "origin_sequence"]
_LETTER = """case
    when is_there and body is null and digest != sha2(payload, 256) then 'other_bytes'
    when is_there then 'with_origin'
    when reached is null then 'out_of_sight'
    when origin_sequence > reached then 'pending'
    when g_stream is not null then 'in_gap'
    else 'no_origin' end"""
