"""Bronze: every message of a stream as one raw row, exactly once.

    Structured Streaming decides the range (its checkpoint holds the offsets) ─► executors read it and write the files
    ─► the driver commits the files and the range in one version ─► Structured Streaming commits its batch

The rows stay in the task that reads them: Java sees the names of the files alone.

Killed at any of these arrows, the batch comes again with the same range: the files have the same names, and the version
of the stream's transaction id says whether the range is in the table already.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import headers, letters, topics
from oncewire._ground.errors import ContractViolation, Corrupt
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline.lake import files, rules
from oncewire.pipeline.lake.rules import Closed, Second, Span, Step, Written
from oncewire.pipeline.lake.table import TIMESTAMP
from oncewire.pipeline.rules import Offset
from oncewire.pipeline.tables import BRONZE, Lifetime, app_id

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import InputPartition

    from oncewire.pipeline.lake.log import Lake
    from oncewire.pipeline.options import ReadOptions

SOURCE_SCHEMA: Final = (
    "stream string, created_ns bigint, incarnation int, sequence bigint, subject string, timestamp timestamp, "
    "nanos int, headers array<struct<key: string, value: binary>>, payload binary"
)
BRONZE_DDL: Final = (
    "tenant string, stream string, created_ns bigint, incarnation int, sequence bigint, subject string, "
    "timestamp timestamp, nanos int, headers array<struct<key: string, value: binary>>, payload binary, date date"
)
SOURCE: Final = pa.schema([field for field in BRONZE.schema if field.name not in ("tenant", "date")])
"""What of bronze the source has."""
_MADE_OF: Final = "_oncewire_made_of"
"""Noted on a frame of `bronze` itself: what a user makes of it is another frame, and does not have it."""
_COMMITTING = threading.Lock()
"""The queries of one driver take turns: a commit that others overtake is tried again, at a price."""


def bronze(spark: SparkSession, *, stream: str, is_streaming: bool = False, **options: object) -> DataFrame:
    """A stream in bronze's columns, for a job of your own. Options are those of the source (docs/spark.md)."""
    found = source(spark, stream=stream, is_streaming=is_streaming, **options)
    made = found.mapInArrow(completed, BRONZE_DDL)
    made.__dict__[_MADE_OF] = found
    return made


def made_of(frame: DataFrame) -> DataFrame | None:
    """The source's rows that `bronze` completed to this frame, None for any other frame. Whoever completes them himself
    spares each row a way through Java and back. Of a frame that is cached it is the kept rows that are wanted."""
    found = frame.__dict__.get(_MADE_OF)
    return None if found is None or frame.is_cached else found


def source(spark: SparkSession, *, stream: str, is_streaming: bool, **options: object) -> DataFrame:
    reader = spark.readStream if is_streaming else spark.read
    loader = reader.format("jetstream").schema(SOURCE_SCHEMA).options(includeHeaders="true", **_shown(stream, options))
    return loader.load()


def landed(spark: SparkSession, *, stream: str, work: LandRange, **options: object) -> DataFrame:
    """A stream whose rows become files of bronze as they are read; the frame has an answer for each file."""
    from oncewire.pipeline.source import WORK, WorkSource, show_work

    told = {WORK: show_work(work), **_shown(stream, options)}
    return spark.readStream.format(WorkSource.name()).options(includeHeaders="true", **told).load()


def _shown(stream: str, options: dict[str, object]) -> dict[str, str]:
    given = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return {"stream": stream, **given}


# ---- on the executors


def completed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The source's rows with what bronze adds: the tenant, where anything but the body says it, and the date."""
    for batch in batches:
        yield complete(batch)


def complete(batch: pa.RecordBatch) -> pa.RecordBatch:
    subject = readable(batch.column("subject"))
    made = {
        "tenant": tenants(subject, batch.column("headers")),
        "subject": subject,
        "date": batch.column("timestamp").cast(pa.date32()),
        "timestamp": batch.column("timestamp").cast(TIMESTAMP),
    }
    columns = [made[name] if name in made else batch.column(name) for name, _ in BRONZE.columns]
    return pa.RecordBatch.from_arrays(
        [column.cast(kind) for column, (_, kind) in zip(columns, BRONZE.columns, strict=True)], schema=BRONZE.schema
    )


def readable(texts: pa.Array) -> pa.Array:
    """Subjects as text: one that is no UTF-8 shows its bad bytes as signs, since other readers refuse such a file."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        found = texts.cast(pa.binary()).to_pylist()
        return pa.array([one.decode("utf-8", "replace") for one in found], pa.string())
    return texts


def tenants(subject: pa.Array, carried: pa.Array) -> pa.Array:
    """By the subject on `evt.`, `cmd.` and topics, by the header that a relay or the dead-letter service wrote, else
    null."""
    coded = subject.dictionary_encode()
    by_subject = pa.array([_tenant_of(one) for one in coded.dictionary.to_pylist()], pa.string()).take(coded.indices)
    if by_subject.null_count == 0:
        return by_subject
    found = by_subject
    for name in (headers.TENANT, letters.TENANT):
        found = pc.coalesce(found, header_values(carried, name))
    return found


def _tenant_of(subject: str) -> str | None:
    if subject.startswith("owb."):
        with suppress(ContractViolation):
            return topics.read_subject(subject).tenant or None
        return None
    kind, _, rest = subject.partition(".")
    return rest.partition(".")[0] or None if kind in ("evt", "cmd") and rest.count(".") >= 2 else None


def header_values(carried: pa.Array, name: str) -> pa.Array:
    """The first value of a header in each row as text, null where there is none; bad bytes are shown as signs."""
    pairs = carried.flatten()
    if not len(pairs):
        return pa.nulls(len(carried), pa.string())
    is_named = pc.equal(pairs.field("key"), name)
    values = pairs.field("value").filter(is_named)
    rows = pc.list_parent_indices(carried).filter(is_named).to_numpy()
    first = np.full(len(carried), -1, np.int64)
    first[rows[::-1]] = np.arange(len(rows))[::-1]  # of several the first one is written last
    return as_text(values.take(pa.array(first, mask=first < 0)))


def as_text(values: pa.Array) -> pa.Array:
    """Bytes as text; bad ones are shown as signs."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([one and one.decode("utf-8", "replace") for one in values.to_pylist()], pa.string())


