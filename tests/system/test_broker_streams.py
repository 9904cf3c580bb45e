"""Streams over plain HTTP, as existing clients read them: line by line, on both engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.http import Wire, get, post, wire
from tests.support.nats import NatsServer, nats_server
from tests.support.scenarios import jetstream_broker, local_broker
from tests.support.streams import unique


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
        stream = await stream_of(client, topic)
        assert values == [line["value"] for line in await stream.lines(200)]
