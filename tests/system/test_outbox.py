"""The SQL functions of the outbox, as any language calls them, and the commands around it."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import click
import pytest
from click.testing import CliRunner, Result

from oncewire.cli.outbox import outbox as outbox_command
from oncewire.outbox.purge import purge
from tests.support.outbox import ENQUEUE
from tests.support.postgres import shared_postgres

ENQUEUE_WITH = "SELECT sequence FROM enqueue_conversation_message($1, $2, $3, NULL, NULL, NULL, $4, $5)"


@pytest.fixture
async def url() -> str:
    return await shared_postgres().new_database()


@pytest.fixture
async def connection(url: str) -> AsyncIterator[Any]:
    opened = await asyncpg.connect(url)
    yield opened
    await opened.close()


# ---- numbers


async def test_messages_are_numbered_from_one_in_each_conversation(connection: Any) -> None:
    one, other = uuid.uuid4(), uuid.uuid4()
    numbers = [(await connection.fetchrow(ENQUEUE, which, "x"))["sequence"] for which in (one, one, other, one, other)]
    assert numbers == [1, 2, 1, 3, 2]


async def test_a_number_that_was_rolled_back_is_given_again(connection: Any) -> None:
    one = uuid.uuid4()
    transaction = connection.transaction()
    await transaction.start()
    await connection.fetch(ENQUEUE, one, "x")
    await transaction.rollback()
    assert (await connection.fetchrow(ENQUEUE, one, "y"))["sequence"] == 1


async def test_the_order_of_numbers_is_the_order_of_commits(connection: Any, url: str) -> None:
    """The second writer waits for the first: 3 cannot be seen before 2."""
    one, second = uuid.uuid4(), await asyncpg.connect(url)
    await connection.fetch(ENQUEUE, one, "the conversation is there")
    transaction = connection.transaction()
    await transaction.start()
    await connection.fetch(ENQUEUE, one, "first")
    waiting = asyncio.create_task(second.fetchrow(ENQUEUE, one, "second"))
    done, _ = await asyncio.wait((waiting,), timeout=0.2)
    assert not done
    await transaction.commit()
    assert (await waiting)["sequence"] == 3
    await second.close()


async def test_many_writers_make_no_gap_and_no_double(connection: Any, url: str) -> None:
    one = uuid.uuid4()

    async def write() -> None:
        mine = await asyncpg.connect(url)
        for _ in range(20):
            await mine.fetch(ENQUEUE, one, "x")
        await mine.close()

    await asyncio.gather(*(write() for _ in range(8)))
    rows = await connection.fetch("SELECT sequence FROM conversation_messages ORDER BY created_at, sequence")
    assert sorted(row["sequence"] for row in rows) == list(range(1, 161))


async def test_a_conversation_that_a_service_made_itself_is_relayed_too(connection: Any) -> None:
    one = uuid.uuid4()
    await connection.execute("INSERT INTO conversations (id, tenant) VALUES ($1, 'acme')", one)
    await connection.fetch(ENQUEUE_WITH, one, "user", "x", None, "acme")
    assert await connection.fetchval("SELECT count(*) FROM conversation_relay WHERE conversation_id = $1", one) == 1


# ---- what is refused


@pytest.mark.parametrize(
    ("role", "content", "metadata", "tenant", "state"),
    [
        ("robot", "x", None, "", "OW400"),
        (None, "x", None, "", "OW400"),
        ("user", None, None, "", "OW400"),
        ("user", "x", "[1]", "", "OW400"),
        ("user", "x", None, "a b", "OW400"),
        ("user", "x", None, "a\r\nNats-Msg-Id: x", "OW400"),
        ("user", "x", None, "x" * 129, "OW400"),
        ("user", "x" * 1_100_000, None, "", "OW413"),
        ("user", "\x01" * 200_000, None, "", "OW413"),
    ],
)
async def test_what_could_never_be_published_is_refused(
    connection: Any, role: str | None, content: str | None, metadata: str | None, tenant: str, state: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await connection.fetch(ENQUEUE_WITH, uuid.uuid4(), role, content, metadata, tenant)
    assert caught.value.sqlstate == state
    assert await connection.fetchval("SELECT count(*) FROM conversations") == 0


async def test_a_conversation_of_another_tenant_is_refused(connection: Any) -> None:
    one = uuid.uuid4()
    await connection.fetch(ENQUEUE_WITH, one, "user", "x", None, "acme")
    with pytest.raises(asyncpg.PostgresError) as caught:
        await connection.fetch(ENQUEUE_WITH, one, "user", "x", None, "other")
    assert caught.value.sqlstate == "OW403"


# ---- the functions of the spec


async def test_a_row_is_marked_by_the_functions_of_the_protocol(connection: Any) -> None:
    await connection.fetch(ENQUEUE, uuid.uuid4(), "x")
    row_id = await connection.fetchval("SELECT id FROM message_outbox")
    await connection.fetch("SELECT mark_outbox_failed($1, 'no')", row_id)
    row = await connection.fetchrow(
        "SELECT status, attempts, error, next_attempt_at > now() AS waits FROM message_outbox"
    )
    assert tuple(row) == ("failed", 1, "no", True)
    assert await connection.fetchval("SELECT error FROM conversation_relay") == "no"
    await connection.fetch("SELECT mark_outbox_dispatched($1)", row_id)
    row = await connection.fetchrow("SELECT status, attempts, error FROM message_outbox")
    assert tuple(row) == ("dispatched", 2, None)
    await connection.fetch("SELECT mark_outbox_failed($1, 'late')", row_id)
    assert await connection.fetchval("SELECT status FROM message_outbox") == "dispatched"


# ---- purge


async def test_only_what_was_dispatched_long_ago_is_purged(connection: Any) -> None:
    one = uuid.uuid4()
    for _ in range(4):
        await connection.fetch(ENQUEUE, one, "x")
    await connection.execute("UPDATE message_outbox SET created_at = now() - interval '2 days'")
    await connection.execute(
        "UPDATE message_outbox SET status = 'dispatched', dispatched_at = now() WHERE sequence = 1"
    )
    await connection.execute(
        "UPDATE message_outbox SET status = 'dispatched', dispatched_at = now() - interval '1 day' WHERE sequence = 2"
    )
    await connection.execute("UPDATE message_outbox SET status = 'failed' WHERE sequence = 3")
    assert await purge(connection, keep_s=3_600) == {"message_outbox": 1, "outbox_messages": 0}
    assert [row[0] for row in await connection.fetch("SELECT sequence FROM message_outbox ORDER BY 1")] == [1, 3, 4]
    assert await connection.fetchval("SELECT count(*) FROM conversation_messages") == 4


async def test_a_purge_walks_on_behind_rows_that_stay(connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncewire.outbox.purge.CHUNK", 3)
    one = uuid.uuid4()
    for _ in range(20):
        await connection.fetch(ENQUEUE, one, "x")
    await connection.execute(
        """UPDATE message_outbox SET created_at = now() - interval '1 day',
            dispatched_at = now() - interval '1 day',
            status = CASE WHEN sequence <= 7 THEN 'failed' ELSE 'dispatched' END"""
    )
    assert (await purge(connection, keep_s=3_600))["message_outbox"] == 13


# ---- the commands


def command(url: str, *args: str) -> Result:
    environ = {"ONCEWIRE_POSTGRES_URL": url}
    return CliRunner().invoke(outbox_command, list(args), env=environ, catch_exceptions=False)


async def in_thread(url: str, *args: str) -> Result:
    """Commands have a loop of their own."""
    return await asyncio.to_thread(command, url, *args)


async def failed_conversation(connection: Any) -> uuid.UUID:
    one = uuid.uuid4()
    await connection.fetch(ENQUEUE, one, "x")
    await connection.fetch(ENQUEUE, one, "y")
    await connection.fetch("SELECT mark_outbox_failed(id, 'too large') FROM message_outbox WHERE sequence = 1")
    return one


async def test_status_lists_what_is_stuck_and_why(connection: Any, url: str) -> None:
    one = await failed_conversation(connection)
    told = await in_thread(url, "status")
    assert told.exit_code == 1
    assert f"conversation {one} stops at 1 (2 waiting, 1 attempts): too large" in told.output
    found = json.loads((await in_thread(url, "status", "--json")).output)
    assert found["counts"][0]["pending"] == 1
    assert found["conversations"][0]["conversation_id"] == str(one)


async def test_status_is_well_when_nothing_is_stuck(connection: Any, url: str) -> None:
    await connection.fetch(ENQUEUE, uuid.uuid4(), "x")
    told = await in_thread(url, "status")
    assert (told.exit_code, "conversations  1 pending, 0 failed" in told.output) == (0, True)


async def test_retry_makes_a_conversation_due_at_once(connection: Any, url: str) -> None:
    one = await failed_conversation(connection)
    told = await in_thread(url, "retry", str(one), "--json")
    assert json.loads(told.output) == {"retried": 1}
    assert await connection.fetchval("SELECT next_attempt_at FROM conversation_relay") is None


@pytest.mark.parametrize("args", [[], ["--all", "--message", "1"]])
async def test_retry_wants_to_know_what(url: str, args: list[str]) -> None:
    assert (await in_thread(url, "retry", *args)).exit_code == 2


async def test_void_needs_a_reason_and_a_message_that_waits(connection: Any, url: str) -> None:
    one = await failed_conversation(connection)
    assert (await in_thread(url, "void", str(one), "1")).exit_code == 2
    assert (await in_thread(url, "void", str(one), "9", "--reason", "r")).exit_code == 2
    assert (await in_thread(url, "void", str(one), "1", "--reason", "r")).exit_code == 0
    assert await connection.fetchval("SELECT void_reason FROM conversation_messages WHERE sequence = 1") == "r"


async def test_purge_says_how_many_rows_went(connection: Any, url: str) -> None:
    await connection.fetch(ENQUEUE, uuid.uuid4(), "x")
    await connection.fetch("SELECT mark_outbox_dispatched(id) FROM message_outbox")
    told = await in_thread(url, "purge", "--older-than-s", "0", "--json")
    assert json.loads(told.output) == {"message_outbox": 1, "outbox_messages": 0}


async def test_without_a_postgresql_the_commands_say_what_to_set(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = await in_thread("", "status", "--json")
    assert told.exit_code == 2
    assert "ONCEWIRE_POSTGRES_URL" in told.stderr


@pytest.mark.parametrize("name", ["status", "retry", "void", "purge"])
def test_each_command_shows_an_example(name: str) -> None:
    told = CliRunner().invoke(outbox_command, [name, "--help"])
    assert "Example" in told.output
    assert isinstance(outbox_command, click.Group)
