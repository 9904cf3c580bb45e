"""`oncewire up --pipeline` and the commands of the lake, as a user types them."""

from __future__ import annotations

import importlib.util
import io
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.settings import Settings
from oncewire.cli import lakeside
from oncewire.cli.board import Board
from oncewire.embedded.folder import Server
from tests.support.up import Up, made, oncewire, until

EVENT = "evt.default.demo.orders.placed"


@pytest.mark.timeout(600)
def test_up_keeps_a_lake_that_one_pipeline_holds(tmp_path: Path) -> None:
    data = tmp_path / "data"
    lake = ("--data", str(data))

    def status() -> dict[str, Any]:
        done = oncewire("pipeline", "status", "--json", *lake, cwd=tmp_path)
        assert 0 == done.returncode, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    with Up(made(data), "--pipeline", ONCEWIRE_SPARK_MASTER="local[2]", ONCEWIRE_PIPELINE_TRIGGER_MS="200") as up:
        assert "streams become tables" in up.wait_for("ready", "pipeline")["text"]
        up.ready()
        for number in range(3):
            body = json.dumps({"type": "OrderPlaced", "payload": {"order": number}})
            assert 0 == oncewire("publish", EVENT, body, *lake, cwd=tmp_path).returncode
        derived = data / "lake" / "batches" / "_delta_log" / f"{1:020d}.json"
        until(derived.exists, "silver has what was published", deadline_s=240)
        until(
            lambda: 'oncewire_pipeline_stream_sequence{stream="MESHFORGE_EVENTS"}' in figures(up), "figures of its own"
        )
        second = oncewire("pipeline", "run", "--once", "--json", *lake, cwd=tmp_path)
        assert 2 == second.returncode
        assert "held by oncewire pipeline run, process" in json.loads(second.stderr)["error"]["message"]
        assert 0 == up.stop()
    found = status()
    assert {} == found["held_by"]
    assert ["MESHFORGE_COMMANDS", "BROKER_SNAPSHOTS"] == found["left_out"]
    assert 1 <= next(one["reached"] for one in found["streams"] if one["name"] == "MESHFORGE_EVENTS") <= 3


def figures(up: Up) -> str:
    """What `up` shows of all its parts, the pipeline's process included."""
    with urllib.request.urlopen(up.running.services["metrics"] + "/metrics") as answer:
        text: str = answer.read().decode()
    return text


async def test_a_machine_without_spark_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyspark" else real(name))
    out = io.StringIO()
    async with lakeside.pipeline(Settings(data=tmp_path), Server("nats://localhost"), Board(False, out)):
        pass
    lines = [line for line in out.getvalue().splitlines() if "not started" in line]
    assert 1 == len(lines)
    assert "Spark is not installed" in lines[0]
