"""The long fault runs of the NATS client."""

from __future__ import annotations

import gc
import resource

import pytest

from oncewire._ground.jetstream import Outgoing
from tests.support.load import load_client
from tests.support.nats import NatsServer, nats_cluster
from tests.support.storms import cluster_storm, kill_storm, stop_storm
from tests.support.streams import make_consumer, make_stream

pytestmark = pytest.mark.faults


async def test_twenty_kills_under_eight_publishers_and_eight_consumers(server: NatsServer) -> None:
    load = await kill_storm(server, kills=20, count=8, between=1_000)

    assert not load.errors


async def test_a_server_that_stands_still_for_half_a_minute(server: NatsServer) -> None:
    load = await stop_storm(server, stops=1, length_s=30.0, count=4)

    assert set(load.errors) <= {error for error in load.errors if error.startswith(("OutcomeUnknown", "TimedOut"))}


async def test_three_rolling_restarts_and_three_dead_leaders() -> None:
    with nats_cluster() as cluster:
        load = await cluster_storm(cluster, rounds=3, count=4, between=1_000)

    assert not load.errors


async def test_memory_is_flat_over_five_million_messages(server: NatsServer) -> None:
    """Published, pulled and acked; measured after the first part has filled all caches."""
    part, parts = 250_000, 20
    async with load_client(server.url) as client:
        stream = await make_stream(client, max_msgs=300_000, discard="old")
        await make_consumer(client, stream, max_ack_pending=-1)
        sizes: list[int] = []
        async with client.pull(stream, "c", batch=1_000) as pull:
            for number in range(parts):
                for start in range(0, part, 10_000):
                    ids = range(number * part + start, number * part + start + 10_000)
                    await client.publish_many([Outgoing(f"{stream}.x", b"x" * 100, str(one)) for one in ids])
                    taken = 0
                    while taken < 10_000:
                        messages = await pull.fetch()
                        pull.ack(messages)
                        taken += len(messages)
                gc.collect()
                sizes.append(rss_kb())
        assert client.connection.replies == {}
    assert max(sizes[2:]) - sizes[1] < 30_000, sizes


def rss_kb() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - not a file of ours
        return int(file.read().split()[1]) * resource.getpagesize() // 1024
