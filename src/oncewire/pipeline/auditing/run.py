"""An audit from beginning to end: open the tables, choose the cut, run the checks, put the verdict together, keep it.

The cut is what silver has taken in of bronze, so that every table speaks of the same messages. What is checked are the
tables as they are now, without what came since the cut. All of it can be run again on the same versions and says the
same.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from oncewire._ground.contracts.topics import STREAM_PREFIXES
from oncewire._ground.errors import NotFound
from oncewire.pipeline import tables
from oncewire.pipeline.auditing import effects, frames, known, settlements, sums
from oncewire.pipeline.auditing.derived import audit_gold
from oncewire.pipeline.auditing.explain import explained
from oncewire.pipeline.auditing.intact import Intact, check_files
from oncewire.pipeline.auditing.narrow import Sample
from oncewire.pipeline.auditing.opened import Opened, Told, log_of, look_back, open_lake
from oncewire.pipeline.auditing.verdict import (
    Chain,
    Count,
    Finding,
    Head,
    Known,
    Stop,
    Verdict,
    read_verdict,
    write_verdict,
)
from oncewire.pipeline.families import Families
from oncewire.pipeline.gold.refresh import DERIVED, GOLD_APP
from oncewire.pipeline.gold.tables import AUDITS
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.lake.place import Place
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.tables import Lifetime

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FINDINGS_MAX: Final = 200
SAMPLE_ROWS: Final = 20_000
"""About so many messages of a lake are read a second time."""
NOTES_MAX: Final = 20
COUNTS_MAX: Final = 10_000
_BELOW: Final = ("bronze", "quarantine", *(table.name for table in tables.SILVER.values()))
_READ: Final = (*_BELOW, "gaps", "topics", *(table.name for table in DERIVED))


def audit(
    spark: SparkSession,
    lake: str | Path | Place,
    *,
    families: Families = (),
    group_idle_ms: int = settlements.IDLE_MS,
    findings_max: int = FINDINGS_MAX,
    is_deep: bool = False,
    seed: int | None = None,
    earlier: Sequence[Known] = (),
    accepted: Collection[str] = (),
) -> Verdict:
    """All checks at one cut of the lake. Reads the lake only; the verdict is kept by `keep_verdict`.

    The audit's own reader, which is slow, reads a sample of the messages by a `seed`, or all of them (`is_deep`).

    It is compared with the last verdict that the lake keeps, and with `earlier`, what is known of it elsewhere.
    `accepted` names versions of tables that were not the pipeline's, as `table@version`: a person has looked at them.
    """
    started = time.monotonic()
    at_ms = time.time_ns() // 1_000_000
    opened = open_lake(lake)
    intact = check_files(spark, opened.place, opened.handles)
    records = [*_last_known(opened, intact), *earlier]
    told = look_back(opened, records, accepted)
    sample = _sample(opened, is_deep, secrets.randbits(31) if seed is None else seed)
    with ExitStack() as stack:
        found = {name: _read(spark, opened, name, intact) for name in _READ if name in opened.handles}
        asked = {(head.chain, head.number) for one in records for head in one.chains}
        chains, results = _results(stack, found, opened, intact, asked, families, group_idle_ms, sample)
        rows = _counts(results)
        errors = sum(row.rows for row in rows if row.what == "error")
        listed = explained(found, _findings(results, "error", findings_max), families) if errors else []
        notes = _findings(results, "note", NOTES_MAX) if any(row.what == "note" for row in rows) else []
    chained = [finding for one in records for finding in known.broken_off(one, chains.ends, chains.hashes)]
    balance = _balance(opened, intact, rows)
    unbalanced = [one for one in balance if isinstance(one, Finding)]
    first = [*intact.findings, *told.findings, *dict.fromkeys(chained), *unbalanced]
    return Verdict(
        is_good=not (errors or first),
        at_ms=at_ms,
        took_s=round(time.monotonic() - started, 3),
        cut=[Stop(*place, at, opened.newest[place] - at) for place, at in sorted(opened.cut.items())],
        versions=opened.versions,
        chains=[Chain(name, end, chains.horizons[name]) for name, end in sorted(chains.ends.items())],
        counts=[*_shown(rows), *intact.counts, *(one for one in balance if isinstance(one, Count))],
        errors=errors + len(first),
        findings=[*first, *listed][:findings_max],
        notes=[*told.notes, *notes],
        known=_remembered(opened, told, chains, records, at_ms, first),
        unread=sum(len(files) for files in intact.unread.values()),
        seed=sample.seed,
        one_in=sample.one_in,
        compared_ms=[one.at_ms for one in records],
    )


def _sample(opened: Opened, is_deep: bool, seed: int) -> Sample:
    """Of a small lake all messages are read twice."""
    rows = sum(tables.files_of(opened.handles["bronze"]).values())
    return Sample(1 if is_deep else max(1, rows // SAMPLE_ROWS), seed)


def _last_known(opened: Opened, intact: Intact) -> list[Known]:
    """What the last verdict that the lake keeps has seen."""
    if AUDITS.name not in opened.handles or AUDITS.name in intact.unread:
        return []
    return [one.known for one in last_verdicts(opened.place)]


def _read(spark: SparkSession, opened: Opened, name: str, intact: Intact) -> DataFrame:
    """A table as it is now, without what came since the cut."""
    without = {file.path for file in intact.unread.get(name, ())}
    frame = tables.read_files(spark, opened.place, name, opened.handles[name], without=without)
    return frames.below(frame, opened.cut, opened.newest) if name in _BELOW else frame


def _remembered(
    opened: Opened, told: Told, chains: frames.Chains, records: Sequence[Known], at_ms: int, findings: Sequence[Finding]
) -> Known:
    """What the next audit must find."""
    now = Known(
        at_ms,
        [Stop(*place, at) for place, at in sorted(opened.cut.items())],
        [Head(name, end, chains.hashes.get((name, end), "")) for name, end in sorted(chains.ends.items())],
        told.logs,
        told.outside,
    )
    broken = {one.chain or one.table for one in findings if one.check in ("known", "tables")}
    return known.remembered(records, now, broken)


def _balance(opened: Opened, intact: Intact, rows: Sequence[Any]) -> list[Finding | Count]:
    """What silver's batches say, against what was counted. Where files cannot be read nobody can count."""
    if "batches" not in opened.handles or intact.unread.keys() & {"batches", *_BELOW}:
        return []
    counted = {(row.check, row.problem): row.total for row in rows if row.what == "balance"}
    names = ("rows_in", "rows_out", "quarantined")
    batches = tables.dataset(opened.handles["batches"]).to_table(columns=["family", *names])
    summed: dict[tuple[str, str], int] = {}
    for batch in batches.to_pylist():
        for name in names:
            key = batch["family"] or "", name
            summed[key] = summed.get(key, 0) + batch[name]
    found: list[Finding | Count] = []
    for one in sums.compare_balance(summed, counted):
        if one.what == "error":
            found.append(Finding(one.check, one.problem, detail=one.detail, count=one.amount))
        else:
            found.append(Count(one.check, one.problem, one.chain, one.amount))
    return found


