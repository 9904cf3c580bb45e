"""The lake: streams into bronze and silver, beside the bare source and beside the job that a user would write.

    python -m benchmarks pipeline              all pieces
    python -m benchmarks.pipeline core         what a message costs one core to be decoded, without Spark
    python -m benchmarks.pipeline decoding     400 k messages from a stream, read by their contracts, thrown away
    python -m benchmarks.pipeline landing      the same messages into tables, beside others
    python -m benchmarks.pipeline dedup        100 k messages into silver tables of 100 k and of 5 M rows

Messages are complete runtime envelopes of about 600 bytes; Spark is `local[2]`, server and Spark on one machine. Each
contender begins with an empty lake or checkpoint and ends when all is committed. The first turn does not count.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import oncewire
from benchmarks.audit import CREATED_NS, INPUT, Memory, envelope, row
from benchmarks.measure import ratio, table, take_turns, verdict
from oncewire._ground.jetstream import Outgoing
from oncewire.pipeline import bronze, silver, spark_session, tables
from oncewire.pipeline.columns import fixed_width
from oncewire.pipeline.decode import decode
from oncewire.pipeline.deriving import Silver
from oncewire.pipeline.lake import files
from oncewire.pipeline.lake.keep import Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Reading, Reads, State, Streams, register
from oncewire.pipeline.run import Pipeline
from oncewire.pipeline.tables import BRONZE, SILVER
from tests.support.nats import nats_server

MESSAGES = 400_000
ROUNDS = 2
BARE = "the bare source"
Contenders = dict[str, Callable[[], Awaitable[float]]]
STREAM = "EVENTS"
PLAIN_SCHEMA = "id string, type string, idempotency_key string, ts long, tenant string, payload string"
CORE_ROWS = 60_000
CORE_ROUNDS = 7
BATCH = 100_000
SIZES = (100_000, 5_000_000)
FILE_ROWS = 250_000


async def fill(url: str, count: int) -> None:
    async with oncewire.connect(url) as client:
        await client.api(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": ["evt.>"], "allow_direct": True})
        for first in range(0, count, 10_000):
            some = range(first, min(first + 10_000, count))
            await client.publish_many([Outgoing(INPUT, envelope(INPUT, f"order-{at}", at)) for at in some])


class Landing:
    """Every contender reads the whole stream, into something new."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark = spark
        self.url = url
        self.folder = folder
        self.turns = 0

    def fresh(self) -> Path:
        shutil.rmtree(self.folder / str(self.turns), ignore_errors=True)
        self.turns += 1
        return self.folder / str(self.turns)

    def run(self, work: Callable[[Path], None]) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            fresh = self.fresh()
            began = time.perf_counter()
            work(fresh)
            return MESSAGES / (time.perf_counter() - began)

        return once

    def source(self) -> DataFrame:
        return bronze(self.spark, stream=STREAM, is_streaming=True, url=self.url, startingOffsets="earliest")

    def bare(self, folder: Path) -> None:
        options = {"url": self.url, "stream": STREAM, "startingOffsets": "earliest", "maxRecordsPerTrigger": 200_000}
        drain(self.spark.readStream.format("jetstream").options(**options).load(), folder)

    def decoded(self, folder: Path) -> None:
        drain(silver(self.source(), "runtime"), folder)

    def bronze_alone(self, folder: Path) -> None:
        register(self.spark)
        reads, lake = Reads({"url": self.url}), Lake(folder)
        streams = Streams(reads.access)
        reading = Reading(self.spark, lake, STREAM, reads, streams, lambda _: None)
        while reading.state is not State.DONE:
            reading.look(time.monotonic(), is_once=True)
            assert reading.error is None, reading.error
            time.sleep(0.02)
        streams.close()

    def both(self, folder: Path) -> None:
        pipeline = Pipeline(self.spark, Lake(folder), [STREAM], Reads({"url": self.url}), keeping=Keeping())
        pipeline.once(threading.Event())
        rows = tables.dataset(tables.open_table(folder, "silver/runtime")).count_rows()
        assert rows == MESSAGES, f"{rows} of {MESSAGES}"

    def plain(self, folder: Path) -> None:
        """from_json, a watermark, dropDuplicatesWithinWatermark, the file sink."""
        options = {"url": self.url, "stream": STREAM, "startingOffsets": "earliest", "maxRecordsPerTrigger": 200_000}
        read = self.spark.readStream.format("jetstream").options(**options).load()
        told = read.selectExpr("sequence", "timestamp", f"from_json(cast(payload as string), '{PLAIN_SCHEMA}') as e")
        unique = told.selectExpr("sequence", "timestamp", "e.*").withWatermark("timestamp", "1 hour")
        unique = unique.dropDuplicatesWithinWatermark(["idempotency_key"])
        writer = unique.writeStream.format("parquet").option("path", str(folder / "rows"))
        writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(
            availableNow=True
        ).start().awaitTermination()


def drain(frame: DataFrame, folder: Path) -> None:
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


def core() -> None:
    batch = pa.Table.from_pylist(
        [row(STREAM, at + 1, INPUT, envelope(INPUT, f"order-{at}", at), f"in.{at}") for at in range(CORE_ROWS)],
        BRONZE.schema,
    )
    took = []
    for _ in range(CORE_ROUNDS + 1):  # the first turn does not count
        began = time.process_time()
        decode(batch)
        took.append((time.process_time() - began) / CORE_ROWS * 1e6)
    middle = statistics.median(took[1:])
    print(f"a message is decoded in {middle:.1f} µs of one core ({min(took[1:]):.1f}–{max(took[1:]):.1f})")


