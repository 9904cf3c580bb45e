"""One Spark session for all tests of the process: it takes seconds to start, and a JVM holds only one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncewire.pipeline import spark_session
from oncewire.pipeline.source import HAS_ADMISSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


QUICK_START = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=192m -XX:+UseSerialGC -XX:-UsePerfData"
"""Most of what these tests wait for is Java that starts: compile little, collect simply. The plans of many audits need
room: where it is full, Java compiles nothing any more."""
LEAK = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spark 4.0 itself leaves the sockets of `collect` to the garbage collector."""
    if not HAS_ADMISSION:
        for item in items:
            item.add_marker(pytest.mark.filterwarnings(LEAK))
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="session", autouse=True)
def quick_java() -> Iterator[None]:
    """For every Java that a test starts: sessions, drivers, executors, daemons of a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", QUICK_START)
        yield


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Spark writes everything that its UI shows."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="session")
def spark(event_log: Path) -> Iterator[SparkSession]:
    session = spark_session(
        "local[2]",
        spark_ui_enabled=False,
        spark_sql_shuffle_partitions=2,
        spark_log_level="ERROR",
        **{
            "spark.eventLog.enabled": True,
            "spark.eventLog.dir": event_log.as_uri(),
            "spark.eventLog.rolling.enabled": False,
            "spark.eventLog.compress": False,
        },
    )
    yield session
    session.stop()
