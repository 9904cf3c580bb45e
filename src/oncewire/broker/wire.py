"""What requests of the broker look like: JSON bodies or query parameters in, checked values out, answers as bytes.

One set of fields per call, read from the body when there is one (whatever its content type says) and else from the
query. Sentences that clients match on stand here or in the engine, word by word as they were always sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from oncewire._ground.contracts import trace
from oncewire._ground.contracts.broker import (
    DEADLINE_NAMES,
    NAME,
    BrokerEnvelope,
    ProduceBody,
    RetryPolicy,
    check_name,
    check_produce,
    decode_produce,
    read_deadline,
)
from oncewire._ground.contracts.canonical import INT_MAX
from oncewire._ground.contracts.codec import ENCODE, Contract, refuse_repeats
from oncewire._ground.errors import ContractViolation, OncewireError, Overloaded, Refused, TooLarge
from oncewire._ground.http import Request
from oncewire._ground.http.rules import answer_of
from oncewire.broker.engine import BufferFull, Consume, Idempotency, IdempotencyStatus, Produced, Settle

PRODUCED = b'{"status":"produced","topic":%b}'
BATCH_TYPE = "application/x-ndjson"

Act = Literal["ack", "nack", "extend"]
Step = Literal["begin", "success", "failure"]


class TopicBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/topics."""

    name: str = ""
    partitions: int = 1


class ConsumeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """GET /v1/consume. With `max` or `wait_ms` it is a long poll, else a stream. `in_flight` is a stream's credit."""

    topic: str = ""
    group: str = ""
    owner: str = ""
    lease_ms: int | None = None
    in_flight: int | None = None
    max: int | None = None
    wait_ms: int | None = None


class SettleBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/ack."""

    topic: str = ""
    group: str = ""
    partition: int | None = None
    offset: int | None = None
    owner: str = ""


class NackBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/nack."""

    reason: str = ""


class ExtendBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/extend."""

    lease_ms: int | None = None


class IdempotencyBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/idempotency/begin, success and failure."""

    tenant_id: str = ""
    idempotency_key: str = ""
    error: str = ""


class Sizes(Struct, frozen=True, kw_only=True):
    """What one call may carry."""

    key_bytes_max: int = 4_096
    value_bytes_max: int = 1 << 20
    batch_lines_max: int = 1_000
    take_max: int = 1_000
    reader_in_flight_max: int = 1_000
    wait_ms_max: int = 60_000


T = TypeVar("T", bound=Struct)


def _without_null(sent: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sent.items() if value is not None}


def _contract(kind: type[T]) -> Contract[T]:
    return Contract(NAME, msgspec.json.Decoder(kind), mend=_without_null)


_TOPIC = _contract(TopicBody)
_CONSUME = _contract(ConsumeBody)
_IDEMPOTENCY = _contract(IdempotencyBody)
_SETTLE: dict[Act, Contract[Any]] = {
    "ack": _contract(SettleBody),
    "nack": _contract(NackBody),
    "extend": _contract(ExtendBody),
}
_KINDS: dict[Act, type[SettleBody]] = {"ack": SettleBody, "nack": NackBody, "extend": ExtendBody}


def _read(contract: Contract[T], kind: type[T], request: Request, wrong: Mapping[str, str] | None = None) -> T:
    """The fields of a call, from its body or its query."""
    if request.body:
        return _decode(contract, request.body)
    query = request.query
    fields = {name: query[name] for name in kind.__struct_fields__ if query.get(name)}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError:
        for name in fields:
            _convert(kind, name, fields[name], wrong or {})
        raise


def _decode(contract: Contract[T], body: bytes) -> T:
    value = contract.read(body)
    refuse_repeats(NAME, body, ENCODE(value), tight=False)
    return value


def _convert(kind: type[Struct], name: str, sent: str, wrong: Mapping[str, str]) -> None:
    """Say which parameter is wrong, in the words that clients know where there are such words."""
    try:
        msgspec.convert({name: sent}, kind, strict=False)
    except msgspec.ValidationError:
        raise ContractViolation(wrong.get(name) or f"invalid {name}", field=name) from None


