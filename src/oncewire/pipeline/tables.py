"""The tables of the lake as data: columns, keys, grain and place of each, and how another job reads one.

    <lake>/bronze             one row per stored message, raw               position
    <lake>/gaps               one row per range of sequences that bronze does not have, with its cause
    <lake>/quarantine         one row per message that silver refused, raw  position
    <lake>/silver/<family>    one row per identity                          key (16 bytes)
    <lake>/topics             one row per topic of the broker that was read: which stream bears which number
    <lake>/batches            one row per batch of silver and family: the balance of its rows

    family      subjects of the contracts                one row is
    runtime     evt.>, cmd.>                             a runtime envelope, complete as a handler sees it
    message     sr.>, the platform's                     a MessageEnvelope
    realtime    chat.>                                   an event of a conversation
    ledger      ledger.*.*                               an announced block, its positions and effects nested
    letter      dlq.>                                    a dead letter
    request     dlq_requests.*                           what an agent handed to the dead-letter service
    replay      dlq_replays.*                            a step of a letter's way back
    broker      owb.*.*.*.*                              a message of a topic
    broker_mark owb.*.*.*.*.fence, owb.*.*.*.keys        what an owner stores in a topic beside messages
    broker_record broker_records.*.*                     settlements and the like of a partition, nested
    advisory    $JS.EVENT.ADVISORY.CONSUMER.…            a delivery that the server gave up

A *position* is (stream, created_ns, incarnation, sequence): sequences alone begin anew when a stream is made again or
went back. Every bronze row of a known family ends in exactly one place: in silver, in quarantine, or counted as the
duplicate of a silver row. Silver's rows are found in bronze by their position, where the raw bytes and headers stand.

Tables are Delta tables. `date` (UTC, of the stream's time) is the last column, so that a lake that is partitioned by it
has the same schema as one that is not. A version of a table never changes: read_table(…, version=n) is a fixed cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa

from oncewire._ground.contracts.catalog import Family
from oncewire._ground.errors import NotFound
from oncewire.pipeline.gold.tables import GOLD
from oncewire.pipeline.lake.history import transactions
from oncewire.pipeline.lake.place import Place, place_of
from oncewire.pipeline.lake.table import TIMESTAMP, Columns, Table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from deltalake import DeltaTable
    from pyarrow.dataset import Dataset
    from pyspark.sql import DataFrame, SparkSession

HEADERS: Final = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)
RANGES: Final = pa.list_(pa.field("element", pa.struct([pa.field("first", pa.int64()), pa.field("last", pa.int64())])))
"""Closed ranges of sequences."""

POSITION: Final[Columns] = (
    ("stream", pa.string()),
    ("created_ns", pa.int64()),  # when the stream was made, Unix nanoseconds
    ("incarnation", pa.int32()),  # how often it was accepted that the stream went back
    ("sequence", pa.int64()),
)
RAW: Final[Columns] = (
    ("tenant", pa.string()),  # what subject or headers say; null where only the body could
    *POSITION,
    ("subject", pa.string()),
    ("timestamp", TIMESTAMP),  # when the stream took it in
    ("nanos", pa.int32()),  # the three digits that `timestamp` cannot hold
    ("headers", HEADERS),
    ("payload", pa.binary()),  # byte for byte
)
DATE: Final[Columns] = (("date", pa.date32()),)
COMMON: Final[Columns] = (
    ("tenant", pa.string()),
    *POSITION,
    ("subject", pa.string()),
    ("timestamp", TIMESTAMP),
    ("key", pa.binary()),  # 16 bytes: hash of tenant, workspace, subject, identity (and digest of an edited replay)
    ("identity", pa.string()),  # as the ledger knows it
    ("msg_id", pa.string()),  # Nats-Msg-Id: an effect's id; null without one
    ("event_time", TIMESTAMP),  # what the message says; the stream's time where it says nothing
    ("trace_id", pa.string()),
    ("span_id", pa.string()),
    ("causation_id", pa.string()),
    ("correlation_id", pa.string()),
)
ENVELOPE: Final[Columns] = (
    ("id", pa.string()),
    ("type", pa.string()),
    ("schema_version", pa.string()),
    ("idempotency_key", pa.string()),
    ("actor_id", pa.string()),
    ("digest", pa.binary()),  # 32 bytes over canonical type and payload: what the state hash takes
    ("replaces", pa.string()),  # hex digest that an edited replay replaces; its identity then has two rows
    ("replay_for", pa.string()),  # the consumer that a replay is meant for
    ("payload", pa.string()),  # JSON text of the envelope's payload
)
_INPUTS: Final = pa.struct(
    [
        ("stream", pa.string()),
        ("created_ns", pa.int64()),
        ("incarnation", pa.int32()),
        ("consumer", pa.string()),
        ("filters", pa.list_(pa.field("element", pa.string()))),
        ("start", pa.int64()),
        ("sum", pa.string()),  # hex, over (stream, sequence, raw body) of all positions here
        *((outcome, RANGES) for outcome in ("done", "duplicate", "terminated", "dead", "passed")),
        (
            "listed",  # of a work queue, which no other reader sees
            pa.list_(
                pa.field(
                    "element",
                    pa.struct(
                        [
                            ("sequence", pa.int64()),
                            ("identity", pa.string()),
                            ("digest", pa.string()),
                            ("subject", pa.string()),
                        ]
                    ),
                )
            ),
        ),
    ]
)
_EVENT: Final = pa.struct(
    [
        ("kind", pa.string()),  # acked, retried, buried · group_made, group_seen, group_gone · trimmed · marked
        ("group", pa.string()),
        ("offset", pa.int64()),  # of a trim: all up to it are forgotten
        ("attempts", pa.int64()),  # so far, this one included
        ("consumer", pa.string()),  # who held the delivery
        ("at", TIMESTAMP),
        ("error", pa.string()),
    ]
)
_LETTER: Final[Columns] = (
    ("cause", pa.string()),  # the short name that letters are grouped by
    ("error", pa.string()),
    ("outcome", pa.string()),
    ("consumer", pa.string()),
    ("deliveries", pa.int64()),
    ("origin_stream", pa.string()),
    ("origin_created_ns", pa.int64()),
    ("origin_sequence", pa.int64()),
    ("origin_timestamp_ns", pa.int64()),
    ("origin_subject", pa.string()),
    ("body_is", pa.string()),  # '' the original's bytes; 'gone'; 'pointer'
    ("body", pa.binary()),
)


_PLACE = tuple(name for name, _ in POSITION)

BRONZE: Final = Table("bronze", (*RAW, *DATE), _PLACE, "a stored message")
GAPS: Final = Table(
    "gaps",
    (
        *POSITION[:3],
        ("first", pa.int64()),
        ("last", pa.int64()),  # closed range
        # before: gone when the pipeline first read the stream · deleted: removed one by one · limit: what limits per
        # subject or TTL do · trimmed: removed from the stream's head before it was read · earlier: the numbers of the
        # incarnation before · unknown: the leader was not asked, or its answers do not fit
        ("cause", pa.string()),
        ("detail", pa.string()),
        ("found_at", TIMESTAMP),
        # what the leader said when it was asked a second time
        ("asked_at", TIMESTAMP),
        ("next_stored", pa.int64()),  # the next sequence that is stored behind the range; null where nothing is
        ("first_sequence", pa.int64()),  # of the stream at that moment, as what follows
        ("last_sequence", pa.int64()),
        ("messages", pa.int64()),
        ("deleted", pa.int64()),
        ("limits", pa.string()),  # JSON: what of its configuration removes messages
    ),
    (*_PLACE[:3], "first"),
    "a range of sequences that bronze does not have",
)
QUARANTINE: Final = Table(
    "quarantine",
    (
        *RAW,
        ("family", pa.string()),  # null where no contract names the subject
        ("reason", pa.string()),  # contract, version, subject, identity_conflict, unreadable
        ("detail", pa.string()),
        *DATE,
    ),
    _PLACE,
    "a message that silver refused",
)

CONFLICT: Final = "identity_conflict"
"""The one reason for quarantine that does not follow from the message alone: another one has its identity."""

TOPICS: Final = Table(
    "topics",
    (
        ("tenant", pa.string()),
        ("stream", pa.string()),
        ("created_ns", pa.int64()),
        ("number", pa.int64()),  # which settlement records name it by
        ("topic", pa.string()),
        ("partitions", pa.int32()),
        ("found_at", TIMESTAMP),
    ),
    ("stream", "created_ns"),
    "a topic of the broker that bronze has messages of",
)
BATCHES: Final = Table(
    "batches",
    (
        ("first_version", pa.int64()),  # of bronze, closed range
        ("last_version", pa.int64()),
        ("family", pa.string()),  # null for subjects that no contract names
        ("rows_in", pa.int64()),
        ("rows_out", pa.int64()),
        ("duplicates", pa.int64()),
        ("quarantined", pa.int64()),
        ("done_at", TIMESTAMP),
    ),
    ("last_version", "family"),
    "the balance of a batch of silver, by family",
)


def _silver(family: Family | None, name: str, grain: str, *columns: tuple[str, Any]) -> Table:
    return Table(f"silver/{name}", (*COMMON, *columns, *DATE), ("key",), grain, family)


SILVER: Final = {
    "runtime": _silver(
        Family.RUNTIME,
        "runtime",
        "a runtime envelope",
        ("workspace", pa.string()),
        *ENVELOPE,
        ("actor_role", pa.string()),
        ("source_agent", pa.string()),
        ("source_adapter", pa.string()),
        ("principal_id", pa.string()),
        ("principal_type", pa.string()),
        ("reply_to", pa.string()),
        ("entity_id", pa.string()),
        ("expected_version", pa.int64()),
    ),
    "message": _silver(
        Family.MESSAGE,
        "message",
        "a MessageEnvelope",
        ("workspace", pa.string()),
        *ENVELOPE,
        ("actor_kind", pa.string()),
    ),
    "realtime": _silver(
        Family.REALTIME,
        "realtime",
        "an event of a conversation",
        ("type", pa.string()),
        ("version", pa.string()),
        ("conversation_id", pa.string()),
        ("epoch", pa.string()),
        ("conversation_sequence", pa.int64()),
        ("message_id", pa.string()),
        ("chunk_id", pa.string()),
        ("guarantee", pa.string()),
        ("dedupe_key", pa.string()),
        ("payload", pa.string()),  # JSON text of the event
    ),
    "ledger": _silver(
        Family.BLOCK,
        "ledger",
        "an announced block",
        ("version", pa.int32()),
        ("ledger", pa.string()),
        ("workspace", pa.string()),
        ("agent", pa.string()),
        ("number", pa.int64()),
        ("previous", pa.string()),  # hex hash of the announcement before
        ("hash", pa.string()),  # hex hash of this announcement
        ("inputs", pa.list_(pa.field("element", _INPUTS))),
        ("effects", pa.list_(pa.field("element", pa.string()))),
        ("state", pa.string()),  # hex state hash so far
        ("confirmed_block", pa.int64()),
        (
            "confirmed_streams",  # the highest confirmed sequence by stream
            pa.list_(pa.field("element", pa.struct([("stream", pa.string()), ("sequence", pa.int64())]))),
        ),
        (
            "targets",  # which stream the effects go to: closed ranges of places in `effects`
            pa.list_(pa.field("element", pa.struct([("stream", pa.string()), ("places", RANGES)]))),
        ),
        (
            "settled",  # up to which sequence every input has its outcome in this block or before
            pa.list_(pa.field("element", pa.struct([pa.field(name, kind) for name, kind in POSITION]))),
        ),
    ),
    "letter": _silver(Family.LETTER, "letter", "a dead letter", *_LETTER),
    "request": _silver(Family.LETTER, "request", "what an agent handed to the dead-letter service", *_LETTER),
    "replay": _silver(
        Family.REPLAY,
        "replay",
        "a step of a letter's way back",
        ("letter", pa.string()),  # the last token of the letter's id
        ("payload", pa.string()),
    ),
    "advisory": _silver(
        Family.ADVISORY,
        "advisory",
        "a delivery that the server gave up",
        ("type", pa.string()),
        ("consumer", pa.string()),
        ("deliveries", pa.int64()),
        ("origin_stream", pa.string()),
        ("origin_sequence", pa.int64()),
        ("payload", pa.string()),
    ),
    "broker": _silver(
        None,
        "broker",
        "a message of a topic",
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("message_key", pa.string()),  # what picked the partition
        ("value", pa.string()),
        ("run_id", pa.string()),
        ("step_id", pa.string()),
        ("parent_step_id", pa.string()),
        ("idempotency_key", pa.string()),
        ("target_topic", pa.string()),
        ("deadline", TIMESTAMP),
        ("max_attempts", pa.int64()),
        ("backoff_ms", pa.int64()),
        ("routing_label", pa.string()),
        ("original_topic", pa.string()),  # of a dead letter, as what follows
        ("original_partition", pa.int32()),
        ("original_offset", pa.int64()),
        ("letter_attempts", pa.int64()),
        ("last_error", pa.string()),
        ("digest", pa.binary()),  # 32 bytes over the body
    ),
    "broker_mark": _silver(
        None,
        "broker_mark",
        "what an owner stores in a topic beside messages",
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("kind", pa.string()),  # fence · keys: where the message with a key went instead
        ("payload", pa.string()),
    ),
    "broker_record": _silver(
        None,
        "broker_record",
        "what the owner of a partition decided at once",
        ("number", pa.int64()),  # of the topic: the table `topics` has its stream
        ("partition", pa.int32()),
        ("topic", pa.string()),
        ("owner", pa.string()),  # the node
        ("taken", pa.bool_()),  # its first one
        ("after", pa.int64()),  # the sequence of the record before; null: it went in the same batch
        ("events", pa.list_(pa.field("element", _EVENT))),
        ("digest", pa.binary()),
    ),
}
_OWN: Final = (BRONZE, GAPS, QUARANTINE, TOPICS, BATCHES)
TABLES: Final = {table.name: table for table in (*_OWN, *SILVER.values(), *GOLD.values())}


def table_path(lake: str | Path | Place, name: str) -> str:
    return str(place_of(lake) / name)


def open_table(lake: str | Path | Place, name: str, version: int | None = None) -> DeltaTable:
    """The table, at a version or the newest one."""
    from deltalake.exceptions import TableNotFoundError

    try:
        return (place_of(lake) / name).delta(version)
    except TableNotFoundError:
        raise NotFound(
            f"the lake {lake} has no table {name}", hint="`oncewire pipeline run --once` makes the tables."
        ) from None


def dataset(table: DeltaTable) -> Dataset:
    """The rows of an opened table without Spark, its files read by Arrow itself. Delta's own reader calls back into
    Python from Arrow's threads, and a call that is under way when the process ends aborts it: a command that did its
    work would fail."""
    return table.to_pyarrow_dataset(filesystem=place_of(table.table_uri).filesystem())


def read_table(
    spark: SparkSession,
    lake: str | Path | Place,
    name: str,
    version: int | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """A table in Spark by its list of files, without Delta's jars: the same rows for the same version.

    Columns that are never asked for cost nothing in a folder, by themselves. In an object store they are read unless
    `columns` names those that are wanted.
    """
    return read_files(spark, lake, name, open_table(lake, name, version), columns)


def read_files(
    spark: SparkSession,
    lake: str | Path | Place,
    name: str,
    table: DeltaTable,
    columns: Sequence[str] | None = None,
    without: Collection[str] = (),
) -> DataFrame:
    """The rows of an opened table, `without` those of some files."""
    import json

    from pyspark.sql.types import StructType

    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    if columns is not None:
        schema = StructType([field for field in schema.fields if field.name in columns])
    added = {path: rows for path, rows in files_of(table).items() if path not in without}
    if not added:
        return spark.createDataFrame([], schema).limit(0)  # so that Spark knows, and leaves out what is joined with it
    return (place_of(lake) / name).frame(spark, schema, added)


def files_of(table: DeltaTable) -> dict[str, int]:
    """The files of an opened table: paths below it, and how many rows each holds."""
    added = pa.table(table.get_add_actions(flatten=True))
    if not added.num_rows:
        return {}
    return dict(zip(map(unquote, added["path"].to_pylist()), added["num_records"].to_pylist(), strict=True))


Lifetime = tuple[str, int, int]
"""A stream between two breaks: its name, creation time and incarnation. Sequences count within one."""


def app_id(lifetime: Lifetime) -> str:
    """The transaction id under which bronze keeps how far it has read, as the last sequence of the last range."""
    stream, created_ns, incarnation = lifetime
    return f"{stream}@{created_ns}+{incarnation}"


def lifetime_of(app: str) -> Lifetime | None:
    """The lifetime that a transaction id of bronze names; None for an id that names none."""
    stream, at, rest = app.rpartition("@")
    created_ns, plus, incarnation = rest.partition("+")
    if not (at and plus and created_ns.isdigit() and incarnation.isdigit()):
        return None
    return stream, int(created_ns), int(incarnation)


def high_water(bronze: DeltaTable) -> dict[Lifetime, int]:
    """Up to which sequence this version of bronze has everything that was there: what an audit cuts at.

    By the transaction ids of its log, never by its files: a stream whose files are gone was read nevertheless.
    """
    known = {lifetime_of(app): last for app, last in transactions(bronze).items()}
    return dict(sorted((at, last) for at, last in known.items() if at is not None))
