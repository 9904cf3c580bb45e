"""The audits as DataFrame functions: tables of the lake in, results out (`rules.RESULT`).

`bronze`, `gaps`, `silver` and `quarantine` are the lake's tables at versions that belong together, `cut` says up to
which sequence bronze has each stream. Nothing is collected but facts per chain and per agent. The one large shuffle is
of narrow rows, by buckets of 65,536 sequences; payloads stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from oncewire._ground.contracts.topics import STREAM_PREFIXES
from oncewire.pipeline.auditing.chains import Hole
from oncewire.pipeline.auditing.excuses import Ranges
from oncewire.pipeline.auditing.narrow import DERIVED, FACT, ROW, Derived, Narrow, Sample, check_buckets
from oncewire.pipeline.auditing.rules import BUCKET, RESULT, Lifetime, Reader, agent_of, bucket_of
from oncewire.pipeline.auditing.workers import BLOCK, compare_sums, judge_gaps, read_blocks, walk_chains
from oncewire.pipeline.families import Families
from oncewire.pipeline.tables import CONFLICT, QUARANTINE, RAW

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

LEDGER = "LEDGER"
PLACE = ("stream", "created_ns", "incarnation")
_RESULT_COLUMNS = [one.split(" ") for one in RESULT.split(", ")]
_NOTHING = {"string": "''", "long": "0L", "int": "0", "binary": "X''"}

Cut = Mapping[Lifetime, int]
"""Up to which sequence bronze has each lifetime of a stream."""
Keep = Callable[["DataFrame"], "DataFrame"]
"""Given a frame that is used several times, to be cached as the caller likes."""


def newest(cut: Cut) -> dict[str, int]:
    """The cut of each stream as it is now: blocks name their targets without a lifetime. None is a topic, of which
    there may be thousands."""
    return {
        lifetime[0]: sequence
        for lifetime, sequence in sorted(cut.items())
        if not lifetime[0].startswith(STREAM_PREFIXES)
    }


def result(frame: DataFrame, what: str, check: str, problem: str, **columns: str) -> DataFrame:
    """Rows as results: the named columns are SQL expressions, the others are empty. Without a `problem` the rows have
    their own."""
    fixed = {"what": f"'{what}'", "check": f"'{check}'", "problem": f"'{problem}'" if problem else "problem"}
    given = fixed | columns
    return frame.selectExpr(
        *(f"cast({given.get(name, _NOTHING[kind])} as {kind}) as {name}" for name, kind in _RESULT_COLUMNS)
    )


def union(frames: Sequence[DataFrame]) -> DataFrame:
    return reduce(lambda one, other: one.unionByName(other), frames)


def header(name: str) -> Column:
    """The first value of a header, as text."""
    from pyspark.sql import functions as sf

    return sf.expr(f"cast({header_value(name)} as string)")


def header_value(name: str) -> str:
    """The same as bytes, in SQL: without a function per element, which Spark would interpret row by row."""
    return f"get(headers.value, cast(array_position(headers.key, '{name}') - 1 as int))"


def below(frame: DataFrame, cut: Cut, newest: Cut) -> DataFrame:
    """Rows without those that came since the cut: what lies above it, and not above what bronze has now, waits. What
    lies above both stays, and is wrong."""
    from pyspark.sql import functions as sf

    if cut == newest:
        return frame
    rows = [(*lifetime, cut.get(lifetime, 0), last) for lifetime, last in newest.items()]
    known = frame.sparkSession.createDataFrame(rows, "stream string, created_ns long, incarnation int, r long, n long")
    waits = sf.expr("coalesce(sequence > r and sequence <= n, false)")
    return frame.join(sf.broadcast(known), list(PLACE), "left").where(~waits).select(*frame.columns)


# ---- gaps

_FIGURES = ("cause", "next_stored", "first_sequence", "last_sequence", "deleted", "limits")
_GAP = "stream string, created_ns long, incarnation int, first long, last long, cause string, is_known boolean"


def judged_gaps(gaps: DataFrame) -> DataFrame:
    """Gaps with whether they are known: whether what the stream's leader said bears out their cause."""
    inside = "sum(if(cause in ('deleted', 'limit') and first >= first_sequence, last - first + 1, 0L))"
    batch = f"partition by {', '.join(PLACE)}, asked_at"
    rows = gaps.selectExpr(*PLACE, "first", "last", *_FIGURES, f"{inside} over ({batch}) as inside")
    return rows.mapInArrow(judge_gaps, _GAP)


