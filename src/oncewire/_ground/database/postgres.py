"""Connections to PostgreSQL, with the driver's exceptions translated in this one place.

SQLSTATE OW400, OW403, OW409 and OW413 are raised by our own functions; they say whose fault it is in the way of HTTP.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from oncewire._ground import extras
from oncewire._ground.errors import (
    AuthenticationFailed,
    Conflict,
    Corrupt,
    InvalidSetting,
    NotConnected,
    OncewireError,
    PermissionDenied,
    Refused,
    TimedOut,
    TooLarge,
    Unavailable,
)

CONNECT_S_MAX = 10.0
COMMAND_S_MAX = 60.0
CLOSE_S_MAX = 2.0

_BY_STATE: dict[str, type[OncewireError]] = {
    "OW400": Refused,
    "OW403": PermissionDenied,
    "OW409": Conflict,
    "OW413": TooLarge,
    "OW500": Corrupt,
    "28": AuthenticationFailed,
    "42501": PermissionDenied,
    "23": Conflict,
    "40": Unavailable,
    "53": Unavailable,
    "55P03": Unavailable,
    "57": Unavailable,
    "08": NotConnected,
    "25006": Unavailable,  # read-only: a standby after a failover
    "58": Corrupt,
    "XX": Corrupt,
}
_NOT_THERE = ("42P01", "42883", "3F000")
MIGRATE = "Are the tables and functions there, and on the search path? Run `oncewire migrate`."


def class_of(state: str) -> type[OncewireError]:
    """The branch of our tree for a SQLSTATE: by the whole code, else by its class."""
    return _BY_STATE.get(state) or _BY_STATE.get(state[:2]) or Refused


def translate(error: Exception) -> OncewireError:
    """Any driver's error: the SQLSTATE decides. Without one it is a session that was lost, or a value that the driver
    refuses to send: the first may pass, the second never does."""
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str) and state:
        hint = getattr(error, "hint", None) or getattr(getattr(error, "diag", None), "message_hint", None) or ""
        message = getattr(getattr(error, "diag", None), "message_primary", None) or str(error)
        return class_of(state)(f"PostgreSQL: {message}", hint=hint if state not in _NOT_THERE else MIGRATE)
    if isinstance(error, TimeoutError):
        return TimedOut("PostgreSQL did not answer in time")
    if not _is_lost(error):
        return Refused(f"PostgreSQL: {error}")
    return NotConnected(f"PostgreSQL: {error}", hint="Is it running? Check postgres.url, or start `oncewire up`.")


_SESSION_ERRORS = ("OperationalError", "InternalClientError", "DatabaseError")
"""psycopg's and asyncpg's for a session that broke; libpq has no better word than the last for some of them."""
_SESSION_TEXTS = ("connection is closed", "released back", "another operation")
"""asyncpg has one class for a closed session and for wrong arguments."""


def _is_lost(error: Exception) -> bool:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if isinstance(error, OSError) or kinds[0] in _SESSION_ERRORS or kinds[1] in _SESSION_ERRORS[:2]:
        return True
    return "InterfaceError" in kinds and any(text in str(error) for text in _SESSION_TEXTS)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Everything that asyncpg raises in this block becomes an error of ours."""
    asyncpg = extras.asyncpg()
    try:
        yield
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise translate(error) from error


def unreadable() -> InvalidSetting:
    """For an address that the driver cannot take apart. What it says of that may quote a part of the password."""
    return InvalidSetting(
        "the address of PostgreSQL cannot be read",
        hint="postgresql://user:password@host:port/database; what is special in a password is percent-encoded.",
    )


async def connect(url: str, *, cache_statements: bool = True) -> Any:
    """One connection, to the server that takes writes when the address names several.

    `cache_statements=False` works behind a pooler in transaction mode, inside transactions. Nothing is set for the
    session: a pooler would hand it to others.
    """
    with translated():
        try:
            return await extras.asyncpg().connect(
                url,
                timeout=CONNECT_S_MAX,
                command_timeout=COMMAND_S_MAX,
                statement_cache_size=100 if cache_statements else 0,
                server_settings={"application_name": "oncewire"},
                **({} if "target_session_attrs" in url else {"target_session_attrs": "read-write"}),
            )
        except ValueError as error:
            if isinstance(error, OSError):  # a certificate that does not hold is both
                raise
            raise unreadable() from None


@contextlib.asynccontextmanager
async def connected(url: str, *, cache_statements: bool = True) -> AsyncIterator[Any]:
    """A connection for the length of a block."""
    connection = await connect(url, cache_statements=cache_statements)
    try:
        with translated():
            yield connection
    finally:
        try:
            await connection.close(timeout=CLOSE_S_MAX)
        except Exception:  # whatever is wrong with it, it must not outlive the block
            connection.terminate()


def quote_name(name: str) -> str:
    """A schema's name as SQL; anything odd is refused rather than escaped."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", name):
        raise Refused(f"{name!r} cannot be a schema", hint="Use lower-case letters, digits and '_'.")
    return f'"{name}"'


_QUERY = re.compile(r"^-- name: (?P<name>\w+)\n(?P<body>.*?)(?=^-- name: |\Z)", re.MULTILINE | re.DOTALL)


@cache
def queries(package: str, file: str = "queries.sql") -> dict[str, str]:
    """The named queries of a part: `-- name: claim`, a description in comments, then the statement."""
    text = files(package).joinpath("sql", file).read_text()
    return {match["name"]: match["body"].strip().rstrip(";") for match in _QUERY.finditer(text)}
