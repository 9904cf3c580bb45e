"""Audits of lakes whose tables were changed, cut short or put back by somebody else than the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from oncewire.pipeline.auditing.run import audit
from tests.support.lakes import EVENTS, FakeAgent, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def worked(path: Path) -> Lake:
    """A lake with an agent that has settled ten inputs and stored ten effects."""
    lake = Lake(path)
    agent = FakeAgent(lake, "biller")
    agent.settle(agent.orders(10), effects=1)
    agent.close()
    lake.write()
    return lake


def test_a_whole_stream_that_was_deleted_from_bronze_is_missed(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing of it is left but how far it was read, and the pipeline goes on with another stream."""
    lake = worked(tmp_path)
    DeltaTable(str(tmp_path / "bronze")).delete(f"stream = '{EVENTS}'")
    lake.go_on("BILLING")
    verdict = audit(spark, tmp_path)
    assert not verdict.is_good
    assert (EVENTS, 20) in {(stop.stream, stop.sequence) for stop in verdict.cut}
    missing = [one for one in verdict.findings if (one.check, one.problem) == ("sequences", "missing")]
    assert [(EVENTS, 1, 20)] == [(one.stream, one.first, one.last) for one in missing]