def audit_gaps(judged: DataFrame) -> DataFrame:
    """A gap whose cause is not known excuses nothing."""
    return result(
        judged.where("not is_known"), "error", "sequences", "unknown_gap", stream="stream", created_ns="created_ns",
        incarnation="incarnation", first="first", last="last", amount="last - first + 1",
        detail="concat('the cause that is recorded (', cause, ') is not borne out by what the stream said')",
    )  # fmt: skip


# ---- blocks and chains


def blocks(bronze: DataFrame) -> DataFrame:
    """Announced blocks, one row per announcement in bronze, each read from its bytes."""
    from pyspark.sql import functions as sf

    ledger = bronze.where(sf.col("subject").startswith("ledger."))
    return ledger.select(*PLACE, "sequence", "timestamp", "headers", "payload").mapInArrow(read_blocks, BLOCK)


_BREAKS = ("missing", "pending", "in_gap", "begins_later", "republished")


@dataclass(frozen=True)
class Chains:
    """What is known of the chains: results, and what the other audits need."""

    results: DataFrame
    ends: dict[str, int]
    """Up to which block each chain has no hole."""
    horizons: dict[str, int]
    """Up to which block all effects lie below the cut."""
    readers: dict[Lifetime, list[Reader]]
    copies: list[int]
    """Sequences of LEDGER where a block stands once more."""
    hashes: dict[tuple[str, int], str]
    """Of the block at the end of each chain, and of those that were asked for."""


def audit_chains(found: DataFrame, gaps: DataFrame, cut: Cut, asked: Collection[tuple[str, int]] = ()) -> Chains:
    """Blocks chain without a hole: each names the hash of the one before. `asked` are blocks by chain and number whose
    hashes somebody wants to know."""
    from pyspark.sql import functions as sf

    reached = newest(cut)
    wrong = result(
        found.where("problem != ''"), "error", "chain", "unreadable", stream="stream", created_ns="created_ns",
        incarnation="incarnation", first="sequence", last="sequence", chain="coalesce(chain, '')",
        block="coalesce(number, 0)", detail="problem", amount="1L",
    )  # fmt: skip
    read = found.where(sf.col("chain").isNotNull())
    beyond = (
        " or ".join(f"(c.stream = {literal(name)} and c.sequence > {at}L)" for name, at in reached.items()) or "false"
    )
    told = read.groupBy("chain").agg(
        sf.max("number").alias("last"),
        sf.max("confirmed_block").alias("confirmed"),
        sf.max(sf.when(sf.expr(f"not exists(confirmed, c -> {beyond})"), sf.col("confirmed_block"))).alias("horizon"),
    )
    heads = {row.chain: row for row in told.collect()}
    ledger_gaps = Ranges([(row.first, row.last) for row in gaps.where(f"stream = '{LEDGER}'").collect()])
    holes = {chain: Hole(row.confirmed or 0, ledger_gaps) for chain, row in heads.items()}
    links = (
        read.select("chain", "number", "previous", "hash", "state", "sequence")
        .repartition("chain")
        .sortWithinPartitions("chain", "number", "sequence")
        .mapInArrow(walk_chains(holes), RESULT)
    )
    links = links.persist()
    told_of: dict[str, list[Any]] = {name: [] for name in _BREAKS}
    for row in links.where(sf.col("problem").isin(*told_of)).select("problem", "chain", "block", "first").collect():
        told_of[row.problem].append(row)
    ends = {chain: row.last for chain, row in heads.items()}
    for row in told_of["missing"] + told_of["pending"]:
        ends[row.chain] = min(ends[row.chain], row.first - 1)
    readers = _readers(read, ends, told_of["in_gap"] + told_of["begins_later"])
    copies = [row.first for row in told_of["republished"]]
    horizons = {chain: row.horizon or 0 for chain, row in heads.items()}
    hashes = _hashes(read, {*ends.items(), *asked})
    return Chains(union([wrong, links]), ends, horizons, readers, copies, hashes)


