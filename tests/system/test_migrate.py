"""Migrations: applied once, in order, by one of many; into any schema; as a script too."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner

from oncewire._ground.database import migrate
from oncewire._ground.database.postgres import connected
from oncewire._ground.errors import Corrupt, Refused
from oncewire.cli.migrate import migrate as migrate_command
from oncewire.outbox import enqueue_async
from tests.support.postgres import shared_postgres

CREATE_OUTBOX = Path(__file__).parents[2] / "infra" / "scripts" / "create-outbox.sql"
_serial = itertools.count(1)


@pytest.fixture
async def url() -> str:
    """An empty database."""
    name = f"empty{next(_serial)}"
    async with connected(shared_postgres().url()) as connection:
        await connection.execute(f"CREATE DATABASE {name}")
    return shared_postgres().url(name)


async def tables(url: str, schema: str = "public") -> set[str]:
    async with connected(url) as connection:
        rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)
    return {row[0] for row in rows}


async def test_a_second_migration_changes_nothing(url: str) -> None:
    first = await migrate.migrate(url)
    assert {"conversations", "message_outbox", "outbox_messages"} <= await tables(url)
    assert [migration.title for migration in first] == ["outbox 001 outbox", "ledger 001 ledger"]
    assert await migrate.migrate(url) == []


async def test_many_processes_may_migrate_at_once(url: str) -> None:
    applied = await asyncio.gather(*(migrate.migrate(url) for _ in range(5)))
    assert sum(len(one) for one in applied) == len(migrate.migrations())


async def test_a_file_that_changed_after_it_was_applied_is_refused(url: str) -> None:
    await migrate.migrate(url)
    async with connected(url) as connection:
        await connection.execute("UPDATE oncewire_migrations SET checksum = 'other' WHERE number = 1")
    with pytest.raises(Corrupt, match="outbox 001"):
        await migrate.migrate(url)


async def test_a_schema_of_its_own_holds_tables_and_functions(url: str) -> None:
    """Callers need not have it on their search path: the functions know their own."""
    await migrate.migrate(url, "messaging")
    assert "conversations" in await tables(url, "messaging")
    assert await tables(url) == set()
    async with connected(url) as connection, connection.transaction():
        done = await enqueue_async(connection, uuid.uuid4(), role="user", content="x", schema="messaging")
    assert done.sequence == 1


ENQUEUE = "SELECT sequence FROM enqueue_conversation_message('00000000-0000-0000-0000-000000000001', 'user', $1)"


@pytest.mark.parametrize(
    "wrong",
    [
        "INSERT INTO conversations (id, tenant) VALUES (gen_random_uuid(), 'two words')",
        "UPDATE conversations SET tenant = E'a\\tb'",
        "UPDATE conversations SET last_sequence = -1",
        "UPDATE conversation_messages SET role = 'robot'",
        "UPDATE conversation_messages SET sequence = 0",
        "UPDATE message_outbox SET status = 'lost'",
        "UPDATE outbox_messages SET status = 'lost'",
    ],
)
async def test_what_a_column_may_not_hold_is_refused(wrong: str) -> None:
    """By the tables themselves: services write to them by their own SQL too."""
    async with connected(await shared_postgres().new_database()) as connection:
        await connection.fetchval(ENQUEUE, "x")
        await connection.execute("INSERT INTO outbox_messages (subject, body, idempotency_key) VALUES ('a', '{}', 'k')")
        with pytest.raises(asyncpg.CheckViolationError):
            await connection.execute(wrong)


@pytest.mark.parametrize("schema", ["Public", "a b", 'x"; DROP', "1a", "a" * 64])
async def test_an_odd_schema_is_refused(url: str, schema: str) -> None:
    with pytest.raises(Refused, match="schema"):
        await migrate.migrate(url, schema)


@pytest.mark.parametrize("schema", ["", "messaging"])
async def test_the_script_does_what_migrate_does_and_can_be_run_again(url: str, schema: str) -> None:
    for _ in range(2):
        connection = await asyncpg.connect(url)
        await connection.execute(migrate.script(schema))
        await connection.close()
    assert await migrate.migrate(url, schema) == []
    async with connected(url) as connection, connection.transaction():
        assert (await enqueue_async(connection, uuid.uuid4(), role="user", content="x", schema=schema)).sequence == 1


async def test_the_script_can_be_run_after_migrate_and_by_several_at_once(url: str) -> None:
    await migrate.migrate(url)

    async def run_script() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(migrate.script())
        await connection.close()

    await asyncio.gather(*(run_script() for _ in range(3)))


async def test_a_script_of_a_changed_file_is_refused(url: str) -> None:
    await migrate.migrate(url)
    async with connected(url) as connection:
        await connection.execute("UPDATE oncewire_migrations SET checksum = 'other' WHERE part = 'ledger'")
    with pytest.raises(Corrupt, match="ledger 001"):
        async with connected(url) as connection:
            await connection.execute(migrate.script())


async def test_a_statement_that_fails_leaves_nothing_of_its_migration(url: str) -> None:
    """A table of the application's own is in the way: no other table is made, and the next attempt begins anew."""
    async with connected(url) as connection:
        await connection.execute("CREATE TABLE relay_state ()")
    with pytest.raises(Refused, match="relay_state"):
        await migrate.migrate(url)
    assert await tables(url) == {"relay_state"}
    async with connected(url) as connection:
        await connection.execute("DROP TABLE relay_state")
    assert len(await migrate.migrate(url)) == len(migrate.migrations())


async def test_the_file_that_the_realtime_protocol_names_makes_the_outbox(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(CREATE_OUTBOX.read_text())
    await connection.close()
    assert {"conversations", "message_outbox", "outbox_messages", "oncewire_migrations"} <= await tables(url)
    assert [migration.part for migration in await migrate.migrate(url)] == ["ledger"]


async def run(*args: str, url: str = "") -> Any:
    environ = {"ONCEWIRE_POSTGRES_URL": url}
    return await asyncio.to_thread(CliRunner().invoke, migrate_command, list(args), env=environ)


async def test_the_command_tells_what_it_applied(url: str) -> None:
    told = await run("--json", url=url)
    assert json.loads(told.output)["applied"][0] == "outbox 001 outbox"
    again = await run(url=url)
    assert (again.exit_code, again.output.endswith("is up to date\n")) == (0, True)


async def test_the_command_prints_the_script_without_a_database() -> None:
    told = await run("--sql", "--schema", "messaging")
    assert told.output == migrate.script("messaging")


async def test_the_command_without_a_database_says_what_to_set(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = await run("--json")
    assert (told.exit_code, "ONCEWIRE_POSTGRES_URL" in told.stderr) == (2, True)


async def test_a_database_that_is_not_there_is_unavailable() -> None:
    told = await run("--json", url="postgresql://oncewire@127.0.0.1:1/none")
    assert (told.exit_code, json.loads(told.stderr)["error"]["code"]) == (3, "not_connected")


async def test_before_a_migration_enqueue_says_to_migrate(url: str) -> None:
    with pytest.raises(Refused) as caught:
        async with connected(url) as connection, connection.transaction():
            await enqueue_async(connection, uuid.uuid4(), role="user", content="x")
    assert "oncewire migrate" in caught.value.hint
