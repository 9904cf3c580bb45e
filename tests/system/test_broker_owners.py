"""Owners of partitions that die, stop and are cut off under load, counted by a witness outside. `make faults` does it
with every named step, twenty times each, and on a cluster."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.support.brokernodes import NodeProcess, Proxy, Witness
from tests.support.nats import NatsServer, nats_server
from tests.support.wait import until

LEASE_MS = 600


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


async def started(*nodes: NodeProcess) -> tuple[NodeProcess, ...]:
    return tuple(await asyncio.gather(*(node.start() for node in nodes)))


async def ended(*nodes: NodeProcess) -> None:
    await asyncio.gather(*(node.end() for node in nodes))


async def settled(witness: Witness, count: int = 60) -> None:
    """So many more are settled: what came before is over."""
    before = len(witness.acked)
    await until(lambda: len(witness.acked) >= before + count, f"{count} more acks", deadline_s=45.0)


async def test_owners_that_are_killed_and_stopped_lose_and_double_nothing(server: NatsServer) -> None:
    one, two = await started(NodeProcess(server.url, LEASE_MS), NodeProcess(server.url, LEASE_MS))
    witness = Witness(seed=1)
    try:
        async with witness.watching(one, two):
            await settled(witness)
            two.is_suspect = True
            two.send(signal.SIGSTOP)
            await settled(witness)  # its partitions are another's by now
            two.send(signal.SIGCONT)
            await settled(witness)
            await two.end()
            await settled(witness)
            assert [] == await witness.finish()
    finally:
        await ended(one, two)


async def test_an_owner_that_is_cut_off_is_replaced_and_comes_back(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy:
        one, two = await started(NodeProcess(server.url, LEASE_MS), NodeProcess(proxy.url, LEASE_MS))
        witness = Witness(seed=2)
        try:
            async with witness.watching(one, two):
                await settled(witness)
                two.is_suspect = True
                proxy.cut()
                await settled(witness)
                proxy.mend()
                await settled(witness)
                assert [] == await witness.finish()
        finally:
            await ended(one, two)


async def test_a_server_that_is_killed_and_started_again_loses_nothing(server: NatsServer) -> None:
    one, two = await started(NodeProcess(server.url, LEASE_MS), NodeProcess(server.url, LEASE_MS))
    witness = Witness(seed=3)
    try:
        async with witness.watching(one, two):
            await settled(witness)
            one.is_suspect = two.is_suspect = True  # nobody can tell while nobody holds a session
            server.kill()
            server.start()
            one.is_suspect = two.is_suspect = False
            await settled(witness)
            assert [] == await witness.finish()
    finally:
        await ended(one, two)
