"""Silver: bronze's new rows read by their contracts, each identity once.

A batch is a range of bronze's versions. Three rounds over the executors, and the driver decides between them:

    decode      each new file of bronze becomes staged parts, one per silver table, and rows for quarantine
    look        the key column of each silver table is searched for the keys of the batch
    write       what is new becomes files of silver, unless it waits in one; what conflicts joins quarantine

Then the balance is checked (rows in = rows out + duplicates + quarantine), and the tables are committed in this order,
each with bronze's version as the version of its transaction id:

    gaps, quarantine, the silver tables, batches

`batches` is last and says that all is done. If the power goes in between, the next run finds a version that some tables
have and `batches` has not, does that same batch again, and commits only where it is missing: the silver tables are
searched as they were before it, so the decisions are the same.

Which of two copies becomes the row does not depend on how batches were cut: the first one in its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from oncewire.pipeline import decode
from oncewire.pipeline.families import KEY_BYTES, Families
from oncewire.pipeline.lake import files, rules
from oncewire.pipeline.lake.log import SILVER_APP, Added, Lake, Version, is_partitioned
from oncewire.pipeline.lake.place import Place, place_of
from oncewire.pipeline.lake.rules import Balance, Gap, Second, Span, Written
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.lake.tasks import run_tasks
from oncewire.pipeline.landing import completed, made_of
from oncewire.pipeline.staging import (
    WHOLE_BYTES_MIN,
    Conflict,
    DecodeFile,
    FileDecoded,
    Look,
    Staged,
    WriteItem,
    conform,
    split,
    write_item,
)
from oncewire.pipeline.tables import BATCHES, BRONZE, GAPS, QUARANTINE, SILVER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_ROWS_MAX: Final = 400_000
"""Versions are taken into a batch up to so many rows: their keys are all that the driver holds."""
LOOKS_PER_CORE: Final = 2
LOOK_HERE_ROWS: Final = 500_000
"""A table of so many rows the driver searches itself: that is done before the executors would have begun."""


def silver(frame: DataFrame, family: str, *, families: Families = ()) -> DataFrame:
    """The rows of bronze (or of `bronze(…)`) that belong to a silver table and meet their contract, for a job of your
    own. Nothing is remembered between rows: copies are dropped by `dropDuplicates(["key"])`, or by the lake."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(SILVER[family].schema)
    raw = made_of(frame)
    return (frame if raw is None else raw).mapInArrow(_Reading(family, families, is_raw=raw is not None), schema)


@dataclass(frozen=True)
class _Reading:
    family: str
    families: Families
    is_raw: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in completed(batches) if self.is_raw else batches:
            rows = conform(pa.Table.from_batches([batch]), BRONZE)
            found = decode.decode(rows, self.families).parts.get(self.family)
            if found is not None:
                yield from found.to_batches()


@dataclass(frozen=True)
class Sorted:
    """What the driver decided about the staged rows of one table."""

    dropped: dict[str, list[int]]
    """By staged path: rows that are not written."""
    duplicates: int
    conflicts: list[Conflict]


def sort_out(name: str, parts: Sequence[tuple[str, Staged]], known: dict[bytes, bytes], *, has_digest: bool) -> Sorted:
    """Which rows are new: the first copy wins. `parts` are in the streams' order, each with its file of bronze."""
    if not known and are_distinct(b"".join(part.keys for _, part in parts)):
        return Sorted({}, 0, [])
    first = dict(known)
    dropped: dict[str, list[int]] = {}
    conflicts: list[Conflict] = []
    duplicates = 0
    for bronze, part in parts:
        keys = split(part.keys, KEY_BYTES)
        digests = split(part.digests, 32) if has_digest else [b""] * len(keys)
        for at, (key, digest) in enumerate(zip(keys, digests, strict=True)):
            seen = first.get(key)
            if seen is None:
                first[key] = digest
                continue
            dropped.setdefault(part.path, []).append(at)
            if has_digest and seen != digest:
                detail = f"its identity stands for a message with the digest {seen.hex()}"
                conflicts.append(Conflict(bronze, part.sequence(at), name, detail))
            else:
                duplicates += 1
    return Sorted(dropped, duplicates, conflicts)


