"""Files on the disk: replaced atomically and synced, and for their owner alone.

Everything durable holds messages of tenants, or keys. So its files have mode 0600 and its folders 0700, whatever the
umask of the process is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700
OTHERS = 0o077
"""What others may not: a umask."""


def make_folder(path: Path) -> None:
    """A folder with all that is missing above it; what exists is left as it is."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(FOLDER_MODE, exist_ok=True)  # raises if it is not a folder


def open_private(path: Path, flags: int) -> int:
    """A descriptor; a file that this makes is its owner's alone."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def close_off(path: Path) -> None:
    """Take a file that exists away from others. One of another owner, or none, is left as it is."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = path.stat().st_mode & 0o777
        if mode & OTHERS:
            path.chmod(mode & ~OTHERS)


_lock = threading.Lock()
_inside = 0
_umask = 0


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """For what libraries create: files and folders are made for their owner alone. The umask belongs to the whole
    process, so keep the block short; blocks of several threads may overlap."""
    global _inside, _umask
    with _lock:
        if not _inside:
            _umask = os.umask(OTHERS)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                os.umask(_umask)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a start after a power cut, sees the old or the new, never a part."""
    partial = path.with_name(f"{path.name}.part")
    partial.unlink(missing_ok=True)
    file = open_private(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
