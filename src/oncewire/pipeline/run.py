"""The pipeline: streams into bronze, bronze into silver, silver into gold, and the keeping of the lake, in one driver.

Bronze is one Structured Streaming query per declared stream, and rounds over the broker's topics (topics.py). Rounds,
silver, gold and housekeeping take turns in this loop, so there is one writer of each table. A stop lets each query end
its batch and this loop its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from oncewire._ground.errors import Conflict, OncewireError, Unavailable
from oncewire.pipeline.deriving import Batch, Silver
from oncewire.pipeline.families import Families
from oncewire.pipeline.gold.refresh import Gold
from oncewire.pipeline.lake import hold
from oncewire.pipeline.lake.keep import Keeper, Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.landing import Landed
from oncewire.pipeline.reading import LOOK_S, RETRY_S, Reading, Reads, State, Streams, failure, register
from oncewire.pipeline.tables import BRONZE
from oncewire.pipeline.topics import Listed, Round, Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("oncewire.pipeline")

AT_ONCE_MAX: Final = 3
"""Queries that one pass runs side by side."""
FAILURES_MAX: Final = 10
"""So often in a row one pass tries a stream again."""
TICK_S: Final = 0.25
ROWS_BESIDE: Final = 100_000
"""If so many rows wait for silver, one pass derives them while it goes on reading."""

Told = Landed | Batch | Reading | Round
Tell = Callable[[Told], None]


class Pipeline:
    """For one run, by whoever holds the lake."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        streams: Sequence[str],
        reads: Reads,
        *,
        has_topics: bool = True,
        families: Families = (),
        keeping: Keeping,
        gold: Gold | None = None,
        tell: Tell = lambda _: None,
    ) -> None:
        register(spark)
        self._lake = lake
        self._tell = tell
        self._failures = 0
        self._derived_rows = 0
        self._streams = Streams(reads.access)
        self.readings = [Reading(spark, lake, name, reads, self._streams, tell) for name in streams]
        self.topics = Topics(spark, lake, reads, self._streams, tell) if has_topics else None
        self._silver = Silver(spark, lake, families)
        self._gold = gold
        self._keeper = Keeper(spark, lake, keeping)
        self._states: dict[str, Any] = {}
        self._topics_shown: dict[str, Any] = {}

    def once(self, stop: threading.Event) -> None:
        """Everything that is there now: bronze, then silver, then gold, then the keeping. Where much waits for silver
        it begins earlier, since bronze mostly waits for the server."""
        self._check()
        try:
            waiting = list(self.readings)
            running: list[Reading] = []
            while (waiting or running) and not stop.is_set():
                while waiting and len(running) < AT_ONCE_MAX:
                    running.append(waiting.pop(0))
                for reading in running:
                    reading.look(time.monotonic(), is_once=True)
                    self._stop_at_last(reading)
                self._note()
                running = [one for one in running if one.state not in (State.DONE, State.STOPPED)]
                if self._waiting_rows < ROWS_BESIDE or not self._derive(stop):
                    stop.wait(LOOK_S if running else 0)
            self._topics_once(stop)
        finally:
            self._finish()
        self.derive_all(stop)
        while not (stop.is_set() or self._finished(stop)):
            pass

    def _check(self) -> None:
        self._lake.check_partitions(BRONZE)
        self._lake.prove()

    def _topics_once(self, stop: threading.Event) -> None:
        """The topics as they are now."""
        if self.topics is None:
            return
        listed: list[Listed] | None = None
        failures = 0
        while not stop.is_set():
            try:
                listed = self.topics.listed() if listed is None else listed
                if not self.topics.round(listed):
                    return
                failures = 0
            except Exception as error:  # as with silver: nothing of the round was committed
                failures += 1
                if not isinstance(self.topics.failed(error), Unavailable) or failures > FAILURES_MAX:
                    return
                stop.wait(RETRY_S)

    def _stop_at_last(self, reading: Reading) -> None:
        if reading.state is State.RETRYING and reading.failures > FAILURES_MAX:
            reading.state = State.STOPPED

    def run(self, stop: threading.Event) -> None:
        """Until asked to stop."""
        self._check()
        try:
            while not stop.is_set():
                for reading in self.readings:
                    reading.look(time.monotonic())
                if self.topics is not None:
                    self.topics.look()
                self._note()
                if not self._derive(stop):
                    self._look_after(stop)
                    stop.wait(TICK_S)
        finally:
            self._finish()

    @property
    def silver_has(self) -> int:
        """The version of bronze that is whole in silver."""
        return self._silver.done()

    def derive_all(self, stop: threading.Event) -> None:
        """Silver of everything that bronze has."""
        while not stop.is_set() and self._derive(stop):
            pass

    def _derive(self, stop: threading.Event) -> bool:
        """A batch of silver; whether there may be more. What Spark fails at is tried again: a batch changes nothing
        before it is whole."""
        try:
            batch = self._silver.step()
        except Exception as error:
            self._failed("a batch of silver", error, stop)
            return True
        self._failures = 0
        if batch is None:
            return False
        self._derived_rows += batch.rows_in
        self._tell(batch)
        return True

    @property
    def _waiting_rows(self) -> int:
        """What the streams brought to bronze since the start, and silver has not yet."""
        return sum(one.rows for one in self.readings) - self._derived_rows

    def _finished(self, stop: threading.Event) -> bool:
        """Gold and the keeping, at the end of a pass; whether they are done."""
        try:
            if self._gold is not None:
                self._gold.refresh(self.silver_has)
            self._keeper.keep(self.silver_has)
        except Exception as error:
            self._failed("what follows silver", error, stop)
            return False
        return True

    def _look_after(self, stop: threading.Event) -> None:
        """Gold and the keeping, where they are due."""
        try:
            if self._gold is not None:
                self._gold.refresh_sometimes(self.silver_has)
            self._keeper.keep_sometimes(self.silver_has, time.monotonic())
        except Exception as error:
            self._failed("what follows silver", error, stop)

    def _failed(self, what: str, error: Exception, stop: threading.Event) -> None:
        """Wait, if it may go well the next time: somebody is away, or came between, and the tables say then what is
        still to be done. Else it is raised."""
        found = error if isinstance(error, OncewireError) else failure(str(error), None)
        self._failures += 1
        if not isinstance(found, Unavailable | Conflict) or self._failures > FAILURES_MAX:
            raise found from error
        log.warning("%s failed and is tried again: %s", what, found)
        stop.wait(RETRY_S)

    def _note(self) -> None:
        """Tell, and write down for `status`, how the streams stand, when it has changed."""
        states = {one.stream: one.shown() for one in self.readings}
        topics = self.topics.standing.shown() if self.topics is not None else {}
        if (states, topics) == (self._states, self._topics_shown):
            return
        for one in self.readings:
            if states[one.stream] != self._states.get(one.stream):
                self._tell(one)
        self._states, self._topics_shown = states, topics
        told = {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "streams": states, "topics": topics}
        hold.write_state(self._lake.beside, told)

    def _finish(self) -> None:
        for reading in self.readings:
            reading.finish()
        if self.topics is not None:
            self.topics.close()
        self._streams.close()
        self._note()

    def trouble(self) -> str:
        """Which streams do not come in, and why; '' when all do."""
        return "; ".join(f"{one.stream} is {one.state.value}: {one.error}" for one in self.readings if one.error)

    def stopped(self) -> list[OncewireError]:
        """Why streams stopped that somebody must look at."""
        found = [one.error for one in self.readings if one.state is State.STOPPED and one.error is not None]
        return [*found, *(self.topics.standing.errors if self.topics is not None else ())]
