"""The example that sends one message through every part: one trace from the request to the tables."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import oncewire
from oncewire._ground.topology import ensure
from tests.spark.lakes import once, rows
from tests.support import gateway
from tests.support.nats import NatsServer
from tests.support.scenarios import jetstream_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_message.py"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_one_trace_goes_from_the_request_to_the_tables(
    spark: SparkSession, server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    example = asyncio.run(sent(server, monkeypatch))
    once(spark, lake, server, "MESHFORGE_EVENTS", "CHAT_EVENTS")
    assert {"silver/broker": 1, "silver/runtime": 2, "silver/realtime": 1} == example["rows_of"](lake, TRACE)
    told = sorted((one["subject"], one["trace_id"]) for one in rows(lake, "silver/runtime", "subject", "trace_id"))
    assert [(example["PLACED"], TRACE), (example["WELCOMED"], TRACE)] == told
    [produced] = rows(lake, "silver/broker", "run_id")
    assert {produced["run_id"]} == {one["correlation_id"] for one in rows(lake, "silver/runtime", "correlation_id")}


async def sent(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    async with oncewire.connect(server.url) as client:
        await ensure(client)
        async with jetstream_broker({}, server.url) as port, gateway.node(client) as (_, address):
            monkeypatch.setenv("NATS_URL", server.url)
            monkeypatch.setenv("BROKER_URL", f"http://127.0.0.1:{port}")
            monkeypatch.setenv("GATEWAY_URL", address)
            example = runpy.run_path(str(EXAMPLE))
            await asyncio.wait_for(example["send"](TRACE), 60)
    return example
