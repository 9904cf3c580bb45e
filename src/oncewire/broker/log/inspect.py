"""What a person may ask of a log that nobody has open, or that is in use: what is in it, and whether it is whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from msgspec import Struct

from oncewire._ground.contracts.records import decode_kept, decode_record
from oncewire._ground.errors import Corrupt
from oncewire.broker.log.files import Disk, Files, translated
from oncewire.broker.log.reading import read_log


class SegmentShown(Struct, frozen=True):
    """`unconfirmed_bytes` stand behind the last good commit and are not read."""

    number: int
    bytes: int
    first_commit: int
    commits: int
    records: int
    unconfirmed_bytes: int


class LogShown(Struct, frozen=True):
    """A log, as far as it could be read. `damage` is '' when all of it could."""

    folder: str
    commits: int
    snapshot: str
    snapshot_bytes: int
    segments: list[SegmentShown]
    records: dict[str, int]
    torn_bytes: int
    torn: str
    is_sealed: bool
    damage: str


def inspect(folder: Path) -> LogShown:
    """Read a log without touching it. A broker that writes at the same time may look like a torn tail."""
    disk = Disk(folder, is_locked=False)
    try:
        with translated(str(folder)):
            return inspect_files(disk)
    finally:
        disk.close()


def verify(folder: Path) -> LogShown:
    """The same, and Corrupt when it is damaged. A torn tail is no damage: the next start cuts it."""
    shown = inspect(folder)
    if shown.damage:
        raise Corrupt(shown.damage)
    return shown


def inspect_files(files: Files) -> LogShown:
    """The same of any file system."""
    kinds: Counter[str] = Counter()

    def take_kept(record: bytes) -> None:
        kinds[type(decode_kept(record)).__name__] += 1

    def take_record(record: bytes) -> None:
        kinds[type(decode_record(record)).__name__] += 1

    try:
        found = read_log(files, take_kept, take_record)
    except Corrupt as error:
        return LogShown(files.path, 0, "", 0, [], dict(sorted(kinds.items())), 0, "", False, error.message)
    segments = [
        SegmentShown(
            one.number,
            one.size,
            one.header.follows.sequence + 1 if one.header else 0,
            one.groups,
            one.records,
            one.size - one.end,
        )
        for one in sorted(found.segments)
    ]
    return LogShown(
        files.path,
        found.point.sequence,
        f"snapshot-{found.snapshot:08}.img" if found.snapshot else "",
        found.snapshot_bytes,
        segments,
        dict(sorted(kinds.items())),
        found.torn_bytes,
        found.torn,
        found.is_sealed,
        "",
    )
