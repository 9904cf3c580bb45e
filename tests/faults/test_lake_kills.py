"""Thirty kills of driver, workers and nats-server while a lake is filled: each message once in bronze and in silver."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.spark.lake_job import ROWS
from tests.spark.lakes import (
    LakeJob,
    assert_each_once,
    event,
    is_deriving,
    open_batches,
    running,
    streams,
    uncommitted,
    until,
)
from tests.spark.support import publish
from tests.support.nats import NatsServer

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3_600)]

KILLS = 30
PER_DRIVER = 4
WAIT_S = 240.0
NEVER = 10**12
MOMENT_MAX_S = 1.0
AGAIN = 7
"""Every seventh message comes again under its identity."""


class Strikes:
    """Kills in the middle of batches, and the count of those that really were."""

    def __init__(self, server: NatsServer, lake: Path, seed: int) -> None:
        self.server = server
        self.lake = lake
        self.rng = random.Random(seed)
        self.published = 0
        self.done: list[str] = []
        self.inside = 0

    def more(self) -> None:
        first = self.published
        publish(
            self.server, [event(number - number % AGAIN // (AGAIN - 1)) for number in range(first, first + 2 * ROWS)]
        )
        self.published += 2 * ROWS

    def identities(self) -> set[str]:
        return {f"key:order-{number - number % AGAIN // (AGAIN - 1)}" for number in range(self.published)}

    def strike(self, job: LakeJob, what: str) -> None:
        self.more()
        moments = [lambda: bool(open_batches(self.lake)), lambda: bool(uncommitted(self.lake))]
        until(self.rng.choice([*moments, lambda: is_deriving(self.lake)]), WAIT_S)
        threading.Event().wait(self.rng.uniform(0.0, MOMENT_MAX_S) if len(self.done) % 2 else 0.0)
        self.inside += bool(open_batches(self.lake)) or is_deriving(self.lake)
        if what == "server":
            self.server.kill()
            self.server.start()
        elif what == "workers":
            job.kill_workers()
        else:
            job.kill()
        self.done.append(what)


def test_thirty_kills_lose_and_double_nothing(server: NatsServer, tmp_path: Path) -> None:
    streams(server, EVENTS=["evt.>"])
    strikes = Strikes(server, tmp_path / "lake", 7)
    strikes.more()
    while len(strikes.done) < KILLS:
        with running(server, strikes.lake, NEVER, "EVENTS") as job:
            assert job.said("started")
            for what in [*strikes.rng.choices(["workers", "server"], k=PER_DRIVER - 1), "driver"]:
                strikes.strike(job, what)
    assert strikes.inside >= KILLS // 2, "too few strikes landed inside a batch"
    with running(server, strikes.lake, strikes.published, "EVENTS") as job:
        job.finish()
    assert_each_once(strikes.lake, "EVENTS", strikes.published, strikes.identities())
    assert {"driver", "workers", "server"} == set(strikes.done)
