"""`ctx.tx` on PostgreSQL: statements as psycopg has them, without its connection.

`execute`, cursors (also on the server), `copy` and `stream` as psycopg documents them; `cursor.connection` is the `Tx`.
Row factories and registered types are those of one input. What a statement would set for the whole session is refused
where nothing could take it back afterwards, and reset with the savepoint otherwise (`PostgresStore.keep`).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import psycopg
from psycopg.copy import Copy
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.sql import Composable

from oncewire._ground.errors import Refused
from oncewire._ground.ledger.tx import Block, Tx, ended, ends_transaction, not_allowed

_SPACE: Final = r"(?:\s|--[^\n]*\n|/\*.*?\*/)*+"
_FIRST_WORDS: Final = re.compile(
    _SPACE + r"(?:(?P<end>commit|end|abort|rollback(?!\s+(?:work\s+|transaction\s+)?to\b)|begin|start\s+transaction|"
    r"prepare\s+transaction)|(?P<lasting>prepare|deallocate|discard|listen|unlisten))\b",
    re.IGNORECASE | re.DOTALL,
)
_SESSION_LOCK: Final = re.compile(r"\bpg_(?:try_)?advisory_(?!xact)\w*lock", re.IGNORECASE)

RowFactory = Callable[[Any], Callable[[Sequence[Any]], Any]]


def check_statement(query: Any) -> None:
    """What would end the transaction, or outlast the input in a way that nothing takes back."""
    text = query.as_string() if isinstance(query, Composable) else query
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    if not isinstance(text, str):
        return  # psycopg says what it takes
    first = _FIRST_WORDS.match(text)
    if first is not None:
        if first["end"]:
            raise ends_transaction()
        raise not_allowed(
            f"use {first['lasting'].upper()}, which outlasts its transaction",
            "Open a connection of your own for it. The driver prepares statements that are repeated by itself.",
        )
    if _SESSION_LOCK.search(text):
        raise not_allowed(
            "take a lock that outlasts its transaction", "Use pg_advisory_xact_lock: it is released with the commit."
        )


class PostgresCursor:
    """A result, or a way to the next one: psycopg's cursor, for as long as the transaction."""

    __slots__ = ("_cursor", "_tx")

    def __init__(self, tx: PostgresTx, cursor: psycopg.Cursor[Any], row_factory: RowFactory | None) -> None:
        self._tx = tx
        self._cursor = cursor
        if row_factory is not None:
            self.row_factory = row_factory

    def _live(self) -> psycopg.Cursor[Any]:
        """psycopg's cursor, inside the lock."""
        tx = self._tx
        if tx._is_over:
            raise ended()
        if tx._under_way is not None:
            raise tx.is_under_way()
        return self._cursor

    @property
    def connection(self) -> PostgresTx:
        """The transaction, where psycopg has its connection."""
        return self._tx

    # ---- statements

    def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool | None = None
    ) -> PostgresCursor:
        check_statement(query)
        with self._tx._lock:
            self._live().execute(query, params, binary=binary, **({} if prepare is None else {"prepare": prepare}))
        return self

    def executemany(self, query: Any, params_seq: Iterable[Any], *, returning: bool = False) -> None:
        check_statement(query)
        rows = [*params_seq]  # psycopg holds its lock while it reads them: one that asks the database would hang
        with self._tx._lock:
            self._live().executemany(query, rows, returning=returning)

    def copy(self, statement: Any, params: Any = None, *, writer: Any = None) -> AbstractContextManager[TxCopy]:
        """`with cursor.copy("COPY … FROM STDIN") as copy:`; no other statement runs until its block ends."""
        return self._copying(statement, params, writer)

    @contextlib.contextmanager
    def _copying(self, statement: Any, params: Any, writer: Any) -> Iterator[TxCopy]:
        tx = self._tx
        with tx._lock:
            cursor = self._live()
            block = cursor.copy(statement, params, writer=writer)
            copy = block.__enter__()
            under_way = tx.begin_long("a COPY", lambda error: block.__exit__(type(error), error, error.__traceback__))
        try:
            yield TxCopy(tx, copy)
        except BaseException as error:
            with tx._lock:
                under_way.end(tx, error)
            raise
        with tx._lock:
            tx._check()
            while _is_answering(cursor):  # what the handler did not want to read
                copy.read()
            tx._under_way = None
            block.__exit__(None, None, None)

    def stream(self, query: Any, params: Any = None, *, binary: bool | None = None, **options: Any) -> Iterator[Any]:
        """Row by row from the server; no other statement runs until all were read."""
        check_statement(query)
        tx = self._tx
        with tx._lock:
            rows = self._live().stream(query, params, binary=binary, **options)
            assert isinstance(rows, Generator)
            under_way = tx.begin_long("stream()", lambda _: rows.close())
        try:
            while True:
                with tx._lock:
                    tx._check()
                    try:
                        row = next(rows)
                    except StopIteration:
                        return
                yield row
        finally:
            with tx._lock:
                under_way.end(tx, GeneratorExit())

    # ---- results

    def fetchone(self) -> Any:
        with self._tx._lock:
            return self._live().fetchone()

    def fetchmany(self, size: int = 0) -> list[Any]:
        with self._tx._lock:
            return self._live().fetchmany(size)

    def fetchall(self) -> list[Any]:
        with self._tx._lock:
            return self._live().fetchall()

    def __iter__(self) -> PostgresCursor:
        return self

    def __next__(self) -> Any:
        with self._tx._lock:
            return next(self._live())

    def scroll(self, value: int, mode: str = "relative") -> None:
        with self._tx._lock:
            self._live().scroll(value, mode)

    def nextset(self) -> bool | None:
        with self._tx._lock:
            return self._live().nextset()

    def results(self) -> Iterator[PostgresCursor]:
        """Itself, once per result of several statements."""
        while self.pgresult:
            yield self
            if not self.nextset():
                return

    def set_result(self, index: int) -> PostgresCursor:
        with self._tx._lock:
            self._live().set_result(index)
        return self

    # ---- what is known of it

    @property
    def description(self) -> Any:
        return self._cursor.description

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    @property
    def rownumber(self) -> int | None:
        return self._cursor.rownumber

    @property
    def statusmessage(self) -> str | None:
        return self._cursor.statusmessage

    @property
    def pgresult(self) -> Any:
        return self._cursor.pgresult

    @property
    def _encoding(self) -> str:
        return self._cursor._encoding  # psycopg's own row factories ask for it

    @property
    def adapters(self) -> Any:
        """Types that are registered here are known to this cursor alone."""
        return self._cursor.adapters

    @property
    def row_factory(self) -> Any:
        return self._cursor.row_factory

    @row_factory.setter
    def row_factory(self, factory: RowFactory) -> None:
        self._cursor.row_factory = lambda _: factory(self)  # never psycopg's own: it knows the connection

    @property
    def arraysize(self) -> int:
        return self._cursor.arraysize

    @arraysize.setter
    def arraysize(self, size: int) -> None:
        self._cursor.arraysize = size

    @property
    def itersize(self) -> int:
        """Rows of one answer, for a cursor on the server."""
        return self._server().itersize

    @itersize.setter
    def itersize(self, size: int) -> None:
        self._server().itersize = size

    @property
    def name(self) -> str:
        return self._server().name

    def _server(self) -> psycopg.ServerCursor[Any]:
        if not isinstance(self._cursor, psycopg.ServerCursor):
            raise AttributeError("only a cursor with a name, `ctx.tx.cursor(name)`, is on the server")
        return self._cursor

    # ---- its end

    @property
    def closed(self) -> bool:
        return self._tx._is_over or self._cursor.closed

    def close(self) -> None:
        with self._tx._lock:
            if not self._tx._is_over and self._tx._under_way is None:
                self._cursor.close()

    def __enter__(self) -> PostgresCursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_answering(cursor: psycopg.Cursor[Any]) -> bool:
    """Whether the server still sends rows of a COPY."""
    result = cursor.pgresult
    is_out = result is not None and result.status == ExecStatus.COPY_OUT
    return is_out and cursor._pgconn.transaction_status == TransactionStatus.ACTIVE


