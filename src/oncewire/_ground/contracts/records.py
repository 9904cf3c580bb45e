"""What the broker writes down: one record for each thing that happened, compound steps in one. Pure.

A record is a MessagePack array whose first element is its number below. Topics and groups are numbers in it, given when
they were made and never given again, so that a topic that was deleted and made anew is another one. Times are Unix ms.

     1  TopicMade      a topic, empty ones too
     2  TopicGone      with its messages, groups and idempotency entries
     3  GroupMade      its first reader came: it starts behind what was trimmed
     4  GroupSeen      it is still in use, written now and then
     5  Stored         a message, and with it the producer's idempotency entry
     6  Acked          a settlement, and with it the worker's COMMITTED when one was pending
     7  Retried        a delivery that failed: attempts so far, when next, why
     8  Buried         a settlement and the dead letter that it made
     9  Trimmed        all messages of a partition up to an offset are gone
    10  Marked         a step of the worker's idempotency helper
    11  GroupGone      it settled nothing and nobody reads it: it is forgotten

A snapshot is made of these (image.py writes and reads them):

    20  Heads          the numbers that topics and groups get next
    21  TopicKept      22  MessagesKept   23  GroupKept   24  ProgressKept
    25  ProducedKept   idempotency entries of producers
    26  WorkedKept     idempotency entries of workers

Everything that depends on a clock is decided before it is written, so reading the records again needs none.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from oncewire._ground.contracts.broker import DeliveredEnvelope, Routing


class Body(Struct, array_like=True, frozen=True):
    """What a held message is kept as, encoded: all that does not change with its deliveries."""

    key: str
    value: str
    envelope: DeliveredEnvelope | None = None
    routing: Routing | None = None


class TopicMade(Struct, array_like=True, frozen=True, tag=1, gc=False):
    topic: int
    tenant: str
    name: str
    partitions: int
    at_ms: int


class TopicGone(Struct, array_like=True, frozen=True, tag=2, gc=False):
    topic: int


class GroupMade(Struct, array_like=True, frozen=True, tag=3, gc=False):
    topic: int
    group: int
    name: str
    at_ms: int


class GroupSeen(Struct, array_like=True, frozen=True, tag=4, gc=False):
    topic: int
    group: int
    at_ms: int


class Stored(Struct, array_like=True, tag=5, gc=False):
    topic: int
    partition: int
    offset: int
    """Given out before it is written, or by the server that stores it: then it is set when that is confirmed."""
    at_ms: int
    size: int
    """Bytes of key and value."""
    body: bytes
    identity: bytes = b""
    """Of the idempotency key, empty without one."""
    requested: str = ""
    """The topic that the producer named, for the identity."""
    expires_at_ms: int = 0


class Acked(Struct, array_like=True, frozen=True, tag=6, gc=False):
    topic: int
    group: int
    partition: int
    offset: int
    at_ms: int
    identity: bytes = b""
    attempts: int = 0
    """With the owner, for those who read settlements elsewhere: the broker needs neither again."""
    owner: str = ""


class Retried(Struct, array_like=True, frozen=True, tag=7, gc=False):
    topic: int
    group: int
    partition: int
    offset: int
    attempts: int
    due_at_ms: int
    last_error: str
    at_ms: int
    owner: str = ""
    is_nacked: bool = False
    """By its owner; else its lease ended."""


class Buried(Struct, array_like=True, frozen=True, tag=8, gc=False):
    topic: int
    group: int
    partition: int
    offset: int
    letter: Stored | None
    """None when it stands in a stream of its own already."""
    attempts: int = 0
    """With what follows, for those who read settlements elsewhere: the broker needs none of it again."""
    last_error: str = ""
    at_ms: int = 0
    owner: str = ""


class Trimmed(Struct, array_like=True, frozen=True, tag=9, gc=False):
    topic: int
    partition: int
    offset: int


class Marked(Struct, array_like=True, frozen=True, tag=10, gc=False):
    topic: int
    group: int
    identity: bytes
    status: int
    owner: str
    partition: int
    offset: int
    check_at_ms: int
    last_error: str


class GroupGone(Struct, array_like=True, frozen=True, tag=11, gc=False):
    topic: int
    group: int
    at_ms: int


class Heads(Struct, array_like=True, frozen=True, tag=20, gc=False):
    next_topic: int
    next_group: int


class TopicKept(Struct, array_like=True, frozen=True, tag=21, gc=False):
    topic: int
    tenant: str
    name: str
    created_at_ms: int
    next_offset: int
    is_graveyard: bool
    trimmed: list[int]
    """The last trimmed offset of each partition."""


class MessagesKept(Struct, array_like=True, frozen=True, tag=22, gc=False):
    topic: int
    partition: int
    offsets: bytes
    """Little-endian 64-bit, as are the times; sizes have 32 bits."""
    times: bytes
    sizes: bytes
    bodies: list[bytes]


class GroupKept(Struct, array_like=True, frozen=True, tag=23, gc=False):
    topic: int
    group: int
    name: str
    seen_at_ms: int
    has_settled: bool = False


class ProgressKept(Struct, array_like=True, frozen=True, tag=24, gc=False):
    topic: int
    group: int
    partition: int
    floor: int
    ahead: list[int]
    retries: list[tuple[int, int, int, str]]
    """Offset, attempts, when due, last error."""


class ProducedKept(Struct, array_like=True, frozen=True, tag=25, gc=False):
    tenant: str
    requested: str
    identities: list[bytes]
    expire_at_ms: list[int]


class WorkedKept(Struct, array_like=True, frozen=True, tag=26, gc=False):
    topic: int
    group: int
    entries: list[tuple[bytes, int, str, int, int, int, str]]
    """Identity, status, owner, partition, offset, when to look again, last error."""


Record: TypeAlias = (
    TopicMade | TopicGone | GroupMade | GroupSeen | GroupGone | Stored | Acked | Retried | Buried | Trimmed | Marked
)
Kept: TypeAlias = Heads | TopicKept | MessagesKept | GroupKept | ProgressKept | ProducedKept | WorkedKept

encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(Record).decode
decode_kept = msgspec.msgpack.Decoder(Kept).decode
encode_body = encode
_decode_packed = msgspec.msgpack.Decoder(Body).decode


class Document(Struct, omit_defaults=True, frozen=True):
    """A body where others read it too: in the stream of a topic."""

    key: str
    value: str
    envelope: DeliveredEnvelope | None = None
    routing: Routing | None = None


_encode_json = msgspec.json.Encoder().encode
decode_document = msgspec.json.Decoder(Document).decode
_OPENING = b"{"[0]


def encode_document(body: tuple[str, str, DeliveredEnvelope | None, Routing | None]) -> bytes:
    return _encode_json(Document(*body))


def decode_body(held: bytes) -> Body | Document:
    """Both forms: a MessagePack array never begins like a JSON object."""
    return decode_document(held) if held[0] == _OPENING else _decode_packed(held)


SAME_BATCH: Final = -1
"""In the place of the record before it: it went in the same batch."""


class Packed(Struct, frozen=True):
    """One message of the stream of records: what the owner of a partition decided, and behind which record.

    The first one of an owner has `taken`: from there on only that owner's may follow. Groups are numbers in the
    records; `groups` has the names of those that they speak of.
    """

    owner: str
    after: int
    tenant: str
    topic: str
    taken: bool = False
    at_ms: int = 0
    groups: dict[str, str] = {}
    records: list[Record] = []


decode_packed = msgspec.json.Decoder(Packed).decode
