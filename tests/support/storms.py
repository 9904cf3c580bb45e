"""Fault runs, each in one function with its length as an argument: the short form runs in `make test`, the long one in
`make faults`."""

from __future__ import annotations

import asyncio
import signal

from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import Client, connect
from tests.support.load import Load, load_client
from tests.support.nats import Cluster, NatsServer
from tests.support.streams import make_consumer, make_stream, stored_ids
from tests.support.wait import until, until_async

ACK_WAIT_NS = 2_000_000_000


async def _prepare(url: str, **config: object) -> str:
    async with connect(url) as client:
        stream = await make_stream(client, duplicate_window=120_000_000_000, allow_batched=True, **config)
        await make_consumer(client, stream, ack_wait=ACK_WAIT_NS, max_ack_pending=5_000)
    return stream


async def _progress(load: Load, more: int) -> None:
    """Wait until so many more are acknowledged."""
    goal = len(load.acknowledged) + more
    await until(lambda: len(load.acknowledged) >= goal, f"{more} more acknowledged", deadline_s=90)


async def _check(url: str, stream: str, load: Load) -> None:
    """By the witness: nothing acknowledged is missing, nothing stands twice; and the consumers saw it all."""
    ids = await stored_ids(url, stream)
    assert len(ids) == len(set(ids)), "stored twice by id"
    assert load.acknowledged <= set(ids), f"{len(load.acknowledged - set(ids))} acknowledged messages are missing"
    await until(lambda: set(ids) <= load.seen, "consumers see everything", deadline_s=60)


async def kill_storm(server: NatsServer, *, kills: int, count: int, between: int) -> Load:
    """Publishers and consumers while the server is killed and restarted."""
    stream = await _prepare(server.url)
    async with Load([server.url], stream, "c", count=count) as load:
        for _ in range(kills):
            await _progress(load, between)
            server.kill()
            await asyncio.to_thread(server.start)
        await _progress(load, between)
        await load.stop_publishing()
        await _check(server.url, stream, load)
    return load


async def stop_storm(server: NatsServer, *, stops: int, length_s: float, count: int) -> Load:
    """The server stands still for a while (SIGSTOP): it neither answers nor closes."""
    stream = await _prepare(server.url)
    async with Load([server.url], stream, "c", count=count) as load:
        for _ in range(stops):
            await _progress(load, 200)
            server.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(length_s)
            finally:
                server.signal(signal.SIGCONT)
        await _progress(load, 200)
        await load.stop_publishing()
        await _check(server.url, stream, load)
    return load


async def cluster_storm(cluster: Cluster, *, rounds: int, count: int, between: int) -> Load:
    """A rolling restart with lame ducks and a kill of the leader, under load."""
    stream = await _prepare_replicated(cluster)
    async with Load(cluster.urls, stream, "c", count=count) as load, load_client(*cluster.urls) as watcher:
        for _ in range(rounds):
            for server in cluster.servers:
                await _progress(load, between)
                await _restart_gently(server, watcher, stream)
            await _progress(load, between)
            leader = cluster.by_name(await _leader(watcher, stream))
            leader.kill()
            await _progress(load, between)
            await asyncio.to_thread(leader.start)
            await until_async(lambda: _is_whole(watcher, stream), "all replicas current", deadline_s=60)
        await _progress(load, between)
        await load.stop_publishing()
        await _check(cluster.urls[0], stream, load)
    return load


async def _prepare_replicated(cluster: Cluster) -> str:
    made: list[str] = []

    async def make() -> bool:
        try:
            made.append(await _prepare(cluster.urls[0], num_replicas=3))
        except OncewireError:
            return False
        return True

    await until_async(make, "a stream with three replicas")
    return made[-1]


async def _restart_gently(server: NatsServer, watcher: Client, stream: str) -> None:
    server.signal(signal.SIGUSR2)
    process = server.process
    assert process is not None
    await until(lambda: process.poll() is not None, "the lame duck is gone", deadline_s=60)
    await asyncio.to_thread(server.start)
    await until_async(lambda: _is_whole(watcher, stream), "all replicas current", deadline_s=60)


async def _leader(watcher: Client, stream: str) -> str:
    leader: list[str] = []

    async def look() -> bool:
        try:
            leader[:] = [(await watcher.api(f"STREAM.INFO.{stream}"))["cluster"].get("leader") or ""]
        except OncewireError:
            return False
        return bool(leader[0])

    await until_async(look, "a leader")
    return leader[0]


async def _is_whole(watcher: Client, stream: str) -> bool:
    try:
        cluster = (await watcher.api(f"STREAM.INFO.{stream}"))["cluster"]
    except OncewireError:
        return False
    replicas = cluster.get("replicas") or []
    return bool(cluster.get("leader")) and len(replicas) == 2 and all(one["current"] for one in replicas)
