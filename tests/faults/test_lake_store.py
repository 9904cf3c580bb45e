"""A lake in an object store, the long form: kill -9 of driver, workers and the store itself at the points where it
hurts, and every command as a user types it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncewire.pipeline.lake.log import Lake
from tests.spark.cluster import cluster
from tests.spark.lakes import chat, event, rows, streams
from tests.spark.support import publish
from tests.support.lakekills import NEVER, Strikes, running
from tests.support.nats import NatsServer
from tests.support.objects import BUCKET, SECRET, ObjectStore, object_store
from tests.support.up import ONCEWIRE, clean_environ

pytestmark = pytest.mark.faults

DRIVER = (
    "land:begun", "land:half", "land:named", "land:written", "land:listed", "land:committed", "derive:staged",
    "derive:half", "derive:written", "derive:one", "derive:noted", "keep:written", "keep:committed",
)  # fmt: skip
STORE = ("land:written", "derive:written")
COMMAND_S = 240


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with object_store() as made:
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.timeout(3_000)
def test_each_message_is_once_in_a_store_after_kills_of_driver_workers_and_store(
    server: NatsServer, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/struck"
    monkeypatch.setenv("ONCEWIRE_CHECKPOINTS", str(tmp_path))
    strikes = Strikes(server, Lake(url, checkpoints=tmp_path).beside, url)
    for point in DRIVER:
        with running(server, url, NEVER, folder=tmp_path) as job:
            strikes.strike_driver(job, point)
    with running(server, url, NEVER, folder=tmp_path) as job:
        strikes.strike_workers(job, "land:named")
        for point in STORE:
            strikes.strike(job, point, "store", lambda: (store.kill(), store.start()))
        strikes.strike_driver(job, "land:committed")
    with running(server, url, strikes.published, folder=tmp_path) as job:
        job.finish()
    strikes.assert_each_once()


@pytest.mark.timeout(1_200)
def test_every_command_works_on_a_store_and_so_does_a_cluster(
    server: NatsServer, store: ObjectStore, tmp_path: Path
) -> None:
    """The nodes have the credentials in their own environment."""
    url = f"s3://{BUCKET}/typed"
    streams(server, MESHFORGE_EVENTS=["evt.>"], CHAT_EVENTS=["chat.>"])
    publish(server, [*(event(number) for number in range(1, 101)), chat(1)])
    environ = clean_environ(NATS_URL=server.url, ONCEWIRE_LAKE=url, **store.environ)

    def oncewire(*words: str) -> str:
        ended = subprocess.run(
            [*ONCEWIRE, "pipeline", *words], cwd=tmp_path, env=environ, capture_output=True, text=True,
            timeout=COMMAND_S,
        )  # fmt: skip
        assert 0 == ended.returncode, f"{words}: {ended.stdout}{ended.stderr}"
        assert SECRET not in ended.stdout + ended.stderr
        return ended.stdout

    with cluster(tmp_path) as nodes:
        oncewire("run", "--once", "--master", nodes.master)
        assert json.loads(oncewire("audit", "--json", "--master", nodes.master))["is_good"]
    told = json.loads(oncewire("status", "--json"))
    assert (url, 100) == (told["lake"], {one["name"]: one["reached"] for one in told["streams"]}["MESHFORGE_EVENTS"])
    oncewire("report", "--out", "report.html")
    assert url in (tmp_path / "report.html").read_text()
    publish(server, [event(number) for number in range(101, 121)])
    oncewire("backfill", "MESHFORGE_EVENTS", "--master", "local[2]")
    found = sorted(one["sequence"] for one in rows(url, "bronze") if one["stream"] == "MESHFORGE_EVENTS")
    assert list(range(1, 121)) == found
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
