"""Identities, digests and message ids: who is the same as whom.

Every id is a hash over its parts as a JSON array, so that no two lists of parts give one text: with less in it, or
joined by a separator, messages swallow each other. Ids are SHA-256 cut to 160 bits.

Identities (`…_identity`) are what a ledger remembers. Each begins with a word for its kind: a key that a producer
chose can never pass for a position or for a chat message. Keys and ids of producers count within the tenant and the
workspace of their message, so both are part of the identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from oncewire._ground.contracts import hashes
from oncewire._ground.contracts.canonical import canonical
from oncewire._ground.errors import ContractViolation

_HEX_CHARS = 40
_TEXT = msgspec.json.Encoder().encode
_TEXT_LINES = msgspec.json.Encoder().encode_lines


class Origin(NamedTuple):
    """Where a message stands: its position, and the times that tell a recreated or restored stream from the old one."""

    stream: str
    created_ns: int
    sequence: int
    timestamp_ns: int


def _array(*parts: str | int) -> bytes:
    """The parts as one text; different lists never give the same."""
    return _text(parts)


def _text(value: str | tuple[str | int, ...]) -> bytes:
    try:
        return _TEXT(value)
    except UnicodeEncodeError:
        raise _surrogate(value) from None


def _texts(values: list[Any]) -> list[bytes]:
    try:
        return _TEXT_LINES(values).splitlines()
    except UnicodeEncodeError:
        raise _surrogate(values) from None


def _surrogate(value: object) -> ContractViolation:
    return ContractViolation(f"a part of an id has a lone surrogate: {value!r}")


def joined(kind: str, *parts: str | int) -> str:
    """An identity of several parts."""
    return f"{kind}:{_array(*parts).decode()}"


def _hashed(kind: str, *parts: str | int) -> str:
    return f"{kind}.{hashlib.sha256(_array(kind, *parts)).hexdigest()[:_HEX_CHARS]}"


def effect_id(tenant: str, workspace: str, agent: str, identity: str, index: int) -> str:
    """`Nats-Msg-Id` of the effect number `index` of one input of an agent."""
    return effect_ids(tenant, workspace, agent, [(identity, index)])[0]


def effect_ids(tenant: str, workspace: str, agent: str, effects: Sequence[tuple[str, int]]) -> list[str]:
    """The ids of many effects of an agent, by the identity of the input and the effect's number."""
    begin = effects_begin(tenant, workspace, agent)
    texts = _texts([identity for identity, _ in effects])
    digests = hashes.sha256_all(begin, (b",", texts, b",", [index for _, index in effects], b"]"))
    return ["fx." + digest[: _HEX_CHARS // 2].hex() for digest in digests]


@lru_cache(maxsize=256)
def effects_begin(tenant: str, workspace: str, agent: str) -> str:
    """What the ids of all effects of an agent begin with: an array that is not closed yet."""
    return _array("fx", tenant, workspace, agent)[:-1].decode()


def input_id(tenant: str, workspace: str, subject: str, idempotency_key: str, digest: bytes) -> str:
    """`Nats-Msg-Id` of a message that a client publishes to `evt.>` or `cmd.>`."""
    return _hashed("in", tenant, workspace, subject, idempotency_key, digest.hex())


def input_ids(
    tenant: str, workspace: str, subject: str, idempotency_keys: Sequence[str], digests: Sequence[bytes]
) -> list[str]:
    """The same for many messages on one subject."""
    begin = _array("in", tenant, workspace, subject)[:-1].decode()
    keys, contents = _texts(list(idempotency_keys)), [digest.hex() for digest in digests]
    hashed = hashes.sha256_all(begin, (b",", keys, b',"', contents, b'"]'))
    return ["in." + one[: _HEX_CHARS // 2].hex() for one in hashed]


def letter_id(origin: Origin, consumer: str) -> str:
    """`Nats-Msg-Id` of the one dead letter that a message can have for a consumer."""
    return _hashed("dl", *origin, consumer)


def replay_id(letter: str, generation: int) -> str:
    """`Nats-Msg-Id` of the replay number `generation` of a letter, which is named by its own id."""
    return _hashed("rp", letter, generation)


def origin_id(origin: Origin) -> str:
    """The id of a message whose producer gave it none."""
    return _hashed("at", *origin)


def content_digest(message_type: str, canonical_payload: bytes) -> bytes:
    """SHA-256 over the canonical form of type and payload: whether two messages say the same."""
    return hashlib.sha256(b'{"payload":%b%b' % (canonical_payload, _type_ending(message_type))).digest()


def content_digests(types: Sequence[str], canonical_payloads: Sequence[bytes]) -> list[bytes]:
    """The digests of many messages, by type and canonical payload."""
    return hashes.sha256_all('{"payload":', (list(canonical_payloads), list(map(_type_ending, types))))


@lru_cache(maxsize=1024)
def _type_ending(message_type: str) -> bytes:
    return b',"type":%b}' % _TEXT(message_type)


def idempotency_key(message_type: str, message_id: str, payload: dict[str, object]) -> str:
    """The key of a MessageEnvelope: `sha256:` + hex over the canonical JSON of the three."""
    named = {"message_type": message_type, "message_id": message_id, "payload": payload}
    return f"sha256:{hashlib.sha256(canonical(named)).hexdigest()}"


Owner = tuple[str, str]
"""Tenant and workspace of a message."""


def key_identity(owner: Owner, key: str) -> str:
    """On `sr.>`, `evt.>`, `cmd.>`: the idempotency key."""
    return _owned("key", owner) + key


def key_identities(tenants: Sequence[str], workspaces: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The same for many messages: nearly always those of a batch have one owner."""
    if keys and tenants.count(tenants[0]) == workspaces.count(workspaces[0]) == len(keys):
        begin = _owned("key", (tenants[0], workspaces[0]))
        return [begin + key for key in keys]
    return [_owned("key", (tenant, at)) + key for tenant, at, key in zip(tenants, workspaces, keys, strict=True)]


def event_identity(owner: Owner, message_id: str) -> str:
    """On the platform's subjects: the message id, which they also call event_id."""
    return _owned("id", owner) + message_id


def _owned(kind: str, owner: Owner) -> str:
    """`kind:tenant/workspace/`. A slash inside either name is escaped, so that the third part begins in one place. Not
    JSON: its quotes would be escaped again in every hash over an identity."""
    tenant, workspace = owner
    return f"{kind}:{_escaped(tenant)}/{_escaped(workspace)}/"


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


def position_identity(origin: Origin) -> str:
    """Where nothing in the message tells it apart."""
    return joined("at", *origin)


def produce_identity(tenant: str, requested_topic: str, key: str) -> str:
    return joined("produce", tenant, requested_topic, key)


def consume_identity(tenant: str, requested_topic: str, key: str, group: str) -> str:
    return joined("consume", tenant, requested_topic, key, group)
