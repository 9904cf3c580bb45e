"""Which keys a declaration may have, and what each value may be. Pure.

A reader takes what TOML gave and returns the value for the model, or raises ValueError with what is wrong; the caller
adds the place. Keys that JetStream knows and we refuse on purpose stand in REFUSED with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from oncewire._ground.contracts.subjects import DEFAULT_TENANT, DEFAULT_WORKSPACE, check_filter, token
from oncewire._ground.errors import ContractViolation
from oncewire._ground.topology import units

Reader = Callable[[Any], Any]
LIST_MAX = 100
TEXT_CHARS_MAX = 4_096
COUNT_MAX = 2**31 - 1
HISTORY_MAX = 64
"""What the server allows for key-value."""


class Key(NamedTuple):
    """The field of the model that a key of the file fills."""

    field: str
    read: Reader
    example: str


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {show(value)}")
    if len(value) > TEXT_CHARS_MAX or not value.isprintable():
        raise ValueError(f"must be printable and at most {TEXT_CHARS_MAX} characters")
    return value


def is_true(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {show(value)}")
    return value


def duration_ns(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f"must be text with a unit, not {show(value)}")
    return units.parse_duration_ns(value)


def time_ns(value: Any) -> int:
    """A duration that must end."""
    found = duration_ns(value)
    if found == units.FOREVER:
        raise ValueError("must be a time that ends")
    return found


def size(value: Any) -> int:
    if isinstance(value, str):
        return units.parse_bytes(value)
    return _whole(value, 1, units.INT64_MAX)


def count(value: Any) -> int:
    return units.UNLIMITED if value == "unlimited" else _whole(value, 1, COUNT_MAX)


def whole(low: int, high: int) -> Reader:
    return lambda value: _whole(value, low, high)


def _whole(value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"must be a whole number, not {show(value)}")
    if not low <= value <= high:
        raise ValueError(f"must be from {low} to {high}, not {show(value)}")
    return value


def one_of(*choices: str) -> Reader:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be {' or '.join(choices)}, not {show(value)}")
        return str(value)

    return read


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of texts, not {show(value)}")
    if len(value) > LIST_MAX:
        raise ValueError(f"has {len(value)} entries, at most {LIST_MAX} are allowed")
    found = tuple(text(one) for one in value)
    if len(set(found)) < len(found):
        raise ValueError("names the same entry twice")
    return found


def patterns(value: Any) -> tuple[str, ...]:
    found = texts(value)
    if not found:
        raise ValueError("must name at least one subject")
    for one in found:
        pattern(one)
    return found


def pattern(value: Any) -> str:
    try:
        return check_filter(text(value))
    except ContractViolation as wrong:
        raise ValueError(wrong.message) from None


def agent(value: Any) -> str:
    """An agent by its full name, or by its own in the default tenant and workspace."""
    parts = text(value).split("/")
    if len(parts) == 1:
        parts = [DEFAULT_TENANT, DEFAULT_WORKSPACE, *parts]
    if len(parts) != 3:
        raise ValueError("must be an agent's name, or tenant/workspace/name")
    try:
        for part in parts:
            token(part, "agent")
    except ContractViolation as wrong:
        raise ValueError(wrong.message) from None
    return "/".join(parts)


def show(value: Any) -> str:
    """A value from a file, as short as an error may show it."""
    try:
        shown = repr(value)
    except (RecursionError, ValueError):  # hostile nesting; a number of a million digits
        return f"a {type(value).__name__}"
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


_COMMON = {
    "description": Key("description", text, '"what it is for"'),
    "max_age": Key("max_age_ns", duration_ns, '"7d" or "forever"'),
    "max_bytes": Key("max_bytes", size, '"64 MiB" or "unlimited"'),
    "replicas": Key("replicas", whole(1, 5), "3"),
}
STREAM: Mapping[str, Key] = {
    **_COMMON,
    "subjects": Key("subjects", patterns, '["orders.>"]'),
    "retention": Key("retention", one_of("limits", "interest", "workqueue"), '"limits"'),
    "storage": Key("storage", one_of("file", "memory"), '"file"'),
    "max_msgs": Key("max_msgs", count, '1_000 or "unlimited"'),
    "max_msgs_per_subject": Key("max_msgs_per_subject", count, '1_000 or "unlimited"'),
    "max_msg_size": Key("max_msg_bytes", size, '"1 MiB" or "unlimited"'),
    "discard": Key("discard", one_of("old", "new"), '"old"'),
    "duplicate_window": Key("duplicate_window_ns", time_ns, '"2m"'),
    "no_ack": Key("no_ack", is_true, "true"),
    "allow_direct": Key("allow_direct", is_true, "true"),
    "allow_atomic": Key("allow_atomic", is_true, "true"),
    "allow_batched": Key("allow_batched", is_true, "true"),
    "allow_rollup": Key("allow_rollup", is_true, "true"),
    "deny_delete": Key("deny_delete", is_true, "true"),
    "deny_purge": Key("deny_purge", is_true, "true"),
    "compression": Key("compression", one_of("none", "s2"), '"none"'),
    "mirror": Key("mirror", text, '"OTHER"'),
    "sources": Key("sources", texts, '["OTHER"]'),
    "one_reader": Key("one_reader", is_true, "true"),
    "internal": Key("internal", is_true, "true"),
    "follows": Key("follows", one_of("", "message-settings", "chat-settings"), '"message-settings"'),
}
BUCKET: Mapping[str, Key] = {**_COMMON, "history": Key("history", whole(1, HISTORY_MAX), "1")}
CONSUMER: Mapping[str, Key] = {
    "description": _COMMON["description"],
    "filters": Key("filters", patterns, '["orders.placed"]'),
    "services": Key("services", texts, '["billing-worker"]'),
    "ack_wait": Key("ack_wait_ns", time_ns, '"30s"'),
    "max_deliver": Key("max_deliver", count, '10 or "unlimited"'),
    "max_ack_pending": Key("max_ack_pending", count, "1_000"),
    "deliver_policy": Key("deliver_policy", one_of("all", "new", "last", "last_per_subject"), '"all"'),
    "ack_policy": Key("ack_policy", one_of("explicit", "all", "none"), '"explicit"'),
    "deliver_subject": Key("deliver_subject", text, '""'),
    "dlq_subject": Key("dlq_subject", text, '"dlq.orders.placed"'),
}
SERVICE: Mapping[str, Key] = {
    "description": _COMMON["description"],
    "publishes": Key("publishes", patterns, '["orders.>"]'),
    "forwards": Key("forwards", is_true, "true"),
    "reads": Key("reads", texts, '["ORDERS"] or ["*"]'),
    "lists": Key("lists", is_true, "true"),
    "buckets": Key("buckets", texts, '["prices"]'),
    "asks": Key("asks", patterns, '["sr.queries.orders.*"]'),
    "answers": Key("answers", patterns, '["sr.queries.orders.*"]'),
    "agent": Key("agent", agent, '"acme/shop/biller"'),
    "handles": Key("handles", patterns, '["orders.placed"]'),
    "durables": Key("durables", texts, '["ORDERS"]'),
    "settles": Key("settles", texts, '["ORDERS"] or ["*"]'),
    "deletes": Key("deletes", texts, '["ORDERS"]'),
    "purges": Key("purges", texts, '["ORDERS"]'),
    "makes_streams": Key("makes_streams", patterns, '["jobs.>"]'),
}
RELEASED: Mapping[str, Key] = {
    "streams": Key("released_streams", texts, '["ORDERS"]'),
    "consumers": Key("released_consumers", texts, '["ORDERS/worker"]'),
}
REFUSED: Mapping[str, str] = {
    "backoff": "a backoff list replaces ack_wait by its first entry, and a plain nak ignores it: retries are naks "
    "with a delay",
    "persist_mode": "asynchronous persistence loses confirmed messages when the server is killed",
    "republish": "republished messages bypass their contracts: let a service read and publish",
    "subject_transform": "a transform would store messages under subjects that no contract names",
    "placement": "where a stream lives is for the operator of the cluster, and never drift",
}
