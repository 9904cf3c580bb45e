"""A real PostgreSQL for tests: its own folder and port, killed by the id we started; a migrated database per test.

One server serves a whole test run. It does not sync: killing a process loses nothing that the kernel has, and power
cuts are not what these tests are about.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import asyncpg

from oncewire._ground.database.migrate import migrate
from oncewire.embedded.postgres import programs
from oncewire.embedded.process import LAUNCH
from tests.support.ports import free_port

START_S = 60.0
NOBODY = 65534
TEMPLATE = "migrated"
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_senders": "4",
    "wal_level": "replica",
    "max_wal_size": "4GB",
}
_serial = itertools.count(1)


def as_nobody(argv: list[str], folder: Path) -> list[str]:
    """PostgreSQL refuses root: the product's own shim runs it as nobody, also from a clone in a closed folder."""
    if os.geteuid() != 0:
        return argv
    order = {"argv": argv, "parent": os.getpid(), "death_signal": 0, "uid": NOBODY, "gid": NOBODY}
    return [sys.executable, str(LAUNCH), json.dumps(order | {"reach": [argv[0], str(folder)]})]


class PostgresServer:
    """One postgres process. Keeps its port and its data over `kill` and `start`."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = free_port()
        self.options = OPTIONS | options
        self.process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://oncewire@127.0.0.1:{self.port}/{database}"

    def run(self, program: str, *args: str) -> None:
        command = as_nobody([str(programs() / program), *args], self.folder)
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder)

    def make(self) -> PostgresServer:
        if os.geteuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
        locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        self.run("initdb", "-D", str(self.data), "-U", "oncewire", "--auth=trust", "--no-sync", *locale)
        return self

    def copy(self, folder: Path) -> PostgresServer:
        """A standby that follows this server."""
        standby = PostgresServer(folder)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        source = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "oncewire"]
        standby.run("pg_basebackup", "-D", str(standby.data), *source, "-R", "-c", "fast", "--no-sync")
        return standby

    def start(self, *, wait: bool = True) -> PostgresServer:
        assert self.process is None or self.process.poll() is not None, "already running"
        options = [word for name, value in self.options.items() for word in ("-c", f"{name}={value}")]
        argv = [str(programs() / "postgres"), "-D", str(self.data), "-p", str(self.port), *options]
        command = as_nobody(argv, self.folder)
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        command = [str(programs() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(command, check=False).returncode:
            assert self.process is not None
            assert self.process.poll() is None, f"postgres ended: {(self.folder / 'server.log').read_text()[-2000:]}"
            assert time.monotonic() < deadline, "postgres did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL to the whole server: a crash, and recovery at the next start."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.process.kill()
        self.process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        deadline = time.monotonic() + START_S
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)

    def migrated(self) -> PostgresServer:
        """With a template database that holds all tables."""

        async def make() -> None:
            await _execute(self.url(), f"CREATE DATABASE {TEMPLATE}")
            await migrate(self.url(TEMPLATE))

        with ThreadPoolExecutor(1) as thread:  # the caller may be inside a loop of its own
            thread.submit(lambda: asyncio.run(make())).result()
        return self

    async def new_database(self) -> str:
        """The address of a fresh migrated database."""
        name = f"test{next(_serial)}"
        await _execute(self.url(), f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        return self.url(name)


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@contextlib.contextmanager
def postgres_server(**options: str) -> Iterator[PostgresServer]:
    """A server of its own, for tests that kill it."""
    folder = Path(tempfile.mkdtemp(prefix="ow-postgres-"))
    server = PostgresServer(folder, **options).make()
    try:
        yield server.start()
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@cache
def shared_postgres() -> PostgresServer:
    """The server of this test run, with its template."""
    started = postgres_server()
    server = started.__enter__()
    atexit.register(started.__exit__, None, None, None)
    return server.migrated()
