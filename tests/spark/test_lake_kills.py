"""kill -9 of nats-server and driver in the middle of batches: each message once in the lake. The long form is in
tests/faults/test_lake_kills.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.lakes import once
from tests.support.lakekills import NEVER, STREAM, Strikes, running
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(600)
def test_each_message_is_once_in_the_lake_after_kills_of_server_and_driver(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    strikes = Strikes(server, tmp_path / "lake")
    with running(server, strikes.lake, NEVER) as job:
        strikes.strike_server(job, "land:begun")
        strikes.strike_driver(job, "land:committed")
    ran = once(spark, strikes.lake, server, STREAM)
    assert [] == ran.errors
    strikes.assert_each_once()
