"""What an agent reads: one shape for both envelopes, with the identity and the digest that the ledger needs.

A handler sees a RuntimeEnvelope whatever the wire carried: HUMAN is a user, AGENT an agent, SYSTEM a system or a
service; `timestamp` is `ts`; the tenant of a MessageEnvelope is its `payload.tenant_id`, else `default`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from msgspec import Struct

from oncewire._ground.contracts import catalog, ids, message, runtime, subjects, trace
from oncewire._ground.contracts.headers import Headers
from oncewire._ground.contracts.message import ActorKind, MessageEnvelope
from oncewire._ground.contracts.runtime import Actor, PrincipalType, RuntimeEnvelope, SecurityContext
from oncewire._ground.errors import ContractViolation
from oncewire._ground.fields import columns

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_ROLE: dict[ActorKind, PrincipalType] = {"HUMAN": "user", "AGENT": "agent", "SYSTEM": "system"}
_KIND: dict[str, ActorKind] = {"user": "HUMAN", "agent": "AGENT", "system": "SYSTEM", "service": "SYSTEM"}


class Input(Struct, frozen=True, gc=False):
    """A message, ready for a handler. `digest` is over type and payload: what it says, not where it stands."""

    envelope: RuntimeEnvelope
    identity: str
    digest: bytes


_family = lru_cache(maxsize=4096)(catalog.family)


def read_input(body: bytes, *, subject: str, origin: ids.Origin, carried: Headers) -> Input:
    """Read a message of an agent's stream by the contract of its subject, or ContractViolation."""
    return read_complete(body, subject) or read_closely(body, subject=subject, origin=origin, carried=carried)


def read_complete(body: bytes, subject: str) -> Input | None:
    """A message that needs nothing from where it stands and from what it carried: what most are. None: look closer."""
    return read_all_complete((body,), (subject,))[0]


def read_all_complete(bodies: Sequence[bytes], subjects_: Sequence[str]) -> list[Input | None]:
    """What `read_complete` gives for each, at half the cost."""
    addresses: list[Any] = list(map(_address, subjects_))
    if all(addresses):
        found, payloads = runtime.open_all_complete(bodies, addresses)
        if all(found):
            return [*_whole(found, payloads)]
        inputs = iter(_whole([one for one in found if one is not None], payloads))
        return [next(inputs) if one is not None else None for one in found]
    there = [at for at, address in enumerate(addresses) if address is not None]
    some = read_all_complete([bodies[at] for at in there], [subjects_[at] for at in there])
    by_place = dict(zip(there, some, strict=True))
    return [by_place.get(at) for at in range(len(bodies))]


def _whole(envelopes: Sequence[Any], payloads: Sequence[bytes]) -> list[Input]:
    types, *named = columns(envelopes, RuntimeEnvelope, "type", "tenant", "workspace", "idempotency_key")
    return list(map(Input, envelopes, ids.key_identities(*named), ids.content_digests(types, payloads)))


@lru_cache(maxsize=4096)
def _address(subject: str) -> subjects.Address | None:
    """Where a subject leads, None when its messages must be looked at closely."""
    if catalog.family(subject) is not catalog.Family.RUNTIME:
        return None
    try:
        return subjects.parse(subject)
    except ContractViolation:
        return None


def read_closely(body: bytes, *, subject: str, origin: ids.Origin, carried: Headers) -> Input:
    """Any message, what it leaves out filled in."""
    match _family(subject):
        case catalog.Family.RUNTIME:
            envelope, written = runtime.open_runtime(body, subject=subject, origin=origin, carried=carried)
        case catalog.Family.MESSAGE:
            sent, written = message.open_message(body)
            envelope = view(sent, carried)
        case _:
            raise ContractViolation(
                f"no envelope for agents is carried on {subject!r}",
                field="subject",
                hint="Agents read evt.>, cmd.>, sr.> and the platform's subjects.",
            )
    return Input(envelope, identity_of(subject, envelope), ids.content_digest(envelope.type, written))


def identity_of(subject: str, envelope: RuntimeEnvelope) -> str:
    """What makes a message the same message: its id on the platform's subjects, elsewhere its idempotency key. Either
    counts within its tenant and workspace."""
    owner = (envelope.tenant, envelope.workspace)
    if _family(subject) is catalog.Family.MESSAGE and not subject.startswith("sr."):
        return ids.event_identity(owner, envelope.id)
    return ids.key_identity(owner, envelope.idempotency_key)


def view(envelope: MessageEnvelope, carried: Headers) -> RuntimeEnvelope:
    """A MessageEnvelope in the one shape that handlers see."""
    role = _ROLE[envelope.actor_kind]
    context = trace.extract(carried) or trace.begun_by(envelope.message_id)
    return RuntimeEnvelope(
        id=envelope.message_id,
        ts=(envelope.timestamp - _EPOCH) // _MS,
        type=envelope.message_type,
        schema_version=runtime.VERSION,
        trace_id=context.trace_id,
        span_id=context.span_id,
        tenant=_tenant(envelope.payload),
        workspace=subjects.DEFAULT_WORKSPACE,
        actor=Actor(envelope.actor_id, role),
        payload=envelope.payload,
        idempotency_key=envelope.idempotency_key,
        source=runtime.NO_SOURCE,
        security_context=SecurityContext(envelope.actor_id, role),
        causation_id=envelope.causation_id,
        correlation_id=envelope.correlation_id,
    )


def _tenant(payload: dict[str, Any]) -> str:
    tenant = payload.get("tenant_id")
    if tenant is None or tenant == "":
        return subjects.DEFAULT_TENANT
    if not isinstance(tenant, str):
        # Falling back to the default here would mix one tenant's messages into another's.
        raise ContractViolation("MessageEnvelope: payload.tenant_id: must be text", field="payload.tenant_id")
    return tenant


def as_message(envelope: RuntimeEnvelope) -> MessageEnvelope:
    """The way back, for effects that go to `sr.>` or the platform: services and systems are both SYSTEM."""
    return message.new_message(
        envelope.type,
        envelope.payload,
        message_id=envelope.id,
        timestamp=_EPOCH + envelope.ts * _MS,
        actor_id=envelope.actor.id,
        actor_kind=_KIND[envelope.security_context.principal_type],
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
    )
