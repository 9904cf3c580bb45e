"""What executors do for silver: read new files of bronze, search the tables for keys, write what is new.

Decoded rows wait on disk until the driver has decided which of them are new; keys, digests and counts are all that it
hears of them. Many rows wait in the file of silver that they become if all of them are new, as most are: then there is
nothing left to do. Few rows wait in Arrow files below the lake, and are put together with others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncewire.pipeline import decode
from oncewire.pipeline.columns import contents, fixed_width
from oncewire.pipeline.decode import Wrong
from oncewire.pipeline.families import KEY_BYTES, Families
from oncewire.pipeline.lake import files, rules
from oncewire.pipeline.lake.place import place_of
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.tables import BRONZE, CONFLICT, QUARANTINE, SILVER

WHOLE_BYTES_MIN: Final = files.FILE_BYTES_MAX // 8
"""From this size on, in memory as in Arrow, rows are written as a file of their table at once."""


@dataclass(frozen=True)
class Staged:
    """Decoded rows of one file of bronze for one table, on disk; in order their keys, and digests if they have some."""

    name: str
    path: str
    rows: int
    size_bytes: int
    keys: bytes = b""
    digests: bytes = b""
    sequences: bytes = b""
    """Eight bytes each."""
    written: Written | None = None
    """The file of the table that they are in, if they wait in one."""

    def sequence(self, at: int) -> int:
        return int.from_bytes(self.sequences[8 * at : 8 * at + 8], "little")


@dataclass(frozen=True)
class FileDecoded:
    """What became of one file of bronze."""

    parts: tuple[Staged, ...]
    refused: dict[str, int]
    runs: tuple[rules.Closed, ...]


@dataclass(frozen=True)
class DecodeFile:
    """Read one file of bronze and stage its parts."""

    bronze: str
    staging: str
    prefix: str
    """Of the names of the files that are written at once."""
    roots: Mapping[str, str]
    """Of the tables that may be written at once: those without partitions."""
    whole_bytes_min: int
    families: Families

    def __call__(self, item: tuple[int, str]) -> FileDecoded:
        at, path = item
        rows = read_file(f"{self.bronze}/{path}", BRONZE)
        found = decode.decode(rows, self.families)
        parts = [self._staged(at, name, part) for name, part in sorted(found.parts.items())]
        if found.quarantine.num_rows:
            parts.append(Staged(QUARANTINE.name, *self._waiting(at, QUARANTINE.name, found.quarantine)))
        return FileDecoded(tuple(parts), found.refused, tuple(files.runs_of(rows["sequence"])))

    def _staged(self, at: int, name: str, part: pa.Table) -> Staged:
        keys, sequences = joined(part["key"]), part["sequence"].to_numpy().tobytes()
        digests = joined(part["digest"]) if "digest" in part.column_names else b""
        if name not in self.roots or part.nbytes < self.whole_bytes_min:
            return Staged(name, *self._waiting(at, name, part), keys, digests, sequences)
        root = self.roots[name]
        written = files.write_file(root, f"{self.prefix}-of-{at:04d}", "", part, has_runs=False)
        return Staged(name, f"{root}/{written.path}", part.num_rows, part.nbytes, keys, digests, sequences, written)

    def _waiting(self, at: int, name: str, part: pa.Table) -> tuple[str, int, int]:
        path = f"{self.staging}/{at}-{name}.arrow"
        with place_of(path).sink() as sink, pa.ipc.new_file(sink, part.schema) as writer:
            writer.write_table(part)
        return path, part.num_rows, part.nbytes


def joined(values: pa.ChunkedArray) -> bytes:
    """The bytes of all values, one behind the other."""
    found = [contents(chunk) for chunk in values.chunks]
    return b"".join(held[ends[0] : ends[-1]].tobytes() for ends, held in found)


def read_staged(path: str, table: Table) -> pa.Table:
    if path.endswith(".parquet"):
        return read_file(path, table)
    with place_of(path).source() as source:
        return pa.ipc.open_file(source).read_all()


def read_file(path: str, table: Table) -> pa.Table:
    """A file of a table. The date of a partitioned table is not in it: it is that of the stream's time."""
    return conform(place_of(path).parquet().read(), table)


