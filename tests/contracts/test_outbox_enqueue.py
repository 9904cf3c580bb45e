"""One suite for every driver that enqueue knows: the same promises on psycopg, asyncpg, SQLAlchemy, Django, ctx.tx."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import asyncpg
import django
import django.conf
import django.db
import psycopg
import psycopg.rows
import pytest
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from oncewire import outbox
from oncewire._ground import errors
from oncewire._ground.contracts import MessageEnvelope, new_message
from oncewire._ground.ledger.postgres import PostgresStore
from oncewire._ground.ledger.sqlite import SqliteStore
from tests.support.postgres import shared_postgres

CONVERSATION = uuid.UUID("7c0f3a52-6a53-4b0e-8a55-0d3f1f1e7f10")


@dataclass
class Opened:
    """A connection as its driver gives it, inside a transaction; `autocommit` is one that would commit on its own."""

    connection: Any
    is_async: bool = True

    async def enqueue(self, conversation_id: Any = CONVERSATION, **values: Any) -> outbox.Enqueued:
        given = {"role": "user", "content": "hello"} | values
        if self.is_async:
            return await outbox.enqueue_async(self.connection, conversation_id, **given)
        return outbox.enqueue(self.connection, conversation_id, **given)

    async def enqueue_message(self, subject: str, envelope: MessageEnvelope) -> int:
        if self.is_async:
            return await outbox.enqueue_message_async(self.connection, subject, envelope)
        return outbox.enqueue_message(self.connection, subject, envelope)

    async def enqueue_many(self, messages: list[outbox.NewMessage]) -> list[outbox.Enqueued]:
        if self.is_async:
            return await outbox.enqueue_many_async(self.connection, messages)
        return outbox.enqueue_many(self.connection, messages)


class _Undo(Exception):
    """Raised inside a transaction to roll it back."""


@asynccontextmanager
async def with_psycopg(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    with psycopg.connect(url, autocommit=autocommit) as connection:
        yield Opened(connection, is_async=False)


@asynccontextmanager
async def with_psycopg_cursor(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    factory = psycopg.rows.dict_row
    with psycopg.connect(url, autocommit=autocommit, row_factory=factory) as connection, connection.cursor() as cursor:
        yield Opened(cursor, is_async=False)


@asynccontextmanager
async def with_psycopg_async(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    connection = await psycopg.AsyncConnection.connect(url, autocommit=autocommit)
    async with connection:
        yield Opened(connection)


@asynccontextmanager
async def with_asyncpg(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    connection = await asyncpg.connect(url)
    try:
        async with contextlib.nullcontext() if autocommit else connection.transaction():
            yield Opened(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def with_asyncpg_pool(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    async with (
        asyncpg.create_pool(url, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
        contextlib.nullcontext() if autocommit else connection.transaction(),
    ):
        yield Opened(connection)


def _engine_options(autocommit: bool) -> dict[str, Any]:
    return {"isolation_level": "AUTOCOMMIT"} if autocommit else {}


@asynccontextmanager
async def with_sqlalchemy(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    engine = sqlalchemy.create_engine(url.replace("postgresql", "postgresql+psycopg"), **_engine_options(autocommit))
    try:
        with engine.begin() as connection:
            yield Opened(connection, is_async=False)
    finally:
        engine.dispose()


@asynccontextmanager
async def with_sqlalchemy_session(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    engine = sqlalchemy.create_engine(url.replace("postgresql", "postgresql+psycopg"), **_engine_options(autocommit))
    try:
        with sqlalchemy.orm.Session(engine) as session, session.begin():
            yield Opened(session, is_async=False)
    finally:
        engine.dispose()


@asynccontextmanager
async def with_sqlalchemy_async(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    engine = create_async_engine(url.replace("postgresql", "postgresql+asyncpg"), **_engine_options(autocommit))
    try:
        async with engine.begin() as connection:
            yield Opened(connection)
    finally:
        await engine.dispose()


@asynccontextmanager
async def with_sqlalchemy_async_session(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    engine = create_async_engine(url.replace("postgresql", "postgresql+psycopg_async"), **_engine_options(autocommit))
    try:
        async with AsyncSession(engine) as session, session.begin():
            yield Opened(session)
    finally:
        await engine.dispose()


@asynccontextmanager
async def with_django(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    """Through Django's own registry of connections, as an application has it."""
    if not django.conf.settings.configured:
        django.conf.settings.configure()
        django.setup()
    parts = psycopg.conninfo.conninfo_to_dict(url)
    names = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}
    settings = {"ENGINE": "django.db.backends.postgresql"} | {name: parts[part] for name, part in names.items()}
    alias, connections = str(parts["dbname"]), django.db.connections
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: settings})[alias]
    try:
        with contextlib.nullcontext() if autocommit else django.db.transaction.atomic(using=alias):
            yield Opened(connections[alias], is_async=False)
    finally:
        connections[alias].close()


