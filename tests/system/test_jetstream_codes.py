"""Errors that a real server answers with: each is in the vector, under the class that the client raised."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import Client, Outgoing, connect
from tests.support.nats import NatsServer
from tests.support.streams import make_consumer, make_stream, outgoing

VECTORS = {
    known["err_code"]: known
    for known in json.loads((Path(__file__).parents[1] / "vectors" / "jetstream_errors.json").read_text())
}


async def provoke(client: Client) -> dict[int, OncewireError]:
    """Do many wrong things; return the errors by the server's number."""
    found: dict[int, OncewireError] = {}

    async def wrong(use: Awaitable[Any]) -> None:
        try:
            answer = await use
        except OncewireError as error:
            found.setdefault(error.server_code, error)
        else:
            pytest.fail(f"was accepted: {answer}")

    s = await make_stream(client, max_msg_size=1_000, max_consumers=3, allow_msg_ttl=False)
    await client.publish(f"{s}.a", b"1", msg_id="1")
    await make_consumer(client, s)
    for headers in (
        {"Nats-Rollup": "all"},
        {"Nats-TTL": "1s"},
        {"Nats-Incr": "+1"},
        {"Nats-Schedule": "@at 2030-01-01T00:00:00Z"},
        {"Nats-Expected-Last-Msg-Id": "other"},
        {"Nats-Expected-Stream": "OTHER"},
        {"Nats-Expected-Last-Sequence": "77"},
    ):
        await wrong(client.publish(f"{s}.a", b"", headers=headers))
    await wrong(client.publish(f"{s}.a", b"x" * 2_000))
    plain = await make_stream(client, allow_atomic=False)
    await wrong(client.publish_atomic(outgoing(plain, 2)))
    await wrong(client.publish_atomic([Outgoing(f"{s}.a", b"", "1"), Outgoing(f"{s}.a", b"", "2")]))
    full = await make_stream(client, max_msgs=1, discard="new", deny_delete=True, deny_purge=True)
    await client.publish(f"{full}.a", b"")
    await wrong(client.publish(f"{full}.a", b""))
    await wrong(client.api(f"STREAM.PURGE.{full}"))
    await wrong(client.api(f"STREAM.MSG.DELETE.{s}", {"seq": 99}))
    await wrong(client.api("STREAM.INFO.MISSING"))
    await wrong(client.api(f"CONSUMER.INFO.{s}.missing"))
    await wrong(client.api(f"STREAM.MSG.GET.{s}", {"seq": 99}))
    await wrong(client.api(f"STREAM.MSG.GET.{s}", {"what": 1}))
    await wrong(client.api(f"STREAM.CREATE.{s}", {"name": s, "subjects": ["elsewhere.>"]}))
    await wrong(client.api("STREAM.CREATE.NEW", {"name": "NEW", "subjects": [f"{s}.a"]}))
    await wrong(client.api("STREAM.CREATE.NEW", {"name": "OTHER"}))
    await wrong(client.api("STREAM.CREATE.NEW", {"name": "NEW", "num_replicas": 3}))
    await wrong(client.api("STREAM.CREATE.NEW", {"name": "NEW", "subjects": ["a..b"]}))
    await wrong(client.api("STREAM.CREATE.NEW", {"name": "NEW", "subjects": 7}))
    await wrong(client.api("STREAM.UPDATE.MISSING", {"name": "MISSING"}))
    for name, action, config in (
        ("c", "create", {"ack_policy": "none"}),
        ("new", "update", {"ack_policy": "none"}),
        ("new", "", {"ack_policy": "explicit", "filter_subjects": [f"{s}.a", f"{s}.*"]}),
        ("new", "", {"ack_policy": "explicit", "filter_subjects": [""]}),
        ("new", "", {"ack_policy": "explicit", "backoff": [1_000_000_000] * 3, "max_deliver": 2}),
        ("new", "", {"ack_policy": "explicit", "num_replicas": 5}),
        ("new", "", {"ack_policy": "explicit", "deliver_subject": "a.*"}),
        ("new", "", {"ack_policy": "explicit", "description": "x" * 5_000}),
        ("new", "", {"ack_policy": "explicit", "deliver_policy": "by_start_sequence"}),
    ):
        config = {"durable_name": name, "name": name, **config}
        body = {"stream_name": s, "config": config, "action": action}
        await wrong(client.api(f"CONSUMER.CREATE.{s}.{name}", body))
    queue = await make_stream(client, retention="workqueue")
    await make_consumer(client, queue)
    for config in (
        {"ack_policy": "explicit"},
        {"ack_policy": "none"},
        {"ack_policy": "explicit", "deliver_policy": "new"},
    ):
        body = {"stream_name": queue, "config": {"durable_name": "second", "name": "second", **config}}
        await wrong(client.api(f"CONSUMER.CREATE.{queue}.second", body))
    for number in range(2):
        await make_consumer(client, s, f"more{number}")
    await wrong(make_consumer(client, s, "too-many"))
    return found


async def test_errors_of_the_real_server_land_where_the_vector_says(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as client:
        found = await provoke(client)

    assert len(found) >= 25, sorted(found)
    assert set() == set(found) - set(VECTORS), "errors that the vector does not know"
    wrong = {
        number: (type(error).__name__, VECTORS[number]["class"])
        for number, error in found.items()
        if type(error).__name__ != VECTORS[number]["class"]
    }
    assert not wrong
