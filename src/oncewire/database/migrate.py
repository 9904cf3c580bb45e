"""Migrations: numbered `.sql` files of each part, applied once, in order, each in its own transaction.

What was applied is recorded with its checksum: a file that changed afterwards is refused, since nobody could say which
of the two the database has. Several processes may migrate at once; an advisory lock lets one go first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from oncewire.database.postgres import connected, quote_name
from oncewire.errors import Corrupt

LOCK = 0x6F6E6365  # "once"
PARTS = ("outbox", "ledger")

_TABLE = """
CREATE TABLE IF NOT EXISTS oncewire_migrations (
    part text NOT NULL,
    number integer NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (part, number)
)"""


class Migration(msgspec.Struct, frozen=True):
    """One file: `003_name.sql` of a part."""

    part: str
    number: int
    name: str
    sql: str

    @property
    def title(self) -> str:
        return f"{self.part} {self.number:03} {self.name}"

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations(parts: Sequence[str] = PARTS) -> list[Migration]:
    """All files of the parts, in the order in which they are applied."""
    found = []
    for part in parts:
        for path in files(f"oncewire.{part}").joinpath("sql").iterdir():
            number, _, name = path.name.partition("_")
            if number.isdigit() and name.endswith(".sql"):
                found.append(Migration(part, int(number), name.removesuffix(".sql"), path.read_text()))
    return sorted(found, key=lambda one: (parts.index(one.part), one.number))


def script(schema: str = "") -> str:
    """All migrations as one text, for those who apply SQL by their own means."""
    name = quote_name(schema) if schema else ""
    head = f"CREATE SCHEMA IF NOT EXISTS {name};\nSET search_path = {name};\n" if schema else ""
    parts = [f"-- {one.title}\nBEGIN;\n{one.sql}\n{_record(one)}\nCOMMIT;" for one in migrations()]
    return head + _TABLE.strip() + ";\n\n" + "\n\n".join(parts) + "\n"


def _record(one: Migration) -> str:
    """As a text, since `script` has no parameters; all parts are our own file names."""
    values = f"'{one.part}', {one.number}, '{one.name}', '{one.checksum}'"
    return f"INSERT INTO oncewire_migrations (part, number, name, checksum) VALUES ({values});"  # noqa: S608


async def migrate(url: str, schema: str = "") -> list[Migration]:
    """Apply what is missing; return what was applied."""
    async with connected(url, cache_statements=False) as connection:
        return [one for one in migrations() if await _apply(connection, one, schema)]


async def _apply(connection: Any, one: Migration, schema: str) -> bool:
    """Lock, path and record end with the transaction: behind a pooler the next one may have another connection."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
        if schema:
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quote_name(schema)}")
            await connection.execute(f"SET LOCAL search_path = {quote_name(schema)}")
        await connection.execute(_TABLE)
        found = await connection.fetchval(
            "SELECT checksum FROM oncewire_migrations WHERE part = $1 AND number = $2", one.part, one.number
        )
        if found is None:
            await connection.execute(one.sql)
            await connection.execute(_record(one))
        elif found != one.checksum:
            raise Corrupt(
                f"migration {one.title} was applied in another form",
                hint="This database was migrated by another version of the file: compare before you go on.",
            )
    return found is None
