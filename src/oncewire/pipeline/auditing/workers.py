"""What Spark's Python workers do for an audit: Arrow batches in, Arrow batches out, by the pure rules.

Messages become narrow rows first (what they say instead of their bytes), so that payloads never go through a shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain as chained
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from oncewire._ground.contracts import blocks, ids
from oncewire._ground.contracts import headers as names
from oncewire._ground.contracts.blocks import Announcement, Inputs, Outcome
from oncewire._ground.contracts.inputs import Input
from oncewire._ground.errors import ContractViolation, Refused
from oncewire.pipeline.auditing.rules import (
    BUCKET,
    RESULT,
    Bucket,
    Claim,
    Facts,
    Hole,
    InSilver,
    Lifetime,
    Link,
    Part,
    Quarantined,
    Reader,
    Rows,
    chain_name,
    compare,
    lifetime_of,
    walk,
)
from oncewire.pipeline.decode import TOGETHER
from oncewire.pipeline.envelopes import RUNTIME, keys_of, read_odd, read_together
from oncewire.pipeline.families import (
    READERS,
    REPLAY_PREFIX,
    Families,
    Place,
    key_begun,
    key_of,
    silver_name,
)
from oncewire.pipeline.landing import as_text

ROWS_PER_BATCH = 8_192
WIDE_ROWS = 64
EFFECT_PREFIX = "fx."
_MSG_ID = names.MSG_ID
_KINDS = {
    "string": pa.string(),
    "long": pa.int64(),
    "int": pa.int32(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def schema_of(ddl: str) -> pa.Schema:
    """The Arrow schema of a flat table."""
    return pa.schema([(name, _KINDS[kind]) for name, kind in (one.split(" ") for one in ddl.split(", "))])


RESULT_SCHEMA = schema_of(RESULT)


def batches(results: Iterable[Sequence[Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as batches of a bounded size."""
    rows: list[Sequence[Any]] = []
    for result in results:
        rows.append(result)
        if len(rows) == ROWS_PER_BATCH:
            yield _batch(rows, schema)
            rows = []
    if rows:
        yield _batch(rows, schema)


def _batch(rows: list[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def carried(headers: list[dict[str, Any]] | None) -> dict[str, str]:
    """Headers as the contracts take them; of doubles the first."""
    found: dict[str, str] = {}
    for one in headers or ():
        found.setdefault(one["key"], text(one["value"]))
    return found


# ---- blocks

INPUTS = (
    "array<struct<stream string, created_ns long, incarnation int, consumer string, filters array<string>, start long, "
    "sum binary, count long, claims array<struct<outcome string, first long, last long>>, listed_state binary>>"
)
BLOCK = (
    "stream string, created_ns long, incarnation int, sequence long, timestamp timestamp, problem string, "
    "chain string, number long, previous binary, hash binary, state binary, confirmed_block long, "
    "confirmed array<struct<stream string, sequence long>>, settled array<struct<stream string, created_ns long, "
    f"incarnation int, up_to long>>, effects array<struct<id string, target string>>, inputs {INPUTS}"
)


def _list_of(**fields: Any) -> Any:
    return pa.list_(pa.field("element", pa.struct(list(fields.items()))))


_CLAIMS = _list_of(outcome=pa.string(), first=pa.int64(), last=pa.int64())
_INPUTS = _list_of(
    stream=pa.string(),
    created_ns=pa.int64(),
    incarnation=pa.int32(),
    consumer=pa.string(),
    filters=pa.list_(pa.field("element", pa.string())),
    start=pa.int64(),
    sum=pa.binary(),
    count=pa.int64(),
    claims=_CLAIMS,
    listed_state=pa.binary(),
)
_BLOCK_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("created_ns", pa.int64()),
        ("incarnation", pa.int32()),
        ("sequence", pa.int64()),
        ("timestamp", _KINDS["timestamp"]),
        ("problem", pa.string()),
        ("chain", pa.string()),
        ("number", pa.int64()),
        ("previous", pa.binary()),
        ("hash", pa.binary()),
        ("state", pa.binary()),
        ("confirmed_block", pa.int64()),
        ("confirmed", _list_of(stream=pa.string(), sequence=pa.int64())),
        ("settled", _list_of(stream=pa.string(), created_ns=pa.int64(), incarnation=pa.int32(), up_to=pa.int64())),
        ("effects", _list_of(id=pa.string(), target=pa.string())),
        ("inputs", _INPUTS),
    ]
)


