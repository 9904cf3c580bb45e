"""From the files of a log to its records: what is whole, what is torn, what is damaged.

The rule (format.py says why it holds): in the last segment, a bad record behind which no later commit stands is a torn
tail, and is left out. Anything else that is bad is damage: `Corrupt` says where, and nothing is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from zlib import crc32

from oncewire._ground.errors import Corrupt
from oncewire.broker.log.files import Files
from oncewire.broker.log.format import (
    END_BYTES,
    HEADER_BYTES,
    IMAGE_HEADER_BYTES,
    RECORD_HEAD,
    START,
    Bad,
    Header,
    Point,
    Seal,
    find_commit,
    number_of,
    read_group,
    read_header,
    read_image_end,
    read_image_header,
    read_record,
    read_seal,
    segment_name,
    snapshot_name,
)

SEAL: Final = "sealed"
_CHUNK_BYTES: Final = 4 << 20
_HINT: Final = "Restore the folder from a copy; `oncewire broker wal inspect` shows what can be read."

Take = Callable[[bytes], None]


class Segment(NamedTuple):
    """A segment that was read. `end` is behind its last good commit; bytes behind that were not confirmed."""

    number: int
    header: Header | None
    size: int
    end: int
    groups: int
    records: int


class Found(NamedTuple):
    """What is in a folder."""

    point: Point
    snapshot: int
    """Its number, 0 without one."""
    snapshot_bytes: int
    snapshot_records: int
    segments: list[Segment]
    torn_bytes: int
    torn: str
    """Where and why the tail was left out, '' when it was not."""
    is_sealed: bool

    @property
    def records(self) -> int:
        return sum(segment.records for segment in self.segments)


def read_log(files: Files, take_kept: Take, take_record: Take) -> Found:
    """Give all records to the callers, the snapshot's first. Changes nothing. Raises Corrupt on damage."""
    names = files.names()
    segments = sorted(number for name in names if (number := number_of(name, "segment")) is not None)
    snapshots = sorted(number for name in names if (number := number_of(name, "snapshot")) is not None)
    seal = _read_seal(files) if SEAL in names else None
    point, kept, kept_bytes = START, 0, 0
    if snapshots:
        point, kept, kept_bytes = read_snapshot(files, snapshots[-1], take_kept)
        segments = [number for number in segments if number >= snapshots[-1]]
        if not segments:
            raise Corrupt(f"{files.path}: {segment_name(snapshots[-1])} is missing", hint=_HINT)
    reader = _Reader(files, point, take_record, seal)
    reader.read_all(segments)
    return Found(
        reader.point,
        snapshots[-1] if snapshots else 0,
        kept_bytes,
        kept,
        reader.segments,
        reader.torn_bytes,
        reader.torn,
        seal is not None and reader.is_sealed,
    )


def _read_seal(files: Files) -> Seal:
    seal = read_seal(files.read(SEAL, 0, 1 << 10))
    if seal is None:
        raise Corrupt(f"{files.path}/{SEAL}: it is damaged", hint=_HINT)
    return seal


