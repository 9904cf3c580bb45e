"""Streams for Spark tests: filled by our own client, looked at by nats-py."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig

import oncewire
from oncewire._ground.jetstream import Outgoing
from oncewire.pipeline.source import HAS_ADMISSION
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_serial = itertools.count(1)
TWO_HOURS_NS = 2 * 3600 * 1_000_000_000
NEEDS_ADMISSION = not HAS_ADMISSION
LATE = "needs Spark 4.2"


def api(server: NatsServer, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with oncewire.connect(server.url) as client:
            return await client.api(verb, body or {})

    return asyncio.run(ask())


def make_stream(server: NatsServer, prefix: str = "SP", **config: Any) -> str:
    """A stream that takes `<name>.>` and remembers ids for two hours."""
    name = f"{prefix}{next(_serial)}"
    body = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, "duplicate_window": TWO_HOURS_NS, **config}
    if config.get("max_age"):
        body["duplicate_window"] = min(TWO_HOURS_NS, config["max_age"])
    api(server, f"STREAM.CREATE.{name}", body)
    return name


def publish(server: NatsServer, messages: Sequence[Outgoing]) -> None:
    async def send() -> None:
        async with oncewire.connect(server.url) as client:
            for first in range(0, len(messages), 5_000):
                for outcome in await client.publish_many(messages[first : first + 5_000], raw=True):
                    assert not isinstance(outcome, Exception), outcome

    asyncio.run(send())


def fill(server: NatsServer, stream: str, count: int, *, first: int = 1, subject: str = "x") -> None:
    """Messages whose payload is their number."""
    publish(server, [Outgoing(f"{stream}.{subject}", b"%d" % number) for number in range(first, first + count)])


def state(server: NatsServer, stream: str) -> dict[str, Any]:
    found: dict[str, Any] = api(server, f"STREAM.INFO.{stream}")["state"]
    return found


def stored(server: NatsServer, stream: str) -> list[Any]:
    """Everything in the stream, as the witness reads it."""

    async def read() -> list[Any]:
        connection = await nats.connect(server.url)
        try:
            js = connection.jetstream()
            total = (await js.stream_info(stream)).state.messages
            found: list[Any] = []
            if total:
                own = ConsumerConfig(ack_policy=AckPolicy.NONE)
                subscription = await js.pull_subscribe("", stream=stream, config=own)
                while len(found) < total:
                    found += await subscription.fetch(min(500, total - len(found)), timeout=10)
                await subscription.unsubscribe()
            return found
        finally:
            await connection.close()

    return asyncio.run(read())


def until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that the server does by itself; each look asks it, which paces the loop."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"


def read(spark: SparkSession, server: NatsServer, stream: str, **options: Any) -> DataFrame:
    return spark.read.format("jetstream").options(url=server.url, stream=stream, **options).load()


def read_stream(spark: SparkSession, server: NatsServer, stream: str, **options: Any) -> DataFrame:
    options = {"startingOffsets": "earliest", **options}
    return spark.readStream.format("jetstream").options(url=server.url, stream=stream, **options).load()


def sequences(frame: DataFrame) -> list[int]:
    return sorted(row.sequence for row in frame.select("sequence").collect())


def run_once(frame: DataFrame, checkpoint: Any) -> list[list[int]]:
    """Run a streaming read to the end of what is there; the sequences of each micro-batch."""
    batches: list[list[int]] = []
    query = (
        frame.writeStream.foreachBatch(lambda rows, _: batches.append(sequences(rows)))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [batch for batch in batches if batch]