def _count(value: int, name: str) -> int:
    if not -INT_MAX <= value <= INT_MAX:
        raise ContractViolation(f"invalid {name}", field=name)
    return value


def read_topic(request: Request, partitions_max: int) -> tuple[str, int]:
    """Name and partition count of a topic to be made."""
    sent = _read(_TOPIC, TopicBody, request)
    name = sent.name.strip()
    if not name:
        raise ContractViolation("name is required", field="name")
    check_name(name, "name")
    if not 1 <= sent.partitions <= partitions_max:
        raise ContractViolation("invalid partitions", field="partitions", hint=f"From 1 to {partitions_max}.")
    return name, sent.partitions


def read_name(sent: str) -> str:
    """A topic's name as a segment of the path."""
    return check_name(sent.strip(), "name")


def read_produce(request: Request, sizes: Sizes) -> ProduceBody:
    """One message, from the body or the query; the header Idempotency-Key is another name of the envelope's field."""
    body = decode_produce(request.body) if request.body else check_produce(_produce_of(request.query))
    key = request.headers.get(b"idempotency-key")
    if key is not None:
        body = _with_key(body, key)
    return check_sizes(with_trace(request, body), sizes)


def with_trace(request: Request, body: ProduceBody) -> ProduceBody:
    """The request's trace is that of its messages, unless they have one. A header that is no trace context counts as
    absent, as W3C asks."""
    sent = request.headers.get(b"traceparent")
    context = trace.parse_traceparent(sent.decode("latin-1")) if sent is not None else None
    if context is None or (body.envelope is not None and body.envelope.traceparent):
        return body
    envelope = msgspec.structs.replace(body.envelope or BrokerEnvelope(), traceparent=context.traceparent)
    return msgspec.structs.replace(body, envelope=envelope)


def _with_key(body: ProduceBody, sent: bytes) -> ProduceBody:
    try:
        key = sent.decode().strip()
    except UnicodeDecodeError:
        raise ContractViolation("the header Idempotency-Key is not UTF-8", field="idempotency-key") from None
    envelope = body.envelope or BrokerEnvelope()
    if not key or envelope.idempotency_key == key:
        return body
    if envelope.idempotency_key:
        raise ContractViolation(
            "the header Idempotency-Key differs from envelope.idempotency_key", field="envelope.idempotency_key"
        )
    return msgspec.structs.replace(body, envelope=msgspec.structs.replace(envelope, idempotency_key=key))


_POLICY = {
    "retry_max_attempts": "max_attempts",
    "retry_backoff_ms": "backoff_ms",
    "retry_max_backoff_ms": "max_backoff_ms",
}
_TEXTS = {
    "run_id": ("run_id",),
    "step_id": ("step_id",),
    "parent_step_id": ("parent_step_id",),
    "tenant_id": ("tenant_id", "tenant"),
    "idempotency_key": ("idempotency_key", "idem_key"),
    "target_topic": ("target_topic",),
    "traceparent": ("traceparent",),
}


def _produce_of(query: Mapping[str, str]) -> ProduceBody:
    """A message that came as parameters. An empty parameter is one that was not given."""
    fields: dict[str, Any] = {}
    for field, names in _TEXTS.items():
        given = [query[name] for name in names if query.get(name)]
        if given:
            fields[field] = given[0]
    if query.get("partition_override"):
        fields["partition_override"] = _number(query, "partition_override", "partition_override out of range")
    for name in DEADLINE_NAMES:
        if query.get(name):
            fields.setdefault("deadline", read_deadline(name, query[name]))
    policy = {field: _number(query, name) for name, field in _POLICY.items() if query.get(name)}
    if policy:
        fields["retry_policy"] = RetryPolicy(**policy)
    envelope = BrokerEnvelope(**fields) if fields else None
    return ProduceBody(
        topic=query.get("topic", ""), value=query.get("value", ""), key=query.get("key", ""), envelope=envelope
    )


