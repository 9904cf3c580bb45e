"""The broker's envelope: what `/v1/produce` takes and what `/v1/consume` shows.

Unknown fields are refused. The decoder reads the strict form at once; what a lenient client may send instead (null for
a field that it leaves empty, a deadline under one of its other names) is rewritten into it only when that fails.

`dlq` belongs to deliveries: a producer that sends it is refused like any unknown field. Deadlines may carry any offset
and are kept in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from oncewire._ground.contracts import trace
from oncewire._ground.contracts.canonical import INT_MAX
from oncewire._ground.contracts.codec import ENCODE, Contract, refuse_repeats
from oncewire._ground.errors import ContractViolation

NAME = "broker"
NAME_BYTES_MAX = 200
DEAD_PREFIX = "dlq."
"""Of the topic that takes a topic's dead letters. Its name may be longer by this: those of the longest name must be
readable too."""
DEADLINE_NAMES = ("deadline", "deadline_rfc3339", "deadline_ms")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_Deadline = Annotated[datetime, Meta(tz=True)]
_Count = Annotated[int, Meta(ge=0, le=INT_MAX)]


class RetryPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How often to deliver, and how long to wait between: backoff_ms · 2^(n − 1), capped."""

    max_attempts: _Count = 0
    backoff_ms: _Count = 0
    max_backoff_ms: _Count = 0


class DeadLetter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a dead letter comes from."""

    original_topic: str
    original_partition: _Count
    original_offset: _Count
    attempts: _Count
    last_error: str
    routed_at_ms: _Count


class BrokerEnvelope(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Workflow, routing and policy of a message. Fields that are empty are left out."""

    run_id: Annotated[str, Meta(description="The agent run.")] = ""
    step_id: Annotated[str, Meta(description="The step within the run.")] = ""
    parent_step_id: Annotated[str, Meta(description="The step that led to this one.")] = ""
    tenant_id: str = ""
    idempotency_key: Annotated[str, Meta(description="With tenant and topic the identity of the message.")] = ""
    target_topic: Annotated[str, Meta(description="Send it there instead.")] = ""
    partition_override: _Count | None = None
    deadline: Annotated[
        _Deadline | None,
        Meta(description="Refused when past. Also read from deadline_rfc3339 and deadline_ms (Unix ms)."),
    ] = None
    retry_policy: RetryPolicy | None = None
    traceparent: Annotated[
        str, Meta(description="W3C trace context. Without one, that of the request's header traceparent.")
    ] = ""


