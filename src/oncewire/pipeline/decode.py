"""From bronze's rows to silver's: every message read by the contract of its subject, or refused with a reason.

What breaks its contract is refused alone; nothing that a message holds can stop the rest.

    reason              it is
    contract            a field is missing, wrong or too large, or the body is no JSON
    version             a schema version that this process does not know
    subject             no contract names the subject
    identity_conflict   another message has this identity on this subject (found against the table, not here)
    unreadable          something that the tables cannot hold, such as a number beyond 64 bits
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import headers, ids, letters
from oncewire._ground.errors import Refused, UnsupportedVersion
from oncewire.pipeline import envelopes
from oncewire.pipeline.envelopes import RUNTIME
from oncewire.pipeline.families import (
    READERS,
    REPLAY_PREFIX,
    Families,
    Place,
    key_begun,
    key_of,
    shown,
    silver_name,
)
from oncewire.pipeline.lake.table import TIMESTAMP, Table
from oncewire.pipeline.landing import header_values
from oncewire.pipeline.tables import COMMON, QUARANTINE, SILVER

DETAIL_CHARS_MAX: Final = 500
TOGETHER: Final = 1_024
"""So many rows are read in one go. More would not stay in the processor's cache, and a single odd envelope makes the
others of its go dearer."""


@dataclass(frozen=True)
class Parted:
    """The rows of one silver table among some of bronze: where each stood there, and what it says."""

    at: Sequence[int]
    keys: Sequence[bytes]
    read: Sequence[Any]
    """`Input` of a runtime envelope, `Read` of all else."""
    replays: dict[int, dict[str, str]] = field(default_factory=dict)
    """What the replays among runtime envelopes carried, by where they stood."""

    def halves(self) -> tuple[Parted, Parted]:
        half = len(self.at) // 2
        return (
            Parted(self.at[:half], self.keys[:half], self.read[:half], self.replays),
            Parted(self.at[half:], self.keys[half:], self.read[half:], self.replays),
        )


@dataclass
class Wrong:
    """A row that is refused: where it stood in bronze, and why."""

    at: int
    family: str
    reason: str
    detail: str

    @classmethod
    def from_error(cls, at: int, family: str, error: Exception) -> Wrong:
        """A message may break a reader in ways nobody thought of; the others must go on."""
        if isinstance(error, Refused):
            return cls(at, family, "version" if isinstance(error, UnsupportedVersion) else "contract", str(error))
        return cls(at, family, "unreadable", f"{type(error).__name__}: {error}")


class Decoded(NamedTuple):
    """A batch of bronze in its parts. Every row is in one of them."""

    parts: dict[str, pa.Table]
    quarantine: pa.Table
    refused: dict[str, int]
    """Rows in `quarantine` by family, '' for subjects without one."""
    at: dict[str, list[int]]
    """By part where its rows stood in the batch; those of quarantine too."""


def decode(rows: pa.Table, families: Families = ()) -> Decoded:
    """Read every row of bronze by the contract of its subject."""
    home = lru_cache(maxsize=4096)(lambda subject: silver_name(subject, families))
    parts: dict[str, list[pa.Table]] = {}
    at: dict[str, list[int]] = {}
    wrong: list[Wrong] = []
    places = Places(rows)
    with uncollected():
        for first in range(0, rows.num_rows, TOGETHER):
            some = Some(rows.slice(first, TOGETHER), first, places, home)
            for name, table, stood in some.tables():
                parts.setdefault(name, []).append(table)
                at.setdefault(name, []).extend(stood)
            wrong += sorted(some.wrong, key=lambda one: one.at)
    refused = dict(Counter(one.family for one in wrong))
    at[QUARANTINE.name] = [one.at for one in wrong]
    whole = {name: pa.concat_tables(made) for name, made in parts.items()}
    return Decoded(whole, quarantined(rows, wrong), refused, at)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looking for cycles: what messages are read into has none, and there is much of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Some:
    """Some rows of bronze, read in one go."""

    def __init__(self, rows: pa.Table, first: int, places: Places, home: Callable[[str], str]) -> None:
        self._bodies: list[bytes] = rows["payload"].to_pylist()
        self._subjects: list[str] = rows["subject"].to_pylist()
        self._homes = {subject: home(subject) for subject in set(self._subjects)}
        self._first = first
        self._places = places
        self.wrong: list[Wrong] = []

    def tables(self) -> Iterator[tuple[str, pa.Table, Sequence[int]]]:
        """The rows of each silver table in the order of bronze, and where they stood there. All that is not there is
        `wrong` afterwards."""
        homes = set(self._homes.values())
        if homes == {RUNTIME}:
            every = range(self._first, self._first + len(self._bodies))
            yield from self._tables(RUNTIME, self._read_runtime(every, self._subjects, self._bodies))
            return
        if RUNTIME in homes:
            mine = [nth for nth, subject in enumerate(self._subjects) if self._homes[subject] == RUNTIME]
            subjects, bodies = [self._subjects[nth] for nth in mine], [self._bodies[nth] for nth in mine]
            at = [self._first + nth for nth in mine]
            yield from self._tables(RUNTIME, self._read_runtime(at, subjects, bodies))
        for name, part in self._read_others().items():
            yield from self._tables(name, part)

    def _read_runtime(self, places: Sequence[int], subjects: list[str], bodies: list[bytes]) -> Parted:
        found = envelopes.read_together(bodies, subjects)
        keys = envelopes.keys_of(found, subjects)
        is_replay = self._places.is_replay
        if all(found) and not any(is_replay[places[0] : places[-1] + 1]):
            return Parted(places, keys, found)
        replays: dict[int, dict[str, str]] = {}
        odd = [nth for nth, (at, one) in enumerate(zip(places, found, strict=True)) if one is None or is_replay[at]]
        for nth in odd:
            at = places[nth]
            try:
                found[nth], keys[nth], replays[at] = envelopes.read_odd(bodies[nth], self._places[at], found[nth])
            except Exception as error:
                self.wrong.append(Wrong.from_error(at, RUNTIME, error))
                found[nth] = None
        good = [nth for nth, one in enumerate(found) if one is not None]
        return Parted([places[nth] for nth in good], [keys[nth] for nth in good], [found[nth] for nth in good], replays)

    def _read_others(self) -> dict[str, Parted]:
        parted: dict[str, tuple[list[int], list[bytes], list[Any]]] = {}
        for at, (subject, body) in enumerate(zip(self._subjects, self._bodies, strict=True), self._first):
            name = self._homes[subject]
            if name == RUNTIME:
                continue
            if not name:
                self.wrong.append(Wrong(at, "", "subject", f"no contract names the subject {subject[:200]}"))
                continue
            try:
                read = READERS[name](body, self._places[at])
                begun = key_begun(name, read.tenant, read.scope, subject)
                key = key_of(begun, read.identity, read.digest if read.replaces else b"")
            except Exception as error:
                self.wrong.append(Wrong.from_error(at, name, error))
            else:
                at_, keys, read_ = parted.setdefault(name, ([], [], []))
                at_.append(at)
                keys.append(key)
                read_.append(read)
        return {name: Parted(*columns) for name, columns in parted.items()}

    def _tables(self, name: str, part: Parted) -> Iterator[tuple[str, pa.Table, Sequence[int]]]:
        """The part as a table. What Arrow refuses is halved until the rows that it refuses stand alone."""
        if not part.at:
            return
        try:
            yield name, _table(self._places, SILVER[name], part), part.at
        except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError) as error:
            if len(part.at) == 1:
                self.wrong.append(Wrong(part.at[0], name, "unreadable", f"{type(error).__name__}: {error}"))
                return
            for half in part.halves():
                yield from self._tables(name, half)


class Places:
    """Where the rows of a batch stand, made for those that need it: a complete envelope does not."""

    def __init__(self, rows: pa.Table) -> None:
        self._headers = rows["headers"].combine_chunks()
        self.rows = rows.select([name for name, _ in COMMON if name in rows.column_names] + ["nanos", "date"])
        self.msg_ids = header_values(self._headers, headers.MSG_ID)
        self.is_replay: list[bool] = pc.starts_with(self.msg_ids, REPLAY_PREFIX).fill_null(False).to_pylist()

    def of(self, at: Sequence[int]) -> tuple[pa.Table, pa.Array]:
        """Rows, and their ids: of neighbours without a copy."""
        if at[-1] - at[0] + 1 == len(at):
            return self.rows.slice(at[0], len(at)), self.msg_ids.slice(at[0], len(at))
        taken = pa.array(at, pa.int64())
        return self.rows.take(taken), self.msg_ids.take(taken)

    @cached_property
    def _columns(self) -> list[list[Any]]:
        names = ("stream", "created_ns", "sequence", "nanos", "subject", "tenant")
        columns = [self.rows[name].to_pylist() for name in names]
        return [*columns, self.rows["timestamp"].cast(pa.int64()).to_pylist(), self.msg_ids.to_pylist()]

    def __getitem__(self, at: int) -> Place:
        stream, created_ns, sequence, nanos, subject, tenant, us, msg_id = (one[at] for one in self._columns)
        origin = ids.Origin(stream, created_ns, sequence, us * 1000 + nanos)
        return Place(origin, subject, tenant, msg_id, lambda: self._carried(at))

    def _carried(self, at: int) -> dict[str, str]:
        """A row's headers: of a name that stands several times the first value."""
        found: dict[str, str] = {}
        for pair in self._headers[at].as_py():
            found.setdefault(pair["key"], pair["value"].decode("utf-8", "surrogateescape"))
        return found


