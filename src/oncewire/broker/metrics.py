"""GET /metrics: the original's names, and under `oncewire_broker_` what an operator needs besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oncewire.broker.engine import LogStats, Stats, TopicStats
from oncewire.metrics import Registry

if TYPE_CHECKING:
    from oncewire.http import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = {
    "produced": "Messages stored.",
    "produced_bytes": "Bytes of their keys and values.",
    "deduplicated": "Produces that were there already under their idempotency key.",
    "delivered": "Deliveries, redeliveries included.",
    "redelivered": "Deliveries after the first of a message in a group.",
    "acked": "Messages acknowledged.",
    "nacked": "Messages given back.",
    "lease_timeouts": "Deliveries whose lease lapsed.",
    "expired": "Messages whose deadline passed before their delivery.",
    "trimmed": "Messages removed after they were settled.",
    "router_failures": "Router calls that failed, timed out or named a topic or partition that is not there.",
    "commits_failed": "Commits that the disk refused.",
}


def text(stats: Stats, rejected: Mapping[str, int], server: Server | None) -> str:
    """The whole page, as things stand now."""
    registry = Registry()
    refused = registry.counter("produce_rejected_total", "Produces refused for want of room.")
    for reason, count in rejected.items():
        refused.set(count, reason=reason)
    dead = registry.counter("dlq_messages_total", "Messages moved to a dead-letter topic.")
    dead.set(stats.counters.get("dead_lettered", 0))
    _add_topics(registry, stats.topics)
    for name, about in COUNTERS.items():
        registry.counter(f"oncewire_broker_{name}_total", about).set(stats.counters.get(name, 0))
    registry.gauge("oncewire_broker_idempotency_entries", "Keys remembered.").set(stats.idempotency_entries)
    if stats.log is not None:
        _add_log(registry, stats.log)
    if server is not None:
        _add_server(registry, server)
    return registry.text()


def _add_topics(registry: Registry, topics: Sequence[TopicStats]) -> None:
    """What topics hold, and where each group stands, by partition as the original shows it."""
    in_flight = registry.gauge("inflight_messages", "Delivered and not settled, retries that wait included.")
    lag = registry.gauge("consumer_lag", "Messages that a group has not settled.")
    consumers = registry.gauge("oncewire_broker_consumers", "Streams and polls of a group that are open.")
    messages = registry.gauge("oncewire_broker_topic_messages", "Messages held.")
    size = registry.gauge("oncewire_broker_topic_bytes", "Bytes of their keys and values.")
    for topic in topics:
        labels = {"topic": topic.name} | ({"tenant": topic.tenant} if topic.tenant else {})
        messages.set(topic.messages, **labels)
        size.set(topic.bytes, **labels)
        for group, readers, partitions in topic.groups:
            consumers.set(readers, group=group, **labels)
            for one in partitions:
                in_flight.set(one.in_flight, group=group, partition=str(one.partition), **labels)
                lag.set(one.lag, group=group, partition=str(one.partition), **labels)


def _add_log(registry: Registry, log: LogStats) -> None:
    prefix = "oncewire_broker_log"
    registry.gauge(f"{prefix}_segments", "Files of the log.").set(log.segments)
    registry.gauge(f"{prefix}_bytes", "Bytes of the log on disk.").set(log.bytes)
    registry.counter(f"{prefix}_commits_total", "Groups made durable.").set(log.commits)
    registry.counter(f"{prefix}_records_total", "Records made durable.").set(log.records)
    registry.counter(f"{prefix}_commit_seconds_total", "Time spent on commits.").set(log.commit_us_total / 1e6)
    registry.counter(f"{prefix}_failures_total", "Writes and syncs that failed.").set(log.failures)
    registry.counter(f"{prefix}_snapshots_total", "Snapshots written.").set(log.snapshots)
    registry.gauge(f"{prefix}_replay_seconds", "Time that the last start took to replay.").set(log.replay_ms / 1e3)
    registry.gauge(f"{prefix}_cut_bytes", "Bytes of a torn tail that the last start cut off.").set(log.cut_bytes)


def _add_server(registry: Registry, server: Server) -> None:
    registry.gauge("oncewire_http_connections", "Connections open.").set(len(server.connections))
    registry.counter("oncewire_http_accepted_total", "Connections accepted.").set(server.accepted)
    answers = registry.counter("oncewire_http_responses_total", "Responses by status.")
    for status, count in server.answers.items():
        answers.set(count, status=str(status))
