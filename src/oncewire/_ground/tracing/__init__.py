"""Traces: one message's way through all parts, as spans after OpenTelemetry's conventions for messaging.

The context of a message is made once, by whoever creates it, and stands in its header or envelope from then on: nobody
on its way writes another one over it. So a span of that context is the message itself, and everything that happens to
it is a child:

    send     the message becomes part of its stream: by the broker, the relay, an agent (its effects)
    process  a handler runs, or the gateway hands it to its clients; an effect's context is a child of this

A part has a tracer or None. With None nothing is looked at and nothing is computed; the cost is that of one comparison.
Ids come from the message and the attempt, never from a generator: a redelivery is another span of the same trace.

    spans     what a span is, and what each kind of it says                       pure
    otel      the way to a collector, by OpenTelemetry's own SDK (`oncewire[otel]`)
"""

from oncewire._ground.tracing.spans import Kind, Operation, Span, Tracer, current, span_of

__all__ = ["Kind", "Operation", "Span", "Tracer", "current", "span_of"]
