"""Spark reads and writes JetStream: the data source "jetstream", a session that has everything it needs, and the lake.

`bronze` and `silver` are the steps of the lake as DataFrame functions, so are gold's tables (`health`, `consumers`,
`dead_letters`, `lineage`, `usage`, `throughput`, `outcomes`) and the audits; `audit` runs them all at one cut.
`read_table` reads a table.
"""

from typing import TYPE_CHECKING

from oncewire._ground.lazy import exports

if TYPE_CHECKING:
    from oncewire.pipeline.auditing.effects import audit_effects, audit_letters
    from oncewire.pipeline.auditing.frames import (
        audit_chains,
        audit_positions,
        audit_quarantine,
        audit_silver,
        audit_sums,
        blocks,
    )
    from oncewire.pipeline.auditing.run import audit
    from oncewire.pipeline.auditing.settlements import audit_settlements
    from oncewire.pipeline.deriving import silver
    from oncewire.pipeline.gold.frames import consumers, dead_letters, health, lineage, usage
    from oncewire.pipeline.gold.topics import outcomes, throughput
    from oncewire.pipeline.landing import bronze
    from oncewire.pipeline.rules import backlog
    from oncewire.pipeline.session import spark_session
    from oncewire.pipeline.source import JetStreamSource
    from oncewire.pipeline.tables import read_table

__all__ = [
    "JetStreamSource",
    "audit",
    "audit_chains",
    "audit_effects",
    "audit_letters",
    "audit_positions",
    "audit_quarantine",
    "audit_settlements",
    "audit_silver",
    "audit_sums",
    "backlog",
    "blocks",
    "bronze",
    "consumers",
    "dead_letters",
    "health",
    "lineage",
    "outcomes",
    "read_table",
    "silver",
    "spark_session",
    "throughput",
    "usage",
]

__getattr__ = exports(
    __name__,
    {
        "audit": "oncewire.pipeline.auditing.run",
        "audit_chains": "oncewire.pipeline.auditing.frames",
        "audit_effects": "oncewire.pipeline.auditing.effects",
        "audit_letters": "oncewire.pipeline.auditing.effects",
        "audit_positions": "oncewire.pipeline.auditing.frames",
        "audit_quarantine": "oncewire.pipeline.auditing.frames",
        "audit_settlements": "oncewire.pipeline.auditing.settlements",
        "audit_silver": "oncewire.pipeline.auditing.frames",
        "audit_sums": "oncewire.pipeline.auditing.frames",
        "backlog": "oncewire.pipeline.rules",
        "blocks": "oncewire.pipeline.auditing.frames",
        "bronze": "oncewire.pipeline.landing",
        "consumers": "oncewire.pipeline.gold.frames",
        "dead_letters": "oncewire.pipeline.gold.frames",
        "health": "oncewire.pipeline.gold.frames",
        "JetStreamSource": "oncewire.pipeline.source",
        "lineage": "oncewire.pipeline.gold.frames",
        "outcomes": "oncewire.pipeline.gold.topics",
        "read_table": "oncewire.pipeline.tables",
        "silver": "oncewire.pipeline.deriving",
        "spark_session": "oncewire.pipeline.session",
        "throughput": "oncewire.pipeline.gold.topics",
        "usage": "oncewire.pipeline.gold.frames",
    },
)