def _number(query: Mapping[str, str], name: str, negative: str = "") -> int:
    try:
        number = msgspec.convert(query[name], int, strict=False)
    except msgspec.ValidationError:
        raise ContractViolation(f"invalid {name}", field=name) from None
    if not 0 <= number <= INT_MAX:
        raise ContractViolation(negative or f"invalid {name}", field=name)
    return number


def check_sizes(body: ProduceBody, sizes: Sizes) -> ProduceBody:
    """TooLarge over the limits of a key or a value."""
    if _is_longer(body.key, sizes.key_bytes_max):
        raise TooLarge(f"the key is larger than {sizes.key_bytes_max} bytes")
    if _is_longer(body.value, sizes.value_bytes_max):
        raise TooLarge(f"the value is larger than {sizes.value_bytes_max} bytes")
    return body


def _is_longer(text: str, bytes_max: int) -> bool:
    """Counted in UTF-8, encoded only where the number of characters leaves it open."""
    return len(text) > bytes_max // 4 and len(text.encode()) > bytes_max


_OWNED = "topic, group, and owner are required"


def _owned(topic: str, group: str, owner: str) -> tuple[str, str, str]:
    topic, group, owner = topic.strip(), group.strip(), owner.strip()
    if not (topic and group and owner):
        raise ContractViolation(_OWNED)
    return check_name(topic, "topic"), check_name(group, "group"), check_name(owner, "owner")


def _lease(sent: int | None, lease_ms_max: int) -> int:
    """0 stands for the default. A lease of nothing, or of for ever, is refused."""
    if sent is None:
        return 0
    if not 1 <= sent <= lease_ms_max:
        raise ContractViolation("invalid lease_ms", field="lease_ms", hint=f"From 1 to {lease_ms_max}.")
    return sent


class Taking(Struct, frozen=True):
    """A long poll: at most so many, at most so long."""

    messages_max: int
    wait_ms: int


def read_consume(request: Request, lease_ms_max: int, sizes: Sizes) -> tuple[Consume, Taking | None]:
    """Who wants messages, and whether they poll."""
    sent = _read(_CONSUME, ConsumeBody, request)
    topic, group, owner = _owned(sent.topic, sent.group, sent.owner)
    lease_ms = _lease(sent.lease_ms, lease_ms_max)
    if sent.max is None and sent.wait_ms is None:
        return Consume(topic, group, owner, lease_ms, _credit(sent.in_flight, sizes)), None
    if sent.in_flight is not None:
        raise ContractViolation("invalid in_flight", field="in_flight", hint="A long poll has max instead.")
    wanted = 1 if sent.max is None else sent.max
    wait_ms = 0 if sent.wait_ms is None else sent.wait_ms
    if not 1 <= wanted <= sizes.take_max:
        raise ContractViolation("invalid max", field="max", hint=f"From 1 to {sizes.take_max}.")
    if not 0 <= wait_ms <= sizes.wait_ms_max:
        raise ContractViolation("invalid wait_ms", field="wait_ms", hint=f"From 0 to {sizes.wait_ms_max}.")
    return Consume(topic, group, owner, lease_ms), Taking(wanted, wait_ms)


def _credit(sent: int | None, sizes: Sizes) -> int:
    """0 stands for the default."""
    if sent is None:
        return 0
    if not 1 <= sent <= sizes.reader_in_flight_max:
        hint = f"From 1 to {sizes.reader_in_flight_max}."
        raise ContractViolation("invalid in_flight", field="in_flight", hint=hint)
    return sent


def read_settle(request: Request, act: Act, lease_ms_max: int) -> Settle:
    """One settlement."""
    return _settle_of(_read(_SETTLE[act], _KINDS[act], request), act, lease_ms_max)


def _settle_of(sent: SettleBody, act: Act, lease_ms_max: int) -> Settle:
    topic, group, owner = _owned(sent.topic, sent.group, sent.owner)
    partition, offset = _position(sent)
    reason = sent.reason if isinstance(sent, NackBody) else ""
    lease_ms = _lease(sent.lease_ms, lease_ms_max) if isinstance(sent, ExtendBody) else 0
    return Settle(act, topic, group, partition, offset, owner, reason, lease_ms)


