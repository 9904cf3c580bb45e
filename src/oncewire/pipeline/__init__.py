"""Spark reads and writes JetStream: the data source "jetstream", a session that has everything it needs, and the lake.

`bronze` and `silver` are the steps of the lake as DataFrame functions, `read_table` reads one of its tables.
"""

from typing import TYPE_CHECKING

from oncewire.lazy import exports

if TYPE_CHECKING:
    from oncewire.pipeline.deriving import silver
    from oncewire.pipeline.landing import bronze
    from oncewire.pipeline.rules import backlog
    from oncewire.pipeline.session import spark_session
    from oncewire.pipeline.source import JetStreamSource
    from oncewire.pipeline.tables import read_table

__all__ = ["JetStreamSource", "backlog", "bronze", "read_table", "silver", "spark_session"]

__getattr__ = exports(
    __name__,
    {
        "JetStreamSource": "oncewire.pipeline.source",
        "backlog": "oncewire.pipeline.rules",
        "bronze": "oncewire.pipeline.landing",
        "read_table": "oncewire.pipeline.tables",
        "silver": "oncewire.pipeline.deriving",
        "spark_session": "oncewire.pipeline.session",
    },
)