class _UnderWay:
    """What keeps the connection to itself until it ends: psycopg would wait for it for ever."""

    __slots__ = ("_close", "what")

    def __init__(self, what: str, close: Callable[[BaseException], object]) -> None:
        self.what = what
        self._close = close

    def end(self, tx: PostgresTx, error: BaseException) -> None:
        if tx._under_way is self:
            tx._under_way = None
            self._close(error)


class TxCopy:
    """A COPY, as psycopg's `Copy`, for as long as its block."""

    __slots__ = ("_copy", "_tx")

    def __init__(self, tx: PostgresTx, copy: Copy) -> None:
        self._tx = tx
        self._copy = copy

    def _do(self, act: Callable[..., Any], *args: Any) -> Any:
        with self._tx._lock:
            self._tx._check()
            return act(*args)

    def write(self, buffer: Any) -> None:
        self._do(self._copy.write, buffer)

    def write_row(self, row: Sequence[Any]) -> None:
        self._do(self._copy.write_row, row)

    def set_types(self, types: Sequence[int | str]) -> None:
        self._do(self._copy.set_types, types)

    def read(self) -> Any:
        return self._do(self._copy.read)

    def read_row(self) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._do(self._copy.read_row)
        return row

    def rows(self) -> Iterator[tuple[Any, ...]]:
        while (row := self.read_row()) is not None:
            yield row

    def __iter__(self) -> Iterator[Any]:
        while data := self.read():
            yield data


