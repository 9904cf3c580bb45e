"""The example that the docs tell people to paste does what it says, and nothing twice when it is run again."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import oncewire
from tests.spark.support import api, stored
from tests.support.nats import NatsServer
from tests.support.streams import forget_ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_enrich.py"


async def window_passes(server: NatsServer) -> None:
    async with oncewire.connect(server.url) as client:
        await forget_ids(client, "MESHFORGE_EVENTS", "evt.default.demo.probe")


def test_orders_are_rated_once_however_often_it_runs(
    spark: SparkSession,  # the example's own call finds it: a process has one session
    server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = {"name": "MESHFORGE_EVENTS", "subjects": ["evt.>"], "allow_direct": True}
    api(server, "STREAM.CREATE.MESHFORGE_EVENTS", stream)
    monkeypatch.setenv("NATS_URL", server.url)
    monkeypatch.setenv("ONCEWIRE_DATA", str(tmp_path))
    for _ in range(2):
        runpy.run_path(str(EXAMPLE))
        asyncio.run(window_passes(server))
    assert ["read 10 orders", "read 0 orders"] == re.findall(r"read \d+ orders", capsys.readouterr().out)
    rated = [message for message in stored(server, "MESHFORGE_EVENTS") if ".rated." in message.subject]
    found = sorted((json.loads(one.data)["payload"]["order"], one.subject.rpartition(".")[2]) for one in rated)
    tiers = {0: "gold", 1: "silver"}
    assert [(order, tiers[order % 3]) for order in range(10) if order % 3 in tiers] == found
