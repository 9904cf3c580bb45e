"""Whether the files that the tables name are there, whole and unchanged, before anything is read from them.

The log says how large each file is, and its name says what its bytes hash to (lake/files.py). A file that somebody else
wrote has no hash in its name; its version is named by the walk over the log.

    missing       it is not there
    other_size    it is shorter or longer than the log says
    other_bytes   its bytes are not those that it was written with
    unreadable    besides, nothing can be read from it

What cannot be read is left out of the checks that follow, and its rows are named here by stream and sequences.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from oncewire._ground.errors import Unavailable
from oncewire.pipeline.auditing.rules import Lifetime
from oncewire.pipeline.auditing.verdict import Count, Finding
from oncewire.pipeline.lake.files import DIGEST_BYTES
from oncewire.pipeline.lake.place import Place, place_of
from oncewire.pipeline.lake.tasks import run_tasks

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

FILES_PER_TASK: Final = 64
BYTES_PER_TASK: Final = 64 << 20
_NAMED: Final = re.compile(rf"-([0-9a-f]{{{2 * DIGEST_BYTES}}})\.parquet")


class File(NamedTuple):
    """A file that a table names, with what the log says about it."""

    table: str
    path: str
    size_bytes: int
    rows: int
    first: tuple[Any, ...]
    """Stream, creation time, incarnation and sequence, as far as the log has them: the least of each."""
    last: tuple[Any, ...]

    @property
    def lifetime(self) -> Lifetime | None:
        """Of all its rows, where they have one."""
        return self.first[:3] if None not in self.first and self.first[:3] == self.last[:3] else None


class Found(NamedTuple):
    """What is wrong with a file."""

    problem: str
    detail: str
    is_readable: bool


_PLACE: Final = ("stream", "created_ns", "incarnation", "sequence")


def files_of(name: str, table: DeltaTable) -> list[File]:
    added = pa.table(table.get_add_actions(flatten=True))
    if not added.num_rows:
        return []
    columns = {column: added[column].to_pylist() for column in added.column_names}
    nothing = [None] * added.num_rows
    least, most = (
        list(zip(*(columns.get(f"{side}.{column}", nothing) for column in _PLACE), strict=True))
        for side in ("min", "max")
    )
    paths = map(unquote, columns["path"])
    told = zip(paths, columns["size_bytes"], columns["num_records"], least, most, strict=True)
    return [File(name, path, size, rows or 0, first, last) for path, size, rows, first, last in told]


@dataclass(frozen=True)
class Intact:
    """What became of the check."""

    findings: list[Finding]
    counts: list[Count]
    unread: dict[str, list[File]]
    """By table, the files that nothing can be read from."""

    def lost(self, name: str) -> list[tuple[Lifetime, int, int]]:
        """The ranges of sequences that stood in unread files of a table whose files are of one lifetime each."""
        found = [(file.lifetime, file.first[3], file.last[3]) for file in self.unread.get(name, ())]
        return [(lifetime, first, last) for lifetime, first, last in found if lifetime is not None]


def check_files(spark: SparkSession, place: Place, tables: Mapping[str, DeltaTable]) -> Intact:
    """Every file of every table, read by the executors."""
    named = [file for name, table in sorted(tables.items()) for file in files_of(name, table)]
    parts = list(in_parts(named))
    answers = run_tasks(spark, Look(str(place)), parts)
    findings: list[Finding] = []
    unread: dict[str, list[File]] = {}
    for file, found in ((file, one) for part, told in zip(parts, answers, strict=True)
                        for file, one in zip(part, told, strict=True) if one is not None):  # fmt: skip
        findings.append(_finding(file, found))
        if not found.is_readable:
            unread.setdefault(file.table, []).append(file)
    return Intact(findings, [Count("files", "intact", "", len(named) - len(findings))], unread)


def in_parts(named: Iterable[File]) -> Iterable[tuple[File, ...]]:
    """Files in groups for one task each."""
    part: list[File] = []
    for file in named:
        if part and (len(part) == FILES_PER_TASK or sum(one.size_bytes for one in part) >= BYTES_PER_TASK):
            yield tuple(part)
            part = []
        part.append(file)
    if part:
        yield tuple(part)


def _finding(file: File, found: Found) -> Finding:
    stream, first, last = "", 0, 0
    if file.lifetime is not None:
        stream, first, last = file.lifetime[0], file.first[3], file.last[3]
    rows = f" with {file.rows:,} rows" if file.rows else ""
    if not stream and file.first[0] is not None:
        rows += f" of {file.first[0]} to {file.last[0]}"
    detail = f"{file.path}{rows} {found.detail}"
    return Finding("files", found.problem, stream, first, last, detail=detail, count=file.rows, table=file.table)


@dataclass(frozen=True)
class Look:
    """On an executor: read files and say what is wrong with each."""

    lake: str

    def __call__(self, files: Sequence[File]) -> list[Found | None]:
        return [self._look(file) for file in files]

    def _look(self, file: File) -> Found | None:
        place = place_of(self.lake) / file.table / file.path
        try:
            content = place.read()
        except FileNotFoundError:
            return Found("missing", "is not there", is_readable=False)
        except (OSError, Unavailable) as error:
            return Found("unreadable", f"cannot be read: {error}", is_readable=False)
        digest = _NAMED.search(file.path)
        if len(content) != file.size_bytes:
            found = Found("other_size", f"has {len(content):,} bytes, and the log says {file.size_bytes:,}", True)
        elif digest is not None and hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest() != digest[1]:
            found = Found("other_bytes", "is not the file that was written under its name", True)
        else:
            return None
        return found if is_parquet(content) else Found("unreadable", f"{found.detail}, and cannot be read", False)


def is_parquet(content: bytes) -> bool:
    """Whether every row can be read."""
    from pyarrow import parquet

    try:
        parquet.ParquetFile(pa.BufferReader(content)).read()
    except (pa.ArrowException, OSError, ValueError):
        return False
    return True
