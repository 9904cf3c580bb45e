"""At least thirty kills of driver, workers and nats-server while Spark copies a stream: none lost, none doubled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.spark.kills import CopyJob, assert_each_once, copying
from tests.spark.support import fill, make_stream, state
from tests.support.nats import NatsServer

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3_600)]

KILLS = 33
STEP = 4_000


def strike(rng: random.Random, job: CopyJob, server: NatsServer, what: str) -> None:
    """Somewhere between the start of a batch and the start of the next."""
    job.said(rng.choice(["started", "batch", "batch"]))
    if what == "driver":
        job.kill()
    elif what == "workers":
        job.kill_workers()
    else:
        server.kill()
        server.start()


@pytest.mark.parametrize("seed", [1])
def test_many_kills_lose_and_double_nothing(server: NatsServer, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    source, sink = make_stream(server, "IN"), make_stream(server, "OUT")
    filled = 0
    strikes = 0
    while strikes < KILLS:
        fill(server, source, STEP, first=filled + 1)
        filled += STEP
        with copying(server, source, sink, tmp_path / "checkpoint", filled + STEP) as job:
            for what in rng.sample(["workers", "server", "driver"], 2):
                strike(rng, job, server, what)
                strikes += 1
                if job.process.poll() is not None:
                    break
            job.close()
            strikes += 1
    with copying(server, source, sink, tmp_path / "checkpoint", filled) as job:
        job.finish()
    assert filled == state(server, sink)["messages"]
    assert_each_once(server, sink, filled)
