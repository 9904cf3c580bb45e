"""Spark reading and writing JetStream, beside nats-py in the same Spark job and beside a program that only receives.

1 M messages of about 400 bytes, Spark `local[2]`, server and Spark on the same machine. Contenders take turns within
one run, after some turns that do not count (Java compiles what runs often: in the first queries half of what it does);
nats-py gets fewer messages, since it is the rate that counts. All sources hand over the same three columns.

A source that receives and looks at nothing shows about how far a source in Python can come on the machine at hand.

    python -m benchmarks spark                   reading and writing
    python -m benchmarks.spark reading           one of: reading, writing, growing (100 k to 5 M messages)
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import nats
import psutil
import uvloop
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import oncewire
from benchmarks.measure import ratio, table, take_turns, verdict
from oncewire._ground.errors import NotFound
from oncewire._ground.jetstream import Outgoing, protocol
from oncewire.pipeline import spark_session
from tests.support.nats import nats_server

MESSAGES = 1_000_000
SLOW_MESSAGES = 100_000
GROWING = (100_000, 300_000, 1_000_000, 2_000_000, 5_000_000)
ROUNDS = 5
WARM_ROUNDS = 8
FILL_BATCH = 10_000
STREAM = "BENCH"
PAYLOAD = b'{"type":"OrderPlaced","id":"%012d","payload":{"order":%d,"customer":4711,"note":"%b"}}'
NOTE = b"x" * 310
COLUMNS = "subject string, sequence long, payload binary"
FRAME_BYTES = 530
"""A little more than a delivery takes on the wire: nothing is handed over before it came."""


async def fill(url: str, count: int) -> None:
    async with oncewire.connect(url) as client:
        await client.api(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": ["bench.in.>"], "allow_direct": True})
        for first in range(0, count, FILL_BATCH):
            batch = [
                Outgoing(f"bench.in.orders.{number % 50}", PAYLOAD % (number, number, NOTE))
                for number in range(first, min(first + FILL_BATCH, count))
            ]
            await client.publish_many(batch)


# ---- nats-py in the same job


class NatsPySource(DataSource):
    """What one would write with nats-py: pull, and yield tuples."""

    @classmethod
    def name(cls) -> str:
        return "natspy"

    def schema(self) -> str:
        return COLUMNS

    def reader(self, schema: Any) -> NatsPyReader:  # noqa: ARG002 - Spark's shape
        return NatsPyReader(dict(self.options))


class NatsPyReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        half = int(self.options["count"]) // 2
        return [InputPartition((1, half)), InputPartition((1 + half, half))]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        first, count = partition.value
        loop = asyncio.new_event_loop()
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            inactive_threshold=60,
        )
        connection = loop.run_until_complete(nats.connect(self.options["url"]))
        pull = loop.run_until_complete(connection.jetstream().pull_subscribe("", stream=STREAM, config=config))
        left = count
        while left:
            batch = loop.run_until_complete(pull.fetch(min(left, 1_000), timeout=30))
            left -= len(batch)
            for message in batch:
                yield message.subject, message.metadata.sequence.stream, message.data
        loop.run_until_complete(connection.close())
        loop.close()


# ---- a source that looks at nothing


class BlindSource(DataSource):
    """Receives what the server sends, does not look at it, and hands over rows of that size that were made before."""

    @classmethod
    def name(cls) -> str:
        return "blind"

    def schema(self) -> str:
        return COLUMNS

    def reader(self, schema: Any) -> BlindReader:  # noqa: ARG002 - Spark's shape
        return BlindReader(dict(self.options))


class BlindReader(DataSourceReader):
    RANGE, ROWS, GATHERED_BYTES = 250_000, 4_000, 2 << 20

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(first) for first in range(1, int(self.options["count"]) + 1, self.RANGE)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        from oncewire.pipeline import stream
        from oncewire.pipeline.options import Access
        from oncewire.pipeline.wire import connect

        rows = self._rows()
        wire = connect(Access(servers=(self.options["url"],)))
        consumer, _ = stream.create_consumer(wire, STREAM, partition.value, ())
        ask_for(wire, consumer, self.RANGE)
        buffer, handed = memoryview(bytearray(2 * self.GATHERED_BYTES)), 0
        end, tail, is_done = b".%d.%d." % (partition.value + self.RANGE - 1, self.RANGE), b"", False
        while not is_done:
            filled = 0
            while filled < self.GATHERED_BYTES and not is_done:
                got = wire.receive_into(buffer[filled:], 30.0)
                assert got, "the server sent nothing for 30 s"
                filled += got
                tail = (tail + bytes(buffer[filled - min(got, 4_096) : filled]))[-8_192:]
                is_done = end in tail
            reached = self.RANGE if is_done else min(self.RANGE, handed + filled // FRAME_BYTES)
            while handed < reached:
                yield rows.slice(0, min(self.ROWS, reached - handed))
                handed += min(self.ROWS, reached - handed)
        wire.close()

    def _rows(self) -> Any:
        import pyarrow as pa

        payload = PAYLOAD % (0, 0, NOTE)
        columns = {
            "subject": pa.array(["bench.in.orders.11"] * self.ROWS),
            "sequence": pa.array(range(self.ROWS), pa.int64()),
            "payload": pa.array([payload] * self.ROWS, pa.binary()),
        }
        return pa.RecordBatch.from_pydict(columns)


def ask_for(wire: Any, consumer: str, count: int) -> None:
    """Pulls for so many messages, all at once."""
    ask = protocol.encode_subject(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{consumer}")
    for first in range(0, count, 20_000):
        body = msgspec.json.encode({"batch": min(20_000, count - first), "expires": 60_000_000_000})
        wire.send(protocol.encode_pub(ask, wire.inbox + b".0", body))


def write_one_by_one(url: str) -> Callable[[Iterator[Any]], None]:
    """What one would write first: each message confirmed before the next."""

    async def send(rows: Iterator[Any]) -> None:
        connection = await nats.connect(url)
        js = connection.jetstream()
        own = uuid.uuid4().hex
        for number, row in enumerate(rows):
            await js.publish(row.subject, bytes(row.payload), headers={"Nats-Msg-Id": f"{own}-{number}"})
        await connection.close()

    return lambda rows: asyncio.run(send(rows))


def write_in_windows(url: str) -> Callable[[Iterator[Any]], None]:
    """nats-py at its best: thousands unconfirmed at a time."""

    async def send(rows: list[Any]) -> None:
        connection = await nats.connect(url)
        js = connection.jetstream(publish_async_max_pending=4_000)
        own = uuid.uuid4().hex
        futures = [
            await js.publish_async(row.subject, bytes(row.payload), headers={"Nats-Msg-Id": f"{own}-{number}"})
            for number, row in enumerate(rows)
        ]
        await asyncio.gather(*futures)
        await connection.close()

    return lambda rows: asyncio.run(send(list(rows)))


# ---- a program that only publishes

PUBLISH = """
import asyncio, sys, time, uuid
import nats, uvloop
url, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def main():
    connection = await nats.connect(url)
    js = connection.jetstream(publish_async_max_pending=4_000)
    own, body = uuid.uuid4().hex, b"x" * size
    began = time.perf_counter()
    futures = [
        await js.publish_async("bench.out.x", body, headers={"Nats-Msg-Id": f"{own}-{number}"})
        for number in range(count)
    ]
    await asyncio.gather(*futures)
    print(time.perf_counter() - began)
    await connection.close()
