"""A nats-server with a user per declared service, as an operator would set it up."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from oncewire._ground import topology, users
from oncewire._ground.jetstream import Client, connect
from oncewire._ground.settings import Settings
from oncewire._ground.topology import Topology
from tests.support.nats import NatsServer
from tests.support.up import ONCEWIRE, clean_environ

AGENTS = """
[services.biller]
agent = "default/demo/biller"
handles = ["cmd.default.demo.biller.>"]
publishes = ["evt.default.demo.billing.*"]

[services.teller]
agent = "default/demo/teller"
handles = ["evt.default.demo.billing.*"]
publishes = ["evt.default.demo.told.*"]
answers = ["sr.queries.told"]
"""


class Guarded:
    """The server, the keys of its users, and what is declared on it."""

    def __init__(self, server: NatsServer, keys: Path, declared: Topology) -> None:
        self.server = server
        self.keys = keys
        self.declared = declared

    def connect(self, user: str) -> Client:
        key = users.key_path(self.keys, user)
        return connect(self.server.url, name=user, nkey=str(key), inbox_prefix=users.inbox_prefix(user))

    @property
    def violations(self) -> list[str]:
        """What the server has denied so far, as its log tells."""
        return [line for line in self.server.log.splitlines() if "Violation" in line]

    async def apply(self) -> None:
        async with self.connect(users.OPERATOR) as client:
            assert [] == await topology.ensure(client, topology=self.declared)


def export(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`oncewire topology export --nats-permissions`, run in a folder."""
    command = [*ONCEWIRE, "topology", "export", "--nats-permissions", *args]
    return subprocess.run(command, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=60)


@contextlib.contextmanager
def guarded(folder: Path, block: str = 'authorization { include "oncewire-users.conf" }') -> Iterator[Guarded]:
    """All that the catalogs declare and two agents, applied by the operator. `block` says where the users belong."""
    file, keys = folder / "agents.toml", folder / "keys"
    file.write_text(AGENTS)
    made = export(folder, "--file", str(file), "--keys", str(keys), "--out", str(folder / "oncewire-users.conf"))
    assert 0 == made.returncode, made.stderr
    server = NatsServer(folder, block)
    try:
        found = Guarded(server.start(), keys, topology.load([file], Settings()))
        asyncio.run(found.apply())
        yield found
    finally:
        server.stop()
