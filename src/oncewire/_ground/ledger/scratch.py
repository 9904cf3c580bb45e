"""A place to run handlers again: the user's tables, empty, beside a ledger that nothing can change.

On SQLite it is a database in memory with the same schema; on PostgreSQL temporary tables of the same names, which hide
the real ones, in one transaction that is always rolled back. Tables that handlers only read (prices, settings) are
filled with what they hold now, once it is known which they are.

The ledger and the real tables are read as of one moment, so that a running agent does not disturb the comparison.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple, Protocol

import msgspec

from oncewire._ground.errors import Refused
from oncewire._ground.ledger.sqlite import MEMORY, SqliteStore
from oncewire._ground.ledger.store import Store

ROWS_SHOWN: Final = 3
_OURS: Final = "ledger_"


class Touched(NamedTuple):
    """Tables that handlers wrote to, and those that they only read."""

    written: set[str]
    only_read: set[str]


class TableDifference(msgspec.Struct, frozen=True):
    """Rows of a table that stand on one side only; a few of them."""

    table: str
    only_stored: list[str]
    only_replayed: list[str]


class Scratch(Protocol):
    """Handlers run in the open transaction of `store`; the tables of the user are its own."""

    @property
    def store(self) -> Store: ...
    def touched(self) -> Touched: ...
    def compare(self, table: str) -> TableDifference | None: ...


@contextlib.contextmanager
def open_scratch(store: Store, filled: Collection[str]) -> Iterator[Scratch]:
    """`store` is open and idle; until the end of the block it shows one moment. `filled` are tables with their rows."""
    if isinstance(store, SqliteStore):
        with _sqlite(store, filled) as scratch:
            yield scratch
    else:
        from oncewire._ground.ledger.scratch_postgres import postgres_scratch  # psycopg is an extra

        with postgres_scratch(store, filled) as scratch:
            yield scratch


@contextlib.contextmanager
def _sqlite(store: SqliteStore, filled: Collection[str]) -> Iterator[Scratch]:
    real = store.connection
    copy = SqliteStore(MEMORY)
    copy.open("", "", "")
    real.execute("BEGIN")
    try:
        yield SqliteScratch(real, copy, filled)
    finally:
        real.execute("ROLLBACK")
        copy.close()


class SqliteScratch:
    """The schema of the ledger's file in memory. What handlers touch is seen by the authorizer."""

    def __init__(self, real: sqlite3.Connection, store: SqliteStore, filled: Collection[str]) -> None:
        self.store = store
        self._real = real
        self._written: set[str] = set()
        self._read: set[str] = set()
        self._tables = self._copy_schema()
        for table in filled:
            self._fill(table)
        store.connection.set_authorizer(self._authorize)
        store.begin()

    def _copy_schema(self) -> set[str]:
        shadows = {name for _, name, kind, *_ in self._real.execute("PRAGMA main.table_list") if kind == "shadow"}
        rows = self._real.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type <> 'table', rowid"
        ).fetchall()
        made = [row for row in rows if not row[1].startswith((_OURS, "sqlite_")) and row[1] not in shadows]
        for _, _, sql in made:
            self.store.connection.execute(sql)
        return {name for kind, name, _ in made if kind == "table"}

    def _fill(self, table: str) -> None:
        rows = self._real.execute(f"SELECT * FROM {_quoted(table)}")  # noqa: S608 - a quoted name
        places = ", ".join("?" * len(rows.description))
        self.store.connection.executemany(f"INSERT INTO {_quoted(table)} VALUES ({places})", rows)  # noqa: S608

    def _authorize(self, action: int, table: str | None, *rest: str | None) -> int:
        if table in self._tables:
            if action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE):
                self._written.add(table)
            elif action == sqlite3.SQLITE_READ:
                self._read.add(table)
        return self.store.authorize(action, table, *rest)

    def touched(self) -> Touched:
        return Touched(set(self._written), self._read - self._written)

    def compare(self, table: str) -> TableDifference | None:
        stored, replayed = (
            Counter(map(repr, connection.execute(f"SELECT * FROM {_quoted(table)}")))  # noqa: S608 - a quoted name
            for connection in (self._real, self.store.connection)
        )
        return difference(table, list((stored - replayed).elements()), list((replayed - stored).elements()))


def difference(table: str, only_stored: list[str], only_replayed: list[str]) -> TableDifference | None:
    if not only_stored and not only_replayed:
        return None
    return TableDifference(table, sorted(only_stored)[:ROWS_SHOWN], sorted(only_replayed)[:ROWS_SHOWN])


def _quoted(name: str) -> str:
    if "\0" in name:
        raise Refused(f"{name!r} cannot be a table")
    return '"' + name.replace('"', '""') + '"'
