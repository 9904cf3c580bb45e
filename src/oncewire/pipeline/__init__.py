"""Spark reads and writes JetStream: the data source "jetstream", and a session that has everything it needs."""

from typing import TYPE_CHECKING

from oncewire.lazy import exports

if TYPE_CHECKING:
    from oncewire.pipeline.rules import backlog
    from oncewire.pipeline.session import spark_session
    from oncewire.pipeline.source import JetStreamSource

__all__ = ["JetStreamSource", "backlog", "spark_session"]

__getattr__ = exports(
    __name__,
    {
        "JetStreamSource": "oncewire.pipeline.source",
        "backlog": "oncewire.pipeline.rules",
        "spark_session": "oncewire.pipeline.session",
    },
)
