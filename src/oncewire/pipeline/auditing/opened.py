"""The tables of a lake as an audit finds them: opened once, with what their own logs say.

The verdict is about the tables as they are now, below a cut: what bronze had read when silver took it in last. Silver
is opened before bronze, so on a live system bronze has at least all that silver has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from oncewire._ground.errors import Corrupt, NotFound, Refused
from oncewire.pipeline import tables
from oncewire.pipeline.auditing import known as knowing
from oncewire.pipeline.auditing.rules import Lifetime
from oncewire.pipeline.auditing.verdict import Finding, Known, Log, Outside
from oncewire.pipeline.gold.tables import AUDITS, GOLD
from oncewire.pipeline.lake import history
from oncewire.pipeline.lake.log import SILVER_APP, translated
from oncewire.pipeline.lake.place import Place, place_of
from oncewire.pipeline.tables import BATCHES, BRONZE, GAPS, QUARANTINE, SILVER, TABLES, TOPICS

if TYPE_CHECKING:
    from deltalake import DeltaTable

_REPLACED: Final = frozenset(GOLD) - {AUDITS.name}
_ORDER: Final = (BATCHES, *GOLD.values(), *SILVER.values(), QUARANTINE, GAPS, TOPICS, BRONZE)


@dataclass(frozen=True)
class Opened:
    """Every table that is there, by its name. `taken` is the version of bronze that is whole in silver, None before
    silver's first batch."""

    place: Place
    handles: Mapping[str, DeltaTable]
    taken: int | None
    cut: Mapping[Lifetime, int]
    newest: Mapping[Lifetime, int]
    """Up to which sequence bronze has each lifetime now."""
    broken: Mapping[str, str]
    """Tables whose logs cannot be read, and why."""

    def cut_at(self, version: int) -> Mapping[Lifetime, int] | None:
        """How far bronze was at a version; None where its log no longer says."""
        if version >= self.handles[BRONZE.name].version():
            return self.newest
        return self.cut if version == self.taken else _high_water(self.place, version)

    @property
    def versions(self) -> dict[str, int]:
        return {name: handle.version() for name, handle in sorted(self.handles.items())}

    @property
    def logs(self) -> dict[str, Log]:
        return {name: log_of(name, handle) for name, handle in sorted(self.handles.items())}


def log_of(name: str, table: DeltaTable) -> Log:
    return Log(name, str(table.metadata().id), table.version(), history.entry_hash(table, table.version()))


def open_lake(lake: str | Path | Place) -> Opened:
    """NotFound where nothing was ever read, Corrupt where nobody can say what bronze holds."""
    assert {table.name for table in _ORDER} == TABLES.keys()
    handles: dict[str, DeltaTable] = {}
    broken: dict[str, str] = {}
    for table in _ORDER:
        try:
            with translated(table.name):
                handles[table.name] = tables.open_table(lake, table.name)
        except (NotFound, Corrupt) as error:
            if table is BRONZE:
                raise
            broken |= {table.name: error.message} if isinstance(error, Corrupt) else {}
    taken = handles[BATCHES.name].transaction_version(SILVER_APP) if BATCHES.name in handles else None
    newest = tables.high_water(handles[BRONZE.name])
    is_behind = taken is not None and taken < handles[BRONZE.name].version()
    cut = _high_water(place_of(lake), taken) if is_behind and taken is not None else None
    return Opened(place_of(lake), handles, taken, newest if cut is None else cut, newest, broken)


def _high_water(place: Place, version: int) -> Mapping[Lifetime, int] | None:
    """How far bronze was at a version; None where its log no longer says."""
    try:
        with translated(BRONZE.name):
            return tables.high_water(tables.open_table(place, BRONZE.name, version))
    except Corrupt:
        return None


# ---- what the logs say


@dataclass(frozen=True)
class Told:
    """What the logs of the tables say, beside what they hold."""

    findings: list[Finding]
    notes: list[Finding]
    logs: list[Log]
    outside: list[Outside]
    """All changes that others made, as far as any audit has seen them."""


def look_back(opened: Opened, earlier: Sequence[Known], accepted: Collection[str] = ()) -> Told:
    """Compare the tables' logs with what earlier audits saw, and walk what came since. `accepted` names changes that a
    person has looked at, as `table@version`."""
    logs = opened.logs
    changes = {_named(change): change for change in knowing.carried(earlier)}
    notes: list[Finding] = []
    for name, handle in sorted(opened.handles.items()):
        walk = history.walk(handle, _walked(logs[name], earlier), is_replaced=name in _REPLACED)
        for change in walk.changes:
            outside = _outside(opened.place, name, change)
            changes.setdefault(_named(outside), outside)
        if walk.unseen and earlier:
            detail = f"its log no longer has {walk.unseen} versions that came since the last audit"
            notes.append(Finding("tables", "unseen", table=name, detail=detail, count=walk.unseen))
    if unknown := set(accepted) - {f"{change.table}@{change.version}" for change in changes.values()}:
        raise Refused(f"no version that is not the pipeline's is {min(unknown)}", hint="The findings name them.")
    told = [_accept(change, accepted) for _, change in sorted(changes.items())]
    findings = [Finding("tables", "unreadable", table=name, detail=why) for name, why in opened.broken.items()]
    for known in earlier:
        rolled_back = knowing.rolled_back(known, logs, _entries(opened, known))
        findings += [one for one in rolled_back if one.table not in opened.broken]
        findings += knowing.behind(known, opened.cut)
    findings += knowing.changed_outside(change for change in told if not change.is_accepted)
    notes += knowing.changed_outside(change for change in told if change.is_accepted)
    return Told([*_unique(findings), *_behind_silver(opened)], notes, [*logs.values()], told)


def _entries(opened: Opened, known: Known) -> dict[tuple[str, int], str]:
    there = [log for log in known.logs if log.table in opened.handles]
    return {(log.table, log.version): history.entry_hash(opened.handles[log.table], log.version) for log in there}


def _named(change: Outside) -> tuple[str, int, int]:
    return change.table, change.version, change.at_ms


def _walked(log: Log, earlier: Sequence[Known]) -> int:
    """Up to which version every record of an earlier audit has walked the table; -1 for one that is new to them."""
    versions = [one.version for known in earlier for one in known.logs if (one.table, one.id) == (log.table, log.id)]
    return min(versions) if versions and len(versions) == len(earlier) else -1


def _outside(place: Place, name: str, change: history.Change) -> Outside:
    removed: int | None = 0
    if change.removed:
        try:
            with translated(name):
                rows = tables.files_of((place / name).delta(change.version - 1))
            removed = sum(rows[path] for path in change.removed)
        except (Corrupt, KeyError):
            removed = None
    added = sum(rows for _, rows in change.added)
    return Outside(name, change.version, change.at_ms, change.operation, removed, added)


def _accept(change: Outside, accepted: Collection[str]) -> Outside:
    if f"{change.table}@{change.version}" not in accepted:
        return change
    return msgspec.structs.replace(change, is_accepted=True)


def _unique(findings: Iterable[Finding]) -> list[Finding]:
    """Two records of the same audit know the same."""
    return list(dict.fromkeys(findings))


def _behind_silver(opened: Opened) -> Iterable[Finding]:
    """Silver cannot have taken in what bronze never had."""
    version = opened.handles[BRONZE.name].version()
    if opened.taken is not None and opened.taken > version:
        detail = f"silver has processed version {opened.taken}, and its log ends at version {version}"
        yield Finding("tables", "older", table=BRONZE.name, detail=detail)