@asynccontextmanager
async def with_ledger(url: str, autocommit: bool, *, is_cursor: bool = False) -> AsyncIterator[Opened]:
    """In a handler of an agent; one that is over has no transaction any more."""
    store = PostgresStore(url)
    store.open("default", "default", "writer")
    try:
        store.begin()
        tx = store.savepoint()
        given = tx.cursor(row_factory=psycopg.rows.dict_row) if is_cursor else tx
        if autocommit:
            store.keep()
        yield Opened(given, is_async=False)
        if not autocommit:
            store.keep()
        store.commit()
    finally:
        store.rollback()
        store.close()


DRIVERS: dict[str, Callable[[str, bool], Any]] = {
    "psycopg": with_psycopg,
    "psycopg cursor": with_psycopg_cursor,
    "psycopg async": with_psycopg_async,
    "asyncpg": with_asyncpg,
    "asyncpg pool": with_asyncpg_pool,
    "sqlalchemy": with_sqlalchemy,
    "sqlalchemy session": with_sqlalchemy_session,
    "sqlalchemy async": with_sqlalchemy_async,
    "sqlalchemy async session": with_sqlalchemy_async_session,
    "django": with_django,
    "ctx.tx": with_ledger,
    "ctx.tx cursor": partial(with_ledger, is_cursor=True),
}


@dataclass
class Driver:
    url: str
    open_with: Callable[[str, bool], Any]

    def opened(self, *, autocommit: bool = False) -> Any:
        return self.open_with(self.url, autocommit)

    async def contents(self) -> list[tuple[int, str]]:
        connection = await asyncpg.connect(self.url)
        try:
            rows = await connection.fetch("SELECT sequence, content FROM conversation_messages ORDER BY sequence")
            return [tuple(row) for row in rows]
        finally:
            await connection.close()


@pytest.fixture(params=DRIVERS)
async def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # the suite is async, Django is not
    return Driver(await shared_postgres().new_database(), DRIVERS[request.param])


def message(number: int = 1) -> MessageEnvelope:
    return new_message(
        "LoopCreated",
        {"n": number},
        message_id=f"evt-{number}",
        timestamp=datetime(2025, 1, 1, tzinfo=UTC),
        actor_id="u",
        actor_kind="HUMAN",
    )


async def test_a_message_is_committed_with_the_transaction(driver: Driver) -> None:
    async with driver.opened() as opened:
        first = await opened.enqueue(content="a", model="m", citations=[{"n": 1}], metadata={"k": "ü"})
        second = await opened.enqueue(str(CONVERSATION), content="b")
        assert await driver.contents() == []
    assert (first.sequence, second.sequence) == (1, 2)
    assert uuid.UUID(first.message_id) != uuid.UUID(second.message_id)
    assert await driver.contents() == [(1, "a"), (2, "b")]


async def test_a_rolled_back_transaction_leaves_nothing(driver: Driver) -> None:
    with contextlib.suppress(_Undo):
        async with driver.opened() as opened:
            await opened.enqueue()
            await opened.enqueue_message("sr.events.loop", message())
            raise _Undo
    assert await driver.contents() == []


async def test_a_connection_that_commits_on_its_own_is_refused(driver: Driver) -> None:
    async with driver.opened(autocommit=True) as opened:
        with pytest.raises(errors.Refused, match=r"committed on its own|its transaction had ended") as caught:
            await opened.enqueue()
        assert caught.value.hint
    assert await driver.contents() == []


