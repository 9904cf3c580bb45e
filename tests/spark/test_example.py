"""The example that the docs tell people to paste does what it says, and nothing twice when it is run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.support import api, stored
from tests.support.nats import NatsServer

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_orders_are_rated_once_however_often_it_runs(server: NatsServer, tmp_path: Path) -> None:
    stream = {"name": "MESHFORGE_EVENTS", "subjects": ["evt.>"], "allow_direct": True}
    api(server, "STREAM.CREATE.MESHFORGE_EVENTS", stream)
    environ = {**os.environ, "NATS_URL": server.url, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / "spark_enrich.py")]
    for _ in range(2):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert 0 == done.returncode, done.stderr[-3_000:]
    rated = [message for message in stored(server, "MESHFORGE_EVENTS") if ".tier-" in message.subject]
    found = sorted((json.loads(one.data)["payload"]["order"], one.subject.rpartition("-")[2]) for one in rated)
    tiers = {0: "gold", 1: "silver"}
    assert [(order, tiers[order % 3]) for order in range(10) if order % 3 in tiers] == found
