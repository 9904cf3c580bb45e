"""What the source asks a stream: its state, one message, the sequence of a time; and its own ephemeral consumers.

Everything here is answered by the stream's leader, but for direct get. Consumers are named `ow-reader-…`, ack nothing,
live in memory and vanish by themselves: durables of services are never touched.

Neither numpy nor Arrow is imported here: Spark's planning processes, of which each query starts many, need neither.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from oncewire._ground.contracts.subjects import INCARNATIONS_BUCKET, READER_PREFIX
from oncewire._ground.contracts.topics import SUBJECTS, Bears, read_metadata
from oncewire._ground.errors import ContractViolation, Corrupt, NotFound, ProtocolViolation
from oncewire._ground.jetstream.protocol import CRLF, Message, parse_time_ns
from oncewire.pipeline.rules import Facts
from oncewire.pipeline.wire import STREAM_NOT_FOUND, Wire

INACTIVE_S: Final = 30
"""A reader's consumer that nobody pulls from is removed by the server after this time."""
NO_MESSAGE: Final = 10037
OWN_HEADERS: Final = frozenset(
    {
        b"Nats-Stream",
        b"Nats-Subject",
        b"Nats-Sequence",
        b"Nats-Time-Stamp",
        b"Nats-Num-Pending",
        b"Nats-Last-Sequence",
        b"Nats-UpTo-Sequence",
    }
)


@dataclass(frozen=True)
class Row:
    """One message that the exact parser read."""

    subject: bytes
    sequence: int
    timestamp_ns: int
    header_raw: bytes
    payload: bytes


def facts_of(wire: Wire, stream: str) -> Facts:
    try:
        return Facts.of(wire.api(f"STREAM.INFO.{stream}"))
    except NotFound as error:
        if error.server_code != STREAM_NOT_FOUND:
            raise
        raise NotFound(
            f"there is no stream {stream} on {wire.address}", hint="`oncewire topology apply` makes the declared ones."
        ) from None


def topics_of(wire: Wire) -> list[tuple[Facts, Bears]]:
    """All topics of the broker with how far each is, in pages. One that comes meanwhile is found the next time."""
    found: dict[str, tuple[Facts, Bears]] = {}
    offset = 0
    while True:
        page = wire.api("STREAM.LIST", {"offset": offset, "subject": SUBJECTS})
        streams = page.get("streams") or []
        for info in streams:
            bears = read_metadata(info["config"].get("metadata") or {})
            if bears is not None:
                found[info["config"]["name"]] = Facts.of(info), bears
        offset += len(streams)
        if not streams or offset >= page["total"]:
            return list(found.values())


def incarnation_of(wire: Wire, stream: str) -> int:
    """How often a person has accepted that this stream went back; 0 where nobody keeps such a list."""
    key = f"$KV.{INCARNATIONS_BUCKET}.{stream}"
    try:
        found = _stored(wire, f"KV_{INCARNATIONS_BUCKET}", {"last_by_subj": key})
    except NotFound as error:
        if error.server_code != STREAM_NOT_FOUND:
            raise
        return 0
    try:
        return int(found.payload) if found else 0
    except ValueError:
        raise Corrupt(f"the key {stream} of the bucket {INCARNATIONS_BUCKET} is no number") from None


def message_at(wire: Wire, stream: str, sequence: int) -> Row | None:
    """The message with exactly this sequence, as the leader has it."""
    return _stored(wire, stream, {"seq": sequence})


def message_from(wire: Wire, stream: str, sequence: int, subjects: Sequence[str]) -> Row | None:
    """The first message from this sequence on that passes one of the filters, as the leader has it."""
    found = [_stored(wire, stream, {"seq": sequence, "next_by_subj": one}) for one in subjects or (">",)]
    return min((row for row in found if row), key=lambda row: row.sequence, default=None)


def _stored(wire: Wire, stream: str, request: dict[str, Any]) -> Row | None:
    try:
        found = wire.api(f"STREAM.MSG.GET.{stream}", request)["message"]
    except NotFound as error:
        if error.server_code == NO_MESSAGE:
            return None
        raise
    try:
        header, payload = (base64.b64decode(found.get(part, "")) for part in ("hdrs", "data"))
    except binascii.Error:
        raise ProtocolViolation(f"message {request} of {stream} is not base64") from None
    return Row(found["subject"].encode(), found["seq"], parse_time_ns(found["time"]), header, payload)


def sequence_at(wire: Wire, stream: str, when: str) -> int:
    """The first sequence that was stored at this time (RFC 3339) or later; the next one when there is none."""
    start = {"deliver_policy": "by_start_time", "opt_start_time": when}
    name, info = _create(wire, stream, start)
    delete_consumer(wire, stream, name)
    return int(info["delivered"]["stream_seq"]) + 1


def create_consumer(wire: Wire, stream: str, sequence: int, subjects: Sequence[str]) -> tuple[str, int]:
    """An ephemeral consumer from this sequence on: its name, and how many messages it has ahead."""
    config: dict[str, Any] = {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
    if len(subjects) == 1:
        config["filter_subject"] = subjects[0]
    elif subjects:
        config["filter_subjects"] = list(subjects)
    name, info = _create(wire, stream, config)
    return name, int(info["num_pending"])


def _create(wire: Wire, stream: str, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = READER_PREFIX + os.urandom(9).hex()
    own = {
        "name": name,
        "ack_policy": "none",
        "replay_policy": "instant",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": INACTIVE_S * 1_000_000_000,
    }
    body = {"stream_name": stream, "config": {**own, **config}, "action": "create"}
    return name, wire.api(f"CONSUMER.CREATE.{stream}.{name}", body)


def delete_consumer(wire: Wire, stream: str, name: str) -> None:
    wire.api(f"CONSUMER.DELETE.{stream}.{name}")


def stored_row(message: Message) -> Row:
    """A reply of direct get: the stream's own facts stand behind the message's own headers."""
    header_raw, own = split_own(message.header_raw)
    try:
        return Row(
            own[b"Nats-Subject"],
            int(own[b"Nats-Sequence"]),
            parse_time_ns(own[b"Nats-Time-Stamp"].decode()),
            header_raw,
            message.payload,
        )
    except (KeyError, ValueError, ContractViolation):
        raise ProtocolViolation(f"an answer of direct get lacks its headers: {message.header_raw[:120]!r}") from None


def split_own(header_raw: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """The message's own block, and what the server added: at the end and each name once, so nobody can forge it."""
    lines = header_raw.removesuffix(CRLF + CRLF).split(CRLF)
    own: dict[bytes, bytes] = {}
    while len(lines) > 1:
        name, _, value = lines[-1].partition(b":")
        if name not in OWN_HEADERS or name in own:
            break
        own[name] = value.strip()
        lines.pop()
    return (CRLF.join(lines) + CRLF + CRLF if len(lines) > 1 else b""), own
