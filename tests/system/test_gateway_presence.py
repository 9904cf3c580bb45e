"""Presence and acks, over two nodes on one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import oncewire
from oncewire._ground.jetstream import Client
from oncewire._ground.topology import ensure
from oncewire.gateway import presence
from tests.support.gateway import Guest, guest, new_conversation, node, publish, running
from tests.support.nats import NatsServer
from tests.support.wait import until, until_async


@pytest.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        yield client


async def seen(one: Guest) -> tuple[str, str]:
    event = (await one.next())["event"]
    return event["userId"], event["state"]


async def test_presence_reaches_every_node_and_a_disconnect_is_offline(client: Client) -> None:
    conversation = new_conversation()
    async with node(client) as (_, here), node(client) as (_, there), guest(here) as one:
        await one.join(conversation)
        async with guest(there) as other:
            await other.join(conversation)
            for state in ("online", "typing", "idle"):
                await other.say("presence", conversation, state=state)
                assert (other.hello["id"], state) == await seen(one)
                assert (other.hello["id"], state) == await seen(other)
        assert (other.hello["id"], "offline") == await seen(one)
        async with guest(there) as silent:
            await silent.join(conversation)
        await one.hears_nothing_more()


async def test_who_types_and_says_nothing_more_is_online_again(client: Client) -> None:
    conversation = new_conversation()
    async with node(client) as (gateway, url), guest(url) as one:
        await one.join(conversation)
        await one.say("presence", conversation, state="typing")
        assert "typing" == (await seen(one))[1]
        gateway.presences.lapse(asyncio.get_running_loop().time() + presence.TYPING_S_MAX + 1)
        assert "online" == (await seen(one))[1]


async def test_clients_of_a_killed_node_are_offline_once_it_is_silent(
    client: Client, shared_server: NatsServer
) -> None:
    conversation = new_conversation()
    with running(shared_server.url) as gone:
        async with node(client) as (gateway, url), guest(url) as one:
            await one.join(conversation)
            async with guest(gone.url) as other:
                await other.join(conversation)
                await other.say("presence", conversation, state="online")
                assert "online" == (await seen(one))[1]
                gone.kill()
                now = asyncio.get_running_loop().time()
                gateway.presences.lapse(now)
                await one.hears_nothing_more()
                gateway.presences.lapse(now + presence.SILENT_S_MAX + 5)
                assert (other.hello["id"], "offline") == await seen(one)


async def test_a_client_resumes_after_its_last_ack_at_another_node(client: Client) -> None:
    conversation, name = new_conversation(), new_conversation()
    await publish(client, conversation, 1, 9)
    async with node(client) as (first, here), node(client) as (_, there):
        async with guest(here) as one:
            await one.join(conversation, 0, clientId=name)
            assert list(range(1, 10)) == await one.sequences(9)
            for n in (3, 6, 5):
                await one.say("ack", conversation, sequence=n, receivedMessageIds=["m1"])
            await one.hears_nothing_more()
        await until(lambda: first.acks.written)
        assert 1 == first.acks.written, "one write for all that waited"

        async def resumed() -> bool:
            async with guest(there) as again:
                await again.join(conversation, clientId=name, resume="acked")
                return [7, 8, 9] == await again.sequences(3)

        await until_async(resumed)


async def test_an_ack_never_moves_back_whichever_node_writes_it(client: Client) -> None:
    conversation, name = new_conversation(), new_conversation()
    await publish(client, conversation, 1, 9)
    async with node(client) as (here, at_here), node(client) as (there, at_there):
        async with guest(at_here) as one, guest(at_there) as other:
            for reader in (one, other):
                await reader.join(conversation, 0, clientId=name)
                await reader.sequences(9)
            for gateway, reader, sequence in ((here, one, 5), (there, other, 9), (here, one, 7)):
                await reader.say("ack", conversation, sequence=sequence)
                await reader.hears_nothing_more()
                await gateway.acks.flush()
            await here.acks.flush()  # its 7 was refused: node `there` had written meanwhile
        async with guest(at_there) as again:
            assert 9 == (await again.join(conversation, clientId=name, resume="acked"))["after"]
        async with guest(at_here) as tab:
            await tab.join(conversation, 0, clientId=name)
            await tab.sequences(9)
            await tab.say("ack", conversation, sequence=2)
            await tab.hears_nothing_more()
            await here.acks.flush()
            assert 9 == (await tab.join(conversation, clientId=name, resume="acked"))["after"]


async def test_two_nodes_give_every_client_the_same_in_order(client: Client) -> None:
    conversation = new_conversation()
    async with node(client) as (_, here), node(client) as (_, there), guest(here) as one, guest(there) as other:
        await one.join(conversation, 0)
        await other.join(conversation, 0)
        await publish(client, conversation, 1, 300)
        joined = [(await one.next())["type"], (await other.next())["type"]]
        expected = list(range(1, 301))
        assert (expected, expected) == (await one.sequences(300), await other.sequences(300)), joined
