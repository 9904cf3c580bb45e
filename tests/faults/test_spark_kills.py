"""At least thirty kills of driver, workers, executors and nats-server while Spark copies a stream: none lost, none
doubled. Half of them in one local driver after the other, half in a standalone cluster."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.spark.cluster import Cluster, cluster
from tests.spark.copy_job import RECORDS
from tests.spark.kills import LOCAL, CopyJob, assert_each_once, await_publishing, copying
from tests.spark.support import fill, make_stream, state
from tests.support.nats import NatsServer

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3_600)]

KILLS = 16
PER_DRIVER = 4
NEVER = 10**12
MOMENT_MAX_S = 1.5


def restart(server: NatsServer) -> None:
    server.kill()
    server.start()


class Strikes:
    """Kills in the middle of batches. There is always more to copy than a driver can finish before it is struck."""

    def __init__(self, server: NatsServer, folder: Path, seed: int, master: str = LOCAL) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.source, self.sink = make_stream(server, "IN"), make_stream(server, "OUT")
        self.master = master
        self.checkpoint = folder / "checkpoint"
        self.filled = 0
        self.done: list[str] = []

    def run(self, kinds: Mapping[str, Callable[[CopyJob], object]]) -> None:
        """A driver's last strike is its own kill."""
        while len(self.done) < KILLS:
            with copying(self.server, self.source, self.sink, self.checkpoint, NEVER, self.master) as job:
                for what in [*self.rng.choices(list(kinds), k=PER_DRIVER - 1), "driver"]:
                    self.fill_more()
                    if not job.said("batch"):
                        assert "workers" == self.done[-1], f"the driver ended by itself after {self.done}"
                        break
                    self.wait_a_moment()
                    kinds.get(what, CopyJob.kill)(job)
                    self.done.append(what)

    def fill_more(self) -> None:
        fill(self.server, self.source, 3 * RECORDS, first=self.filled + 1)
        self.filled += 3 * RECORDS

    def wait_a_moment(self) -> None:
        """Every other time while a batch is being published, else anywhere between the end of one batch and the end of
        the next: planning, reading, committing."""
        if len(self.done) % 2:
            await_publishing(self.server, self.sink)
        else:
            threading.Event().wait(self.rng.uniform(0.0, MOMENT_MAX_S))

    def finish(self) -> None:
        with copying(self.server, self.source, self.sink, self.checkpoint, self.filled, self.master) as job:
            job.finish()
        assert self.filled == state(self.server, self.sink)["messages"]
        assert_each_once(self.server, self.sink, self.filled)


def test_kills_of_driver_workers_and_server_lose_and_double_nothing(server: NatsServer, tmp_path: Path) -> None:
    strikes = Strikes(server, tmp_path, 1)
    strikes.run({"workers": CopyJob.kill_workers, "server": lambda _: restart(server)})
    strikes.finish()
    assert {"driver", "workers", "server"} == set(strikes.done)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as found:
        yield found


def test_kills_of_executors_in_a_cluster_lose_and_double_nothing(
    server: NatsServer, running: Cluster, tmp_path: Path
) -> None:
    strikes = Strikes(server, tmp_path, 2, running.master)

    def kill_executor(_: CopyJob) -> None:
        victims = running.executors()
        assert victims, "no executor runs"
        victim = strikes.rng.choice(victims)
        victim.kill()
        psutil.wait_procs([victim], timeout=30)

    strikes.run({"executor": kill_executor, "server": lambda _: restart(server)})
    strikes.finish()
    assert {"driver", "executor", "server"} == set(strikes.done)
