"""What a producer may publish where, and under which id.

On a subject of the contracts a message is checked before it goes out as its readers check it: what they would refuse is
refused here, where somebody can still mend it. And it gets an id, so that the server drops a repeat:

    sr.> and the platform's subjects      its idempotency key
    evt.> and cmd.>                       `in.` and a hash of subject, key and content, if it has a key or an id
    chat.>, and subjects of no contract   none

Dead letters are written by the dead-letter service alone, so `dlq.>` is nobody else's to publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from oncewire._ground.contracts import catalog, ids, inputs, message, realtime, runtime, subjects
from oncewire._ground.contracts.canonical import canonical
from oncewire._ground.contracts.catalog import Family
from oncewire._ground.contracts.inputs import Input
from oncewire._ground.contracts.message import MessageEnvelope
from oncewire._ground.contracts.runtime import RuntimeEnvelope
from oncewire._ground.errors import ContractViolation, Refused

Envelope = MessageEnvelope | RuntimeEnvelope
_CHECKED = frozenset({Family.RUNTIME, Family.MESSAGE, Family.REALTIME})
_family = lru_cache(maxsize=4096)(catalog.family)


def has_contract(subject: str) -> bool:
    """Whether what is published there is checked."""
    return _family(subject) in _CHECKED


def refuse_reserved(subject: str) -> None:
    """ContractViolation for a subject that only the dead-letter service writes."""
    if subject.startswith("dlq.") or subject == subjects.DLQ_PREFIX:
        raise ContractViolation(
            f"{subject} is for dead letters, which the dead-letter service alone writes",
            field="subject",
            hint="Raise Terminate in a handler, or use `oncewire dlq inject --testing`.",
        )


def message_id(subject: str, body: bytes) -> str:
    """The `Nats-Msg-Id` of a message, '' where it has none; ContractViolation if its readers would refuse it."""
    match _family(subject):
        case Family.RUNTIME:
            wire, _, written = runtime.check_runtime(body)
            address, key = runtime.check_named(wire, subject), wire.idempotency_key or wire.id
            digest = ids.content_digest(wire.type, written)
            return ids.input_id(address.tenant, address.workspace, subject, key, digest) if key else ""
        case Family.MESSAGE:
            sent = message.decode_message(body)
            inputs.view(sent, {})
            return sent.idempotency_key
        case Family.REALTIME:
            realtime.decode_realtime(body)
    return ""


def message_ids(subjects_: Sequence[str], bodies: Sequence[bytes]) -> list[str | Refused]:
    """What `message_id` gives or raises for each; for runtime envelopes that are complete at a fraction of the cost."""
    try:
        complete: Sequence[Input | None] = inputs.read_all_complete(bodies, subjects_)
    except ContractViolation:  # one of them: it is found when each is looked at alone
        complete = [None] * len(bodies)
    found: list[str | Refused] = [
        "" if one is not None else _id_or_error(subject, body)
        for subject, body, one in zip(subjects_, bodies, complete, strict=True)
    ]
    by_subject: dict[str, list[int]] = {}
    for at, one in enumerate(complete):
        if one is not None:
            by_subject.setdefault(subjects_[at], []).append(at)
    for subject, places in by_subject.items():
        mine = [one for at in places if (one := complete[at]) is not None]
        for at, id_ in zip(places, _runtime_ids(subject, mine), strict=True):
            found[at] = id_
    return found


def _runtime_ids(subject: str, found: Sequence[Input]) -> list[str]:
    address, keys = subjects.parse(subject), [one.envelope.idempotency_key for one in found]
    return ids.input_ids(address.tenant, address.workspace, subject, keys, [one.digest for one in found])


def _id_or_error(subject: str, body: bytes) -> str | Refused:
    try:
        return message_id(subject, body)
    except Refused as wrong:
        return wrong


def envelope_id(subject: str, envelope: Envelope, body: bytes) -> str:
    """The same for an envelope that was checked when it was written as `body`, all but its subject."""
    is_runtime = isinstance(envelope, RuntimeEnvelope)
    if _family(subject) is not (Family.RUNTIME if is_runtime else Family.MESSAGE):
        return message_id(subject, body) if has_contract(subject) else id_of(subject, envelope)
    if isinstance(envelope, RuntimeEnvelope):
        runtime.check_named(envelope, subject)
    else:
        inputs.view(envelope, {})
    return id_of(subject, envelope)


def id_of(subject: str, envelope: Envelope) -> str:
    """The id that an envelope brings to any subject."""
    if isinstance(envelope, MessageEnvelope):
        return envelope.idempotency_key
    digest = ids.content_digest(envelope.type, canonical(envelope.payload))
    return ids.input_id(envelope.tenant, envelope.workspace, subject, envelope.idempotency_key, digest)
