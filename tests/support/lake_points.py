"""Where a pipeline can die while it fills a lake: seams around its files and commits, put there by the job that is to
be killed. The product holds nothing for the sake of these tests.

    land:begun       a task of bronze has begun to read its share of the range
    land:half        half of a file is on disk, under the name that is not yet its own
    land:named       a file has its name, its task has not answered
    land:written     all files are there, nothing is committed
    land:listed      the version is in the table's log, and not yet synced
    land:committed   the range is in the table, Spark's own commit is not there
    round:begun      a task has begun to read its share of the broker's topics
    round:half       half of a file is on disk
    round:named      a file has its name, its task has not answered
    round:written    all files are there, the table of topics does not name the new ones
    round:listed     it does, and bronze has nothing of the round
    round:committed  bronze has all of it, and the driver has not noted so
    derive:staged    a batch of silver is decoded, its keys are not looked up
    derive:half      half of a file of silver or quarantine is on disk
    derive:written   all files are there, quarantine may be committed, the silver table is not
    derive:one       the silver table is committed, the balance of the batch is not
    derive:noted     all is committed, the staged rows are still there
    keep:written     small files are put together in a new one that no version names
    keep:committed   a version names it in their place

A process that reaches the wanted point waits there until it is killed or let go.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from oncewire._ground.contracts.topics import STREAM_PREFIXES
from oncewire.pipeline import deriving, topics
from oncewire.pipeline.lake import keep
from oncewire.pipeline.lake.bucket import Bucket
from oncewire.pipeline.lake.folder import Folder
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.landing import LandRange
from oncewire.pipeline.staging import WHOLE_BYTES_MIN, DecodeFile, FileDecoded, WriteItem, write_item

IN_WORKERS: Final = ("land:begun", "land:half", "land:named", "derive:half")
IN_DRIVER: Final = (
    "land:written", "land:listed", "land:committed", "derive:staged", "derive:written", "derive:one", "derive:noted",
    "keep:written", "keep:committed",
)  # fmt: skip
ROUND_IN_WORKERS: Final = ("round:begun", "round:half", "round:named")
ROUND_IN_DRIVER: Final = ("round:written", "round:listed", "round:committed")
LOOK_S: Final = 0.005
GATE: Final = "ONCEWIRE_TEST_GATE"
"""Tells workers which folder the gate is beside."""


class Gate:
    """Where killer and victim meet: two files in a folder beside the lake."""

    def __init__(self, lake: Path) -> None:
        self._wanted = lake.parent / "gate.wanted"
        self._reached = lake.parent / "gate.reached"

    def ask(self, point: str) -> None:
        begun = self._wanted.with_suffix(".new")
        begun.write_text(point)
        begun.replace(self._wanted)

    @property
    def is_reached(self) -> bool:
        return self._reached.exists()

    def open(self) -> None:
        """Whoever waits goes on."""
        self._reached.unlink(missing_ok=True)

    def pass_by(self, point: str) -> None:
        """In the victim: stop here if it is the wanted point. Only one of several processes is stopped."""
        try:
            if self._wanted.read_text() != point:
                return
            self._wanted.replace(self._reached)
        except FileNotFoundError:
            return
        while self.is_reached:
            threading.Event().wait(LOOK_S)


# ---- in Python workers


def _gate() -> Gate:
    """Where the driver said."""
    return Gate(Path(os.environ[GATE]))


@contextmanager
def _stopping_in_files(step: str) -> Iterator[Gate]:
    """Within it this worker stops inside the files that it writes, not in those of a task that it has next, such as
    compaction. In an object store there is no half of one."""
    gate = _gate()

    def store(place: Folder, content: memoryview | bytes) -> None:
        path = Path(str(place))
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.half")
        half.write_bytes(content[: len(content) // 2])
        gate.pass_by(f"{step}:half")
        half.unlink(missing_ok=True)
        _STORE(place, content)
        gate.pass_by(f"{step}:named")

    def put(place: Bucket, content: memoryview | bytes) -> None:
        gate.pass_by(f"{step}:half")
        _PUT(place, content)
        gate.pass_by(f"{step}:named")

    Folder.store = store  # type: ignore[method-assign]
    Bucket.store = put  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        Folder.store = _STORE  # type: ignore[method-assign]
        Bucket.store = _PUT  # type: ignore[method-assign]


_STORE = Folder.store
_PUT = Bucket.store


class StoppingLandRange(LandRange):
    """LandRange, with seams."""

    def land(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _stopping_in_files("land") as gate:
            gate.pass_by("land:begun")
            yield from super().land(batches)


class StoppingDecodeFile(DecodeFile):
    """DecodeFile, with seams."""

    def __call__(self, item: tuple[int, str]) -> FileDecoded:
        with _stopping_in_files("derive"):
            return super().__call__(item)


class StoppingLandPieces(topics.LandPieces):
    """LandPieces, with seams."""

    def __call__(self, pieces: Sequence[topics.Piece]) -> list[topics.Landed]:
        with _stopping_in_files("round") as gate:
            gate.pass_by("round:begun")
            return super().__call__(pieces)


def stopping_write_item(item: WriteItem) -> Any:
    with _stopping_in_files("derive"):
        return write_item(item)


# ---- in the driver


class StoppingLake(Lake):
    """A lake whose commits can be struck."""

    def commit(self, handle: Any, table: Any, *args: Any, **named: Any) -> None:
        gate = Gate(self.beside)
        is_silver = table.name.startswith("silver/")
        before = {"bronze": "land:written", "topics": "round:written"}
        gate.pass_by(before.get(table.name, "derive:written" if is_silver else ""))
        super().commit(handle, table, *args, **named)
        after = {"bronze": "land:committed", "batches": "derive:noted"}
        gate.pass_by(after.get(table.name, "derive:one" if is_silver else ""))

    def commit_all(self, handle: Any, table: Any, written: Any, moved: Any, **named: Any) -> None:
        gate = Gate(self.beside)
        is_round = table.name == "bronze" and any(app.startswith(STREAM_PREFIXES) for app in moved)
        gate.pass_by("round:listed" if is_round else "")
        super().commit_all(handle, table, written, moved, **named)
        gate.pass_by("round:committed" if is_round else "")

    def rewrite(self, *args: Any) -> None:
        gate = Gate(self.beside)
        gate.pass_by("keep:written")
        super().rewrite(*args)
        gate.pass_by("keep:committed")

    def _sync_log(self, table: Any, first: int) -> None:
        if table.name == "bronze":
            Gate(self.beside).pass_by("land:listed")
        super()._sync_log(table, first)


class StoppingSilver(deriving.Silver):
    """Every other batch is written as files at once."""

    def _run(self, first: int, last: int, versions: Any) -> deriving.Batch:
        self._whole_bytes_min = 0 if last % 2 else WHOLE_BYTES_MIN
        return super()._run(first, last, versions)

    def _look(self, *args: Any) -> Any:
        Gate(self._lake.beside).pass_by("derive:staged")
        return super()._look(*args)


def put_seams() -> None:
    """In the process of the driver, before its pipeline is made. Compaction begins with two files."""
    from oncewire.pipeline import reading, run

    reading.LandRange = StoppingLandRange  # type: ignore[misc]
    topics.LandPieces = StoppingLandPieces  # type: ignore[misc]
    deriving.DecodeFile = StoppingDecodeFile  # type: ignore[misc]
    deriving.write_item = stopping_write_item
    run.Silver = StoppingSilver  # type: ignore[misc]
    keep.FILES_MIN = 2  # type: ignore[misc]
