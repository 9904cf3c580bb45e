"""What a topic of the broker is called on the server, for all who read there. Pure.

    stream  OWB+<tenant>+<topic>+<number>                 a topic; too long: OWB=, a digest of both names, the number
      owb.<tenant>.<topic>.<number>.<partition>           its messages; an offset is the stream's sequence minus one
      owb.<tenant>.<topic>.<number>.<partition>.fence     of an owner that could not wait for the one before it
      owb.<tenant>.<topic>.<number>.keys                  keys of messages that went to another topic
    stream  BROKER_RECORDS
      broker_records.<number>.<partition>                 what an owner decided: settlements, groups, marks (records.py)
    stream  BROKER_SNAPSHOTS
      broker_snapshots.<number>.<partition>.<part>

A topic that was deleted and made again has another number, and numbers never come back. So nothing of the first belongs
to the second, and whoever is late, with a message or with the deletion itself, meets nothing. Names of tenants and
topics go into a token byte for byte: what is no letter, digit, - or _ as = and two digits, an empty name as a lone =.
No two names share a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from oncewire._ground.errors import ContractViolation

STREAM_CHARS_MAX: Final = 200
STREAM_PREFIXES: Final = ("OWB+", "OWB=")
SUBJECTS: Final = "owb.>"
"""Of all topics."""
RECORDS: Final = "BROKER_RECORDS"
SNAPSHOTS: Final = "BROKER_SNAPSHOTS"
NUMBER: Final = "oncewire_topic_number"
NAME: Final = "oncewire_topic"
TENANT: Final = "oncewire_tenant"
PARTITIONS: Final = "oncewire_partitions"
"""What a topic's stream bears as metadata."""
MESSAGE: Final = "message"
FENCE: Final = "fence"
KEYS: Final = "keys"
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def token(name: str) -> str:
    """A name as one token of a subject."""
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in name.encode()) or "="


def untoken(text: str) -> str:
    """The name behind a token."""
    if text == "=":
        return ""
    first, *escaped = text.split("=")
    return (first.encode() + b"".join(bytes.fromhex(one[:2]) + one[2:].encode() for one in escaped)).decode()


def stream_of(tenant: str, topic: str, number: int) -> str:
    name = f"OWB+{token(tenant)}+{token(topic)}+{number}"
    if len(name) <= STREAM_CHARS_MAX:
        return name
    return f"OWB={blake2b(f'{token(tenant)}.{token(topic)}'.encode(), digest_size=20).hexdigest()}+{number}"


def prefix_of(tenant: str, topic: str, number: int) -> str:
    """Of a topic's subjects."""
    return f"owb.{token(tenant)}.{token(topic)}.{number}"


def records_of(number: int, partition: int) -> str:
    return f"broker_records.{number}.{partition}"


def is_trimmed_by_broker(stream: str) -> bool:
    """Whether the broker itself removes what is settled or deleted: what is missing there was not lost."""
    return stream == RECORDS or stream.startswith(STREAM_PREFIXES)


class Place(NamedTuple):
    """What a subject of a topic's stream says. `kind` is MESSAGE, FENCE or KEYS; keys have no partition."""

    tenant: str
    topic: str
    number: int
    partition: int
    kind: str


def read_subject(subject: str) -> Place:
    """A subject below owb., or ContractViolation."""
    first, *tokens = subject.split(".")
    try:
        if first != "owb" or len(tokens) not in (4, 5):
            raise ValueError
        tenant, topic, number = untoken(tokens[0]), untoken(tokens[1]), _number(tokens[2])
        if tokens[3:] == [KEYS]:
            return Place(tenant, topic, number, -1, KEYS)
        if len(tokens) == 5 and tokens[4] != FENCE:
            raise ValueError
        return Place(tenant, topic, number, _number(tokens[3]), MESSAGE if len(tokens) == 4 else FENCE)
    except ValueError:
        raise ContractViolation(f"topic: {subject[:200]!r} is no subject of a topic", field="subject") from None


def read_records_subject(subject: str) -> tuple[int, int]:
    """Topic number and partition, or ContractViolation."""
    try:
        first, number, partition = subject.split(".")
        if first != "broker_records":
            raise ValueError
        return _number(number), _number(partition)
    except ValueError:
        raise ContractViolation(f"record: {subject[:200]!r} is no subject of records", field="subject") from None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError
    return int(text)


class Bears(NamedTuple):
    """What a topic's stream says of itself."""

    number: int
    tenant: str
    topic: str
    partitions: int


def read_metadata(metadata: Mapping[str, str]) -> Bears | None:
    """None for a stream that is no topic."""
    try:
        return Bears(_number(metadata[NUMBER]), metadata[TENANT], metadata[NAME], _number(metadata[PARTITIONS]))
    except (KeyError, ValueError):
        return None
