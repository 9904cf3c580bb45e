"""GET /metrics: the original's names, and under `oncewire_broker_` what an operator needs besides. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from oncewire.broker.engine import LogStats, Stats

if TYPE_CHECKING:
    from oncewire.http import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, str], float]

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
    """The whole page."""
    lines: list[str] = []
    _add(lines, "produce_rejected_total", "counter", "Produces refused for want of room.",
         [({"reason": reason}, count) for reason, count in sorted(rejected.items())])  # fmt: skip
    _add(lines, "dlq_messages_total", "counter", "Messages moved to a dead-letter topic.",
         [({}, stats.counters.get("dead_lettered", 0))])  # fmt: skip
    groups = [(topic, group) for topic in stats.topics for group in topic.groups]
    _add(lines, "inflight_messages", "gauge", "Delivered and not settled, retries that wait included.",
         [(_of(topic.tenant, topic=topic.name, group=group[0]), group[2]) for topic, group in groups])  # fmt: skip
    _add(lines, "consumer_lag", "gauge", "Messages that a group has not settled.",
         [(_of(topic.tenant, topic=topic.name, group=group[0]), group[1]) for topic, group in groups])  # fmt: skip
    _add(lines, "oncewire_broker_consumers", "gauge", "Streams and polls of a group that are open.",
         [(_of(topic.tenant, topic=topic.name, group=group[0]), group[3]) for topic, group in groups])  # fmt: skip
    for name, about in COUNTERS.items():
        _add(lines, f"oncewire_broker_{name}_total", "counter", about, [({}, stats.counters.get(name, 0))])
    _add(lines, "oncewire_broker_topic_messages", "gauge", "Messages held.",
         [(_of(topic.tenant, topic=topic.name), topic.messages) for topic in stats.topics])  # fmt: skip
    _add(lines, "oncewire_broker_topic_bytes", "gauge", "Bytes of their keys and values.",
         [(_of(topic.tenant, topic=topic.name), topic.bytes) for topic in stats.topics])  # fmt: skip
    _add(lines, "oncewire_broker_idempotency_entries", "gauge", "Keys remembered.", [({}, stats.idempotency_entries)])
    if stats.log is not None:
        _add_log(lines, stats.log)
    if server is not None:
        _add_server(lines, server)
    return "\n".join(lines) + "\n"


def _add_log(lines: list[str], log: LogStats) -> None:
    prefix = "oncewire_broker_log"
    _add(lines, f"{prefix}_segments", "gauge", "Files of the log.", [({}, log.segments)])
    _add(lines, f"{prefix}_bytes", "gauge", "Bytes of the log on disk.", [({}, log.bytes)])
    _add(lines, f"{prefix}_commits_total", "counter", "Groups made durable.", [({}, log.commits)])
    _add(lines, f"{prefix}_records_total", "counter", "Records made durable.", [({}, log.records)])
    _add(
        lines, f"{prefix}_commit_seconds_total", "counter", "Time spent on commits.", [({}, log.commit_us_total / 1e6)]
    )
    _add(lines, f"{prefix}_failures_total", "counter", "Writes and syncs that failed.", [({}, log.failures)])
    _add(lines, f"{prefix}_snapshots_total", "counter", "Snapshots written.", [({}, log.snapshots)])
    _add(
        lines,
        f"{prefix}_replay_seconds",
        "gauge",
        "Time that the last start took to replay.",
        [({}, log.replay_ms / 1e3)],
    )
    _add(
        lines,
        f"{prefix}_cut_bytes",
        "gauge",
        "Bytes of a torn tail that the last start cut off.",
        [({}, log.cut_bytes)],
    )


def _add_server(lines: list[str], server: Server) -> None:
    _add(lines, "oncewire_http_connections", "gauge", "Connections open.", [({}, len(server.connections))])
    _add(lines, "oncewire_http_accepted_total", "counter", "Connections accepted.", [({}, server.accepted)])
    _add(lines, "oncewire_http_responses_total", "counter", "Responses by status.",
         [({"status": str(status)}, count) for status, count in sorted(server.answers.items())])  # fmt: skip


def _of(tenant: str, **labels: str) -> dict[str, str]:
    return labels | ({"tenant": tenant} if tenant else {})


def _add(lines: list[str], name: str, kind: str, about: str, samples: Iterable[Sample]) -> None:
    lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escaped(given)}"' for label, given in labels.items())
        lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
