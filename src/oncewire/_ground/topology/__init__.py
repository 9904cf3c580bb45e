"""Streams and consumers as declared data: lint, plan, apply, and what services call at their start.

`load` reads the shipped catalogs and the user's files; `init_streams` and `ensure_consumers` make what is missing;
`apply` also changes; `readiness` and `compare` only look. What may be done is decided by the pure modules (files, lint,
rules), done by server.py.
"""

from oncewire._ground.topology.declared import examine, load
from oncewire._ground.topology.findings import Finding, Severity
from oncewire._ground.topology.model import Consumer, Env, Service, Stream, Topology
from oncewire._ground.topology.names import durable_name, sr_durable_name
from oncewire._ground.topology.rules import Change, Plan, Step
from oncewire._ground.topology.service import (
    Problem,
    Survey,
    Trouble,
    apply,
    compare,
    ensure,
    ensure_consumers,
    init_streams,
    is_ready,
    readiness,
    survey,
)

__all__ = [
    "Change",
    "Consumer",
    "Env",
    "Finding",
    "Plan",
    "Problem",
    "Service",
    "Severity",
    "Step",
    "Stream",
    "Survey",
    "Topology",
    "Trouble",
    "apply",
    "compare",
    "durable_name",
    "ensure",
    "ensure_consumers",
    "examine",
    "init_streams",
    "is_ready",
    "load",
    "readiness",
    "sr_durable_name",
    "survey",
]