def read_blocks(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Announcements, each read from its bytes; what is no announcement has a problem instead of a content."""
    for part in parts_of(found):
        rows = [_block(row) for row in part.to_pylist()]
        yield pa.RecordBatch.from_pylist(rows, schema=_BLOCK_SCHEMA)


def _block(row: dict[str, Any]) -> dict[str, Any]:
    place = {name: row[name] for name in ("stream", "created_ns", "incarnation", "sequence", "timestamp")}
    try:
        told = blocks.read_announcement(row["payload"])
        return place | _told(told, row)
    except (msgspec.MsgspecError, ContractViolation, ValueError) as error:
        return place | {"problem": f"it is no block: {error}"[:200]}


def _told(told: Announcement, row: dict[str, Any]) -> dict[str, Any]:
    agent = blocks.agent_name(told.tenant, told.workspace, told.agent)
    wanted = blocks.announcement_id(told.ledger, agent, told.number)
    given = carried(row["headers"]).get(_MSG_ID, "")
    return {
        "problem": "" if given == wanted else f"its id is {given[:60]!r}, that of block {told.number} is {wanted}",
        "chain": chain_name(agent, told.ledger),
        "number": told.number,
        "previous": bytes.fromhex(told.previous),
        "hash": blocks.announcement_hash(row["payload"]),
        "state": bytes.fromhex(told.state),
        "confirmed_block": told.confirmed.block,
        "confirmed": [{"stream": one, "sequence": at} for one, at in told.confirmed.streams.items()],
        "settled": [_settled(*one) for one in told.settled],
        "effects": [
            {"id": id_, "target": target} for id_, target in zip(told.effects, blocks.effect_targets(told), strict=True)
        ],
        "inputs": [_inputs(agent, one) for one in told.inputs],
    }


def _settled(stream: str, created: str, up_to: int) -> dict[str, Any]:
    _, created_ns, incarnation = lifetime_of(stream, created)
    return {"stream": stream, "created_ns": created_ns, "incarnation": incarnation, "up_to": up_to}


def _inputs(agent: str, one: Inputs) -> dict[str, Any]:
    stream, created_ns, incarnation = lifetime_of(one.stream, one.created)
    claims = [
        {"outcome": outcome.value, "first": first, "last": last}
        for outcome in Outcome
        for first, last in getattr(one, outcome.value)
    ]
    return {
        "stream": stream,
        "created_ns": created_ns,
        "incarnation": incarnation,
        "consumer": one.consumer,
        "filters": sorted(one.filters),
        "start": one.start,
        "sum": bytes.fromhex(one.sum),
        "count": sum(claim["last"] - claim["first"] + 1 for claim in claims),
        "claims": claims,
        "listed_state": _listed_state(agent, one) if one.listed else None,
    }


def _listed_state(agent: str, one: Inputs) -> bytes:
    """What inputs of a work queue add to the state."""
    outcome_of = {
        at: outcome
        for outcome in blocks.COUNTED
        for first, last in getattr(one, outcome.value)
        for at in range(first, last + 1)
    }
    return blocks.add(
        blocks.NO_STATE,
        [
            blocks.element(agent, identity, subject, outcome_of[sequence], bytes.fromhex(digest))
            for (sequence, identity, digest), subject in zip(one.listed, blocks.listed_subjects(one), strict=True)
            if sequence in outcome_of
        ],
    )


def walk_chains(holes: Mapping[str, Hole]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Over blocks in order: `rules.walk`."""

    def work(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        links = (Link(*row) for batch in found for row in tuples(batch))
        yield from batches(walk(links, holes), RESULT_SCHEMA)

    return work


def parts_of(found: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches in parts of few rows, for rows that hold much: a block names hundreds of effects, and each is an object
    in Python. Ten thousand blocks, as Spark hands them over, took a gigabyte."""
    for batch in found:
        for first in range(0, batch.num_rows, WIDE_ROWS):
            yield batch.slice(first, WIDE_ROWS)


def tuples(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


# ---- positions

ROW = (
    "stream string, created_ns long, incarnation int, bucket long, sequence long, at_us long, subject string, "
    "msg_id string, identity string, digest binary, key binary, position binary, family string"
)
_ROW_SCHEMA = schema_of(ROW)

FACT = (
    "stream string, created_ns long, incarnation int, bucket long, kind string, first long, last long, chain string, "
    "number long, outcome string, key binary, digest binary, family string"
)

_REPLAY = REPLAY_PREFIX.encode()
RUNTIME_SUBJECTS = ("evt.", "cmd.")
"""Subjects whose envelopes need no headers, but for those of a replay: they are not even brought here."""


class Narrow:
    """Messages as narrow rows: what silver must say of them, and for those that an agent reads, their place in sums."""

    def __init__(self, readers: Mapping[Lifetime, Sequence[Reader]], families: Families = ()) -> None:
        self._readers = readers
        self._families = families
        self._known: dict[tuple[Lifetime, str], tuple[bool, str]] = {}

    def __call__(self, found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in found:
            yield self._narrow(batch)

    def _narrow(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        says, positions, families = self._read(batch)
        made = {
            "bucket": pc.divide(pc.subtract(batch.column("sequence"), 1), BUCKET),
            "msg_id": as_text(batch.column("msg_id")),
            "identity": pa.array([one.identity for one in says], pa.string()),
            "digest": pa.array([one.digest for one in says], pa.binary()),
            "key": pa.array([one.key for one in says], pa.binary()),
            "position": pa.array([positions.get(at) for at in range(len(says))], pa.binary()),
            "family": pa.array(families, pa.string()),
        }
        columns = [made[name] if name in made else batch.column(name) for name in _ROW_SCHEMA.names]
        return pa.RecordBatch.from_arrays(columns, schema=_ROW_SCHEMA)

    def _read(self, batch: pa.RecordBatch) -> tuple[list[_Says], dict[int, bytes], list[str]]:
        """What each message says, what it adds to sums, and of which family it is. Envelopes that are complete are read
        together, the others one by one."""
        names_ = ("stream", "created_ns", "incarnation", "subject", "sequence", "payload")
        columns = [batch.column(name).to_pylist() for name in names_]
        places = list(zip(*columns[:3], strict=True))
        subjects, sequences, bodies = columns[3:]
        homes = [
            self._known.get((where, subject)) or self._look_up(where, subject)
            for where, subject in zip(places, subjects, strict=True)
        ]
        complete = self._read_complete(homes, bodies, subjects)
        found = []
        msg_ids = batch.column("msg_id").to_pylist()
        for at, (is_read, name) in enumerate(homes):
            (envelope, key), msg_id = complete.get(at, (None, None)), msg_ids[at]
            if not name:
                says = NOTHING
            elif envelope is None or (msg_id is not None and msg_id.startswith(_REPLAY)):
                says = read_row(name, bodies[at], _place(batch, at, msg_id), envelope)
            else:
                says = _Says(envelope.identity, envelope.digest, key)
            is_broken = is_read and says.digest is None
            found.append(_Says("", blocks.raw_digest(bodies[at]), None) if is_broken else says)
        return found, self._positions(homes, places, sequences, bodies), [name for _, name in homes]

    def _read_complete(
        self, homes: Sequence[tuple[bool, str]], bodies: Sequence[bytes], subjects: Sequence[str]
    ) -> dict[int, tuple[Input | None, bytes]]:
        """Runtime envelopes with their keys, by row."""
        mine = [at for at, (_, name) in enumerate(homes) if name == RUNTIME]
        found: dict[int, tuple[Input | None, bytes]] = {}
        for first in range(0, len(mine), TOGETHER):
            some = mine[first : first + TOGETHER]
            named = [subjects[at] for at in some]
            read = read_together([bodies[at] for at in some], named)
            found |= zip(some, zip(read, keys_of(read, named), strict=True), strict=True)
        return found

    def _positions(
        self, homes: Sequence[tuple[bool, str]], places: Sequence[Lifetime], sequences: list[int], bodies: list[bytes]
    ) -> dict[int, bytes]:
        """What the messages that an agent reads add to the sums, by row."""
        mine: dict[str, list[int]] = {}
        for at, (is_read, _) in enumerate(homes):
            if is_read:
                mine.setdefault(places[at][0], []).append(at)
        found: dict[int, bytes] = {}
        for stream, rows in mine.items():
            made = blocks.position_elements(stream, [sequences[at] for at in rows], [bodies[at] for at in rows])
            found |= dict(zip(rows, made, strict=True))
        return found

    def _look_up(self, where: Lifetime, subject: str) -> tuple[bool, str]:
        is_read = any(reader.may_read(subject) for reader in self._readers.get(where, ()))
        return self._known.setdefault((where, subject), (is_read, silver_name(subject, self._families)))


class _Says(NamedTuple):
    """Identity, digest and silver's key of a message."""

    identity: str | None
    digest: bytes | None
    key: bytes | None


NOTHING = _Says(None, None, None)


def _place(batch: pa.RecordBatch, at: int, msg_id: bytes | None) -> Place:
    row = {name: batch.column(name)[at].as_py() for name in batch.schema.names if name != "payload"}
    told = carried(row["headers"])
    if msg_id is not None:
        told[_MSG_ID] = text(msg_id)
    stored_ns = row["at_us"] * 1_000 + (row["nanos"] or 0)
    origin = ids.Origin(row["stream"], row["created_ns"], row["sequence"], stored_ns)
    shown = None if msg_id is None else msg_id.decode("utf-8", "replace")
    return Place(origin, row["subject"], row["tenant"], shown, lambda: told)


def read_row(name: str, payload: bytes, place: Place, complete: Input | None) -> _Says:
    """What a message says; nothing of one that breaks its contract."""
    try:
        if name == RUNTIME:
            found, key, _ = read_odd(payload, place, complete)
            return _Says(found.identity, found.digest, key)
        read = READERS[name](payload, place)
    except Exception:  # silver keeps such a message in quarantine, with the reason
        return NOTHING
    try:
        begun = key_begun(name, read.tenant, read.scope, place.subject)
        return _Says(read.identity, read.digest, key_of(begun, read.identity, read.digest if read.replaces else b""))
    except (Refused, ValueError):
        return _Says(read.identity, read.digest, None)


def check_buckets(
    readers: Mapping[Lifetime, Sequence[Reader]],
) -> Callable[[pa.Table, pa.Table], pa.Table]:
    """Over rows and facts of one bucket: `rules.Bucket`."""

    def work(rows: pa.Table, facts: pa.Table) -> pa.Table:
        some = rows if rows.num_rows else facts
        place = (some["stream"][0].as_py(), some["created_ns"][0].as_py(), some["incarnation"][0].as_py())
        bucket = Bucket(place, some["bucket"][0].as_py(), _rows(rows), _facts(facts), readers.get(place, ()))
        made = list(batches(bucket.check(), RESULT_SCHEMA))
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


def compare_sums(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Over parts of sums in order: `rules.compare`."""
    parts = (Part(*row) for batch in found for row in tuples(batch))
    yield from batches(chained(compare(parts)), RESULT_SCHEMA)
