"""Three copies on a real cluster of three servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from msgspec.structs import replace

import oncewire
from oncewire._ground.errors import Unavailable
from oncewire._ground.settings import Settings
from oncewire._ground.topology import Env, Stream, Topology, apply, compare, load
from oncewire._ground.topology import server as server_module
from oncewire._ground.topology.rules import Need
from tests.support.nats import NatsServer
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
    folder: Path = tmp_path_factory.mktemp("cluster")
    servers = [
        NatsServer(
            folder / f"n{at}",
            f'cluster {{ name: trio, listen: "127.0.0.1:{port}", routes: [{routes}] }}',
            name=f"n{at}",
        )
        for at, port in enumerate(ports)
    ]
    try:
        for server in servers:
            server.start(wait=False)
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def topology() -> Topology:
    return load((), Settings(), Env.PROD)


async def test_several_that_apply_at_once_through_different_servers_make_three_copies_of_each(
    cluster: list[NatsServer], topology: Topology
) -> None:
    async def apply_through(server: NatsServer) -> int:
        async with oncewire.connect(server.url) as client:
            return len((await apply(client, topology)).steps)

    assert await asyncio.gather(*(apply_through(server) for server in [*cluster, *cluster])) == [0] * 6
    connection = await nats.connect(cluster[0].url)
    found = await connection.jetstream().streams_info()
    await connection.close()
    assert {info.config.name for info in found} == {stream.name for stream in topology.streams}
    assert {info.config.num_replicas for info in found} == {3}


async def test_a_cluster_as_declared_is_no_drift_from_any_server(cluster: list[NatsServer], topology: Topology) -> None:
    for server in cluster:
        async with oncewire.connect(server.url) as client:
            await apply(client, topology)
            assert (await compare(client, topology)).steps == ()


async def test_a_stream_whose_server_is_down_is_not_taken_for_missing(
    cluster: list[NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make it anew would lose what it holds when its server comes back."""
    monkeypatch.setattr(server_module, "ELECTION_S_MAX", 2.0)  # it will not be elected: its server is gone
    whole = load((), Settings(), Env.DEV)
    lone = replace(whole, streams=(Stream(key="LONE", name="LONE", subjects=("lone.>",)),), consumers=())
    async with oncewire.connect([server.url for server in cluster]) as client:
        await apply(client, lone)
        leader = (await client.api("STREAM.INFO.LONE"))["cluster"]["leader"]
        home = next(server for server in cluster if server.name == leader)
        home.kill()
        try:
            with pytest.raises(Unavailable):
                await apply(client, lone)
        finally:
            home.start()


async def test_forgetting_the_environment_takes_no_copies_away(cluster: list[NatsServer], topology: Topology) -> None:
    async with oncewire.connect(cluster[0].url) as client:
        await apply(client, topology)
        left = await apply(client, load((), Settings(), Env.DEV))
        assert {step.need for step in left.steps} == {Need.ACCEPT}
        assert (await compare(client, topology)).steps == ()
