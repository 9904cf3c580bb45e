"""The few things that the log asks of a file system, and the real one.

Everything that is not synced may be lost, torn or reordered by a power cut: a file's bytes until `sync`, its name until
`sync_names`. The tests put a file system below that does so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final, Protocol

from oncewire._ground.errors import Conflict, InvalidSetting, OncewireError, PermissionDenied, Unavailable
from oncewire._ground.files import make_folder, open_private

_LOCK: Final = "lock"


class File(Protocol):
    """A file that is being written, from its start on. All raise OSError."""

    def write(self, content: bytes) -> int:
        """Append some of it; returns how much."""

    def sync(self) -> None:
        """The bytes are durable when this returns."""

    def close(self) -> None: ...


class Files(Protocol):
    """A folder. All raise OSError."""

    path: str

    def names(self) -> list[str]: ...
    def size(self, name: str) -> int: ...
    def read(self, name: str, start: int, count: int) -> bytes:
        """Fewer bytes at the end of the file."""

    def create(self, name: str) -> File:
        """A new, empty file; one that is there is an error."""

    def rename(self, old: str, new: str) -> None:
        """Replaces what is there."""

    def remove(self, name: str) -> None: ...
    def sync_names(self) -> None:
        """Names that were made, renamed or removed are durable when this returns."""


class DiskFile:
    """A file on a disk."""

    def __init__(self, path: Path) -> None:
        self._fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)

    def write(self, content: bytes) -> int:
        return os.write(self._fd, content)

    def sync(self) -> None:
        _sync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


_sync = getattr(os, "fdatasync", os.fsync)  # macOS has only the second


class Disk:
    """A folder on a disk, held by this process until `close`."""

    def __init__(self, folder: Path, *, is_locked: bool = True) -> None:
        self.path = str(folder)
        self._folder = folder
        self._lock_fd = -1
        with translated(self.path):
            if is_locked:
                make_folder(folder)
                self._lock()
            self._names_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _lock(self) -> None:
        self._lock_fd = open_private(self._folder / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock_fd)
            raise Conflict(
                f"the log in {self.path} is in use by process {holder}",
                hint="One broker per log: stop that one, or choose another folder with --wal.",
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)

    def close(self) -> None:
        os.close(self._names_fd)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def names(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if name != _LOCK]  # noqa: PTH208  strings, not paths

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def read(self, name: str, start: int, count: int) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(count)

    def create(self, name: str) -> File:
        return DiskFile(self._folder / name)

    def rename(self, old: str, new: str) -> None:
        (self._folder / old).replace(self._folder / new)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()

    def sync_names(self) -> None:
        os.fsync(self._names_fd)


class translated(contextlib.AbstractContextManager[None]):  # noqa: N801  reads as a word
    """The system's errors, in our tree: nothing was written."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise not_written(self._path, error) from error


def not_written(path: str, error: OSError) -> OncewireError:
    """Why the log cannot be used, for one who may try again."""
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(
            f"the disk of the log in {path} is full: nothing was written",
            hint="Free some room; the broker goes on by itself.",
            retry_after_s=1.0,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(f"the log in {path} cannot be used: {what}", hint="Choose a folder of your own.")
    if error.errno in (errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG):
        return InvalidSetting(f"the log in {path} cannot be used: {what}", hint="Give a folder with --wal.")
    return Unavailable(f"the log in {path} cannot be written: {what}: nothing was written", retry_after_s=1.0)
