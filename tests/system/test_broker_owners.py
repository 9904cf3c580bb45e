"""Owners of partitions that die, stop and are cut off under load, counted by a witness outside. `make faults` does it
with every named step, twenty times each, and on a cluster."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from oncewire.broker.client import BrokerClient
from tests.support.brokernodes import START_S, NodeProcess, Proxy, Witness
from tests.support.nats import NatsServer, nats_server
from tests.support.wait import until_async

LEASE_MS = 600


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


async def started(*nodes: NodeProcess) -> tuple[NodeProcess, ...]:
    return tuple(await asyncio.gather(*(node.start() for node in nodes)))


async def test_owners_that_are_killed_and_stopped_lose_and_double_nothing(server: NatsServer) -> None:
    one, two = await started(NodeProcess(server.url, LEASE_MS), NodeProcess(server.url, LEASE_MS))
    witness = Witness(seed=1)
    async with witness.watching(one, two):
        await witness.settled(60)
        two.is_suspect = True
        two.send(signal.SIGSTOP)
        await witness.settled(60)  # its partitions are another's by now
        two.send(signal.SIGCONT)
        await witness.settled(60)
        await two.end()
        await witness.settled(60)
        assert [] == await witness.finish()


async def test_a_group_whose_owner_died_right_after_its_first_settlement_is_not_forgotten(server: NatsServer) -> None:
    """Only one of eight partitions has seen it settle something, and nothing says so to the others yet."""
    settings = {"broker_group_trial_ms": "1000"}
    victim = await NodeProcess(server.url, LEASE_MS, step="proof", **settings).start()
    async with BrokerClient(victim.url, timeout_s=5.0) as client:
        await client.create_topic("t", partitions=8)
        await client.produce("t", "v")
        (delivery,) = await client.take("t", "g", wait_s=20, lease_ms=60_000)
        await client.ack(client.lease("t", "g", delivery))
    assert "proof" == await victim.dies_at(START_S)
    node = await NodeProcess(server.url, LEASE_MS, **settings).start()
    try:
        async with BrokerClient(node.url) as client:
            for group in ("g", "typo"):
                await client.take("t", group, lease_ms=1)

            async def groups() -> dict[str, int]:
                return {group.name: len(group.partitions) for group in (await client.topic("t")).groups}

            async def is_over() -> bool:
                return "typo" not in await groups()

            await until_async(is_over)
            assert {"g": 8} == await groups()
    finally:
        await node.end()


async def test_an_owner_that_is_cut_off_is_replaced_and_comes_back(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy:
        one, two = await started(NodeProcess(server.url, LEASE_MS), NodeProcess(proxy.url, LEASE_MS))
        witness = Witness(seed=2)
        async with witness.watching(one, two):
            await witness.settled(60)
            two.is_suspect = True
            proxy.cut()
            await witness.settled(60)
            proxy.mend()
            await witness.settled(60)
            assert [] == await witness.finish()


async def test_a_server_that_is_killed_and_started_again_loses_nothing(server: NatsServer) -> None:
    one, two = await started(NodeProcess(server.url, LEASE_MS), NodeProcess(server.url, LEASE_MS))
    witness = Witness(seed=3)
    async with witness.watching(one, two):
        await witness.settled(60)
        server.kill()
        server.start()
        await witness.settled(60)
        assert [] == await witness.finish()
