"""Writes rows to JetStream: every task checks all of its rows, then publishes them, confirmed.

Idempotent, not transactional: tasks publish on their own, a failed one leaves what it published, and the run that
repeats it publishes the same ids, which the server drops within the stream's duplicate window.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from oncewire._ground.errors import InvalidSetting, Refused
from oncewire.pipeline.options import WriteOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from oncewire.pipeline.outgoing import Checked

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter

    HAS_ARROW_STREAM = True
except ImportError:
    HAS_ARROW_STREAM = False

HELD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Checked rows that a task keeps in memory until all are checked; what is more goes to a temporary file."""
HELD_COLUMNS: Final = ("subject", "payload", "lines", "msg_id")
ROWS_PER_BATCH: Final = 10_000

COLUMNS: Final = {
    "subject": ("string",),
    "payload": ("binary", "string"),
    "msg_id": ("string",),
    "headers": ("array<struct<key:string,value:binary>>", "map<string,string>", "map<string,binary>"),
}


@dataclass
class Written(WriterCommitMessage):  # type: ignore[misc, unused-ignore]
    """What one task published."""

    confirmed: int
    duplicates: int


def check_schema(schema: StructType, overwrite: bool) -> None:
    if overwrite:
        raise Refused("a stream cannot be overwritten", hint='Use .mode("append") or .outputMode("append").')
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name in ("subject", "payload"):
        if name not in found:
            raise InvalidSetting(f"the column {name} is missing", hint="The sink needs subject and payload.")
    for name, kind in found.items():
        if name not in COLUMNS:
            raise InvalidSetting(f"the sink has no column {name}", hint=f"There are: {', '.join(COLUMNS)}.")
        if kind not in COLUMNS[name]:
            raise InvalidSetting(f"the column {name} is {kind}, and the sink takes {' or '.join(COLUMNS[name])}")


def batch_writer(write: WriteOptions, schema: StructType, overwrite: bool) -> BatchWriter:
    check_schema(schema, overwrite)
    return BatchWriter(write, write.write_id or os.urandom(16).hex())


def stream_writer(write: WriteOptions, schema: StructType, overwrite: bool) -> Any:
    check_schema(schema, overwrite)
    return ArrowStreamWriter(write) if HAS_ARROW_STREAM else RowStreamWriter(write, schema)


class BatchWriter(DataSourceArrowWriter):  # type: ignore[misc, unused-ignore]
    """A batch write. Its tasks share one id, so that a task that is run again publishes nothing twice."""

    def __init__(self, write: WriteOptions, write_id: str) -> None:
        self.options = write
        self.write_id = write_id

    def write(self, iterator: Iterator[Any]) -> Written:
        return publish(self.options, ("write", self.write_id, _partition()), iterator)


def _context() -> Any:
    from pyspark import TaskContext

    return TaskContext.get()


def _partition() -> int:
    context = _context()
    return int(context.partitionId()) if context else 0


def _position() -> tuple[str, str, str, int]:
    """Query, batch and partition of a streaming task: Spark hands the first two down as local properties."""
    context = _context()
    query = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context else None
    if not query or not batch:
        raise Refused("this is no task of a streaming query: it names neither query nor batch")
    return "query", query, batch, _partition()


if HAS_ARROW_STREAM:

    class ArrowStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc, unused-ignore]
        """A streaming write (Spark 4.1 and newer)."""

        def __init__(self, write: WriteOptions) -> None:
            self.options = write

        def write(self, iterator: Iterator[Any]) -> Written:
            return publish(self.options, _position(), iterator)


class RowStreamWriter(DataSourceStreamWriter):  # type: ignore[misc, unused-ignore]
    """A streaming write on Spark 4.0, which hands over rows: the same, slower."""

    def __init__(self, write: WriteOptions, schema: StructType) -> None:
        self.options = write
        self.schema = schema

    def write(self, iterator: Iterator[Any]) -> Written:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self.schema)

        def batches() -> Iterator[Any]:
            while rows := [tuple(row) for row in itertools.islice(iterator, ROWS_PER_BATCH)]:
                columns = [
                    pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

        return publish(self.options, _position(), batches())


def publish(write: WriteOptions, position: tuple[object, ...], batches: Iterator[Any]) -> Written:
    """Check everything, then publish everything."""
    from oncewire.pipeline import outgoing
    from oncewire.pipeline.publish import Publisher
    from oncewire.pipeline.wire import connect

    wire = connect(write.access)
    extra = f"Nats-Expected-Stream: {write.stream}\r\n".encode() if write.stream else b""
    with Held(outgoing.id_prefix(*position)) as held:
        try:
            for batch in batches:
                if batch.num_rows:
                    has_ids = "msg_id" in batch.schema.names
                    held.add(outgoing.check(batch, held.count, extra, wire.payload_bytes_max), has_ids=has_ids)
        except BaseException:
            wire.close()
            raise
        done = Publisher(write.access, wire).publish(held.rows())
    return Written(done.confirmed, done.duplicates)


class Held:
    """Checked rows that wait for the last one to be checked: in memory, beyond a limit in a temporary file.

    Without ids of the user's, 16 bytes of each row stay in memory whatever its size: equal rows are told apart by
    their count, and that is known only when all were seen.
    """

    def __init__(self, prefix: str, bytes_max: int = HELD_BYTES_MAX) -> None:
        self.count = 0
        self._prefix = prefix
        self._bytes_max = bytes_max
        self._rows: list[Checked] = []
        self._digests: list[Any] = []
        self._bytes = 0
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def add(self, rows: Checked, *, has_ids: bool) -> None:
        self.count += len(rows)
        if not has_ids:
            self._digests.append(rows.msg_id)
        if self._writer is None and self._bytes + rows.size_bytes <= self._bytes_max:
            self._rows.append(rows)
            self._bytes += rows.size_bytes
        else:
            self._spill(rows)

    def _spill(self, rows: Checked) -> None:
        import pyarrow as pa

        batch = pa.RecordBatch.from_arrays([getattr(rows, name) for name in HELD_COLUMNS], names=list(HELD_COLUMNS))
        if self._writer is None:
            self._file = tempfile.TemporaryFile(prefix="oncewire-sink-")  # noqa: SIM115 - closed on exit
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def rows(self) -> Iterator[Checked]:
        """Everything, in order, with its ids; a batch is let go as soon as it is handed over."""
        from oncewire.pipeline import outgoing

        rank = outgoing.ranks(self._digests) if self._digests else None
        first = 0
        for rows in self._stored():
            msg_id = rows.msg_id
            if rank is not None:
                msg_id = outgoing.default_ids(self._prefix, msg_id, rank[first : first + len(rows)])
                first += len(rows)
            yield outgoing.with_id_lines(rows, msg_id)

    def _stored(self) -> Iterator[Checked]:
        while self._rows:
            yield self._rows.pop(0)
        if self._writer is None or self._file is None:
            return
        import pyarrow as pa

        from oncewire.pipeline.outgoing import Checked

        self._writer.close()
        self._file.seek(0)
        for batch in pa.ipc.open_stream(self._file):
            yield Checked(*batch.columns)
