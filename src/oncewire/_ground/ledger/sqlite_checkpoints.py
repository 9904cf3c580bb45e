"""Moving what was committed from SQLite's WAL into the file, beside the commits.

SQLite itself does it inside the commit that fills the WAL, which then takes twenty times as long as the others. Here a
thread with a connection of its own copies and syncs while commits go on; the commit after that finishes what came in
between, which is little, and SQLite begins the WAL anew. Nothing depends on it: a pass that fails is made up for by the
next, and a WAL that grows all the same is emptied by SQLite's own rule.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from typing import Final

PASS_BYTES: Final = 24 * 1024 * 1024
"""So much is committed between two passes."""
WAL_BYTES: Final = 64 * 1024 * 1024
"""From here on SQLite does it inside a commit."""
PAGES_MORE: Final = 4
"""So many pages a commit writes besides its block."""
_CHECKPOINT: Final = "PRAGMA wal_checkpoint(PASSIVE)"


class Checkpoints:
    """The passes over one file."""

    def __init__(self, path: str, db: sqlite3.Connection) -> None:
        self._path = path
        self._db = db
        self._bytes = 0
        self._pass: threading.Thread | None = None
        page_bytes: int = db.execute("PRAGMA page_size").fetchone()[0]
        self._more_bytes = PAGES_MORE * page_bytes
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_BYTES // page_bytes}")

    def committed(self, size: int) -> None:
        """A block of so many bytes is in the WAL now; what handlers wrote is not counted."""
        self._bytes += size + self._more_bytes
        if self._pass is not None:
            if not self._pass.is_alive():
                self._pass = None
                self._bytes = 0
                with contextlib.suppress(sqlite3.Error):  # the commit is durable whatever becomes of this
                    self._db.execute(_CHECKPOINT)
        elif self._bytes >= PASS_BYTES:
            self._pass = threading.Thread(target=self._run, name="oncewire-checkpoint", daemon=True)
            self._pass.start()

    def _run(self) -> None:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self._path)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute(_CHECKPOINT)

    def close(self) -> None:
        if self._pass is not None:
            self._pass.join()
