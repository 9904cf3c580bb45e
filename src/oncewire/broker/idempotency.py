"""Who may do a thing again: the idempotency registry, on both sides of the queue. Pure.

Producers and workers are asked different questions about the same key, so each side has entries of its own: a message
that was stored once must still be worked on.

    side       identity                                  PENDING while            COMMITTED lives
    producer   tenant, requested topic, tenant_id, key   its record is not durable  for the TTL
    worker     topic, group, tenant_id, key              its owner has the lease    as its message, at least the TTL

A producer's PENDING is never written: the message and its COMMITTED are one record. If that record fails, the entry is
gone, which is FAILED without a trace. A worker's steps are written each, and a PENDING found at a start is FAILED: the
lease that it stood on did not survive.

TRANSITIONS says what a step makes of an entry. A step that is not in it is refused: the key is in flight elsewhere.
COMMITTED is the end: a late failure does not undo it.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

from oncewire.broker.engine import Idempotency

ABSENT: Final = 0
PENDING: Final = 1
COMMITTED: Final = 2
FAILED: Final = 3

NAMES: Final[dict[int, Literal["PENDING", "COMMITTED", "FAILED"]]] = {
    PENDING: "PENDING",
    COMMITTED: "COMMITTED",
    FAILED: "FAILED",
}

ELSEWHERE: Final = 4
"""PENDING for another delivery that is still leased to its owner."""

TRANSITIONS: Final[dict[tuple[int, str], int]] = {
    (ABSENT, "begin"): PENDING,
    (ABSENT, "success"): COMMITTED,
    (ABSENT, "failure"): FAILED,
    (PENDING, "begin"): PENDING,
    (PENDING, "success"): COMMITTED,
    (PENDING, "failure"): FAILED,
    (FAILED, "begin"): PENDING,
    (FAILED, "success"): COMMITTED,
    (FAILED, "failure"): FAILED,
    (COMMITTED, "begin"): COMMITTED,
    (COMMITTED, "success"): COMMITTED,
    (COMMITTED, "failure"): COMMITTED,
}

RESTARTED: Final = "the broker was restarted"


def identity_of(tenant_id: str, key: str) -> bytes:
    """16 bytes that stand for the pair; the length in front keeps ("a", "bc") and ("ab", "c") apart."""
    tenant = tenant_id.encode()
    return blake2b(len(tenant).to_bytes(4, "little") + tenant + key.encode(), digest_size=16).digest()


class Holder(NamedTuple):
    """A delivery, and whose it is."""

    partition: int
    offset: int
    owner: str


class Claim(NamedTuple):
    """A step of a worker, by the identity of its key."""

    act: Literal["begin", "success", "failure"]
    identity: bytes
    holder: Holder
    error: str = ""


def claim_of(request: Idempotency) -> Claim:
    identity = identity_of(request.tenant_id, request.idempotency_key)
    holder = Holder(request.partition, request.offset, request.owner)
    return Claim(request.act, identity, holder, request.error)


class Work:
    """A worker's entry. It is looked at again at `check_at_ms`, and then forgotten unless its message keeps it."""

    __slots__ = ("check_at_ms", "last_error", "offset", "owner", "partition", "status")

    def __init__(self, status: int, owner: str, partition: int, offset: int, check_at_ms: int, last_error: str) -> None:
        self.status = status
        self.owner = owner
        self.partition = partition
        self.offset = offset
        self.check_at_ms = check_at_ms
        self.last_error = last_error


Produced = OrderedDict[bytes, int]
"""A topic's keys in the order of their expiry, with when that is."""
Worked = OrderedDict[bytes, Work]
"""A group's entries in the order of `check_at_ms`."""


def forget_produced(entries: Produced, now_ms: int, count_max: int) -> int:
    """Drop what has expired, a bounded number at a time; returns how many."""
    dropped = 0
    while entries and dropped < count_max:
        identity, expires_at_ms = next(iter(entries.items()))
        if expires_at_ms > now_ms:
            break
        del entries[identity]
        dropped += 1
    return dropped
