"""What things are called on the server. Pure.

    stream  OWB+<tenant>+<topic>                 a topic; where that is too long, OWB= and a digest of both
      owb.<tenant>.<topic>.<partition>           its messages; an offset is the stream's sequence minus one
      owb.<tenant>.<topic>.<partition>.fence     written by an owner that could not wait for the one before it
      owb.<tenant>.<topic>.keys                  keys of messages that went to another topic
    stream  BROKER_RECORDS
      broker_records.<topic number>.<partition>  what an owner decided: settlements, groups, marks
    stream  BROKER_SNAPSHOTS
      broker_snapshots.<topic number>.<partition>.<part>
    bucket  OW_TOPICS    <tenant>.<topic>        which topics there are; the revision is the topic's number
    bucket  OW_LEASES    node.<node>, part.<topic number>.<partition>

A topic that was deleted and made again has another number, so nothing of the first belongs to the second. Names of
tenants and topics go into a token byte for byte: what is no letter, digit, - or _ as = and two digits, an empty name as
a lone =. No two names share a token.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

STREAM_CHARS_MAX: Final = 200
RECORDS: Final = "BROKER_RECORDS"
SNAPSHOTS: Final = "BROKER_SNAPSHOTS"
TOPICS: Final = "OW_TOPICS"
LEASES: Final = "OW_LEASES"
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


def stream_of(tenant: str, topic: str) -> str:
    name = f"OWB+{token(tenant)}+{token(topic)}"
    if len(name) <= STREAM_CHARS_MAX:
        return name
    return "OWB=" + blake2b(f"{token(tenant)}.{token(topic)}".encode(), digest_size=20).hexdigest()


def prefix_of(tenant: str, topic: str) -> str:
    """Of a topic's subjects."""
    return f"owb.{token(tenant)}.{token(topic)}"


def key_of(tenant: str, topic: str) -> str:
    """Of a topic in the bucket of topics."""
    return f"{token(tenant)}.{token(topic)}"


def names_of(key: str) -> tuple[str, str]:
    """Tenant and topic behind a key."""
    tenant, _, topic = key.partition(".")
    return untoken(tenant), untoken(topic)


def records_of(number: int, partition: int) -> str:
    return f"broker_records.{number}.{partition}"


def snapshot_of(number: int, partition: int) -> str:
    return f"broker_snapshots.{number}.{partition}"


def lease_of(number: int, partition: int) -> str:
    return f"part.{number}.{partition}"


def preferred(nodes: list[str], number: int, partition: int) -> str:
    """Who should own a partition: each node knows by itself, and a node that comes or goes moves only its share."""
    what = f"{number}.{partition}".encode()
    return max(nodes, key=lambda node: blake2b(what, key=node.encode(), digest_size=8).digest())


def message_id(number: int, requested: str, identity: bytes) -> str:
    """Under which a keyed message is stored once: by the topic that its producer named, which need not be there."""
    digest = blake2b(identity + requested.encode(), digest_size=16).hexdigest()
    return f"key.{number}.{digest}"


def letter_identity(number: int, group: str, partition: int, offset: int) -> bytes:
    """Under which a dead letter is stored once."""
    return blake2b(f"{number}.{partition}.{offset}.{group}".encode(), digest_size=16).digest()


def letter_id(identity: bytes) -> str:
    return f"letter.{identity.hex()}"
