"""One session on PostgreSQL: connected, set up, found lost, connected again. The driver's errors become ours here.

The session sets timeouts and holds a lock while it lives: a pooler in front of it must work in session mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus

from oncewire._ground.database.postgres import queries, quote_name, translate
from oncewire._ground.errors import NotConnected, Refused, Unavailable
from oncewire._ground.ledger.store import not_idle

CONNECT_S: Final = 10
LOCK_MS: Final = 5_000
IDLE_MARGIN_S: Final = 60.0
"""A session may be idle in its transaction for as long as a handler may take, and this much longer."""
PROCESS_LOCKS: Final = 0x6F77
SETTINGS: Final = {
    "client_encoding": "utf8",
    "lock_timeout": f"{LOCK_MS}ms",
    "tcp_keepalives_idle": "30s",
    "tcp_keepalives_interval": "10s",
}

DISCARD_TEMPORARY: Final = "DISCARD TEMP"
RESETS: Final = ("CLOSE ALL", "RESET SESSION AUTHORIZATION", "RESET ROLE", "RESET ALL", DISCARD_TEMPORARY)
"""They take back what a handler may have set for its session, in half a microsecond of the server's time each."""


class PostgresSession:
    """Our own statements go through `cursor`, which no handler sees; `sql` are the named ones, for our schema."""

    def __init__(self, url: str, schema: str, handler_timeout_s: float) -> None:
        self.url = url
        self.schema = ""
        self.sql: dict[str, str] = {}
        self.resets: tuple[str, ...] = ()
        """Statements after which the session is as it was when it began."""
        self.process = ""
        self._wanted_schema = schema
        self._idle_s = handler_timeout_s + IDLE_MARGIN_S
        self._connection: psycopg.Connection[Any] | None = None
        self._cursor: psycopg.Cursor[Any] | None = None

    @property
    def connection(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            raise Unavailable("the ledger is closed")
        return self._connection

    @property
    def status(self) -> int:
        """A `TransactionStatus`."""
        return self.connection.pgconn.transaction_status

    @property
    def cursor(self) -> psycopg.Cursor[Any]:
        if self._cursor is None:
            raise Unavailable("the ledger is closed")
        return self._cursor

    def connect(self) -> None:
        with self.translated():
            options: dict[str, Any] = {"application_name": "oncewire", "client_encoding": "utf8"}
            if "target_session_attrs" not in self.url:
                options["target_session_attrs"] = "read-write"
            self._connection = psycopg.connect(self.url, connect_timeout=CONNECT_S, **options)
            self._cursor = psycopg.Cursor(self._connection)
            self._cursor.format = Format.BINARY
            with self._connection.transaction():
                self._set_up(self._cursor)

    def _set_up(self, cursor: psycopg.Cursor[Any]) -> None:
        settings = {name: f"'{value}'" for name, value in SETTINGS.items()}
        settings["idle_in_transaction_session_timeout"] = f"'{int(self._idle_s * 1000)}ms'"
        if self._wanted_schema:
            settings["search_path"] = quote_name(self._wanted_schema)
        ours = [f"SET {name} = {value}" for name, value in settings.items()]
        self.resets = (*RESETS, *ours)
        self.run("; ".join(ours).encode())
        row = cursor.execute("SELECT quote_ident(current_schema())").fetchone()
        if row is None or row[0] is None:
            raise Refused("the ledger's schema does not exist", hint="Run `oncewire migrate`, with the same --schema.")
        self.schema = row[0]
        named = queries("oncewire._ground.ledger", "postgres.sql")
        self.sql = {name: text.replace("{s}", self.schema) for name, text in named.items()}
        if self.process:
            self.hold_name(self.process)

    def hold_name(self, process: str) -> None:
        """Say that the process lives, for as long as this session and those that follow it do."""
        self.process = process
        self.cursor.execute(self.sql["hold_name"], (PROCESS_LOCKS, process))

    def run(self, statements: bytes) -> None:
        """Statements without values or rows, in one exchange, past psycopg's cursors: twice per input that writes."""
        result = self.connection.pgconn.exec_(statements)
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result)

    def ensure(self) -> None:
        """Before a transaction: a session that was lost is replaced, one that is inside a transaction is not ours."""
        if self.connection.closed:
            self.connect()
        self.check_idle()

    def check_idle(self) -> None:
        if self.status != TransactionStatus.IDLE:
            raise not_idle(self.url)

    def close(self) -> None:
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """psycopg's errors in our tree. A session that is lost takes its transaction along."""
        try:
            yield
        except psycopg.Error as error:
            if self._connection is not None and self._connection.closed:
                raise NotConnected(f"PostgreSQL: {error}", hint="Is it running? The session is made anew.") from error
            if error.sqlstate is None and isinstance(error, psycopg.ProgrammingError | psycopg.InterfaceError):
                raise Refused(f"PostgreSQL: {error}") from error
            raise translate(error) from error