@dataclass(frozen=True)
class LandRange:
    """What an executor does with its share of a range: files of bronze, and one answer for each."""

    root: str
    is_partitioned: bool

    def __call__(self, read: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from oncewire.pipeline.source import read_range

        return self.land(read_range(read, SOURCE, partition))

    def land(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            held.append(complete(batch))
            size += held[-1].nbytes
            if size >= files.FILE_BYTES_MAX:
                yield from self._write(held)
                held, size = [], 0
        yield from self._write(held)

    def _write(self, held: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not held:
            return
        rows = pa.Table.from_batches(held)
        first, last = rows["sequence"][0].as_py(), rows["sequence"][-1].as_py()
        lifetime = tuple(rows[name][0].as_py() for name in ("stream", "created_ns", "incarnation"))
        prefix = f"{app_id(lifetime)}-{first:012d}-{last:012d}"
        for one in files.write_files(
            self.root, BRONZE, prefix, rows, is_partitioned=self.is_partitioned, has_runs=True
        ):
            yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(one)], pa.binary())], names=["answer"])


# ---- on the driver


@dataclass(frozen=True)
class Landed:
    """What a batch brought."""

    span: Span
    step: Step
    rows: int


class Landing:
    """The end of one stream's query. What goes wrong is kept, since Spark shows only its text."""

    def __init__(
        self,
        lake: Lake,
        stream: str,
        checkpoint: Path,
        begins_at: int,
        *,
        look_again: Callable[[Lifetime, Sequence[Closed]], Second],
        is_loss_accepted: bool,
        on_landed: Callable[[Landed], None],
    ) -> None:
        self._lake = lake
        self._stream = stream
        self._checkpoint = checkpoint
        self._begins_at = begins_at
        self._look_again = look_again
        self._is_loss_accepted = is_loss_accepted
        self._on_landed = on_landed
        self.error: Exception | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        try:
            self._on_landed(self.land(frame, batch_id))
        except Exception as error:
            self.error = error
            raise

    def land(self, frame: DataFrame, batch_id: int) -> Landed:
        span = span_of(self._checkpoint, batch_id, self._stream, self._begins_at)
        app = app_id(span.lifetime)
        if rules.admit(span, self._lake.open(BRONZE).transaction_version(app)) is Step.SKIP:
            return Landed(span, Step.SKIP, 0)
        answers = frame.collect()  # only now the range is read
        written: list[Written] = [pickle.loads(one.answer) for one in answers]  # noqa: S301 - our own executors wrote it
        ranges = rules.asked(span, rules.missing(span, rules.check_runs(span, written)))
        second = self._look_again(span.lifetime, ranges) if ranges else None
        count = sum(one.rows for one in written)
        facts = rules.span_facts(span, count, second, is_loss_accepted=self._is_loss_accepted)
        with _COMMITTING:
            handle = self._lake.open(BRONZE)
            if rules.admit(span, handle.transaction_version(app)) is Step.SKIP:
                return Landed(span, Step.SKIP, 0)
            self._lake.commit(handle, BRONZE, written, app, span.last, facts=facts)
        return Landed(span, Step.APPEND, count)


def span_of(checkpoint: Path, batch_id: int, stream: str, begins_at: int) -> Span:
    """The range of a batch, from what Spark wrote down before it began it."""
    end = offset_at(checkpoint, batch_id)
    lifetime = (stream, parse_time_ns(end.created), end.incarnation)
    if batch_id == 0:
        return Span(lifetime, begins_at, end.sequence - 1)
    start = offset_at(checkpoint, batch_id - 1)
    is_same = (start.created, start.incarnation) == (end.created, end.incarnation)
    return Span(lifetime, start.sequence if is_same else 0, end.sequence - 1)


def offset_at(checkpoint: Path, batch_id: int) -> Offset:
    """The end of a batch in Spark's offset log: a version, a line of Spark's own, then one offset per source."""
    entry = checkpoint / "offsets" / str(batch_id)
    try:
        lines = entry.read_text("utf-8").splitlines()
        return Offset.from_dict(json.loads(lines[2]))
    except (OSError, IndexError, json.JSONDecodeError) as error:
        raise Corrupt(
            f"the checkpoint {entry} cannot be read: {error}",
            hint=f"`oncewire pipeline backfill` goes on from what the lake has of {checkpoint.parent.name}.",
        ) from None
