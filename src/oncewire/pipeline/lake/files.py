"""How an executor writes a table's Parquet files. The driver only hears of their names and statistics.

A file's name is made of its range and its bytes: a batch that is run again writes the same files under the same names,
and a straggler of an earlier attempt can never change a file that is committed. What nobody commits is an orphan that
vacuum removes. A file is whole and durable before its name exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from oncewire.pipeline.lake.place import place_of
from oncewire.pipeline.lake.rules import Closed, Written
from oncewire.pipeline.lake.table import Table

DIGEST_BYTES: Final = 8
"""Of the hash in a file's name."""
FILE_BYTES_MAX: Final = 64 << 20
"""Rows are gathered up to this size, in memory as in Arrow, before a file is written."""
_PLAIN: Final = frozenset(
    {
        "key", "digest", "payload", "body", "sequence", "timestamp", "event_time", "nanos", "identity", "msg_id", "id",
        "idempotency_key", "trace_id", "span_id", "causation_id", "correlation_id",
    }
)  # fmt: skip
"""Columns whose values hardly repeat: a dictionary would only cost."""
_RANDOM: Final = frozenset({"key", "digest"})
_COUNTED: Final = ("stream", "created_ns", "incarnation", "sequence", "timestamp", "event_time")
"""Columns whose least and greatest values the log keeps, for readers that skip files."""


def write_files(
    root: str, table: Table, prefix: str, rows: pa.Table, *, is_partitioned: bool, has_runs: bool = False
) -> Iterator[Written]:
    """Write rows as one file, or as one per date. `prefix` says which range they are."""
    if not rows.num_rows:
        return
    if not (is_partitioned and table.is_dated):
        yield write_file(root, prefix, "", rows, has_runs)
        return
    for day in sorted(pc.unique(rows["date"]).to_pylist()):
        of_day = rows.filter(pc.equal(rows["date"], pa.scalar(day, pa.date32()))).drop_columns(["date"])
        yield write_file(root, prefix, day.isoformat(), of_day, has_runs)


def write_file(root: str, prefix: str, day: str, rows: pa.Table, has_runs: bool) -> Written:
    content = parquet(rows)
    digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
    folder = f"date={day}/" if day else ""
    path = f"{folder}{prefix}-{digest}.parquet"
    (place_of(root) / path).store(content)
    runs = tuple(runs_of(rows["sequence"])) if has_runs else ()
    return Written(path, len(content), rows.num_rows, statistics(rows), day, runs)


def parquet(rows: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    names = rows.column_names
    pq.write_table(
        rows,
        sink,
        row_group_size=max(1, rows.num_rows),
        compression={name: "NONE" if name in _RANDOM else "ZSTD" for name in leaves(rows.schema)},
        use_dictionary=[name for name in names if name not in _PLAIN],
        write_statistics=[name for name in names if name in _COUNTED],
        coerce_timestamps="us",
    )
    return memoryview(sink.getvalue())


def leaves(schema: pa.Schema) -> Iterator[str]:
    """The columns as Parquet names them: a nested one is one name per leaf."""

    def below(name: str, kind: Any) -> Iterator[str]:
        if pa.types.is_list(kind):
            yield from below(f"{name}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for field in kind:
                yield from below(f"{name}.{field.name}", field.type)
        else:
            yield name

    for field in schema:
        yield from below(field.name, field.type)


def statistics(rows: pa.Table) -> str:
    least, greatest, empty = {}, {}, {}
    for name in _COUNTED:
        if name not in rows.column_names:
            continue
        found = pc.min_max(rows[name])
        empty[name] = rows[name].null_count
        if found["min"].is_valid:
            least[name], greatest[name] = _shown(found["min"].as_py(), 0), _shown(found["max"].as_py(), 1)
    return json.dumps({"numRecords": rows.num_rows, "minValues": least, "maxValues": greatest, "nullCount": empty})


def _shown(value: Any, rounded_up_ms: int) -> Any:
    """Times in the log have milliseconds: the greatest is rounded up, or readers would skip its file."""
    if not isinstance(value, datetime):
        return value
    value = value.astimezone(UTC) + timedelta(milliseconds=rounded_up_ms)
    return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z"


def runs_of(sequences: pa.ChunkedArray) -> list[Closed]:
    """Closed ranges that cover exactly these ascending numbers; one that stands twice starts a run of its own."""
    if not sequences.length():
        return []
    numbers = np.array(sequences.to_pylist(), np.int64)
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    firsts = numbers[np.concatenate(([0], breaks + 1))].tolist()
    lasts = numbers[np.concatenate((breaks, [len(numbers) - 1]))].tolist()
    return list(zip(firsts, lasts, strict=True))
