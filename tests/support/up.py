"""A real `oncewire up` for tests: its own folder and ports, told by its JSON events, ended by the id we started."""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from oncewire import Client, connect
from oncewire._ground import users
from oncewire.cli.lakeside import STOP_S
from oncewire.embedded.folder import DataFolder, Running

WAIT_S = 60.0
ONCEWIRE = [sys.executable, "-c", "from oncewire.cli import main; main(prog_name='oncewire')"]
ANY_PORTS = {"ONCEWIRE_NATS_PORT": "0", "ONCEWIRE_POSTGRES_PORT": "0"}
ANY_PORTS |= {"GATEWAY_PORT": "0", "ONCEWIRE_BROKER_LISTEN": "127.0.0.1:0", "ONCEWIRE_METRICS_LISTEN": "127.0.0.1:0"}
ANY_PORTS |= {"ONCEWIRE_CONSOLE_LISTEN": "127.0.0.1:0"}


def clean_environ(**more: str) -> dict[str, str]:
    """The environment without settings of whoever runs the tests."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NATS_", "ONCEWIRE_", "GATEWAY_", "PG"))
    }
    return {**kept, **more}


def oncewire(*args: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*ONCEWIRE, *args], cwd=cwd, env=clean_environ(**environ), capture_output=True, text=True, timeout=WAIT_S
    )


def until(condition: Callable[[], Any], what: str, *, deadline_s: float = WAIT_S) -> None:
    """Wait for a condition that nothing signals."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


@cache
def _template() -> Path:
    """The folder of an embedded PostgreSQL whose database is made; once for a whole run."""
    folder = tempfile.TemporaryDirectory(prefix="ow-up-")
    atexit.register(folder.cleanup)
    Path(folder.name).chmod(0o755)
    with Up(Path(folder.name) / "data") as up:
        assert up.ready().stop() == 0
    (up.folder.postgres / "server.log").unlink()
    return up.folder.postgres


def made(data: Path) -> Path:
    """A data folder in which the database stands already: making one takes longer than most tests."""
    data.mkdir(mode=0o700)
    subprocess.run(["cp", "-a", str(_template()), str(data)], check=True)
    return data


class Up:
    """One `oncewire up --json` process."""

    def __init__(self, data: Path, *args: str, prefix: Sequence[str] = (), **environ: str) -> None:
        self.folder = DataFolder.at(data)
        self._end_s = WAIT_S + (STOP_S if "--pipeline" in args else 0.0)  # it finishes a batch on a busy machine
        self.events: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [*prefix, *ONCEWIRE, "up", "--json", "--data", str(data), *args],
            cwd=data.parent,
            env=clean_environ(**(ANY_PORTS | environ)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def wait_for(self, event: str, part: str | None = None) -> dict[str, Any]:
        """Read events up to this one."""
        deadline = time.monotonic() + WAIT_S
        while line := self._lines.get(timeout=max(0.0, deadline - time.monotonic())):
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == event and part in (None, self.events[-1].get("part")):
                return self.events[-1]
        raise AssertionError(f"up ended before {event}: {self.end()}")

    def ready(self) -> Up:
        self.wait_for("serving")
        return self

    @property
    def running(self) -> Running:
        running = self.folder.read()
        assert running is not None
        return running

    def url(self, name: str) -> str:
        return self.running.servers[name].url

    def pid(self, name: str) -> int:
        mark = self.running.servers[name].mark
        assert mark is not None
        return mark.pid

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.end()[0]

    def end(self) -> tuple[int, str]:
        """Wait for the end: exit code and what was said on stderr."""
        code = self.process.wait(self._end_s)
        self._reader.join(WAIT_S)
        while not self._lines.empty():
            if line := self._lines.get():
                self.events.append(json.loads(line))
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        said = "" if self.process.stderr.closed else self.process.stderr.read().decode()
        self.process.stdout.close()
        self.process.stderr.close()
        return code, said

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.end()


def operator(up: Up) -> Client:
    """A client of a running `up` that may make and change streams."""
    seed = str(users.key_path(up.folder.keys, users.OPERATOR))
    return connect(up.url("nats"), nkey=seed, inbox_prefix="_INBOX_operator")
