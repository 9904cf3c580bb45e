"""Every metric there is. Pure.

Names are `oncewire_<part>_<thing>_<unit>`, counters end in `_total`; units are seconds and bytes. Four names of the
broker are not of this form: they are those of the `/v1` contract. Labels are few: parts, streams, consumers, agents and
outcomes are declared by whoever runs the system; topics, groups and causes are named by others and therefore bounded
(page.py). Ids, keys, conversations and people are no labels.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    name: str
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()


def _counter(name: str, about: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, about, labels)


def _gauge(name: str, about: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, about, labels)


def _histogram(name: str, about: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, about, labels)


PROCESS: Final = (
    _gauge("oncewire_process_info", "Always 1; its label is the version.", "version"),
    _gauge("oncewire_process_start_time_seconds", "When the process began, Unix time."),
    _counter("oncewire_process_cpu_seconds_total", "CPU time of the process."),
    _gauge("oncewire_process_resident_bytes", "Memory of the process."),
)

READINESS: Final = (
    _gauge("oncewire_readiness_ready", "1 while /readyz answers 200."),
    _gauge("oncewire_readiness_check", "Each line of /readyz: 0 ok, 1 warning, 2 broken.", "check"),
    _gauge(
        "oncewire_readiness_durability",
        "What an acknowledgement is worth: 2 it survives a power cut, 1 the end of the server's process, 0 not known.",
    ),
    _gauge("oncewire_stream_losses", "Losses of the stream that nobody has acknowledged.", "stream"),
)

STREAMS: Final = (
    _gauge("oncewire_stream_messages", "Messages in a declared stream.", "stream"),
    _gauge("oncewire_stream_bytes", "Bytes of a declared stream.", "stream"),
    _gauge("oncewire_stream_full_ratio", "Share of its max_bytes that a stream holds.", "stream"),
)

JETSTREAM: Final = (
    _gauge("oncewire_jetstream_connected", "1 while the client is connected to a NATS server.", "client"),
    _counter("oncewire_jetstream_reconnects_total", "Connections after the first.", "client"),
    _counter("oncewire_jetstream_published_total", "Messages that a stream confirmed.", "client"),
    _counter("oncewire_jetstream_publish_failures_total", "Messages refused, or not confirmed in time.", "client"),
    _gauge("oncewire_jetstream_unconfirmed", "Messages that are written and wait for their confirmation.", "client"),
    _histogram(
        "oncewire_jetstream_publish_seconds",
        "From writing to the last confirmation of what went out together, counted for each message.",
        "client",
    ),
)

HTTP: Final = (
    _gauge("oncewire_http_connections", "Connections open.", "server"),
    _counter("oncewire_http_accepted_total", "Connections accepted.", "server"),
    _counter("oncewire_http_responses_total", "Responses by status.", "server", "status"),
    _gauge(
        "oncewire_http_certificate_expiry_timestamp_seconds",
        "When the listener's certificate ends, Unix time.",
        "server",
    ),
)

AGENT: Final = (
    _gauge("oncewire_agent_ready", "1 while the agent can work.", "agent"),
    _counter(
        "oncewire_agent_inputs_total",
        "Inputs by outcome: done, duplicate, dead, terminated, passed; retried and redelivered ones come again.",
        "agent",
        "outcome",
    ),
    _counter("oncewire_agent_effects_total", "Effects confirmed by their streams.", "agent"),
    _counter("oncewire_agent_commits_total", "Group commits of the ledger.", "agent"),
    _gauge("oncewire_agent_in_flight", "Inputs in hand.", "agent"),
    _gauge("oncewire_agent_open_blocks", "Blocks of the ledger whose effects are not all confirmed.", "agent"),
    _gauge("oncewire_agent_lag", "Messages that wait in the stream for the agent.", "agent", "stream"),
    _histogram(
        "oncewire_agent_stored_seconds",
        "From an event's own time to its place in the stream; of what comes together, the first and the last count.",
        "agent",
    ),
    _histogram(
        "oncewire_agent_delivery_seconds",
        "From the stream into the agent's hands; of what comes together, the first and the last count for all.",
        "agent",
    ),
    _histogram("oncewire_agent_handling_seconds", "From a batch in hand to its commit, for each input.", "agent"),
    _histogram("oncewire_agent_publish_seconds", "From a commit until its effects are confirmed, per commit.", "agent"),
)

RELAY: Final = (
    _gauge("oncewire_relay_ready", "1 while the relay can work."),
    _counter("oncewire_relay_published_total", "Rows that their stream confirmed.", "outbox"),
    _gauge("oncewire_relay_pending", "Rows that wait to be published.", "outbox"),
    _gauge("oncewire_relay_failed", "Rows that were refused and wait for another attempt.", "outbox"),
    _gauge("oncewire_relay_oldest_seconds", "Age of the oldest row that waits.", "outbox"),
    _histogram("oncewire_relay_stored_seconds", "From a row's commit to its place in the stream.", "outbox"),
)

DLQ: Final = (
    _gauge("oncewire_dlq_ready", "1 while the dead-letter service can work."),
    _counter("oncewire_dlq_letters_total", "Letters written.", "stream", "consumer", "cause"),
    _counter("oncewire_dlq_events_total", "Failures seen, by kind and what followed.", "kind", "act"),
    _gauge("oncewire_dlq_letters", "Letters in DLQ."),
    _gauge("oncewire_dlq_full_ratio", "Share of DLQ's max_bytes in use."),
    _gauge("oncewire_dlq_unattended", "Messages that wait while nobody pulls.", "stream", "consumer"),
    _gauge("oncewire_dlq_exhausted", "Given-up messages that nobody reported.", "stream", "consumer"),
    _gauge("oncewire_dlq_consumer_lag", "Messages that a durable has not been given yet.", "stream", "consumer"),
    _gauge("oncewire_dlq_consumer_in_flight", "Deliveries that are not settled.", "stream", "consumer"),
    _counter("oncewire_dlq_alerts_total", "Alerts raised.", "kind"),
    _counter("oncewire_dlq_alert_hook_failures_total", "Calls of the alert hook that failed."),
)

GATEWAY: Final = (
    _gauge("oncewire_gateway_ready", "1 while the stream is followed."),
    _gauge("oncewire_gateway_sockets", "WebSocket connections."),
    _gauge("oncewire_gateway_sources", "SSE connections."),
    _gauge("oncewire_gateway_rooms", "Rooms that are kept in memory."),
    _gauge("oncewire_gateway_channels", "Conversations whose tokens are listened to."),
    _gauge("oncewire_gateway_stream_sequence", "Stream sequence up to which all is handed out."),
    _counter("oncewire_gateway_handed_out_total", "Messages of the stream, whether somebody here listens or not."),
    _counter("oncewire_gateway_writes_total", "Writes to clients: each carries what came together."),
    _counter("oncewire_gateway_pages_total", "Pages read from the stream for clients that were behind."),
    _counter("oncewire_gateway_refused_bodies_total", "Stored bodies that are no envelope of their conversation."),
    _counter("oncewire_gateway_refused_frames_total", "Frames of clients that were refused."),
    _counter("oncewire_gateway_slow_clients_total", "Clients cut off because they did not read."),
    _counter("oncewire_gateway_revoked_clients_total", "Clients cut off because their credential was no longer good."),
    _counter("oncewire_gateway_acks_written_total", "Acks written."),
    _gauge("oncewire_gateway_held_dropped", "Unnumbered envelopes that waited in vain."),
    _histogram(
        "oncewire_gateway_delivery_seconds",
        "From the stream to the clients' sockets; the last message of each read stands for all of it.",
    ),
)

BROKER: Final = (
    _gauge("oncewire_broker_ready", "1 while the broker can work."),
    _counter("produce_rejected_total", "Produces refused for want of room.", "reason"),
    _counter("dlq_messages_total", "Messages moved to a dead-letter topic."),
    _gauge(
        "inflight_messages",
        "Delivered and not settled, retries that wait included.",
        "tenant",
        "topic",
        "group",
        "partition",
    ),
    _gauge("consumer_lag", "Messages that a group has not settled.", "tenant", "topic", "group", "partition"),
    _gauge("oncewire_broker_consumers", "Streams and polls of a group that are open.", "tenant", "topic", "group"),
    _gauge("oncewire_broker_topic_messages", "Messages held.", "tenant", "topic"),
    _gauge("oncewire_broker_topic_bytes", "Bytes of their keys and values.", "tenant", "topic"),
    _counter("oncewire_broker_produced_total", "Messages stored."),
    _counter("oncewire_broker_produced_bytes_total", "Bytes of their keys and values."),
    _counter("oncewire_broker_deduplicated_total", "Produces that were there already under their idempotency key."),
    _counter("oncewire_broker_delivered_total", "Deliveries, redeliveries included."),
    _counter("oncewire_broker_redelivered_total", "Deliveries after the first of a message in a group."),
    _counter("oncewire_broker_acked_total", "Messages acknowledged."),
    _counter("oncewire_broker_nacked_total", "Messages given back."),
    _counter("oncewire_broker_lease_timeouts_total", "Deliveries whose lease lapsed."),
    _counter("oncewire_broker_expired_total", "Messages whose deadline passed before their delivery."),
    _counter("oncewire_broker_trimmed_total", "Messages removed after they were settled."),
    _counter(
        "oncewire_broker_router_failures_total",
        "Router calls that failed, timed out or named a topic or partition that is not there.",
    ),
    _counter("oncewire_broker_commits_failed_total", "Commits that the disk refused."),
    _gauge("oncewire_broker_idempotency_entries", "Keys remembered."),
    _histogram("oncewire_broker_produce_seconds", "From a produce request to its durable answer."),
    _gauge("oncewire_broker_log_segments", "Files of the log."),
    _gauge("oncewire_broker_log_bytes", "Bytes of the log on disk."),
    _counter("oncewire_broker_log_commits_total", "Groups made durable."),
    _counter("oncewire_broker_log_records_total", "Records made durable."),
    _counter("oncewire_broker_log_commit_seconds_total", "Time spent on commits."),
    _counter("oncewire_broker_log_failures_total", "Writes and syncs that failed."),
    _counter("oncewire_broker_log_snapshots_total", "Snapshots written."),
    _gauge("oncewire_broker_log_replay_seconds", "Time that the last start took to replay."),
    _gauge("oncewire_broker_log_cut_bytes", "Bytes of a torn tail that the last start cut off."),
    _gauge("oncewire_broker_nodes", "Nodes that share the topics, as this one sees it."),
    _gauge("oncewire_broker_partitions_owned", "Partitions that this node owns."),
    _counter("oncewire_broker_sessions_total", "Leases that this node began; more than one means that it lost some."),
)

PIPELINE: Final = (
    _gauge("oncewire_pipeline_ready", "1 while the pipeline runs and no stream and no topic has stopped."),
    _gauge("oncewire_pipeline_stream_sequence", "Sequence up to which the lake has a stream.", "stream"),
    _gauge("oncewire_pipeline_lag", "Sequences of a stream that the lake does not have yet.", "stream"),
    _gauge("oncewire_pipeline_stopped", "1 when a stream has stopped and somebody must look.", "stream"),
    _gauge("oncewire_pipeline_topics_behind", "Topics that hold more than the lake has of them."),
    _gauge("oncewire_pipeline_topics_stopped", "Topics that have stopped and somebody must look at."),
    _gauge("oncewire_pipeline_silver_behind", "Versions of bronze that silver does not have yet."),
    _gauge("oncewire_pipeline_rows", "Rows of a table.", "table"),
    _gauge("oncewire_pipeline_bytes", "Bytes of a table's files.", "table"),
    _gauge("oncewire_pipeline_audit_good", "1 when the last audit signed, 0 when it found something."),
    _gauge("oncewire_pipeline_audit_timestamp_seconds", "When the last audit was made, Unix time."),
)

PARTS: Final[dict[str, tuple[Metric, ...]]] = {
    "process": PROCESS,
    "readiness": READINESS,
    "streams": STREAMS,
    "jetstream": JETSTREAM,
    "http": HTTP,
    "agent": AGENT,
    "relay": RELAY,
    "dlq": DLQ,
    "gateway": GATEWAY,
    "broker": BROKER,
    "pipeline": PIPELINE,
}

TABLE: Final[dict[str, Metric]] = {metric.name: metric for part in PARTS.values() for metric in part}
