"""The audit of gold: every row must follow from silver as it was when gold was computed.

Gold is derived again by its own functions, from the rows of silver below the version of bronze that it names, and each
row is compared by its key. Columns whose values depend on how Spark split the work, such as approximate percentiles,
are left out: those that count and sum are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from oncewire.pipeline.auditing.frames import literal, result, union
from oncewire.pipeline.gold.refresh import derive
from oncewire.pipeline.gold.tables import (
    CONSUMERS,
    DEAD_LETTERS,
    HEALTH,
    OUTCOMES,
    RUNS,
    STEPS,
    THROUGHPUT,
    USAGE,
)
from oncewire.pipeline.lake.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COMPARED: Final[dict[Table, tuple[str, ...]]] = {
    HEALTH: ("messages", "per_s", "max_ms"),
    CONSUMERS: ("done", "duplicate", "terminated", "dead", "passed", "given_up", "redeliveries"),
    DEAD_LETTERS: ("letters",),
    USAGE: ("quantity", "events", "late_events", "late_quantity", "last_at"),
    RUNS: ("steps", "started_at", "ended_at", "depth", "retries", "is_cut"),
    STEPS: ("tenant", "run", "parent", "type", "subject", "at", "depth", "retries", "done_at"),
    THROUGHPUT: ("produced", "bytes", "settled", "dead", "failed", "per_s"),
    OUTCOMES: ("tenant", "topic", "partition", "timestamp", "run_id", "step_id", "outcome", "attempts"),
}
"""Besides the keys."""


def audit_gold(kept: Mapping[Table, DataFrame], silver: Mapping[str, DataFrame]) -> DataFrame:
    """Tables of gold against silver as it was when they were computed."""
    from pyspark.sql import functions as sf

    made = derive(silver)
    told = union([_told(table, frame, 1) for table, frame in made.items() if table in kept]
                 + [_told(table, frame, -1) for table, frame in kept.items()])  # fmt: skip
    by_key = told.groupBy("name", "key").agg(
        sf.count_if(sf.expr("sign > 0")).alias("made"),
        sf.count_if(sf.expr("sign < 0")).alias("kept"),
        sf.expr("max(if(sign > 0, content, null))").alias("wanted"),
        sf.expr("max(if(sign < 0, content, null))").alias("there"),
    )
    problem = "case when kept > 1 then 'doubled' when made = 0 then 'not_in_silver' when kept = 0 then 'missing' "
    problem += "when not (wanted <=> there) then 'differs' else 'rows' end"
    judged = by_key.selectExpr("*", f"{problem} as problem")
    shown = (
        "concat(name, ' ', key, if(problem = 'differs', concat(' says ', there, ' where silver gives ', wanted), ''))"
    )
    return union(
        [
            result(judged.where("problem != 'rows'"), "error", "gold", "", detail=shown, amount="1L"),
            result(
                judged.where("problem = 'rows'").groupBy("name").count(), "count", "gold", "rows", chain="name",
                amount="count",
            ),
        ]
    )  # fmt: skip


def _told(table: Table, frame: DataFrame, sign: int) -> DataFrame:
    keys, others = (", ".join(f"`{name}`" for name in names) for names in (table.keys, COMPARED[table]))
    return frame.selectExpr(
        f"{literal(table.name)} as name", f"to_json(struct({keys})) as key", f"to_json(struct({others})) as content",
        f"{sign} as sign",
    )  # fmt: skip
