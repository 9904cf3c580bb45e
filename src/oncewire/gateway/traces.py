"""A gateway's part in traces: a span for each message that it hands to somebody."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from oncewire._ground.contracts import trace
from oncewire._ground.jetstream import Message, parse_reply
from oncewire._ground.tracing import Tracer, span_of


def tell(tracer: Tracer, node: str, messages: Sequence[Message], times_ns: tuple[int, int]) -> None:
    """Those that carry a context; each node that hands one out has a span of its own."""
    for message in messages:
        parent = trace.extract(message.headers) if message.header_raw else None
        if parent is None:
            continue
        place = parse_reply(message.reply)
        entropy = hashlib.blake2b(f"{node}.{place.stream}.{place.sequence}".encode(), digest_size=8).digest()
        prefix, _, conversation_id = message.subject.rpartition(".")
        tracer.processed(
            message.subject,
            span_of(parent, entropy),
            parent,
            times_ns,
            name=prefix,
            message_id=message.headers.get("Nats-Msg-Id", ""),
            conversation_id=conversation_id,
            template=f"{prefix}.*",
            body_bytes=len(message.payload),
            stream=place.stream,
            sequence=place.sequence,
        )
