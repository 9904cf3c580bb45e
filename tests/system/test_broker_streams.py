"""Streams over plain HTTP, as existing clients read them: line by line, on both engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import pytest

from oncewire._ground.contracts.broker import Delivery
from oncewire.broker.client import BrokerClient, Message
from tests.support.http import Wire, get, post, wire
from tests.support.nats import NatsServer, nats_server
from tests.support.scenarios import jetstream_broker, local_broker
from tests.support.streams import unique
from tests.support.wait import until_async


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@pytest.fixture(params=["local", "jetstream"])
async def port(request: pytest.FixtureRequest, server: NatsServer, tmp_path: Path) -> AsyncIterator[int]:
    settings = {"tick_ms": "10", "wal": ""}
    if request.param == "local":
        starting = local_broker(settings, tmp_path / "wal")
    else:
        starting = jetstream_broker(settings, server.url)
    async with starting as number:
        yield number


@pytest.fixture
async def topic(port: int) -> str:
    name = unique("topic")
    assert 201 == await post_to(port, "/v1/topics", {"name": name})
    return name


async def post_to(port: int, path: str, body: dict[str, Any]) -> int:
    async with wire(port) as client:
        return (await client.ask(post(path, json.dumps(body).encode()))).status


async def produce(port: int, topic: str, *values: str, **envelope: Any) -> None:
    more = {"envelope": envelope} if envelope else {}
    lines = [json.dumps({"topic": topic, "value": value, **more}) for value in values]
    async with wire(port) as client:
        answer = await client.ask(post("/v1/produce", "\n".join(lines).encode(), "Content-Type: application/x-ndjson"))
    assert 200 == answer.status
    assert all("offset" in json.loads(line) for line in answer.body.splitlines()), answer.body


class Stream:
    """A consume stream, line by line."""

    def __init__(self, client: Wire) -> None:
        self._client = client
        self._left = b""

    async def line(self) -> dict[str, Any]:
        """The next delivery."""
        while b"\n" not in self._left:
            self._left += await self._client.chunk()
        line, _, self._left = self._left.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    async def lines(self, count: int) -> list[dict[str, Any]]:
        return [await self.line() for _ in range(count)]


async def stream_of(client: Wire, topic: str, owner: str = "a", **more: Any) -> Stream:
    wanted = {"topic": topic, "group": "g", "owner": owner, "lease_ms": 60_000, **more}
    await client.send(get(f"/v1/consume?{urlencode(wanted)}"))
    status, _ = await client.head()
    assert 200 == status
    return Stream(client)


@pytest.mark.parametrize("size", [10, 50_000])
async def test_a_stream_gets_a_whole_backlog_without_anything_stirring_the_group(
    port: int, topic: str, size: int
) -> None:
    values = [f"{number}:{'x' * size}" for number in range(200)]
    for first in range(0, 200, 20):
        await produce(port, topic, *values[first : first + 20])
    async with wire(port) as client:
        stream = await stream_of(client, topic, in_flight=200)
        assert values == [line["value"] for line in await stream.lines(200)]


class Tally:
    """What a worker saw: how often it ran for each value, and which acks were refused."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.refused = 0


async def work(port: int, topic: str, owner: str, tally: Tally, *, work_s: float, lease_ms: int) -> None:
    """A worker as existing clients write it: reads the stream line by line, works on one message, acks it."""
    async with wire(port) as client:
        stream = await stream_of(client, topic, owner, lease_ms=lease_ms)
        while True:
            line = await stream.line()
            await asyncio.sleep(work_s)  # the work itself: what is tested is how long the next message waits for it
            tally.runs[line["value"]] += 1
            place = {"partition": line["partition"], "offset": line["offset"]}
            status = await post_to(port, "/v1/ack", {"topic": topic, "group": "g", "owner": owner, **place})
            tally.refused += status != 204


@contextlib.asynccontextmanager
async def working(*workers: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def is_settled(port: int, topic: str) -> bool:
    async with wire(port) as client:
        shown = (await client.ask(get(f"/v1/topics/{topic}"))).json
    return bool(shown["groups"]) and shown["groups"][0]["lag"] == 0


async def letters_of(port: int, topic: str) -> list[Any]:
    async with wire(port) as client:
        topics = (await client.ask(get("/v1/topics"))).json["topics"]
        if f"dlq.{topic}" not in topics:
            return []
        wanted = {"topic": f"dlq.{topic}", "group": "look", "owner": "x", "max": 100}
        return (await client.ask(get(f"/v1/consume?{urlencode(wanted)}"))).body.splitlines()


async def test_a_slow_worker_with_a_short_lease_runs_each_message_once_and_none_is_a_dead_letter(
    port: int, topic: str
) -> None:
    """60 messages take three seconds, and each has a lease of a quarter of that."""
    values = [f"v{number}" for number in range(60)]
    await produce(port, topic, *values, retry_policy={"max_attempts": 3})
    tally = Tally()
    async with working(work(port, topic, "a", tally, work_s=0.05, lease_ms=750)):
        await until_async(lambda: is_settled(port, topic))
    assert Counter(values) == tally.runs
    assert 0 == tally.refused
    assert [] == await letters_of(port, topic)


async def test_three_streams_of_a_group_share_a_backlog(port: int, topic: str) -> None:
    await produce(port, topic, *(f"v{number}" for number in range(60)))
    tallies = {owner: Tally() for owner in "abc"}
    workers = [work(port, topic, owner, tally, work_s=0.02, lease_ms=60_000) for owner, tally in tallies.items()]
    async with working(*workers):
        await until_async(lambda: is_settled(port, topic))
    shares = [sum(tally.runs.values()) for tally in tallies.values()]
    assert 60 == sum(shares)
    assert max(shares) <= 1.5 * min(shares)


async def test_the_client_s_own_stream_runs_each_message_once_with_its_defaults(port: int, topic: str) -> None:
    """100 messages of 30 ms take longer than the default lease. What came twice would come before the last message."""
    values = [f"v{number}" for number in range(100)]
    runs: Counter[str] = Counter()
    async with BrokerClient(f"http://127.0.0.1:{port}") as client:
        await client.produce_many([Message(topic, value) for value in values])
        async with contextlib.aclosing(cast(AsyncGenerator[Delivery, None], client.consume(topic, "g"))) as deliveries:
            async for delivery in deliveries:
                if delivery.value == "last":
                    break
                await asyncio.sleep(0.03)  # the work
                runs[delivery.value] += 1
                await client.ack(client.lease(topic, "g", delivery))
                if delivery.value == values[-1]:
                    await client.produce(topic, "last")
    assert Counter(values) == runs


async def test_a_stream_that_does_nothing_uses_up_attempts_no_faster_than_its_lease(port: int, topic: str) -> None:
    """It gets all it asked for once, and from then on one message for each lease: the others keep their attempts."""
    await produce(port, topic, *(f"v{number}" for number in range(10)), retry_policy={"max_attempts": 99})
    async with wire(port) as client:
        stream = await stream_of(client, topic, lease_ms=100, in_flight=10)
        lines = [(line["offset"], line["attempts"]) for line in await stream.lines(16)]
    assert [(offset, 1) for offset in range(10)] == lines[:10]
    assert [(0, attempts) for attempts in range(2, 8)] == lines[10:]
