"""A node and its server killed under load, and a crowd that comes back, in short; tests/faults/test_gateway_faults.py
is the long form."""

from __future__ import annotations

import oncewire
from oncewire._ground.topology import ensure
from tests.support.gateway import message, new_conversation, node
from tests.support.gatewaycrowd import come_back
from tests.support.nats import NatsServer
from tests.support.roomstorm import assert_all_once_in_order, storm

CLIENTS = 24


async def test_a_killed_node_and_a_killed_server_lose_double_and_reorder_nothing(server: NatsServer) -> None:
    """Counted outside, half of it by witnesses that forgive nothing."""
    report = await storm(server, ["0", "nats"], clients=CLIENTS, rooms=3)
    assert_all_once_in_order(report, CLIENTS)
    assert report["connections"] > CLIENTS


async def test_a_crowd_behind_the_backlog_comes_back_exact_and_reads_each_page_once(server: NatsServer) -> None:
    conversation, missed = new_conversation(), 150
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        found = await client.publish_many([message(conversation, n, content="x" * 4_096) for n in range(1, missed + 1)])
        assert not [one for one in found if isinstance(one, Exception)]
        async with node(client, backlog_size=20) as (gateway, url):
            positions = [40 * (number % 2) for number in range(300)]
            assert [] == await come_back(url, conversation, positions, missed, deadline_s=60)
            assert gateway.node.counts["pages"] < 10, "two pages hold it all; who comes meanwhile may ask for one more"
