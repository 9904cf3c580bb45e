"""A lake made by hand: messages, agents' blocks and gaps as tables, without a server. For tests that then damage it."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from oncewire._ground.contracts import blocks, ids, letters, subjects
from oncewire._ground.contracts.blocks import Confirmed, Outcome
from oncewire._ground.contracts.headers import MSG_ID
from oncewire._ground.contracts.inputs import read_input
from oncewire._ground.contracts.message import encode_message, new_message
from oncewire._ground.errors import ContractViolation
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.rules import Content, Entry, Head, Ledger, Sending, Source
from oncewire.pipeline import tables
from oncewire.pipeline.decode import decode
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import SILVER_APP
from oncewire.pipeline.lake.log import Lake as Tables
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.lake.table import Table
from oncewire.pipeline.landing import tenants

CREATED = "2026-11-01T00:00:00Z"
CREATED_NS = parse_time_ns(CREATED)
EVENTS, COMMANDS, LEDGER, DLQ = "MESHFORGE_EVENTS", "MESHFORGE_COMMANDS", "LEDGER", "DLQ"
BEGIN = datetime(2026, 11, 1, tzinfo=UTC)


def headers_of(headers: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value.encode()} for key, value in headers.items()]


@dataclass
class Lake:
    """Rows in hand, written as tables."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[dict[str, Any]] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)
    silver: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    topics: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    now: datetime = BEGIN

    def add(self, stream: str, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> int:
        """A message, as its stream takes it in; where it stands."""
        self.now += timedelta(milliseconds=1)
        sequence = self.reached.get(stream, 0) + 1
        self.reached[stream] = sequence
        carried = headers_of(headers or {})
        (tenant,) = tenants(pa.array([subject]), pa.array([carried], tables.HEADERS)).to_pylist()
        self.rows.append(
            {
                "tenant": tenant, "stream": stream, "created_ns": CREATED_NS, "incarnation": 0, "sequence": sequence,
                "subject": subject, "timestamp": self.now, "nanos": 0, "headers": carried,
                "payload": payload, "date": self.now.date(),
            }
        )  # fmt: skip
        return sequence

    def event(self, name: str, about: str = "biller") -> int:
        body = {"type": "OrderPlaced", "payload": {"order": name}, "idempotency_key": name}
        return self.add(EVENTS, f"evt.default.demo.{about}.placed", msgspec.json.encode(body), {MSG_ID: f"in.{name}"})

    def gap(self, stream: str, first: int, last: int, cause: str = "deleted") -> None:
        """Sequences that the stream no longer had, with what it said of them."""
        self.rows = [row for row in self.rows if not (row["stream"] == stream and first <= row["sequence"] <= last)]
        reached = max(last, self.reached.get(stream, 0))
        self.gaps.append(
            {
                "stream": stream, "created_ns": CREATED_NS, "incarnation": 0, "first": first, "last": last,
                "cause": cause, "detail": "", "found_at": self.now, "asked_at": self.now + timedelta(seconds=first),
                "next_stored": last + 1, "first_sequence": 1, "last_sequence": reached, "messages": reached,
                "deleted": last - first + 1, "limits": '{"max_msgs_per_subject": 1}' if cause == "limit" else "{}",
            }
        )  # fmt: skip

    def row(self, stream: str, sequence: int) -> dict[str, Any]:
        [found] = [row for row in self.rows if (row["stream"], row["sequence"]) == (stream, sequence)]
        return found

    def drop(self, stream: str, sequence: int) -> None:
        self.rows.remove(self.row(stream, sequence))

    def derive(self) -> None:
        """What silver and quarantine say of the rows as they are now, with the balance: each key once, the first copy
        wins."""
        rows = sorted(self.rows, key=lambda row: (row["stream"], row["sequence"]))
        found = decode(pa.Table.from_pylist(rows, tables.BRONZE.schema))
        self.quarantine = found.quarantine.to_pylist()
        rows_in = Counter(found.refused)
        for name, part in found.parts.items():
            first = {row["key"]: row for row in reversed(part.to_pylist())}
            self.silver[name] = sorted(first.values(), key=lambda row: (row["stream"], row["sequence"]))
            rows_in[name] += part.num_rows
        self.batches = [
            {
                "first_version": 1, "last_version": len(self.reached), "family": name or None, "rows_in": count,
                "rows_out": len(self.silver.get(name, ())), "quarantined": found.refused.get(name, 0),
                "duplicates": count - len(self.silver.get(name, ())) - found.refused.get(name, 0),
                "done_at": self.now,
            }
            for name, count in sorted(rows_in.items())
        ]  # fmt: skip

    def silver_row(self, name: str, stream: str, sequence: int) -> dict[str, Any]:
        [found] = [row for row in self.silver[name] if (row["stream"], row["sequence"]) == (stream, sequence)]
        return found

    def write(self, rows_per_file: int = 1_000_000) -> Path:
        """All tables, as the pipeline writes them; bronze with one version per stream, and few files."""
        if not self.silver:
            self.derive()
        lake = Tables(self.path)
        derived = {tables.GAPS: self.gaps, tables.QUARANTINE: self.quarantine}
        derived |= {tables.TOPICS: self.topics} if self.topics else {}
        derived |= {tables.SILVER[name]: rows for name, rows in self.silver.items()}
        derived |= {tables.BATCHES: self.batches}
        for table in (tables.BRONZE, *derived):
            shutil.rmtree(lake.root(table), ignore_errors=True)
        for stream, last in sorted(self.reached.items()):
            lifetime = (stream, CREATED_NS, 0)
            rows = [row for row in self.rows if row["stream"] == stream]
            written: list[Written] = []
            for first in range(0, len(rows), rows_per_file):
                some = rows[first : first + rows_per_file]
                written += file_of(lake, tables.BRONZE, f"{tables.app_id(lifetime)}-{first}", some)
            lake.commit(lake.open(tables.BRONZE), tables.BRONZE, written, tables.app_id(lifetime), last)
        has = lake.open(tables.BRONZE).version()
        for table, rows in derived.items():
            lake.commit(lake.open(table), table, file_of(lake, table, "all", rows), SILVER_APP, has)
        return self.path

    def go_on(self, stream: str) -> None:
        """What the pipeline does when another stream moves on: it lands a message, and silver takes it in."""
        lake, lifetime = Tables(self.path), (stream, CREATED_NS, 0)
        last = self.add(stream, f"unnamed.{stream}", b"more")
        written = file_of(lake, tables.BRONZE, f"{tables.app_id(lifetime)}-{last}", [self.row(stream, last)])
        lake.commit(lake.open(tables.BRONZE), tables.BRONZE, written, tables.app_id(lifetime), last)
        has = lake.open(tables.BRONZE).version()
        refused = decode(pa.Table.from_pylist([self.row(stream, last)], tables.BRONZE.schema)).quarantine.to_pylist()
        written = file_of(lake, tables.QUARANTINE, f"{has}", refused)
        lake.commit(lake.open(tables.QUARANTINE), tables.QUARANTINE, written, SILVER_APP, has)
        balance = {"first_version": has, "last_version": has, "rows_in": 1, "rows_out": 0, "duplicates": 0}
        balance |= {"family": None, "quarantined": 1, "done_at": self.now}
        written = file_of(lake, tables.BATCHES, f"{has}", [balance])
        lake.commit(lake.open(tables.BATCHES), tables.BATCHES, written, SILVER_APP, has)


def file_of(lake: Tables, table: Table, prefix: str, rows: list[dict[str, Any]]) -> list[Written]:
    """Rows as one file of a table."""
    found = pa.Table.from_pylist(rows, table.schema)
    return list(files.write_files(lake.root(table), table, prefix, found, is_partitioned=False))


class FakeAgent:
    """Settles positions of a lake the way an agent does, by the ledger's own rules."""

    def __init__(self, lake: Lake, name: str = "biller", *, is_work_queue: bool = False) -> None:
        self.lake = lake
        self.ledger = Ledger(f"{name}-ledger", "default", "demo", name)
        self.chain = f"{self.ledger.name}@{self.ledger.id}"
        pattern = "cmd.>" if is_work_queue else f"evt.default.demo.{name}.>"
        stream = COMMANDS if is_work_queue else EVENTS
        self.source = Source(stream, CREATED, f"{name}_consumer", (pattern,), 1, is_work_queue)
        self.head: Head = rules.FIRST
        self.confirmed = Confirmed(0, {})
        self.announced: list[int] = []
        self.ordered = 0
        self.is_on_sr = False
        """Its effects are MessageEnvelopes on `sr.>`."""

    def orders(self, count: int) -> list[int]:
        """Inputs for this agent; where they stand."""
        first, self.ordered = self.ordered, self.ordered + count
        return [self.lake.event(f"{self.ledger.agent}-{at}", self.ledger.agent) for at in range(first, self.ordered)]

    def settle(
        self,
        sequences: list[int],
        outcome: Outcome = Outcome.DONE,
        *,
        effects: int = 0,
        settled: int = 0,
        bodies: dict[int, tuple[str, bytes]] | None = None,
    ) -> int:
        """One block with these inputs, `effects` each; the sequence of its announcement."""
        entries = [self._entry(sequence, outcome, effects, bodies) for sequence in sequences]
        sendings = [sending for entry in entries for sending in self._effects(entry)]
        self.source = msgspec.structs.replace(self.source, settled=max(self.source.settled, settled))
        content = Content(entries, sendings, 0, {})
        block = rules.summed(self.ledger, content, {self.source.durable: self.source})
        self.head, announcement = rules.next_block(self.ledger, self.head, block, self.confirmed)
        for sending in sendings:
            self.lake.add(
                sending.stream, sending.subject, sending.payload, {MSG_ID: sending.id} | (sending.headers or {})
            )
        return self._announce(announcement)

    def close(self) -> int:
        """A block without inputs that says that all before is confirmed."""
        streams = {stream: last for stream, last in self.lake.reached.items() if stream != COMMANDS}
        self.confirmed = Confirmed(self.head.number, streams)
        block = rules.summed(self.ledger, Content([], [], 0, {}), {self.source.durable: self.source})
        self.head, announcement = rules.next_block(self.ledger, self.head, block, self.confirmed)
        return self._announce(announcement)

    def _announce(self, announcement: bytes) -> int:
        id_ = blocks.announcement_id(self.ledger.id, self.ledger.name, self.head.number)
        subject = subjects.ledger(self.ledger.agent, self.ledger.id)
        self.announced.append(self.lake.add(LEDGER, subject, announcement, {MSG_ID: id_}))
        return self.announced[-1]

    def _entry(
        self, sequence: int, outcome: Outcome, effects: int, bodies: dict[int, tuple[str, bytes]] | None
    ) -> Entry:
        if bodies is not None:
            subject, body = bodies[sequence]
            carried: dict[str, str] = {}
        else:
            row = self.lake.row(self.source.stream, sequence)
            subject, body = row["subject"], row["payload"]
            carried = {one["key"]: one["value"].decode() for one in row["headers"]}
        try:
            origin = ids.Origin(self.source.stream, CREATED_NS, sequence, 0)
            found = read_input(body, subject=subject, origin=origin, carried=carried)
            identity, digest = found.identity, found.digest
        except ContractViolation:
            identity, digest = "", blocks.raw_digest(body)
        return Entry(b"", identity, subject, body, b"", outcome, self.source.stream, sequence, 0, digest, effects)

    def _effects(self, entry: Entry) -> list[Sending]:
        led = self.ledger
        named = [ids.effect_id(led.tenant, led.workspace, led.agent, entry.identity, at) for at in range(entry.effects)]
        order = entry.identity.rpartition("/")[2]
        if self.is_on_sr:
            return [self._message(one) for one in named]
        return [Sending(one, "evt.default.demo.bills.made", bill(one, order), None, EVENTS) for one in named]

    def _message(self, id_: str) -> Sending:
        sent = new_message(
            "BillMade", {"for": id_}, message_id=id_, timestamp=BEGIN, actor_id="biller", actor_kind="AGENT"
        )
        return Sending(sent.idempotency_key, "sr.events.bill", encode_message(sent), None, "sr-events")

    def letter(self, sequence: int, cause: str = "BrokenOrder") -> int:
        """The dead letter of an input."""
        origin = ids.Origin(self.source.stream, CREATED_NS, sequence, 0)
        row = self.lake.row(self.source.stream, sequence)
        told = {
            MSG_ID: ids.letter_id(origin, self.source.consumer),
            letters.STREAM: self.source.stream,
            letters.CREATED: str(CREATED_NS),
            letters.SEQUENCE: str(sequence),
            letters.TIMESTAMP: "0",
            letters.CONSUMER: self.source.consumer,
            letters.DELIVERIES: "5",
            letters.CAUSE: cause,
            letters.OUTCOME: "dead",
        }
        return self.lake.add(DLQ, f"dlq.{row['subject']}", row["payload"], told)


def bill(id_: str, order: str = "") -> bytes:
    """An effect; `order` is the key of the input that caused it."""
    caused = {"causation_id": f"in.{order}", "correlation_id": f"in.{order}"} if order else {}
    return msgspec.json.encode({"type": "BillMade", "payload": {"for": id_}, "idempotency_key": id_} | caused)
