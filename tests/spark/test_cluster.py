"""One setting runs the same job on a cluster: a standalone master and two workers read, and write back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.cluster import cluster
from tests.spark.kills import assert_each_once, copying
from tests.spark.support import fill, make_stream
from tests.support.nats import NatsServer

COUNT = 40_000


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_stream_is_copied_by_the_executors_of_a_cluster(server: NatsServer, tmp_path: Path) -> None:
    source, sink = make_stream(server, "IN"), make_stream(server, "OUT")
    fill(server, source, COUNT)
    with cluster(tmp_path) as running:
        with copying(server, source, sink, tmp_path / "checkpoint", COUNT, running.master) as job:
            job.finish()
        assert len(running.executor_folders()) >= 2, "both workers ran an executor"
    assert_each_once(server, sink, COUNT)
