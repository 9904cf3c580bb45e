"""The dead-letter service's part in traces: a span for each letter, a child of the message that was given up."""

from __future__ import annotations

import hashlib
import time

from oncewire._ground.contracts import letters
from oncewire._ground.contracts.trace import TraceContext, parse_traceparent
from oncewire._ground.jetstream import PubAck
from oncewire._ground.tracing import Tracer, span_of
from oncewire.dlq.rules import DLQ, Letter


def context_of(letter: Letter) -> TraceContext | None:
    """The context of the message, where its headers had one."""
    return parse_traceparent(letter.headers.get(letters.TRACE, ""))


def trace_id_of(letter: Letter) -> str:
    context = context_of(letter)
    return context.trace_id if context else ""


def tell(tracer: Tracer, letter: Letter, stored: PubAck, began_ns: int) -> None:
    parent = context_of(letter)
    if parent is None:
        return
    entropy = hashlib.blake2b(letter.id.encode(), digest_size=8).digest()
    facts = {"message_id": letter.id, "stream": stored.stream, "sequence": stored.sequence, "outcome": letter.cause}
    times = (began_ns, time.time_ns())
    tracer.sent(
        letter.subject, span_of(parent, entropy), parent, times, name=DLQ, body_bytes=len(letter.payload), **facts
    )
