"""One stream's way into bronze: its query, how it stands, and what follows when it fails.

    state       it is
    waiting     the stream is not there, or has no messages yet
    reading     its query runs
    retrying    its query failed for a reason that passes (a server that is away, a worker that died)
    stopped     somebody must look: messages are lost, the checkpoint is gone, the stream cannot be read
    done        everything that was there is in bronze (one pass)

A stream that stops takes no other with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oncewire._ground import errors
from oncewire._ground.contracts.topics import Bears
from oncewire._ground.errors import (
    AuthenticationFailed,
    Conflict,
    Corrupt,
    NotFound,
    OncewireError,
    PermissionDenied,
    Refused,
    Unavailable,
)
from oncewire.pipeline import checkpoints
from oncewire.pipeline import options as given
from oncewire.pipeline.lake.log import Lake, is_partitioned
from oncewire.pipeline.landing import Landed, Landing, LandRange, landed
from oncewire.pipeline.missing import SecondLook
from oncewire.pipeline.rules import Facts
from oncewire.pipeline.source import HAS_ADMISSION, WorkSource, read_file
from oncewire.pipeline.stream import facts_of, topics_of
from oncewire.pipeline.tables import BRONZE, high_water
from oncewire.pipeline.wire import Wire, connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

RETRY_S: Final = 2.0
ROWS_PER_TRIGGER: Final = 200_000
BYTES_PER_TRIGGER: Final = 256 << 20
FINISH_S: Final = 120.0
ASK_S: Final = 2.0
"""So long the driver looks for a server that is away before it does something else."""
LOOK_S: Final = 0.05
_OURS = re.compile(r"oncewire\._ground\.errors\.(\w+): (.+)")


class State(StrEnum):
    WAITING = "waiting"
    READING = "reading"
    RETRYING = "retrying"
    STOPPED = "stopped"
    DONE = "done"


@dataclass(frozen=True)
class Reads:
    """How streams are read: the source's options (address, credentials), the pace, and whose losses are accepted."""

    access: Mapping[str, str]
    trigger_s: float = 5.0
    rows_per_trigger: int = ROWS_PER_TRIGGER
    accepted: frozenset[str] = field(default_factory=frozenset)


class Streams:
    """Asks the server about streams from the driver, over one connection that is made again when it broke."""

    def __init__(self, access: Mapping[str, str]) -> None:
        self.access = given.read_options({**access, "stream": "any"}, read_file, is_streaming=False).access
        self._wire: Wire | None = None

    def facts(self, stream: str) -> Facts | None:
        """None when there is no such stream. Unavailable when nobody answers."""
        try:
            self._wire = self._wire or connect(self.access, ASK_S)
            return facts_of(self._wire, stream)
        except NotFound:
            return None
        except Unavailable:
            self.close()
            raise

    def topics(self) -> list[tuple[Facts, Bears]]:
        """All topics of the broker as they are now. Unavailable when nobody answers."""
        try:
            self._wire = self._wire or connect(self.access, ASK_S)
            return topics_of(self._wire)
        except Unavailable:
            self.close()
            raise

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = None


