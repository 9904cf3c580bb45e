"""The driver's side of the lake: tables are made, opened, committed to and followed, through delta-rs.

delta-rs accepts a repeated transaction id from a handle that has seen the first one, and refuses it from a handle that
has not. So whoever commits first reads how far the table is, decides, and commits with that same handle: what another
process committed in between makes the commit fail, and nothing stands twice. A handle is good for one commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSelector

from oncewire._ground.errors import Conflict, Corrupt, InvalidSetting, Refused, Unavailable
from oncewire._ground.files import owner_only
from oncewire.pipeline.lake.bucket import refusal
from oncewire.pipeline.lake.folder import LOG
from oncewire.pipeline.lake.history import FACTS
from oncewire.pipeline.lake.place import Place, place_of
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.tables import files_of

COMMIT_RETRIES_MAX: Final = 20
STAGING: Final = "_staging"
SILVER_APP: Final = "silver"
"""The transaction id of all tables that are derived from bronze; its version is bronze's."""
_CONFIGURATION: Final = {
    "delta.enableExpiredLogCleanup": "false",  # versions go when silver has them: housekeeping sees to it
    "delta.checkpointInterval": "100",
}


_LATE: Final = "Restore the lake from a backup, or read the streams into a new one (`--lake DIR`)."
_MAKING: Final = threading.Lock()
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
    """The tables of one place. `partition_by` counts when a table is made; `checkpoints` is a folder for what belongs
    beside lakes in object stores."""

    def __init__(self, place: str | Path | Place, *, partition_by: str = "", checkpoints: Path | None = None) -> None:
        self.place = place_of(place)
        self.partition_by = partition_by
        self._checkpoints = checkpoints
        self._removing = threading.Lock()
        """Held while files are committed, and while those that no version names are removed."""

    @property
    def beside(self) -> Path:
        """The folder of lock, state and checkpoints: that of the lake, where it is one."""
        return self.place.beside(self._checkpoints)

    @property
    def staging(self) -> Place:
        """What this driver puts down for a while. Another one's batch may be cut otherwise, under the same numbers."""
        return self.place / self._mine

    @property
    def _mine(self) -> str:
        who = f"{socket.gethostname()} {self.beside}".encode()
        return f"{STAGING}/{hashlib.blake2b(who, digest_size=6).hexdigest()}"

    def prove(self) -> None:
        """Refused where two may commit one version: then nothing keeps two pipelines from overwriting each other."""
        table = Table(f"{self._mine}/proof-{os.urandom(4).hex()}", (("nothing", pa.int64()),), (), "nothing")
        try:
            one, other = self.open(table), self.open(table)
            self._write(one, table, [], [Transaction("proof", 1)], {})
            with suppress(Conflict):
                self._write(other, table, [], [Transaction("proof", 1)], {})
                raise Refused(
                    f"{self.place} lets two pipelines commit one version of a table, each over the other",
                    hint="An object store must honour If-None-Match on PUT, a disk must keep a name that is taken.",
                )
        finally:
            (self.place / table.name).remove()

    def root(self, table: Table) -> str:
        return str(self.place / table.name)

    def exists(self, table: Table) -> bool:
        return (self.place / table.name).has_table

    def open(self, table: Table) -> DeltaTable:
        """The newest version of a table, which is made if need be. Refused when it has other columns than ours."""
        with translated(table.name):
            handle = self._find(table)
            if handle is None:
                with _MAKING:
                    handle = self._find(table)
                    handle = self._make(table) if handle is None else handle
        if handle.schema() != Schema.from_arrow(table.schema):
            raise Refused(
                f"the table {table.name} of the lake {self.place} has other columns than this version writes",
                hint="Use the version of oncewire that made it, or read the streams into a new lake (`--lake DIR`).",
            )
        return handle

    def _find(self, table: Table) -> DeltaTable | None:
        try:
            return (self.place / table.name).delta()
        except TableNotFoundError:
            return None

    def _make(self, table: Table) -> DeltaTable:
        by = ["date"] if self.partition_by and table.is_dated else None
        place = self.place / table.name
        place.make()
        with owner_only():
            made = DeltaTable.create(
                str(place),
                schema=Schema.from_arrow(table.schema),
                mode="ignore",
                partition_by=by,
                configuration=_CONFIGURATION,
                storage_options=place.options,
            )
        self._sync_log(table, 0)
        place.sync_made(self.place)
        return made

    def is_partitioned(self, table: Table) -> bool:
        """Whether the table is, or will be when it is made."""
        return is_partitioned(self.open(table)) if self.exists(table) else bool(self.partition_by and table.is_dated)

    def check_partitions(self, table: Table) -> None:
        """A table stays as it was made: the flag cannot change it afterwards."""
        if self.partition_by and self.exists(table) and not is_partitioned(self.open(table)):
            raise InvalidSetting(
                f"the lake {self.place} is not partitioned, and --partition-by cannot change that",
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
            if gone := (self.place / table.name).gone([one.path for one in written]):
                raise Unavailable(f"the file {gone[0]} of the table {table.name} was removed before it was committed")
            self._write(handle, table, adds, [Transaction(app, at) for app, at in moved.items()], facts or {})

    def clear(self, table: Table, retention_hours: int) -> None:
        """Remove the files that no version within the retention names, and log entries that nobody needs."""
        with self._removing, translated(table.name), owner_only():
            handle = (self.place / table.name).delta()
            handle.vacuum(retention_hours, dry_run=False, enforce_retention_duration=False, full=True)
            handle.cleanup_metadata()

    def clear_staging(self, retention_hours: int) -> None:
        """Remove what a driver that never came back had put down."""
        below = self.place.filesystem()
        oldest_ns = time.time_ns() - retention_hours * 3_600_000_000_000
        with translated(STAGING):
            found = below.get_file_info(FileSelector(STAGING, allow_not_found=True, recursive=True))
            for one in found:
                if one.is_file and one.mtime_ns < oldest_ns:
                    below.delete_file(one.path)

    def replace(self, handle: DeltaTable, table: Table, written: Sequence[Written], app: str, version: int) -> None:
        """Put files in the place of all that the table held, and move the transaction id, in one version."""
        now_ms = time.time_ns() // 1_000_000
        adds = [AddAction(one.path, one.size_bytes, {}, now_ms, True, one.stats) for one in written]
        self._write(handle, table, adds, [Transaction(app, version)], {}, mode="overwrite")

    def rewrite(self, handle: DeltaTable, table: Table, old: Sequence[Added], new: Sequence[Written]) -> None:
        """Put files in the place of others that hold the same rows. Conflict: somebody else did so already, and they
        would stand beside those."""
        if gone := {one.path for one in old} - files_of(handle).keys():
            raise _overtaken(table.name, f"the file {min(gone)} is no longer part of it")
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
        with translated(table.name), owner_only():
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
        """A commit is promised once it is durable, names included."""
        (self.place / table.name).sync_log(first)

    def versions(self, table: Table, after: int, last: int) -> Iterator[Version]:
        """What came with each version behind `after`, up to `last`, in order."""
        for number in range(after + 1, last + 1):
            entry = self.place / f"{table.name}/{LOG}/{number:020d}.json"
            try:
                lines = entry.read().decode().splitlines()
            except FileNotFoundError:
                raise Corrupt(
                    f"version {number} of the table {table.name} is no longer in its log: {entry}", hint=_LATE
                ) from None
            yield version_of(number, lines)

    def check_files(self, table: Table, added: Sequence[Added]) -> None:
        """Corrupt when a file that a version brought is gone: housekeeping has put it together with others."""
        if gone := (self.place / table.name).gone([one.path for one in added]):
            raise Corrupt(f"the file {gone[0]} of the table {table.name} is no longer there", hint=_LATE)


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


def _overtaken(name: str, why: str) -> Conflict:
    return Conflict(
        f"another process has written to the table {name} meanwhile: {why}",
        hint="Only one pipeline may run on a lake. `oncewire pipeline status` says which one holds it.",
    )


@contextmanager
def translated(name: str) -> Iterator[None]:
    """delta-rs's errors in our tree, in one place."""
    try:
        yield
    except CommitFailedError as error:
        raise _overtaken(name, str(error)) from None
    except DeltaError as error:
        raise Corrupt(f"the table {name} cannot be used: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise refusal(f"the table {name}", str(error)) from None
