"""The bytes of the log. Pure. All numbers are little-endian; every checksum is CRC-32 (zlib's).

A folder holds:

    segment-00000001.log     groups of records, in the order in which they were made durable
    snapshot-00000007.img    the whole state; segments below 7 are not needed with it
    sealed                   written at a clean stop, gone after the next start
    lock                     held (flock) by the living process
    *.new                    being written; without meaning until it is renamed

A **segment** is a header and groups. A group is one or more records and the commit that ends it:

    header   8s "ONCELOG1" · u64 number · u64 id · u64 sequence · u32 chain · u32 checksum of all before
    record   u32 length (1 to 2^30) · u32 checksum, seeded with the length · the record
    commit   u32 0xFFFFFFFF · u32 checksum of all behind it · u64 id · u64 sequence · u32 chain before · u32 chain ·
             u32 bytes of the group's records

`sequence` numbers the commits of the log from 1 on, without a gap. `chain` is the checksum of the group's records,
seeded with the chain of the commit before: so each commit names the one before it, and stands for all that lie before.
`id` is random, one per segment: bytes that a client sends can never look like a commit of this file. The header names
the last commit that the segment follows. What an older segment holds behind that commit was never confirmed and is not
read: after a write that failed, a new segment goes on from the last commit, and the old file is never touched again.

A group is written only when the group before it is durable. So a bad record is a torn tail if no commit with a later
sequence than that group's is found behind it, and damage if one is.

A **snapshot** is a header, records and an end:

    header   8s "ONCEIMG1" · u64 first segment · u64 sequence · u32 chain · u32 checksum of all before
    record   as above
    end      u32 0xFFFFFFFF · u32 checksum of all behind it · u64 number of records · u32 checksum of all record bytes

**sealed** is: 8s "ONCESEAL" · u64 segment · u64 its length · u64 sequence · u32 chain · u32 checksum of all before.
Snapshot and seal are renamed into place when they are durable, so a bad byte in one is always damage.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple
from zlib import crc32

RECORD_BYTES_MAX: Final = 1 << 30
MARK: Final = 0xFFFFFFFF
_MARK_BYTES: Final = MARK.to_bytes(4, "little")

_LOG: Final = b"ONCELOG1"
_IMAGE: Final = b"ONCEIMG1"
_SEAL: Final = b"ONCESEAL"
_U32: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<II")
_HEADER: Final = struct.Struct("<8sQQQI")
_COMMIT: Final = struct.Struct("<QQIII")
_IMAGE_HEADER: Final = struct.Struct("<8sQQI")
_END: Final = struct.Struct("<QI")
_SEALED: Final = struct.Struct("<8sQQQI")

RECORD_HEAD: Final = _RECORD.size
HEADER_BYTES: Final = _HEADER.size + 4
COMMIT_BYTES: Final = 8 + _COMMIT.size
IMAGE_HEADER_BYTES: Final = _IMAGE_HEADER.size + 4
END_BYTES: Final = 8 + _END.size
SEALED_BYTES: Final = _SEALED.size + 4


class Point(NamedTuple):
    """A commit: everything up to it is durable."""

    sequence: int
    chain: int


START: Final = Point(0, 0)


class Header(NamedTuple):
    """Of a segment; `follows` is the last commit before it."""

    number: int
    id: int
    follows: Point


class Commit(NamedTuple):
    """The end of a group."""

    id: int
    sequence: int
    chain_before: int
    chain: int
    group_bytes: int


class Seal(NamedTuple):
    """What a clean stop left behind."""

    segment: int
    length: int
    point: Point


class Bad(NamedTuple):
    """Where reading stopped, and why."""

    position: int
    reason: str
    is_short: bool = False
    """There are too few bytes, not wrong ones."""


def segment_name(number: int) -> str:
    return f"segment-{number:08}.log"


def snapshot_name(number: int) -> str:
    return f"snapshot-{number:08}.img"


def number_of(name: str, kind: str) -> int | None:
    """The number in a segment's or snapshot's name, None when it is no such name."""
    digits = name.removeprefix(f"{kind}-").removesuffix(".log" if kind == "segment" else ".img")
    made = segment_name if kind == "segment" else snapshot_name
    return int(digits) if digits.isdigit() and made(int(digits)) == name else None


# ---- writing


def record_frame(record: bytes) -> bytes:
    return _RECORD.pack(len(record), crc32(record, len(record))) + record


def group_frame(records: Iterable[bytes], id_: int, before: Point) -> tuple[bytes, Point]:
    """A group ready to be written, and the point that it makes."""
    body = b"".join([record_frame(record) for record in records])
    point = Point(before.sequence + 1, crc32(body, before.chain))
    tail = _COMMIT.pack(id_, point.sequence, before.chain, point.chain, len(body))
    return b"".join((body, _MARK_BYTES, _U32.pack(crc32(tail)), tail)), point


def header_frame(header: Header) -> bytes:
    return _checked(_HEADER.pack(_LOG, header.number, header.id, *header.follows))


def image_header_frame(first: int, point: Point) -> bytes:
    return _checked(_IMAGE_HEADER.pack(_IMAGE, first, *point))


def image_end_frame(records: int, chain: int) -> bytes:
    tail = _END.pack(records, chain)
    return _MARK_BYTES + _U32.pack(crc32(tail)) + tail


def seal_frame(seal: Seal) -> bytes:
    return _checked(_SEALED.pack(_SEAL, seal.segment, seal.length, *seal.point))


def _checked(content: bytes) -> bytes:
    return content + _U32.pack(crc32(content))


# ---- reading


def _unchecked(stored: bytes, shape: struct.Struct, magic: bytes) -> tuple[int, ...] | None:
    size = shape.size
    if len(stored) != size + 4 or not stored.startswith(magic) or crc32(stored[:size]) != _U32.unpack(stored[size:])[0]:
        return None
    fields: tuple[int, ...] = shape.unpack(stored[:size])[1:]
    return fields


def read_header(stored: bytes) -> Header | None:
    """None when the bytes are no header."""
    fields = _unchecked(stored[:HEADER_BYTES], _HEADER, _LOG)
    return Header(fields[0], fields[1], Point(fields[2], fields[3])) if fields else None


def read_image_header(stored: bytes) -> tuple[int, Point] | None:
    fields = _unchecked(stored[:IMAGE_HEADER_BYTES], _IMAGE_HEADER, _IMAGE)
    return (fields[0], Point(fields[1], fields[2])) if fields else None


def read_seal(stored: bytes) -> Seal | None:
    fields = _unchecked(stored, _SEALED, _SEAL)
    return Seal(fields[0], fields[1], Point(fields[2], fields[3])) if fields else None


def read_commit(stored: bytes, position: int) -> Commit | None:
    """The commit at a position, None when there is none."""
    end = position + COMMIT_BYTES
    if end > len(stored) or stored[position : position + 4] != _MARK_BYTES:
        return None
    tail = stored[position + 8 : end]
    if crc32(tail) != _U32.unpack_from(stored, position + 4)[0]:
        return None
    return Commit(*_COMMIT.unpack(tail))


def read_image_end(stored: bytes) -> tuple[int, int] | None:
    """Number of records and their checksum, from the last bytes of a snapshot."""
    if len(stored) != END_BYTES or stored[:4] != _MARK_BYTES or crc32(stored[8:]) != _U32.unpack_from(stored, 4)[0]:
        return None
    records, chain = _END.unpack(stored[8:])
    return records, chain


class Group(NamedTuple):
    """A group that was read."""

    records: list[bytes]
    end: int
    point: Point


def read_group(stored: bytes, position: int, id_: int, before: Point) -> Group | Bad:
    """The group at a position, or what is wrong with it."""
    start, records = position, []
    while True:
        record = read_record(stored, position)
        if isinstance(record, Bad):
            return record
        if record is None:
            break
        records.append(record)
        position += RECORD_HEAD + len(record)
    commit = read_commit(stored, position)
    if commit is None:
        return Bad(position, "a commit that is not whole")
    point = Point(before.sequence + 1, crc32(stored[start:position], before.chain))
    if commit != Commit(id_, point.sequence, before.chain, point.chain, position - start):
        return Bad(position, f"a commit that does not follow commit {before.sequence}")
    return Group(records, position + COMMIT_BYTES, point)


def read_record(stored: bytes, position: int) -> bytes | Bad | None:
    """The record at a position; None when a commit or a snapshot's end stands there."""
    if position + RECORD_HEAD > len(stored):
        return Bad(position, "the file ends within a record", is_short=True)
    length, checksum = _RECORD.unpack_from(stored, position)
    if length == MARK:
        return None
    if not 0 < length <= RECORD_BYTES_MAX:
        return Bad(position, f"a record cannot be {length} bytes long")
    end = position + RECORD_HEAD + length
    if end > len(stored):
        return Bad(position, "the file ends within a record", is_short=True)
    record = stored[position + RECORD_HEAD : end]
    if crc32(record, length) != checksum:
        return Bad(position, "a record whose checksum is wrong")
    return record


def find_commit(stored: bytes, position: int, sequence_min: int, id_: int | None = None) -> int:
    """The position of a whole commit with such a sequence or a later one, anywhere behind; -1 when there is none."""
    while (position := stored.find(_MARK_BYTES, position)) >= 0:
        commit = read_commit(stored, position)
        if commit is not None and commit.sequence >= sequence_min and id_ in (None, commit.id):
            return position
        position += 1
    return -1
