"""Gateway nodes and nats-server killed under load: every client sees every message once and in order."""

from __future__ import annotations

import random
import sys

import pytest

from tests.faults.gateway_mutant import MUTANTS
from tests.support import gateway
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


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_gateway_built_wrongly_is_noticed(
    server: NatsServer, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the storms above would prove nothing."""
    monkeypatch.setattr(gateway, "GATEWAY", [sys.executable, "-m", "tests.faults.gateway_mutant", mutant])
    report = await storm(server, ["0", "1"], clients=20, rooms=2)
    assert report["is_stored_once"]
    assert report["problems"]