class _Reader:
    """The segments of a log, one after the other."""

    def __init__(self, files: Files, point: Point, take: Take, seal: Seal | None) -> None:
        self.files = files
        self.point = point
        self.segments: list[Segment] = []
        self.torn_bytes = 0
        self.torn = ""
        self.is_sealed = False
        self._take = take
        self._seal = seal

    def read_all(self, numbers: list[int]) -> None:
        headers = {number: self._header(number) for number in numbers}
        whole = [header for header in headers.values() if header is not None]
        if self._seal is not None and self._seal.segment not in headers:
            raise Corrupt(f"{self.files.path}/{segment_name(self._seal.segment)}: it is missing", hint=_HINT)
        for header, after in zip(whole, [*whole[1:], None], strict=False):
            self._segment(header, after.follows if after else None)

    def _header(self, number: int) -> Header | None:
        """None for a segment that was only begun: its header is torn, and so no group can stand in it."""
        stored = self.files.read(segment_name(number), 0, HEADER_BYTES)
        header = read_header(stored)
        if header is not None and header.number == number:
            return header
        whole = self._all(number)
        if header is not None or find_commit(whole, 0, 1) >= 0:
            self._damaged(number, 0, "its header is damaged")
        if self._seal is not None and self._seal.segment == number:
            self._damaged(number, 0, "its header is damaged")
        self.torn_bytes += len(whole)
        self.torn = f"{segment_name(number)} was only begun"
        self.segments.append(Segment(number, None, len(whole), 0, 0, 0))
        return None

    def _all(self, number: int) -> bytes:
        name = segment_name(number)
        return self.files.read(name, 0, self.files.size(name))

    def _segment(self, header: Header, until: Point | None) -> None:
        """Read up to the commit that the next segment follows, or to the end of the last one."""
        number = header.number
        if header.follows != self.point:
            message = (
                f"it follows commit {header.follows.sequence}, but commit {self.point.sequence} is the last before it"
            )
            self._damaged(number, 0, message)
        stored = self._all(number)
        position, groups, records = HEADER_BYTES, 0, 0
        bad: Bad | None = None
        while position < len(stored) and self.point != until:
            group = read_group(stored, position, header.id, self.point)
            if isinstance(group, Bad):
                bad = group
                break
            for record in group.records:
                self._take(record)
            position, self.point = group.end, group.point
            groups += 1
            records += len(group.records)
        if until is not None and self.point != until:
            where = bad or Bad(position, f"it ends before commit {until.sequence}, which the next segment follows")
            self._damaged(number, where.position, where.reason)
        if until is None:
            self._last(header, stored, position, bad)
        self.segments.append(Segment(number, header, len(stored), position, groups, records))

    def _last(self, header: Header, stored: bytes, end: int, bad: Bad | None) -> None:
        seal = self._seal
        if seal is not None and seal.segment == header.number:
            if bad is not None:
                self._damaged(header.number, bad.position, bad.reason)
            if (seal.length, seal.point) != (len(stored), self.point):
                self._damaged(header.number, end, "it is not as it was at the clean stop")
            self.is_sealed = True
        if bad is None:
            return
        later = find_commit(stored, end, self.point.sequence + 2, header.id)
        if later >= 0:
            self._damaged(header.number, bad.position, f"{bad.reason}, and a later commit stands at byte {later}")
        self.torn_bytes += len(stored) - end
        self.torn = f"{segment_name(header.number)} from byte {end} on: {bad.reason}"

    def _damaged(self, number: int, position: int, reason: str) -> None:
        raise Corrupt(f"{self.files.path}/{segment_name(number)}: byte {position}: {reason}", hint=_HINT)


# ---- snapshots


def read_snapshot(files: Files, number: int, take: Take) -> tuple[Point, int, int]:
    """Give a snapshot's records to the caller; returns its point, the number of records and its size."""
    name = snapshot_name(number)
    size = files.size(name)
    header = read_image_header(files.read(name, 0, IMAGE_HEADER_BYTES))
    end = read_image_end(files.read(name, max(0, size - END_BYTES), END_BYTES))
    if header is None or header[0] != number or end is None:
        raise Corrupt(f"{files.path}/{name}: its header or end is damaged", hint=_HINT)
    count, chain = 0, 0
    for position, record in _snapshot_records(files, name, size - END_BYTES):
        if isinstance(record, Bad):
            raise Corrupt(f"{files.path}/{name}: byte {position}: {record.reason}", hint=_HINT)
        chain = crc32(record, chain)
        count += 1
        take(record)
    if (count, chain) != end:
        raise Corrupt(f"{files.path}/{name}: it holds other records than its end says", hint=_HINT)
    return header[1], count, size


def _snapshot_records(files: Files, name: str, size: int) -> Iterator[tuple[int, bytes | Bad]]:
    """Record by record, a piece of the file at a time: snapshots may be larger than what fits in memory twice."""
    start, rest = IMAGE_HEADER_BYTES, b""
    while start + len(rest) < size or rest:
        piece = files.read(name, start + len(rest), min(_CHUNK_BYTES, size - start - len(rest)))
        stored, position = rest + piece, 0
        while position < len(stored):
            record = read_record(stored, position)
            if isinstance(record, bytes):
                yield start + position, record
                position += RECORD_HEAD + len(record)
                continue
            if record is None or not piece or not record.is_short:
                yield start + position, record or Bad(position, "an end in the middle")
                return
            break
        start, rest = start + position, stored[position:]
