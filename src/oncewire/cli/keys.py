"""`oncewire keys`: who may call the HTTP servers."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from oncewire._ground.trust.grants import ACTIONS
from oncewire._ground.trust.keys import ApiKey, KeyFile
from oncewire.cli import face

DAY_S = 86_400

_ALLOW = (
    "What the key may do, each alone or with a name (produce:orders). Known: " + ", ".join(ACTIONS) + ", or * for all."
)


@click.group()
def keys() -> None:
    """API keys for the broker and the gateway.

    \b
    Examples:
      oncewire keys create --tenant acme --name checkout --allow produce:orders
      oncewire keys ls
      oncewire keys revoke 3f9c01a7be42
    \b
    Servers take them with --auth-keys FILE (ONCEWIRE_AUTH_KEYS), and see a change within a second:
      curl -H "Authorization: Bearer ow_…" localhost:8080/v1/topics
    """


@keys.command()
@click.option("--tenant", required=True, help="Whose things the key is for.")
@click.option("--name", required=True, help="What people call it.")
@click.option("--allow", "grants", multiple=True, required=True, help=_ALLOW)
@click.option(
    "--days", type=click.IntRange(0, 36_500), default=0, help="It expires after so many days [default never]."
)
@face.setting_options("auth_keys", "data")
@face.command
def create(*, tenant: str, name: str, grants: tuple[str, ...], days: int, as_json: bool, **flags: Any) -> None:
    """Make a key and show it, once: the file keeps only a hash.

    \b
    Examples:
      oncewire keys create --tenant acme --name checkout --allow produce:orders --allow read
      oncewire keys create --tenant acme --name ops --allow '*' --days 30 --json
    """
    file = _file(flags)
    key, text = file.create(name, tenant, grants, int(time.time()), days * DAY_S)
    if as_json:
        face.print_json({**_shown(key), "key": text, "file": str(file.path)})
        return
    face.say(text)
    face.say(f"Keep it: it is not shown again. Its id is {key.id}; {file.path} knows only its hash.", err=True)


@keys.command()
@face.setting_options("auth_keys", "data")
@face.command
def ls(*, as_json: bool, **flags: Any) -> None:
    """List the keys: whose they are, what they allow, whether they still work.

    \b
    Example:
      oncewire keys ls --json
    """
    file = _file(flags)
    found = file.keys()
    if as_json:
        face.print_json([_shown(key) for key in found])
        return
    if not found:
        face.say(f"No keys in {file.path}. Make one: oncewire keys create --help")
    for key in found:
        face.say(f"{key.id}  {_state(key):10}  {key.tenant:16}  {key.name:24}  {', '.join(key.grants)}")


@keys.command()
@click.argument("key_id")
@face.setting_options("auth_keys", "data")
@face.command
def revoke(*, key_id: str, as_json: bool, **flags: Any) -> None:
    """Let a key no longer work. Running servers know within a second.

    \b
    Example:
      oncewire keys revoke 3f9c01a7be42
    """
    key = _file(flags).revoke(key_id, int(time.time()))
    if as_json:
        face.print_json(_shown(key))
    else:
        face.say(f"{key.id} ({key.name} of {key.tenant}) no longer works")


def _file(flags: dict[str, Any]) -> KeyFile:
    settings = face.load(flags).settings
    return KeyFile(Path(settings.auth_keys) if settings.auth_keys else settings.data / "keys.json")


def _state(key: ApiKey) -> str:
    if key.revoked_s:
        return "revoked"
    return "works" if key.is_good(time.time()) else "expired"


def _shown(key: ApiKey) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(key)
    del shown["secret_sha256"]
    times = {
        name: datetime.fromtimestamp(shown[name], UTC).isoformat()
        for name in shown
        if name.endswith("_s") and shown[name]
    }
    return {**{name: value for name, value in shown.items() if not name.endswith("_s")}, "state": _state(key)} | {
        name.removesuffix("_s"): value for name, value in times.items()
    }
