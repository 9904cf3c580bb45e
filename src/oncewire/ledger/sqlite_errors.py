"""sqlite3's errors, translated in this one place."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Final

from oncewire.errors import Corrupt, PermissionDenied, Unavailable

MAY_PASS: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}


def translate(path: str, error: sqlite3.Error) -> Exception:
    """sqlite3's errors in our tree: a busy or full disk may pass, damage may not; other errors are our own bugs."""
    text = f"the ledger {path}: {error}"
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Unavailable(text, hint="Another process holds the file.")
        case code if code in MAY_PASS:
            return Unavailable(text, hint="Free disk space.")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return PermissionDenied(text, hint="The agent must be able to write the file and its folder.")
        case sqlite3.SQLITE_NOTADB:
            return Corrupt(text, hint="It is no SQLite file, or its head is damaged: check --store.")
        case sqlite3.SQLITE_CORRUPT:
            return Corrupt(text, hint="Restore it from a backup: `PRAGMA integrity_check`.")
    return error


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(path, error) from error