def register(spark: SparkSession) -> None:
    """Once for all queries, before the first. Spark 4.0 takes a name only once."""
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(WorkSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


class Reading:
    """The query of one stream, started when there is something to read."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        stream: str,
        reads: Reads,
        streams: Streams,
        on_landed: Callable[[Landed], None],
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._reads = reads
        self._streams = streams
        self._on_landed = on_landed
        self._query: StreamingQuery | None = None
        self._landing: Landing | None = None
        self._retry_at = 0.0
        self._look_again = SecondLook(streams.access)
        self._is_repeating = False
        """Whether the query repeats a batch and ends with it, as one pass does where Spark has no admission."""
        self.stream = stream
        self.state = State.WAITING
        self.error: OncewireError | None = None
        self.failures = 0
        self.rows = 0
        """Brought to bronze since the start."""

    @property
    def is_active(self) -> bool:
        return self._query is not None and self._query.isActive

    def look(self, now: float, *, is_once: bool = False) -> None:
        """Start what can be started, notice what has ended. Never waits for a batch."""
        if self.state is State.READING and not self.is_active:
            self._ended(now, is_once)
        if self.state in (State.WAITING, State.RETRYING) and now >= self._retry_at:
            try:
                self._begin(is_once)
            except Unavailable as error:
                self._failed(error, now)
            except OncewireError as error:
                self.state, self.error = State.STOPPED, error
            except Exception as error:  # Spark's own, such as a worker that died while the query was planned
                self._failed(failure(str(error), None), now)

    def _begin(self, is_once: bool) -> None:
        facts = self._streams.facts(self.stream)
        if facts is None or facts.last == 0:
            self.state = State.DONE if is_once else State.WAITING
            self._retry_at = time.monotonic() + self._reads.trigger_s
            return
        if facts.retention == "workqueue":
            raise Refused(f"stream {self.stream} is a work queue, which nobody else can read")
        checkpoint, begins_at = checkpoints.usable(self._lake.beside, self.stream, self._reached())
        self._is_repeating = not HAS_ADMISSION and checkpoints.is_midway(checkpoint)
        self._query = self._start(checkpoint, begins_at, is_once)
        self.state, self.error = State.READING, None

    def _reached(self) -> int | None:
        """The last sequence that the lake has of the stream, in whichever lifetime."""
        if not self._lake.exists(BRONZE):
            return None
        known = {one: last for one, last in high_water(self._lake.open(BRONZE)).items() if one[0] == self.stream}
        return known[max(known)] if known else None

    def _start(self, checkpoint: Path, begins_at: int, is_once: bool) -> StreamingQuery:
        is_accepted = self.stream in self._reads.accepted
        options: dict[str, Any] = dict(self._reads.access)
        options |= {"startingOffsets": begins_at or "earliest", "failOnDataLoss": not is_accepted}
        if HAS_ADMISSION:
            options |= {
                "maxRecordsPerTrigger": self._reads.rows_per_trigger,
                "maxBytesPerTrigger": BYTES_PER_TRIGGER,
            }
        self._landing = Landing(
            self._lake,
            self.stream,
            checkpoint,
            begins_at,
            look_again=self._look_again,
            is_loss_accepted=is_accepted,
            on_landed=self._landed,
        )
        work = LandRange(self._lake.root(BRONZE), is_partitioned(self._lake.open(BRONZE)))
        frame = landed(self._spark, stream=self.stream, work=work, **options)
        writer = frame.writeStream.queryName(f"bronze {self.stream}").foreachBatch(self._landing)
        writer = writer.option("checkpointLocation", str(checkpoint))
        pace: dict[str, Any] = (
            {"availableNow": True} if is_once else {"processingTime": f"{self._reads.trigger_s} seconds"}
        )
        return writer.trigger(**pace).start()

    def _landed(self, landed: Landed) -> None:
        self.failures = 0
        self.rows += landed.rows
        self._on_landed(landed)

    def _ended(self, now: float, is_once: bool) -> None:
        assert self._query is not None
        error = self._query.exception()
        if error is None:
            self.state = State.DONE if is_once and not self._is_repeating else State.WAITING
            return
        found = failure(str(error), self._landing.error if self._landing else None)
        if isinstance(found, Unavailable | Conflict):  # the position says at the next try whether it is there
            self._failed(found, now)
        else:
            self.state, self.error = State.STOPPED, found

    def _failed(self, error: OncewireError, now: float) -> None:
        self.failures += 1
        self.state, self.error = State.RETRYING, error
        self._retry_at = now + RETRY_S

    def finish(self) -> None:
        """Stop the query between two batches. A batch that takes too long is cut off: it comes again."""
        if self._query is None:
            return
        deadline = time.monotonic() + FINISH_S
        while self.is_active and self._query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        with suppress(Exception):  # Spark's own complaint about being interrupted
            self._query.stop()
        self._look_again.close()
        self.state = State.WAITING if self.state is State.READING else self.state

    def shown(self) -> dict[str, str]:
        told = {"state": self.state.value}
        if self.error is not None:
            told |= {"error": self.error.message, "hint": self.error.hint, "code": self.error.code}
        return told


def failure(text: str, kept: Exception | None) -> OncewireError:
    """Why a query ended: our own error if one is behind it, else something that may pass."""
    if isinstance(kept, OncewireError):
        return kept
    told = _OURS.findall(text)
    name, message = told[-1] if told else ("", "")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Corrupt | Refused) and not issubclass(kind, NotFound):
        if issubclass(kind, AuthenticationFailed | PermissionDenied):
            return kind(message.strip(), hint="Every node needs the credentials in its environment.")
        branch = Corrupt if issubclass(kind, Corrupt) else Refused
        return branch(message.strip(), hint="To go on behind a loss: `oncewire pipeline run --accept-loss STREAM`.")
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "the query ended")
    return Unavailable(message.strip() or last[:300])
