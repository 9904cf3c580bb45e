"""Whose connection it is: psycopg, asyncpg, SQLAlchemy, Django or an agent's `ctx.tx`, told by its type and without
importing any of them.

Each driver has its way to name parameters, to say whether a transaction is open, and to run a statement. A connection
that would commit on its own is refused: a message must be committed with the rows that it tells about, or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from oncewire._ground.database.postgres import translate
from oncewire._ground.errors import OncewireError, Refused

IDLE = 0
"""libpq's transaction status of a connection without a transaction."""

Records = Sequence[Sequence[Any]]
Statement = Callable[[Callable[[int], str]], str]
"""Writes a statement with the placeholders of a driver."""


def run(connection: Any, statement: Statement, values: Sequence[Any]) -> Records:
    """Run a statement inside the transaction of a sync connection."""
    kind = kind_of(connection)
    if kind not in _SYNC:
        raise _other_twin(connection, kind, "a", "async", "await outbox.enqueue_async(…)")
    with driver_errors():
        return _SYNC[kind](connection, statement, values)


async def run_async(connection: Any, statement: Statement, values: Sequence[Any]) -> Records:
    """The same for an async connection."""
    kind = kind_of(connection)
    if kind not in _ASYNC:
        raise _other_twin(connection, kind, "no", "async", "outbox.enqueue(…)")
    with driver_errors():
        return await _ASYNC[kind](connection, statement, values)


def kind_of(connection: Any) -> str:
    """The driver of a connection, cursor or session: 'psycopg', 'async psycopg', 'asyncpg', …"""
    for one in type(connection).__mro__:
        package, is_async = one.__module__.partition(".")[0], one.__name__.startswith("Async")
        if package == "psycopg":
            return "async psycopg" if is_async else "psycopg"
        if package == "sqlalchemy":
            return "async sqlalchemy" if is_async or "async" in one.__name__ else "sqlalchemy"
        if package in ("asyncpg", "django"):
            return package
        if one.__name__ in ("PostgresTx", "PostgresCursor") and package == "oncewire":
            return "ctx.tx"
        if one.__name__ in ("SqliteTx", "SqliteCursor") and package == "oncewire":
            raise Refused(
                "this ctx.tx is a transaction of SQLite, and the outbox is in PostgreSQL",
                hint="Give the agent a ledger in PostgreSQL: --store postgresql://…",
            )
    raise Refused(
        f"{type(connection).__module__}.{type(connection).__name__} is no connection that enqueue knows",
        hint="Pass a connection or cursor of psycopg 3, asyncpg, SQLAlchemy or Django; or call the SQL function.",
    )


def _other_twin(connection: Any, kind: str, article: str, word: str, twin: str) -> Refused:
    name = f"{type(connection).__module__}.{type(connection).__name__}"
    return Refused(f"{name} ({kind}) is {article} {word} connection", hint=f"Use {twin}.")


@contextlib.contextmanager
def driver_errors() -> Iterator[None]:
    """Every error of the database becomes one of ours; the driver's own stays as its cause."""
    try:
        yield
    except OncewireError:
        raise
    except Exception as error:
        inner = _inner(error)
        if inner is None:
            raise  # a bug of ours, or of the caller's types: not the database's word
        raise translate(inner) from error


def _inner(error: BaseException) -> Exception | None:
    """The driver's error inside what SQLAlchemy or Django made of it."""
    found: BaseException | None = error
    for _ in range(5):
        if found is None:
            return None
        package = type(found).__module__.partition(".")[0]
        if isinstance(found, Exception) and (package in ("psycopg", "asyncpg") or isinstance(found, OSError)):
            state = getattr(found, "sqlstate", None)
            if state or found.__cause__ is None or not hasattr(found.__cause__, "sqlstate"):
                return found
        found = getattr(found, "orig", None) or found.__cause__
    return None


def _refuse_autocommit(what: str, remedy: str) -> Refused:
    return Refused(f"{what} has no transaction open: the message would be committed on its own", hint=remedy)


# ---- sync


def _psycopg(given: Any, statement: Statement, values: Sequence[Any]) -> Records:
    _check_psycopg(given)
    return _ledger(given, statement, values)


