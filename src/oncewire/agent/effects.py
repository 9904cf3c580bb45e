"""What a handler gives back, and how an effect becomes a message. Pure.

An effect's id is a hash of agent, input and place among the input's effects: whoever publishes it, however often, it is
the same message. Its envelope is derived from the input alone: time, trace, causation and correlation are carried on,
and nothing in it comes from the clock or from chance, so that a replay makes the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import msgspec

from oncewire._ground import native
from oncewire._ground.arguments import check_number, check_text, shown, wrong
from oncewire._ground.contracts import canonical, catalog, ids, inputs, runtime, subjects
from oncewire._ground.contracts.catalog import Family
from oncewire._ground.contracts.inputs import Input
from oncewire._ground.contracts.message import encode_message
from oncewire._ground.contracts.runtime import Actor, RuntimeEnvelope, SecurityContext
from oncewire._ground.contracts.runtime import Source as EnvelopeSource
from oncewire._ground.errors import ContractViolation, Refused
from oncewire._ground.ledger.rules import Delayed, Ledger, Sending

ADAPTER = "oncewire"
DELAY_S_MAX: Final = 366 * 24 * 3600
HEADERS_BYTES_MAX: Final = 15 * 1024
"""Of an effect's own headers; 16 KiB in all are sent."""
RESERVED_HEADERS: Final = ("nats-", "oncewire-dlq-", "oncewire-orig-", "oncewire-replay-")
"""The server acts on the first, our own readers on the others: the ledger sets them, or nobody does."""
_OURS: Final = (Family.LETTER, Family.REPLAY, Family.BLOCK, Family.ADVISORY)
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")


class Effect(msgspec.Struct, frozen=True):
    """A message that follows from handling an input. Return one, a list of them, or None.

    On `evt.`, `cmd.`, `sr.` and the platform's subjects the payload is put into the envelope of that subject. `type`
    defaults to the subject without what says where it belongs: `billing.charged` on `evt.acme.demo.billing.charged`,
    `iteration` on `sr.events.iteration`. Elsewhere the payload goes out as JSON, bytes as they are. `headers` are sent
    with it; those that begin with `Nats-` are the server's and refused.
    """

    subject: str
    payload: Any
    type: str = ""
    delay_s: float = 0.0
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Most have a subject and a payload alone, and the subject was seen before: that must cost nearly nothing."""
        is_usual = self.type == "" and self.delay_s == 0.0 and self.headers is None
        if not is_usual or type(self.subject) is not str or not _is_subject(self.subject):
            _check(self)


def _check(effect: Effect) -> None:
    """Each argument, and in place of what only behaves like text or a dict the text or the dict itself."""
    keep = msgspec.structs.force_setattr
    keep(effect, "subject", check_text("Effect", "subject", effect.subject))
    keep(effect, "type", check_text("Effect", "type", effect.type))
    _is_subject(effect.subject)
    check_number("Effect", "delay_s", effect.delay_s, 0, DELAY_S_MAX, "seconds")
    if effect.headers is not None:
        keep(effect, "headers", _checked_headers(effect.headers))


@lru_cache(maxsize=16384)
def _is_subject(subject: str) -> bool:
    check_text("Effect", "subject", subject)
    try:
        subjects.check_subject(subject)
    except ContractViolation as violation:
        raise ContractViolation(f"Effect: {violation.message}", field="subject", hint=violation.hint) from None
    return True


def _checked_headers(given: object) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise wrong("Effect", "headers", given, "is not a mapping of text to text")
    checked = {
        check_text("Effect", "headers", name): check_text("Effect", f"headers[{name!r}]", value)
        for name, value in given.items()
    }
    for name, value in checked.items():
        if not _HEADER_NAME.fullmatch(name):
            raise wrong("Effect", "headers", name, "is not the name of a header", "Use letters, digits and '-'.")
        if name.lower().startswith(RESERVED_HEADERS):
            raise wrong(
                "Effect", "headers", name, "is a name that the server or the ledger sets", "Use a name of your own."
            )
        if any(sign in value for sign in "\r\n\0"):
            raise wrong(
                "Effect", f"headers[{name!r}]", value, "has a line break or NUL", "Put such text into the payload."
            )
    size = sum(len(name) + len(value.encode()) + 4 for name, value in checked.items())
    if size > HEADERS_BYTES_MAX:
        raise ContractViolation(
            f"Effect: headers take {size} bytes, {HEADERS_BYTES_MAX} are allowed",
            field="headers",
            hint="Put large content into the payload.",
        )
    return checked


def check_target(subject: str) -> None:
    """An effect goes where users publish, never into what Oncewire writes about itself."""
    if catalog.family(subject) in _OURS:
        raise ContractViolation(
            f"an effect goes to {subject}, where only Oncewire itself writes",
            field="subject",
            hint="To make a dead letter of the input, raise Terminate.",
        )


def no_confirmation(subject: str, stream: str) -> ContractViolation:
    """An effect is done when its stream has confirmed it. This one never would."""
    return ContractViolation(
        f"an effect goes to {subject}, but its stream {stream} is no_ack: it confirms nothing",
        field="subject",
        hint="Ask questions with `client.request`; send everything else on another subject.",
    )


class Retry(Exception):
    """Raise it to get the input again: `Retry("the bank is closed")`, `Retry(30)`, `Retry(timedelta(minutes=5))`,
    `Retry(30, "the bank is closed")`. Seconds are from 0 to 366 days; without them the delay grows with the deliveries.
    """

    def __init__(self, after_s: float | timedelta | str | None = None, reason: str = "") -> None:
        named = isinstance(after_s, str) and not reason
        super().__init__(_reason("Retry", after_s if named else reason) or "retry")
        self._after_s = None if named else _seconds("Retry", "after_s", after_s)

    @property
    def after_s(self) -> float | None:
        return self._after_s


class Terminate(Exception):
    """Raise it to give the input up at once: it becomes a dead letter with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(_reason("Terminate", reason))
        self.reason = reason


