"""Streams and consumers for tests, made by raw requests, and what a witness finds in them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from nats.aio.client import Client as Witness
from nats.aio.msg import Msg
from nats.js.errors import ServiceUnavailableError

from oncewire._ground.jetstream import Client, Outgoing
from tests.support.wait import until_async

_serial = itertools.count(1)


def unique(prefix: str = "S") -> str:
    """A name that no other test of this process uses."""
    return f"{prefix}{next(_serial)}"


async def make_stream(client: Client, name: str = "", **config: Any) -> str:
    """A stream that takes `<name>.>`."""
    name = name or unique()
    body = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, "allow_atomic": True, **config}
    await client.api(f"STREAM.CREATE.{name}", body)
    return name


async def make_consumer(client: Client, stream: str, name: str = "c", **config: Any) -> str:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", "ack_wait": 30_000_000_000, **config}
    await client.api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})
    return name


def outgoing(stream: str, count: int, *, prefix: str = "m", has_id: bool = True, size: int = 0) -> list[Outgoing]:
    """Messages whose payload is their id."""
    ids = [f"{prefix}-{number}" for number in range(count)]
    return [Outgoing(f"{stream}.x", one.encode().ljust(size, b"."), one if has_id else "") for one in ids]


async def state_of(client: Client, stream: str) -> dict[str, Any]:
    state: dict[str, Any] = (await client.api(f"STREAM.INFO.{stream}"))["state"]
    return state


async def consumer_info(client: Client, stream: str, consumer: str) -> dict[str, Any]:
    return await client.api(f"CONSUMER.INFO.{stream}.{consumer}")


@asynccontextmanager
async def witness(url: str, **options: Any) -> AsyncIterator[Witness]:
    """nats-py: an independent client. Where a server dies it forgets its socket, in a handshake and in `close`."""
    connection = Witness()
    try:
        await connection.connect(url, allow_reconnect=False, **options)
        yield connection
    finally:
        await connection.close()
        transport = connection._transport
        if transport is not None:
            transport.close()
            with suppress(OSError):
                await transport.wait_closed()


async def window_passed(client: Client, subject: str) -> None:
    """Until the stream has forgotten an id that it is given now. What this publishes has the prefix `probe-`."""
    probe = unique("probe-")

    async def is_stored() -> bool:
        return not (await client.publish(subject, b"{}", msg_id=probe, raw=True)).is_duplicate

    assert await is_stored()
    await until_async(is_stored, "the end of the duplicate window")


async def stored_ids(url: str, stream: str) -> list[str]:
    """The ids of everything in the stream, in order, as the witness reads it."""
    found: list[str] = []
    async with witness(url) as connection:
        js = connection.jetstream()
        total = (await js.stream_info(stream)).state.messages
        if not total:
            return found
        sub = await js.pull_subscribe("", stream=stream)

        async def fetched() -> list[Msg]:
            try:
                return await sub.fetch(min(1_000, total - len(found)), timeout=10)
            except ServiceUnavailableError:
                return []  # in a cluster, the consumer just made is not known to every server yet

        while len(found) < total:
            for message in await until_async(fetched, f"messages of {stream}"):
                found.append((message.headers or {})["Nats-Msg-Id"])
                await message.ack()
        await sub.unsubscribe()
    return found


async def forget_ids(client: Client, stream: str, subject: str) -> None:
    """Let a stream's duplicate window pass: it is short until an id that came after all others is accepted again."""
    config = (await client.api(f"STREAM.INFO.{stream}"))["config"]
    await client.api(f"STREAM.UPDATE.{stream}", config | {"duplicate_window": 100_000_000})
    probe = Outgoing(subject, b"{}", unique("probe"))
    await client.publish_one(probe, raw=True)
    while (await client.publish_one(probe, raw=True)).is_duplicate:
        pass
    await client.api(f"STREAM.UPDATE.{stream}", config)
