"""Nodes of the broker killed at every named step, twenty times each, and a cluster whose leader is killed.

A node says at which step it dies before it kills itself: a kill that landed elsewhere, or nowhere, does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from oncewire._ground.contracts import topics
from oncewire._ground.errors import OncewireError, Unavailable
from oncewire._ground.jetstream import connect
from oncewire.broker.client import BrokerClient
from tests.faults.broker_node import MUTATIONS, STEPS
from tests.support import brokernodes
from tests.support.brokernodes import GROUP, NodeProcess, Proxy, Witness
from tests.support.nats import Cluster, NatsServer, nats_cluster, nats_server
from tests.support.wait import until_async

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1_800)]

LEASE_MS = 500
TIMES = 20
DIES_S = 20.0
TURN_S = {"ingest": 4.0}
"""Where only the owner of one partition comes to the step, a node that has not come there by then is no owner."""
BREAK_S = 0.5
BRIEF_S = 2.0
KEPT_MS = {"purge": 2_000}
"""Where messages are trimmed and purged during the run."""
MANY = {"stored": 40, "recorded": 40, "ingest": 5}
"""Steps that come at every commit: the kill lands at any of so many."""


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


class Kills:
    """Kills nodes at one step, beside a steady one, under the eyes of a witness."""

    def __init__(self, witness: Witness, server: NatsServer, proxy: Proxy, steady: NodeProcess, step: str) -> None:
        self._witness = witness
        self._server = server
        self._proxy = proxy
        self._steady = steady
        self._step = step
        self._chance = random.Random(step)
        self._names = 0
        self.landed = 0

    async def once(self) -> None:
        """Nodes may get nothing to do at the step: until one has died there."""
        before = self.landed
        while self.landed == before:
            count = self._chance.randint(1, MANY.get(self._step, 1))
            url = self._proxy.url if self._step == "reread" else self._server.url
            victim = await node_of(url, self._step, step=self._step, count=count).start()
            self._witness.add(victim)
            died_at = await self._killed(victim)
            await victim.end()
            assert died_at in ("", self._step)
            self.landed += died_at == self._step
            await self._witness.settled(40)

    async def _killed(self, victim: NodeProcess) -> str:
        match self._step:
            case "fence":  # it must take from one that could not leave in order
                await self._witness.settled(40)
                await self._steady.end()
                died_at = await victim.dies_at(DIES_S)
                self._steady = await node_of(self._server.url, self._step).start()
                self._witness.add(self._steady)
                return died_at
            case "release":
                await self._witness.settled(40)
                victim.send(signal.SIGTERM)
            case "reread":
                return await self._broken(victim)
            case "entry" | "unlisted" | "cleared":
                return await self._without_topic(victim)
        return await victim.dies_at(TURN_S.get(self._step, DIES_S))

    async def _broken(self, victim: NodeProcess) -> str:
        """Its connection breaks again and again, so that nobody confirms what is on its way."""
        await self._witness.settled(40)
        for _ in range(int(DIES_S / BREAK_S)):
            self._proxy.drop()
            if died_at := await victim.dies_at(BREAK_S):
                return died_at
        return ""

    async def _without_topic(self, victim: NodeProcess) -> str:
        """It makes a topic, or deletes one; whatever it left out, the topic can be made by another node then."""
        self._names += 1
        name, is_deleting = f"brief{self._names}", False
        async with BrokerClient(victim.url, timeout_s=BRIEF_S) as there:
            with contextlib.suppress(OncewireError):
                await there.create_topic(name)
                await there.produce(name, "old")
                is_deleting = True
                await there.delete_topic(name)
        died_at = await victim.dies_at(DIES_S)
        async with BrokerClient(self._steady.url, timeout_s=DIES_S) as here:
            await until_async(lambda: is_stored(here, name), f"{name} anew")
            taken = {one.value for one in await here.take(name, GROUP, wait_s=DIES_S)}
            assert taken == {"new"} or not (died_at and is_deleting), f"{name} has {taken}"
        return died_at


def node_of(url: str, tried: str, **built: Any) -> NodeProcess:
    """A node for the runs of one step; with `step` it dies there."""
    return NodeProcess(url, LEASE_MS, kept_ms=KEPT_MS.get(tried, brokernodes.KEPT_MS), **built)


async def is_stored(client: BrokerClient, name: str) -> bool:
    try:
        await client.create_topic(name)
        await client.produce(name, "new")
    except Unavailable:
        return False
    return True


async def is_clean(url: str, node: NodeProcess) -> bool:
    """Whether each topic has one stream, and each stream its topic."""
    async with connect(url) as client, BrokerClient(node.url) as broker:
        page = await client.api("STREAM.NAMES", {"subject": topics.SUBJECTS})
        assert page["total"] <= page["limit"]
        found = [stream.split("+")[2] for stream in page["streams"]]
        return sorted(found) == sorted(map(topics.token, await broker.topics()))


@pytest.mark.parametrize("step", STEPS)
async def test_a_node_killed_at_a_step_loses_and_doubles_nothing(step: str, server: NatsServer) -> None:
    steady = await node_of(server.url, step).start()
    witness = Witness(seed=STEPS.index(step), has_keys=step not in KEPT_MS)
    async with Proxy(server.port) as proxy, witness.watching(steady):
        kills = Kills(witness, server, proxy, steady, step)
        for _ in range(TIMES):
            await kills.once()
        assert [] == await witness.finish()
        assert TIMES == kills.landed
        await until_async(lambda: is_clean(server.url, witness.nodes[-1]), "no stream of a topic that is no more")


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_the_witness_sees_what_is_built_wrongly(mutation: str, server: NatsServer) -> None:
    steady = await NodeProcess(server.url, LEASE_MS, mutation=mutation).start()
    witness = Witness(seed=3)
    async with witness.watching(steady):
        for count in range(20, 25):
            step = "stored" if mutation == "answer_early" else "recorded"
            victim = await NodeProcess(server.url, LEASE_MS, step=step, count=count, mutation=mutation).start()
            witness.add(victim)
            await victim.dies_at(DIES_S)
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
