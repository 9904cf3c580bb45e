"""`oncewire migrate`: the tables and functions of the outbox (and of other parts that keep data in PostgreSQL)."""

from __future__ import annotations

from typing import Any

import click

from oncewire._ground.database import migrate as migrations
from oncewire._ground.errors import Refused
from oncewire._ground.settings import Settings, mask_url
from oncewire.cli import face


@click.command()
@click.option("--sql", "as_sql", is_flag=True, help="Print the SQL instead of applying it.")
@click.option("--schema", default="", help="Schema for the tables (else the search path's first).")
@face.setting_options("data", "postgres_url")
@face.command
def migrate(*, as_sql: bool, schema: str, as_json: bool, **flags: Any) -> None:
    """Create or upgrade the tables and functions in PostgreSQL.

    Safe to run again, and from many processes at the same time; so is the printed SQL.

    \b
    Examples:
      oncewire migrate
      oncewire migrate --schema messaging
      oncewire migrate --sql > oncewire.sql
    """
    if as_sql:
        text = migrations.script(schema)
        face.print_json({"sql": text}) if as_json else click.echo(text, nl=False)
        return
    settings = face.load_here(flags).settings
    face.run(_migrate(require_postgres(settings), schema, as_json))


async def _migrate(url: str, schema: str, as_json: bool) -> None:
    applied = await migrations.migrate(url, schema)
    if as_json:
        face.print_json({"applied": [one.title for one in applied]})
        return
    for one in applied:
        face.say(f"applied {one.title}")
    face.say(f"{mask_url(url)} is up to date")


def require_postgres(settings: Settings) -> str:
    """The address of PostgreSQL, or a refusal that says how to give one."""
    if not settings.postgres_url:
        raise Refused(
            "no PostgreSQL is given, and no `oncewire up` runs here",
            hint="Set ONCEWIRE_POSTGRES_URL, pass --postgres-url, or start `oncewire up`.",
        )
    return settings.postgres_url
