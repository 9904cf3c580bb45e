"""A broker's part in traces: a span for each message that a request produced."""

from __future__ import annotations

import secrets
import time

from oncewire.broker.engine import Produced
from oncewire.contracts.broker import ProduceBody
from oncewire.contracts.trace import parse_traceparent
from oncewire.http import Request
from oncewire.tracing import Tracer, span_of

SYSTEM = "oncewire"


def tell(tracer: Tracer, request: Request, body: ProduceBody, produced: Produced, took_s: float) -> None:
    """The message is durable. Whoever asked without a context has no trace to continue."""
    parent = parse_traceparent(request.header(b"traceparent"))
    if parent is None:
        return
    ended_ns = time.time_ns()
    tracer.sent(
        produced.topic,
        span_of(parent, secrets.token_bytes(8)),
        parent,
        (ended_ns - int(took_s * 1e9), ended_ns),
        system=SYSTEM,
        partition=str(produced.partition),
        message_id=body.envelope.idempotency_key if body.envelope else "",
        body_bytes=len(body.value),
    )
