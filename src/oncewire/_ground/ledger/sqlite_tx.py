"""`ctx.tx` on SQLite: statements as the `sqlite3` module has them, without its connection.

A cursor is one of `sqlite3` but for two things: it asks whether its transaction has ended, and `cursor.connection` is
the `Tx`. Row and text factories are those of one input; the next one begins without.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from oncewire._ground.ledger.tx import Tx, ended, not_allowed

if TYPE_CHECKING:
    from oncewire._ground.ledger.sqlite import SqliteStore

RESULTS_LOOKED_AT = 1_000
"""After so many results of one handler those that it has dropped are forgotten."""

_cursor = sqlite3.Cursor
_execute = sqlite3.Cursor.execute


class SqliteCursor(sqlite3.Cursor):
    """A result, or a way to the next one."""

    __slots__ = ("_tx",)
    _tx: SqliteTx

    @property
    def connection(self) -> SqliteTx:  # type: ignore[override]
        """The transaction, where `sqlite3` has its connection."""
        return self._tx

    def execute(self, sql: str, parameters: Any = (), /) -> SqliteCursor:
        tx = self._tx
        with tx._lock:
            if tx._is_over:
                raise ended()
            try:
                _execute(self, sql, parameters)
            except sqlite3.DatabaseError as error:
                tx.refuse_if_denied(error)
                raise
            if self.description is not None:
                tx.keep_result(self)
        return self

    def executemany(self, sql: str, seq_of_parameters: Iterable[Any], /) -> SqliteCursor:
        tx = self._tx
        with tx._lock:
            tx._check()
            try:
                _cursor.executemany(self, sql, seq_of_parameters)
            except sqlite3.DatabaseError as error:
                tx.refuse_if_denied(error)
                raise
        return self

    def executescript(self, sql_script: str, /) -> NoReturn:
        self._tx.executescript(sql_script)


class EndedCursor(SqliteCursor):
    """What a result becomes with the end of its transaction. Until then its rows are read at the driver's own speed."""

    __slots__ = ()

    def fetchone(self) -> NoReturn:
        raise ended()

    def fetchmany(self, size: int | None = None) -> NoReturn:  # noqa: ARG002 - the driver's shape
        raise ended()

    def fetchall(self) -> NoReturn:
        raise ended()

    def __next__(self) -> NoReturn:
        raise ended()


class SqliteTx(Tx):
    """See the module's head."""

    __slots__ = ("_db", "_results", "_store")

    def __init__(self, store: SqliteStore, db: sqlite3.Connection, lock: threading.RLock) -> None:
        self._lock = lock
        self._is_over = self._has_traces = False
        self._blocks = ()
        self._row_factory = None
        self._store = store
        self._db = db
        self._results: list[weakref.ref[SqliteCursor]] | None = None

    # ---- statements

    def cursor(self) -> SqliteCursor:
        with self._lock:
            if self._is_over:
                raise ended()
            cursor = self._db.cursor(SqliteCursor)
        cursor._tx = self
        if self._row_factory is not None:
            cursor.row_factory = self._row_factory
        return cursor

    def execute(self, sql: str, parameters: Any = (), /) -> SqliteCursor:
        """What a cursor of its own would do, in one go: once per input or more."""
        with self._lock:
            if self._is_over:
                raise ended()
            cursor = self._db.cursor(SqliteCursor)
            cursor._tx = self
            if self._row_factory is not None:
                cursor.row_factory = self._row_factory
            try:
                _execute(cursor, sql, parameters)
            except sqlite3.DatabaseError as error:
                self.refuse_if_denied(error)
                raise
            if cursor.description is not None:
                self.keep_result(cursor)
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> SqliteCursor:
        return self.cursor().executemany(sql, parameters)

    def executescript(self, sql_script: str, /) -> NoReturn:  # noqa: ARG002 - the driver's shape
        raise not_allowed("use executescript: it commits", "Run its statements one by one with `execute`.")

    @property
    def text_factory(self) -> Callable[[bytes], Any]:
        """What makes text of the results from here on, for this input alone."""
        factory: Callable[[bytes], Any] = self._db.text_factory
        return factory

    @text_factory.setter
    def text_factory(self, factory: Callable[[bytes], Any]) -> None:
        with self._lock:
            self._check()
            self._has_traces = True
            self._db.text_factory = factory

    @property
    def total_changes(self) -> int:
        return self._db.total_changes

    @property
    def in_transaction(self) -> bool:
        return not self._is_over

    # ---- for cursors

    def keep_result(self, cursor: SqliteCursor) -> None:
        """A result that is not read to its end keeps its statement open, and with it the transaction."""
        self._has_traces = True
        if self._results is None:
            self._results = []
        elif not len(self._results) % RESULTS_LOOKED_AT:
            self._results = [one for one in self._results if one() is not None]
        self._results.append(weakref.ref(cursor))

    def refuse_if_denied(self, error: sqlite3.DatabaseError) -> None:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_AUTH:
            raise self._store.refusal() from error

    # ---- its end

    def _own(self, statement: str) -> None:
        self._store.run_for_handler(statement)

    def _interrupt(self) -> None:
        self._db.interrupt()

    def _clean_up(self) -> None:
        for result in self._results or ():
            cursor = result()
            if cursor is not None:
                _cursor.close(cursor)
                cursor.__class__ = EndedCursor
        self._db.text_factory = str
