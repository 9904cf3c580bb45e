"""The Spark data source "jetstream": what Spark calls, for batch reads, streaming reads and writes.

Readers decide offsets and partitions in the driver's planning process and read on the executors; what they hold is
pickled to there, so a connection is made where it is used and never kept across. What newer Sparks can do besides
(limits per trigger and AvailableNow since 4.2, Arrow in streaming writes since 4.1) is found out by looking.
"""

from __future__ import annotations

import base64
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from oncewire._ground.errors import InvalidSetting, Refused, Unavailable
from oncewire._ground.jetstream import protocol
from oncewire.pipeline import options as given
from oncewire.pipeline import rules, stream
from oncewire.pipeline.options import Place, ReadOptions
from oncewire.pipeline.rules import Facts, Loss, Offset
from oncewire.pipeline.wire import OUTAGE_S, RETRY_DELAY_S, Wire, connect

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_ADMISSION = True
except ImportError:
    HAS_ADMISSION = False

log = logging.getLogger("oncewire.pipeline")

FIELDS = {
    "stream": "string",
    "subject": "string",
    "sequence": "bigint",
    "timestamp": "timestamp",
    "payload": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "nanos": "int",
    "created_ns": "bigint",
    "incarnation": "int",
}
ON_DEMAND = frozenset({"nanos", "created_ns", "incarnation"})
"""Columns that only a schema brings in."""
Answer = TypeVar("Answer")
Work = Callable[[ReadOptions, InputPartition], Iterator[Any]]
"""What a task of a streaming read does with its partition; pickled to it."""


def read_file(path: str) -> str:
    return Path(path).expanduser().read_text()