def _position(sent: SettleBody) -> tuple[int, int]:
    if sent.partition is None or sent.offset is None:
        raise ContractViolation("partition and offset are required")
    if not 0 <= sent.partition <= INT_MAX:
        raise ContractViolation("partition out of range", field="partition")
    if not 0 <= sent.offset <= INT_MAX:
        raise ContractViolation("message is not in-flight", field="offset")
    return sent.partition, sent.offset


def read_idempotency(request: Request, act: Step) -> Idempotency:
    """A step of a worker's helper."""
    sent = _read(_IDEMPOTENCY, IdempotencyBody, request)
    topic, group, owner = _owned(sent.topic, sent.group, sent.owner)
    partition, offset = _position(sent)
    if not sent.idempotency_key:
        raise ContractViolation("idempotency_key is required", field="idempotency_key")
    return Idempotency(act, topic, group, owner, partition, offset, sent.idempotency_key, sent.tenant_id, sent.error)


# ---- batches


def is_batch(request: Request) -> bool:
    """Whether the body holds one call per line."""
    sent = request.headers.get(b"content-type")
    return sent is not None and sent.partition(b";")[0].strip().lower() == BATCH_TYPE.encode()


def read_lines(request: Request, sizes: Sizes, read: Callable[[bytes], T]) -> list[T | OncewireError]:
    """Each line by itself: one that is wrong does not take the others along. Blank lines are not counted."""
    lines = [line for line in request.body.split(b"\n") if line and not line.isspace()]
    if not lines:
        raise ContractViolation("the body has no line", hint="One JSON object per line.")
    if len(lines) > sizes.batch_lines_max:
        raise TooLarge(f"the body has {len(lines)} lines, more than {sizes.batch_lines_max}")
    values: list[T | OncewireError] = []
    for line in lines:
        try:
            values.append(read(line))
        except Refused as error:
            values.append(error)
    return values


def read_produce_line(line: bytes, sizes: Sizes) -> ProduceBody:
    return check_sizes(decode_produce(line), sizes)


def read_settle_line(line: bytes, act: Act, lease_ms_max: int) -> Settle:
    return _settle_of(_decode(_SETTLE[act], line), act, lease_ms_max)


# ---- answers


class Failure(Struct, frozen=True, omit_defaults=True):
    """The error shape. `status` stands in the lines of a batch alone."""

    error: str
    message: str
    reason: str = ""
    retry_after_ms: int = 0
    status: int = 0


def failure_of(error: OncewireError, *, is_line: bool = False) -> tuple[int, Failure]:
    """What a caller gets for an error of the engine. A topic that is missing is no unknown path: 400."""
    status, code = answer_of(error)
    if status == 404:
        status, code = 400, "INVALID_ARGUMENT"
    message = error.message if status != 500 else "internal error"
    shown = status if is_line else 0
    if isinstance(error, Overloaded):
        reason = error.reason if isinstance(error, BufferFull) else "overloaded"
        retry_after_ms = max(1, round((error.retry_after_s or 1.0) * 1000))
        return status, Failure(code, message, reason, retry_after_ms, shown)
    return status, Failure(code, message, status=shown)


class ProducedLine(Struct, frozen=True, omit_defaults=True):
    """A line that was produced; a duplicate was there already."""

    status: str
    topic: str
    partition: int
    offset: int
    duplicate: bool = False


def produced_line(result: Produced | OncewireError) -> bytes:
    if isinstance(result, OncewireError):
        return ENCODE(failure_of(result, is_line=True)[1])
    return ENCODE(ProducedLine("produced", result.topic, result.partition, result.offset, result.is_duplicate))


_SETTLED: dict[Act, bytes] = {
    "ack": b'{"status":"acked"}',
    "nack": b'{"status":"nacked"}',
    "extend": b'{"status":"extended"}',
}


def settled_line(act: Act, result: OncewireError | None) -> bytes:
    return _SETTLED[act] if result is None else ENCODE(failure_of(result, is_line=True)[1])


def idempotency_answer(status: IdempotencyStatus) -> bytes:
    return ENCODE(status)
