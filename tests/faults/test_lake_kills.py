"""More than thirty kills while a lake is filled, at every point of a batch: each message once in the lake."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.spark.cluster import Cluster, cluster
from tests.support.lake_points import IN_DRIVER, IN_WORKERS
from tests.support.lakekills import NEVER, LakeJob, Strikes, running
from tests.support.nats import NatsServer

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3_600)]


def finish(strikes: Strikes, master: str) -> None:
    with running(strikes.server, strikes.lake, strikes.published, master) as job:
        job.finish()
    strikes.assert_each_once()


@pytest.fixture
def strikes(server: NatsServer, tmp_path: Path) -> Strikes:
    return Strikes(server, tmp_path / "lake")


LOCAL = "local[2,16]"


def test_kills_at_every_point_lose_and_double_nothing(strikes: Strikes) -> None:
    """One driver after the other, each killed at another point; before that its workers and its server are struck."""
    chance = random.Random(7)
    points = [*IN_WORKERS, *IN_DRIVER]
    chance.shuffle(points)
    for number, point in enumerate(points):
        with running(strikes.server, strikes.lake, NEVER, LOCAL) as job:
            if number % 3 == 0:
                strikes.strike_server(job, chance.choice(["land:begun", "land:written", "derive:staged"]))
            else:
                strikes.strike_workers(job, IN_WORKERS[number % len(IN_WORKERS)])
            strikes.strike_driver(job, point)
    assert 26 == len(strikes.done)
    finish(strikes, LOCAL)


@pytest.fixture
def executors(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as found:
        yield found


def test_kills_of_executors_in_a_cluster_lose_and_double_nothing(strikes: Strikes, executors: Cluster) -> None:
    def kill_executors() -> None:
        """All of them: whichever has the task that waits at the point is among them."""
        victims = executors.executors()
        assert victims, "no executor runs"
        for victim in victims:
            victim.kill()
        psutil.wait_procs(victims, timeout=30)

    def strike_executors(job: LakeJob, point: str) -> None:
        strikes.strike(job, point, "executors", kill_executors)

    for first, second in (("land:half", "derive:half"), ("land:named", "land:begun")):
        with running(strikes.server, strikes.lake, NEVER, executors.master) as job:
            strike_executors(job, first)
            strikes.strike_server(job, "land:begun")
            strike_executors(job, second)
            strikes.strike_driver(job, "land:written")
    assert 8 == len(strikes.done)
    finish(strikes, executors.master)