class PostgresTx(Tx):
    """See the module's head."""

    __slots__ = ("_connection", "_run", "_under_way", "unfinished")

    def __init__(
        self, connection: psycopg.Connection[Any], lock: threading.RLock, run: Callable[[bytes], None]
    ) -> None:
        super().__init__(lock)
        self._connection = connection
        self._run = run
        self._under_way: _UnderWay | None = None
        self.unfinished = ""
        """What was still under way when it ended."""

    # ---- statements

    def cursor(
        self,
        name: str = "",
        *,
        binary: bool = False,
        row_factory: RowFactory | None = None,
        scrollable: bool | None = None,
        withhold: bool = False,
    ) -> PostgresCursor:
        """With a name it is on the server, which sends the rows in parts."""
        if withhold:
            raise not_allowed("keep a cursor beyond its transaction", "Leave `withhold` out.")
        with self._lock:
            self._check()
            cursor: psycopg.Cursor[Any]
            if name:
                cursor = psycopg.ServerCursor(self._connection, name, scrollable=scrollable)
            else:
                cursor = psycopg.Cursor(self._connection)
        if binary:
            cursor.format = Format.BINARY
        return PostgresCursor(self, cursor, row_factory or self._row_factory)

    def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool = False
    ) -> PostgresCursor:
        return self.cursor(binary=binary).execute(query, params, prepare=prepare)

    def executemany(self, query: Any, params_seq: Iterable[Any], *, returning: bool = False) -> PostgresCursor:
        cursor = self.cursor()
        cursor.executemany(query, params_seq, returning=returning)
        return cursor

    @property
    def closed(self) -> bool:
        return self._is_over

    # ---- blocks

    def _own(self, statement: str) -> None:
        if self._under_way is not None:
            raise self.is_under_way()
        self._run(statement.encode())

    def _end_block(self, savepoint: str, *, is_good: bool) -> None:
        has_failed = self._connection.pgconn.transaction_status == TransactionStatus.INERROR
        super()._end_block(savepoint, is_good=is_good and not has_failed)
        if is_good and has_failed:
            raise went_on()

    def asks_to_roll_back(self, error: BaseException, block: Block) -> bool:
        if not isinstance(error, psycopg.Rollback):
            return False
        asked: object = error.transaction
        return asked is None or asked is block

    # ---- its end

    def begin_long(self, what: str, close: Callable[[BaseException], object]) -> _UnderWay:
        self._has_traces = True
        self._under_way = _UnderWay(what, close)
        return self._under_way

    def is_under_way(self) -> Refused:
        assert self._under_way is not None
        return Refused(
            f"{self._under_way.what} of ctx.tx is under way: no other statement can run",
            hint="Read it to its end, or leave its block, first.",
        )

    def _interrupt(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.cancel_safe()

    def _clean_up(self) -> None:
        under_way = self._under_way
        if under_way is not None:
            self.unfinished = under_way.what
            with contextlib.suppress(psycopg.Error):
                under_way.end(self, Refused(f"{under_way.what} was left open"))


def went_on() -> Refused:
    return Refused(
        "a handler went on after a statement failed", hint="Put what may fail into `with ctx.tx.transaction():`."
    )
