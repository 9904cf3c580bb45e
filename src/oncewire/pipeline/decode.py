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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from oncewire.contracts import headers, ids, inputs, letters
from oncewire.errors import Refused, UnsupportedVersion
from oncewire.pipeline.families import (
    READERS,
    REPLAY_PREFIX,
    Families,
    Place,
    Read,
    key_of,
    runtime_row,
    shown,
    silver_name,
)
from oncewire.pipeline.lake.table import TIMESTAMP, Table
from oncewire.pipeline.landing import header_values
from oncewire.pipeline.tables import COMMON, QUARANTINE, SILVER

DETAIL_CHARS_MAX: Final = 500
RUNTIME: Final = "runtime"
TOGETHER: Final = 1_024
"""So many envelopes are read in one go: a single odd one makes the others of its go dearer."""


@dataclass
class Parted:
    """The rows of one silver table in a batch: where each stood in bronze, and what it says."""

    at: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)

    def halves(self) -> tuple[Parted, Parted]:
        half = len(self.at) // 2
        return (
            Parted(self.at[:half], self.keys[:half], self.read[:half]),
            Parted(self.at[half:], self.keys[half:], self.read[half:]),
        )


@dataclass
class Wrong:
    """A row that is refused: where it stood in bronze, and why."""

    at: int
    family: str
    reason: str
    detail: str


class Decoded(NamedTuple):
    """A batch of bronze in its parts. Every row is in one of them."""

    parts: dict[str, pa.Table]
    digests: dict[str, list[bytes]]
    quarantine: pa.Table
    refused: dict[str, int]
    """Rows in `quarantine` by family, '' for subjects without one."""


def decode(rows: pa.Table, families: Families = ()) -> Decoded:
    """Read every row of bronze by the contract of its subject."""
    parted: dict[str, Parted] = {}
    wrong: list[Wrong] = []
    bodies, subjects = rows["payload"].to_pylist(), rows["subject"].to_pylist()
    home = lru_cache(maxsize=4096)(lambda subject: silver_name(subject, families))
    names = [home(subject) for subject in subjects]
    complete = read_complete(names, bodies, subjects)
    places = Places(rows)
    for at, name in enumerate(names):
        if not name:
            wrong.append(Wrong(at, "", "subject", f"no contract names the subject {subjects[at][:200]}"))
            continue
        try:
            envelope = complete.get(at)
            if envelope is not None and not places.is_replay(at):
                read = runtime_row(envelope, {})
            else:
                read = READERS[name](bodies[at], places[at])
            key = key_of(name, subjects[at], read)
        except Refused as error:
            reason = "version" if isinstance(error, UnsupportedVersion) else "contract"
            wrong.append(Wrong(at, name, reason, str(error)))
        except Exception as error:  # a message may break a reader in ways nobody thought of; the others must go on
            wrong.append(Wrong(at, name, "unreadable", f"{type(error).__name__}: {error}"))
        else:
            part = parted.setdefault(name, Parted())
            part.at.append(at)
            part.keys.append(key)
            part.read.append(read)
    tables: dict[str, pa.Table] = {}
    digests: dict[str, list[bytes]] = {}
    for name, part in parted.items():
        made = list(_tables(places, name, part, wrong))
        tables[name] = pa.concat_tables([table for table, _ in made]) if made else SILVER[name].schema.empty_table()
        digests[name] = [digest for _, found in made for digest in found]
    refused: dict[str, int] = {}
    for one in wrong:
        refused[one.family] = refused.get(one.family, 0) + 1
    return Decoded(tables, digests, quarantined(rows, sorted(wrong, key=lambda one: one.at)), refused)


def read_complete(
    names: Sequence[str], bodies: Sequence[bytes], subjects: Sequence[str]
) -> dict[int, inputs.Input | None]:
    """Runtime envelopes by row, some thousand read together; None for one that must be looked at closely."""
    mine = [at for at, name in enumerate(names) if name == RUNTIME]
    found: dict[int, inputs.Input | None] = {}
    for first in range(0, len(mine), TOGETHER):
        some = mine[first : first + TOGETHER]
        try:
            read = inputs.read_all_complete([bodies[at] for at in some], [subjects[at] for at in some])
        except Exception:  # one of them, such as one that is nested too deeply: it is found when each is read alone
            read = [None] * len(some)
        found |= dict(zip(some, read, strict=True))
    return found


class Places:
    """Where the rows of a batch stand, made for those that need it: a complete envelope does not."""

    def __init__(self, rows: pa.Table) -> None:
        self._headers = rows["headers"].combine_chunks()
        self.rows = rows.select([name for name, _ in COMMON if name in rows.column_names] + ["nanos", "date"])
        self.msg_ids = header_values(self._headers, headers.MSG_ID)
        self._is_replay = pc.starts_with(self.msg_ids, REPLAY_PREFIX).fill_null(False).to_pylist()

    def is_replay(self, at: int) -> bool:
        return bool(self._is_replay[at])

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


def _tables(places: Places, name: str, part: Parted, wrong: list[Wrong]) -> Iterator[tuple[pa.Table, list[bytes]]]:
    """The part as a table. What Arrow refuses is halved until the rows that it refuses stand alone."""
    if not part.at:
        return
    try:
        yield _table(places, SILVER[name], part), [read.digest for read in part.read]
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError) as error:
        if len(part.at) == 1:
            wrong.append(Wrong(part.at[0], name, "unreadable", f"{type(error).__name__}: {error}"))
            return
        for half in part.halves():
            yield from _tables(places, name, half, wrong)


def _table(places: Places, table: Table, part: Parted) -> pa.Table:
    kinds = dict(table.columns)
    names = [name for name, _ in table.columns]
    taken = pa.array(part.at, pa.int64())
    stood = places.rows.take(taken)
    made: dict[str, Any] = {
        "tenant": [read.tenant for read in part.read],
        "key": part.keys,
        "identity": [read.identity for read in part.read],
        "msg_id": places.msg_ids.take(taken),
        "event_time": pa.array([read.event_us for read in part.read], pa.int64()).cast(TIMESTAMP),
        "trace_id": [read.trace_id for read in part.read],
        "span_id": [read.span_id for read in part.read],
        "causation_id": [read.causation_id for read in part.read],
        "correlation_id": [read.correlation_id for read in part.read],
    }
    own = names[names.index("correlation_id") + 1 : -1]
    columns = zip(*(read.own for read in part.read), strict=True)
    made |= dict(zip(own, (list(column) for column in columns), strict=True))
    arrays = []
    for name in names:
        value = made.get(name, None)
        if value is None:
            value = stood[name].combine_chunks()
        arrays.append(value if isinstance(value, pa.Array) else pa.array(value, kinds[name]))
    return pa.Table.from_arrays(arrays, schema=table.schema)


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
