"""From an address to a store."""

from __future__ import annotations

from pathlib import Path

from oncewire._ground.errors import Refused
from oncewire._ground.ledger.sqlite import MEMORY, SqliteStore
from oncewire._ground.ledger.store import Store

FORMS = "Use sqlite:///file.db, sqlite:////absolute/file.db or postgresql://user@host/database."
HANDLER_S = 300.0


def open_store(url: str, *, schema: str = "", handler_timeout_s: float = HANDLER_S) -> Store:
    """The store behind an address, not yet opened. `schema` and the longest time of a handler matter to PostgreSQL."""
    scheme, found, rest = url.partition("://")
    match scheme if found else "":
        case "sqlite":
            if schema:
                raise Refused("a SQLite ledger has no schema", hint="Leave --schema away.")
            return SqliteStore(sqlite_path(url, rest))
        case "postgresql" | "postgres":
            return _postgres(url, schema, handler_timeout_s)
    shown = f"{scheme}://" if found else url
    raise Refused(f"no store is known for {shown!r}", hint=FORMS)


def sqlite_path(url: str, rest: str) -> str:
    """`sqlite:///` and a path: three slashes for a relative one, four for an absolute one."""
    if not rest.startswith("/") or rest == "/" or "?" in rest:
        raise Refused(f"{url!r} names no file", hint=FORMS)
    path = rest.removeprefix("/")
    return path if path == MEMORY else str(Path(path).expanduser())


def _postgres(url: str, schema: str, handler_timeout_s: float) -> Store:
    try:
        from oncewire._ground.ledger.postgres import PostgresStore  # psycopg is an extra
    except ImportError:
        raise Refused("psycopg is not installed", hint="pip install 'oncewire[postgres]'") from None
    return PostgresStore(url, schema=schema, handler_timeout_s=handler_timeout_s)
