"""`oncewire config`: every setting, its value, and where the value came from."""

from __future__ import annotations

from typing import Any

import click

from oncewire._ground import settings
from oncewire.cli import face


@click.command()
@face.setting_options(*(row.name for row in settings.table()))
@face.command
def config(*, as_json: bool, **flags: Any) -> None:
    """Print each setting, its value and where the value came from. Secrets are masked.

    A value comes from the first of: a flag, an environment variable, oncewire.toml, the default.

    \b
    Examples:
      oncewire config
      NATS_URL=nats://prod:4222 oncewire config --json
      oncewire --config staging.toml config
    """
    resolved = face.load(flags)
    rows = [
        {
            "key": row.key,
            "value": resolved.shown(row),
            "origin": resolved.origins[row.name],
            "variables": list(row.variables),
            "flag": row.flag,
            "help": row.help,
        }
        for row in settings.table()
    ]
    if as_json:
        face.print_json(rows)
        return
    key_width = max(len(str(row["key"])) for row in rows)
    value_width = min(48, max(len(str(row["value"])) for row in rows))
    for row in rows:
        origin = str(row["origin"])
        line = f"{row['key']:<{key_width}}  {row['value'] or '–':<{value_width}}  {origin}"
        face.say(line, is_dim=origin == "default")
