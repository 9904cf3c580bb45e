"""Writing the log: groups, segments, snapshots, the seal.

Everything here blocks on the disk and is called from one thread at a time, but for `Snapshot.write`, which has files of
its own and may run beside the commits.

After a write or a sync that failed, nobody knows what of that file is on the disk: a later sync may report success for
pages that the system has dropped. So the file is never touched again. The next commit starts a new segment, whose
header names the last good commit; until that succeeds, commits are refused and nothing of them is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Final
from zlib import crc32

from oncewire._ground.errors import OutcomeUnknown
from oncewire.broker.log.files import File, Files, not_written, translated
from oncewire.broker.log.format import (
    HEADER_BYTES,
    START,
    Header,
    Point,
    Seal,
    group_frame,
    header_frame,
    image_end_frame,
    image_header_frame,
    number_of,
    record_frame,
    seal_frame,
    segment_name,
    snapshot_name,
)
from oncewire.broker.log.reading import SEAL, Found, Segment, Take, read_log

SEGMENT_BYTES_MAX: Final = 32 << 20
SEGMENTS_MAX: Final = 64
"""With more of them a snapshot is due, however small they are."""
SNAPSHOT_BYTES_MIN: Final = 64 << 20
"""Of groups since the last snapshot, before the next is due. It is never due before as much as the last one's size."""
_WRITE_BYTES: Final = 1 << 20
_SYNC_BYTES: Final = 8 << 20
"""A snapshot is synced piece by piece: one large sync at its end would hold up the commits."""


