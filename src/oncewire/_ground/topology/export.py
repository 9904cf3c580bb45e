"""The declared topology for others: AsyncAPI, JSON, or one TOML file that reads back as the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from oncewire._ground.topology import asyncapi, values
from oncewire._ground.topology.model import BUCKET_PREFIX, Consumer, Service, Stream, Topology, bucket
from oncewire._ground.topology.units import show_bytes, show_duration

FORMATS = ("asyncapi", "json", "toml")


def export_as(form: str, topology: Topology) -> str:
    if form == "toml":
        return "\n".join(_toml(topology))
    shown = asyncapi.document(topology) if form == "asyncapi" else _plain(topology)
    return json.dumps(shown, indent=2, ensure_ascii=False) + "\n"


def _plain(topology: Topology) -> dict[str, Any]:
    shown = msgspec.to_builtins({"streams": topology.streams, "consumers": topology.consumers})
    return {**shown, "services": msgspec.to_builtins(topology.services)}


def _toml(topology: Topology) -> Iterator[str]:
    for stream in topology.streams:
        if stream.is_bucket:
            name = stream.key.removeprefix(BUCKET_PREFIX)
            blank: Any = bucket(name, "", 1, 0, -1, 0)
            yield from _table(f"buckets.{name}", stream, blank, {**values.BUCKET, "history": _HISTORY})
        else:
            yield from _table(f"streams.{stream.name}", stream, Stream(key="", name=""), values.STREAM)
    for consumer in topology.consumers:
        name = f"consumers.{consumer.stream}.{consumer.name}"
        yield from _table(name, consumer, Consumer(stream_key="", stream="", name=""), values.CONSUMER)
    for service in topology.services:
        yield from _table(f"services.{service.name}", service, Service(name=""), values.SERVICE)


_HISTORY = values.BUCKET["history"]._replace(field="max_msgs_per_subject")


def _table(name: str, thing: Any, blank: Any, keys: Mapping[str, values.Key]) -> Iterator[str]:
    """Only what is not the default: that is how a person would write it."""
    yield f"[{name}]"
    for key, (field, read, _) in keys.items():
        value = getattr(thing, field)
        if value != getattr(blank, field) and key != "follows":
            yield f"{key} = {_value(value, read)}"
    yield ""


def _value(value: Any, read: values.Reader) -> str:
    if read in (values.duration_ns, values.time_ns):
        return json.dumps(show_duration(value))
    if read is values.size:
        return json.dumps(show_bytes(value))
    if read is values.count and value < 0:
        return '"unlimited"'
    return json.dumps(value, ensure_ascii=False)
