"""Rows that somebody's own SQL wrote: what readers would refuse is stuck with a reason, and stops nobody else."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner, Result

import oncewire
from oncewire.cli.outbox import outbox as outbox_command
from oncewire.outbox import relaying
from tests.support.nats import NatsServer
from tests.support.outbox import (
    ENQUEUE,
    MESSAGES_STREAM,
    MESSAGES_SUBJECT,
    drained,
    found_in_stream,
    make_chat_stream,
    make_messages_stream,
    open_rows,
)
from tests.support.outbox import envelope_json as envelope
from tests.support.postgres import shared_postgres
from tests.support.streams import stored_ids
from tests.support.wait import until_async

RAW = "SELECT * FROM enqueue_conversation_message($1, 'user', $2, p_metadata => $3::text::jsonb)"
RAW_MESSAGE = "INSERT INTO outbox_messages (subject, body, idempotency_key, traceparent) VALUES ($1, $2, $3, $4)"


@pytest.fixture
async def url() -> str:
    return await shared_postgres().new_database()


@pytest.fixture
async def connection(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


async def command(url: str, *args: str) -> Result:
    environ = {"ONCEWIRE_POSTGRES_URL": url}
    return await asyncio.to_thread(CliRunner().invoke, outbox_command, list(args), env=environ, catch_exceptions=False)


async def stuck(url: str, kind: str, count: int) -> list[dict[str, Any]]:
    """What `oncewire outbox status` lists, once it is so many."""

    async def listed() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((await command(url, "status", "--json")).output)[kind]
        return found if len(found) == count else []

    found: list[dict[str, Any]] = await until_async(listed, f"{count} stuck {kind}")
    return found


@pytest.mark.parametrize("number", ["1e5000", "-1e4299"])
async def test_a_number_that_readers_refuse_stops_its_conversation_alone(
    server: NatsServer, url: str, connection: Any, number: str
) -> None:
    flawed, neighbour = uuid.UUID(int=1), uuid.UUID(int=2)
    await connection.fetch(ENQUEUE, flawed, "first")
    await connection.fetch(RAW, flawed, "second", f'{{"n": {number}}}')
    await connection.fetch(ENQUEUE, flawed, "third")
    await connection.fetch(ENQUEUE, neighbour, "fine")
    async with oncewire.connect(server.url) as client:
        await make_chat_stream(client)
        async with relaying(client, url):
            (one,) = await stuck(url, "conversations", 1)
            assert (one["conversation_id"], one["sequence"], one["waiting"]) == (str(flawed), 2, 2)
            assert "out of range" in one["error"]
            await until_async(lambda: _is_left(url, 2), "the neighbour")
            assert (await command(url, "retry", str(flawed))).exit_code == 0
            await until_async(lambda: _has_attempts(connection, 2), "a second attempt")
            assert (await command(url, "void", str(flawed), "2", "--reason", "no JSON number")).exit_code == 0
            await drained(url)
    found = await found_in_stream(server.url)
    contents = [one.content for one in found if one.conversation_id == str(flawed)]
    assert (contents, len(found)) == (["first", "", "third"], 4)


async def _is_left(url: str, count: int) -> bool:
    return await open_rows(url) == count


async def _has_attempts(connection: Any, count: int) -> bool:
    return bool(await connection.fetchval("SELECT max(attempts) >= $1 FROM message_outbox", count))


async def test_messages_that_can_never_be_read_or_sent_fail_alone(
    server: NatsServer, url: str, connection: Any
) -> None:
    reasons = {
        "range": "out of range",
        "large": "out of range",
        "letter": "dead-letter service",
        "json": "MessageEnvelope",
        "spaced": "a space",
        "query": "queries are requests",
        "trace": "traceparent",
    }
    rows = [
        (MESSAGES_SUBJECT, envelope("range", '{"n":1e400}'), "range", None),
        (MESSAGES_SUBJECT, envelope("large", f'{{"n":{"9" * 4_301}}}'), "large", None),
        (MESSAGES_SUBJECT, "no json", "json", None),
        ("sr.events loop", envelope("spaced"), "spaced", None),
        ("sr.queries.loop", envelope("query"), "query", None),
        ("dlq.sr.events.loop", envelope("letter"), "letter", None),
        (MESSAGES_SUBJECT, envelope("trace"), "trace", "00-\r\nX: y"),
        (MESSAGES_SUBJECT, envelope("fine"), "fine", None),
    ]
    await connection.executemany(RAW_MESSAGE, rows)
    async with oncewire.connect(server.url) as client:
        await make_messages_stream(client)
        async with relaying(client, url):
            found = {one["idempotency_key"]: one for one in await stuck(url, "messages", len(reasons))}
            assert {key for key, reason in reasons.items() if reason in found[key]["error"]} == set(reasons)
            await until_async(lambda: _is_left(url, len(reasons)), "the neighbour")
            mended = envelope("range", '{"n":1}')
            await connection.execute("UPDATE outbox_messages SET body = $1 WHERE idempotency_key = 'range'", mended)
            assert (await command(url, "retry", "--message", str(found["range"]["id"]))).exit_code == 0
            for key in set(reasons) - {"range"}:
                assert (await command(url, "void", "--message", str(found[key]["id"]))).exit_code == 0
            await drained(url)
    assert sorted(await stored_ids(server.url, MESSAGES_STREAM)) == ["fine", "range"]
