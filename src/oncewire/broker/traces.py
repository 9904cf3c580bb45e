"""A broker's part in traces: a span for each message that a request produced."""

from __future__ import annotations

import secrets
import time

from oncewire._ground.contracts.broker import ProduceBody
from oncewire._ground.contracts.trace import parse_traceparent
from oncewire._ground.tracing import Tracer, span_of
from oncewire.broker.engine import Produced

SYSTEM = "oncewire"


def tell(tracer: Tracer, body: ProduceBody, produced: Produced, took_s: float) -> None:
    """The message is durable. One without a context, of its own or of its request, belongs to no trace."""
    envelope = body.envelope
    parent = parse_traceparent(envelope.traceparent) if envelope is not None else None
    if envelope is None or parent is None:
        return
    ended_ns = time.time_ns()
    tracer.sent(
        produced.topic,
        span_of(parent, secrets.token_bytes(8)),
        parent,
        (ended_ns - int(took_s * 1e9), ended_ns),
        system=SYSTEM,
        partition=str(produced.partition),
        message_id=envelope.idempotency_key,
        body_bytes=len(body.value),
    )
