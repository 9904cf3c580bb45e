"""A lake in a folder: on a disk, or on one that all nodes mount. What each method is for: place.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oncewire._ground.errors import Refused
from oncewire._ground.files import make_folder, open_private, owner_only, sync_folder, write_whole

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyarrow.fs import FileSystem
    from pyarrow.parquet import ParquetFile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

LOG: Final = "_delta_log"


class Folder:
    """A path on a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(self._path / name)

    def check(self) -> None:
        try:
            self._path.is_dir()  # that it is not there is fine; that nobody can say is not
        except OSError as error:
            raise Refused(
                f"the lake {str(self._path)[:200]!r} cannot be looked at: {error.strerror}", hint="See --lake."
            ) from None

    @property
    def is_there(self) -> bool:
        return self._path.is_dir()

    @property
    def has_table(self) -> bool:
        return (self._path / LOG).is_dir()

    @property
    def environ(self) -> dict[str, str]:
        return {}

    @property
    def options(self) -> None:
        return None

    def delta(self, version: int | None = None) -> DeltaTable:
        from deltalake import DeltaTable

        return DeltaTable(str(self._path), version=version)

    def make(self) -> None:
        make_folder(self._path)

    def sync_made(self, lake: object) -> None:
        for folder in (self._path, *self._path.parents):
            sync_folder(folder)
            if folder == Path(str(lake)).parent:
                break

    def sync_log(self, first: int) -> None:
        log = self._path / LOG
        number = first
        while (entry := log / f"{number:020d}.json").exists():
            with entry.open("rb") as file:
                os.fsync(file.fileno())
            number += 1
        sync_folder(log)

    def store(self, content: memoryview | bytes) -> None:
        """One that stands there already is left as it is, but whoever wrote it may have died before its name was
        synced."""
        path = self._path
        if not (path.exists() and path.stat().st_size == len(content)):
            make_folder(path.parent)
            begun = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
            with os.fdopen(open_private(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            begun.replace(path)
        sync_folder(path.parent)
        if path.parent.name.startswith("date="):
            sync_folder(path.parent.parent)

    def replace(self, content: bytes) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, content)
        except OSError as error:
            raise Refused(f"{self._path} cannot be written: {error.strerror}") from None

    def read(self) -> bytes:
        return self._path.read_bytes()

    def parquet(self) -> ParquetFile:
        from pyarrow.parquet import ParquetFile

        return ParquetFile(str(self._path))

    def source(self) -> pa.NativeFile:
        import pyarrow as pa

        return pa.memory_map(str(self._path))

    def sink(self) -> pa.NativeFile:
        import pyarrow as pa

        make_folder(self._path.parent)
        with owner_only():
            return pa.OSFile(str(self._path), "wb")

    def gone(self, paths: Sequence[str]) -> list[str]:
        return [one for one in paths if not (self._path / one).exists()]

    def remove(self) -> None:
        if self._path.is_dir():
            shutil.rmtree(self._path, ignore_errors=True)
        else:
            self._path.unlink(missing_ok=True)

    def filesystem(self) -> FileSystem:
        from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

        return SubTreeFileSystem(str(self._path), LocalFileSystem())

    def frame(self, spark: SparkSession, schema: StructType, files: Mapping[str, int]) -> DataFrame:
        paths = [f"{self._path}/{one}" for one in files]
        return spark.read.schema(schema).option("basePath", str(self._path)).parquet(*paths)

    def stamp(self) -> object:
        """A version of a table is a file in its log's folder, which changes that folder's time."""
        logs = sorted([*self._path.glob(f"*/{LOG}"), *self._path.glob(f"*/*/{LOG}")])
        times = [(str(one), one.stat().st_mtime_ns) for one in logs]
        return times, [one.stat().st_mtime_ns for one in sorted(self._path.glob("*.json"))]

    def beside(self, folder: Path | None) -> Path:  # noqa: ARG002 - it needs no other
        return self._path
