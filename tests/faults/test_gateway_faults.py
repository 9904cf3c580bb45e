"""Gateway nodes and nats-server killed under load: every client sees every message once and in order."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

import oncewire
from tests.faults.gateway_mutant import MUTANTS
from tests.support import gateway
from tests.support.gateway import message, new_conversation
from tests.support.gatewaycrowd import come_back, peak_bytes
from tests.support.nats import NatsServer
from tests.support.roomstorm import assert_all_once_in_order, storm

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

CLIENTS = 200


@pytest.mark.parametrize("seed", [1, 2])
async def test_kills_of_nodes_and_the_server_lose_double_and_reorder_nothing(server: NatsServer, seed: int) -> None:
    """Two hundred clients in ten rooms on two nodes; twenty kills in an order by chance."""
    victims = random.Random(seed).choices(["0", "1", "nats"], k=20)
    report = await storm(server, victims, clients=CLIENTS, rooms=10)
    assert_all_once_in_order(report, CLIENTS)
    assert report["connections"] > 2 * CLIENTS


@pytest.mark.parametrize("is_spread", [False, True])
async def test_a_crowd_far_behind_the_backlog_comes_back_exact_and_in_bounded_memory(
    server: NatsServer, is_spread: bool
) -> None:
    """Two thousand clients that missed up to 400 messages of 4 KB, twice what a node keeps in memory."""
    conversation, missed = new_conversation(), 400
    async with oncewire.connect(server.url) as client:
        await oncewire.init_streams(client)
        found = await client.publish_many([message(conversation, n, content="x" * 4_096) for n in range(1, missed + 1)])
        assert not [one for one in found if isinstance(one, Exception)]
    running = await asyncio.to_thread(gateway.Running, server.url, "--http-connections-max", "3000")
    try:
        idle = peak_bytes(running.process.pid)
        positions = [number % 180 if is_spread else 0 for number in range(2_000)]
        assert [] == await come_back(running.url, conversation, positions, missed, deadline_s=300)
        assert peak_bytes(running.process.pid) - idle < 64 << 20
    finally:
        running.stop()


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_gateway_built_wrongly_is_noticed(
    server: NatsServer, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the storms above would prove nothing."""
    monkeypatch.setattr(gateway, "GATEWAY", [sys.executable, "-m", "tests.faults.gateway_mutant", mutant])
    report = await storm(server, ["0", "1"], clients=20, rooms=2)
    assert report["is_stored_once"]
    assert report["problems"]
