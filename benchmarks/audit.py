"""An audit of a lake that is as it should be: how long it takes, and what it holds in memory.

Half of the messages are inputs of one agent, 256 to a block, the other half their effects. The lake is written by the
lake's own code, the blocks are made by the ledger's own rules; making it is not measured.

    python -m benchmarks audit                     1 M messages
    python -m benchmarks.audit 5000000             as many as you say
    python -m benchmarks.audit 5000000 FOLDER      in a lake that is made there once and kept
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pyarrow as pa

from oncewire._ground.contracts import blocks, ids, runtime, subjects
from oncewire._ground.contracts.blocks import Confirmed, Outcome
from oncewire._ground.contracts.headers import MSG_ID
from oncewire._ground.contracts.inputs import read_input
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.rules import Content, Entry, Ledger, Sending, Source
from oncewire.pipeline import spark_session, tables
from oncewire.pipeline.auditing.run import audit
from oncewire.pipeline.decode import decode
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.log import SILVER_APP, Lake
from oncewire.pipeline.lake.rules import Written
from oncewire.pipeline.lake.table import Table

MESSAGES = 1_000_000
CHUNK = 65_536
BLOCK = 256
CREATED = "2026-11-01T00:00:00Z"
BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
CREATED_NS = int(BEGIN.timestamp()) * 1_000_000_000
LEDGER = Ledger("bench", "default", "demo", "biller")
SOURCE = Source("EVENTS", CREATED, "biller_consumer", ("evt.default.demo.orders.>",), 1, False)
INPUT, EFFECT = "evt.default.demo.orders.placed", "evt.default.demo.bills.made"
NOTE = "x" * 200


class Chunk(NamedTuple):
    bronze: list[Written]
    silver: list[Written]
    blocks: list[rules.Summed]


def envelope(subject: str, key: str, number: int) -> bytes:
    body = msgspec.json.encode({"type": "T", "idempotency_key": key, "payload": {"order": number, "note": NOTE}})
    origin = ids.Origin("EVENTS", CREATED_NS, number, CREATED_NS)
    return runtime.encode_runtime(runtime.decode_runtime(body, subject=subject, origin=origin, carried={}))


def row(stream: str, sequence: int, subject: str, payload: bytes, msg_id: str) -> dict[str, object]:
    at = BEGIN + timedelta(milliseconds=sequence)
    return {
        "tenant": "default", "stream": stream, "created_ns": CREATED_NS, "incarnation": 0, "sequence": sequence,
        "subject": subject, "timestamp": at, "nanos": 0, "headers": [{"key": MSG_ID, "value": msg_id.encode()}],
        "payload": payload, "date": at.date(),
    }  # fmt: skip


def make(job: tuple[str, int, int]) -> Chunk:
    """One chunk: a block's inputs, then their effects, again and again."""
    path, first, last = job
    rows, made = [], []
    for start in range(first, last + 1, 2 * BLOCK):
        entries, sendings = [], []
        for sequence in range(start, min(start + BLOCK, last + 1)):
            payload = envelope(INPUT, f"order-{sequence}", sequence)
            rows.append(row("EVENTS", sequence, INPUT, payload, f"in.{sequence}"))
            origin = ids.Origin("EVENTS", CREATED_NS, sequence, 0)
            found = read_input(payload, subject=INPUT, origin=origin, carried={})
            head = (b"", found.identity, INPUT, payload, b"", Outcome.DONE, "EVENTS", sequence)
            entries.append(Entry(*head, 0, found.digest, 1))
            id_ = ids.effect_id(LEDGER.tenant, LEDGER.workspace, LEDGER.agent, found.identity, 0)
            sendings.append(Sending(id_, EFFECT, b"", None, "EVENTS"))
        for at, sending in enumerate(sendings):
            sequence = start + BLOCK + at
            rows.append(row("EVENTS", sequence, EFFECT, envelope(EFFECT, sending.id, sequence), sending.id))
        made.append(rules.summed(LEDGER, Content(entries, sendings, 0, {}), {"EVENTS": SOURCE}))
    bronze = pa.Table.from_pylist(rows, tables.BRONZE.schema)
    silver = decode(bronze).parts["runtime"]
    written = _write(path, tables.BRONZE, first, bronze)
    return Chunk(written, _write(path, tables.SILVER["runtime"], first, silver), made)


