"""What the kill tests share: drivers as processes of their own, their Java and Python workers, and the proof."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.spark.support import state, stored, until
from tests.support.nats import NatsServer

ROOT = Path(__file__).parents[2]
STEP_S = 240.0
LOCAL = "local[2,16]"
"""Two tasks at a time, and a task whose worker is killed is tried again: a plain `local[2]` gives up at once, and a
few tries may all meet workers that were killed while they were idle."""
DAEMONS = {"pyspark.daemon", "oncewire.pipeline.daemon"}
"""Spark's own on a cluster, ours on one machine."""


class Driver:
    """A driver as a process of its own, killed by the ids of its own processes. It prints lines of JSON."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )

    def said(self, key: str) -> dict[str, object]:
        """The next line that has this key. Ends with an empty answer when the driver ends."""
        watchdog = threading.Timer(STEP_S, self.kill)
        watchdog.start()
        try:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith(b"{") and key in (shown := json.loads(line)):
                    found: dict[str, object] = shown
                    return found
            return {}
        finally:
            watchdog.cancel()

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill_workers(self) -> int:
        """SIGKILL to the Python workers. Not to the daemons that fork them: Spark itself ends a query whose daemon is
        gone. In a local driver one of them may just be committing a batch, and then Spark ends the query as well."""
        killed = 0
        for child in self.children():
            try:
                parent = child.parent()
                if parent and DAEMONS & {*child.cmdline()} and DAEMONS & {*parent.cmdline()}:
                    child.kill()
                    killed += 1
            except psutil.NoSuchProcess:
                continue
        return killed

    def kill(self) -> None:
        """SIGKILL to the driver and everything that it started: Java, and its Python workers."""
        family = self.children()
        for process in family:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=30)

    def is_finished(self) -> bool:
        """Wait for its end: whether it had copied everything."""
        is_done = bool(self.said("done"))
        return self.process.wait(STEP_S) == 0 and is_done

    def finish(self) -> None:
        assert self.is_finished(), f"the driver ended before it was done, see {self._log.name}"

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        if self.process.stdout:
            self.process.stdout.close()
        self._log.close()


class CopyJob(Driver):
    """Copies `source` into `sink`."""

    def __init__(
        self, server: NatsServer, source: str, sink: str, checkpoint: Path, last: int, master: str = LOCAL
    ) -> None:
        arguments = [master, server.url, source, sink, str(checkpoint), str(last)]
        super().__init__("tests.spark.copy_job", arguments, checkpoint.parent / f"{checkpoint.name}.log")


@contextmanager
def copying(
    server: NatsServer, source: str, sink: str, checkpoint: Path, last: int, master: str = LOCAL
) -> Iterator[CopyJob]:
    job = CopyJob(server, source, sink, checkpoint, last, master)
    try:
        yield job
    finally:
        job.close()


def await_publishing(server: NatsServer, sink: str) -> None:
    """Until a batch is being published just now: a kill between two batches would prove little."""
    before = state(server, sink)["messages"]
    until(lambda: state(server, sink)["messages"] > before, STEP_S)


def assert_each_once(server: NatsServer, sink: str, count: int) -> None:
    found = Counter(int(message.data) for message in stored(server, sink))
    wanted = set(range(1, count + 1))
    assert set() == wanted - set(found), "lost"
    assert {} == {number: times for number, times in found.items() if times > 1 or number not in wanted}, "doubled"
