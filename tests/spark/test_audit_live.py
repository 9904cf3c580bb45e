"""Audits of a live system: agents work and are killed, and no audit in between raises a false alarm."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncewire.pipeline.auditing.run import audit, last_verdicts
from oncewire.pipeline.auditing.verdict import Verdict
from tests.spark.lakes import once
from tests.support.agents import World, world
from tests.support.lakes import EVENTS, FakeAgent, Lake
from tests.support.nats import NatsServer
from tests.support.wait import until_async

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BURST = 80


async def storm(spark: SparkSession, server: NatsServer, folder: Path, rounds: int) -> tuple[World, list[Verdict]]:
    """In each round a worker is at work while the streams are read and audited, and is then killed."""
    async with world(server.url, folder) as made:
        names = ("LEDGER", "DLQ_REQUESTS", *(made.stream(part) for part in ("in", "out", "far")))

        def look() -> Verdict:
            ran = once(spark, folder / "lake", server, *names)
            assert [] == ran.errors
            return audit(spark, folder / "lake")

        async def has_begun() -> bool:
            return worker.is_running and bool(await made.info())

        found = []
        for _ in range(rounds):
            await made.send(BURST)
            worker = made.start()
            await until_async(has_begun, "a worker at work")
            busy = asyncio.create_task(made.send(BURST))
            found.append(await asyncio.to_thread(look))
            await busy
            worker.kill()
        await made.finish()
        found.append(await asyncio.to_thread(look))
        return made, found


def check(made: World, found: list[Verdict]) -> None:
    for verdict in found:
        assert [] == [one.sentence for one in verdict.findings]
    last = found[-1]
    agent = f"default/faults/{made.agent}"
    settled = sum(last.counted("outcomes", name, agent) for name in ("done", "duplicate", "terminated", "dead"))
    assert len(made.sent) + made.copies == settled
    assert 0 == last.counted("outcomes", "in_progress") + last.counted("sums", "unproven")
    assert last.counted("effects", "once") > len(made.sent)
    assert last.counted("state", "blocks") == last.chains[0].last


@pytest.mark.faults
@pytest.mark.timeout(3_600)
async def test_many_audits_of_agents_that_are_killed_raise_no_false_alarm(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    made, found = await storm(spark, server, tmp_path, rounds=20)
    check(made, found)


@pytest.mark.timeout(900)
def test_the_command_says_what_is_wrong_keeps_it_and_shows_it(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(4), effects=1)
    agent.close()
    lake.derive()
    lake.drop(EVENTS, 2)
    lake.write()
    named = ("--lake", str(lake.path), "--data", str(tmp_path))
    audited = command("audit", "--json", *named, "--master", "local[1]")
    assert 1 == audited.returncode, audited.stderr
    told = json.loads(audited.stdout)
    assert [] == told["compared_ms"]
    assert {("sequences", "missing", 2), ("outcomes", "not_in_bronze", 2)} <= {
        (one["check"], one["problem"], one.get("first")) for one in told["findings"]
    }
    (file,) = (lake.path / "silver" / "ledger").glob("*.parquet")
    file.unlink()
    (record,) = (tmp_path / "audits").glob("lake-*.json")
    assert 1 == len(last_verdicts(lake.path, 5))
    shutil.rmtree(lake.path / "gold" / "audits")  # what the lake itself remembers goes
    audited = command("audit", "--json", *named, "--master", "local[1]")
    assert 4 == audited.returncode, audited.stderr
    again = json.loads(audited.stdout)
    assert {("files", "missing", "silver/ledger"), ("tables", "missing", "gold/audits")} <= {
        (one["check"], one["problem"], one.get("table")) for one in again["findings"]
    }
    assert [told["at_ms"]] == again["compared_ms"]
    assert 1 == len(last_verdicts(lake.path, 5))
    kept = json.loads(record.read_text())
    assert again["known"]["chains"] == kept["chains"]
    assert "gold/audits" in [log["table"] for log in kept["logs"]]
    out = tmp_path / "report.html"
    assert 0 == command("report", *named, "--out", str(out)).returncode
    assert "findings" in out.read_text()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [str(Path(sys.executable).with_name("oncewire")), "pipeline", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=800)
