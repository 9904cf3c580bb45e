"""An agent's part in traces: a span for each run of a handler, and one for each effect that is its child."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from oncewire._ground.contracts.trace import TraceContext, parse_traceparent
from oncewire._ground.tracing import Tracer, span_of
from oncewire.agent.batch import Item, Settled, Worked

_NOTHING: Final = nullcontext()


def caused_by(item: Item) -> TraceContext:
    """The input's own context."""
    assert item.input is not None
    return TraceContext(item.input.envelope.trace_id, item.input.envelope.span_id)


def process_span(item: Item) -> TraceContext:
    """The span of this attempt at an input."""
    return span_of(caused_by(item), item.at_key, item.delivery.deliveries)


def tell_worked(tracer: Tracer, settled: Settled, agent: str) -> None:
    """Each handler that ran, once its outcome is durable."""
    for one in _sampled(tracer, settled):
        item, handler = one.item, one.item.handler
        assert handler is not None
        tracer.processed(
            item.subject,
            process_span(item),
            caused_by(item),
            (one.began_ns, one.ended_ns),
            name=handler.pattern,
            error=one.error,
            message_id=item.message.headers.get("Nats-Msg-Id", ""),
            group=item.delivery.consumer,
            body_bytes=len(item.message.payload),
            stream=item.delivery.stream,
            sequence=item.delivery.sequence,
            deliveries=item.delivery.deliveries,
            agent=agent,
        )


def tell_sent(tracer: Tracer, settled: Settled, agent: str, took_s: float) -> None:
    """Each effect, once its stream has it: the child of the handler that returned it."""
    ended_ns = time.time_ns()
    times = (ended_ns - int(took_s * 1e9), ended_ns)
    for one in _sampled(tracer, settled):
        parent = process_span(one.item)
        for sending in settled.sendings[one.first : one.last]:
            context = parse_traceparent(sending.trace)
            if context is not None:
                facts = {"message_id": sending.id, "body_bytes": len(sending.payload), "agent": agent}
                tracer.sent(
                    sending.subject, context, parent, times, name=sending.stream, stream=sending.stream, **facts
                )


def _sampled(tracer: Tracer, settled: Settled) -> Iterator[Worked]:
    """An input and its effects are of one trace: what is not sampled need not be looked at."""
    for one in settled.worked:
        if one.item.input is not None and tracer.is_sampled(one.item.input.envelope.trace_id):
            yield one


def around(tracer: Tracer | None, item: Item) -> AbstractContextManager[Any]:
    """What a handler traces by itself is a child of its span."""
    return _NOTHING if tracer is None else tracer.around(process_span(item))