def _table(places: Places, table: Table, part: Parted) -> pa.Table:
    stood, msg_ids = places.of(part.at)
    made = {"key": part.keys, "msg_id": msg_ids, **_said(table, part)}
    arrays = []
    for name, kind in table.columns:
        value = made[name] if name in made else stood[name].combine_chunks()
        arrays.append(_array(value, kind) if isinstance(value, list) else value)
    return pa.Table.from_arrays(arrays, schema=table.schema)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """A column. In many all rows say the same: those are made at once."""
    if pa.types.is_nested(kind) or values.count(values[0]) < len(values):
        return pa.array(values, kind)
    return pa.repeat(pa.scalar(values[0], kind), len(values))


def _said(table: Table, part: Parted) -> dict[str, Any]:
    """What the messages say, by column."""
    if table is SILVER[RUNTIME]:
        return envelopes.columns(part.read, [part.replays.get(at) for at in part.at] if part.replays else ())
    names = [name for name, _ in table.columns]
    own = names[names.index("correlation_id") + 1 : -1]
    columns = zip(*(read.own for read in part.read), strict=True)
    return {
        "tenant": [read.tenant for read in part.read],
        "identity": [read.identity for read in part.read],
        "event_time": pa.array([read.event_us for read in part.read], pa.int64()).cast(TIMESTAMP),
        "trace_id": [read.trace_id for read in part.read],
        "span_id": [read.span_id for read in part.read],
        "causation_id": [read.causation_id for read in part.read],
        "correlation_id": [read.correlation_id for read in part.read],
        **dict(zip(own, (list(column) for column in columns), strict=True)),
    }


def quarantined(rows: pa.Table, wrong: Sequence[Wrong]) -> pa.Table:
    """Rows as they stood in bronze, with the reason."""
    stood = rows.take(pa.array([one.at for one in wrong], pa.int64()))
    made = {
        "family": pa.array([one.family or None for one in wrong], pa.string()),
        "reason": pa.array([one.reason for one in wrong], pa.string()),
        "detail": pa.array([shown(letters.one_line(one.detail, DETAIL_CHARS_MAX)) for one in wrong], pa.string()),
    }
    names = [name for name, _ in QUARANTINE.columns]
    arrays = [made[name] if name in made else stood[name].combine_chunks() for name in names]
    return pa.Table.from_arrays(arrays, schema=QUARANTINE.schema)
