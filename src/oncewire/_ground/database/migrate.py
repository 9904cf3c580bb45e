"""Migrations: numbered `.sql` files of each part, applied once, in order, each as a whole or not at all.

A migration is wrapped in a DO block that looks whether it was applied, applies it, and records it with its checksum. So
the printed script and `migrate` are the same statements, and both can be run again. A file that changed after it was
applied is refused, since nobody could say which of the two the database has. Several processes may migrate at once; an
advisory lock lets one go first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from oncewire._ground.database.postgres import connected, quote_name

LOCK = 0x6F6E6365  # "once"
PARTS = {"outbox": "oncewire.outbox", "ledger": "oncewire._ground.ledger"}
"""Who has tables, and the package where its files are, in the order in which they are applied."""

_TABLE = f"""\
DO $oncewire$
BEGIN
    PERFORM pg_advisory_xact_lock({LOCK});
    CREATE TABLE IF NOT EXISTS oncewire_migrations (
        part text NOT NULL,
        number integer NOT NULL,
        name text NOT NULL,
        checksum text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (part, number)
    );
END
$oncewire$;
"""
# The fields are our own file names and digests. The file may hold dollar quotes of its own ($$).
_BLOCK = """\
DO $oncewire$
DECLARE
    v_checksum text;
BEGIN
    PERFORM pg_advisory_xact_lock({lock});
    SELECT checksum INTO v_checksum FROM oncewire_migrations WHERE part = '{part}' AND number = {number};
    IF v_checksum = '{checksum}' THEN
        RETURN;
    ELSIF v_checksum IS NOT NULL THEN
        RAISE EXCEPTION 'migration {title} was applied in another form' USING ERRCODE = 'OW500',
            HINT = 'This database was migrated by another version of the file: compare before you go on.';
    END IF;
    INSERT INTO oncewire_migrations (part, number, name, checksum)
        VALUES ('{part}', {number}, '{name}', '{checksum}');

{sql}
END
$oncewire$;
"""


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

    @property
    def statement(self) -> str:
        """Applies it where that was not done, and does nothing where it was."""
        return _BLOCK.format(
            lock=LOCK,
            part=self.part,
            number=self.number,
            name=self.name,
            title=self.title,
            checksum=self.checksum,
            sql=self.sql,
        )


def migrations(parts: Sequence[str] = tuple(PARTS)) -> list[Migration]:
    """All files of the parts, in the order in which they are applied."""
    found = []
    for part in parts:
        for path in files(PARTS[part]).joinpath("sql").iterdir():
            number, _, name = path.name.partition("_")
            if number.isdigit() and name.endswith(".sql"):
                found.append(Migration(part, int(number), name.removesuffix(".sql"), path.read_text()))
    return sorted(found, key=lambda migration: (parts.index(migration.part), migration.number))


def script(schema: str = "", parts: Sequence[str] = tuple(PARTS)) -> str:
    """All migrations as one text, for those who apply SQL by their own means. It can be run again."""
    name = quote_name(schema) if schema else ""
    head = [f"CREATE SCHEMA IF NOT EXISTS {name};\nSET search_path = {name};\n"] if schema else []
    steps = [f"-- {migration.title}\n{migration.statement}" for migration in migrations(parts)]
    return "\n".join([*head, _TABLE, *steps])


async def migrate(url: str, schema: str = "") -> list[Migration]:
    """Apply what is missing; return what was applied."""
    async with connected(url, cache_statements=False) as connection:
        return [migration for migration in migrations() if await _apply(connection, migration, schema)]


async def _apply(connection: Any, migration: Migration, schema: str) -> bool:
    """Lock and path end with the transaction: behind a pooler the next one may have another connection."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
        if schema:
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quote_name(schema)}")
            await connection.execute(f"SET LOCAL search_path = {quote_name(schema)}")
        await connection.execute(_TABLE)
        is_there = await connection.fetchval(
            "SELECT EXISTS (SELECT FROM oncewire_migrations WHERE part = $1 AND number = $2)",
            migration.part,
            migration.number,
        )
        await connection.execute(migration.statement)
    return not is_there
