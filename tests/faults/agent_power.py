"""A power cut for a SQLite file: what was written and never synced is gone.

`kill -9` cannot tell a synced file from an unsynced one, since the kernel keeps both. Linux 6.5 can: cachestat(2)
counts the dirty pages of a range. At the moment of death the worker notes the dirty pages of its ledger, and the test
then blanks them, in place (a copy would be another ledger). With `synchronous = FULL` nothing that counts is dirty
after a commit; without it the commits themselves are.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

PAGE_BYTES = 4096
CACHESTAT = 451
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


def dirty_pages(path: Path) -> list[int]:
    """The pages of a file that the disk does not have yet."""
    found: list[int] = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for page in range(-(-path.stat().st_size // PAGE_BYTES)):
            stat = _Stat()
            wanted = _Range(page * PAGE_BYTES, PAGE_BYTES)
            if _libc.syscall(CACHESTAT, descriptor, ctypes.byref(wanted), ctypes.byref(stat), 0):
                raise OSError(ctypes.get_errno(), "cachestat")
            if stat.dirty or stat.writeback:
                found.append(page)
    finally:
        os.close(descriptor)
    return found


def can_tell(folder: Path) -> bool:
    """Whether this kernel and this file system tell what is synced."""
    path = folder / "probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(PAGE_BYTES))
            file.flush()
            is_dirty = bool(dirty_pages(path))
            os.fdatasync(file.fileno())
            return is_dirty and not dirty_pages(path)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def _files(url: str) -> list[Path]:
    path = url.removeprefix("sqlite:///")
    return [Path(path), Path(f"{path}-wal")]


def note_unsynced(url: str, note: Path) -> None:
    """In the dying process: which pages a power cut would take along."""
    pages = {str(path): dirty_pages(path) for path in _files(url) if path.exists()}
    note.write_text(json.dumps(pages))


def cut_power(note: Path) -> int:
    """After its death: blank them; how many there were."""
    pages: dict[str, list[int]] = json.loads(note.read_text())
    for path, numbers in pages.items():
        with Path(path).open("r+b") as file:
            for number in numbers:
                file.seek(number * PAGE_BYTES)
                file.write(bytes(PAGE_BYTES))
    return sum(map(len, pages.values()))