def _hashes(read: DataFrame, wanted: Collection[tuple[str, int]]) -> dict[tuple[str, int], str]:
    from pyspark.sql import functions as sf

    named = read.sparkSession.createDataFrame(sorted(wanted) or [("", 0)], "chain string, number long")
    found = (
        read.join(sf.broadcast(named), ["chain", "number"]).groupBy("chain", "number").agg(sf.min("hash").alias("h"))
    )
    return {(row.chain, row.number): bytes(row.h).hex() for row in found.collect()}


def literal(value: str) -> str:
    """As a literal of Spark SQL."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _readers(read: DataFrame, ends: dict[str, int], breaks: list[Any]) -> dict[Lifetime, list[Reader]]:
    """Who reads what, how far all is settled, and since when the blocks tell everything."""
    from pyspark.sql import functions as sf

    inputs = read.select("chain", sf.explode("inputs").alias("i")).select("chain", "i.*")
    told = inputs.groupBy("chain", *PLACE).agg(
        sf.collect_set("filters").alias("filters"), sf.max("start").alias("start")
    )
    spark = read.sparkSession
    known = spark.createDataFrame(list(ends.items()) or [("", 0)], "chain string, end long")
    settled = (
        read.join(sf.broadcast(known), "chain").where("number <= end").select("chain", sf.explode("settled").alias("s"))
    )
    up_to = {
        (agent_of(row.chain), (row.stream, row.created_ns, row.incarnation)): row.up_to
        for row in settled.select("chain", "s.*").groupBy("chain", *PLACE).agg(sf.max("up_to").alias("up_to")).collect()
    }
    since = _since(read, breaks)
    merged: dict[tuple[str, Lifetime], Reader] = {}
    for row in told.collect():
        agent, place = agent_of(row.chain), (row.stream, row.created_ns, row.incarnation)
        mine = merged.get((agent, place), Reader(agent, (), 1, 0, 0))
        merged[agent, place] = Reader(
            agent,
            tuple(sorted({*mine.filters, *(tuple(one) for one in row.filters)})),
            max(mine.start, row.start),
            max(mine.settled, up_to.get((agent, place), 0)),
            max(mine.since_us, since.get(row.chain, 0)),
        )
    readers: dict[Lifetime, list[Reader]] = {}
    for (_, place), reader in sorted(merged.items()):
        readers.setdefault(place, []).append(reader)
    return readers


def _since(read: DataFrame, breaks: list[Any]) -> dict[str, int]:
    """When the first block behind the last break of each chain was announced."""
    from pyspark.sql import functions as sf

    if not breaks:
        return {}
    last: dict[str, int] = {}
    for row in breaks:
        last[row.chain] = max(last.get(row.chain, 0), row.block)
    wanted = read.sparkSession.createDataFrame(list(last.items()), "chain string, number long")
    found = read.join(sf.broadcast(wanted), ["chain", "number"]).select(
        "chain", sf.unix_micros("timestamp").alias("at")
    )
    return {row.chain: row.at for row in found.collect()}


# ---- positions and sums


def distinct_blocks(found: DataFrame, chains: Chains) -> DataFrame:
    """Readable blocks, each once."""
    from pyspark.sql import functions as sf

    read = found.where(sf.col("chain").isNotNull())
    if not chains.copies:
        return read
    copies = read.sparkSession.createDataFrame([(one,) for one in chains.copies], "sequence long")
    return read.join(sf.broadcast(copies), "sequence", "left_anti")


def audit_positions(
    bronze: DataFrame,
    once: DataFrame,
    gaps: DataFrame,
    chains: Chains,
    cut: Cut,
    silver: Mapping[str, DataFrame] | None = None,
    quarantine: DataFrame | None = None,
    families: Families = (),
    lost: DataFrame | None = None,
    sample: Sample | None = None,
) -> DataFrame:
    """Every position below the cut is in bronze once or in a known gap; stands in silver or in quarantine, in every
    column as it follows from the message; has one outcome, or is in progress; and what it adds to the sums of its
    block.

    `once` are the blocks, each once. `silver` are its tables by family, None where nothing was derived yet. `lost` are
    ranges in files of bronze that cannot be read. `sample` are the messages that are read a second time, by
    the plain reader; all without it."""
    rows = bronze.mapInArrow(Narrow(chains.readers, families, sample), ROW)
    derived = [_points(frame.mapInArrow(Derived(name), DERIVED), "silver") for name, frame in (silver or {}).items()]
    if quarantine is not None:
        derived.append(_points(quarantine.mapInArrow(Derived(QUARANTINE.name), DERIVED), "quarantine"))
    facts = union(
        [
            _expected(bronze.sparkSession, cut),
            _in_buckets(gaps.selectExpr(*PLACE, "'gap' as kind", "first", "last")),
            *([_in_buckets(lost.selectExpr(*PLACE, "'lost' as kind", "first", "last"))] if lost is not None else []),
            _in_buckets(claims(once)),
            *derived,
        ]
    )
    by = [*PLACE, "bucket"]
    check = check_buckets(chains.readers, is_derived=silver is not None)
    return rows.groupBy(*by).cogroup(facts.groupBy(*by)).applyInArrow(check, RESULT)


def claims(once: DataFrame) -> DataFrame:
    """Closed ranges of positions with their outcome, as blocks claim them."""
    from pyspark.sql import functions as sf

    inputs = once.select("chain", "number", sf.explode("inputs").alias("i"))
    each = inputs.select("chain", "number", "i.*").select("*", sf.explode("claims").alias("c"))
    return each.selectExpr(
        *PLACE, "if(listed_state is null, 'claim', 'listed') as kind", "c.first as first", "c.last as last", "chain",
        "number", "c.outcome as outcome", "consumer",
    )  # fmt: skip


def _expected(spark: SparkSession, cut: Cut) -> DataFrame:
    rows = [
        (*place, at, "expected", at * BUCKET + 1, min((at + 1) * BUCKET, reached))
        for place, reached in sorted(cut.items())
        for at in range(bucket_of(reached) + 1)
    ]
    ddl = "stream string, created_ns long, incarnation int, bucket long, kind string, first long, last long"
    return _as_facts(spark.createDataFrame(rows, ddl))


def _in_buckets(ranges: DataFrame) -> DataFrame:
    """Ranges cut at the borders of buckets."""
    from pyspark.sql import functions as sf

    spread = ranges.withColumn(
        "bucket", sf.explode(sf.expr(f"sequence((first - 1) div {BUCKET}, (last - 1) div {BUCKET})"))
    )
    return _as_facts(
        spread.withColumns(
            {
                "first": sf.greatest("first", sf.expr(f"bucket * {BUCKET} + 1")),
                "last": sf.least("last", sf.expr(f"(bucket + 1) * {BUCKET}")),
            }
        )
    )


def _points(frame: DataFrame, kind: str) -> DataFrame:
    return _as_facts(
        frame.selectExpr(
            *PLACE, f"(sequence - 1) div {BUCKET} as bucket", f"'{kind}' as kind", "sequence as first",
            "sequence as last", "family", "row", "reason",
        )
    )  # fmt: skip


def _as_facts(frame: DataFrame) -> DataFrame:
    """All columns of a fact; those that a kind has not are null."""
    wanted = [one.split(" ") for one in FACT.split(", ")]
    return frame.selectExpr(
        *(f"cast({name if name in frame.columns else 'null'} as {kind}) as {name}" for name, kind in wanted)
    )


def audit_sums(positions: DataFrame, once: DataFrame, chains: Chains) -> DataFrame:
    """The inputs of each block hash to its sums, and its state follows from the one before."""
    from pyspark.sql import functions as sf

    inputs = once.select("chain", sf.col("number").alias("block"), sf.explode("inputs").alias("i")).select(
        "chain", "block", "i.*"
    )
    columns = ["chain", "block", "what", *PLACE, "amount", "position", "state"]
    parts = union(
        [
            chains.results.where("what = 'link'").select(*columns),
            inputs.selectExpr(
                "chain", "block", "'inputs' as what", *PLACE, "count as amount", "sum as position", "X'' as state"
            ),
            inputs.where("listed_state is not null").selectExpr(
                "chain",
                "block",
                "'listed' as what",
                *PLACE,
                "count as amount",
                "X'' as position",
                "listed_state as state",
            ),
            positions.where("what = 'sum'").select(*columns),
        ]
    )
    ordered = parts.repartition("chain", "block").sortWithinPartitions("chain", "block")
    return ordered.mapInArrow(compare_sums, RESULT)


# ---- silver and quarantine


def audit_silver(positions: DataFrame, silver: Mapping[str, DataFrame]) -> DataFrame:
    """Every identity stands in silver once. A message without a row of its own is a later copy of one that has it, or
    stands in quarantine because one with another content has it."""
    nothing = "stream string, created_ns long, incarnation int, sequence long, key binary, digest binary, msg_id string"
    empty = positions.sparkSession.createDataFrame([], nothing)
    rows = union([empty, *(_keyed(frame) for frame in silver.values())])
    keys = rows.groupBy("key").count().where("count > 1")
    doubled = rows.join(keys, "key")
    alone = positions.where("what in ('absent', 'conflict')").selectExpr(
        "what", *PLACE, "first", "id", "position as key", "nullif(state, X'') as content"
    )
    others = rows.selectExpr("key", "digest", *(f"{name} as s_{name}" for name in (*PLACE, "sequence")))
    judged = alone.join(others, "key", "left").withColumn("problem", _of_alone())
    place = {"stream": "stream", "created_ns": "created_ns", "incarnation": "incarnation", "first": "first"}
    told = " ".join(f"when '{name}' then {literal(text)}" for name, text in _ALONE.items())
    wrong = judged.where(f"problem in ({', '.join(literal(name) for name in _ALONE)})").dropDuplicates(["key", "first"])
    return union(
        [
            result(wrong, "error", "silver", "", **place, last="first", id="id", amount="1L",
                   detail=f"case problem {told} end"),
            result(
                doubled, "error", "silver", "doubled", **place | {"first": "sequence"}, last="sequence", id="msg_id",
                amount="1L", detail="concat('one of ', count, ' rows with the key ', lower(hex(key)))",
            ),
            result(
                judged.where("problem in ('copies', 'conflicts')").groupBy("problem", *PLACE).count(), "count",
                "silver", "", stream="stream", created_ns="created_ns", incarnation="incarnation", amount="count",
            ),
        ]
    )  # fmt: skip


_ALONE = {
    "missing": "no row of silver or quarantine stands for it",
    "dropped": "it was dropped as a copy, and says something else than the row with its identity",
    "later_copy": "a later copy is the row in its place",
    "no_conflict": "it is in quarantine because of another content, and silver has none with its identity",
}


def _of_alone() -> Column:
    """What is to be said of a message without a row, and the row of silver that has its key."""
    from pyspark.sql import functions as sf

    same = " and ".join(f"{name} = s_{name}" for name in PLACE)
    return sf.expr(
        f"""case
        when what = 'conflict' then if(s_stream is not null and not (content <=> digest), 'conflicts', 'no_conflict')
        when s_stream is null then 'missing'
        when content is not null and digest is not null and content != digest then 'dropped'
        when {same} and s_sequence > first then 'later_copy'
        else 'copies' end"""
    )


def _keyed(frame: DataFrame) -> DataFrame:
    """What silver's copies are told by; some families have no digest."""
    digest = "digest" if "digest" in frame.columns else "cast(null as binary) as digest"
    return frame.selectExpr(*PLACE, "sequence", "key", digest, "msg_id")


def audit_quarantine(bronze: DataFrame, quarantine: DataFrame) -> DataFrame:
    """What is in quarantine because another message has its identity stands there as in bronze, byte for byte. (All
    else there follows from its message alone: `audit_positions`.)"""
    from pyspark.sql import functions as sf

    names = [name for name, _ in RAW]
    told = quarantine.where(f"reason = '{CONFLICT}'").select(*PLACE, "sequence", sf.struct(*names).alias("there"))
    placed = bronze.select(*PLACE, "sequence", sf.struct(*names).alias("placed"))
    differs = told.join(placed, [*PLACE, "sequence"]).where("not (there <=> placed)")
    return result(
        differs, "error", "quarantine", "differs", stream="stream", created_ns="created_ns",
        incarnation="incarnation", first="sequence", last="sequence", amount="1L",
        detail="'quarantine says something else than bronze'",
    )  # fmt: skip
