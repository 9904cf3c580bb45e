"""Topics of the broker into bronze: rounds over those that moved, whatever their number.

A declared stream has a Structured Streaming query of its own. Topics come and go by the thousand, and most are idle, so
they share one job instead. A round is:

    1  list      all topics in pages of 256, with how far each is: an idle one costs its share of a page
    2  choose    those that are further than the lake, longest waiting first, up to so many messages
    3  read      one Spark job; executors write the files, each of one topic
    4  commit    all files, and for each topic how far it is now, in one version of bronze

There is no checkpoint to lose: bronze itself says how far each topic is, and a range that comes again is known by that.
New topics are found by the next list. A deleted one is in no list any more: the lake keeps what it has read of it. One
that is made again under its name is another topic, since its stream was created at another time. One whose stream went
back stops alone.

`topics`, the table, says which number each stream bears: settlement records name topics by their number.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from oncewire._ground.contracts.topics import Bears
from oncewire._ground.errors import Corrupt, NotFound, OncewireError, Unavailable
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline import options as given
from oncewire.pipeline import stream
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake import rules as lake_rules
from oncewire.pipeline.lake.log import Lake, is_partitioned
from oncewire.pipeline.lake.rules import Span, Step, Written
from oncewire.pipeline.lake.tasks import run_tasks
from oncewire.pipeline.missing import SecondLook, Unread
from oncewire.pipeline.reading import BYTES_PER_TRIGGER, Reads, Streams, failure
from oncewire.pipeline.rules import Facts, cut, records_limit
from oncewire.pipeline.source import read_file
from oncewire.pipeline.tables import BRONZE, TOPICS, Lifetime, app_id, dataset
from oncewire.pipeline.wire import connect

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

SHARE: Final = 20
"""Times as long as a list took are left until the next one."""
PIECE: Final = 50_000
"""Messages that one task reads of a topic; a longer range is cut."""
TASKS_PER_CORE: Final = 2
TOPICS_MAX: Final = 1_000
"""Of one round: each is a file at least."""
TOPICS_APP: Final = "topics"
log = logging.getLogger("oncewire.pipeline")


@dataclass(frozen=True)
class Listed:
    """A topic as the server has it now."""

    facts: Facts
    bears: Bears

    @property
    def lifetime(self) -> Lifetime:
        return self.facts.name, parse_time_ns(self.facts.created), 0


class Chosen(NamedTuple):
    """A topic with the range [first, end) that a round takes in."""

    topic: Listed
    first: int
    end: int


@dataclass(frozen=True)
class Piece:
    """A range [first, end) of one topic, for one task. `before_ms` is the time of the message before it, if known."""

    at: int
    stream: str
    created: str
    first: int
    end: int
    is_earliest: bool
    before_ms: int = 0


@dataclass(frozen=True)
class Landed:
    """What became of a piece: its files and the time of its last message, or why it could not be read."""

    at: int
    written: tuple[Written, ...] = ()
    last: int = 0
    last_ms: int = 0
    error: str = ""
    is_gone: bool = False


@dataclass(frozen=True)
class Round:
    """What a round brought."""

    topics: int
    rows: int


# ---- on the executors


@dataclass(frozen=True)
class LandPieces:
    """Read pieces of topics and write them as files of bronze."""

    access: dict[str, str]
    root: str
    is_partitioned: bool

    def __call__(self, pieces: Sequence[Piece]) -> list[Landed]:
        return [self._land(piece) for piece in pieces]

    def _land(self, piece: Piece) -> Landed:
        try:
            return self._landed(piece)
        except NotFound:
            return Landed(piece.at, is_gone=True)
        except Corrupt as error:
            is_gone = self._is_gone(piece)
            return Landed(piece.at, error="" if is_gone else error.message, is_gone=is_gone)

    def _landed(self, piece: Piece) -> Landed:
        from oncewire.pipeline.columns import Columns
        from oncewire.pipeline.landing import SOURCE, complete
        from oncewire.pipeline.reader import Part, RangeReader

        read = self._read_options(piece)
        self._look_before(read, piece)
        columns = Columns(piece.stream, SOURCE, parse_time_ns(piece.created), 0)
        part = Part(piece.first, piece.end, piece.created, piece.is_earliest)
        held: list[pa.RecordBatch] = []
        made: list[Written] = []
        size = last = last_ms = 0
        for batch in RangeReader(read, part, columns).batches():
            if not batch.num_rows:
                continue
            held.append(complete(batch))
            size += held[-1].nbytes
            last = batch.column("sequence")[-1].as_py()
            last_ms = batch.column("timestamp").cast(pa.int64())[-1].as_py() // 1000
            if size >= files.FILE_BYTES_MAX:
                made += self._write(piece, held)
                held, size = [], 0
        made += self._write(piece, held)
        return Landed(piece.at, tuple(made), last, last_ms)

    def _write(self, piece: Piece, held: list[pa.RecordBatch]) -> list[Written]:
        if not held:
            return []
        rows = pa.Table.from_batches(held)
        first, last = rows["sequence"][0].as_py(), rows["sequence"][-1].as_py()
        prefix = f"{prefix_of(piece)}-{first:012d}-{last:012d}"
        is_dated = self.is_partitioned
        return list(files.write_files(self.root, BRONZE, prefix, rows, is_partitioned=is_dated, has_runs=True))

    def _is_gone(self, piece: Piece) -> bool:
        """Whether the topic was deleted meanwhile, and perhaps made anew."""
        wire = connect(self._read_options(piece).access)
        try:
            return stream.facts_of(wire, piece.stream).created != piece.created
        except NotFound:
            return True
        finally:
            wire.close()

    def _read_options(self, piece: Piece) -> given.ReadOptions:
        told = {**self.access, "stream": piece.stream, "includeHeaders": "true"}
        return given.read_options(told, read_file, is_streaming=False)

    def _look_before(self, read: given.ReadOptions, piece: Piece) -> None:
        """The message before must be the one that was read, if it is still there."""
        if not piece.before_ms:
            return
        wire = connect(read.access)
        try:
            found = stream.message_at(wire, piece.stream, piece.first - 1)
        finally:
            wire.close()
        if found is not None and found.timestamp_ns // 1_000_000 != piece.before_ms:
            raise Corrupt(f"stream {piece.stream} went back: message {piece.first - 1} is not the one that was read")


def prefix_of(piece: Piece) -> str:
    """Topics may have long names, and files may not."""
    name = app_id((piece.stream, parse_time_ns(piece.created), 0))
    return f"topic-{hashlib.blake2b(name.encode(), digest_size=10).hexdigest()}"


# ---- on the driver


@dataclass
class Known:
    """What the driver remembers of a topic: how far the lake is, and when it was last served."""

    reached: int | None
    last_ms: int = 0
    served: int = 0
    is_gone: bool = False


@dataclass
class Standing:
    """How topics stand, for `status`."""

    count: int = 0
    behind: int = 0
    stopped: dict[Lifetime, str] = field(default_factory=dict)
    error: OncewireError | None = None
    """Why none can be read just now."""

    def shown(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "topics": self.count,
            "behind": self.behind,
            "stopped": {name: why for (name, _, _), why in self.stopped.items()},
        }
        return told | ({"error": self.error.message, "hint": self.error.hint} if self.error else {})

    @property
    def errors(self) -> list[OncewireError]:
        """What somebody must look at."""
        hint = "A topic that is deleted and made again is read from its beginning."
        found = [Corrupt(f"topic {name}: {why}", hint=hint) for (name, _, _), why in self.stopped.items()]
        return [*found, *([self.error] if self.error else [])]


class Topics:
    """All topics of one lake, by whoever holds it."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        reads: Reads,
        streams: Streams,
        tell: Callable[[Round], None],
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._reads = reads
        self._streams = streams
        self._look_again = SecondLook(streams.access)
        self._tell = tell
        self._known: dict[Lifetime, Known] = {}
        self._named: set[tuple[str, int]] | None = None
        self._rounds = 0
        self._next = float("-inf")
        self._list_s = 0.0
        self.standing = Standing()

    def look(self) -> None:
        """A round, when one is due. What fails is tried again at the next."""
        started = time.monotonic()
        if started < self._next:
            return
        try:
            is_more = self.round(self.listed())
        except Exception as error:  # Spark's own too, such as a worker that died: nothing of the round was committed
            self.failed(error)
            is_more = False
        ended = time.monotonic()
        self._next = ended if is_more else ended + max(self._reads.trigger_s, SHARE * self._list_s)

    def close(self) -> None:
        self._look_again.close()

    def failed(self, error: Exception) -> OncewireError:
        """Why topics are not read just now."""
        found = error if isinstance(error, OncewireError) else failure(str(error), None)
        self.standing.error = found
        log.log(
            logging.INFO if isinstance(found, Unavailable) else logging.WARNING, "topics are not read now: %s", found
        )
        return found

    def listed(self) -> list[Listed]:
        started = time.monotonic()
        found = [Listed(facts, bears) for facts, bears in self._streams.topics()]
        self._list_s = time.monotonic() - started
        self.standing.error = None
        self.standing.count = len(found)
        return found

    def round(self, listed: Sequence[Listed]) -> bool:
        """One round over what was listed; whether there is more of it."""
        moved = self._moved(listed)
        self.standing.behind = len(moved)
        if not moved:
            return False
        chosen, is_more = self._choose(moved)
        landed = self._read(chosen)
        self.standing.behind, self.standing.error = len(moved) - len(chosen), None
        rows = self._commit(chosen, landed)
        self._rounds += 1
        self._tell(Round(len(chosen), rows))
        return is_more

    # ---- what to read

    def _moved(self, listed: Sequence[Listed]) -> list[Listed]:
        self._learn(listed)
        moved = []
        for topic in listed:
            known = self._known[topic.lifetime]
            if known.reached is not None and topic.facts.last < known.reached:
                self._stop(topic, f"it ends at {topic.facts.last}, and the lake has it up to {known.reached}")
            elif topic.facts.last > (known.reached or 0) and not known.is_gone:
                moved += [topic] if topic.lifetime not in self.standing.stopped else []
        return moved

    def _learn(self, listed: Sequence[Listed]) -> None:
        """How far the lake is, for topics that were not seen before."""
        new = [topic.lifetime for topic in listed if topic.lifetime not in self._known]
        if not new:
            return
        if not self._lake.exists(BRONZE):
            self._known |= {lifetime: Known(None) for lifetime in new}
            return
        bronze = self._lake.open(BRONZE)
        times = last_times(bronze) if not self._known else {}
        for lifetime in new:
            reached = bronze.transaction_version(app_id(lifetime))
            self._known[lifetime] = Known(reached, times.get((lifetime, reached), 0))

    def _stop(self, topic: Listed, why: str) -> None:
        if topic.lifetime not in self.standing.stopped:
            log.warning("topic %s stops: %s", topic.facts.name, why)
        self.standing.stopped[topic.lifetime] = why

    def _choose(self, moved: Sequence[Listed]) -> tuple[list[Chosen], bool]:
        """Topics with the range [first, end) of each, longest waiting first; whether any were left."""
        left, left_bytes = self._reads.rows_per_trigger, BYTES_PER_TRIGGER
        chosen: list[Chosen] = []
        is_more = False
        for topic in sorted(moved, key=lambda one: self._known[one.lifetime].served):
            if min(left, left_bytes) <= 0 or len(chosen) >= TOPICS_MAX:
                return chosen, True
            known = self._known[topic.lifetime]
            first = (known.reached or 0) + 1
            begin = min(max(first, topic.facts.first), topic.facts.next)
            end = min(topic.facts.next, begin + records_limit(topic.facts, left, left_bytes))
            chosen.append(Chosen(topic, first, end))
            is_more |= end < topic.facts.next
            left -= end - begin
            left_bytes -= (end - begin) * topic.facts.size_bytes // max(1, topic.facts.messages)
        return chosen, is_more

    # ---- reading and committing

    def _read(self, chosen: Sequence[Chosen]) -> dict[int, list[Landed]]:
        pieces = [piece for at, one in enumerate(chosen) for piece in self._pieces(at, *one)]
        tasks = spread(pieces, TASKS_PER_CORE * self._spark.sparkContext.defaultParallelism)
        work = LandPieces(dict(self._reads.access), self._lake.root(BRONZE), is_partitioned(self._lake.open(BRONZE)))
        found: dict[int, list[Landed]] = {at: [] for at in range(len(chosen))}
        for answer in run_tasks(self._spark, work, tasks):
            for one in answer:
                found[one.at].append(one)
        return found

    def _pieces(self, at: int, topic: Listed, first: int, end: int) -> Iterable[Piece]:
        facts, known = topic.facts, self._known[topic.lifetime]
        begin = min(max(first, facts.first), end)
        is_first = known.reached is None
        for number, (start, stop) in enumerate(cut(begin, end, -(-(end - begin) // PIECE) or 1) or [(begin, end)]):
            has_witness = number == 0 and begin == first
            yield Piece(at, facts.name, facts.created, start, stop, is_first, known.last_ms if has_witness else 0)

    def _commit(self, chosen: Sequence[Chosen], landed: Mapping[int, list[Landed]]) -> int:
        """All that was read, in one version. What could not be read stays where it is."""
        good = [(at, one) for at, one in enumerate(chosen) if self._is_good(one.topic, landed[at])]
        self._name([one.topic for _, one in good])
        handle = self._lake.open(BRONZE)
        spans: list[dict[str, Any]] = []
        moved: dict[str, int] = {}
        written: list[Written] = []
        unread: set[int] = set()
        for at, (topic, first, end) in good:
            reached = handle.transaction_version(app_id(topic.lifetime))
            span = Span(topic.lifetime, first if reached is not None else 0, end - 1)
            if lake_rules.admit(span, reached) is Step.SKIP:
                continue
            mine = [file for one in landed[at] for file in one.written]
            ranges = lake_rules.missing(span, lake_rules.check_runs(span, mine))
            try:
                second = self._look_again(topic.lifetime, ranges) if ranges else None
            except Unread as error:
                self.failed(error)
                unread.add(at)
                continue
            written += mine
            moved[app_id(topic.lifetime)] = span.last
            count = sum(file.rows for file in mine)
            spans.append(lake_rules.span_facts(span, count, second, is_loss_accepted=False))
        if moved:
            self._lake.commit_all(handle, BRONZE, written, moved, facts={"spans": spans})
        for at, (topic, _, end) in good:
            known = self._known[topic.lifetime]
            known.served = self._rounds
            if at in unread:
                continue
            known.reached = end - 1
            known.last_ms = max((one.last_ms for one in landed[at] if one.last == end - 1), default=0)
        return sum(file.rows for file in written)

    def _is_good(self, topic: Listed, landed: Sequence[Landed]) -> bool:
        for one in landed:
            if one.error:
                self._stop(topic, one.error)
            self._known[topic.lifetime].is_gone |= one.is_gone
        return not any(one.error or one.is_gone for one in landed)

    def _name(self, found: Sequence[Listed]) -> None:
        """See that the table of topics has these, before bronze has a row of them."""
        handle = self._lake.open(TOPICS)
        if self._named is None or (handle.transaction_version(TOPICS_APP) or 0) != len(self._named):
            rows = dataset(handle).to_table(columns=["stream", "created_ns"]).to_pylist()
            self._named = {(row["stream"], row["created_ns"]) for row in rows}
        new = [topic for topic in found if topic.lifetime[:2] not in self._named]
        if not new:
            return
        now = datetime.now(UTC)
        rows = pa.Table.from_pylist([topic_row(topic, now) for topic in new], schema=TOPICS.schema)
        count = len(self._named) + len(new)
        made = list(files.write_files(self._lake.root(TOPICS), TOPICS, f"{count:010d}", rows, is_partitioned=False))
        self._lake.commit(handle, TOPICS, made, TOPICS_APP, count)
        self._named |= {topic.lifetime[:2] for topic in new}


def spread(pieces: Sequence[Piece], tasks: int) -> list[tuple[Piece, ...]]:
    """Pieces over so many tasks, each about as long as the others."""
    parts: list[list[Piece]] = [[] for _ in range(max(1, min(tasks, len(pieces))))]
    sizes = [0] * len(parts)
    for piece in sorted(pieces, key=lambda one: one.first - one.end):
        at = sizes.index(min(sizes))
        parts[at].append(piece)
        sizes[at] += piece.end - piece.first + 1
    return [tuple(part) for part in parts]


def topic_row(topic: Listed, now: datetime) -> dict[str, Any]:
    name, created_ns, _ = topic.lifetime
    bears = topic.bears
    return {
        "tenant": bears.tenant, "stream": name, "created_ns": created_ns, "number": bears.number,
        "topic": bears.topic, "partitions": bears.partitions, "found_at": now,
    }  # fmt: skip


def last_times(bronze: DeltaTable) -> dict[tuple[Lifetime, int | None], int]:
    """The time (ms) of the last message in each file of bronze, by lifetime and its sequence. The log rounds it up."""
    found = pa.table(bronze.get_add_actions(flatten=True))
    if not found.num_rows:
        return {}
    names = ("min.stream", "min.created_ns", "min.incarnation", "max.sequence", "max.timestamp")
    columns = [found[name].to_pylist() for name in names]
    return {
        ((name, created_ns, incarnation), sequence): int(at.timestamp() * 1000) - 1
        for name, created_ns, incarnation, sequence, at in zip(*columns, strict=True)
    }
