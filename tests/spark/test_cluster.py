"""A standalone cluster on this machine: a master and two workers from the pip package, batch, stream and sink."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncewire.pipeline.session import prepare
from tests.spark.kills import CopyJob, assert_each_once
from tests.spark.support import fill, make_stream
from tests.support.nats import NatsServer

START_S = 120.0


class Daemon:
    """A part of a standalone cluster as a child process, ready when its log says so."""

    def __init__(self, folder: Path, name: str, ready: str, *arguments: str) -> None:
        import pyspark

        environ: dict[str, str] = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1"}
        prepare(environ, is_local=True)
        program = Path(pyspark.__file__).parent / "bin" / "spark-class"
        self.process = subprocess.Popen(
            [program, *arguments],
            cwd=folder,
            env={**environ, "SPARK_HOME": str(Path(pyspark.__file__).parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.found = self._await(re.compile(ready))
        self._drain = threading.Thread(target=self._read_on, daemon=True, name=name)
        self._drain.start()

    def _await(self, ready: re.Pattern[str]) -> str:
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        try:
            seen = []
            for line in self.process.stderr or ():
                seen.append(line)
                if match := ready.search(line):
                    return match[0]
            raise AssertionError("".join(seen[-20:]))
        finally:
            watchdog.cancel()

    def _read_on(self) -> None:
        for _ in self.process.stderr or ():
            pass

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._drain.join(10)
        if self.process.stderr:
            self.process.stderr.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The address of a master with two workers of one core each."""
    daemons: list[Daemon] = []
    ports = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    try:
        head = Daemon(tmp_path, "master", r"spark://127\.0\.0\.1:\d+", "org.apache.spark.deploy.master.Master", *ports)
        daemons.append(head)
        for number in range(2):
            kind = "org.apache.spark.deploy.worker.Worker"
            limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / f"work{number}"))
            registered = "Successfully registered with master"
            daemons.append(Daemon(tmp_path, f"worker{number}", registered, kind, *ports, *limits, head.found))
        yield head.found
    finally:
        for daemon in reversed(daemons):
            daemon.stop()


@pytest.mark.timeout(600)
def test_a_stream_is_copied_by_the_executors_of_a_cluster(master: str, server: NatsServer, tmp_path: Path) -> None:
    source, sink = make_stream(server, "IN"), make_stream(server, "OUT")
    fill(server, source, 6_000)
    job = CopyJob(server, source, sink, tmp_path / "checkpoint", 6_000, master)
    try:
        job.finish()
    finally:
        job.close()
    assert_each_once(server, sink, 6_000)
    executors = [path for number in range(2) for path in (tmp_path / f"work{number}").glob("app-*/*") if path.is_dir()]
    assert len(executors) >= 2, f"both workers ran an executor ({sys.executable})"
