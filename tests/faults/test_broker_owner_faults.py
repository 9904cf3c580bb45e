"""Nodes of the broker killed at every named step, twenty times each, and a cluster whose leader is killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator

import pytest

from tests.faults.broker_node import MUTATIONS, STEPS
from tests.support.brokernodes import NodeProcess, Witness
from tests.support.nats import Cluster, NatsServer, nats_cluster, nats_server

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1_800)]

LEASE_MS = 500
TIMES = 20
DIES_S = 20.0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


async def killed_at(witness: Witness, url: str, steady: NodeProcess, step: str, chance: random.Random) -> NodeProcess:
    """One node dies at the step; the node that goes on."""
    count = chance.randint(1, 40) if step == "confirmed" else 1
    victim = await NodeProcess(url, LEASE_MS, step=step, count=count).start()
    witness.add(victim)
    assert victim.process is not None
    if step == "fence":  # it must take from one that could not leave in order
        await witness.settled(40)
        await steady.end()
        has_died = await died(victim)
        await victim.end()
        steady = await NodeProcess(url, LEASE_MS).start()
        witness.add(steady)
        if not has_died:  # chance had given it everything already
            return await killed_at(witness, url, steady, step, chance)
    elif step == "release":
        await witness.settled(40)
        victim.send(signal.SIGTERM)
        assert await died(victim)
    elif not await died(victim):  # chance has given it nothing to own: another one will have something
        await victim.end()
        return await killed_at(witness, url, steady, step, chance)
    await witness.settled(40)
    return steady


async def died(victim: NodeProcess) -> bool:
    assert victim.process is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DIES_S):
            await victim.process.wait()
    return victim.process.returncode is not None


@pytest.mark.parametrize("step", STEPS)
async def test_a_node_killed_at_a_step_loses_and_doubles_nothing(step: str, server: NatsServer) -> None:
    steady = await NodeProcess(server.url, LEASE_MS).start()
    witness, chance = Witness(seed=STEPS.index(step)), random.Random(step)
    async with witness.watching(steady):
        for _ in range(TIMES):
            steady = await killed_at(witness, server.url, steady, step, chance)
        assert [] == await witness.finish()


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_the_witness_sees_what_is_built_wrongly(mutation: str, server: NatsServer) -> None:
    steady = await NodeProcess(server.url, LEASE_MS, mutation=mutation).start()
    witness = Witness(seed=3)
    async with witness.watching(steady):
        for count in range(20, 25):
            victim = await NodeProcess(server.url, LEASE_MS, step="confirmed", count=count, mutation=mutation).start()
            witness.add(victim)
            await died(victim)
            await witness.settled(40)
        assert await witness.finish()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with nats_cluster() as three:
        yield three


async def test_a_cluster_whose_leaders_are_killed_loses_nothing(cluster: Cluster) -> None:
    urls = ",".join(cluster.urls)
    nodes = [await NodeProcess(urls, 3_000, env="prod").start() for _ in range(2)]
    witness = Witness(seed=7)
    async with witness.watching(*nodes):
        await witness.settled(200)
        for server in cluster.servers:
            server.kill()
            await witness.settled(200)  # without it: the others elect
            server.start(wait=False)
            await asyncio.to_thread(server.wait_ready)
            await witness.settled(200)
        assert [] == await witness.finish()
