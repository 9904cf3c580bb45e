"""One session on PostgreSQL: connected, set up, found lost, connected again. The driver's errors become ours here.

The session sets timeouts and holds a lock while it lives: a pooler in front of it must work in session mode.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg.pq import Format

from oncewire.database.postgres import queries, quote_name, translate
from oncewire.errors import NotConnected, Refused, Unavailable

CONNECT_S: Final = 10
LOCK_MS: Final = 5_000
IDLE_MARGIN_S: Final = 60.0
"""A session may be idle in its transaction for as long as a handler may take, and this much longer."""
PROCESS_LOCKS: Final = 0x6F77
SETTINGS: Final = {"lock_timeout": f"{LOCK_MS}ms", "tcp_keepalives_idle": "30s", "tcp_keepalives_interval": "10s"}

_ENDS = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(?:commit|end|abort|rollback(?!\s+(?:work\s+|transaction\s+)?to\b)|begin|"
    r"start\s+transaction|prepare\s+transaction)\b",
    re.IGNORECASE | re.DOTALL,
)


class HandlerCursor(psycopg.Cursor[Any]):
    """What `connection.execute` and `connection.cursor` give to handlers."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> HandlerCursor:
        text = query.decode(errors="replace") if isinstance(query, bytes) else query
        if isinstance(text, str) and _ENDS.match(text):
            raise handler_ended()
        return super().execute(query, *args, **kwargs)


def handler_ended() -> Refused:
    return Refused("a handler may not end or begin the ledger's transaction", hint="Leave it to the agent.")


class PostgresSession:
    """Our own statements go through `cursor`, which no handler sees; `sql` are the named ones, for our schema."""

    def __init__(self, url: str, schema: str, handler_timeout_s: float) -> None:
        self.url = url
        self.schema = ""
        self.sql: dict[str, str] = {}
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
    def cursor(self) -> psycopg.Cursor[Any]:
        if self._cursor is None:
            raise Unavailable("the ledger is closed")
        return self._cursor

    def connect(self) -> None:
        with self.translated():
            options: dict[str, Any] = {"application_name": "oncewire", "client_encoding": "utf8"}
            if "target_session_attrs" not in self.url:
                options["target_session_attrs"] = "read-write"
            self._connection = psycopg.connect(
                self.url, cursor_factory=HandlerCursor, connect_timeout=CONNECT_S, **options
            )
            self._cursor = psycopg.Cursor(self._connection)
            self._cursor.format = Format.BINARY
            with self._connection.transaction():
                self._set_up(self._cursor)

    def _set_up(self, cursor: psycopg.Cursor[Any]) -> None:
        settings = SETTINGS | {"idle_in_transaction_session_timeout": f"{int(self._idle_s * 1000)}ms"}
        if self._wanted_schema:
            settings["search_path"] = quote_name(self._wanted_schema)
        for name, value in settings.items():
            cursor.execute("SELECT set_config(%s, %s, false)", (name, value))
        row = cursor.execute("SELECT quote_ident(current_schema())").fetchone()
        if row is None or row[0] is None:
            raise Refused("the ledger's schema does not exist", hint="Run `oncewire migrate`, with the same --schema.")
        self.schema = row[0]
        named = queries("oncewire.ledger", "postgres.sql")
        self.sql = {name: text.replace("{s}", self.schema) for name, text in named.items()}
        if self.process:
            self.hold_name(self.process)

    def hold_name(self, process: str) -> None:
        """Say that the process lives, for as long as this session and those that follow it do."""
        self.process = process
        self.cursor.execute(self.sql["hold_name"], (PROCESS_LOCKS, process))

    def ensure(self) -> None:
        """A session that was lost is replaced."""
        if self.connection.closed:
            self.connect()

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
