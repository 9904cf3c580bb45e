"""The table of settings: what each row is called, what it may be, what it is for. A new setting is a field here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from oncewire._ground.checks import (
    PORT,
    POSITIVE,
    Check,
    are_origins,
    between,
    is_address,
    is_address_or_off,
    is_http_url,
    is_name_prefix,
    is_nats_url,
    is_postgres_url,
    is_subject_prefix,
    is_traces,
    one_of,
)
from oncewire._ground.errors import InvalidSetting
from oncewire._ground.logs import LEVELS


@dataclass(frozen=True)
class Setting:
    """A row of the table. `key` is `section.name` in the file, `name` the field of `Settings`."""

    name: str
    key: str
    variables: tuple[str, ...]
    default: Any
    type: type
    help: str
    is_secret: bool
    check: Check | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def setting(
    default: Any, key: str, variables: str, about: str, *, secret: bool = False, check: Check | None = None
) -> Any:
    """Declare a row. `variables` may name several, the first that is set counts."""
    row = {"key": key, "variables": tuple(variables.split()), "help": about, "secret": secret, "check": check}
    return dataclasses.field(default=default, metadata=row)


def number(default: int, key: str, about: str, low: int, high: int) -> Any:
    """Declare a whole number within bounds; its variable is made of its key."""
    return setting(default, key, f"ONCEWIRE_{key.replace('.', '_').upper()}", about, check=between(low, high))


def text(default: str, key: str, about: str, *, secret: bool = False, check: Check | None = None) -> Any:
    """Declare a text; its variable is made of its key."""
    variable = f"ONCEWIRE_{key.replace('.', '_').upper()}"
    return setting(default, key, variable, about, secret=secret, check=check)


@dataclass(frozen=True)
class Settings:
    """The table. Units are in the names; '' means not set."""

    data: Path = setting(Path(".oncewire"), "data", "ONCEWIRE_DATA", "Folder that holds all durable data.")  # noqa: RUF009

    env: str = setting(
        "dev", "env", "ONCEWIRE_ENV", "dev keeps one copy of each stream, prod three.", check=one_of("dev", "prod")
    )
    topology_files: str = setting(
        "", "topology.files", "ONCEWIRE_TOPOLOGY", "TOML files that add to the shipped catalogs, joined by commas."
    )

    nats_url: str = setting(
        "nats://localhost:4222", "nats.url", "NATS_URL", "NATS servers, joined by commas.", check=is_nats_url
    )
    nats_user: str = setting("", "nats.user", "NATS_USER", "User name for NATS.")
    nats_password: str = setting("", "nats.password", "NATS_PASSWORD", "Password for NATS.", secret=True)
    nats_token: str = setting("", "nats.token", "NATS_TOKEN", "Token for NATS.", secret=True)
    nats_creds: str = setting("", "nats.creds", "NATS_CREDS", "File with a user JWT and its nkey seed.")
    nats_nkey: str = setting("", "nats.nkey", "NATS_NKEY", "File with an nkey seed.")
    nats_inbox_prefix: str = setting(
        "_INBOX",
        "nats.inbox_prefix",
        "NATS_INBOX_PREFIX",
        "Subject prefix of all answers to this process; a user made by `topology export` has one of its own.",
        check=is_subject_prefix,
    )
    nats_ca: str = setting("", "nats.ca", "NATS_CA", "File with the certificate authority of the NATS servers.")
    nats_cert: str = setting("", "nats.cert", "NATS_CERT", "File with the client certificate for NATS.")
    nats_key: str = setting("", "nats.key", "NATS_KEY", "File with the key of the client certificate.")
    nats_system_key: str = setting(
        "",
        "nats.system_key",
        "NATS_SYSTEM_KEY",
        "Key file (nkey seed, or JWT and seed) of a user of the system account, which is asked what is really synced.",
    )
    nats_monitor_url: str = setting(
        "",
        "nats.monitor_url",
        "NATS_MONITOR_URL",
        "Monitoring addresses of the NATS servers, joined by commas; asked where there is no system key.",
        check=is_http_url,
    )

    stream_prefix: str = setting(
        "sr", "streams.prefix", "NATS_STREAM_PREFIX", "Prefix of the sr-* stream names.", check=is_name_prefix
    )
    consumer_prefix: str = setting(
        "sr-consumer",
        "streams.consumer_prefix",
        "NATS_CONSUMER_PREFIX",
        "Prefix of consumer names on the sr-* streams.",
        check=is_name_prefix,
    )
    message_ttl_s: int = setting(
        604_800,
        "streams.message_ttl_s",
        "NATS_MESSAGE_TTL_SECS",
        "How long the sr-* streams keep a message.",
        check=POSITIVE,
    )
    max_msgs_per_subject: int = setting(
        -1,
        "streams.max_msgs_per_subject",
        "NATS_MAX_MSGS_PER_SUBJECT",
        "Messages kept per subject on the sr-* streams; -1 is unlimited.",
        check=between(-1, 2**53),
    )
    duplicate_window_s: int = setting(
        120,
        "streams.duplicate_window_s",
        "NATS_DUPLICATE_WINDOW_SECS",
        "How long the sr-* streams refuse a repeated id.",
        check=POSITIVE,
    )

    chat_events_prefix: str = setting(
        "chat.events",
        "chat.events_prefix",
        "NATS_STREAM_SUBJECT_PREFIX NATS_EVENTS_PREFIX",
        "Subject prefix of conversation events.",
        check=is_subject_prefix,
    )
    chat_tokens_prefix: str = setting(
        "chat.tokens",
        "chat.tokens_prefix",
        "NATS_TOKENS_PREFIX",
        "Subject prefix of token chunks.",
        check=is_subject_prefix,
    )

    postgres_url: str = setting(
        "",
        "postgres.url",
        "ONCEWIRE_POSTGRES_URL",
        "PostgreSQL to use instead of the embedded one.",
        secret=True,
        check=is_postgres_url,
    )

    embedded_nats_port: int = setting(
        4222, "embedded.nats_port", "ONCEWIRE_NATS_PORT", "Port of the embedded nats-server; 0 picks one.", check=PORT
    )
    embedded_monitor_port: int = setting(
        0,
        "embedded.monitor_port",
        "ONCEWIRE_MONITOR_PORT",
        "Monitoring port of the embedded nats-server, open to every local program and web page; 0 is none.",
        check=PORT,
    )
    embedded_nats_access: str = setting(
        "auto",
        "embedded.nats_access",
        "ONCEWIRE_NATS_ACCESS",
        "Whether programs need a key for the embedded nats-server: keys, open (no), auto (with credentials, auth.*).",
        check=one_of("auto", "open", "keys"),
    )
    embedded_postgres_port: int = setting(
        5433,
        "embedded.postgres_port",
        "ONCEWIRE_POSTGRES_PORT",
        "Port of the embedded PostgreSQL; 0 picks one.",
        check=PORT,
    )

    lake: str = setting(
        "",
        "pipeline.lake",
        "ONCEWIRE_LAKE",
        "Where the lake is: a folder, or s3://bucket/prefix; else `lake` in the data folder.",
    )
    checkpoints: str = setting(
        "",
        "pipeline.checkpoints",
        "ONCEWIRE_CHECKPOINTS",
        "Folder for checkpoints and lock of lakes in object stores; else `lakes` in the data folder.",
    )
    master: str = setting("local[*]", "pipeline.master", "ONCEWIRE_SPARK_MASTER", "Where Spark runs.")
    pipeline_trigger_ms: int = number(5_000, "pipeline.trigger_ms", "How often each stream is read.", 100, 3_600_000)
    pipeline_keep_every_s: int = number(600, "pipeline.keep_every_s", "How often files are put together.", 1, 2**31)
    pipeline_gold_every_s: int = number(
        60, "pipeline.gold_every_s", "How often gold is computed anew while the pipeline runs.", 1, 2**31
    )
    pipeline_audit_record: str = text(
        "",
        "pipeline.audit_record",
        "File or s3:// object outside the lake that keeps what audits saw of it; else in `audits` of the data folder.",
    )
    pipeline_retention_hours: int = number(168, "pipeline.retention_hours", "Replaced files go after this.", 1, 2**20)

    ledger_keep_s: int = setting(
        0,
        "ledger.keep_s",
        "ONCEWIRE_LEDGER_KEEP_SECS",
        "How long an agent's ledger remembers what is complete; 0 is for ever.",
        check=between(0, 2**53),
    )

    agent_store: str = setting("", "agent.store", "ONCEWIRE_STORE", "An agent's ledger without --store.", secret=True)

    outbox_poll_interval_ms: int = setting(
        250,
        "outbox.poll_interval_ms",
        "OUTBOX_POLL_INTERVAL_MS",
        "How often an idle relay looks for new rows.",
        check=between(1, 60_000),
    )
    outbox_batch_size: int = setting(
        25, "outbox.batch_size", "OUTBOX_BATCH_SIZE", "Rows taken of one conversation at once.", check=between(1, 1_000)
    )

    outbox_keep_s: int = setting(
        3_600,
        "outbox.keep_s",
        "OUTBOX_KEEP_SECS",
        "How long dispatched outbox rows are kept before they are purged.",
        check=between(0, 2**31),
    )

    http_head_bytes_max: int = number(
        16_384, "http.head_bytes_max", "Bytes of a request line with its headers.", 256, 2**20
    )
    http_headers_max: int = number(64, "http.headers_max", "Headers of a request.", 4, 1_000)
    http_body_bytes_max: int = number(8 << 20, "http.body_bytes_max", "Bytes of a request body.", 1_024, 2**30)
    http_connections_max: int = number(4_096, "http.connections_max", "Connections open at once.", 1, 1_000_000)
    http_connections_per_address_max: int = number(
        1_000, "http.connections_per_address_max", "Connections of one other machine.", 1, 1_000_000
    )
    http_connections_per_tenant_max: int = number(
        0,
        "http.connections_per_tenant_max",
        "Connections of one tenant, at each listener; 0 is no limit.",
        0,
        1_000_000,
    )
    http_held_body_bytes_max: int = number(
        256 << 20, "http.held_body_bytes_max", "Bytes of all bodies that are being read.", 1_024, 2**40
    )
    http_requests_per_s_max: int = number(
        0, "http.requests_per_s_max", "Requests of one tenant per second, at each process; 0 is no limit.", 0, 10**9
    )
    http_tls_cert: str = setting(
        "", "http.tls_cert", "ONCEWIRE_HTTP_TLS_CERT", "PEM file with the listeners' certificate and its chain."
    )
    http_tls_key: str = setting("", "http.tls_key", "ONCEWIRE_HTTP_TLS_KEY", "PEM file with the certificate's key.")
    http_origins: str = text(
        "",
        "http.origins",
        "Other origins whose web pages may use broker and gateway, such as https://shop.example, joined by commas.",
        check=are_origins,
    )
    http_pipelined_max: int = number(
        32, "http.pipelined_max", "Requests that may wait behind the current one.", 1, 10_000
    )
    http_head_ms_max: int = number(10_000, "http.head_ms_max", "Time for a request head to arrive.", 10, 3_600_000)
    http_body_ms_max: int = number(60_000, "http.body_ms_max", "Time for a request body to arrive.", 10, 3_600_000)
    http_idle_ms_max: int = number(
        75_000, "http.idle_ms_max", "Time between two requests of a connection.", 10, 86_400_000
    )
    http_write_buffer_bytes_max: int = number(
        1 << 20, "http.write_buffer_bytes_max", "Bytes kept for a client that does not read.", 4_096, 2**30
    )
    http_stalled_ms_max: int = number(
        20_000, "http.stalled_ms_max", "Time after which a client that reads nothing is cut off.", 10, 3_600_000
    )
    http_stop_ms_max: int = number(
        10_000, "http.stop_ms_max", "Time that requests in hand get at a stop.", 0, 3_600_000
    )

    auth_keys: str = setting(
        "", "auth.keys", "ONCEWIRE_AUTH_KEYS", "File with the API keys that servers accept; `oncewire keys` writes it."
    )
    auth_issuer: str = setting("", "auth.issuer", "ONCEWIRE_AUTH_ISSUER", "Who must have issued a token (iss).")
    auth_audience: str = setting("", "auth.audience", "ONCEWIRE_AUTH_AUDIENCE", "Who a token must be for (aud).")
    auth_jwks: str = setting(
        "", "auth.jwks", "ONCEWIRE_AUTH_JWKS", "Public keys of the tokens: a JWKS, as a file or an https address."
    )
    auth_algorithms: str = setting(
        "RS256,ES256,EdDSA", "auth.algorithms", "ONCEWIRE_AUTH_ALGORITHMS", "Signatures that tokens may have."
    )
    auth_tenant_claim: str = setting(
        "tenant", "auth.tenant_claim", "ONCEWIRE_AUTH_TENANT_CLAIM", "The claim of a token that names the tenant."
    )
    auth_ticket_secret: str = text(
        "",
        "auth.ticket_secret",
        "What all nodes sign browsers' tickets with; without it a ticket is good at one node.",
        secret=True,
    )

    broker_engine: str = text(
        "local", "broker.engine", "What keeps the broker's messages.", check=one_of("local", "jetstream")
    )
    broker_listen: str = text("127.0.0.1:8080", "broker.listen", "Address of the broker, host:port.", check=is_address)
    broker_wal: str = text("", "broker.wal", "Folder of the broker's log; without it, memory.")
    broker_owner_lease_ms: int = number(
        3_000, "broker.owner_lease_ms", "How long a node that is gone keeps its partitions from others.", 100, 600_000
    )
    broker_router: str = setting("", "broker.router", "ONCEWIRE_BROKER_ROUTER", "The broker's router, module:callable.")
    broker_router_ms_max: int = number(500, "broker.router_ms_max", "Time that a router has for an answer.", 1, 60_000)
    broker_topics_max: int = number(10_000, "broker.topics_max", "Topics of a tenant.", 1, 10**6)
    broker_partitions_max: int = number(1_024, "broker.partitions_max", "Partitions of a topic.", 1, 10**5)
    broker_groups_max: int = number(100, "broker.groups_max", "Groups of a topic.", 1, 10**5)
    broker_subscriptions_max: int = number(1_000, "broker.subscriptions_max", "Streams and polls of a group.", 1, 10**6)
    broker_in_flight_max: int = number(
        256, "broker.in_flight_max", "Leased deliveries of a group and partition.", 1, 10**6
    )
    broker_reader_in_flight: int = number(
        2, "broker.reader_in_flight", "Unsettled deliveries of a stream that asks for no in_flight.", 1, 10**6
    )
    broker_reader_in_flight_max: int = number(
        1_000, "broker.reader_in_flight_max", "Largest in_flight that a stream may ask for.", 1, 10**6
    )
    broker_partition_messages_max: int = number(
        100_000, "broker.partition_messages_max", "Unsettled messages of a partition.", 1, 10**9
    )
    broker_partition_bytes_max: int = number(
        64 << 20, "broker.partition_bytes_max", "Bytes of the unsettled keys and values of a partition.", 1, 2**40
    )
    broker_key_bytes_max: int = number(4_096, "broker.key_bytes_max", "Bytes of a key.", 1, 2**20)
    broker_value_bytes_max: int = number(1 << 20, "broker.value_bytes_max", "Bytes of a value.", 1, 2**26)
    broker_batch_lines_max: int = number(1_000, "broker.batch_lines_max", "Lines of a batch.", 1, 10**5)
    broker_take_max: int = number(1_000, "broker.take_max", "Messages of one long poll.", 1, 10**5)
    broker_wait_ms_max: int = number(60_000, "broker.wait_ms_max", "Time that a long poll may wait.", 0, 3_600_000)
    broker_lease_ms: int = number(2_000, "broker.lease_ms", "Lease of a delivery that asks for none.", 1, 10**9)
    broker_lease_ms_max: int = number(43_200_000, "broker.lease_ms_max", "Longest lease.", 1, 10**9)
    broker_tick_ms: int = number(250, "broker.tick_ms", "How often leases and retries are looked at.", 1, 60_000)
    broker_retry_max_attempts: int = number(
        0, "broker.retry_max_attempts", "Attempts of a message without a retry policy; 0: no limit.", 0, 10**9
    )
    broker_retry_backoff_ms: int = number(
        250, "broker.retry_backoff_ms", "First wait of a message without a retry policy; it doubles.", 0, 10**9
    )
    broker_retry_max_backoff_ms: int = number(
        60_000, "broker.retry_max_backoff_ms", "Longest wait of a message without a retry policy.", 1, 10**9
    )
    broker_retry_after_ms: int = number(
        1_000, "broker.retry_after_ms", "What a refused producer is told to wait.", 1, 10**7
    )
    broker_idempotency_ttl_ms: int = number(
        600_000, "broker.idempotency_ttl_ms", "How long a producer's key is remembered.", 1, 10**12
    )
    broker_settled_age_ms: int = number(
        60_000, "broker.settled_age_ms", "How long settled messages are kept for new groups.", 0, 10**12
    )
    broker_group_idle_ms: int = number(
        604_800_000, "broker.group_idle_ms", "Idle time after which a group holds nothing back.", 1, 10**12
    )
    broker_group_trial_ms: int = number(
        60_000, "broker.group_trial_ms", "Idle time after which a group that never settled is forgotten.", 1, 10**12
    )
    broker_dead_letter_age_ms: int = number(
        2_592_000_000, "broker.dead_letter_age_ms", "How long dead letters are kept.", 1, 10**12
    )
    broker_commit_bytes_max: int = number(
        64 << 20, "broker.commit_bytes_max", "Bytes that may wait for the next commit.", 1, 2**34
    )
    broker_idempotency_entries_max: int = number(
        5_000_000, "broker.idempotency_entries_max", "Idempotency keys remembered.", 1, 10**9
    )

    build_commit: str = setting(
        "unknown", "build.commit", "ONCEWIRE_COMMIT", "Commit that /v1/version names, set by who builds an image."
    )

    dlq_sweep_s: int = setting(
        30,
        "dlq.sweep_s",
        "ONCEWIRE_DLQ_SWEEP_SECS",
        "How often the dead-letter service looks for what nobody reported.",
        check=between(1, 86_400),
    )
    dlq_stalled_s: int = setting(
        300,
        "dlq.stalled_s",
        "ONCEWIRE_DLQ_STALLED_SECS",
        "How long messages may wait on a consumer from which nobody pulls before that is an alert.",
        check=between(1, 2**31),
    )
    alert_command: str = setting(
        "", "alerts.command", "ONCEWIRE_ALERT_COMMAND", "Command that gets each alert as JSON on its standard input."
    )
    alert_url: str = setting(
        "", "alerts.url", "ONCEWIRE_ALERT_URL", "Address that gets each alert as JSON by POST.", check=is_http_url
    )
    metrics_file: str = setting(
        "", "metrics.file", "ONCEWIRE_METRICS_FILE", "File for metrics in Prometheus' text format, for a collector."
    )
    metrics_listen: str = setting(
        "off",
        "metrics.listen",
        "ONCEWIRE_METRICS_LISTEN",
        "Address of /metrics, /healthz and /readyz, host:port or off; `up` has 127.0.0.1:9464.",
        check=is_address_or_off,
    )
    traces: str = setting(
        "off", "telemetry.traces", "ONCEWIRE_TRACES", "Where traces go: off, otlp, console, file:PATH.", check=is_traces
    )
    log_format: str = setting(
        "text", "log.format", "ONCEWIRE_LOG_FORMAT", "How log lines look.", check=one_of("text", "json")
    )
    log_level: str = setting(
        "warning", "log.level", "ONCEWIRE_LOG_LEVEL", "What is worth a line.", check=one_of(*LEVELS)
    )

    gateway_port: int = setting(3005, "gateway.port", "GATEWAY_PORT", "Port of the realtime gateway.", check=PORT)
    gateway_backlog_size: int = setting(
        200,
        "gateway.backlog_size",
        "GATEWAY_BACKLOG_SIZE",
        "Messages per room that the gateway keeps in memory.",
        check=between(0, 100_000),
    )
    gateway_frame_bytes_max: int = number(65_536, "gateway.frame_bytes_max", "Bytes of a client's message.", 256, 2**24)
    gateway_fragments_max: int = number(64, "gateway.fragments_max", "Fragments of a client's message.", 1, 10**5)
    gateway_rooms_per_client_max: int = number(100, "gateway.rooms_per_client_max", "Rooms of a client.", 1, 10**5)
    gateway_clients_per_room_max: int = number(20_000, "gateway.clients_per_room_max", "Clients of a room.", 1, 10**6)
    gateway_frames_per_s_max: int = number(
        500, "gateway.frames_per_s_max", "WebSocket frames of a client per second, fragments included.", 1, 10**6
    )
    gateway_buffer_bytes_max: int = number(1 << 20, "gateway.buffer_bytes_max", "Bytes kept for it.", 4_096, 2**30)
    gateway_slow_ms_max: int = number(5_000, "gateway.slow_ms_max", "How long that may stay full.", 100, 3_600_000)
    gateway_ping_ms: int = number(25_000, "gateway.ping_ms", "Silence after which a client is asked.", 100, 3_600_000)

    console_listen: str = text("127.0.0.1:8088", "console.listen", "Address of the web console.", check=is_address)
    console_broker_url: str = text("", "console.broker_url", "Broker that the console shows.", check=is_http_url)
    console_broker_key: str = text("", "console.broker_key", "API key for that broker, which may read.", secret=True)
    console_broker_ca: str = text("", "console.broker_ca", "PEM file of who signs that broker's certificate.")
    console_tenant: str = text("", "console.tenant", "Whose keys open the console, which shows all tenants' things.")

    def __post_init__(self) -> None:
        if self.message_ttl_s < self.duplicate_window_s:
            raise InvalidSetting(
                f"streams.message_ttl_s ({self.message_ttl_s}) is shorter than streams.duplicate_window_s "
                f"({self.duplicate_window_s})",
                hint="A stream cannot remember ids longer than it keeps messages: raise the TTL or shorten the window.",
            )
        if self.chat_events_prefix == self.chat_tokens_prefix:
            raise InvalidSetting(
                f"chat.events_prefix and chat.tokens_prefix are both {self.chat_events_prefix!r}",
                hint="Events and tokens need different subjects.",
            )
        ways = [name for name in ("token", "creds", "nkey") if getattr(self, f"nats_{name}")]
        ways += ["user"] if self.nats_user or self.nats_password else []
        if len(ways) > 1:
            raise InvalidSetting(
                f"several ways to authenticate to NATS are set: {', '.join('nats.' + way for way in ways)}",
                hint="Keep one of user and password, token, creds, nkey.",
            )
        if bool(self.nats_cert) != bool(self.nats_key):
            raise InvalidSetting(
                "nats.cert and nats.key belong together, one of them is missing",
                hint="Set both for a client certificate, or neither.",
            )


@cache
def table() -> tuple[Setting, ...]:
    """All rows, in the order in which `oncewire config` shows them."""
    types = get_type_hints(Settings)
    return tuple(
        Setting(
            field.name,
            field.metadata["key"],
            field.metadata["variables"],
            field.default,
            types[field.name],
            field.metadata["help"],
            field.metadata["secret"],
            field.metadata["check"],
        )
        for field in dataclasses.fields(Settings)
    )