uvloop.run(main())
"""


# ---- a program that only receives

RECEIVE = """
import sys, time
from benchmarks.spark import STREAM, ask_for
from oncewire.pipeline import stream
from oncewire.pipeline.options import Access
from oncewire.pipeline.wire import connect
url, count = sys.argv[1], int(sys.argv[2])
wire = connect(Access(servers=(url,)))
consumer, _ = stream.create_consumer(wire, STREAM, 1, ())
buffer = memoryview(bytearray(4 << 20))
last = b".%d.%d." % (count, count)
began = time.perf_counter()
ask_for(wire, consumer, count)
is_done, tail = False, b""
while not is_done:
    got = wire.receive_into(buffer, 30.0)
    assert got, "the server sent nothing for 30 s"
    is_done = last in tail + bytes(buffer[max(0, got - 4_096):got])
    tail = bytes(buffer[max(0, got - 100):got])
print(time.perf_counter() - began)
"""


def receive_only(url: str, count: int) -> float:
    command = [sys.executable, "-c", RECEIVE, url, str(count)]
    return count / float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# ---- the runs


class Bench:
    def __init__(self, spark: SparkSession, url: str, folder: str) -> None:
        self.spark = spark
        self.url = url
        self.parquet = f"{folder}/rows"
        self.few_parquet = f"{folder}/few"

    def save_rows(self) -> None:
        """What both sinks write: a file per partition, four of 250,000 rows for us, two of 50,000 for nats-py."""
        self.source(MESSAGES).write.parquet(self.parquet)
        self.source(SLOW_MESSAGES, minPartitions="2").write.parquet(self.few_parquet)

    def source(self, count: int, **more: str) -> DataFrame:
        options = {"url": self.url, "stream": STREAM, "endingOffsets": str(count + 1), **more}
        return self.spark.read.format("jetstream").options(**options).schema(COLUMNS).load()

    def other(self, name: str, count: int) -> DataFrame:
        return self.spark.read.format(name).options(url=self.url, count=str(count)).load()

    @staticmethod
    def rate(frame: DataFrame, count: int) -> float:
        began = time.perf_counter()
        ((rows, _),) = frame.selectExpr("count(sequence)", "sum(octet_length(payload))").collect()
        assert count == rows, f"{rows} of {count}"
        return count / (time.perf_counter() - began)

    async def write(self, parquet: str, count: int, save: Callable[[DataFrame], None]) -> float:
        """Into a stream that is empty and knows no ids yet."""
        await _make_anew(self.url, "BENCHOUT", "bench.out.>")
        frame = self.spark.read.parquet(parquet).selectExpr("'bench.out.x' as subject", "payload")
        began = time.perf_counter()
        save(frame)
        took = time.perf_counter() - began
        stored = (await _api(self.url, "STREAM.INFO.BENCHOUT"))["state"]["messages"]
        assert count == stored, f"{stored} of {count}"
        return count / took

    async def write_ours(self) -> float:
        def save(frame: DataFrame) -> None:
            frame.write.format("jetstream").options(url=self.url).mode("append").save()

        return await self.write(self.parquet, MESSAGES, save)

    async def publish_only(self) -> float:
        """One nats-py program without Spark, with thousands unconfirmed at a time."""
        await _make_anew(self.url, "BENCHOUT", "bench.out.>")
        size = len(PAYLOAD % (0, 0, NOTE))
        command = [sys.executable, "-c", PUBLISH, self.url, str(SLOW_MESSAGES), str(size)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        stored = (await _api(self.url, "STREAM.INFO.BENCHOUT"))["state"]["messages"]
        assert stored == SLOW_MESSAGES, f"{stored} of {SLOW_MESSAGES}"
        return SLOW_MESSAGES / float(done.stdout)

    async def write_theirs(self, way: Callable[[str], Callable[[Iterator[Any]], None]]) -> float:
        def save(frame: DataFrame) -> None:
            frame.foreachPartition(way(self.url))

        return await self.write(self.few_parquet, SLOW_MESSAGES, save)


async def take_warm_turns(contenders: dict[str, Callable[[], Awaitable[float]]]) -> dict[str, list[float]]:
    await take_turns(contenders, WARM_ROUNDS)
    return await take_turns(contenders, ROUNDS)


def turn(run: Callable[[], float]) -> Callable[[], Awaitable[float]]:
    async def once() -> float:
        return run()

    return once


async def reading(bench: Bench) -> None:
    runs = await take_warm_turns(
        {
            "nats-py in Spark": turn(lambda: bench.rate(bench.other("natspy", SLOW_MESSAGES), SLOW_MESSAGES)),
            "oncewire in Spark": turn(lambda: bench.rate(bench.source(MESSAGES), MESSAGES)),
            "a source that looks at nothing": turn(lambda: bench.rate(bench.other("blind", MESSAGES), MESSAGES)),
            "receive only, no Spark": turn(lambda: receive_only(bench.url, MESSAGES)),
            "the same rows from Parquet": turn(lambda: bench.rate(bench.spark.read.parquet(bench.parquet), MESSAGES)),
        }
    )
    print(table("reading, messages of about 400 bytes", runs, "nats-py in Spark"))
    print(verdict("source against nats-py", ratio(runs, "oncewire in Spark", "nats-py in Spark")[0], 10.0))
    print(verdict("source against receive only", ratio(runs, "oncewire in Spark", "receive only, no Spark")[0], 0.7))
    blind = ratio(runs, "a source that looks at nothing", "receive only, no Spark")
    print(f"  a source that looks at nothing: {blind[0]:.2f}× ({blind[1]:.2f}–{blind[2]:.2f}) receive only")


async def writing(bench: Bench) -> None:
    runs = await take_warm_turns(
        {
            "nats-py, one by one": lambda: bench.write_theirs(write_one_by_one),
            "nats-py, windows of 4,000": lambda: bench.write_theirs(write_in_windows),
            "nats-py, the same in one program without Spark": bench.publish_only,
            "oncewire in Spark": bench.write_ours,
        }
    )
    print(table("writing, every message confirmed", runs, "nats-py, windows of 4,000"))
    for theirs in (name for name in runs if name.startswith("nats-py")):
        print(verdict(f"sink against {theirs}", ratio(runs, "oncewire in Spark", theirs)[0], 7.0))


def growing(bench: Bench) -> None:
    print("growth: seconds by number of messages, and the memory of the largest Python worker")
    for size in GROWING:
        rate = bench.rate(bench.source(size), size)
        print(f"  {size:>9,}  {size / rate:8.2f} s  {rate:>10,.0f}/s  {worker_mb():6.0f} MiB", flush=True)


def worker_mb() -> float:
    """Workers stay after a query, with what they needed."""
    largest = 0
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may end while we look
            largest = max(largest, one.memory_info().rss if "oncewire.pipeline.daemon" in one.cmdline() else 0)
    return largest / 2**20


def main(*pieces: str) -> None:
    wanted = pieces or ("reading", "writing")
    with nats_server() as server, tempfile.TemporaryDirectory(prefix="ow-bench-") as folder:
        uvloop.run(fill(server.url, max(GROWING) if "growing" in wanted else MESSAGES))
        spark = spark_session(
            "local[2]",
            spark_ui_enabled=False,
            spark_log_level="ERROR",
            spark_sql_shuffle_partitions=2,
            spark_sql_files_openCostInBytes=128 * 1024 * 1024,  # a partition per Parquet file
        )
        spark.dataSource.register(NatsPySource)
        spark.dataSource.register(BlindSource)
        bench = Bench(spark, server.url, folder)
        bench.save_rows()
        if "reading" in wanted:
            asyncio.run(reading(bench))
            print(f"  the largest Python worker after reading: {worker_mb():.0f} MiB")
        if "writing" in wanted:
            asyncio.run(writing(bench))
            print(f"  the largest Python worker after writing: {worker_mb():.0f} MiB")
        if "growing" in wanted:
            growing(bench)
        spark.stop()


async def _api(url: str, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    async with oncewire.connect(url) as client:
        return await client.api(verb, body or {})


async def _make_anew(url: str, name: str, subject: str) -> None:
    async with oncewire.connect(url) as client:
        with suppress(NotFound):
            await client.api(f"STREAM.DELETE.{name}", {})
        await client.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [subject], "allow_direct": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
