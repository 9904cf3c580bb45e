"""Many messages that one answer confirms: each is where its producer was told, whoever else writes to the stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from oncewire._ground.contracts.broker import ProduceBody
from oncewire._ground.contracts.records import decode_document
from oncewire._ground.jetstream import Client, Outgoing, connect
from oncewire.broker.engine import Produced
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from oncewire.broker.jetstream.sending import Tail
from tests.support.brokerfences import asked
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import unique
from tests.support.wait import within

MANY = 64
ROUNDS, ROUNDS_MAX = 20, 400
LEASE_MS = 60_000
"""Longer than a busy machine can stand still: who owns what is not tested here."""


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@contextlib.asynccontextmanager
async def node(url: str) -> AsyncIterator[JetStreamEngine]:
    async with connect(url) as client:
        engine = await open_jetstream(client, owner_lease_ms=LEASE_MS)
        try:
            yield engine
        finally:
            await engine.stop()


async def topic_of(engine: JetStreamEngine, partitions: int = 1) -> str:
    """A new topic; its partitions are taken."""
    name = unique("ingest")
    await asked(engine.create_topic, "", name, partitions)
    for number in range(partitions):
        await asked(engine.produce, "", ProduceBody(topic=name, value="first", key=f"{number}"))
    return name


def begin(engine: JetStreamEngine, topic: str, values: list[str]) -> asyncio.Future[Any]:
    """All at once, as clients that ask together do."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    engine.produce_many("", [ProduceBody(topic=topic, value=one, key=one) for one in values], done.set_result)
    return done


async def where(engine: JetStreamEngine, topic: str, told: list[Produced]) -> list[str]:
    """The values that stand where the producers were told."""
    stream = engine.node.catalog.topics["", topic].stream
    found: dict[int, str] = {}
    sequence = 1
    while page := await engine.node.client.get_batch(stream, sequence=sequence):
        found |= {one.sequence: decode_document(one.payload).value for one in page if one.payload.startswith(b"{")}
        sequence = page[-1].sequence + 1
    return [found[one.offset + 1] for one in told]


async def test_many_without_keys_go_by_fast_ingest(server: NatsServer) -> None:
    async with node(server.url) as engine:
        topic = await topic_of(engine)
        values = [f"v{n}" for n in range(MANY)]
        told = begin(engine, topic, values)
        while not told.done() and not engine.node.outlet.ingests:
            await asyncio.sleep(0)
        assert 1 == len(engine.node.outlet.ingests)
        assert values == await where(engine, topic, await within(told))


async def test_partitions_of_one_node_are_no_strangers_to_each_other(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few messages go one by one, many by fast ingest: neither disturbs what is known of the stream's end."""
    alone: list[bool] = []
    take = Tail.take

    def watched(tail: Tail, count: int, last: int) -> bool:
        alone.append(take(tail, count, last))
        return alone[-1]

    monkeypatch.setattr(Tail, "take", watched)
    async with node(server.url) as engine:
        topic = await topic_of(engine, partitions=4)

        async def client(number: int) -> None:
            for turn in range(ROUNDS):
                values = [f"{number}-{turn}-{n}" for n in range((turn * 7 + number * 5) % MANY + 1)]
                assert values == await where(engine, topic, await within(begin(engine, topic, values)))

        await asyncio.gather(*(client(number) for number in range(8)))
    assert alone, "none went by fast ingest: this shows nothing"
    assert all(alone)


async def test_offsets_are_right_when_others_write_between(server: NatsServer) -> None:
    async with node(server.url) as engine, connect(server.url) as other:
        topic = await topic_of(engine)
        gaps = turn = 0
        async with writing(other, f"{engine.node.catalog.topics['', topic].prefix}.keys"):
            while turn < ROUNDS or (not gaps and turn < ROUNDS_MAX):
                values = [f"{turn}-{n}" for n in range(MANY)]
                produced = await within(begin(engine, topic, values))
                assert values == await where(engine, topic, produced)
                gaps += produced[-1].offset - produced[0].offset >= MANY
                turn += 1
        assert gaps, "nobody wrote between: this shows nothing"


@contextlib.asynccontextmanager
async def writing(client: Client, subject: str) -> AsyncIterator[None]:
    async def write() -> None:
        while True:
            await client.publish_many([Outgoing(subject, b"[]") for _ in range(MANY)])

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_stream_of_an_older_server_learns_it(server: NatsServer) -> None:
    async with node(server.url) as engine:
        topic = await topic_of(engine)
        listed = engine.node.catalog.topics["", topic]
        info = await engine.node.client.api(f"STREAM.INFO.{listed.stream}")
        older = info["config"] | {"allow_batched": False}
        await engine.node.client.api(f"STREAM.UPDATE.{listed.stream}", older)
    async with node(server.url) as engine:
        values = [f"v{n}" for n in range(MANY)]
        assert values == await where(engine, topic, await within(begin(engine, topic, values)))
