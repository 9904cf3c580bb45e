"""The driver's side of the lake: tables are made, opened, evolved, committed to and followed, through delta-rs.

delta-rs accepts a repeated transaction id from a handle that has seen the first one, and refuses it from a handle that
has not. So whoever commits first reads how far the table is, decides, and commits with that same handle: what another
process committed in between makes the commit fail, and nothing stands twice. A handle is good for one commit.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from oncewire.errors import Conflict, Corrupt, InvalidSetting, Unavailable
from oncewire.files import sync_folder
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.tables import lake_folder, table_path

COMMIT_RETRIES_MAX: Final = 20
FACTS: Final = "oncewire"
"""Under this name a commit carries facts of our own."""
SILVER_APP: Final = "silver"
"""The transaction id of all tables that are derived from bronze; its version is bronze's."""
_CONFIGURATION: Final = {
    "delta.enableExpiredLogCleanup": "false",  # versions go when silver has them: housekeeping sees to it
    "delta.checkpointInterval": "100",
}


_LATE: Final = "Restore the lake from a backup, or read the streams into a new one (`--lake DIR`)."
_CHANGING: Final = threading.Lock()
"""Each stream has a thread of its own. Two that make a table at once would both do it, and the second one's protocol
would make the first one's commit fail."""


@dataclass(frozen=True)
class Added:
    """A file that a version added."""

    path: str
    rows: int
    size_bytes: int
    stats: dict[str, Any]


@dataclass(frozen=True)
class Version:
    """What a version of a table brought: new rows, never what compaction rewrote."""

    number: int
    added: tuple[Added, ...]
    facts: dict[str, Any]


