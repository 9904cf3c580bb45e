"""How Spark reads files of an object store: its Python workers do, with Arrow, since Spark from PyPI cannot do it
without jars from elsewhere.

The frame begins as a range of as many numbers as there are rows, and a file is read by the task that gets the number of
its first row. So files are spread by their rows, and Spark knows how large the table is: it would send a table that it
takes for small to every worker as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import Schema

from oncewire.pipeline.lake.place import place_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROWS_MAX: Final = 8_192
"""So many rows at a time go from a worker to Java."""
TASKS: Final = 8
TASK_ROWS: Final = 250_000
"""A table of many rows has a task for so many."""


def scan(spark: SparkSession, root: str, schema: StructType, files: Mapping[str, int]) -> DataFrame:
    """The rows of these files, with how many each has."""
    sizes = [max(1, rows or 0) for rows in files.values()]
    firsts = [0, *accumulate(sizes)]
    tasks = min(len(sizes), max(TASKS, firsts[-1] // TASK_ROWS))
    work = Scan(root, tuple(files), tuple(firsts[:-1]), pa.schema(Schema.from_json(schema.json()).to_arrow()))
    return spark.range(0, firsts[-1], 1, tasks).mapInArrow(work, schema)


@dataclass(frozen=True)
class Scan:
    """On an executor: files whose first row is among the numbers that come."""

    root: str
    paths: tuple[str, ...]
    firsts: tuple[int, ...]
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                first, last = batch.column(0)[0].as_py(), batch.column(0)[-1].as_py()
                for at in range(bisect_left(self.firsts, first), bisect_left(self.firsts, last + 1)):
                    yield from self._rows(self.paths[at])

    def _rows(self, path: str) -> Iterator[pa.RecordBatch]:
        with (place_of(self.root) / path).parquet() as file:
            wanted = [name for name in self.schema.names if name != "date" or not path.startswith("date=")]
            if not wanted:
                yield self._conformed(path, pa.table({"_": pa.nulls(file.metadata.num_rows)}))
                return
            for batch in file.iter_batches(ROWS_MAX, columns=wanted):
                yield self._conformed(path, pa.Table.from_batches([batch]))

    def _conformed(self, path: str, rows: pa.Table) -> pa.RecordBatch:
        """A partition's date is in the path alone."""
        columns = []
        for field in self.schema:
            if field.name in rows.column_names:
                columns.append(rows[field.name].combine_chunks().cast(field.type))
            else:
                day = date.fromisoformat(path.split("/")[0].removeprefix("date="))
                columns.append(pa.repeat(pa.scalar(day, pa.date32()), rows.num_rows))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
