"""An audit from beginning to end: choose the cut, run the checks, put the verdict together, keep it.

The cut is the version of bronze that silver has taken in, so that every table speaks of the same messages. All of it
can be run again for the same versions and says the same.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oncewire._ground.contracts.topics import STREAM_PREFIXES
from oncewire._ground.errors import NotFound
from oncewire.pipeline import tables
from oncewire.pipeline.auditing import frames, settlements
from oncewire.pipeline.auditing.rules import Lifetime
from oncewire.pipeline.auditing.verdict import Chain, Count, Finding, Stop, Verdict, read_verdict, write_verdict
from oncewire.pipeline.families import Families
from oncewire.pipeline.gold.tables import AUDITS
from oncewire.pipeline.lake.log import SILVER_APP, translated
from oncewire.pipeline.lake.place import Place, place_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FINDINGS_MAX: Final = 200
NOTES_MAX: Final = 20
COUNTS_MAX: Final = 10_000
_NARROW: Final = (*frames.PLACE, "sequence", "key", "digest", "msg_id")
_DERIVED: Final = (tables.GAPS, tables.QUARANTINE, tables.TOPICS, *tables.SILVER.values())


def audit(
    spark: SparkSession,
    lake: str | Path | Place,
    *,
    families: Families = (),
    group_idle_ms: int = settlements.IDLE_MS,
    findings_max: int = FINDINGS_MAX,
) -> Verdict:
    """All checks at one cut of the lake. Reads the lake only; the verdict is kept by `keep_verdict`."""
    started = time.monotonic()
    at_ms = time.time_ns() // 1_000_000
    now = tables.open_table(lake, "bronze")
    versions = _versions(lake, now.version())
    then = tables.open_table(lake, "bronze", versions["bronze"])
    cut, newest = tables.high_water(then), tables.high_water(now)
    found = {name: tables.read_table(spark, lake, name, at, _columns(name)) for name, at in versions.items()}
    with ExitStack() as stack:
        chains, results = _results(stack, found, cut, families, group_idle_ms)
        counts = _counts(results)
        errors = sum(row.rows for row in counts if row.what == "error")
        findings = _findings(results, "error", findings_max) if errors else []
        notes = _findings(results, "note", NOTES_MAX) if any(row.what == "note" for row in counts) else []
    return Verdict(
        is_good=errors == 0,
        at_ms=at_ms,
        took_s=round(time.monotonic() - started, 3),
        cut=[Stop(*place, at, newest.get(place, at) - at) for place, at in sorted(cut.items())],
        versions=versions,
        chains=[Chain(name, end, chains.horizons[name]) for name, end in sorted(chains.ends.items())],
        counts=[
            Count(row.check, row.problem, row.chain or row.stream, row.total, row.first or 0, row.last or 0)
            for row in counts
            if row.what == "count"
        ],
        errors=errors,
        findings=findings,
        notes=notes,
    )


def _columns(name: str) -> tuple[str, ...] | None:
    """Of silver the narrow ones are compared."""
    return _NARROW if name.startswith("silver/") else None


def _versions(lake: str | Path | Place, bronze: int) -> dict[str, int]:
    """Versions that belong together: bronze as far as silver has taken it in. The tables that are derived from it may
    be a batch ahead, which says nothing about what lies below."""
    batches = _open(lake, tables.BATCHES.name)
    if batches is None:
        return {"bronze": bronze}
    found = {table.name: _open(lake, table.name) for table in _DERIVED}
    has = batches.transaction_version(SILVER_APP)
    return {"bronze": bronze if has is None else min(bronze, has)} | {
        name: table.version() for name, table in found.items() if table is not None
    }


def _open(lake: str | Path | Place, name: str) -> Any:
    try:
        return tables.open_table(lake, name)
    except NotFound:
        return None


def _results(
    stack: ExitStack, found: dict[str, DataFrame], cut: dict[Lifetime, int], families: Families, group_idle_ms: int
) -> tuple[frames.Chains, DataFrame]:
    """Every check; what several of them read is computed once and given back at the end."""

    def kept(frame: DataFrame) -> DataFrame:
        frame.persist()
        stack.callback(frame.unpersist)
        return frame

    bronze = found["bronze"]
    spark = bronze.sparkSession
    gaps = found.get("gaps")
    if gaps is None:
        gaps = spark.createDataFrame([], "stream string, created_ns long, incarnation int, first long, last long")
    silver = _silver(found)
    blocks = kept(frames.blocks(bronze))
    chains = frames.audit_chains(blocks, gaps, cut)
    stack.callback(chains.results.unpersist)
    once = frames.distinct_blocks(blocks, chains)
    positions = kept(frames.audit_positions(bronze, once, gaps, chains, cut, silver, found.get("quarantine"), families))
    results = [
        chains.results,
        positions,
        frames.audit_sums(positions, once, chains),
        frames.audit_effects(bronze, once, gaps, chains, cut),
        frames.audit_letters(bronze, once, gaps, cut),
    ]
    if silver is not None:
        results.append(frames.audit_silver(positions, silver))
    if any(stream.startswith(STREAM_PREFIXES) for stream, _, _ in cut):
        messages, records = kept(settlements.messages_of(bronze)), kept(settlements.records_of(bronze))
        topics = found["topics"]
        results.append(settlements.audit_settlements(messages, records, topics, gaps, cut, group_idle_ms, keep=kept))
    parts = 2 * spark.sparkContext.defaultParallelism
    return chains, kept(frames.union(results).where("what in ('error', 'note', 'count')").coalesce(parts))


def _silver(found: dict[str, DataFrame]) -> DataFrame | None:
    """The narrow columns of all families; those without a digest have none."""
    parts = []
    for table in tables.SILVER.values():
        if table.name in found:
            has_digest = "digest" in dict(table.columns)
            digest = "digest" if has_digest else "cast(null as binary) as digest"
            parts.append(found[table.name].selectExpr(*frames.PLACE, "sequence", "key", digest, "msg_id"))
    return frames.union(parts) if parts else None


def _counts(results: DataFrame) -> list[Any]:
    """Everything that was counted, by check and by stream or agent."""
    from pyspark.sql import functions as sf

    by = ["what", "check", "problem", "stream", "chain"]
    grouped = results.groupBy(*by).agg(
        sf.sum("amount").alias("total"),
        sf.count("*").alias("rows"),
        sf.expr("min(if(first > 0, first, null))").alias("first"),
        sf.max("last").alias("last"),
    )
    return grouped.orderBy(*by).limit(COUNTS_MAX).collect()


def _findings(results: DataFrame, what: str, limit: int) -> list[Finding]:
    columns = [*Finding.__struct_fields__[:-1], "amount as count"]
    found = results.where(f"what = '{what}'").selectExpr(*columns)
    rows = found.orderBy("check", "problem", "stream", "chain", "block", "first").limit(limit).collect()
    return [Finding(**row.asDict()) for row in rows]


# ---- kept verdicts


def keep_verdict(lake: str | Path | Place, verdict: Verdict) -> None:
    """One more row of gold/audits."""
    import pyarrow as pa
    from deltalake import write_deltalake

    at = datetime.fromtimestamp(verdict.at_ms / 1_000, UTC)
    row = {
        "at": at,
        "is_good": verdict.is_good,
        "errors": verdict.errors,
        "pending": verdict.pending,
        "took_s": verdict.took_s,
        "verdict": write_verdict(verdict).decode(),
    }
    place = place_of(lake) / AUDITS.name
    with translated(AUDITS.name):
        rows = pa.Table.from_pylist([row], AUDITS.schema)
        write_deltalake(str(place), rows, mode="append", storage_options=place.options)


def last_verdicts(lake: str | Path | Place, count: int = 1) -> list[Verdict]:
    """The newest ones that are kept, the newest first; none when nothing was audited yet."""
    table = _open(lake, AUDITS.name)
    if table is None:
        return []
    rows = tables.dataset(table).to_table(columns=["at", "verdict"]).sort_by([("at", "descending")]).slice(0, count)
    return [read_verdict(one) for one in rows["verdict"].to_pylist()]
