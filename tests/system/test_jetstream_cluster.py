"""Three real servers: the client learns of all from one, and leaves a lame duck before it closes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import Client, Message, State, connect, parse_reply
from oncewire._ground.jetstream.options import address_of
from tests.support.load import load_client
from tests.support.nats import Cluster, NatsServer, nats_cluster, nats_server
from tests.support.streams import make_consumer, make_stream, outgoing
from tests.support.wait import until, until_async, within


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with nats_cluster(grace_ms=3_000) as running:
        yield running


def server_of(cluster: Cluster, client: Client) -> NatsServer:
    return next(server for server in cluster.servers if server.name == client.server.server_name)


def known(client: Client) -> set[str]:
    return {address_of(server) for server in client.connection._servers.in_order()}


async def _echo(message: Message) -> bytes:
    return message.payload


async def make_replicated(client: Client) -> str:
    made: list[str] = []

    async def make() -> bool:
        try:
            made.append(await make_stream(client, num_replicas=3))
        except OncewireError:
            return False
        return True

    await until_async(make, "a stream with three replicas")
    return made[-1]


async def test_a_lame_duck_is_left_before_it_closes_and_nobody_notices(cluster: Cluster) -> None:
    """Everything that a cluster must show, on one: starting three servers is what costs."""
    changes: list[tuple[State, str]] = []
    entry = cluster.servers[0].url
    async with load_client(entry, on_change=lambda *change: changes.append(change)) as client:
        everybody = {f"127.0.0.1:{server.port}" for server in cluster.servers}
        await until(lambda: known(client) == everybody, "all servers learned from one")
        stream = await make_replicated(client)
        await make_consumer(client, stream)

        duck = server_of(cluster, client)
        got: list[bytes] = []
        client.subscribe("news", lambda message: got.append(message.payload))
        async with client.pull(stream, "c", heartbeat_s=0.5, expires_s=5.0) as pull:
            duck.signal(signal.SIGUSR2)
            outcomes = []
            while client.connection.reconnects == 0:
                outcomes += await within(client.publish_many(outgoing(stream, 50, prefix=f"r{len(outcomes)}")))
            assert server_of(cluster, client) is not duck
            assert changes[1] == (State.RECONNECTING, "left a server in lame-duck mode")
            assert [outcome for outcome in outcomes if isinstance(outcome, OncewireError)] == []

            seen: set[int] = set()
            async with asyncio.timeout(30):
                while len(seen) < len(outcomes):
                    messages = await pull.fetch()
                    seen |= {parse_reply(message.reply).sequence for message in messages}
                    pull.ack(messages)
            assert seen == set(range(1, len(outcomes) + 1))

        client.connection.write(b"PUB news 2\r\nhi\r\n")
        await until(lambda: got == [b"hi"])
        await until(lambda: duck.process is None or duck.process.poll() is not None, "the lame duck is gone")
        await until(lambda: f"127.0.0.1:{duck.port}" not in known(client) or duck.url == entry)
        assert f"127.0.0.1:{cluster.servers[0].port}" in known(client), "a given server is never forgotten"

        # two of three: the stream goes on; one of three: it is a delay until a second is back
        second = server_of(cluster, client)
        second.kill()
        await until(lambda: client.state is State.CONNECTED and server_of(cluster, client) not in (duck, second))
        publishing = asyncio.create_task(client.publish(f"{stream}.x", b"late", msg_id="late", timeout_s=60))
        await asyncio.to_thread(second.start)
        await within(publishing, 60)


async def test_a_lame_duck_without_a_neighbour_is_kept_until_it_closes() -> None:
    """There is nowhere to go: leaving early would only lengthen the outage."""
    with nats_server('lame_duck_duration: "30s"\nlame_duck_grace_period: "1s"') as server:
        changes: list[str] = []
        async with connect(server.url, on_change=lambda _, reason: changes.append(reason)) as client:
            client.serve("echo", _echo)
            server.signal(signal.SIGUSR2)
            await until(lambda: client.server.ldm or client.state is not State.CONNECTED)
            assert (await client.call("echo", b"still here")).payload == b"still here"
            await until(lambda: client.state is State.RECONNECTING)
            assert "left a server" not in changes[1]