def conform(rows: pa.Table, table: Table) -> pa.Table:
    """The table's columns in their order. Those that a frame of a user's own does not have are null."""
    made = []
    for name, kind in table.columns:
        if name in rows.column_names:
            made.append(rows[name].cast(kind))
        elif name == "date":
            made.append(rows["timestamp"].cast(pa.date32()))
        else:
            made.append(pa.nulls(rows.num_rows, kind))
    return pa.Table.from_arrays(made, schema=table.schema)


@dataclass(frozen=True)
class Look:
    """Search files of silver tables for keys: each one that is there, with its digest where the table has one."""

    keys: dict[str, bytes]
    """By table, joined."""

    def __call__(self, item: tuple[str, str, tuple[str, ...]]) -> dict[bytes, bytes]:
        name, root, paths = item
        wanted = fixed_width(np.frombuffer(self.keys[name], np.uint8).reshape(-1, KEY_BYTES))
        has_digest = any(column == "digest" for column, _ in SILVER[name].columns)
        found: dict[bytes, bytes] = {}
        for path in paths:
            file = place_of(f"{root}/{path}").parquet()
            is_there = pc.is_in(file.read(columns=["key"])["key"], value_set=wanted)
            if not pc.any(is_there).as_py():
                continue
            rows = file.read(columns=["key", "digest"] if has_digest else ["key"]).filter(is_there)
            digests = rows["digest"].to_pylist() if has_digest else [b""] * rows.num_rows
            found |= dict(zip(rows["key"].to_pylist(), digests, strict=True))
        return found


@dataclass(frozen=True)
class Conflict:
    """A row of bronze whose identity another message has."""

    bronze: str
    sequence: int
    family: str
    detail: str


@dataclass(frozen=True)
class WriteItem:
    """Files to write: staged parts without the rows that are dropped, and conflicting rows of bronze."""

    name: str
    root: str
    prefix: str
    is_partitioned: bool
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    conflicts: tuple[Conflict, ...] = ()


def write_item(item: WriteItem) -> tuple[list[Written], dict[str, int]]:
    """The files, and how many rows of each family they hold."""
    table = QUARANTINE if item.name == QUARANTINE.name else SILVER[item.name]
    made = [without(read_staged(path, table), dropped) for path, dropped in item.parts]
    by_file: dict[str, list[Conflict]] = {}
    for one in item.conflicts:
        by_file.setdefault(one.bronze, []).append(one)
    made += [conflicting(path, found) for path, found in by_file.items()]
    rows = pa.concat_tables(made)
    rows = rows.sort_by([(name, "ascending") for name in ("stream", "created_ns", "incarnation", "sequence")])
    written = list(files.write_files(item.root, table, item.prefix, rows, is_partitioned=item.is_partitioned))
    if table is not QUARANTINE:
        return written, {item.name: rows.num_rows}
    counts = pc.value_counts(rows["family"]).to_pylist()
    return written, {one["values"] or "": one["counts"] for one in counts}


def without(rows: pa.Table, dropped: Sequence[int]) -> pa.Table:
    if not dropped:
        return rows
    gone = set(dropped)
    return rows.take(pa.array([at for at in range(rows.num_rows) if at not in gone], pa.int64()))


def conflicting(path: str, found: Sequence[Conflict]) -> pa.Table:
    rows = read_file(path, BRONZE)
    place = {sequence: at for at, sequence in enumerate(rows["sequence"].to_pylist())}
    return decode.quarantined(rows, [Wrong(place[one.sequence], one.family, CONFLICT, one.detail) for one in found])


def split(joined: bytes, size: int) -> list[bytes]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]