def _shown(rows: Sequence[Any]) -> list[Count]:
    return [
        Count(row.check, row.problem, row.chain or row.stream, row.total, row.first or 0, row.last or 0)
        for row in rows
        if row.what == "count"
    ]


def _open(lake: str | Path | Place, name: str) -> Any:
    try:
        return tables.open_table(lake, name)
    except NotFound:
        return None


def _results(
    stack: ExitStack,
    found: dict[str, DataFrame],
    opened: Opened,
    intact: Intact,
    asked: Collection[tuple[str, int]],
    families: Families,
    group_idle_ms: int,
    sample: Sample,
) -> tuple[frames.Chains, DataFrame]:
    """Every check; what several of them read is computed once and given back at the end."""

    def kept(frame: DataFrame) -> DataFrame:
        frame.persist()
        stack.callback(frame.unpersist)
        return frame

    bronze, cut = found["bronze"], opened.cut
    spark = bronze.sparkSession
    ranges = "stream string, created_ns long, incarnation int, first long, last long"
    lost = spark.createDataFrame([(*place, low, high) for place, low, high in intact.lost("bronze")], ranges)
    judged = kept(frames.judged_gaps(found["gaps"])) if "gaps" in found else None
    known_gaps = judged.where("is_known").select(*lost.columns) if judged is not None else lost.limit(0)
    gaps = known_gaps.union(lost) if intact.unread else known_gaps
    silver = {name: found[table.name] for name, table in tables.SILVER.items() if table.name in found}
    quarantine = found.get("quarantine")
    blocks = kept(frames.blocks(bronze))
    chains = frames.audit_chains(blocks, gaps, cut, asked)
    stack.callback(chains.results.unpersist)
    once = frames.distinct_blocks(blocks, chains)
    is_derived = opened.taken is not None
    positions = kept(
        frames.audit_positions(
            bronze, once, known_gaps, chains, cut, silver if is_derived else None, quarantine, families,
            lost if intact.unread else None, sample,
        )
    )  # fmt: skip
    results = [
        chains.results,
        positions,
        frames.audit_sums(positions, once, chains),
        effects.audit_effects(bronze, once, gaps, chains, cut, keep=kept),
        effects.audit_letters(bronze, once, gaps, cut, keep=kept),
    ]
    if judged is not None:
        results.append(frames.audit_gaps(judged))
    if is_derived:
        results.append(frames.audit_silver(positions, silver))
    if quarantine is not None:
        results.append(frames.audit_quarantine(bronze, quarantine))
    if any(stream.startswith(STREAM_PREFIXES) for stream, _, _ in cut) and "topics" in found:
        messages, records = kept(settlements.messages_of(bronze)), kept(settlements.records_of(bronze))
        topics = found["topics"]
        results.append(settlements.audit_settlements(messages, records, topics, gaps, cut, group_idle_ms, keep=kept))
    results += _gold(opened, intact, found)
    parts = int(spark.conf.get("spark.sql.shuffle.partitions") or 200)
    wanted = "what in ('error', 'note', 'count', 'balance')"
    return chains, kept(frames.union(results).where(wanted).coalesce(parts))


