"""A standalone cluster on this machine: a master and two workers from the pip package, each a child process."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from oncewire.pipeline.session import prepare

START_S = 120.0
WORKERS = 2
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class Daemon:
    """A part of a standalone cluster, ready when its log says so."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
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
        self._drain = threading.Thread(target=self._read_on, daemon=True, name=name)

    def ready(self, pattern: str) -> str:
        """What its log says when it is ready."""
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        try:
            seen = []
            for line in self.process.stderr or ():
                seen.append(line)
                if match := re.search(pattern, line):
                    self._drain.start()
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
        if self._drain.is_alive():
            self._drain.join(10)
        if self.process.stderr:
            self.process.stderr.close()


class Cluster:
    """`master` is its address; `folder` holds what the workers write."""

    def __init__(self, master: str, folder: Path, workers: list[Daemon]) -> None:
        self.master = master
        self.folder = folder
        self._workers = workers

    def executor_folders(self) -> list[Path]:
        return [path for path in self.folder.glob("work*/app-*/*") if path.is_dir()]

    def executors(self) -> list[psutil.Process]:
        """The executors that run now: a Java process each, below its worker."""
        found = []
        for worker in self._workers:
            for child in psutil.Process(worker.process.pid).children(recursive=True):
                try:
                    if child.name() == "java" and EXECUTOR in child.cmdline():
                        found.append(child)
                except psutil.NoSuchProcess:
                    continue
        return found


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A master and two workers of one core each; the workers start side by side."""
    ports = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as stack:

        def started(name: str, *arguments: str) -> Daemon:
            daemon = Daemon(folder, name, *arguments)
            stack.callback(daemon.stop)
            return daemon

        head = started("master", "org.apache.spark.deploy.master.Master", *ports)
        address = head.ready(r"spark://127\.0\.0\.1:\d+")
        workers = []
        for number in range(WORKERS):
            limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"work{number}"))
            kind = "org.apache.spark.deploy.worker.Worker"
            workers.append(started(f"worker{number}", kind, *ports, *limits, address))
        for worker in workers:
            worker.ready("Successfully registered with master")
        yield Cluster(address, folder, workers)