class Lake:
    """A folder of tables. `partition_by` counts when a table is made."""

    def __init__(self, path: str | Path, *, partition_by: str = "") -> None:
        self.path = lake_folder(path)
        self.partition_by = partition_by
        self._removing = threading.Lock()
        """Held while files are committed, and while those that no version names are removed."""

    def root(self, table: Table) -> str:
        return table_path(self.path, table.name)

    def exists(self, table: Table) -> bool:
        return (Path(self.root(table)) / "_delta_log").is_dir()

    def open(self, table: Table) -> DeltaTable:
        """The newest version of a table, which is made, or given the columns that it lacks, if need be."""
        with translated(table.name):
            found = self._found(table)
            if found is not None and not _missing(found, table):
                return found
            with _CHANGING:
                return self._changed(table)

    def _found(self, table: Table) -> DeltaTable | None:
        try:
            return DeltaTable(self.root(table))
        except TableNotFoundError:
            return None

    def _changed(self, table: Table) -> DeltaTable:
        found = self._found(table)
        if found is None:
            return self._make(table)
        if missing := _missing(found, table):
            wanted = Schema.from_arrow(table.schema)
            first = found.version() + 1
            found.alter.add_columns([field for field in wanted.fields if field.name in missing])
            self._sync_log(table, first)
            found = DeltaTable(self.root(table))
        return found

    def _make(self, table: Table) -> DeltaTable:
        by = ["date"] if self.partition_by and table.is_dated else None
        root = Path(self.root(table))
        root.mkdir(parents=True, exist_ok=True)
        made = DeltaTable.create(
            self.root(table),
            schema=Schema.from_arrow(table.schema),
            mode="ignore",
            partition_by=by,
            configuration=_CONFIGURATION,
        )
        self._sync_log(table, 0)
        for folder in (root, *root.parents):
            sync_folder(folder)
            if folder == self.path.parent:
                break
        return made

    def is_partitioned(self, table: Table) -> bool:
        """Whether the table is, or will be when it is made."""
        return is_partitioned(self.open(table)) if self.exists(table) else bool(self.partition_by and table.is_dated)

    def check_partitions(self, table: Table) -> None:
        """A table stays as it was made: the flag cannot change it afterwards."""
        if self.partition_by and self.exists(table) and not is_partitioned(self.open(table)):
            raise InvalidSetting(
                f"the lake {self.path} is not partitioned, and --partition-by cannot change that",
                hint="Leave the flag out, or begin another lake.",
            )

    def commit(
        self,
        handle: DeltaTable,
        table: Table,
        written: Sequence[Written],
        app: str,
        version: int,
        *,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Add files and move the transaction id, in one version. Conflict: somebody else moved it meanwhile.

        A file may be left from an attempt that died long ago, and housekeeping may remove it just before it is
        committed: Unavailable, nothing is committed, and the next attempt writes it again.
        """
        self.commit_all(handle, table, written, {app: version}, facts=facts)

    def commit_all(
        self,
        handle: DeltaTable,
        table: Table,
        written: Sequence[Written],
        moved: Mapping[str, int],
        *,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """The same for several transaction ids at once."""
        now_ms = time.time_ns() // 1_000_000
        adds = [
            AddAction(one.path, one.size_bytes, {"date": one.date} if one.date else {}, now_ms, True, one.stats)
            for one in written
        ]
        with self._removing:
            if gone := [one.path for one in written if not Path(self.root(table), one.path).exists()]:
                raise Unavailable(f"the file {gone[0]} of the table {table.name} was removed before it was committed")
            self._write(handle, table, adds, [Transaction(app, at) for app, at in moved.items()], facts or {})

    def clear(self, table: Table, retention_hours: int) -> None:
        """Remove the files that no version within the retention names, and log entries that nobody needs."""
        with self._removing, translated(table.name):
            handle = DeltaTable(self.root(table))
            handle.vacuum(retention_hours, dry_run=False, enforce_retention_duration=False, full=True)
            handle.cleanup_metadata()

    def replace(self, handle: DeltaTable, table: Table, written: Sequence[Written], app: str, version: int) -> None:
        """Put files in the place of all that the table held, and move the transaction id, in one version."""
        now_ms = time.time_ns() // 1_000_000
        adds = [AddAction(one.path, one.size_bytes, {}, now_ms, True, one.stats) for one in written]
        self._write(handle, table, adds, [Transaction(app, version)], {}, mode="overwrite")

    def rewrite(self, handle: DeltaTable, table: Table, old: Sequence[Added], new: Sequence[Written]) -> None:
        """Put files in the place of others that hold the same rows."""
        now_ms = time.time_ns() // 1_000_000
        actions: list[Any] = [
            AddAction(one.path, one.size_bytes, {"date": one.date} if one.date else {}, now_ms, False, one.stats)
            for one in new
        ]
        for one in old:
            day = one.path.split("/")[0].removeprefix("date=") if one.path.startswith("date=") else ""
            actions.append(RemoveAction(one.path, False, now_ms, one.size_bytes, {"date": day} if day else {}))
        self._write(handle, table, actions, [], {})

    def _write(
        self,
        handle: DeltaTable,
        table: Table,
        actions: list[Any],
        moved: list[Transaction],
        facts: dict[str, Any],
        mode: Literal["append", "overwrite"] = "append",
    ) -> None:
        properties = CommitProperties(
            custom_metadata={FACTS: json.dumps(facts)}, max_commit_retries=COMMIT_RETRIES_MAX, app_transactions=moved
        )
        before = handle.version()
        with translated(table.name):
            handle.create_write_transaction(
                actions,
                mode,
                handle.schema(),
                partition_by=handle.metadata().partition_columns,
                commit_properties=properties,
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        self._sync_log(table, before + 1)

    def _sync_log(self, table: Table, first: int) -> None:
        """A commit is promised once it is on disk, names included."""
        log = Path(self.root(table)) / "_delta_log"
        number = first
        while (entry := log / f"{number:020d}.json").exists():
            with entry.open("rb") as file:
                os.fsync(file.fileno())
            number += 1
        sync_folder(log)

    def versions(self, table: Table, after: int, last: int) -> Iterator[Version]:
        """What came with each version behind `after`, up to `last`, in order."""
        log = Path(self.root(table)) / "_delta_log"
        for number in range(after + 1, last + 1):
            entry = log / f"{number:020d}.json"
            try:
                lines = entry.read_text("utf-8").splitlines()
            except FileNotFoundError:
                raise Corrupt(
                    f"version {number} of the table {table.name} is no longer in its log: {entry}", hint=_LATE
                ) from None
            yield version_of(number, lines)

    def check_files(self, table: Table, added: Sequence[Added]) -> None:
        """Corrupt when a file that a version brought is gone: housekeeping has put it together with others."""
        root = Path(self.root(table))
        if gone := [one.path for one in added if not (root / one.path).exists()]:
            raise Corrupt(f"the file {gone[0]} of the table {table.name} is no longer there", hint=_LATE)


def _missing(found: DeltaTable, table: Table) -> list[str]:
    known = {field.name for field in found.schema().fields}
    return [name for name, _ in table.columns if name not in known]


def version_of(number: int, lines: Sequence[str]) -> Version:
    """One entry of a Delta log. Adds that change no data are compaction's."""
    added: list[Added] = []
    facts: dict[str, Any] = {}
    for line in lines:
        action = json.loads(line)
        if "add" in action and action["add"]["dataChange"]:
            one = action["add"]
            stats = json.loads(one.get("stats") or "{}")
            added.append(Added(unquote(one["path"]), int(stats["numRecords"]), int(one["size"]), stats))
        elif "commitInfo" in action:
            facts = json.loads(action["commitInfo"].get(FACTS, "{}"))
    return Version(number, tuple(added), facts)


def is_partitioned(handle: DeltaTable) -> bool:
    return bool(handle.metadata().partition_columns)


@contextmanager
def translated(name: str) -> Iterator[None]:
    """delta-rs's errors in our tree, in one place."""
    try:
        yield
    except CommitFailedError as error:
        raise Conflict(
            f"another process has written to the table {name} meanwhile: {error}",
            hint="Only one pipeline may run on a lake. `oncewire pipeline status` says which one holds it.",
        ) from None
    except DeltaError as error:
        raise Corrupt(f"the table {name} cannot be used: {error}") from None
    except OSError as error:
        raise Unavailable(f"the table {name} cannot be reached: {error}") from None