def _reason(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise Refused(f"{what}: reason is text, not {shown(value)}")
    return value


def _seconds(what: str, argument: str, value: object) -> float | None:
    """A time to wait, checked where it is named: a server that cannot read a delay does not wait at all."""
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    if 0 <= seconds <= DELAY_S_MAX:
        return float(seconds)
    raise Refused(
        f"{what}: {argument} is a number of seconds from 0 to {DELAY_S_MAX} (366 days) or a timedelta,"
        f" not {shown(value)}",
        hint=f'{what}("why") names a reason, {what}(30, "why") both.',
    )


def effects_of(returned: object) -> list[Effect]:
    """What a handler returned, as a list; anything else is a bug of the handler."""
    if isinstance(returned, Effect):
        return [returned]
    if returned is None:
        return []
    found: list[Effect] = []
    for one in returned if isinstance(returned, list | tuple) else [returned]:
        if not isinstance(one, Effect):
            raise ContractViolation(
                f"a handler returned {type(one).__name__}", hint="Return an Effect, a list of Effects, or None."
            )
        found.append(one)
    return found


class Plain(msgspec.Struct, frozen=True, gc=False):
    """An effect whose payload is written; its id and its envelope follow for all of a batch at once (`finished`)."""

    cause: Input
    index: int
    subject: str
    stream: str
    around: runtime.Frame
    payload: bytes


def plain_of(effect: Effect, cause: Input, index: int, stream: str, around: runtime.Frame) -> Plain | None:
    """An effect as most are. None: it takes `sending_of`. The payload is written now: a handler may change it later."""
    payload = effect.payload
    if type(payload) is not dict or effect.headers or effect.delay_s:
        return None
    written = runtime.write_plain(payload, cause.envelope)
    return Plain(cause, index, effect.subject, stream, around, written) if written is not None else None


def message_of(effect: Effect, ledger: Ledger, cause: Input, index: int, stream: str) -> Plain | Sending:
    """Any effect, as a batch takes it; `finished` makes messages of all of them."""
    around = frame_of(ledger, effect.subject, effect.type)
    plain = plain_of(effect, cause, index, stream, around) if around is not None else None
    return plain or sending_of(effect, ledger, cause, index, stream)


def finished(ledger: Ledger, effects: Sequence[Sending | Plain]) -> list[Sending]:
    """The messages of a batch's effects, in their order."""
    plain = [one for one in effects if type(one) is Plain]
    made = _compiled(ledger, plain) or _made(ledger, plain)
    if len(made) == len(effects):
        return made
    left = iter(made)
    return [one if isinstance(one, Sending) else next(left) for one in effects]


def _made(ledger: Ledger, plain: list[Plain]) -> list[Sending]:
    ids_ = ids.effect_ids(
        ledger.tenant, ledger.workspace, ledger.agent, [(one.cause.identity, one.index) for one in plain]
    )
    bodies = runtime.write_all_caused(
        [(one.around, one.payload, id_, _span(id_), one.cause.envelope) for one, id_ in zip(plain, ids_, strict=True)]
    )
    return [
        Sending(id_, one.subject, body, None, one.stream, f"00-{one.cause.envelope.trace_id}-{_span(id_)}-01")
        for one, id_, body in zip(plain, ids_, bodies, strict=True)
    ]


def _compiled(ledger: Ledger, plain: list[Plain]) -> list[Sending] | None:
    """The same at a quarter of the cost. None: one of them has an id that JSON escapes, or nothing is compiled."""
    if native.caused is None:
        return None
    begin = ids.effects_begin(ledger.tenant, ledger.workspace, ledger.agent).encode()
    return native.caused(plain, begin, Sending, Plain, Input, RuntimeEnvelope)


def sending_of(effect: Effect, ledger: Ledger, cause: Input, index: int, stream: str) -> Sending:
    """The message of any effect, under its stable id: on `sr.>` that is its idempotency key."""
    id_ = ids.effect_id(ledger.tenant, ledger.workspace, ledger.agent, cause.identity, index)
    own_headers = dict(effect.headers) if effect.headers else None
    trace = f"00-{cause.envelope.trace_id}-{_span(id_)}-01"
    body, key = _written(effect, ledger, cause.envelope, id_)
    msg_id = key if effect.subject.startswith("sr.") else id_
    return Sending(msg_id, effect.subject, body, own_headers, stream, trace)


def delayed_of(effect: Effect, sending: Sending, now_ms: int) -> Delayed:
    return Delayed(now_ms + int(effect.delay_s * 1000), sending)


def _span(id_: str) -> str:
    return id_[-16:]


@lru_cache(maxsize=4096)
def _carried_on(subject: str, tenant: str, workspace: str) -> tuple[Family | None, subjects.Address]:
    """The envelope that a subject carries, and the owner that the envelope names."""
    found = catalog.family(subject)
    if found is Family.RUNTIME:
        return found, subjects.parse(subject)
    tokens = subject.split(".")
    return found, subjects.Address("", tenant, workspace, tuple(tokens[2:] or tokens[-1:]))


@lru_cache(maxsize=4096)
def frame_of(ledger: Ledger, subject: str, type_: str) -> runtime.Frame | None:
    """What is the same for all effects of an agent on a subject, written and checked once; None: another envelope."""
    found, address = _carried_on(subject, ledger.tenant, ledger.workspace)
    if found is not Family.RUNTIME:
        return None
    agent = ledger.agent
    return runtime.frame(
        type_ or ".".join(address.rest),
        tenant=address.tenant,
        workspace=address.workspace,
        actor=Actor(agent, "agent"),
        source=EnvelopeSource(agent, ADAPTER),
        security_context=SecurityContext(agent, "agent"),
    )


def _written(effect: Effect, ledger: Ledger, input_: RuntimeEnvelope, id_: str) -> tuple[bytes, str]:
    """The body, and its idempotency key."""
    found, address = _carried_on(effect.subject, ledger.tenant, ledger.workspace)
    if found is Family.RUNTIME:
        return runtime.encode_runtime(_envelope(effect, ledger.agent, input_, id_, address)), id_
    if found is Family.MESSAGE:
        sent = inputs.as_message(_envelope(effect, ledger.agent, input_, id_, address))
        return encode_message(sent), sent.idempotency_key
    return _json(effect.payload), id_


def _envelope(
    effect: Effect, agent: str, input_: RuntimeEnvelope, id_: str, address: subjects.Address
) -> RuntimeEnvelope:
    return RuntimeEnvelope(
        id=id_,
        ts=input_.ts,
        schema_version=runtime.VERSION,
        type=effect.type or ".".join(address.rest),
        trace_id=input_.trace_id,
        span_id=_span(id_),
        tenant=address.tenant,
        workspace=address.workspace,
        actor=Actor(agent, "agent"),
        payload=_payload(effect.payload),
        idempotency_key=id_,
        source=EnvelopeSource(agent, ADAPTER),
        security_context=SecurityContext(agent, "agent"),
        causation_id=input_.id,
        correlation_id=input_.correlation_id or input_.id,
    )


def _json(payload: Any) -> bytes:
    """The body of a message that has no envelope."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    is_json = payload is None or isinstance(payload, dict | list | tuple | str | int | float)
    built = payload if is_json else _to_builtins(payload)
    try:
        canonical.canonical(built)
    except ContractViolation as found:
        raise ContractViolation(f"an effect's payload: {found.message}", field="payload", hint=found.hint) from None
    return msgspec.json.encode(built)


def _payload(payload: Any) -> dict[str, Any]:
    built = payload if isinstance(payload, dict) else _to_builtins(payload)
    if not isinstance(built, dict):
        raise ContractViolation(f"an effect's payload must be an object, not {type(payload).__name__}", field="payload")
    return built


def _to_builtins(payload: Any) -> Any:
    if hasattr(payload, "model_dump"):
        return payload.model_dump(mode="json")
    try:
        return msgspec.to_builtins(payload, order="deterministic")  # a set has another order in each process
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractViolation(f"an effect's payload cannot be written: {error}", field="payload") from None


def derived_hex(identity: str, name: str, digits: int = 32) -> str:
    """Hex digits that depend on the input and a name alone: ids and keys that a second run makes again."""
    text = f"{len(name)}:{name}{identity}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:digits]