async def decoding(spark: SparkSession, folder: Path) -> None:
    with nats_server() as server:
        await fill(server.url, MESSAGES)
        bench = Landing(spark, server.url, folder)
        contenders = {BARE: bench.run(bench.bare), "the source, decoded": bench.run(bench.decoded)}
        runs = await measured(contenders, ROUNDS + 1)
    print(table(f"{MESSAGES:,} messages of a stream, decoded", runs, BARE))
    print(verdict("decoded, against the bare source", ratio(runs, "the source, decoded", BARE)[0], 0.5))


async def landing(spark: SparkSession, folder: Path) -> None:
    plain = "from_json, dropDuplicates…, file sink"
    with nats_server() as server:
        await fill(server.url, MESSAGES)
        bench = Landing(spark, server.url, folder)
        contenders = {
            BARE: bench.run(bench.bare),
            "bronze": bench.run(bench.bronze_alone),
            "bronze and silver": bench.run(bench.both),
            plain: bench.run(bench.plain),
        }
        runs = await measured(contenders, ROUNDS)
    print(table(f"{MESSAGES:,} messages of a stream into the lake", runs, BARE))
    for name in ("bronze", "bronze and silver"):
        print(verdict(f"{name}, against the bare source", ratio(runs, name, BARE)[0], 0.5))
    print(verdict("bronze and silver against the plain job", ratio(runs, "bronze and silver", plain)[0], 1.0))


async def measured(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    memory = Memory()
    with memory.watched():
        await take_turns(contenders, 1)
        runs = await take_turns(contenders, rounds)
    print(f"  memory: {memory.shown}")
    return runs


# ---- dedup


def silver_of(lake: Lake, rows: int) -> None:
    """A silver table with as many rows: random keys and digests, all else the same."""
    table_ = SILVER["runtime"]
    written = []
    chance = np.random.default_rng(1)
    for first in range(0, rows, FILE_ROWS):
        count = min(FILE_ROWS, rows - first)
        made: dict[str, Any] = {
            "sequence": pa.array(np.arange(first, first + count)),
            "key": fixed_width(chance.integers(0, 256, (count, 16), np.uint8)),
            "digest": fixed_width(chance.integers(0, 256, (count, 32), np.uint8)),
            "identity": pa.array([f"key:old-{at}" for at in range(first, first + count)]),
        }
        at = datetime(2026, 11, 1, tzinfo=UTC)
        same: dict[str, Any] = {"stream": STREAM, "created_ns": CREATED_NS, "incarnation": 0, "subject": INPUT}
        same |= {"timestamp": at, "event_time": at, "date": at.date(), "tenant": "default", "payload": "{}"}
        columns = [
            made[name] if name in made else pa.repeat(pa.scalar(same.get(name), kind), count)
            for name, kind in table_.columns
        ]
        whole = pa.Table.from_arrays(columns, schema=table_.schema)
        written += files.write_files(lake.root(table_), table_, f"{first:012d}", whole, is_partitioned=False)
    lake.commit(lake.open(table_), table_, written, "bench", 1)


def dedup(spark: SparkSession, folder: Path) -> None:
    """The same batch into silver tables of several sizes. Half of it has been seen within the batch."""
    rows = [row(STREAM, at + 1, INPUT, envelope(INPUT, f"new-{at // 2}", at // 2), f"in.{at}") for at in range(BATCH)]
    batch = pa.Table.from_pylist(rows, BRONZE.schema)
    print(f"a batch of {BATCH:,} messages into a silver table of some size")
    for size in (SIZES[0], *SIZES):  # the first turn does not count
        path = folder / f"dedup-{size}"
        shutil.rmtree(path, ignore_errors=True)
        lake = Lake(path)
        silver_of(lake, size)
        parts = [batch.slice(first, BATCH // 4) for first in range(0, BATCH, BATCH // 4)]
        written = [
            one
            for at, part in enumerate(parts)
            for one in files.write_files(lake.root(BRONZE), BRONZE, f"{at}", part, is_partitioned=False)
        ]
        lake.commit(lake.open(BRONZE), BRONZE, written, tables.app_id((STREAM, CREATED_NS, 0)), BATCH)
        memory = Memory()
        with memory.watched():
            began = time.perf_counter()
            done = Silver(spark, lake).step()
            took = time.perf_counter() - began
        assert done is not None
        assert done.total("duplicates") == BATCH // 2, done
        print(f"  {size:>9,} rows  {took:6.2f} s  {BATCH / took:>9,.0f}/s  {memory.shown}", flush=True)
        shutil.rmtree(path)


def main(*pieces: str) -> None:
    wanted = pieces or ("core", "decoding", "landing", "dedup")
    if "core" in wanted:
        core()
    if wanted == ("core",):
        return
    with tempfile.TemporaryDirectory(prefix="ow-bench-") as folder:
        spark = spark_session(
            "local[2]", spark_ui_enabled=False, spark_log_level="ERROR", spark_sql_shuffle_partitions=2
        )
        if "decoding" in wanted:
            asyncio.run(decoding(spark, Path(folder)))
        if "landing" in wanted:
            asyncio.run(landing(spark, Path(folder)))
        if "dedup" in wanted:
            dedup(spark, Path(folder))
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
