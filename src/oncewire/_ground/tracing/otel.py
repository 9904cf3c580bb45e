"""Spans on their way to a collector, by OpenTelemetry's SDK, which reads the standard `OTEL_*` variables by itself.

    otlp            OTLP over HTTP, to OTEL_EXPORTER_OTLP_ENDPOINT (http://localhost:4318)
    console         one line of JSON per span, on standard error
    file:PATH       the same, appended to a file

Our own settings say whether and which way (`telemetry.traces`); where to, how often, with which headers and how many
are sampled is the SDK's business. Spans wait in a bounded queue of the SDK and leave it from a thread of its own: a
collector that is away costs spans, never messages.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncewire._ground.checks import OFF
from oncewire._ground.contracts.trace import TraceContext
from oncewire._ground.errors import InvalidSetting, Refused
from oncewire._ground.logs import json_line
from oncewire._ground.tracing.spans import Kind, Span, Tracer
from oncewire._ground.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

OTLP, CONSOLE, FILE = "otlp", "console", "file:"
CLOSE_S_MAX = 3.0


class Exporting:
    """One queue for all parts of a process; each part is a service of its own to whoever looks at traces."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._processor = BatchSpanProcessor(exporter)
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._base = Resource.create()
        self._resources: dict[str, Resource] = {}
        self.is_sampled = lru_cache(maxsize=4_096)(self._is_sampled)

    def tracer(self, part: str) -> Tracer:
        return Tracer(part, self._export, self.is_sampled, around)

    def _is_sampled(self, trace_id: str) -> bool:
        from opentelemetry.sdk.trace.sampling import Decision

        return self._sampler.should_sample(None, int(trace_id, 16), "message").decision is not Decision.DROP

    def _resource(self, part: str) -> Resource:
        """A name that somebody chose stays; else each part has its own."""
        if part not in self._resources:
            from opentelemetry.sdk.resources import Resource

            named = str(self._base.attributes.get("service.name", ""))
            name = f"oncewire-{part}" if named.startswith("unknown_service") else named
            told = {"service.name": name, "service.version": VERSION, "oncewire.part": part}
            self._resources[part] = self._base.merge(Resource(told))
        return self._resources[part]

    def _export(self, part: str, span: Span) -> None:
        self._processor.on_end(readable(span, self._resource(part)))

    def close(self) -> None:
        """What waits goes out, as far as the collector takes it in time."""
        closing = threading.Thread(target=self._processor.shutdown, name="oncewire-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S_MAX)


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """Our span as the SDK's."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanKind, Status, StatusCode

    kind = SpanKind.PRODUCER if span.kind is Kind.PRODUCER else SpanKind.CONSUMER
    status = Status(StatusCode.ERROR, span.error) if span.error else Status()
    return ReadableSpan(
        span.name,
        context=_context(span.context, is_remote=False),
        parent=_context(span.parent, is_remote=True) if span.parent else None,
        resource=resource,
        attributes=dict(span.attributes) | ({"error.type": span.error.partition(":")[0][:100]} if span.error else {}),
        kind=kind,
        status=status,
        start_time=span.began_ns,
        end_time=max(span.began_ns, span.ended_ns),
        instrumentation_scope=InstrumentationScope("oncewire", VERSION),
    )


def _context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))


def around(context: TraceContext) -> contextlib.AbstractContextManager[Any]:
    """Code in this block runs in the span: what it traces by itself becomes its child."""
    from opentelemetry.trace import NonRecordingSpan, use_span

    return use_span(NonRecordingSpan(_context(context, is_remote=False)))


@contextlib.contextmanager
def exporting(traces: str) -> Iterator[Exporting | None]:
    """What the setting asks for; None when traces are off."""
    if traces == OFF:
        yield None
        return
    with contextlib.ExitStack() as stack:
        found = Exporting(_exporter(traces, stack))
        stack.callback(found.close)
        yield found


def _exporter(traces: str, stack: contextlib.ExitStack) -> SpanExporter:
    try:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        if traces == OTLP:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
    except ImportError:
        raise Refused("traces need OpenTelemetry", hint="Install it: pip install 'oncewire[otel]'.") from None
    if traces == CONSOLE:
        return ConsoleSpanExporter(out=sys.stderr, formatter=_line)
    try:
        out = Path(traces.removeprefix(FILE)).open("a", encoding="utf-8")  # noqa: SIM115 - the stack closes it
        stack.callback(out.close)
    except OSError as error:
        raise InvalidSetting(f"{traces} cannot be written: {error.strerror}", hint="Check telemetry.traces.") from None
    return ConsoleSpanExporter(out=out, formatter=_line)


def _line(span: ReadableSpan) -> str:
    return json_line(json.loads(span.to_json(indent=None))) + "\n"
