"""A node and its server killed under load, in short; tests/faults/test_gateway_faults.py is the long form."""

from __future__ import annotations

from tests.support.nats import NatsServer
from tests.support.roomstorm import assert_all_once_in_order, storm

CLIENTS = 24


async def test_a_killed_node_and_a_killed_server_lose_double_and_reorder_nothing(server: NatsServer) -> None:
    """Counted outside, half of it by witnesses that forgive nothing."""
    report = await storm(server, ["0", "nats"], clients=CLIENTS, rooms=3)
    assert_all_once_in_order(report, CLIENTS)
    assert report["connections"] > CLIENTS
