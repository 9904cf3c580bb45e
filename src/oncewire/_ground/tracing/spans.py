"""Spans of messages. Attributes are those of OpenTelemetry's semantic conventions for messaging."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, NamedTuple

from oncewire._ground.contracts.trace import SAMPLED, TraceContext

SYSTEM = "nats"
_SPAN_MAX = 1 << 64


class Kind(StrEnum):
    PRODUCER = "producer"
    CONSUMER = "consumer"


class Operation(StrEnum):
    """`messaging.operation.type`."""

    SEND = "send"
    PROCESS = "process"


class Span(NamedTuple):
    """Something that happened to a message. `error` is why it did not work, '' when it did."""

    name: str
    kind: Kind
    context: TraceContext
    parent: TraceContext | None
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    error: str = ""


class Tracer:
    """Where the spans of one part go. `is_sampled` decides by the trace id: the same everywhere for one trace."""

    def __init__(
        self,
        part: str,
        export: Callable[[str, Span], None],
        is_sampled: Callable[[str], bool] = lambda _: True,
        around: Callable[[TraceContext], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.part = part
        self._export = export
        self.is_sampled = is_sampled
        self.around = around
        """Code in its block runs in a span: what it traces by itself becomes a child."""

    def sent(
        self,
        destination: str,
        context: TraceContext,
        parent: TraceContext | None,
        times_ns: tuple[int, int],
        *,
        name: str = "",
        **facts: Any,
    ) -> None:
        """A message is in its stream. `name` stands for destinations that are too many to be names of spans."""
        if self.is_sampled(context.trace_id):
            told = _attributes(Operation.SEND, destination, facts)
            span = Span(f"send {name or destination}", Kind.PRODUCER, context, parent, *times_ns, told)
            self._export(self.part, span)

    def processed(
        self,
        destination: str,
        context: TraceContext,
        parent: TraceContext,
        times_ns: tuple[int, int],
        *,
        name: str = "",
        error: str = "",
        **facts: Any,
    ) -> None:
        """A message was worked on."""
        if self.is_sampled(context.trace_id):
            told = _attributes(Operation.PROCESS, destination, facts)
            span = Span(f"process {name or destination}", Kind.CONSUMER, context, parent, *times_ns, told, error)
            self._export(self.part, span)


_NAMES = {
    "message_id": "messaging.message.id",
    "conversation_id": "messaging.message.conversation_id",
    "body_bytes": "messaging.message.body.size",
    "group": "messaging.consumer.group.name",
    "partition": "messaging.destination.partition.id",
    "template": "messaging.destination.template",
    "stream": "oncewire.stream",
    "sequence": "oncewire.stream.sequence",
    "deliveries": "oncewire.deliveries",
    "outcome": "oncewire.outcome",
    "agent": "oncewire.agent",
}


def _attributes(operation: Operation, destination: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "messaging.system": facts.get("system", SYSTEM),
        "messaging.operation.type": operation.value,
        "messaging.operation.name": operation.value,
        "messaging.destination.name": destination,
    }
    told.update({_NAMES[name]: value for name, value in facts.items() if name != "system" and value not in ("", None)})
    return told


def span_of(context: TraceContext, entropy: bytes, attempt: int = 0) -> TraceContext:
    """A span in the trace of a message, from bytes that are this event's own (8 at least), and its attempt."""
    number = (int.from_bytes(entropy[:8], "big") + attempt) % _SPAN_MAX or 1
    return context._replace(span_id=f"{number:016x}")


def current() -> TraceContext | None:
    """The span that this code runs in, where somebody has set up OpenTelemetry; else None, and next to no time."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    found = trace.get_current_span().get_span_context()
    if not found.is_valid:
        return None
    state = found.trace_state.to_header() if found.trace_state else ""
    flags = int(found.trace_flags) & SAMPLED
    return TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", flags, state)
