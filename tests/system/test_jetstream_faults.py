"""The short form of the fault runs; `make faults` runs the long one."""

from __future__ import annotations

import asyncio

import uvloop

from tests.support.nats import NatsServer, nats_cluster
from tests.support.storms import cluster_storm, kill_storm, stop_storm


async def test_a_killed_server_loses_and_doubles_nothing(server: NatsServer) -> None:
    load = await kill_storm(server, kills=3, count=4, between=300)

    assert not load.errors


def test_a_killed_server_loses_and_doubles_nothing_on_uvloop(server: NatsServer) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load = runner.run(kill_storm(server, kills=3, count=4, between=300))

    assert not load.errors


async def test_a_server_that_stands_still_loses_and_doubles_nothing(server: NatsServer) -> None:
    load = await stop_storm(server, stops=1, length_s=4.0, count=2)

    assert not load.errors


async def test_a_rolling_restart_and_a_dead_leader_are_only_a_delay() -> None:
    with nats_cluster() as cluster:
        load = await cluster_storm(cluster, rounds=1, count=2, between=200)

    assert not load.errors
