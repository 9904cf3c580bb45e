"""Many effects into one stream, by fast ingest and in atomic batches: each stored once, each told truly."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from oncewire._ground.errors import TooLarge
from oncewire._ground.jetstream import Client, Outgoing, PubAck, connect
from oncewire.agent.exits import Exit
from oncewire.agent.ways import LOOK, SYNCED_US
from tests.support.fakes import Proxy
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import make_stream, outgoing, state_of, stored_ids
from tests.support.wait import until_async

LARGE = 600
"""A look and more."""


async def test_blocks_that_meet_are_stored_once_and_marked_no_higher_than_they_reach(
    shared_server: NatsServer,
) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, allow_batched=True)
        way = Exit(client)
        blocks = [outgoing(stream, count, prefix=f"b{at}") for at, count in enumerate([LARGE, 100, LARGE, LARGE])]
        outcomes = await asyncio.gather(*map(way.publish, blocks))

        ids = await stored_ids(shared_server.url, stream)
        assert sorted(ids) == sorted(one.msg_id for block in blocks for one in block)
        for block, told in zip(blocks, outcomes, strict=True):
            places = [ids.index(one.msg_id) + 1 for one in block]
            sequences = [one.sequence for one in told if isinstance(one, PubAck)]
            assert len(sequences) == len(block)
            assert max(sequences) == max(places)
            assert all(sequence >= place for sequence, place in zip(sequences, places, strict=True))


@pytest.mark.parametrize("sync_always", [False, True], ids=["default", "always"])
async def test_the_times_of_a_few_messages_tell_whether_each_is_synced(sync_always: bool) -> None:
    """With another publisher that stores batches between them."""
    with nats_server(sync_always=sync_always) as server:
        async with connect(server.url) as client, connect(server.url) as other:
            stream = await make_stream(client, allow_batched=True)
            noise = asyncio.create_task(_publish_batches(other, stream))
            ways = [Exit(client) for _ in range(6)]
            blocks = [outgoing(stream, LOOK + 100, prefix=f"b{at}") for at in range(len(ways))]
            for way, block in zip(ways, blocks, strict=True):
                assert all(isinstance(one, PubAck) for one in await way.publish(block))
            noise.cancel()
    found = [way._ways.choose_atomic() for way in ways]
    assert found.count(sync_always) > len(ways) / 2, f"more than {SYNCED_US} µs between two means that each is synced"


async def _publish_batches(client: Client, stream: str) -> None:
    for at in itertools.count():
        await client.publish_all(outgoing(stream, 50, prefix=f"noise{at}"))


async def test_one_that_can_never_be_published_is_told_and_the_others_are_stored(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        stream = await make_stream(client, allow_batched=True, max_msg_size=1_000)
        messages = outgoing(stream, LARGE)
        bad = [10, LOOK + 10, LARGE - 10]
        for at in bad:
            messages[at] = Outgoing(f"{stream}.x", b"x" * 2_000, f"bad{at}")
        outcomes = await Exit(client).publish(messages)

        assert [at for at, outcome in enumerate(outcomes) if isinstance(outcome, TooLarge)] == bad
        assert sum(isinstance(outcome, PubAck) for outcome in outcomes) == LARGE - len(bad)
        ids = await stored_ids(shared_server.url, stream)
        assert sorted(ids) == sorted(one.msg_id for one in messages if not one.msg_id.startswith("bad"))


async def test_a_lost_connection_doubles_nothing_and_what_was_learned_is_forgotten(shared_server: NatsServer) -> None:
    async with (
        Proxy(shared_server.port) as proxy,
        connect(proxy.url) as client,
        connect(shared_server.url) as other,
    ):
        stream = await make_stream(client, allow_batched=True)
        way = Exit(client)
        blocks = [outgoing(stream, LARGE, prefix=f"b{at}") for at in range(4)]
        await way.publish(blocks[0])
        learned = way._ways
        publishing = asyncio.create_task(way.publish(blocks[1]))

        async def is_begun() -> bool:
            return (await state_of(other, stream))["messages"] > LARGE

        await until_async(is_begun, "the block on its way")
        proxy.cut()
        told = [*await publishing, *await way.publish(blocks[2])]  # which of both meets the cut is open
        told += await way.publish(blocks[3])

        assert all(isinstance(one, PubAck) for one in told)
        assert way._ways is not learned
        ids = await stored_ids(shared_server.url, stream)
        assert sorted(ids) == sorted(one.msg_id for block in blocks for one in block)