def _gold(opened: Opened, intact: Intact, found: dict[str, DataFrame]) -> list[DataFrame]:
    """Gold against silver, for each version of bronze that tables of gold were computed at."""
    by_version: dict[int, dict[Table, DataFrame]] = {}
    for table in DERIVED:
        version = opened.handles[table.name].transaction_version(GOLD_APP) if table.name in found else None
        if version is not None and table.name not in intact.unread:
            by_version.setdefault(version, {})[table] = found[table.name]
    results = []
    for version, kept in by_version.items():
        cut = opened.cut_at(version)
        if cut is None or intact.unread.keys() & {table.name for table in tables.SILVER.values()}:
            continue
        silver = {name: _silver_at(opened, found, table, cut) for name, table in tables.SILVER.items()}
        results.append(audit_gold(kept, silver | {"topics": _silver_at(opened, found, tables.TOPICS, None)}))
    return results


def _silver_at(
    opened: Opened, found: dict[str, DataFrame], table: Table, cut: Mapping[Lifetime, int] | None
) -> DataFrame:
    """The rows of a table as they were at a cut; none of a table that is not there."""
    if table.name not in found:
        from pyspark.sql.pandas.types import from_arrow_schema

        return found["bronze"].sparkSession.createDataFrame([], from_arrow_schema(table.schema)).limit(0)
    return found[table.name] if cut is None else frames.below(found[table.name], cut, opened.newest)


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
    columns = [name for name in Finding.__struct_fields__ if name not in ("count", "table")]
    found = results.where(f"what = '{what}'").selectExpr(*columns, "amount as count")
    rows = found.orderBy("check", "problem", "stream", "chain", "block", "first").limit(limit).collect()
    return [Finding(**row.asDict()) for row in rows]


# ---- kept verdicts


def keep_verdict(lake: str | Path | Place, verdict: Verdict) -> Known:
    """One more row of gold/audits. What is known of the lake then, that table included, to be kept elsewhere too."""
    import pyarrow as pa

    at = datetime.fromtimestamp(verdict.at_ms / 1_000, UTC)
    row = {
        "at": at,
        "is_good": verdict.is_good,
        "errors": verdict.errors,
        "pending": verdict.pending,
        "took_s": verdict.took_s,
        "verdict": write_verdict(verdict).decode(),
    }
    home = Lake(lake)
    handle = home.open(AUDITS)
    rows = pa.Table.from_pylist([row], AUDITS.schema)
    written = list(files.write_files(home.root(AUDITS), AUDITS, str(verdict.at_ms), rows, is_partitioned=False))
    home.commit_all(handle, AUDITS, written, {})
    logs = [log for log in verdict.known.logs if log.table != AUDITS.name]
    return replace(verdict.known, logs=[*logs, log_of(AUDITS.name, home.open(AUDITS))])


def last_verdicts(lake: str | Path | Place, count: int = 1) -> list[Verdict]:
    """The newest ones that are kept, the newest first; none when nothing was audited yet."""
    table = _open(lake, AUDITS.name)
    if table is None:
        return []
    rows = tables.dataset(table).to_table(columns=["at", "verdict"]).sort_by([("at", "descending")]).slice(0, count)
    return [read_verdict(one) for one in rows["verdict"].to_pylist()]
