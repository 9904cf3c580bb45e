"""Where the servers of the `oncewire up` in this folder are, for programs that run beside it."""

from __future__ import annotations

from oncewire._ground import settings
from oncewire._ground.errors import NotFound
from oncewire.embedded.folder import DataFolder


def postgres_url() -> str:
    """The PostgreSQL that `oncewire` commands use: the one that is set (ONCEWIRE_POSTGRES_URL, oncewire.toml), else
    that of the `oncewire up` whose data folder this is. Raises NotFound when there is neither."""
    chosen = settings.load().settings
    if chosen.postgres_url:
        return chosen.postgres_url
    folder = DataFolder.at(chosen.data)
    running = folder.read() if folder.holder() is not None else None
    server = running.servers.get("postgres") if running else None
    if server is None or server.mark is None:  # the address of a server that `up` did not start has no password here
        raise NotFound(
            f"no PostgreSQL is set, and no `oncewire up` with a PostgreSQL of its own runs on {folder.path}",
            hint="Run this in the folder of a running `oncewire up`, or set ONCEWIRE_POSTGRES_URL.",
        )
    return server.url
