"""`publish(…, once=True)` stores an id once, also after the duplicate window, or says why it cannot know."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import oncewire
from oncewire._ground.errors import NotFound, Refused, TimedOut
from oncewire._ground.jetstream import Client, lookup
from oncewire._ground.jetstream.reader import Reader
from tests.support.nats import NatsServer
from tests.support.streams import forget_ids
from tests.support.up import oncewire as command

STREAM: dict[str, Any] = {"name": "EVENTS", "subjects": ["evt.>"], "allow_direct": True}
ORDER = "evt.orders"


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(server.url) as connected:
        await connected.api("STREAM.CREATE.EVENTS", STREAM)
        yield connected


async def stored(client: Client, subject: str = ORDER) -> int:
    info = await client.api("STREAM.INFO.EVENTS", {"subjects_filter": subject})
    return int((info["state"].get("subjects") or {}).get(subject, 0))


async def test_a_repeat_after_the_window_is_found_and_not_stored(client: Client) -> None:
    first = await client.publish(ORDER, b"1", msg_id="order-1", raw=True, once=True)
    await forget_ids(client, "EVENTS", "evt.probe")
    again = await client.publish(ORDER, b"1", msg_id="order-1", raw=True, once=True)
    assert (False, True) == (first.is_duplicate, again.is_duplicate)
    assert first.sequence == again.sequence
    assert 1 == await stored(client)
    await client.publish(ORDER, b"1", msg_id="order-1", raw=True)  # the server has forgotten it indeed
    assert 2 == await stored(client)


async def test_callers_at_the_same_time_store_it_once(client: Client) -> None:
    acks = await asyncio.gather(*(client.publish(ORDER, b"1", msg_id="order-1", raw=True, once=True) for _ in range(8)))
    assert 1 == sum(not ack.is_duplicate for ack in acks)
    assert 1 == await stored(client)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"retention": "workqueue"}, "retention workqueue"),
        ({"retention": "interest"}, "retention interest"),
        ({"max_msgs_per_subject": 5}, "5 messages per subject"),
        ({"allow_msg_ttl": True}, "time to live"),
        ({"allow_rollup_hdrs": True}, "rollup"),
        ({"subject_transform": {"src": "evt.>", "dest": "other.>"}}, "under other subjects"),
        ({"duplicate_window": 30_000_000_000}, "shorter than the publish may take (20 s)"),
    ],
)
async def test_where_a_look_cannot_know_the_call_refuses(server: NatsServer, config: dict[str, Any], why: str) -> None:
    async with oncewire.connect(server.url) as client:
        await client.api("STREAM.CREATE.EVENTS", STREAM | config)
        with pytest.raises(Refused) as refused:
            await client.publish(ORDER, b"1", msg_id="order-1", raw=True, once=True)
        assert why in refused.value.message
        assert "Nothing was stored" in refused.value.hint
        assert 0 == (await client.api("STREAM.INFO.EVENTS"))["state"]["messages"]


async def test_a_stream_that_has_removed_messages_knows_young_ids_only(client: Client) -> None:
    for number in range(3):
        await client.publish(ORDER, b"", msg_id=f"old-{number}", raw=True)
    await client.api("STREAM.PURGE.EVENTS", {"seq": 2})
    for once in (True, timedelta(hours=1)):
        with pytest.raises(Refused, match="it has removed its messages from before"):
            await client.publish(ORDER, b"1", msg_id="new", raw=True, once=once)
    assert 2 == await stored(client)
    ack = await client.publish(ORDER, b"1", msg_id="new", raw=True, once=timedelta(milliseconds=1))
    assert not ack.is_duplicate
    await forget_ids(client, "EVENTS", "evt.probe")
    assert (await client.publish(ORDER, b"1", msg_id="new", raw=True, once=timedelta(hours=1))).is_duplicate


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"once": True}, "needs an id"),
        ({"msg_id": "x", "once": timedelta()}, "cannot be 0:00:00 old"),
    ],
)
async def test_what_cannot_be_looked_for_is_refused(client: Client, options: dict[str, Any], error: str) -> None:
    with pytest.raises(Refused, match=error):
        await client.publish(ORDER, b"1", raw=True, **options)
    with pytest.raises(NotFound, match=r"no stream captures nowhere\.at\.all"):
        await client.publish("nowhere.at.all", b"1", msg_id="x", once=True, raw=True)


async def test_a_look_that_the_server_breaks_off_is_no_proof(
    client: Client, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.publish(ORDER, b"1", msg_id="order-1", raw=True)
    await forget_ids(client, "EVENTS", "evt.probe")
    fetch = Reader.fetch

    async def fetch_from_a_stopped_server(self: Reader, count: int = 0, *, timeout_s: float | None = None) -> Any:
        server.signal(signal.SIGSTOP)
        try:
            return await fetch(self, count, timeout_s=timeout_s)
        finally:
            server.signal(signal.SIGCONT)

    monkeypatch.setattr(lookup, "SILENCE_S", 0.2)
    monkeypatch.setattr(Reader, "fetch", fetch_from_a_stopped_server)
    with pytest.raises(TimedOut, match="while it was searched for ids"):
        await client.publish(ORDER, b"1", msg_id="order-1", raw=True, once=True)
    assert 1 == await stored(client)


async def test_the_command_publishes_once(client: Client, server: NatsServer, tmp_path: Path) -> None:
    args = ("publish", ORDER, "{}", "--raw", "--id", "order-1", "--once")
    first = await asyncio.to_thread(command, *args, cwd=tmp_path, NATS_URL=server.url)
    await forget_ids(client, "EVENTS", "evt.probe")
    again = await asyncio.to_thread(command, *args, "--id-age", "1h", cwd=tmp_path, NATS_URL=server.url)
    assert ("EVENTS 1\n", "EVENTS 1 (duplicate: already stored)\n") == (first.stdout, again.stdout), again.stderr
    for wrong, error in ((("--id-age", "1h"), "Add --once"), (("--once", "--id-age", "soon"), "is not a duration")):
        refused = await asyncio.to_thread(command, *args[:6], *wrong, cwd=tmp_path, NATS_URL=server.url)
        assert 2 == refused.returncode
        assert error in refused.stderr