def _write(path: str, table: Table, first: int, rows: pa.Table) -> list[Written]:
    return list(files.write_files(Lake(path).root(table), table, f"{first:012d}", rows, is_partitioned=False))


def fill(path: Path, messages: int) -> int:
    """A whole lake; how many messages it has."""
    lake = Lake(path)
    handles = {table.name: lake.open(table) for table in tables.TABLES.values()}
    count = messages // (2 * BLOCK) * (2 * BLOCK)
    jobs = [(str(path), first, min(first + CHUNK - 1, count)) for first in range(1, count + 1, CHUNK)]
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        chunks = list(pool.imap(make, jobs))
    head, rows = rules.FIRST, []
    confirmed = Confirmed(0, {})
    summed = [one for chunk in chunks for one in chunk.blocks]
    for number, one in enumerate(summed, 1):
        head, told = rules.next_block(LEDGER, head, one, confirmed)
        confirmed = Confirmed(number, {"EVENTS": number * 2 * BLOCK, "LEDGER": number})
        id_ = blocks.announcement_id(LEDGER.id, LEDGER.name, number)
        rows.append(row("LEDGER", number, subjects.ledger(LEDGER.agent, LEDGER.id), told, id_))
    ledger = pa.Table.from_pylist(rows, tables.BRONZE.schema)
    lifetimes = {name: (name, CREATED_NS, 0) for name in ("EVENTS", "LEDGER")}
    written = [one for chunk in chunks for one in chunk.bronze]
    lake.commit(handles["bronze"], tables.BRONZE, written, tables.app_id(lifetimes["EVENTS"]), count)
    made = _write(str(path), tables.BRONZE, 0, ledger)
    opened = lake.open(tables.BRONZE)
    lake.commit(opened, tables.BRONZE, made, tables.app_id(lifetimes["LEDGER"]), len(rows))
    has = lake.open(tables.BRONZE).version()
    silver = [one for chunk in chunks for one in chunk.silver]
    lake.commit(handles["silver/runtime"], tables.SILVER["runtime"], silver, SILVER_APP, has)
    part = decode(ledger).parts["ledger"]
    table = tables.SILVER["ledger"]
    lake.commit(handles[table.name], table, _write(str(path), table, 0, part), SILVER_APP, has)
    lake.commit(handles["batches"], tables.BATCHES, [], SILVER_APP, has)
    return count + len(rows)


class Memory:
    """The most that Java, and the largest of Python's workers, held."""

    def __init__(self) -> None:
        self.java = self.worker = 0
        self.done = threading.Event()

    def look(self) -> None:
        me = psutil.Process()
        while not self.done.wait(0.5):
            workers = []
            for child in me.children(recursive=True):
                try:
                    size = child.memory_info().rss
                    if "java" in child.name():
                        self.java = max(self.java, size)
                    else:
                        workers.append(size)
                except psutil.Error:
                    continue
            self.worker = max([self.worker, *workers])

    @property
    def shown(self) -> str:
        return f"Java {self.java >> 20} MiB, the largest Python worker {self.worker >> 20} MiB"

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self.look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.done.set()
            thread.join()


def main(messages: int = MESSAGES, kept: str = "") -> None:
    with tempfile.TemporaryDirectory(prefix="ow-bench-") as folder:
        path = Path(kept or folder) / f"lake-{messages}"
        if not path.exists():
            began = time.monotonic()
            fill(path, messages)
            print(f"made in {time.monotonic() - began:.0f} s", flush=True)
        size = sum(one.stat().st_size for one in path.rglob("*.parquet")) >> 20
        count = tables.dataset(tables.open_table(path, "bronze")).count_rows()
        print(f"a lake of {count:,} messages, {size:,} MiB", flush=True)
        parts = {"spark.sql.shuffle.partitions": 4 * (os.cpu_count() or 1)}
        spark = spark_session("local[*]", spark_ui_enabled=False, spark_log_level="ERROR", **parts)
        memory = Memory()
        with memory.watched():
            verdict = audit(spark, path)
        spark.stop()
        assert verdict.is_good, [one.sentence for one in verdict.findings[:5]]
        rate = count / verdict.took_s
        print(f"audited in {verdict.took_s:.0f} s: {rate:,.0f} messages/s, Java and workers started included")
        print(f"memory: {memory.shown}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MESSAGES, *sys.argv[2:])
