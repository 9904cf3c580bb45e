"""A driver that dies in a round over the broker's topics, then another one: bronze has each position of each once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncewire.pipeline.lake.keep import Keeping
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Reads
from oncewire.pipeline.run import Pipeline
from tests.spark.lakes import once
from tests.support.lake_points import ROUND_IN_DRIVER, ROUND_IN_WORKERS
from tests.support.lakekills import NEVER, TopicStrikes, running
from tests.support.nats import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def strikes(server: NatsServer, tmp_path: Path) -> TopicStrikes:
    return TopicStrikes(server, tmp_path / "lake")


class Died(BaseException):
    """What no part of the pipeline catches."""


class DyingLake(Lake):
    """Dies around the commits of one table."""

    table, is_after = "bronze", False

    def commit_all(self, handle: Any, table: Any, *args: Any, **named: Any) -> None:
        if table.name == self.table and not self.is_after:
            raise Died
        super().commit_all(handle, table, *args, **named)
        if table.name == self.table:
            raise Died


@pytest.mark.parametrize(("table", "is_after"), [("topics", False), ("bronze", False), ("bronze", True)])
def test_a_round_that_was_not_finished_is_finished_by_the_next_driver(
    table: str, is_after: bool, spark: SparkSession, strikes: TopicStrikes
) -> None:
    """In this process, with all that a driver remembers gone; `make faults` kills drivers."""
    strikes.more()
    strikes.lake.mkdir()
    lake = DyingLake(strikes.lake)
    lake.table, lake.is_after = table, is_after
    pipeline = Pipeline(spark, lake, [], Reads({"url": strikes.server.url}), keeping=Keeping())
    with pytest.raises(Died):
        pipeline.once(threading.Event())
    strikes.more()
    assert [] == once(spark, strikes.lake, strikes.server).errors
    strikes.assert_each_once()


@pytest.mark.faults
@pytest.mark.timeout(3_600)
def test_kills_at_every_point_of_a_round_lose_and_double_nothing(spark: SparkSession, strikes: TopicStrikes) -> None:
    """One driver after the other, each killed at another point; before that its workers or its server are struck."""
    for number, point in enumerate([*ROUND_IN_WORKERS, *ROUND_IN_DRIVER]):
        with running(strikes.server, strikes.lake, NEVER, streams=()) as job:
            if number % 3 == 2:
                strikes.strike_server(job, "round:begun")
            else:
                strikes.strike_workers(job, ROUND_IN_WORKERS[number % 3])
            strikes.strike_driver(job, point)
    assert 12 == len(strikes.done)
    assert [] == once(spark, strikes.lake, strikes.server).errors
    strikes.assert_each_once()