class JetStreamSource(DataSource):  # type: ignore[misc, unused-ignore]
    """`spark.read`, `readStream`, `write` and `writeStream` with `.format("jetstream")`."""

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> str:
        names = [name for name in FIELDS if name not in ON_DEMAND and (name != "headers" or self._includes_headers())]
        return ", ".join(f"{name} {FIELDS[name].replace('struct<key:string,value:binary>', _HEADER)}" for name in names)

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(given.read_options(self.options, read_file, is_streaming=False), checked(schema, self))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        read = given.read_options(self.options, read_file, is_streaming=True, has_admission=HAS_ADMISSION)
        return stream_reader(read, ReadRows(checked(schema, self)))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from oncewire.pipeline.sink import batch_writer

        return batch_writer(given.write_options(self.options, read_file, is_streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        from oncewire.pipeline.sink import stream_writer

        return stream_writer(given.write_options(self.options, read_file, is_streaming=True), schema, overwrite)

    def _includes_headers(self) -> bool:
        return str(self.options.get("includeHeaders", "false")).strip().lower() == "true"


_HEADER = "struct<key: string, value: binary>"


class WorkSource(JetStreamSource):
    """A stream whose tasks do some work of the lake's own with their partitions, where they read them. Only its answers
    go through Java: that each row would go there and back costs more than to read it."""

    @classmethod
    def name(cls) -> str:
        return "oncewire_work"

    def schema(self) -> str:
        return "answer binary"

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802, ARG002 - Spark's
        told = dict(self.options)
        work = told.pop(WORK)
        read = given.read_options(told, read_file, is_streaming=True, has_admission=HAS_ADMISSION)
        return stream_reader(read, ShownWork(work))


WORK = "work"
"""The option that carries the work."""


def show_work(work: Work) -> str:
    return base64.b64encode(pickle.dumps(work)).decode()


@dataclass(frozen=True)
class ShownWork:
    """Work as an option carries it. Only a task unpacks it: what it needs is not imported where partitions are planned,
    in a process that is started for each query."""

    shown: str

    def __call__(self, read: ReadOptions, partition: InputPartition) -> Iterator[Any]:
        work: Work = pickle.loads(base64.b64decode(self.shown))  # noqa: S301 - our own driver wrote it
        return work(read, partition)


def checked(schema: StructType, source: JetStreamSource) -> StructType:
    """The user's own schema may leave columns out and order them; it may not invent or retype any."""
    if not schema.fields:
        raise InvalidSetting("the schema has no columns", hint=f"There are: {', '.join(FIELDS)}.")
    for field in schema.fields:
        wanted = FIELDS.get(field.name)
        found = field.dataType.simpleString()
        if wanted is None:
            raise InvalidSetting(f"the source has no column {field.name}", hint=f"There are: {', '.join(FIELDS)}.")
        if found != wanted:
            raise InvalidSetting(f"the column {field.name} is {wanted}, the schema says {found}")
        if field.name == "headers" and not source._includes_headers():
            raise InvalidSetting("the schema asks for headers, which contradicts includeHeaders=false")
    return schema


@dataclass
class Range(InputPartition):  # type: ignore[misc, unused-ignore]
    """A partition: a range of sequences of one incarnation of the stream."""

    first: int
    end: int
    created: str
    is_earliest: bool = False
    incarnation: int = 0


@dataclass(frozen=True)
class ReadRows:
    """Hand the rows of a partition to Spark."""

    schema: StructType

    def __call__(self, read: ReadOptions, partition: InputPartition) -> Iterator[Any]:
        from pyspark.sql.pandas.types import to_arrow_schema

        return read_range(read, to_arrow_schema(self.schema, **_arrow_zone()), partition)


def read_range(read: ReadOptions, schema: Any, partition: Range | InputPartition) -> Iterator[Any]:
    """Arrow batches of one partition, by a schema of Arrow; what an executor runs."""
    if not isinstance(partition, Range):
        return  # Spark's own stand-in for "no partitions"
    from oncewire.pipeline.columns import Columns
    from oncewire.pipeline.reader import Part, RangeReader

    created_ns = protocol.parse_time_ns(partition.created)
    columns = Columns(read.stream, schema, created_ns, partition.incarnation)
    part = Part(partition.first, partition.end, partition.created, partition.is_earliest)
    yield from RangeReader(read, part, columns).batches()


def _arrow_zone() -> dict[str, Any]:
    """Newer Sparks want the zone of timestamps said; older ones take UTC and know no such argument."""
    return {"timezone": "UTC"} if HAS_ADMISSION else {}


class Planner:
    """Asks the stream on the driver. One connection, made when needed and again when it broke."""

    def __init__(self, read: ReadOptions) -> None:
        self.read = read
        self._wire: Wire | None = None

    def ask(self, question: Callable[[Wire], Answer]) -> Answer:
        deadline = time.monotonic() + OUTAGE_S
        while True:
            try:
                self._wire = self._wire or connect(self.read.access)
                return question(self._wire)
            except Unavailable:
                self.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_DELAY_S)

    def close(self) -> None:
        if self._wire:
            self._wire.close()
        self._wire = None

    def facts(self) -> Facts:
        """The stream as its leader knows it, with its incarnation."""
        facts = self.ask(lambda wire: stream.facts_of(wire, self.read.stream))
        rules.refuse_queue(facts)
        incarnation = self.ask(lambda wire: stream.incarnation_of(wire, self.read.stream))
        return replace(facts, incarnation=incarnation) if incarnation else facts

    def time_at(self, sequence: int) -> str | None:
        """The time of the message with this sequence, None when it is gone."""
        row = self.ask(lambda wire: stream.message_at(wire, self.read.stream, sequence)) if sequence > 0 else None
        return rules.show_time(row.timestamp_ns) if row else None

    def offset_at(self, place: Place, facts: Facts, option: str) -> Offset:
        """Where `earliest`, `latest`, a sequence or a time stands now."""
        if place == "earliest":
            return replace(facts.offset(facts.first, ""), is_earliest=True)
        if place == "latest":
            return facts.end
        if isinstance(place, datetime):
            when = place.astimezone(UTC).isoformat()
            sequence = self.ask(lambda wire: stream.sequence_at(wire, self.read.stream, when))
            sequence = min(sequence, facts.next)
        else:
            sequence = int(place)
        if sequence > facts.next:
            raise Refused(f"the option {option} is {sequence}, and stream {facts.name} ends at {facts.last}")
        return facts.offset(sequence, self.time_at(sequence - 1) or "")

    def loss_at(self, offset: Offset, facts: Facts) -> Loss | None:
        return rules.find_loss(offset, facts, self.time_at(offset.sequence - 1) if offset.timestamp else None)

    def start_after(self, start: Offset, facts: Facts) -> int:
        """Where reading goes on: at the offset, or behind what is lost if losses are to be passed over."""
        if start.is_earliest and start.created == facts.created:
            return max(start.sequence, facts.first)
        loss = self.loss_at(start, facts)
        if loss is None:
            return start.sequence
        self.report(loss)
        if loss.cause != "went back":
            return facts.first
        behind = rules.show_time(protocol.parse_time_ns(start.timestamp) + 1)
        return self.ask(lambda wire: stream.sequence_at(wire, self.read.stream, behind))

    def report(self, loss: Loss) -> None:
        if self.read.fails_on_data_loss and not loss.is_by_design:
            raise loss.error()
        log.log(logging.INFO if loss.is_by_design else logging.WARNING, "%s", loss.sentence)

    def ranges(self, start: Offset, end: Offset) -> list[Range]:
        """The partitions of [start, end): cut by the offsets alone, so that a repeated batch is cut the same way."""
        facts = self.facts()
        loss = self.loss_at(end, facts) if end.sequence <= facts.next else rules.find_loss(end, facts, None)
        if loss and loss.cause in ("recreated", "went back"):
            self.report(loss)
            return []
        first = self.start_after(start, facts)
        low = start.sequence if start.created == end.created and first >= start.sequence else first
        count = rules.partition_count(end.sequence - low, self.read.partitions_min)
        cuts = rules.cut(low, end.sequence, count) if end.sequence > low else []
        kept = [(max(a, first), b) for a, b in cuts if b > first]
        return [Range(a, b, end.created, start.is_earliest, end.incarnation) for a, b in kept]


class BatchReader(DataSourceReader):  # type: ignore[misc, unused-ignore]
    """A batch read: both ends are fixed when it is planned."""

    def __init__(self, read: ReadOptions, schema: StructType) -> None:
        self.read_options = read
        self.schema = schema

    def partitions(self) -> list[InputPartition]:
        planner = Planner(self.read_options)
        try:
            facts = planner.facts()
            start = planner.offset_at(self.read_options.start, facts, "startingOffsets")
            end = planner.offset_at(self.read_options.end, facts, "endingOffsets")
            return list(planner.ranges(start, end))
        finally:
            planner.close()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return ReadRows(self.schema)(self.read_options, partition)


class StreamReader(DataSourceStreamReader):  # type: ignore[misc, unused-ignore]
    """A streaming read, with what every Spark since 4.0 calls."""

    def __init__(self, read: ReadOptions, work: Work) -> None:
        self.read_options = read
        self.work = work
        self.planner = Planner(read)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        facts = self.planner.facts()
        return self.planner.offset_at(self.read_options.start, facts, "startingOffsets").to_dict()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - Spark's name before 4.2
        return self.planner.facts().end.to_dict()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return list(self.planner.ranges(Offset.from_dict(start), Offset.from_dict(end)))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self.work(self.read_options, partition)

    def stop(self) -> None:
        self.planner.close()


def stream_reader(read: ReadOptions, work: Work) -> StreamReader:
    return AdmittingReader(read, work) if HAS_ADMISSION else StreamReader(read, work)


if HAS_ADMISSION:

    class AdmittingReader(StreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc, unused-ignore]
        """What Spark 4.2 adds: limits per trigger, AvailableNow, and the backlog in the query's progress."""

        def __init__(self, read: ReadOptions, work: Work) -> None:
            super().__init__(read, work)
            self._target: Offset | None = None

        def latestOffset(  # type: ignore[override, unused-ignore]  # noqa: N802 - Spark's name
            self, start: dict[str, Any], limit: Any
        ) -> dict[str, Any]:
            facts = self.planner.facts()
            known = Offset.from_dict(start)
            target = self._target if self._target and self._target.created == facts.created else facts.end
            first = self.planner.start_after(known, facts)
            if first >= target.sequence and known.created == facts.created:
                return start
            if isinstance(limit, ReadAllAvailable):
                return target.to_dict()
            return self._limited(first, target, facts).to_dict()

        def _limited(self, first: int, target: Offset, facts: Facts) -> Offset:
            """The end of one trigger: behind a message that exists, whose time then vouches for the offset."""
            read = self.read_options
            count = rules.records_limit(facts, read.records_per_trigger_max, read.bytes_per_trigger_max)
            if not count or first + count >= target.sequence:
                return target
            row = self.planner.ask(lambda wire: stream.message_from(wire, read.stream, first + count - 1, ()))
            if row is None or row.sequence + 1 >= target.sequence:
                return target
            return facts.offset(row.sequence + 1, rules.show_time(row.timestamp_ns))

        def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
            read = self.read_options
            if read.records_per_trigger_max:
                return ReadMaxRows(read.records_per_trigger_max)
            return ReadMaxBytes(read.bytes_per_trigger_max) if read.bytes_per_trigger_max else ReadAllAvailable()

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
            self._target = self.planner.facts().end

        def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
            return self.planner.facts().end.to_dict()
