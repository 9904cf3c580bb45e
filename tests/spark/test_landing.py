"""One batch on its way into bronze, however often it comes and whoever comes between."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncewire._ground.errors import Corrupt, Unavailable
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.pipeline.lake import rules
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.lake.rules import Second, Step
from oncewire.pipeline.landing import SOURCE_SCHEMA, Landed, Landing, LandRange
from oncewire.pipeline.missing import Unread
from oncewire.pipeline.rules import Offset
from oncewire.pipeline.tables import BRONZE
from tests.spark.lakes import rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CREATED = "2026-11-01T00:00:00Z"
WHEN = datetime(2026, 11, 16, tzinfo=UTC)


class Bronze:
    """A lake, and a checkpoint with batches of ten."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.lake = Lake(folder / "lake")
        self.checkpoint = folder / "checkpoint"
        for batch in range(3):
            entry = self.checkpoint / "offsets" / str(batch)
            entry.parent.mkdir(parents=True, exist_ok=True)
            end = Offset(10 * (batch + 1) + 1, CREATED)
            entry.write_text(f"v1\n{{}}\n{json.dumps(end.to_dict())}")

    def frame(self, first: int, last: int) -> DataFrame:
        made = [
            ("EVENTS", parse_time_ns(CREATED), 0, sequence, "evt.a.b.c", WHEN, 0, [], b"%d" % sequence)
            for sequence in range(first, last + 1)
        ]
        work = LandRange(self.lake.root(BRONZE), is_partitioned=False)
        return self.spark.createDataFrame(made, SOURCE_SCHEMA).coalesce(1).mapInArrow(work.land, "answer binary")

    def land(self, batch: int, first: int, last: int) -> Landed:
        made = Landing(
            self.lake, "EVENTS", self.checkpoint, 0,
            look_again=self.look_again, is_loss_accepted=False, on_landed=lambda _: None,
        )  # fmt: skip
        return made.land(self.frame(first, last), batch)

    def look_again(self, _: Any, ranges: Any) -> Second:
        """A stream that has what is missing."""
        raise Unread(f"{ranges} is there")

    def sequences(self) -> list[int]:
        return sorted(one["sequence"] for one in rows(self.lake.place, "bronze", "sequence"))


@pytest.fixture
def bronze(spark: SparkSession, tmp_path: Path) -> Bronze:
    return Bronze(spark, tmp_path)


def test_a_batch_that_comes_again_is_there_already(bronze: Bronze) -> None:
    assert [Step.APPEND, Step.SKIP] == [bronze.land(0, 1, 10).step for _ in range(2)]
    assert Step.APPEND is bronze.land(1, 11, 20).step
    assert Step.SKIP is bronze.land(0, 1, 10).step
    assert list(range(1, 21)) == bronze.sequences()


def test_a_batch_that_another_attempt_commits_meanwhile_is_not_committed_again(
    bronze: Bronze, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*told: Any) -> Any:
        monkeypatch.undo()
        assert Step.APPEND is bronze.land(0, 1, 10).step
        return rules.check_runs(*told)

    monkeypatch.setattr(rules, "check_runs", overtaken)  # asked between the first look and the commit
    assert Step.SKIP is bronze.land(0, 1, 10).step
    assert list(range(1, 11)) == bronze.sequences()


@pytest.mark.parametrize(("first", "last"), [(1, 11), (11, 12)])
def test_rows_that_are_not_those_of_the_range_are_not_committed(bronze: Bronze, first: int, last: int) -> None:
    with pytest.raises(Corrupt, match="were written for"):
        bronze.land(0, first, last)
    assert [] == bronze.sequences()


def test_a_range_that_the_stream_has_after_all_is_not_committed(bronze: Bronze) -> None:
    with pytest.raises(Unavailable, match=r"\[\(4, 10\)\] is there"):
        bronze.land(0, 1, 3)
    assert [] == bronze.sequences()
    assert Step.APPEND is bronze.land(0, 1, 10).step, "the batch is read again"


def test_a_checkpoint_that_does_not_belong_to_the_lake_is_refused(bronze: Bronze) -> None:
    bronze.land(0, 1, 10)
    with pytest.raises(Corrupt, match="what lies between is missing"):
        bronze.land(2, 21, 30)
    assert list(range(1, 11)) == bronze.sequences()
