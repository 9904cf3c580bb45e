"""A lake in an object store that speaks S3. What each method is for: place.py.

Files are read and written by Arrow, tables by delta-rs. Both find the store, and the keys for it, by the environment.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oncewire._ground.errors import AuthenticationFailed, InvalidSetting, OncewireError, Refused, Unavailable
from oncewire.pipeline.lake.folder import LOG

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyarrow.fs import FileSystem
    from pyarrow.parquet import ParquetFile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

LOOK_AGAIN_S: Final = 30
"""An object store does not say that something changed: whoever watches one looks so often."""
CONNECT_S: Final = 5
REQUEST_S: Final = 60
TRIES_MAX: Final = 3
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_KEY: Final = re.compile(r"[A-Za-z0-9!_.*'()=-]+(/[A-Za-z0-9!_.*'()=-]+)*")
_CODE: Final = re.compile(r"AWS Error (\w+)|<Code>(\w+)</Code>|\b(40[13]|30[17]) (?:Forbidden|Unauthorized|Moved)")
_DENIED: Final = frozenset(
    {"accessdenied", "invalidaccesskeyid", "signaturedoesnotmatch", "expiredtoken", "invalidtoken", "401", "403"}
)
_ELSEWHERE: Final = frozenset({"permanentredirect", "authorizationheadermalformed", "301", "307"})
ACCESS: Final = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN too, if there is one) in the environment, to a "
    "key that may list, read, write and delete there."
)


class Bucket:
    """In an object store. `key` is '' for the whole bucket."""

    def __init__(self, bucket: str, key: str) -> None:
        self._bucket = bucket
        self._key = key

    def __str__(self) -> str:
        return f"s3://{self._path}"

    def __truediv__(self, name: str) -> Bucket:
        return Bucket(self._bucket, f"{self._key}/{name}" if self._key else name)

    @property
    def _path(self) -> str:
        return f"{self._bucket}/{self._key}" if self._key else self._bucket

    def check(self) -> None:
        from pyarrow.fs import FileSelector

        self._check_name()
        with self._asking():
            try:
                self._store.get_file_info(FileSelector(self._path))
            except FileNotFoundError:
                return  # the bucket is there, and may be listed

    @property
    def is_there(self) -> bool:
        from pyarrow.fs import FileType

        with self._asking():
            return bool(self._store.get_file_info(self._path).type != FileType.NotFound)

    @property
    def has_table(self) -> bool:
        return (self / LOG).is_there

    @property
    def environ(self) -> dict[str, str]:
        return {name.upper(): value for name, value in access(os.environ).items()}

    @property
    def options(self) -> dict[str, str]:
        self._check_name()
        return {
            **access(os.environ),
            "connect_timeout": f"{CONNECT_S}s",
            "timeout": f"{REQUEST_S}s",
            "max_retries": str(TRIES_MAX),
            "retry_timeout": f"{REQUEST_S}s",
        }

    def delta(self, version: int | None = None) -> DeltaTable:
        from deltalake import DeltaTable

        with self._asking():
            return DeltaTable(str(self), version=version, storage_options=self.options)

    def make(self) -> None:
        """A store has no folders."""

    def sync_made(self, lake: object) -> None:
        """What was answered is durable."""

    def sync_log(self, first: int) -> None:
        """What was answered is durable."""

    def store(self, content: memoryview | bytes) -> None:
        """One that stands there already is written again, with the same bytes: so it is young, and no housekeeping
        takes it for an orphan before it is committed."""
        with self._asking(), self._store.open_output_stream(self._path) as file:
            file.write(content)

    def replace(self, content: bytes) -> None:
        self.store(content)

    def read(self) -> bytes:
        with self._asking(), self._store.open_input_stream(self._path) as file:
            return bytes(file.read())

    def parquet(self) -> ParquetFile:
        from pyarrow.parquet import ParquetFile

        with self._asking():
            return ParquetFile(self._store.open_input_file(self._path), pre_buffer=True)

    def source(self) -> pa.NativeFile:
        with self._asking():
            return self._store.open_input_file(self._path)

    def sink(self) -> pa.NativeFile:
        with self._asking():
            return self._store.open_output_stream(self._path)

    def gone(self, paths: Sequence[str]) -> list[str]:
        from pyarrow.fs import FileType

        with self._asking():
            found = self._store.get_file_info([str((self / one)._path) for one in paths])
        return [one for one, info in zip(paths, found, strict=True) if info.type == FileType.NotFound]

    def remove(self) -> None:
        from pyarrow.fs import FileType

        with self._asking():
            kind = self._store.get_file_info(self._path).type
            if kind == FileType.Directory:
                self._store.delete_dir(self._path)
            elif kind == FileType.File:
                self._store.delete_file(self._path)

    def filesystem(self) -> FileSystem:
        from pyarrow.fs import SubTreeFileSystem

        return SubTreeFileSystem(self._path, self._store)

    def frame(self, spark: SparkSession, schema: StructType, files: Mapping[str, int]) -> DataFrame:
        from oncewire.pipeline.lake.scan import scan

        return scan(spark, str(self), schema, files)

    def stamp(self) -> object:
        return int(time.monotonic() // LOOK_AGAIN_S)

    def beside(self, folder: Path | None) -> Path:
        if folder is None:
            raise InvalidSetting(
                f"the lake {self} needs a folder beside it, for its checkpoints", hint="See `--checkpoints`."
            )
        endpoint = access(os.environ).get("aws_endpoint_url", "")
        digest = hashlib.blake2b(f"{endpoint} {self}".encode(), digest_size=6).hexdigest()
        return folder.expanduser().absolute() / f"{self._bucket}-{digest}"

    def _check_name(self) -> None:
        """delta-rs reads the name of a table as a URL, Arrow takes it as it is: only what both read alike is let in."""
        if not _BUCKET.fullmatch(self._bucket) or not (self._key == "" or _KEY.fullmatch(self._key)):
            raise InvalidSetting(
                f"{str(self)[:200]!r} is no place for a lake",
                hint="s3://bucket/prefix: a bucket's name, then letters, digits and !-_.*'()= between slashes.",
            )

    @property
    def _store(self) -> FileSystem:
        return _connected(os.getpid(), tuple(sorted(access(os.environ).items())))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise refusal(str(self), str(error)) from None


def access(environ: Mapping[str, str]) -> dict[str, str]:
    """The store's address as the environment has it, in delta-rs's words. No secrets."""
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or ""
    is_plain = environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    if "@" in endpoint:
        raise InvalidSetting("AWS_ENDPOINT_URL holds credentials", hint=ACCESS)
    if endpoint.startswith("http://") and not is_plain:
        raise InvalidSetting(
            f"{endpoint} is not encrypted", hint="Use https://, or say that it may be so: AWS_ALLOW_HTTP=true."
        )
    if environ.get("AWS_S3_ALLOW_UNSAFE_RENAME"):
        raise InvalidSetting(
            "AWS_S3_ALLOW_UNSAFE_RENAME would let two pipelines commit one version of a table, each over the other",
            hint="Unset it.",
        )
    found = {"aws_endpoint_url": endpoint, "aws_region": region, "aws_allow_http": "true" if is_plain else ""}
    return {name: value for name, value in found.items() if value}


@lru_cache(maxsize=4)
def _connected(_process: int, found: tuple[tuple[str, str], ...]) -> FileSystem:
    """One connection for all; a fork has none of its threads. Keys are read anew for each request."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    told = dict(found)
    given: dict[str, Any] = {
        "endpoint_override": told.get("aws_endpoint_url"),
        "region": told.get("aws_region"),
    }
    return S3FileSystem(
        **{name: value for name, value in given.items() if value},
        allow_delayed_open=True,  # a small file is one request
        connect_timeout=CONNECT_S,
        request_timeout=REQUEST_S,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=TRIES_MAX),
    )


def refusal(what: str, text: str) -> OncewireError:
    """What a refusal of the store, or of a disk, means. Both libraries tell it in their own words."""
    codes = {"".join(found).replace("_", "").lower() for found in _CODE.findall(text)}
    if "nosuchbucket" in codes:
        return Refused(f"{what}: there is no such bucket", hint="Make it first: a lake makes tables, no buckets.")
    if codes & _DENIED:
        return AuthenticationFailed(f"{what}: the object store does not let us in ({_last(text)})", hint=ACCESS)
    if codes & _ELSEWHERE:
        return Refused(f"{what}: its bucket is elsewhere ({_last(text)})", hint="Set AWS_REGION to the bucket's own.")
    is_store = "S3" in text or "AWS" in text
    hint = "Is the object store up, and AWS_ENDPOINT_URL its address?" if is_store else ""
    return Unavailable(f"{what} cannot be reached: {_last(text)}", hint=hint)


def _last(text: str) -> str:
    """The innermost cause, in one line."""
    lines = [line.strip(" ↳") for line in re.sub(r"\x1b\[\d+m|<[^>]*>", " ", text).splitlines()]
    return " ".join([line for line in lines if line][-1:])[-200:]