def _connection_of(given: Any) -> Any:
    """psycopg's connection, also from a cursor: the user's own cursor keeps its results."""
    return given.connection if hasattr(given, "fetchall") else given


def _check_psycopg(given: Any) -> None:
    connection = _connection_of(given)
    if connection.autocommit and connection.info.transaction_status == IDLE:
        raise _refuse_autocommit(
            "the connection is in autocommit mode and", "Wrap it: `with connection.transaction():`."
        )


def _rows_of(cursor: Any, rows: Sequence[Any]) -> Records:
    """Tuples, whatever row factory the user has set."""
    names = [column.name for column in cursor.description]
    return [row if isinstance(row, tuple) else tuple(_field(row, name) for name in names) for row in rows]


def _field(row: Any, name: str) -> Any:
    return row[name] if isinstance(row, dict) else getattr(row, name)


def _ledger(given: Any, statement: Statement, values: Sequence[Any]) -> Records:
    with _connection_of(given).cursor() as cursor:
        cursor.execute(statement(lambda _: "%s"), values)
        return _rows_of(cursor, cursor.fetchall())


def _sqlalchemy(given: Any, statement: Statement, values: Sequence[Any]) -> Records:
    connection = given.connection() if hasattr(given, "get_bind") else given
    _check_sqlalchemy(connection)
    text, named = _sqlalchemy_statement(statement, values)
    return [tuple(row) for row in given.execute(text, named)]


def _check_sqlalchemy(connection: Any) -> None:
    inner = getattr(connection.connection, "dbapi_connection", None)
    if getattr(inner, "autocommit", False):
        raise _refuse_autocommit(
            "the engine is in autocommit mode: it", "Use an engine with transactions: `with engine.begin() as conn:`."
        )


def _sqlalchemy_statement(statement: Statement, values: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    import sqlalchemy  # the caller has it

    named = {f"p{at}": value for at, value in enumerate(values, start=1)}
    return sqlalchemy.text(statement(lambda at: f":p{at}")), named


def _django(given: Any, statement: Statement, values: Sequence[Any]) -> Records:
    connection = getattr(given, "db", given)
    if connection.vendor != "postgresql":
        raise Refused(f"this Django connection is to {connection.vendor}", hint="Pass the one to PostgreSQL.")
    if not connection.in_atomic_block and connection.get_autocommit():
        raise _refuse_autocommit("the Django connection", "Wrap it: `with transaction.atomic():`.")
    with connection.cursor() as cursor:
        cursor.execute(statement(lambda _: "%s"), list(values))
        found: Records = cursor.fetchall()
        return found


# ---- async


async def _async_psycopg(given: Any, statement: Statement, values: Sequence[Any]) -> Records:
    _check_psycopg(given)
    async with _connection_of(given).cursor() as cursor:
        await cursor.execute(statement(lambda _: "%s"), values)
        return _rows_of(cursor, await cursor.fetchall())


async def _asyncpg(given: Any, statement: Statement, values: Sequence[Any]) -> Records:
    if not given.is_in_transaction():
        raise _refuse_autocommit("the asyncpg connection", "Wrap it: `async with connection.transaction():`.")
    return [tuple(record) for record in await given.fetch(statement(lambda at: f"${at}"), *values)]


async def _async_sqlalchemy(given: Any, statement: Statement, values: Sequence[Any]) -> Records:
    connection = await given.connection() if hasattr(given, "sync_session") else given
    _check_sqlalchemy(connection.sync_connection)
    text, named = _sqlalchemy_statement(statement, values)
    return [tuple(row) for row in await given.execute(text, named)]


_SYNC: dict[str, Callable[[Any, Statement, Sequence[Any]], Records]] = {
    "psycopg": _psycopg,
    "ctx.tx": _ledger,
    "sqlalchemy": _sqlalchemy,
    "django": _django,
}
_ASYNC: dict[str, Callable[[Any, Statement, Sequence[Any]], Awaitable[Records]]] = {
    "async psycopg": _async_psycopg,
    "asyncpg": _asyncpg,
    "async sqlalchemy": _async_sqlalchemy,
}
