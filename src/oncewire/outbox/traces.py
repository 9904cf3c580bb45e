"""A relay's part in traces: a span for each row that its stream has."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oncewire._ground.contracts import trace
from oncewire._ground.contracts.message import decode_message
from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import PubAck
from oncewire._ground.tracing import Tracer, span_of
from oncewire.outbox.rules import Progress

if TYPE_CHECKING:
    from oncewire.outbox.messages import Waiting


def tell_messages(
    tracer: Tracer, rows: Sequence[Waiting], outcomes: Sequence[PubAck | OncewireError], began_ns: int
) -> None:
    """A row that belongs to no trace begins one, which is that of whoever reads the message."""
    times = (began_ns, time.time_ns())
    for row, outcome in zip(rows, outcomes, strict=True):
        if not isinstance(outcome, PubAck):
            continue
        parent = trace.parse_traceparent(row.traceparent or "")
        if parent is not None:
            context = _span(parent, row.key)
        else:
            context = trace.begun_by(decode_message(row.body.encode()).message_id)
        facts = {"message_id": row.key, "body_bytes": len(row.body), "stream": outcome.stream}
        tracer.sent(row.subject, context, parent, times, name="messages", sequence=outcome.sequence, **facts)


def tell_conversations(tracer: Tracer, found: Sequence[Progress], began_ns: int) -> None:
    """A message that was enqueued in no trace begins one of its own. Its header carries either."""
    times = (began_ns, time.time_ns())
    for one in found:
        for row in one.claim.rows[: one.confirmed]:
            facts = {"message_id": row.message_id, "conversation_id": row.conversation_id, "template": "chat.events.*"}
            parent = trace.parse_traceparent(row.traceparent or "")
            context = _span(parent, row.message_id) if parent else trace.begun_by(row.message_id)
            tracer.sent(f"chat.events.{row.conversation_id}", context, parent, times, name="conversations", **facts)


def _span(parent: trace.TraceContext, id_: str) -> trace.TraceContext:
    return span_of(parent, hashlib.blake2b(id_.encode(), digest_size=8).digest())
