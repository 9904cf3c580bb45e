"""What Spark's Python workers do for an audit: Arrow batches in, Arrow batches out, by the pure rules. Blocks and sums
are here, positions in narrow.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts import headers as names
from oncewire._ground.contracts.blocks import Announcement, Inputs, Outcome
from oncewire._ground.errors import ContractViolation
from oncewire.pipeline.auditing.chains import Hole, Link, walk
from oncewire.pipeline.auditing.excuses import bears_out
from oncewire.pipeline.auditing.rules import RESULT, chain_name, lifetime_of
from oncewire.pipeline.auditing.sums import Part, compare

ROWS_PER_BATCH = 8_192
WIDE_ROWS = 64
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


def judge_gaps(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Over gaps: `excuses.bears_out`."""
    for batch in found:
        rows = pa.Table.from_batches([batch])
        known = rows.select(["stream", "created_ns", "incarnation", "first", "last", "cause"])
        yield from known.append_column("is_known", bears_out(rows)).to_batches()


def parts_of(found: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches in parts of few rows, for rows that hold much: a block names hundreds of effects, and each is an object
    in Python. Ten thousand blocks, as Spark hands them over, took a gigabyte."""
    for batch in found:
        for first in range(0, batch.num_rows, WIDE_ROWS):
            yield batch.slice(first, WIDE_ROWS)


def tuples(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


# ---- sums


def compare_sums(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Over parts of sums in order: `rules.compare`."""
    parts = (Part(*row) for batch in found for row in tuples(batch))
    yield from batches(compare(parts), RESULT_SCHEMA)
