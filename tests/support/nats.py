"""A real nats-server for tests: its own folder, its own ports, killed by the id we started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import free_port

START_S = 30.0


def server_binary() -> str:
    found = shutil.which("nats-server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found, "nats-server is not installed: make env"
    return found


class NatsServer:
    """One nats-server process. Keeps its port and its data over `kill` and `start`."""

    def __init__(
        self,
        folder: Path,
        config: str = "",
        *,
        sync_always: bool = False,
        name: str = "test",
        is_monitor_tls: bool = False,
    ) -> None:
        self.folder = folder
        self.name = name
        self.port = free_port()
        self.monitor_port = free_port()
        self.config = config
        self.sync_always = sync_always
        self._monitor = "https" if is_monitor_tls else "http"
        self.jetstream = True
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"{self._monitor}://127.0.0.1:{self.monitor_port}"

    @property
    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, *, wait: bool = True) -> NatsServer:
        assert self.process is None or self.process.poll() is not None, "already running"
        self.folder.mkdir(parents=True, exist_ok=True)
        sync = "sync_interval: always" if self.sync_always else ""
        store = json.dumps(str(self.folder / "jetstream"))
        jetstream = f"jetstream {{ store_dir: {store}, max_file: 20GB, max_mem: 256MB, {sync} }}"
        text = f"""
            server_name: {json.dumps(self.name)}
            listen: "127.0.0.1:{self.port}"
            {self._monitor}: "127.0.0.1:{self.monitor_port}"
            log_file: {json.dumps(str(self.folder / "server.log"))}
            {jetstream if self.jetstream else ""}
            {self.config}
        """
        (self.folder / "server.conf").write_text(text)
        command = [server_binary(), "-c", str(self.folder / "server.conf")]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"nats-server ended: {self.log[-2000:]}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                if self._is_healthy():
                    return
            time.sleep(0.01)
        raise TimeoutError(f"nats-server did not start: {self.log[-2000:]}")

    def _is_healthy(self) -> bool:
        trusting = ssl._create_unverified_context() if self._monitor == "https" else None
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.monitor_url}/healthz", timeout=1, context=trusting) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: nothing is flushed by the server."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def nats_server(config: str = "", *, sync_always: bool = False, is_monitor_tls: bool = False) -> Iterator[NatsServer]:
    with tempfile.TemporaryDirectory(prefix="ow-nats-") as folder:
        server = NatsServer(Path(folder), config, sync_always=sync_always, is_monitor_tls=is_monitor_tls)
        try:
            yield server.start()
        finally:
            server.stop()


class Cluster:
    """Three real servers on loopback with routes between them: streams with three replicas, elections, lame ducks."""

    SIZE = 3

    def __init__(self, folder: Path, *, grace_ms: int, config: str = "") -> None:
        self._grace_ms = grace_ms
        self._more = config
        routes = [free_port() for _ in range(self.SIZE)]
        addresses = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.servers = [
            NatsServer(folder / f"n{index}", self._config(route, addresses), name=f"n{index}")
            for index, route in enumerate(routes)
        ]

    def _config(self, route: int, addresses: str) -> str:
        return f"""
            cluster {{ name: "test", listen: "127.0.0.1:{route}", routes: [{addresses}] }}
            lame_duck_duration: "30s"
            lame_duck_grace_period: "{self._grace_ms}ms"
            {self._more}
        """

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def start(self) -> Cluster:
        for server in self.servers:
            server.start(wait=False)
        for server in self.servers:
            server.wait_ready()
        return self

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def by_name(self, name: str) -> NatsServer:
        return next(server for server in self.servers if server.name == name)


@contextlib.contextmanager
def nats_cluster(*, grace_ms: int = 500, config: str = "") -> Iterator[Cluster]:
    """`grace_ms`: how long a lame duck waits before it begins to close connections."""
    with tempfile.TemporaryDirectory(prefix="ow-cluster-") as folder:
        cluster = Cluster(Path(folder), grace_ms=grace_ms, config=config)
        try:
            yield cluster.start()
        finally:
            cluster.stop()
