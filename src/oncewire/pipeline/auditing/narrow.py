"""Messages, and the rows that were derived from them, as narrow rows for the check of positions: payloads never go
through a shuffle.

A message becomes what silver must say of it (a key, and a hash of the whole row) and what it adds to the sums of the
agents that read it. A row of silver or quarantine becomes the same hash of what it does say. What a message says is
read by silver's own code, which is quick, and for a sample by the audit's own (plain.py): both must say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import blocks, ids, inputs
from oncewire._ground.contracts import headers as names
from oncewire._ground.errors import Refused
from oncewire.pipeline.auditing import plain
from oncewire.pipeline.auditing.rowhash import columns_of, row_hashes
from oncewire.pipeline.auditing.rules import BUCKET, Bucket, Claim, Facts, InSilver, Lifetime, Quarantined, Reader, Rows
from oncewire.pipeline.auditing.workers import RESULT_SCHEMA, batches, carried, schema_of
from oncewire.pipeline.decode import Decoded, decode
from oncewire.pipeline.families import Families, silver_name
from oncewire.pipeline.landing import header_values, tenants
from oncewire.pipeline.staging import conform
from oncewire.pipeline.tables import BRONZE, QUARANTINE, SILVER

ROW: Final = (
    "stream string, created_ns long, incarnation int, bucket long, sequence long, at_us long, subject string, "
    "msg_id string, identity string, digest binary, key binary, position binary, family string, row binary, "
    "plain binary, wrong string"
)
_ROW_SCHEMA: Final = schema_of(ROW)
FACT: Final = (
    "stream string, created_ns long, incarnation int, bucket long, kind string, first long, last long, chain string, "
    "number long, outcome string, family string, row binary, reason string"
)
DERIVED: Final = (
    "stream string, created_ns long, incarnation int, sequence long, family string, row binary, reason string"
)
_DERIVED_SCHEMA: Final = schema_of(DERIVED)


@dataclass(frozen=True)
class Sample:
    """Which messages are read a second time, by the plain reader: one in so many, by their sequences and a seed."""

    one_in: int = 1
    seed: int = 0

    def picks(self, sequences: Any) -> Any:
        """The rows that are picked, whatever stands around them."""
        if self.one_in == 1:
            return np.arange(len(sequences))
        mixed = (sequences.astype(np.uint64) + np.uint64(self.seed)) * np.uint64(0x9E3779B97F4A7C15)
        return np.flatnonzero((mixed >> np.uint64(32)) % np.uint64(self.one_in) == 0)


class Narrow:
    """Messages as narrow rows."""

    def __init__(
        self, readers: Mapping[Lifetime, Sequence[Reader]], families: Families = (), sample: Sample | None = None
    ) -> None:
        self._readers = readers
        self._families = families
        self._sample = sample or Sample()

    def __call__(self, found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in found:
            yield self._narrow(conform(pa.Table.from_batches([batch]), BRONZE))

    def _narrow(self, rows: pa.Table) -> pa.RecordBatch:
        read = decode(rows, self._families)
        subjects = rows["subject"].to_pylist()
        inputs_ = Inputs(rows, subjects, self._readers)
        family = {subject: silver_name(subject, self._families) for subject in set(subjects)}
        picked = self._sample.picks(rows["sequence"].to_numpy())
        seen = [plain.seen_of(row) for row in rows.take(pa.array(picked)).to_pylist()]
        identity, digest = inputs_.said(*(scattered(read, rows.num_rows, name) for name in ("identity", "digest")))
        made = {
            "bucket": pc.divide(pc.subtract(rows["sequence"], 1), BUCKET),
            "at_us": rows["timestamp"].cast(pa.int64()),
            "msg_id": header_values(rows["headers"].combine_chunks(), names.MSG_ID),
            "identity": identity,
            "digest": digest,
            "key": scattered(read, rows.num_rows, "key"),
            "position": inputs_.positions(),
            "family": pa.array([family[subject] for subject in subjects], pa.string()),
            "row": hashed(read, rows.num_rows),
            "plain": _scattered([(picked, hashed_plainly(seen, self._families))], rows.num_rows, pa.binary()),
            "wrong": wrong_columns(rows, dict(zip(picked.tolist(), map(plain.tenant_of, seen), strict=True))),
        }
        columns = [made[name] if name in made else rows[name] for name in _ROW_SCHEMA.names]
        return pa.Table.from_arrays(columns, schema=_ROW_SCHEMA).combine_chunks().to_batches()[0]


def scattered(read: Decoded, count: int, column: str) -> pa.Array:
    """A column of all parts, each value where its message stood in the batch; null where a part has no such column."""
    kind = pa.string() if column == "identity" else pa.binary()
    return _scattered([(read.at[name], part[column]) for name, part in read.parts.items()
                       if column in part.column_names], count, kind)  # fmt: skip


def hashed(read: Decoded, count: int) -> pa.Array:
    """A hash of the row that follows from each message."""
    parts = {**read.parts, QUARANTINE.name: read.quarantine}
    return _scattered([(read.at[name], row_hashes(name, part)) for name, part in parts.items()], count, pa.binary())


def hashed_plainly(seen: Sequence[plain.Seen], families: Families) -> pa.Array:
    """The same by the plain reader, message by message."""
    told = [_fitting(one, plain.read(one, families)) for one in seen]
    by_name: dict[str, list[int]] = {}
    for at, one in enumerate(told):
        by_name.setdefault(one.name, []).append(at)
    parts = [
        (at, row_hashes(name, pa.Table.from_pylist([told[one].row for one in at], pa.schema(columns_of(name)))))
        for name, at in by_name.items()
    ]
    return _scattered(parts, len(seen), pa.binary())


def _fitting(seen: plain.Seen, told: plain.Told) -> plain.Told:
    """What the table cannot hold is refused."""
    try:
        pa.Table.from_pylist([told.row], pa.schema(columns_of(told.name)))
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
        return plain.refused(seen.row, told.name, "unreadable")
    return told


def _scattered(parts: Sequence[tuple[Sequence[int], Any]], count: int, kind: pa.DataType) -> pa.Array:
    place = np.full(count, -1, np.int64)
    chunks, begin = [pa.array([], kind)], 0
    for at, values in parts:
        place[np.asarray(at, np.int64)] = np.arange(begin, begin + len(at))
        chunks += [chunk.cast(kind) for chunk in (values.chunks if isinstance(values, pa.ChunkedArray) else [values])]
        begin += len(at)
    return pa.concat_arrays(chunks).take(pa.array(place, mask=place < 0))


def wrong_columns(rows: pa.Table, plainly: Mapping[int, str | None]) -> pa.Array:
    """The columns of bronze that it adds to a message, where they are not those that it would add; of some messages the
    tenant is known as the plain reader finds it."""
    wanted = {
        "tenant": tenants(rows["subject"].combine_chunks(), rows["headers"].combine_chunks()),
        "date": rows["timestamp"].combine_chunks().cast(pa.date32()),
    }
    named: list[list[str]] = [[] for _ in range(rows.num_rows)]
    for name, column in wanted.items():
        there = rows[name].combine_chunks()
        is_same = pc.fill_null(pc.equal(there, column), pc.and_(pc.is_null(there), pc.is_null(column)))
        for row in np.flatnonzero(~is_same.to_numpy(zero_copy_only=False)).tolist():
            named[row].append(name)
    for at, tenant in plainly.items():
        if rows["tenant"][at].as_py() != tenant and "tenant" not in named[at]:
            named[at].append("tenant")
    return pa.array([" and ".join(one) or None for one in named], pa.string())


class Inputs:
    """The messages of a batch that an agent reads, as that agent reads them."""

    def __init__(self, rows: pa.Table, subjects: Sequence[str], readers: Mapping[Lifetime, Sequence[Reader]]) -> None:
        self._rows = rows
        self._subjects = subjects
        self._count = rows.num_rows
        places = list(zip(*(rows[name].to_pylist() for name in ("stream", "created_ns", "incarnation")), strict=True))
        known = {
            (place, subject): any(reader.may_read(subject) for reader in readers.get(place, ()))
            for place, subject in set(zip(places, subjects, strict=True))
        }
        read = [at for at, one in enumerate(zip(places, subjects, strict=True)) if known[one]]
        self._at = read
        self._streams = [places[at][0] for at in read]

    def positions(self) -> pa.Array:
        """What each adds to the sum over positions and bodies."""
        mine: dict[str, list[int]] = {}
        for at, stream in zip(self._at, self._streams, strict=True):
            mine.setdefault(stream, []).append(at)
        found: list[tuple[Sequence[int], Any]] = []
        for stream, rows in mine.items():
            some = self._rows.take(pa.array(rows))
            elements = blocks.position_elements(stream, some["sequence"].to_pylist(), some["payload"].to_pylist())
            found.append((rows, pa.array(elements, pa.binary())))
        return _scattered(found, self._count, pa.binary())

    def said(self, identity: pa.Array, digest: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Identity and content digest of each, where silver does not have both too."""
        lacks = pc.invert(pc.and_(pc.is_valid(identity), pc.is_valid(digest))).to_numpy(zero_copy_only=False)
        at = [one for one in self._at if lacks[one]]
        if not at:
            return identity, digest
        told = [self._said(row) for row in self._rows.take(pa.array(at)).to_pylist()]
        mask = np.zeros(self._count, bool)
        mask[at] = True
        columns = (pa.array([one[0] for one in told], pa.string()), pa.array([one[1] for one in told], pa.binary()))
        found = (pc.replace_with_mask(old, mask, new) for old, new in zip((identity, digest), columns, strict=True))
        return next(found), next(found)

    def _said(self, row: dict[str, Any]) -> tuple[str, bytes]:
        """As an agent reads it; what breaks its contract has no identity, and its bytes are its content."""
        stored_ns = int(row["timestamp"].timestamp()) * 1_000_000_000 + row["timestamp"].microsecond * 1_000
        origin = ids.Origin(row["stream"], row["created_ns"], row["sequence"], stored_ns + (row["nanos"] or 0))
        told = carried(row["headers"])
        try:
            found = inputs.read_input(row["payload"], subject=row["subject"], origin=origin, carried=told)
        except (Refused, ValueError, RecursionError):
            return "", blocks.raw_digest(row["payload"])
        return found.identity, found.digest


