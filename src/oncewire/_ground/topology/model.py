"""What is declared: streams, buckets, consumers and services as frozen values, and how each goes over the wire.

A bucket is a stream with the conventions of NATS key-value, so that any NATS client can open it. `wire` lists every key
that we judge, defaults included: what is declared and what is found are compared in that one form (see rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from oncewire._ground.contracts import subjects
from oncewire._ground.contracts.catalog import CATALOG, Entry
from oncewire._ground.errors import NotFound
from oncewire._ground.topology.units import FOREVER, UNLIMITED

DUPLICATE_WINDOW_NS = 120 * 10**9
ACK_WAIT_NS = 30 * 10**9
MAX_DELIVER = 5
MAX_ACK_PENDING = 1_000
MAX_WAITING = 512
BUCKET_PREFIX = "KV_"
"""Consumers of readers that keep no position on the server: theirs, never declared, never drift."""

Wire = dict[str, Any]


class Env(StrEnum):
    """Where this runs: one server, or a cluster that keeps three copies."""

    DEV = "dev"
    PROD = "prod"

    @property
    def replicas(self) -> int:
        return 3 if self is Env.PROD else 1


STREAM_DEFAULTS: Mapping[str, Any] = {
    "description": "",
    "subjects": (),
    "retention": "limits",
    "storage": "file",
    "max_age": FOREVER,
    "max_bytes": UNLIMITED,
    "max_msgs": UNLIMITED,
    "max_msgs_per_subject": UNLIMITED,
    "max_msg_size": UNLIMITED,
    "max_consumers": UNLIMITED,
    "discard": "old",
    "discard_new_per_subject": False,
    "duplicate_window": FOREVER,
    "num_replicas": 1,
    "no_ack": False,
    "allow_direct": False,
    "allow_atomic": False,
    "allow_batched": False,
    "allow_rollup_hdrs": False,
    "deny_delete": False,
    "deny_purge": False,
    "compression": "none",
    "mirror": None,
    "sources": None,
    "republish": None,
    "subject_transform": None,
    "consumer_limits": None,
    "sealed": False,
    "persist_mode": "default",
    "allow_msg_ttl": False,
    "allow_msg_counter": False,
    "allow_msg_schedules": False,
    "subject_delete_marker_ttl": 0,
}
"""Every key of a stream that we judge, with what it means when the server does not show it."""

CONSUMER_DEFAULTS: Mapping[str, Any] = {
    "description": "",
    "filter_subjects": (),
    "ack_policy": "none",
    "deliver_policy": "all",
    "replay_policy": "instant",
    "ack_wait": 0,
    "max_deliver": UNLIMITED,
    "max_ack_pending": UNLIMITED,
    "max_waiting": 0,
    "deliver_subject": "",
    "deliver_group": "",
    "opt_start_seq": 0,
    "opt_start_time": "",
    "backoff": None,
    "inactive_threshold": 0,
    "headers_only": False,
    "mem_storage": False,
    "num_replicas": 0,
    "max_batch": 0,
    "max_expires": 0,
    "max_bytes": 0,
    "rate_limit_bps": 0,
    "sample_freq": "",
    "flow_control": False,
    "idle_heartbeat": 0,
    "priority_groups": None,
    "priority_policy": "none",
    "priority_timeout": 0,
}


class Stream(Struct, frozen=True, kw_only=True):
    """`key` is its name in the files, `name` its name on the server: settings may give it another prefix."""

    key: str
    name: str
    description: str = ""
    subjects: tuple[str, ...] = ()
    retention: str = "limits"
    storage: str = "file"
    max_age_ns: int = FOREVER
    max_bytes: int = UNLIMITED
    max_msgs: int = UNLIMITED
    max_msgs_per_subject: int = UNLIMITED
    max_msg_bytes: int = UNLIMITED
    discard: str = "old"
    duplicate_window_ns: int = DUPLICATE_WINDOW_NS
    replicas: int = 0
    no_ack: bool = False
    allow_direct: bool = True
    allow_atomic: bool = True
    allow_batched: bool = True
    """Fast ingest."""
    allow_rollup: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    compression: str = "none"
    mirror: str = ""
    sources: tuple[str, ...] = ()
    one_reader: bool = False
    """Each message is for one consumer, whatever the retention: filters may not overlap."""
    internal: bool = False
    """Written by Oncewire's own parts alone."""
    follows: str = ""
    """Which settings act on it: `message-settings`, `chat-settings` or none."""
    is_bucket: bool = False

    @property
    def has_one_reader(self) -> bool:
        return self.one_reader or self.retention == "workqueue"

    @property
    def item(self) -> str:
        """How plans and flags name it."""
        return f"stream:{self.name}"

    def captures(self, pattern: str) -> bool:
        return any(subjects.covers(own, pattern) for own in self.subjects)

    def wire(self) -> Wire:
        return {
            **STREAM_DEFAULTS,
            "description": self.description,
            "subjects": self.subjects,
            "retention": self.retention,
            "storage": self.storage,
            "max_age": self.max_age_ns,
            "max_bytes": self.max_bytes,
            "max_msgs": self.max_msgs,
            "max_msgs_per_subject": self.max_msgs_per_subject,
            "max_msg_size": self.max_msg_bytes,
            "discard": self.discard,
            "duplicate_window": self.duplicate_window_ns,
            "num_replicas": self.replicas or 1,
            "no_ack": self.no_ack,
            "allow_direct": self.allow_direct,
            "allow_atomic": self.allow_atomic and not self.mirror,  # a mirror takes no publishes
            "allow_batched": self.allow_batched and not self.mirror,
            "allow_rollup_hdrs": self.allow_rollup,
            "deny_delete": self.deny_delete,
            "deny_purge": self.deny_purge,
            "compression": self.compression,
            "mirror": {"name": self.mirror} if self.mirror else None,
            "sources": [{"name": name} for name in self.sources] or None,
        }


