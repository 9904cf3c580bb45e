"""Ledgers for tests: SQLite files and a real PostgreSQL behind one face, and entries to put into them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sqlite3
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psycopg

from oncewire._ground.contracts import blocks
from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.database.migrate import migrations
from oncewire._ground.ledger import rules
from oncewire._ground.ledger.postgres import PostgresStore
from oncewire._ground.ledger.rules import Content, Delayed, Entry, Sending, Source
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire._ground.ledger.store import Appended, Mark, Store
from tests.support.postgres import shared_postgres

TENANT, WORKSPACE, AGENT = "default", "demo", "biller"
NAME = blocks.agent_name(TENANT, WORKSPACE, AGENT)
STREAM, CREATED = "EVENTS", "2026-01-01T00:00:00Z"
SOURCE = Source(STREAM, CREATED, "biller_consumer", ("evt.>",), 1, False)
SOURCES = {SOURCE.durable: SOURCE}
NOW_MS = 1_790_000_000_000


class LedgerKit:
    """One ledger that any number of stores may open; `rows` is a table of the user's beside it."""

    kind = ""
    url = ""

    def new(self, agent: str = AGENT) -> Store:
        """One more process's view of the ledger, opened."""
        store = self.unopened()
        store.open(TENANT, WORKSPACE, agent)
        return store

    def unopened(self) -> Store:
        raise NotImplementedError

    def sql(self, statement: str) -> list[Any]:
        """Ask by the way of a stranger: what is really there."""
        raise NotImplementedError

    def rows(self) -> list[int]:
        return sorted(row[0] for row in self.sql("SELECT id FROM charges"))


class SqliteKit(LedgerKit):
    kind = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self.url = f"sqlite:///{self.path}"
        self.sql("CREATE TABLE charges (id integer PRIMARY KEY)")

    def unopened(self) -> SqliteStore:
        return SqliteStore(str(self.path))

    def sql(self, statement: str) -> list[Any]:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()


_serial = itertools.count(1)


@cache
def _database() -> str:
    """One database for all ledgers of a test run: a schema each is a hundred times cheaper."""
    return asyncio.run(shared_postgres().new_database())


class PostgresKit(LedgerKit):
    kind = "postgres"

    def __init__(self) -> None:
        self.schema = f"ledger{next(_serial)}"
        self.url = _database()
        self.sql(f"CREATE SCHEMA {self.schema}")
        self.url = f"{self.url}?options=-csearch_path%3D{self.schema}"
        for one in migrations(("ledger",)):
            self.sql(one.sql)
        self.sql("CREATE TABLE charges (id integer PRIMARY KEY)")

    def unopened(self) -> PostgresStore:
        return PostgresStore(self.url)

    def sql(self, statement: str) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


def insert(tx: Any, number: int) -> None:
    """What a handler would write."""
    tx.execute(f"INSERT INTO charges VALUES ({number})")


def handle(store: Store, number: int) -> None:
    """A handler that writes a row, and returns."""
    insert(store.savepoint(), number)
    store.keep()


def key_of(number: int) -> bytes:
    return rules.identity_key(NAME, f"key:{number}")


def entry(number: int, outcome: Outcome = Outcome.DONE, *, effects: int = 0) -> Entry:
    body = f'{{"type":"t","payload":{{"n":{number}}}}}'.encode()
    at_key = rules.position_key(NAME, STREAM, CREATED, number)
    key = key_of(number) if outcome is Outcome.DONE else at_key
    digest = hashlib.sha256(body).digest()
    return Entry(
        key, f"key:{number}", "evt.default.demo.t", body, b"", outcome, STREAM, number, number * 1000, digest, effects
    )


def sending(id_: str) -> Sending:
    return Sending(id_, "evt.default.demo.x", b"{}", None, "EVENTS")


def content(entries: Iterable[Entry] = (), effects: int = 0) -> Content:
    found = list(entries)
    first = found[0].sequence if found else 0
    return Content(found, [sending(f"fx.{first}.{index}") for index in range(effects)], NOW_MS, {})


def settle(
    store: Store, numbers: Sequence[int], *, effects: int = 0, delayed: Sequence[Delayed] = (), rows: bool = False
) -> Appended:
    """One whole group commit."""
    store.begin()
    store.claim([key_of(number) for number in numbers])
    for number in numbers if rows else []:
        handle(store, number)
    appended = store.append(content([entry(number) for number in numbers], effects), SOURCES, delayed)
    store.commit()
    return appended


def found_by(store: Store, numbers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """What a transaction of its own finds settled, by number."""
    store.begin()
    found = store.claim([key_of(number) for number in numbers])
    store.rollback()
    by_key = {key_of(number): number for number in numbers}
    return {by_key[key]: tuple(place) for key, place in found.items()}


def mark(store: Store, *marks: Mark) -> None:
    store.begin()
    store.mark(marks)
    store.commit()
