"""Gold is computed anew and put in the place of what was there, in one commit per table.

Simple, and right whatever comes late: a window that gains a message is corrected by the next pass, and nothing must be
remembered between passes. What it costs is a read of silver's narrow columns, so a pipeline that goes on does it only
when silver has something new, at most every so many seconds, and never for more than a twentieth of its time. Lineage
is that of the last days. Executors write the files, the driver commits; what was replaced goes after an hour.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from oncewire._ground.files import owner_only
from oncewire.pipeline import tables
from oncewire.pipeline.gold import frames, topics
from oncewire.pipeline.gold.tables import CONSUMERS, DEAD_LETTERS, HEALTH, OUTCOMES, RUNS, STEPS, THROUGHPUT, USAGE
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import Lake, translated
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.tables import SILVER, TOPICS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GOLD_APP: Final = "gold"
"""The transaction id of gold's tables; its version is that of bronze which silver had taken in."""
EVERY_S: Final = 60.0
SHARE: Final = 20
"""Times as long as a pass took are left until the next one."""
KEEP_HOURS: Final = 1
"""So long what was replaced stays for readers that are at it."""


class Gold:
    """Derives gold for one lake, by whoever holds it."""

    def __init__(self, spark: SparkSession, lake: Lake, every_s: float = EVERY_S) -> None:
        self._spark = spark
        self._lake = lake
        self._every_s = every_s
        self._next = float("-inf")

    def refresh_sometimes(self, silver_has: int) -> None:
        started = time.monotonic()
        if started >= self._next:
            self.refresh(silver_has)
            ended = time.monotonic()
            self._next = ended + max(self._every_s, SHARE * (ended - started))

    def refresh(self, silver_has: int) -> None:
        """All tables, unless they are as new as silver."""
        old = [table for table in DERIVED if self._has(table) < silver_has]
        if not old:
            return
        silver = {name: self._read(table) for name, table in SILVER.items()} | {"topics": self._read(TOPICS)}
        made = derive(silver)
        for table in old:
            self._replace(table, made[table], silver_has)

    def _has(self, table: Table) -> int:
        found = self._lake.open(table).transaction_version(GOLD_APP) if self._lake.exists(table) else None
        return -1 if found is None else found

    def _read(self, table: Table) -> DataFrame:
        columns = [name for name, _ in table.columns if name not in _WIDE or (table.name, name) == _METERED]
        return tables.read_files(self._spark, self._lake.place, table.name, self._lake.open(table), columns)

    def _replace(self, table: Table, frame: DataFrame, silver_has: int) -> None:
        handle = self._lake.open(table)
        answers = frame.mapInArrow(_Write(self._lake.root(table), table.name, f"{silver_has:010d}"), "answer binary")
        written = [pickle.loads(row.answer) for row in answers.collect()]  # noqa: S301 - our own executors wrote it
        self._lake.replace(handle, table, written, GOLD_APP, silver_has)
        with translated(table.name), owner_only():
            newest = self._lake.open(table)
            newest.vacuum(KEEP_HOURS, dry_run=False, enforce_retention_duration=False)


def derive(silver: Mapping[str, DataFrame]) -> dict[Table, DataFrame]:
    """Gold as it follows from silver, by family, and from the lake's table of topics (`topics`)."""
    runs, steps = frames.lineage(silver)
    return {
        HEALTH: frames.health(silver),
        CONSUMERS: frames.consumers(silver),
        DEAD_LETTERS: frames.dead_letters(silver),
        USAGE: frames.usage(silver),
        RUNS: runs,
        STEPS: steps,
        THROUGHPUT: topics.throughput(silver),
        OUTCOMES: topics.outcomes(silver),
    }


_WIDE: Final = ("payload", "body")
_METERED: Final = ("silver/message", "payload")
"""Columns that gold does not read, but for the one that usage is in."""
DERIVED: Final = (HEALTH, CONSUMERS, DEAD_LETTERS, USAGE, RUNS, STEPS, THROUGHPUT, OUTCOMES)


@dataclass(frozen=True)
class _Write:
    """On an executor: rows become files, each up to a size."""

    root: str
    name: str
    prefix: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = tables.TABLES[self.name]
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            held.append(batch)
            size += batch.nbytes
            if size >= files.FILE_BYTES_MAX:
                yield from self._answers(table, held)
                held, size = [], 0
        yield from self._answers(table, held)

    def _answers(self, table: Table, held: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not held:
            return
        rows = pa.Table.from_batches(held)
        rows = pa.Table.from_arrays([rows[name].cast(kind) for name, kind in table.columns], schema=table.schema)
        made: list[Written] = list(files.write_files(self.root, table, self.prefix, rows, is_partitioned=False))
        answers: list[Any] = [pickle.dumps(one) for one in made]
        if answers:
            yield pa.RecordBatch.from_arrays([pa.array(answers, pa.binary())], names=["answer"])