class Consumer(Struct, frozen=True, kw_only=True):
    """A durable. `stream_key` is the stream's name in the files, `stream` its name on the server."""

    stream_key: str
    stream: str
    name: str
    description: str = ""
    filters: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    ack_wait_ns: int = ACK_WAIT_NS
    max_deliver: int = MAX_DELIVER
    max_ack_pending: int = MAX_ACK_PENDING
    deliver_policy: str = "all"
    ack_policy: str = "explicit"
    deliver_subject: str = ""
    dlq_subject: str = ""
    """Where its dead letters go; '' when none can come of it."""

    @property
    def item(self) -> str:
        return f"consumer:{self.stream}/{self.name}"

    def wire(self) -> Wire:
        return {
            **CONSUMER_DEFAULTS,
            "description": self.description,
            "filter_subjects": self.filters,
            "ack_policy": self.ack_policy,
            "deliver_policy": self.deliver_policy,
            "ack_wait": self.ack_wait_ns,
            "max_deliver": self.max_deliver,
            "max_ack_pending": self.max_ack_pending,
            "max_waiting": MAX_WAITING,
            "deliver_subject": self.deliver_subject,
        }


EVERY = "*"
"""In a service's list of streams: all of them, declared or not."""


class Service(Struct, frozen=True, kw_only=True):
    """Who consumes and publishes, and what else it needs: permissions.py makes a NATS user of it.

    Streams are named as in the files, a bucket's stream with its `KV_`.
    """

    name: str
    description: str = ""
    publishes: tuple[str, ...] = ()
    """The subjects that it may write."""
    forwards: bool = False
    """Publishes others' messages: to every declared stream but the internal ones."""
    reads: tuple[str, ...] = ()
    """Streams that it reads by readers and single messages, without a durable."""
    lists: bool = False
    """Finds streams that nobody declares, such as topics: it may list all with how far each is."""
    buckets: tuple[str, ...] = ()
    """Key-value buckets that it reads and writes."""
    asks: tuple[str, ...] = ()
    """Subjects on which it asks other services."""
    answers: tuple[str, ...] = ()
    """Subjects on which it answers requests."""
    agent: str = ""
    """The agent that it runs, as tenant/workspace/name."""
    handles: tuple[str, ...] = ()
    """Subjects that the agent handles through durables of its own."""
    durables: tuple[str, ...] = ()
    """Streams on which it makes durables that nobody declares."""
    settles: tuple[str, ...] = ()
    """Streams of which it settles deliveries of other consumers."""
    deletes: tuple[str, ...] = ()
    """Streams from which it removes single messages."""
    purges: tuple[str, ...] = ()
    """Streams from which it removes all messages of a subject."""
    makes_streams: tuple[str, ...] = ()
    """Subjects for which it makes, changes and deletes streams itself, under names that nobody declares."""


