"""Where a lake is: a folder, or a prefix in a bucket of an object store (S3 and what speaks like it).

A `Place` is a path below a lake, or the lake itself. Everybody asks it, and nobody else knows which of the two it is:

    what is asked                       a folder                        a bucket
    a file is whole, under its name     written, synced, renamed        one PUT that was answered
    a version is committed once         by a file that must be new      by a PUT that must be new (`If-None-Match`)
    Spark reads files                   by its own reader               by Arrow, in its Python workers (scan.py)
    lock, state, checkpoints            in it                           in a folder beside it, on the driver's disk

A bucket is reached as the environment says: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN (or whatever
else AWS's own tools find: a profile, the role of the machine), AWS_REGION, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP. Each
process reads it for itself, so no key is in a plan, a file or a log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from oncewire._ground.errors import InvalidSetting
from oncewire.pipeline.lake.bucket import ACCESS, Bucket
from oncewire.pipeline.lake.folder import Folder

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyarrow.fs import FileSystem
    from pyarrow.parquet import ParquetFile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class Place(Protocol):
    """A path: below a lake, or the lake itself. As text it is what a user or delta-rs calls it."""

    def __truediv__(self, name: str) -> Place: ...

    def check(self) -> None:
        """Refused, with what to do, if nobody can look there. That nothing is there yet is fine."""

    @property
    def is_there(self) -> bool: ...

    @property
    def has_table(self) -> bool: ...

    @property
    def environ(self) -> dict[str, str]:
        """What executors elsewhere must know to find it. No secrets: their credentials are their own."""

    @property
    def options(self) -> dict[str, str] | None:
        """How delta-rs reaches it. No secrets."""

    def delta(self, version: int | None = None) -> DeltaTable:
        """The table here. TableNotFoundError."""

    def make(self) -> None:
        """See that a table can be made here."""

    def sync_made(self, lake: Place) -> None:
        """A new table's name is durable, up to that of the lake."""

    def sync_log(self, first: int) -> None:
        """The table's versions from this one on are durable."""

    def store(self, content: memoryview | bytes) -> None:
        """The file, whole and durable, under its name."""

    def replace(self, content: bytes) -> None:
        """The file, whole and durable, whatever stood under its name."""

    def read(self) -> bytes:
        """FileNotFoundError."""

    def parquet(self) -> ParquetFile: ...

    def source(self) -> pa.NativeFile: ...

    def sink(self) -> pa.NativeFile: ...

    def gone(self, paths: Sequence[str]) -> list[str]:
        """Which of these files below are not there."""

    def remove(self) -> None:
        """The file, or all that is below, if it is there."""

    def filesystem(self) -> FileSystem:
        """What is below, for Arrow's datasets."""

    def frame(self, spark: SparkSession, schema: StructType, files: Mapping[str, int]) -> DataFrame:
        """The rows of these files of the table here, with how many rows each has."""

    def stamp(self) -> object:
        """Another value when a table of the lake here may have changed."""

    def beside(self, folder: Path | None) -> Path:
        """Where what must be on a disk is: lock, state and checkpoints. `folder` is for what lies beside lakes."""


def place_of(where: str | Path | Place) -> Place:
    """A path, a `file:` URL, or `s3://bucket/prefix`. InvalidSetting for anything else."""
    if isinstance(where, Folder | Bucket):
        return where
    text = str(where)
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Folder(Path(text).expanduser().absolute())
    if scheme == "file":
        return Folder(Path(unquote(urlsplit(text).path)))
    bucket, _, key = rest.partition("/")
    if scheme != "s3":
        raise InvalidSetting(
            f"a lake is a folder or s3://bucket/prefix, and {scheme}://{bucket.rpartition('@')[2]} is neither",
            hint="Use a folder, or an object store that speaks S3 (its address: AWS_ENDPOINT_URL).",
        )
    if "@" in bucket or ":" in bucket:
        raise InvalidSetting(
            f"the address of a lake holds no credentials: s3://{bucket.rpartition('@')[2].partition(':')[0]}",
            hint=f"{ACCESS} The server's address belongs into AWS_ENDPOINT_URL.",
        )
    return Bucket(bucket, key.strip("/"))