class Log:
    """A log that is open for writing. `make_id` gives random 64-bit numbers."""

    def __init__(
        self,
        files: Files,
        make_id: Callable[[], int],
        *,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        snapshot_bytes_min: int = SNAPSHOT_BYTES_MIN,
    ) -> None:
        self._files = files
        self._make_id = make_id
        self._segment_bytes_max = segment_bytes_max
        self._snapshot_bytes_min = snapshot_bytes_min
        self._file: File | None = None
        self._header = Header(0, 0, START)
        self._length = 0
        self.point = START
        self.segments = 0
        self.bytes = 0
        """Of all segments and the snapshot."""
        self.bytes_since = 0
        """Of groups since the last snapshot was begun."""
        self._segments_since = 0
        self.snapshot_bytes = 0
        self.failures = 0

    # ---- start and stop

    def open(self, take_kept: Take, take_record: Take) -> Found:
        """Read everything, make sure that what was read is durable, and begin a new segment."""
        with translated(self._files.path):
            found = read_log(self._files, take_kept, take_record)
            self._tidy(found)
            if not found.is_sealed:
                self._settle_tail(found)
            self.point = found.point
            self._header = Header(max([one.number for one in found.segments], default=0), 0, START)
            self._start_segment()
            if SEAL in self._files.names():
                self._files.remove(SEAL)
                self._files.sync_names()
        whole = [one for one in found.segments if one.header]
        self.segments = self._segments_since = len(whole) + 1
        self.snapshot_bytes = found.snapshot_bytes
        self.bytes_since = sum(one.end for one in whole)
        self.bytes = self.bytes_since + self.snapshot_bytes
        return found

    def _tidy(self, found: Found) -> None:
        """Remove what has no meaning any more: it is behind a snapshot, or was only begun."""
        begun = {segment_name(one.number) for one in found.segments if one.header is None}
        for name in self._files.names():
            segment, snapshot = number_of(name, "segment"), number_of(name, "snapshot")
            is_old = segment is not None and segment < found.snapshot
            is_old |= snapshot is not None and snapshot < found.snapshot
            if is_old or name in begun or name.endswith(".new"):
                self._files.remove(name)

    def _settle_tail(self, found: Found) -> None:
        """What was read may be in the system's memory only, even after a sync that failed in a former life: so the last
        segment is written anew, without its torn tail, before anything of it is shown to anyone."""
        last: Segment | None = max(
            (one for one in found.segments if one.header), default=None, key=lambda one: one.number
        )
        if last is None or (last.end == HEADER_BYTES and last.size == last.end):
            self._files.sync_names()
            return
        name = segment_name(last.number)
        self._write_whole(name, [self._files.read(name, 0, last.end)])

    def _write_whole(self, name: str, pieces: Iterable[bytes]) -> int:
        """A file that is there whole or not at all; returns its size."""
        new = f"{name}.new"
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(new)
        file, size, synced = self._files.create(new), 0, 0
        try:
            for piece in pieces:
                _write_all(file, piece)
                size += len(piece)
                if size - synced >= _SYNC_BYTES:
                    file.sync()
                    synced = size
            file.sync()
        except OSError:
            with contextlib.suppress(OSError):
                self._files.remove(new)
            raise
        finally:
            file.close()
        self._files.rename(new, name)
        self._files.sync_names()
        return size

    def seal(self) -> None:
        """A clean stop: from now on any change to the last segment is damage."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        with translated(self._files.path):
            self._write_whole(SEAL, [seal_frame(Seal(self._header.number, self._length, self.point))])

    def close(self) -> None:
        """Without a seal."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- groups

    def commit(self, records: list[bytes]) -> None:
        """Make them durable, all or none. OutcomeUnknown when nobody can tell, Unavailable when nothing was written."""
        if self._file is None or self._length >= self._segment_bytes_max:
            try:
                self._start_segment()
            except OSError as error:
                self.failures += 1
                raise not_written(self._files.path, error) from error
        assert self._file is not None
        group, point = group_frame(records, self._header.id, self.point)
        try:
            _write_all(self._file, group)
            self._file.sync()
        except OSError as error:
            self.failures += 1
            self._abandon()
            raise OutcomeUnknown(
                f"outcome unknown: the log in {self._files.path} could not be written: {error.strerror or error}",
                hint="Look before you repeat it without an idempotency key.",
            ) from error
        self.point = point
        self._length += len(group)
        self.bytes += len(group)
        self.bytes_since += len(group)

    def _abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _start_segment(self) -> None:
        """A new file whose header is durable before any group stands in it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        header = Header(self._header.number + 1, self._make_id(), self.point)
        self._header = header  # a number is never used twice, whatever becomes of the file
        name = segment_name(header.number)
        file = self._files.create(name)
        try:
            _write_all(file, header_frame(header))
            file.sync()
            self._files.sync_names()
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                self._files.remove(name)
            raise
        self._file, self._length = file, HEADER_BYTES
        self.segments += 1
        self._segments_since += 1
        self.bytes += HEADER_BYTES

    # ---- snapshots

    @property
    def is_snapshot_due(self) -> bool:
        return (
            self.bytes_since > max(self._snapshot_bytes_min, self.snapshot_bytes) or self._segments_since > SEGMENTS_MAX
        )

    def begin_snapshot(self) -> Snapshot:
        """Start a new segment: a snapshot of the state as of the last commit makes all before it needless."""
        with translated(self._files.path):
            self._start_segment()
        self.bytes_since = self._segments_since = 0  # also if it fails: the next try waits for as much again
        return Snapshot(self, self._header.number, self.point)

    def _snapshot_done(self, number: int, size: int) -> None:
        for name in self._files.names():
            segment, snapshot = number_of(name, "segment"), number_of(name, "snapshot")
            if (segment is not None and segment < number) or (snapshot is not None and snapshot < number):
                self._files.remove(name)
        kept = [name for name in self._files.names() if number_of(name, "segment") is not None]
        self.segments = len(kept)
        self.snapshot_bytes = size
        self.bytes = size + sum(self._files.size(name) for name in kept)


class Snapshot:
    """A snapshot that is to be written."""

    def __init__(self, log: Log, number: int, point: Point) -> None:
        self._log = log
        self._number = number
        self._point = point

    def write(self, records: Iterable[bytes]) -> None:
        """May run beside commits. Raises Unavailable when it could not be written: the log goes on without it."""
        log = self._log
        with translated(log._files.path):
            size = log._write_whole(snapshot_name(self._number), self._pieces(records))
            log._snapshot_done(self._number, size)

    def _pieces(self, records: Iterable[bytes]) -> Iterable[bytes]:
        waiting, size, count, chain = [image_header_frame(self._number, self._point)], 0, 0, 0
        for record in records:
            frame = record_frame(record)
            waiting.append(frame)
            size += len(frame)
            count += 1
            chain = crc32(record, chain)
            if size >= _WRITE_BYTES:
                yield b"".join(waiting)
                waiting, size = [], 0
        yield b"".join([*waiting, image_end_frame(count, chain)])


def _write_all(file: File, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(bytes(view) if len(view) != len(content) else content) :]
