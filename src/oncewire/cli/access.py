"""The users of the embedded nats-server: their keys in the data folder, and who connects as whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oncewire._ground import topology
from oncewire._ground.errors import InvalidSetting
from oncewire._ground.files import make_folder
from oncewire._ground.jetstream import system
from oncewire._ground.jetstream.nkeys import ensure_key
from oncewire._ground.jetstream.options import Options
from oncewire._ground.settings import Settings
from oncewire._ground.topology import permissions
from oncewire._ground.topology.permissions import User
from oncewire._ground.users import DEVELOPER, MONITOR, identity, key_path
from oncewire.cli.edge import asks_who
from oncewire.embedded.folder import DataFolder, Server, translated


def make_keys(folder: Path, users: Iterable[User]) -> dict[str, str]:
    """The public key of each user; keys that are missing are made, in a folder for its owner alone."""
    with translated(folder):
        make_folder(folder)
        return {user.name: ensure_key(key_path(folder, user.name)) for user in users}


def takes_anybody(chosen: Settings) -> bool:
    """Whether the embedded server lets programs in that bring no key. Where HTTP asks for credentials, it never does:
    what a tenant's key protects there would lie open beside it."""
    has_credentials = asks_who(chosen)
    if has_credentials and chosen.embedded_nats_access == "open":
        raise InvalidSetting(
            "embedded.nats_access is open, but credentials are configured: every program on this machine could read "
            "and write the messages of all tenants without one",
            hint="Set it to auto or keys, or unset auth.*.",
        )
    return not has_credentials and chosen.embedded_nats_access != "keys"


def authorization(chosen: Settings, folder: DataFolder) -> str:
    """What the embedded server's configuration says about its users. Made anew at each start, the keys once."""
    declared = topology.load(settings=chosen)
    users = [*permissions.users(declared, chosen), permissions.developer(declared)]
    monitor = permissions.monitor()
    keys = make_keys(folder.keys, [*users, monitor])
    anybody = f"no_auth_user: {keys[DEVELOPER]}\n" if takes_anybody(chosen) else ""
    system = f"system_account: SYS\naccounts {{ SYS {{\n{permissions.document([monitor], keys.__getitem__)}}} }}\n"
    return f"{anybody}authorization {{\n{permissions.document(users, keys.__getitem__)}}}\n{system}"


async def healthy_version(folder: DataFolder, url: str) -> str:
    """The version of the embedded server, '' while it does not serve yet."""
    options = Options(servers=(url,), name="oncewire up")
    return await system.healthy_version(options, str(key_path(folder.keys, MONITOR)))


def as_user(chosen: Settings, server: Server, user: str) -> Settings:
    """The settings to reach a server as one of its users; unchanged for a server whose keys are not ours."""
    if not server.keys:
        return chosen
    values: dict[str, Any] = dict.fromkeys(("nats_user", "nats_password", "nats_token", "nats_creds"), "")
    return dataclasses.replace(chosen, **(values | identity(Path(server.keys), user)))
