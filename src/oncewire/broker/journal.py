"""The log beside the event loop: a thread that writes and syncs one group after the other, one that writes snapshots.

Both get bytes and hand back nothing but success or an error; all state stays in the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from oncewire._ground.contracts.records import decode_kept, decode_record, encode
from oncewire._ground.errors import OncewireError
from oncewire.broker.engine import LogStats
from oncewire.broker.image import capture, restore, settle_in
from oncewire.broker.log.reading import Found
from oncewire.broker.log.writer import Log, Snapshot
from oncewire.broker.state import State

_log = logging.getLogger(__name__)


class Replay:
    """What a start found, and how long it took."""

    def __init__(self, found: Found, took_ms: int) -> None:
        self.found = found
        self.took_ms = took_ms


def replay_into(state: State, log: Log) -> Replay:
    """Open the log and let all that it holds count."""
    begun = time.monotonic()
    found = log.open(lambda kept: restore(state, decode_kept(kept)), lambda record: state.apply(decode_record(record)))
    settle_in(state)
    for name in state.counters:
        state.counters[name] = 0  # they count since the start
    if found.torn:
        _log.warning("cut %d bytes that were never confirmed: %s", found.torn_bytes, found.torn)
    return Replay(found, int((time.monotonic() - begun) * 1000))


class Journal:
    """The log and its worker thread. Jobs are groups; the end of each is reported in the loop's thread."""

    def __init__(self, log: Log, replay: Replay) -> None:
        self.log = log
        self.replay = replay
        self.commits = 0
        self.records = 0
        self.commit_us_last = 0
        self.commit_us_total = 0
        self.snapshots = 0
        self.is_snapshotting = False
        self._snapshot: threading.Thread | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._worker = threading.Thread(target=self._work, name="broker-log", daemon=True)
        self._worker.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def commit(self, group: list[bytes], done: Callable[[OncewireError | None], None]) -> None:
        begun = time.perf_counter_ns()

        def job() -> None:
            error: OncewireError | None = None
            try:
                self.log.commit(group)
            except OncewireError as failure:
                error = failure
            self.commit_us_last = (time.perf_counter_ns() - begun) // 1000
            self.commit_us_total += self.commit_us_last
            self.commits += error is None
            self.records += len(group)
            self._loop.call_soon_threadsafe(done, error)

        self._jobs.put(job)

    def snapshot(self, state: State) -> None:
        """Of the state as it is: asked when no group is on its way. The file is written by a thread of its own."""
        image = capture(state)
        self.is_snapshotting = True

        def begin() -> None:
            try:
                snapshot = self.log.begin_snapshot()
            except OncewireError as error:
                self._snapshot_ended(error)
                return
            self._snapshot = threading.Thread(target=write, args=(snapshot,), name="broker-snapshot", daemon=True)
            self._snapshot.start()

        def write(snapshot: Snapshot) -> None:
            try:
                snapshot.write(encode(kept) for part in image for kept in part())
                self.snapshots += 1
                self._snapshot_ended(None)
            except OncewireError as error:
                self._snapshot_ended(error)

        self._jobs.put(begin)

    def _snapshot_ended(self, error: OncewireError | None) -> None:
        self.is_snapshotting = False
        if error is not None:
            _log.warning("no snapshot was written, and the log grows on: %s", error.message)

    async def close(self) -> None:
        """After the last group."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def seal() -> None:
            error: OncewireError | None = None
            try:
                self.log.seal()
            except OncewireError as failure:
                error = failure
                self.log.close()
            loop.call_soon_threadsafe(ended.set_result, error)

        self._jobs.put(seal)
        self._jobs.put(None)
        error = await ended
        await loop.run_in_executor(None, self._worker.join)
        if self._snapshot is not None:
            await loop.run_in_executor(None, self._snapshot.join)
        if error is not None:
            _log.warning("the log was not sealed: %s", error.message)

    def stats(self) -> LogStats:
        log, replay = self.log, self.replay
        found = replay.found
        return LogStats(
            log.segments,
            log.bytes,
            self.commits,
            self.records,
            self.commit_us_last,
            self.commit_us_total,
            log.failures,
            self.snapshots,
            found.snapshot_records + found.records,
            replay.took_ms,
            found.torn_bytes,
        )