SERVICE_STREAMS = ("reads", "durables", "settles", "deletes", "purges")
"""The fields of a service that name streams."""


class Topology(Struct, frozen=True, kw_only=True):
    """Everything that is declared. `places` says in which file and line each part stands."""

    streams: tuple[Stream, ...] = ()
    consumers: tuple[Consumer, ...] = ()
    services: tuple[Service, ...] = ()
    contracts: tuple[Entry, ...] = CATALOG
    """The subjects that must be captured, with the prefixes that the settings give them."""
    released_streams: tuple[str, ...] = ()
    released_consumers: tuple[str, ...] = ()
    """Names that are out in the world, as the files spell them: `STREAM` and `STREAM/CONSUMER`."""
    places: Mapping[tuple[str, ...], str] = {}

    def place(self, *path: str) -> str:
        """Where it is declared; the nearest table when the key itself stands nowhere."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                shown = self.places[path[:length]]
                return shown if length == len(path) else f"{shown.split(' ')[0]} {dotted(path)}"
        return dotted(path)

    def stream(self, name: str) -> Stream | None:
        return next((stream for stream in self.streams if stream.name == name), None)

    def for_env(self, env: Env) -> Topology:
        """The same with the replicas of an environment, where a stream does not ask for its own number."""
        streams = [msgspec.structs.replace(one, replicas=one.replicas or env.replicas) for one in self.streams]
        return msgspec.structs.replace(self, streams=tuple(streams))

    def for_service(self, name: str) -> Topology:
        """One service's part: its consumers, their streams, and the streams that it writes to."""
        service = next((one for one in self.services if one.name == name), None)
        if service is None:
            known = ", ".join(sorted(one.name for one in self.services))
            raise NotFound(f"no service is called {name!r}", hint=f"Declared are: {known}.")
        consumers = tuple(one for one in self.consumers if name in one.services)
        used = {one.stream for one in consumers}
        streams = tuple(
            one
            for one in self.streams
            if one.name in used or any(one.captures(subject) for subject in service.publishes)
        )
        return msgspec.structs.replace(self, streams=streams, consumers=consumers)


def dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


def bucket(name: str, description: str, history: int, max_age_ns: int, max_bytes: int, replicas: int) -> Stream:
    """A key-value bucket as NATS clients make it. Without batches: each key is fenced by itself."""
    stream = f"{BUCKET_PREFIX}{name}"
    return Stream(
        key=stream,
        name=stream,
        description=description,
        subjects=(f"$KV.{name}.>",),
        max_msgs_per_subject=history,
        max_age_ns=max_age_ns,
        max_bytes=max_bytes,
        replicas=replicas,
        duplicate_window_ns=min(DUPLICATE_WINDOW_NS, max_age_ns or DUPLICATE_WINDOW_NS),
        discard="new",
        allow_atomic=False,
        allow_batched=False,
        allow_rollup=True,
        deny_delete=True,
        is_bucket=True,
    )
