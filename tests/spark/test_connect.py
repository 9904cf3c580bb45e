"""The same source through a Connect session, when this environment has what `pyspark[connect]` needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.support import fill, make_stream
from tests.support.nats import NatsServer

ROOT = Path(__file__).parents[2]
CONNECT = """
import sys
from oncewire.pipeline.session import prepare
import os
prepare(os.environ, is_local=True)
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print(type(spark).__module__)
print("rows", spark.read.format("jetstream").options(url=sys.argv[1], stream=sys.argv[2]).load().count())
spark.stop()
"""
NEEDED = ("grpc", "grpc_status", "google.protobuf")


def has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not all(map(has, NEEDED)), reason="needs pyspark[connect]")
@pytest.mark.timeout(300)
def test_a_connect_session_finds_and_reads_the_source(server: NatsServer) -> None:
    stream = make_stream(server)
    fill(server, stream, 2_000)
    command = [sys.executable, "-c", CONNECT, server.url, stream]
    # run: with relative entries in PYTHONPATH the Connect server did not find the source
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert "rows 2000" in done.stdout, done.stderr[-3_000:]
    assert "connect" in done.stdout
