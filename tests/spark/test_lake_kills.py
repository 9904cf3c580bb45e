"""kill -9 of the driver, its workers and the nats-server in the middle of batches: each message once in the lake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.lakes import (
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

WAIT_S = 240.0
COUNT = 24_000
UNIQUE = 20_000


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_each_message_is_once_in_the_lake_after_kills_of_driver_workers_and_server(
    server: NatsServer, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    streams(server, EVENTS=["evt.>"])
    publish(server, [event(number % UNIQUE) for number in range(COUNT)])
    with running(server, lake, COUNT, "EVENTS") as job:
        assert job.said("started")
        until(lambda: bool(open_batches(lake)), WAIT_S)
        server.kill()
        server.start()
        until(lambda: bool(uncommitted(lake)) and bool(open_batches(lake)), WAIT_S)
        job.kill()
    assert open_batches(lake), "the strike was to land inside a batch"
    with running(server, lake, COUNT, "EVENTS") as job:
        assert job.said("landed")
        until(lambda: bool(open_batches(lake)), WAIT_S)
        assert job.kill_workers()
        until(lambda: is_deriving(lake), WAIT_S)
        job.kill()
    assert is_deriving(lake), "the strike was to land inside a batch of silver"
    with running(server, lake, COUNT, "EVENTS") as job:
        job.finish()
    assert_each_once(lake, "EVENTS", COUNT, {f"key:order-{number}" for number in range(UNIQUE)})
