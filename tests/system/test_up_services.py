"""After `oncewire up` all that is declared is in place, the outbox is relayed, and the gateway shows its history."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import asyncpg
import nats

from oncewire import BrokerClient
from tests.support.up import Up, made, oncewire


async def test_nothing_is_left_to_plan_after_up(tmp_path: Path) -> None:
    """The plan is empty, and a plain client finds all that the catalogs declare."""
    up = Up(made(tmp_path / "data")).ready()
    try:
        planned = oncewire("topology", "plan", "--json", "--data", str(tmp_path / "data"), cwd=tmp_path)
        assert 0 == planned.returncode, planned.stderr
        assert [] == json.loads(planned.stdout)["steps"]
        witness = await nats.connect(up.url("nats"))
        found = {one.config.name for one in await witness.jetstream().streams_info()}
        assert {"BILLING", "MESHFORGE_EVENTS", "sr-events", "CHAT_EVENTS", "DLQ", "KV_OW_LEDGERS"} <= found
        assert 4 == len(await witness.jetstream().consumers_info("BILLING"))
        await witness.close()
    finally:
        up.stop()


async def test_what_is_committed_to_the_outbox_reaches_its_stream(tmp_path: Path) -> None:
    """The tables are made and a relay runs, without a further command."""
    up = Up(tmp_path / "data").ready()
    try:
        witness = await nats.connect(up.url("nats"))
        heard = await witness.subscribe("chat.events.>")
        database = await asyncpg.connect(up.url("postgres"))
        conversation = "7b0e4a52-0f6c-4a57-9a39-3f1f5b2a1c11"
        await database.fetch("SELECT * FROM enqueue_conversation_message($1, 'user', 'hello')", conversation)
        await database.close()
        message = await heard.next_msg(timeout=30)
        assert f"chat.events.{conversation}" == message.subject
        assert "hello" == json.loads(message.data)["event"]["content"]
        await witness.jetstream().purge_stream("CHAT_EVENTS")
        gateway = next(one["url"] for one in up.events if one.get("part") == "gateway" and "url" in one)
        address = f"{gateway}/conversations/{conversation}/messages"
        with await asyncio.to_thread(urllib.request.urlopen, address) as answer:
            history = json.load(answer)
        assert (True, None) == (history["complete"], history["next"]), "the database has what the stream has not"
        assert ["hello"] == [one["event"]["content"] for one in history["messages"]]
        await witness.close()
    finally:
        up.stop()


async def test_up_runs_a_broker_whose_topics_are_streams(tmp_path: Path) -> None:
    """What is produced over HTTP stands in a stream of the same server."""
    up = Up(tmp_path / "data").ready()
    try:
        url = next(event["url"] for event in up.events if event.get("part") == "broker" and event["event"] == "ready")
        assert url == up.running.services["broker"]
        async with BrokerClient(url) as client:
            await client.create_topic("orders")
            await client.produce("orders", "hello")
            (delivery,) = await client.take("orders", "billing", wait_s=20.0)
            await client.ack(client.lease("orders", "billing", delivery))
        witness = await nats.connect(up.url("nats"))
        stream = await witness.jetstream().find_stream_name_by_subject("owb.=.orders.>")
        found = await witness.jetstream().get_msg(stream, seq=delivery.offset + 1)
        assert {"key": "", "value": "hello"} == json.loads(found.data or b"")
        await witness.close()
    finally:
        up.stop()


def test_up_says_that_something_is_not_as_declared(tmp_path: Path) -> None:
    """On drift it starts all the same, and says so."""
    up = Up(made(tmp_path / "data")).ready()
    changed = tmp_path / "mine.toml"
    changed.write_text('[streams.BILLING]\nmax_age = "1d"\n')
    applied = oncewire("topology", "apply", "--file", str(changed), "--data", str(tmp_path / "data"), cwd=tmp_path)
    assert 0 == applied.returncode, applied.stderr
    up.stop()
    again = Up(tmp_path / "data")
    try:
        told = again.wait_for("ready", "topology")
        assert "1 not as declared" in told["text"]
        again.wait_for("serving")
    finally:
        again.stop()
