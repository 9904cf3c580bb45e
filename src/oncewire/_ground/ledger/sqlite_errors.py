"""sqlite3's errors, translated in this one place."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Final

from oncewire._ground.errors import Corrupt, PermissionDenied, TimedOut, Unavailable
from oncewire._ground.ledger.processes import is_alive, told

MAY_PASS: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}


def translate(path: str, error: sqlite3.Error) -> Exception:
    """sqlite3's errors in our tree: a busy or full disk may pass, damage may not; other errors are our own bugs."""
    text = f"the ledger {path}: {error}"
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return TimedOut(f"{text}: {holders(path)}", hint="It is waited for: let it finish, or end it.")
        case code if code in MAY_PASS:
            return Unavailable(text, hint="Free disk space.")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return PermissionDenied(text, hint="The agent must be able to write the file and its folder.")
        case sqlite3.SQLITE_NOTADB:
            return Corrupt(text, hint="It is no SQLite file, or its head is damaged: check --store.")
        case sqlite3.SQLITE_CORRUPT:
            return Corrupt(text, hint="Restore it from a backup: `PRAGMA integrity_check`.")
    return error


def holders(path: str) -> str:
    """Who may hold the file: the agents that run on it, as far as they can be read past its lock."""
    running: list[str] = []
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
    ):
        db.execute("PRAGMA busy_timeout = 100")
        rows = db.execute("SELECT process FROM ledger_processes ORDER BY started_ms").fetchall()
        running = [told(name) for (name,) in rows if is_alive(name) and not name.startswith(f"{os.getpid()}:")]
    return f"another process holds the file; agents on it: {', '.join(running) or 'none that is known'}"


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(path, error) from error
