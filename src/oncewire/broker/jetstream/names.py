"""What a node calls things on the server besides the topics themselves (contracts/topics.py). Pure.

stream  BROKER_SNAPSHOTS
  broker_snapshots.<topic number>.<partition>.<part>
bucket  OW_TOPICS    <tenant>.<topic>        which topics there are; the revision is the topic's number
bucket  OW_LEASES    node.<node>, part.<topic number>.<partition>, group.<topic number>.<group>
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from oncewire._ground.contracts.topics import token, untoken

TOPICS: Final = "OW_TOPICS"
LEASES: Final = "OW_LEASES"


def key_of(tenant: str, topic: str) -> str:
    """Of a topic in the bucket of topics."""
    return f"{token(tenant)}.{token(topic)}"


def names_of(key: str) -> tuple[str, str]:
    """Tenant and topic behind a key."""
    tenant, _, topic = key.partition(".")
    return untoken(tenant), untoken(topic)


def snapshot_of(number: int, partition: int) -> str:
    return f"broker_snapshots.{number}.{partition}"


def lease_of(number: int, partition: int) -> str:
    return f"part.{number}.{partition}"


def group_of(number: int, group: str) -> str:
    """Of a group that has settled something."""
    return f"group.{number}.{token(group)}"


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
