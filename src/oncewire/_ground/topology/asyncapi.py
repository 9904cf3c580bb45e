"""The topology and the contracts as one AsyncAPI 3 document. Pure.

A channel per subject that the contracts or a consumer name, an operation per consumer (receive) and per subject that a
service writes (send). What AsyncAPI has no word for stands in `x-nats-config`: stream, consumer, ack_wait, max_deliver,
dlq_subject. Payloads refer to the JSON Schemas beside the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from oncewire._ground.contracts.catalog import Family
from oncewire._ground.contracts.schemas import DIALECT, PUBLISHED
from oncewire._ground.contracts.subjects import overlaps
from oncewire._ground.topology.model import Consumer, Service, Stream, Topology
from oncewire._ground.topology.units import show_duration
from oncewire._ground.version import VERSION

ASYNCAPI = "3.0.0"
Node = dict[str, Any]

_ADDRESSES = {
    "evt.>": "evt.{tenant}.{workspace}.{name}",
    "cmd.>": "cmd.{tenant}.{workspace}.{agent}.{name}",
    "ledger.*.*": "ledger.{agent}.{ledgerId}",
    "dlq_requests.*": "dlq_requests.{agent}",
    "dlq_replays.*": "dlq_replays.{letter}",
}
"""Subjects whose wildcards have names of their own."""

_ENVELOPES = {Family.MESSAGE: "message", Family.RUNTIME: "runtime", Family.REALTIME: "realtime"}
_OTHERS = {
    Family.REPLAY: (
        "What became of a letter: replayed or dropped, under which id, where it stands",
        "application/json",
    ),
    Family.LETTER: ("The original message as it was, its story in Oncewire-Dlq-* headers", "application/octet-stream"),
    Family.BLOCK: ("A block of an agent's ledger", "application/json"),
    Family.ADVISORY: ("What JetStream says about a delivery that it gave up", "application/json"),
}
_MEANINGS = {
    "tenant": "Whose message it is.",
    "workspace": "A part of the tenant.",
    "agent": "The agent's name.",
    "name": "One or more tokens.",
    "rest": "One or more tokens.",
    "conversationId": "The conversation.",
    "ledgerId": "The ledger that the agent keeps.",
}


def document(topology: Topology) -> Node:
    """The whole document, in an order that does not change by chance."""
    patterns = list(dict.fromkeys([*(entry.pattern for entry in topology.contracts), *_own_patterns(topology)]))
    return {
        "asyncapi": ASYNCAPI,
        "info": {
            "title": "Oncewire",
            "version": VERSION,
            "description": "Streams, durable consumers and messages on NATS JetStream.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "dev": {"host": "localhost:4222", "protocol": "nats", "description": "A nats-server with JetStream."}
        },
        "channels": {_id(pattern): _channel(topology, pattern) for pattern in patterns},
        "operations": dict([*_receives(topology), *_sends(topology)]),
        "components": {"messages": dict(_messages())},
    }


def _own_patterns(topology: Topology) -> Iterator[str]:
    for consumer in topology.consumers:
        yield from consumer.filters
    for service in topology.services:
        yield from service.publishes


def _channel(topology: Topology, pattern: str) -> Node:
    address, parameters = _address(topology, pattern)
    entry = next((one for one in topology.contracts if one.pattern == pattern), None)
    family = entry.family if entry else _family(topology, pattern)
    channel: Node = {"address": address, "description": entry.meaning if entry else "declared by a file"}
    if parameters:
        channel["parameters"] = {name: {"description": _MEANINGS.get(name, "One token.")} for name in parameters}
    if family:
        channel["messages"] = {_message_name(family): {"$ref": f"#/components/messages/{_message_name(family)}"}}
    stream = next((one for one in topology.streams if one.captures(pattern)), None)
    if stream:
        channel["x-nats-config"] = _stream_facts(stream, pattern)
    return channel


def _family(topology: Topology, pattern: str) -> Family | None:
    return next((one.family for one in topology.contracts if overlaps(one.pattern, pattern)), None)


def _address(topology: Topology, pattern: str) -> tuple[str, list[str]]:
    """The subject with its wildcards as parameters."""
    one = "{conversationId}" if _family(topology, pattern) is Family.REALTIME else "{token}"
    address = _ADDRESSES.get(pattern) or re.sub(r">$", "{rest}", pattern.replace("*", one))
    return address, re.findall(r"\{(\w+)\}", address)


def _stream_facts(stream: Stream, pattern: str) -> Node:
    facts: Node = {
        "stream": stream.name,
        "subject": pattern,
        "retention": stream.retention,
        "max_age": show_duration(stream.max_age_ns),
        "duplicate_window": show_duration(stream.duplicate_window_ns),
    }
    return facts | ({"no_ack": True} if stream.no_ack else {})


def _receives(topology: Topology) -> Iterator[tuple[str, Node]]:
    for consumer in topology.consumers:
        for at, pattern in enumerate(consumer.filters):
            suffix = f"_{at + 1}" if len(consumer.filters) > 1 else ""
            yield f"{consumer.stream}_{consumer.name}{suffix}", _receive(consumer, pattern)


def _receive(consumer: Consumer, pattern: str) -> Node:
    facts: Node = {
        "stream": consumer.stream,
        "consumer": consumer.name,
        "filter_subject": pattern,
        "services": list(consumer.services),
        "mode": "pull",
        "ack_policy": consumer.ack_policy,
        "deliver_policy": consumer.deliver_policy,
        "ack_wait": show_duration(consumer.ack_wait_ns),
        "max_deliver": consumer.max_deliver,
        "dlq_subject": consumer.dlq_subject or None,
    }
    operation: Node = {"action": "receive", "channel": {"$ref": f"#/channels/{_id(pattern)}"}}
    operation["summary"] = consumer.description or f"{' and '.join(consumer.services)} reads {pattern}"
    return operation | {"x-nats-config": facts}


def _sends(topology: Topology) -> Iterator[tuple[str, Node]]:
    for service in topology.services:
        for pattern in service.publishes:
            yield f"{service.name}_sends_{_id(pattern)}", _send(topology, service, pattern)


def _send(topology: Topology, service: Service, pattern: str) -> Node:
    stream = next((one.name for one in topology.streams if one.captures(pattern)), None)
    return {
        "action": "send",
        "channel": {"$ref": f"#/channels/{_id(pattern)}"},
        "summary": service.description or f"{service.name} writes {pattern}",
        "x-nats-config": {"stream": stream, "service": service.name, "subject": pattern},
    }


def _messages() -> Iterator[tuple[str, Node]]:
    for family in Family:
        kind = _ENVELOPES.get(family)
        published = next((one for one in PUBLISHED if one.kind == kind), None)
        if published:
            payload = {
                "schemaFormat": f"application/schema+json;version={DIALECT.split('/')[-2]}",
                "schema": {"$ref": f"schemas/{published.file_name}"},
            }
            yield (
                _message_name(family),
                {
                    "title": published.title,
                    "contentType": "application/json",
                    "headers": _headers(),
                    "payload": payload,
                },
            )
        else:
            title, content_type = _OTHERS[family]
            yield _message_name(family), {"title": title, "contentType": content_type}


def _headers() -> Node:
    known = {"Nats-Msg-Id": "A repeat within the duplicate window is dropped.", "traceparent": "W3C trace context."}
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": text} for name, text in known.items()},
    }


def _message_name(family: Family) -> str:
    return f"{family.value}-envelope" if family in _ENVELOPES else family.value


def _id(pattern: str) -> str:
    """A key that AsyncAPI takes (letters, digits, dots, dashes), one for each pattern."""
    return pattern.replace("*", "any").replace(">", "all").replace("$", "_")