# ---- what was derived


class Derived:
    """Rows of a silver table, or of quarantine, as narrow rows."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        is_refused = self._name == QUARANTINE.name
        table = QUARANTINE if is_refused else SILVER[self._name]
        for batch in found:
            rows = conform(pa.Table.from_batches([batch]), table)
            made = {
                "family": rows["family"] if is_refused else pa.array([self._name] * rows.num_rows, pa.string()),
                "row": row_hashes(self._name, rows),
                "reason": rows["reason"] if is_refused else pa.nulls(rows.num_rows, pa.string()),
            }
            columns = [made[name] if name in made else rows[name] for name in _DERIVED_SCHEMA.names]
            yield from pa.Table.from_arrays(columns, schema=_DERIVED_SCHEMA).to_batches()


# ---- buckets


def check_buckets(
    readers: Mapping[Lifetime, Sequence[Reader]], *, is_derived: bool = True
) -> Callable[[pa.Table, pa.Table], pa.Table]:
    """Over rows and facts of one bucket: `rules.Bucket`."""

    def work(rows: pa.Table, facts: pa.Table) -> pa.Table:
        some = rows if rows.num_rows else facts
        place = (some["stream"][0].as_py(), some["created_ns"][0].as_py(), some["incarnation"][0].as_py())
        bucket = Bucket(place, some["bucket"][0].as_py(), _rows(rows), _facts(facts), readers.get(place, ()))
        made = list(batches(bucket.check(is_derived=is_derived), RESULT_SCHEMA))
        return pa.Table.from_batches(made, schema=RESULT_SCHEMA)

    return work


def _rows(table: pa.Table) -> Rows:
    return Rows(*(table[name].combine_chunks() for name in Rows._fields))


def _facts(table: pa.Table) -> Facts:
    named = table.rename_columns({"first": "sequence"})
    silver = named.filter(pc.equal(table["kind"], "silver"))
    refused = named.filter(pc.equal(table["kind"], "quarantine"))
    found = InSilver(*(silver[name].combine_chunks() for name in InSilver._fields))
    quarantined = Quarantined(*(refused[name].combine_chunks() for name in Quarantined._fields))
    lost: list[tuple[int, int]] = []
    facts = Facts([], [], [], [], found, quarantined, lost)
    names_ = ("kind", "first", "last", "chain", "number", "outcome")
    others = table.filter(pc.invert(pc.is_in(table["kind"], pa.array(["silver", "quarantine"]))))
    for kind, first, last, chain, number, outcome in zip(*(others[name].to_pylist() for name in names_), strict=True):
        if kind == "claim":
            facts.claims.append(Claim(chain, number, outcome, first, last))
        elif kind == "listed":
            facts.listed.append(Claim(chain, number, outcome, first, last))
        elif kind == "gap":
            facts.gaps.append((first, last))
        elif kind == "lost":
            lost.append((first, last))
        else:
            facts.expected.append((first, last))
    return facts