async def test_errors_of_the_database_come_from_our_tree(driver: Driver) -> None:
    for values, kind in (
        ({"role": "robot"}, errors.Refused),
        ({"content": "x" * 2_000_000}, errors.TooLarge),
        ({"tenant": "a b"}, errors.Refused),
    ):
        with pytest.raises(kind) as caught:
            async with driver.opened() as opened:
                await opened.enqueue(**values)
        assert caught.value.__cause__ is not None
    async with driver.opened() as opened:
        await opened.enqueue(tenant="acme")
    with pytest.raises(errors.PermissionDenied, match="another tenant"):
        async with driver.opened() as opened:
            await opened.enqueue(tenant="other")


async def test_what_is_no_message_is_refused_before_the_database_sees_it(driver: Driver) -> None:
    async with driver.opened() as opened:
        for wrong in (
            {"content": "a\0b"},
            {"metadata": [1]},
            {"metadata": {"n": 10**4_300}},
            {"citations": object()},
            {"model": 5},
        ):
            with pytest.raises(errors.ContractViolation):
                await opened.enqueue(**wrong)
        with pytest.raises(errors.ContractViolation, match="no UUID"):
            await opened.enqueue("room-1")
        await opened.enqueue()
    assert await driver.contents() == [(1, "hello")]


async def test_several_conversations_are_locked_in_the_order_of_their_ids(driver: Driver) -> None:
    ids = [uuid.UUID(int=n) for n in (3, 1, 2, 1)]
    many = [outbox.NewMessage(conversation_id=one, role="user", content=str(one.int)) for one in ids]
    async with driver.opened() as opened:
        done = await opened.enqueue_many(many)
    assert [one.sequence for one in done] == [1, 1, 1, 2]


async def test_an_envelope_for_any_subject_is_enqueued_once(driver: Driver) -> None:
    async with driver.opened() as opened:
        first = await opened.enqueue_message("sr.events.loop", message())
        assert await opened.enqueue_message("sr.events.loop", message()) == first
        with pytest.raises(errors.ContractViolation):
            await opened.enqueue_message("sr.events.*", message())


# ---- not per driver


async def test_two_transactions_over_the_same_conversations_cannot_deadlock() -> None:
    url = await shared_postgres().new_database()
    ids = [uuid.uuid4() for _ in range(6)]

    async def write(order: list[uuid.UUID]) -> None:
        connection = await asyncpg.connect(url)
        for _ in range(30):
            async with connection.transaction():
                many = [outbox.NewMessage(conversation_id=one, role="user", content="x") for one in order]
                await outbox.enqueue_many_async(connection, many)
        await connection.close()

    await asyncio.gather(write(ids), write(ids[::-1]))


async def test_the_wrong_twin_says_which_one_to_use() -> None:
    url = await shared_postgres().new_database()
    async with with_asyncpg(url, False) as opened:
        with pytest.raises(errors.Refused, match="async connection") as caught:
            outbox.enqueue(opened.connection, CONVERSATION, role="user", content="x")
        assert "enqueue_async" in caught.value.hint
    async with with_psycopg(url, False) as opened:
        with pytest.raises(errors.Refused, match="no async connection") as caught:
            await outbox.enqueue_async(opened.connection, CONVERSATION, role="user", content="x")
        assert "outbox.enqueue(" in caught.value.hint


def test_what_is_no_connection_is_refused() -> None:
    with pytest.raises(errors.Refused, match="is no connection that enqueue knows"):
        outbox.enqueue(object(), CONVERSATION, role="user", content="x")
    store = SqliteStore(":memory:")
    store.open("default", "default", "writer")
    store.begin()
    with pytest.raises(errors.Refused, match="a transaction of SQLite"):
        outbox.enqueue(store.savepoint(), CONVERSATION, role="user", content="x")
    store.rollback()
    store.close()


async def test_a_connection_that_is_closed_is_unavailable() -> None:
    url = await shared_postgres().new_database()
    connection = psycopg.connect(url)
    connection.close()
    with pytest.raises(errors.NotConnected):
        outbox.enqueue(connection, CONVERSATION, role="user", content="x")
