"""What nodes say to each other, as bytes. Pure.

A request names a partition's topic by its number; an answer is a value or a failure. Errors travel by their class, so
that the node that was asked answers its client as the owner would.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody, Routing
from oncewire._ground.errors import (
    Conflict,
    ContractViolation,
    Corrupt,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    Overloaded,
    Refused,
    TooLarge,
    Unavailable,
)
from oncewire.broker.engine import (
    BufferFull,
    Consume,
    GroupShown,
    Idempotency,
    IdempotencyStatus,
    PartitionShown,
    Produced,
    Settle,
    TooManyReaders,
)
from oncewire.broker.idempotency import Claim, Holder
from oncewire.broker.jetstream.loans import Account


class Produce(Struct, array_like=True, frozen=True, tag="produce"):
    number: int
    partition: int
    requested: int
    body: ProduceBody
    envelope: BrokerEnvelope | None
    routing: Routing | None


class Settling(Struct, array_like=True, frozen=True, tag="settle"):
    number: int
    partition: int
    settle: Settle


class Mark(Struct, array_like=True, frozen=True, tag="mark"):
    number: int
    partition: int
    step: Idempotency


class Keep(Struct, array_like=True, frozen=True, tag="keep"):
    """A worker's step, to the partition that keeps its key's entry."""

    number: int
    partition: int
    group: str
    claim: Claim


class Ask(Struct, array_like=True, frozen=True, tag="ask"):
    """Whether a delivery of the partition is leased."""

    number: int
    partition: int
    group: str
    holder: Holder


class Letter(Struct, array_like=True, frozen=True, tag="letter"):
    number: int
    partition: int
    identity: bytes
    size: int
    body: bytes


class Show(Struct, array_like=True, frozen=True, tag="show"):
    number: int
    partition: int


class Join(Struct, array_like=True, frozen=True, tag="join"):
    """A reader of the asking node is one of the partition's. Its credit follows."""

    number: int
    partition: int
    reader: int
    consume: Consume


class Lend(Struct, array_like=True, frozen=True, tag="lend"):
    """A reader of the asking node may hold so many deliveries of the asked one's."""

    reader: int
    limit: int
    is_all: bool
    is_late: bool
    lots: int
    """How many have come to it from there."""
    room: int
    """What it takes of the next one."""


class Leave(Struct, array_like=True, frozen=True, tag="leave"):
    reader: int


class HandOver(Struct, array_like=True, frozen=True, tag="hand_over"):
    """For a reader of the asked node. The answer is how many it takes next, or that it is not there."""

    reader: int
    deliveries: list[Delivery]
    is_more: bool
    """Of the same lot."""


class News(Struct, array_like=True, frozen=True, tag="news"):
    """There is news for that reader: it asks for it by what it lends."""

    reader: int


class Detached(Struct, array_like=True, frozen=True, tag="detached"):
    """The partitions are no longer here: look for their owners."""

    reader: int
    partitions: list[int]


class Shown(Struct, array_like=True, frozen=True):
    """A partition with its groups' places in it."""

    partition: PartitionShown
    groups: tuple[GroupShown, ...]


Placed: TypeAlias = Produce | Settling | Mark | Keep | Ask | Letter | Show | Join
"""Requests to a partition's owner."""
Request: TypeAlias = Placed | Lend | Leave | HandOver | News | Detached

VALUES: Final[dict[type, Any]] = {
    Produce: Produced, Settling: None, Mark: IdempotencyStatus, Keep: IdempotencyStatus, Ask: bool, Letter: None,
    Show: Shown, Join: str, Lend: Account, Leave: None, HandOver: int, News: None, Detached: None,
}  # fmt: skip


class Moved(Unavailable):
    """The partition is not here; `node` is its owner as far as is known."""

    def __init__(self, message: str, *, node: str = "") -> None:
        super().__init__(message, retry_after_s=0.1)
        self.node = node


class Unsent(Unavailable):
    """The node that should have been asked is not there: nothing happened."""


class Failure(Struct, array_like=True, frozen=True):
    kind: str
    message: str
    retry_after_s: float | None = None
    detail: str = ""


_KINDS: Final[dict[str, type[OncewireError]]] = {
    kind.__name__: kind
    for kind in (
        Conflict, ContractViolation, Corrupt, NotFound, OutcomeUnknown, Overloaded, Refused, TooLarge, TooManyReaders,
        Unavailable,
    )
}  # fmt: skip


def failure_of(error: OncewireError) -> Failure:
    retry_after_s = error.retry_after_s if isinstance(error, Unavailable) else None
    detail = error.reason if isinstance(error, BufferFull) else error.node if isinstance(error, Moved) else ""
    kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in _KINDS), "Unavailable")
    if isinstance(error, (BufferFull, Moved)):
        kind = type(error).__name__
    return Failure(kind, error.message, retry_after_s, detail)


def error_of(failure: Failure) -> OncewireError:
    if failure.kind == "BufferFull":
        return BufferFull(failure.message, reason=failure.detail, retry_after_s=failure.retry_after_s or 1.0)
    if failure.kind == "Moved":
        return Moved(failure.message, node=failure.detail)
    kind = _KINDS.get(failure.kind, Unavailable)
    if issubclass(kind, Unavailable):
        return kind(failure.message, retry_after_s=failure.retry_after_s)
    return kind(failure.message)


class Asked(Struct, array_like=True, frozen=True):
    """Requests of one node that go together."""

    node: str
    requests: list[bytes]


class Answer(Struct, array_like=True, frozen=True):
    """To the request at that place."""

    at: int
    value: bytes
    failure: Failure | None = None


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_answers = msgspec.msgpack.Decoder(list[Answer]).decode
_decoders = {kind: msgspec.msgpack.Decoder(value).decode for kind, value in VALUES.items()}


def decode_value(kind: type, value: bytes) -> Any:
    return _decoders[kind](value)
