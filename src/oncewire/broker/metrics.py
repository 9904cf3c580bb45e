"""What a broker counts: the `/v1` contract's names, and under `oncewire_broker_` what an operator needs besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from oncewire._ground.http import metrics as http
from oncewire._ground.metrics import Page
from oncewire.broker.engine import LogStats, NodeStats, TopicStats

if TYPE_CHECKING:
    from oncewire.broker.routes import BrokerRoutes

COUNTERS: Final = (
    "produced", "produced_bytes", "deduplicated", "delivered", "redelivered", "acked", "nacked", "lease_timeouts",
    "expired", "trimmed", "router_failures", "commits_failed",
)  # fmt: skip
REASONS: Final = ("partition_buffer_full", "partition_buffer_bytes_full", "overloaded")


def collect(page: Page, routes: BrokerRoutes, tenant: str | None = None) -> None:
    """With a tenant, topics are that tenant's alone."""
    stats = routes.engine.stats()
    page.put("oncewire_broker_ready", 0 if routes.engine.problems() else 1)
    for reason in (*REASONS, *routes.rejected):
        page.put("produce_rejected_total", routes.rejected[reason], reason=reason)
    page.put("dlq_messages_total", stats.counters.get("dead_lettered", 0))
    for name in COUNTERS:
        page.put(f"oncewire_broker_{name}_total", stats.counters.get(name, 0))
    page.put("oncewire_broker_idempotency_entries", stats.idempotency_entries)
    page.histogram("oncewire_broker_produce_seconds", routes.produce_seconds)
    _topics(page, [one for one in stats.topics if tenant in (None, one.tenant)])
    if stats.log is not None:
        _log(page, stats.log)
    if stats.node is not None:
        _node(page, stats.node)
    if routes.server is not None:
        http.collect(page, routes.server, "broker")


def _topics(page: Page, topics: Sequence[TopicStats]) -> None:
    """What topics hold, and where each group stands, by partition as the contract shows it. What is not known yet is
    left out."""
    for topic in topics:
        labels = {"tenant": topic.tenant, "topic": topic.name}
        if topic.messages is not None and topic.bytes is not None:
            page.put("oncewire_broker_topic_messages", topic.messages, **labels)
            page.put("oncewire_broker_topic_bytes", topic.bytes, **labels)
        for group, readers, partitions in topic.groups:
            page.put("oncewire_broker_consumers", readers, group=group, **labels)
            for one in partitions:
                place = {**labels, "group": group, "partition": str(one.partition)}
                page.put("inflight_messages", one.in_flight, **place)
                if one.lag is not None:
                    page.put("consumer_lag", one.lag, **place)


def _log(page: Page, log: LogStats) -> None:
    prefix = "oncewire_broker_log"
    page.put(f"{prefix}_segments", log.segments)
    page.put(f"{prefix}_bytes", log.bytes)
    page.put(f"{prefix}_commits_total", log.commits)
    page.put(f"{prefix}_records_total", log.records)
    page.put(f"{prefix}_commit_seconds_total", log.commit_us_total / 1e6)
    page.put(f"{prefix}_failures_total", log.failures)
    page.put(f"{prefix}_snapshots_total", log.snapshots)
    page.put(f"{prefix}_replay_seconds", log.replay_ms / 1e3)
    page.put(f"{prefix}_cut_bytes", log.cut_bytes)


def _node(page: Page, node: NodeStats) -> None:
    page.put("oncewire_broker_nodes", node.nodes)
    page.put("oncewire_broker_partitions_owned", node.partitions)
    page.put("oncewire_broker_sessions_total", node.sessions)
