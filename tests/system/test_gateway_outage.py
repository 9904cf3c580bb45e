"""A gateway while NATS is away: it says so, every frame is answered, and clients come through."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest

import oncewire
from oncewire import GatewayClient
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import ensure
from oncewire.gateway.client import Limits
from tests.support.gateway import guest, new_conversation, node, publish
from tests.support.http import Answer, get, wire
from tests.support.nats import NatsServer
from tests.support.wait import until, until_async, within

QUICK = Limits(backoff_first_ms=100, backoff_most_ms=500)


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        yield client


async def health(url: str) -> Answer:
    async with wire(int(url.rpartition(":")[2])) as web:
        return await web.ask(get("/health"))


async def is_at(url: str, status: int) -> bool:
    return status == (await health(url)).status


async def test_a_node_without_nats_is_not_healthy_and_refuses_a_join_until_it_is_back(
    server: NatsServer, client: Client
) -> None:
    conversation = new_conversation()
    await publish(client, conversation, 1, 2)
    async with node(client) as (gateway, url), guest(url) as one:
        assert 200 == (await health(url)).status
        server.kill()
        await until_async(lambda: is_at(url, 503), "a node that says that it is not ready")
        assert "NATS is away" in (await health(url)).json["problems"][0]
        error = await one.join(conversation, 0)
        assert ("error", True, "join_room", conversation) == tuple(
            error[name] for name in ("type", "retryable", "frame", "conversationId")
        )
        assert {} == gateway.node.rooms, "nobody waits there"
        server.start()
        await until_async(lambda: is_at(url, 200), "a node that follows the stream again")
        assert "joined" == (await one.join(conversation, 0))["type"]
        assert [1, 2] == await one.sequences(2)


async def test_a_nats_that_hangs_is_noticed_too(server: NatsServer, client: Client) -> None:
    """Its socket stays open, and nothing is refused."""
    async with node(client) as (_, url):
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        try:
            await until_async(lambda: is_at(url, 503), "a node that misses the heartbeats")
        finally:
            server.process.send_signal(signal.SIGCONT)
        await until_async(lambda: is_at(url, 200), "a node that follows the stream again")


async def test_a_client_that_joins_meanwhile_is_in_the_room_once_nats_is_back(
    server: NatsServer, client: Client
) -> None:
    conversation = new_conversation()
    await publish(client, conversation, 1, 2)
    async with node(client) as (gateway, url), GatewayClient(url, limits=QUICK) as reader:
        server.kill()
        room = reader.room(conversation, resume=0)
        acked = reader.room(new_conversation(), resume="acked", client_id="phone")
        await until(lambda: gateway.node.counts["refused_frames"] >= 2, "refusals")
        server.start()
        assert [1, 2] == [(await within(anext(room))).sequence for _ in range(2)]
        await within(acked.is_joined.wait())
