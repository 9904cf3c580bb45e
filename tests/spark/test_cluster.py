"""One setting runs the same job on a cluster: a standalone master and two workers read, and write back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.spark.cluster import cluster
from tests.spark.kills import assert_each_once, copying
from tests.spark.lakes import chat, event, rows, streams
from tests.spark.support import fill, make_stream, publish
from tests.support.nats import NatsServer
from tests.support.up import ONCEWIRE, clean_environ

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


def command(*words: str, cwd: Path) -> None:
    line = [*ONCEWIRE, "pipeline", *words]
    done = subprocess.run(line, cwd=cwd, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_the_lake_of_a_cluster_is_the_lake_of_one_machine(server: NatsServer, tmp_path: Path) -> None:
    streams(server, MESHFORGE_EVENTS=["evt.>"], CHAT_EVENTS=["chat.>"])
    publish(server, [event(number % 900) for number in range(1_000)] + [chat(number) for number in range(1, 50)])
    publish(server, [event(1, unknown=1) for _ in range(3)])

    def lake(name: str, master: str) -> dict[str, Any]:
        place = ("--lake", str(tmp_path / name), "--master", master)
        chosen = ("--stream", "MESHFORGE_EVENTS", "--stream", "CHAT_EVENTS")
        command("run", "--once", "--nats-url", server.url, *place, *chosen, cwd=tmp_path)
        command("audit", *place, cwd=tmp_path)
        return {
            name_: sorted((one["stream"], one["sequence"], one["payload"]) for one in rows(tmp_path / name, name_))
            for name_ in ("bronze", "silver/runtime", "silver/realtime", "quarantine")
        }

    with cluster(tmp_path) as running:
        found = lake("cluster", running.master)
        assert len(running.executor_folders()) >= 2, "both workers ran an executor"
    assert lake("alone", "local[2]") == found
    assert 1_052 == len(found["bronze"])