def are_distinct(keys: bytes) -> bool:
    """Whether all keys differ, by their first halves alone: False may be wrong."""
    halves = np.sort(np.frombuffer(keys, np.uint64)[:: KEY_BYTES // 8])
    return bool((halves[1:] != halves[:-1]).all())


@dataclass(frozen=True)
class Batch:
    """A batch of silver that is done."""

    first_version: int
    last_version: int
    balances: tuple[Balance, ...]

    @property
    def rows_in(self) -> int:
        return sum(one.rows_in for one in self.balances)

    def total(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.balances)


class Silver:
    """Follows bronze. One at a time on a lake."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        families: Families = (),
        *,
        rows_max: int = BATCH_ROWS_MAX,
        whole_bytes_min: int = WHOLE_BYTES_MIN,
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._families = families
        self._rows_max = rows_max
        self._whole_bytes_min = whole_bytes_min
        self._seen = -1
        lake.staging.remove()

    def step(self) -> Batch | None:
        """One batch; None when there is nothing new in bronze."""
        if not self._lake.exists(BRONZE):
            return None
        newest = self._lake.open(BRONZE).version()
        done = max(self.done(), self._seen)
        begun = [version for version in self._begun() if version > done]
        target = rules.next_target(begun, newest)
        versions = self._take(done, target, is_fixed=bool(begun))
        if not any(one.added or any(span.get("gaps") for span in spans_of(one)) for one in versions):
            self._seen = target
            return None
        batch = self._run(done + 1, versions[-1].number, versions)
        self._seen = batch.last_version
        return batch

    def done(self) -> int:
        """The last version of bronze that is whole in silver; -1 before the first."""
        found = self._lake.open(BATCHES).transaction_version(SILVER_APP) if self._lake.exists(BATCHES) else None
        return -1 if found is None else found

    def _begun(self) -> list[int]:
        tables = [table for table in (GAPS, QUARANTINE, *SILVER.values()) if self._lake.exists(table)]
        found = [self._lake.open(table).transaction_version(SILVER_APP) for table in tables]
        return [version for version in found if version is not None]

    def _take(self, done: int, target: int, *, is_fixed: bool) -> list[Version]:
        taken: list[Version] = []
        rows = 0
        for version in self._lake.versions(BRONZE, done, target):
            taken.append(version)
            rows += sum(one.rows for one in version.added)
            if rows >= self._rows_max and not is_fixed:
                break
        return taken

    def _run(self, first: int, last: int, versions: list[Version]) -> Batch:
        staging = self._lake.staging / str(last)
        prefix = f"{first:010d}-{last:010d}"
        plain = {name: self._lake.root(table) for name, table in SILVER.items() if not self._lake.is_partitioned(table)}
        work = DecodeFile(self._lake.root(BRONZE), str(staging), prefix, plain, self._whole_bytes_min, self._families)
        added = sorted((one for version in versions for one in version.added), key=place)
        self._lake.check_files(BRONZE, added)
        found = run_tasks(self._spark, work, [(at, one.path) for at, one in enumerate(added)])
        handles = self._handles(found, first, last)
        sorted_out = self._look(added, found, handles, last)
        written, counts, refused = self._write(prefix, found, sorted_out, handles)
        balances = balance(found, sorted_out, counts, refused)
        for one in balances:
            one.check()
        Balance("all", sum(one.rows for one in added), sum(one.rows_in for one in balances), 0, 0).check()
        self._commit(last, versions, added, found, written, handles)
        self._note(Batch(first, last, balances), handles[BATCHES.name])
        self._clear(staging, found, sorted_out)
        return Batch(first, last, balances)

    def _clear(self, staging: Place, found: Sequence[FileDecoded], sorted_out: dict[str, Sorted]) -> None:
        """Remove what waited, also in files that hold too much and that no version names."""
        staging.remove()
        for part in (part for one in found for part in one.parts):
            if part.written is not None and part.path in sorted_out[part.name].dropped:
                place_of(part.path).remove()

    def _handles(self, found: Sequence[FileDecoded], first: int, last: int) -> dict[str, DeltaTable]:
        """The tables that the batch touches, each read and committed through one handle: nobody comes between."""
        names = {part.name for one in found for part in one.parts} - {QUARANTINE.name}
        tables = {name: SILVER[name] for name in sorted(names)}
        tables |= {table.name: table for table in (QUARANTINE, GAPS, BATCHES)}
        handles = {name: self._lake.open(table) for name, table in tables.items()}
        for name, handle in handles.items():
            rules.check_begun(name, first, last, handle.transaction_version(SILVER_APP))
        return handles

    def _has(self, handle: DeltaTable, last: int) -> bool:
        version = handle.transaction_version(SILVER_APP)
        return version is not None and version >= last

    def _look(
        self, added: Sequence[Added], found: Sequence[FileDecoded], handles: dict[str, DeltaTable], last: int
    ) -> dict[str, Sorted]:
        parts: dict[str, list[tuple[str, Staged]]] = {}
        for file, one in zip(added, found, strict=True):
            for part in one.parts:
                if part.name != QUARANTINE.name:
                    parts.setdefault(part.name, []).append((f"{self._lake.root(BRONZE)}/{file.path}", part))
        look = Look({name: b"".join(part.keys for _, part in some) for name, some in parts.items()})
        known: dict[str, dict[bytes, bytes]] = {name: {} for name in parts}
        items = []
        for name in parts:
            paths, rows = self._files_before(name, handles[name], last)
            if rows <= LOOK_HERE_ROWS:
                known[name] = look((name, self._lake.root(SILVER[name]), paths))
            else:
                items += self._look_items(name, paths)
        for item, answer in zip(items, run_tasks(self._spark, look, items), strict=True):
            known[item[0]] |= answer
        has_digest = {name: any(column == "digest" for column, _ in SILVER[name].columns) for name in parts}
        return {name: sort_out(name, some, known[name], has_digest=has_digest[name]) for name, some in parts.items()}

    def _files_before(self, name: str, handle: DeltaTable, last: int) -> tuple[tuple[str, ...], int]:
        """The table's files as they were before this batch, and how many rows they have."""
        before = handle
        while self._has(before, last):
            before = (self._lake.place / SILVER[name].name).delta(before.version() - 1)
        adds = pa.table(before.get_add_actions(flatten=True))
        if not adds.num_rows:
            return (), 0
        return tuple(unquote(path) for path in adds["path"].to_pylist()), sum(adds["num_records"].to_pylist())

    def _look_items(self, name: str, paths: Sequence[str]) -> list[tuple[str, str, tuple[str, ...]]]:
        """Files in about equal groups."""
        groups = min(len(paths), LOOKS_PER_CORE * self._spark.sparkContext.defaultParallelism)
        return [(name, self._lake.root(SILVER[name]), tuple(paths[at::groups])) for at in range(groups)]

    def _write(
        self,
        prefix: str,
        found: Sequence[FileDecoded],
        sorted_out: dict[str, Sorted],
        handles: dict[str, DeltaTable],
    ) -> tuple[dict[str, list[Written]], dict[str, int], dict[str, int]]:
        written: dict[str, list[Written]] = {}
        counts: dict[str, int] = {}
        refused: dict[str, int] = {}
        rest: list[Staged] = []
        for part in (part for one in found for part in one.parts):
            if part.written is None or part.path in sorted_out[part.name].dropped:
                rest.append(part)
            else:
                written.setdefault(part.name, []).append(part.written)
                counts[part.name] = counts.get(part.name, 0) + part.written.rows
        items = self._write_items(prefix, rest, sorted_out, handles)
        for item, (some, rows) in zip(items, run_tasks(self._spark, write_item, items), strict=True):
            written.setdefault(item.name, []).extend(some)
            into = refused if item.name == QUARANTINE.name else counts
            for name, number in rows.items():
                into[name] = into.get(name, 0) + number
        return written, counts, refused

    def _write_items(
        self,
        prefix: str,
        parts: Sequence[Staged],
        sorted_out: dict[str, Sorted],
        handles: dict[str, DeltaTable],
    ) -> list[WriteItem]:
        """One item per file to be: staged parts in order, gathered up to its size."""
        groups: list[list[Staged]] = []
        open_: dict[str, list[Staged]] = {}
        for part in parts:
            group = open_.get(part.name)
            if group is None or sum(other.size_bytes for other in group) + part.size_bytes > files.FILE_BYTES_MAX:
                group = open_[part.name] = []
                groups.append(group)
            group.append(part)
        items = []
        for at, group in enumerate(groups):
            name = group[0].name
            table = QUARANTINE if name == QUARANTINE.name else SILVER[name]
            dropped = sorted_out[name].dropped if name in sorted_out else {}
            chosen = tuple((part.path, tuple(dropped.get(part.path, ()))) for part in group)
            root, is_dated = self._lake.root(table), is_partitioned(handles[name])
            items.append(WriteItem(name, root, f"{prefix}-{at:04d}", is_dated, chosen))
        conflicts = tuple(one for some in sorted_out.values() for one in some.conflicts)
        if conflicts:
            root, is_dated = self._lake.root(QUARANTINE), is_partitioned(handles[QUARANTINE.name])
            items.append(WriteItem(QUARANTINE.name, root, f"{prefix}-conflicts", is_dated, (), conflicts))
        return items

    def _commit(
        self,
        last: int,
        versions: Sequence[Version],
        added: Sequence[Added],
        found: Sequence[FileDecoded],
        written: dict[str, list[Written]],
        handles: dict[str, DeltaTable],
    ) -> None:
        runs = {file.path: one.runs for file, one in zip(added, found, strict=True)}
        missing = [gap for version in versions for gap in gaps_of(version, runs)]
        if missing and not self._has(handles[GAPS.name], last):
            made = self._written(GAPS, last, gap_rows(missing, datetime.now(UTC)))
            self._lake.commit(handles[GAPS.name], GAPS, made, SILVER_APP, last)
        for name in (QUARANTINE.name, *sorted(written.keys() - {QUARANTINE.name})):
            if written.get(name) and not self._has(handles[name], last):
                table = QUARANTINE if name == QUARANTINE.name else SILVER[name]
                self._lake.commit(handles[name], table, written[name], SILVER_APP, last)

    def _note(self, batch: Batch, handle: DeltaTable) -> None:
        if self._has(handle, batch.last_version):
            return
        made = self._written(BATCHES, batch.last_version, balance_rows(batch, datetime.now(UTC)))
        self._lake.commit(handle, BATCHES, made, SILVER_APP, batch.last_version)

    def _written(self, table: Table, last: int, rows: pa.Table) -> list[Written]:
        prefix = f"{last:010d}"
        return list(files.write_files(self._lake.root(table), table, prefix, rows, is_partitioned=False))


def place(file: Added) -> tuple[Any, ...]:
    """The order of the streams."""
    least = file.stats["minValues"]
    return tuple(least[name] for name in ("stream", "created_ns", "incarnation", "sequence"))


def balance(
    found: Sequence[FileDecoded], sorted_out: dict[str, Sorted], counts: dict[str, int], refused: dict[str, int]
) -> tuple[Balance, ...]:
    """What came in as it was decoded, what went out as it was written."""
    came: dict[str, int] = {}
    for one in found:
        for part in one.parts:
            if part.name != QUARANTINE.name:
                came[part.name] = came.get(part.name, 0) + part.rows
        for name, rows in one.refused.items():
            came[name] = came.get(name, 0) + rows
    return tuple(
        Balance(
            name,
            rows,
            counts.get(name, 0),
            sorted_out[name].duplicates if name in sorted_out else 0,
            refused.get(name, 0),
        )
        for name, rows in sorted(came.items())
    )


def gaps_of(version: Version, runs: dict[str, tuple[rules.Closed, ...]]) -> list[Gap]:
    """What the ranges of one version of bronze do not have."""
    found: list[Gap] = []
    for facts in spans_of(version):
        if not facts.get("gaps"):
            continue
        span = Span((facts["stream"], facts["created_ns"], facts["incarnation"]), facts["first"], facts["last"])
        there = sorted(run for file in version.added if place(file)[:3] == span.lifetime for run in runs[file.path])
        second = Second.from_dict(facts["second"]) if facts["second"] is not None else None
        found += rules.find_gaps(span, there, second, is_loss_accepted=facts["accepted"])
    return found


def spans_of(version: Version) -> list[dict[str, Any]]:
    """The ranges that a version of bronze says it has: one, or one for each topic of a round."""
    spans: list[dict[str, Any]] = version.facts.get("spans", [version.facts])
    return spans


def gap_rows(gaps: Sequence[Gap], now: datetime) -> pa.Table:
    return pa.Table.from_pylist([_gap_row(one, now) for one in gaps], schema=GAPS.schema)


def _gap_row(gap: Gap, now: datetime) -> dict[str, Any]:
    stream, created_ns, incarnation = gap.lifetime
    row = {
        "stream": stream, "created_ns": created_ns, "incarnation": incarnation, "first": gap.first, "last": gap.last,
        "cause": gap.cause, "detail": gap.detail, "found_at": now,
    }  # fmt: skip
    if gap.second is None:
        return row
    names = ("first_sequence", "last_sequence", "messages", "deleted", "limits")
    return row | {name: getattr(gap.second, name) for name in names} | {
        "asked_at": datetime.fromtimestamp(gap.second.asked_at_ms / 1000, UTC), "next_stored": gap.next_stored or None,
    }  # fmt: skip


def balance_rows(batch: Batch, now: datetime) -> pa.Table:
    rows = [
        {
            "first_version": batch.first_version,
            "last_version": batch.last_version,
            "family": one.family or None,
            "rows_in": one.rows_in,
            "rows_out": one.rows_out,
            "duplicates": one.duplicates,
            "quarantined": one.quarantined,
            "done_at": now,
        }
        for one in batch.balances
    ]
    return pa.Table.from_pylist(rows, schema=BATCHES.schema)