class DeliveredEnvelope(BrokerEnvelope, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The envelope as consumers see it."""

    dlq: Annotated[DeadLetter | None, Meta(description="Only on dead letters.")] = None


class ProduceBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of POST /v1/produce."""

    topic: Annotated[str, Meta(description="1 to 200 bytes, no control characters.")]
    value: Annotated[str, Meta(description="The payload, as text.")]
    key: Annotated[str, Meta(description="Picks the partition.")] = ""
    envelope: BrokerEnvelope | None = None


class Routing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the router said about a message."""

    label: str = ""
    meta: dict[str, str] = {}


class Delivery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of GET /v1/consume. The order of the fields is the order on the wire."""

    partition: _Count
    offset: _Count
    attempts: _Count
    key: str
    value: str
    last_error: str
    routing: Routing | None = None
    envelope: DeliveredEnvelope | None = None


def _strict_form(sent: dict[str, Any]) -> dict[str, Any]:
    """A lenient body in the strict form: fields that are null left out, the deadline under its own name."""
    strict = _without_null(sent)
    if isinstance(strict.get("envelope"), dict):
        envelope = _without_null(strict["envelope"])
        if isinstance(envelope.get("retry_policy"), dict):
            envelope["retry_policy"] = _without_null(envelope["retry_policy"])
        strict["envelope"] = _one_deadline(envelope)
    strict.setdefault("topic", "")  # missing and empty get the same answer: see decode_produce
    strict.setdefault("value", "")
    return strict


def _without_null(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def _one_deadline(envelope: dict[str, Any]) -> dict[str, Any]:
    found = [read_deadline(name, envelope.pop(name)) for name in DEADLINE_NAMES if name in envelope]
    if len(set(found)) > 1:
        raise ContractViolation(
            f"{NAME}: envelope.deadline: is given as several times that differ", field="envelope.deadline"
        )
    return envelope | {"deadline": found[0]} if found else envelope


def read_deadline(name: str, sent: object) -> datetime:
    """A deadline under one of DEADLINE_NAMES as a time in UTC; a query gives `deadline_ms` as digits."""
    field = f"envelope.{name}"
    try:
        if name == "deadline_ms":
            ms = msgspec.convert(sent, int, strict=not isinstance(sent, str))
            return _EPOCH + timedelta(milliseconds=ms)
        return msgspec.convert(sent, _Deadline).astimezone(UTC)
    except (msgspec.ValidationError, OverflowError):
        form = "Unix time in ms" if name == "deadline_ms" else "an RFC 3339 time such as 2025-12-21T12:00:00Z"
        raise ContractViolation(f"{NAME}: {field}: is not {form}: {sent!r}", field=field) from None


_PRODUCE = Contract(NAME, msgspec.json.Decoder(ProduceBody), mend=_strict_form)
_DELIVERY = Contract(NAME, msgspec.json.Decoder(Delivery))


def decode_produce(body: bytes) -> ProduceBody:
    """The body of a produce, or ContractViolation naming the field."""
    sent = _PRODUCE.read(body)
    # Tight but for the deadline, which can grow by less than a field that stands twice.
    refuse_repeats(NAME, body, ENCODE(sent), tight=True)
    return check_produce(sent)


def check_produce(sent: ProduceBody) -> ProduceBody:
    """What types alone cannot say; also for a produce that came as a query. Names come back trimmed."""
    topic = sent.topic.strip()
    if not topic or not sent.value:
        raise ContractViolation("topic and value are required", field="value" if topic else "topic")
    check_name(topic, "topic")
    envelope = _checked(sent.envelope) if sent.envelope else None
    if topic == sent.topic and envelope is sent.envelope:
        return sent
    return msgspec.structs.replace(sent, topic=topic, envelope=envelope)


def _checked(envelope: BrokerEnvelope) -> BrokerEnvelope:
    policy, target, deadline = envelope.retry_policy, envelope.target_topic.strip(), envelope.deadline
    if policy and policy.max_attempts == 0 and (policy.backoff_ms or policy.max_backoff_ms):
        raise ContractViolation(
            f"{NAME}: envelope.retry_policy.max_attempts: must be above 0 to use a backoff",
            field="envelope.retry_policy.max_attempts",
        )
    if target:
        check_name(target, "envelope.target_topic")
    if envelope.traceparent and trace.parse_traceparent(envelope.traceparent) is None:
        raise ContractViolation(f"{NAME}: envelope.traceparent: is no W3C trace context", field="envelope.traceparent")
    if target == envelope.target_topic and (deadline is None or deadline.tzinfo is UTC):
        return envelope
    if deadline is not None:
        try:
            deadline = deadline.astimezone(UTC)
        except OverflowError:  # the first and the last day, in a zone that reaches beyond them
            raise ContractViolation(
                f"{NAME}: envelope.deadline: lies outside the years 1 to 9999", field="envelope.deadline"
            ) from None
    return msgspec.structs.replace(envelope, target_topic=target, deadline=deadline)


def check_name(name: str, field: str) -> str:
    """A topic, group or owner: 1 to 200 bytes of UTF-8 without control characters."""
    bytes_max = NAME_BYTES_MAX + (len(DEAD_PREFIX) if name.startswith(DEAD_PREFIX) else 0)
    if not name or len(name.encode("utf-8", "replace")) > bytes_max:
        raise ContractViolation(f"{NAME}: {field}: must be 1 to {NAME_BYTES_MAX} bytes", field=field)
    if any(char < " " or "\x7f" <= char <= "\x9f" for char in name):
        raise ContractViolation(f"{NAME}: {field}: has a control character: {name!r}", field=field)
    return name


def encode_produce(body: ProduceBody) -> bytes:
    """The body of a produce. Refuses what `decode_produce` would refuse."""
    encoded = ENCODE(body)
    check_produce(_PRODUCE.read(encoded))
    return encoded


def decode_delivery(line: bytes) -> Delivery:
    """A line of a consume stream, as clients read it."""
    delivery = _DELIVERY.read(line)
    refuse_repeats(NAME, line, ENCODE(delivery), tight=False)
    return delivery


def encode_delivery(delivery: Delivery) -> bytes:
    """A line of a consume stream, without the line break. The broker's own values: not checked again."""
    return ENCODE(delivery)
