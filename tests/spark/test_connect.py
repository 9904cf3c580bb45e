"""The same source, sink and audit through a Connect session: found without a register call, in batches and streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.kills import assert_each_once
from tests.spark.support import fill, make_stream
from tests.support.lakes import FakeAgent, Lake
from tests.support.nats import NatsServer

ROOT = Path(__file__).parents[2]
CONNECT = """
import os, sys
from oncewire.pipeline.session import prepare
prepare(os.environ, is_local=True)
from pyspark.sql import SparkSession
url, source, sink, checkpoint = sys.argv[1:]
spark = SparkSession.builder.remote("local[1]").getOrCreate()
print(type(spark).__module__)
print("rows", spark.read.format("jetstream").options(url=url, stream=source).load().count())
frame = spark.readStream.format("jetstream").options(url=url, stream=source, startingOffsets="earliest").load()
writer = frame.selectExpr(f"'{sink}.x' as subject", "payload").writeStream.format("jetstream")
query = writer.options(url=url, checkpointLocation=checkpoint).trigger(availableNow=True).start()
query.awaitTermination()
spark.stop()
"""
AUDIT = """
import os, sys
from oncewire.pipeline.session import prepare
prepare(os.environ, is_local=True)
from pyspark.sql import SparkSession
from oncewire.pipeline import audit
spark = SparkSession.builder.remote("local[1]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "1")
verdict = audit(spark, sys.argv[1])
print(type(spark).__module__, verdict.is_good, verdict.counted("effects", "once"), verdict.counted("silver", "rows"))
spark.stop()
"""
COUNT = 2_000


@pytest.mark.timeout(300)
def test_a_connect_session_reads_and_writes(server: NatsServer, tmp_path: Path) -> None:
    source, sink = make_stream(server), make_stream(server)
    fill(server, source, COUNT)
    command = [sys.executable, "-c", CONNECT, server.url, source, sink, str(tmp_path / "checkpoint")]
    # run: with relative entries in PYTHONPATH the Connect server did not find the source
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert f"rows {COUNT}" in done.stdout, done.stderr[-3_000:]
    assert "connect" in done.stdout
    assert 0 == done.returncode, done.stderr[-3_000:]
    assert_each_once(server, sink, COUNT)


@pytest.mark.timeout(300)
def test_a_connect_session_audits_a_lake(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(3), effects=1)
    agent.close()
    command = [sys.executable, "-c", AUDIT, str(lake.write())]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert "connect.session True 3 8" in done.stdout, done.stderr[-3_000:]
    assert 0 == done.returncode, done.stderr[-3_000:]
