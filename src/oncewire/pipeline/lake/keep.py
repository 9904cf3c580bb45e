"""Housekeeping: many small files become few large ones, files that nobody needs go, and so do old log entries.

Only rows that silver has are rewritten: silver follows bronze by its versions and must find their files. Files are
rewritten in the order of the streams, each of one lifetime for bronze, and committed as a change of no data. What a
rewrite replaced stays until the retention is over, so that readers of an older version can finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa

from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import Added, Lake
from oncewire.pipeline.lake.place import place_of
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.lake.tasks import run_tasks
from oncewire.pipeline.tables import BRONZE, TABLES

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

SMALL_BYTES: Final = 16 << 20
"""Smaller files are put together."""
FILES_MIN: Final = 16
"""A group of fewer small files is left alone."""


@dataclass(frozen=True)
class Keeping:
    """How a lake is kept."""

    every_s: float = 600.0
    retention_hours: int = 168
    """Files that no version within this time needs are removed. Readers of older versions find nothing then."""


class Keeper:
    def __init__(self, spark: SparkSession, lake: Lake, keeping: Keeping) -> None:
        self._spark = spark
        self._lake = lake
        self._keeping = keeping
        self._last = float("-inf")

    def keep_sometimes(self, silver_has: int, now: float) -> None:
        if now - self._last >= self._keeping.every_s:
            self._last = now
            self.keep(silver_has)

    def keep(self, silver_has: int) -> None:
        """Compact, vacuum, and let old log entries go. `silver_has`: the version of bronze that is whole in silver."""
        for table in TABLES.values():
            if not self._lake.exists(table):
                continue
            handle = self._lake.open(table)
            if table is BRONZE and handle.version() > silver_has and self._is_behind(handle, silver_has):
                continue
            self._compact(table, handle)
            self._lake.clear(table, self._keeping.retention_hours)
        self._lake.clear_staging(self._keeping.retention_hours)

    def _is_behind(self, handle: DeltaTable, silver_has: int) -> bool:
        return any(one.added for one in self._lake.versions(BRONZE, silver_has, handle.version()))

    def _compact(self, table: Table, handle: DeltaTable) -> None:
        groups = small_groups(table, added_of(handle))
        items = [Rewrite(table.name, self._lake.root(table), tuple(one.path for one in group)) for group in groups]
        for group, written in zip(groups, run_tasks(self._spark, rewrite, items), strict=True):
            assert sum(one.rows for one in group) == sum(one.rows for one in written), "compaction changed rows"
            self._lake.rewrite(self._lake.open(table), table, group, written)


def added_of(handle: DeltaTable) -> list[Added]:
    """The files of a table now."""
    found = pa.table(handle.get_add_actions(flatten=True))
    if not found.num_rows:
        return []
    columns = {name: found[name].to_pylist() for name in found.column_names}
    made = []
    for at, path in enumerate(columns["path"]):
        least = {name.removeprefix("min."): values[at] for name, values in columns.items() if name.startswith("min.")}
        made.append(Added(unquote(path), columns["num_records"][at], columns["size_bytes"][at], {"minValues": least}))
    return made


def small_groups(table: Table, found: Sequence[Added]) -> list[list[Added]]:
    """Small files that belong together: of one partition, for bronze of one lifetime, in order, up to a file's size."""
    groups: list[list[Added]] = []
    home: tuple[Any, ...] = ()
    size = 0
    small = [one for one in found if one.size_bytes < SMALL_BYTES]
    for one in sorted(small, key=lambda file: (*_home(table, file), _first(file))):
        if not groups or home != _home(table, one) or size + one.size_bytes > files.FILE_BYTES_MAX:
            groups.append([])
            home, size = _home(table, one), 0
        groups[-1].append(one)
        size += one.size_bytes
    return [group for group in groups if len(group) >= FILES_MIN]


def _home(table: Table, file: Added) -> tuple[Any, ...]:
    day = file.path.split("/")[0] if file.path.startswith("date=") else ""
    least = file.stats["minValues"]
    return (day, least["stream"], least["created_ns"], least["incarnation"]) if table is BRONZE else (day,)


def _first(file: Added) -> Any:
    return file.stats["minValues"].get("sequence") or 0, file.path


@dataclass(frozen=True)
class Rewrite:
    name: str
    root: str
    paths: tuple[str, ...]


def rewrite(item: Rewrite) -> list[Written]:
    """On an executor: the rows of some files as one."""
    table = TABLES[item.name]
    day = item.paths[0].split("/")[0].removeprefix("date=") if item.paths[0].startswith("date=") else ""
    columns = [(name, kind) for name, kind in table.columns if not (day and name == "date")]
    schema = pa.schema(columns)
    parts = [(place_of(item.root) / path).parquet().read(columns=schema.names) for path in item.paths]
    rows = pa.concat_tables([part.select(schema.names).cast(schema) for part in parts])
    order = [name for name in ("stream", "created_ns", "incarnation", "sequence") if name in rows.column_names]
    rows = rows.sort_by([(name, "ascending") for name in order]) if order else rows
    return [files.write_file(item.root, "compact", day, rows, False)]
