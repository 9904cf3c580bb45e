"""What the log of a table says about the table itself: the transaction ids that it knows, and what each version did.

delta-rs answers for an id that it is given, and lists none. So the log is read here as Delta's protocol describes it: a
JSON entry per version, and now and then a checkpoint, a Parquet file that stands for all entries up to its version.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from oncewire._ground.errors import Corrupt
from oncewire.pipeline.lake.folder import LOG
from oncewire.pipeline.lake.place import Place, place_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

FACTS: Final = "oncewire"
"""Under this name a commit of ours carries facts. One without it is somebody else's."""
LAST_CHECKPOINT: Final = "_last_checkpoint"
READS_AT_ONCE: Final = 8
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint.*\.parquet")


def transactions(table: DeltaTable) -> dict[str, int]:
    """Every transaction id of an opened table, with its version."""
    log = place_of(table.table_uri) / LOG
    checkpoint, found = _checkpointed(log, table.version())
    for number in range(checkpoint + 1, table.version() + 1):
        for action in actions(log, number):
            if "txn" in action:
                found[action["txn"]["appId"]] = action["txn"]["version"]
    return found


def actions(log: Place, number: int) -> Iterator[dict[str, Any]]:
    """What one version did. Corrupt when its entry is missing."""
    entry = log / f"{number:020d}.json"
    try:
        lines = entry.read().splitlines()
    except FileNotFoundError:
        raise Corrupt(
            f"version {number} is missing from the log of a table: {entry}",
            hint="Restore the lake from a backup, or read the streams into a new one (`--lake DIR`).",
        ) from None
    for line in lines:
        yield json.loads(line)


def _checkpointed(log: Place, version: int) -> tuple[int, dict[str, int]]:
    """The newest checkpoint up to this version with its transaction ids; -1 and none without one."""
    parts = _parts(log, version)
    found: dict[str, int] = {}
    for name in parts:
        with (log / name).parquet() as file:
            rows = file.read(columns=["txn"])["txn"].to_pylist() if "txn" in file.schema_arrow.names else []
        found |= {row["appId"]: row["version"] for row in rows if row is not None and row["appId"] is not None}
    return (int(parts[0][:20]) if parts else -1), found


def _parts(log: Place, version: int) -> list[str]:
    """The files of that checkpoint. The log names its newest one, so that nobody need list thousands of entries."""
    try:
        newest = json.loads((log / LAST_CHECKPOINT).read())
    except FileNotFoundError:
        newest = {}
    name = f"{newest.get('version', -1):020d}.checkpoint.parquet"
    if 0 <= newest.get("version", -1) <= version and not newest.get("parts") and not log.gone([name]):
        return [name]
    found = [match for one in names(log) if (match := _CHECKPOINT.fullmatch(one)) and int(match[1]) <= version]
    last = max((match[1] for match in found), default="")
    return sorted(match[0] for match in found if match[1] == last)


def names(log: Place) -> list[str]:
    """The files of a log."""
    from pyarrow.fs import FileSelector

    return [info.base_name for info in log.filesystem().get_file_info(FileSelector("", allow_not_found=True))]


def entry_hash(table: DeltaTable, version: int) -> str:
    """Stands for the whole entry of a version; empty where the log no longer has it."""
    try:
        return hashlib.sha256((place_of(table.table_uri) / LOG / f"{version:020d}.json").read()).hexdigest()
    except FileNotFoundError:
        return ""


class Change(NamedTuple):
    """What a version did that none of our commits does."""

    version: int
    at_ms: int
    operation: str
    removed: tuple[str, ...]
    """Files, by their paths."""
    added: tuple[tuple[str, int], ...]
    """Files with their rows."""


class Walk(NamedTuple):
    """What the log says of the versions behind one of them."""

    changes: tuple[Change, ...]
    unseen: int
    """Versions whose entries are gone."""


def walk(table: DeltaTable, after: int, *, is_replaced: bool) -> Walk:
    """Everything that somebody else than the pipeline changed since a version. `is_replaced`: the pipeline itself
    replaces what the table holds, as with gold; from other tables it removes nothing."""
    log = place_of(table.table_uri) / LOG
    last = table.version()
    there = {int(name[:20]) for name in names(log) if _ENTRY.fullmatch(name)}
    numbers = [number for number in range(after + 1, last + 1) if number in there]
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        found = pool.map(lambda number: _change(log, number, is_replaced=is_replaced), numbers)
        return Walk(tuple(one for one in found if one is not None), max(0, last - after) - len(numbers))


_ENTRY: Final = re.compile(r"\d{20}\.json")


def _change(log: Place, number: int, *, is_replaced: bool) -> Change | None:
    try:
        return change_of(number, actions(log, number), is_replaced=is_replaced)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Change(number, 0, "an entry that cannot be read", (), ())


def change_of(number: int, found: Iterable[dict[str, Any]], *, is_replaced: bool) -> Change | None:
    """None for a commit of ours, and for one that touches no file."""
    told: dict[str, Any] = {}
    added: list[dict[str, Any]] = []
    removed: list[dict[str, Any]] = []
    for action in found:
        told = action.get("commitInfo", told)
        added += [action["add"]] if "add" in action else []
        removed += [action["remove"]] if "remove" in action else []
    is_removal = any(one.get("dataChange", True) for one in removed) and not is_replaced
    if told and (not (added or removed) or (FACTS in told and not is_removal)):
        return None
    return Change(
        number,
        int(told.get("timestamp") or 0),
        str(told.get("operation") or "an entry that does not say what it is"),
        tuple(unquote(one["path"]) for one in removed),
        tuple((unquote(one["path"]), _rows(one)) for one in added),
    )


def _rows(add: dict[str, Any]) -> int:
    return int(json.loads(add.get("stats") or "{}").get("numRecords") or 0)
