"""What an owner writes of a partition, as bytes: packed records and snapshots. Pure.

A packed record is one message of the stream of records: a JSON object (contracts/records.py: Packed) with the records
as arrays. Readers outside find in it the topic, and per settlement group, offset, attempt, owner, outcome and error.

A snapshot is what the records up to one of them amount to, without the messages, in parts that each name that record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from oncewire._ground.contracts.records import (
    Acked,
    Buried,
    GroupGone,
    GroupMade,
    GroupSeen,
    Kept,
    Marked,
    Packed,
    Record,
    Retried,
    decode_kept,
    encode,
)
from oncewire.broker.image import capture_progress, restore
from oncewire.broker.state import State

PART_BYTES_MAX: Final = 256 << 10
"""Of a packed record or a part of a snapshot; well below what any server takes."""

encode_record = msgspec.json.Encoder().encode


class Named(Protocol):
    """A topic, as far as its records name it."""

    @property
    def tenant(self) -> str: ...
    @property
    def name(self) -> str: ...


def taken(owner: str, after: int, at_ms: int, topic: Named) -> bytes:
    return encode_record(Packed(owner, after, topic.tenant, topic.name, taken=True, at_ms=at_ms))


def head_of(owner: str, groups: dict[int, str], topic: Named) -> bytes:
    """What records of these groups begin with."""
    named = {str(one): name for one, name in groups.items()}
    return encode_record({"owner": owner, "groups": named, "tenant": topic.tenant, "topic": topic.name})[:-1]


def pack(head: bytes, after: int, encoded: bytes) -> bytes:
    """One packed record of a run of records that is encoded already."""
    return b'%b,"after":%d,"records":%b}' % (head, after, encoded)


_OF_GROUPS = (Acked, Retried, Buried, GroupSeen, GroupGone, Marked)


def groups_of(state: State, records: Sequence[Record]) -> dict[int, str]:
    """The names of the groups that the records speak of."""
    acked = [record.group for record in records if type(record) is Acked]
    if len(acked) == len(records):  # nearly all are that
        return {number: state.groups[number].name for number in set(acked)}
    made = {record.group: record.name for record in records if type(record) is GroupMade}
    spoken = {record.group for record in records if isinstance(record, _OF_GROUPS)}
    return made | {number: state.groups[number].name for number in spoken - made.keys()}


def runs_of(records: Sequence[Record]) -> list[bytes]:
    """Records, encoded, in runs that fit into a message each."""
    encoded = encode_record(records)
    if len(encoded) <= PART_BYTES_MAX:
        return [encoded]
    return [b"[%b]" % b",".join(run) for run in split([encode_record(one) for one in records])]


def split(encoded: list[bytes]) -> list[list[bytes]]:
    """In runs that fit into a message each."""
    if sum(map(len, encoded)) + len(encoded) <= PART_BYTES_MAX:
        return [encoded]
    runs: list[list[bytes]] = [[]]
    size = 0
    for one in encoded:
        if runs[-1] and size + len(one) > PART_BYTES_MAX:
            runs.append([])
            size = 0
        runs[-1].append(one)
        size += len(one) + 1
    return runs


class Part(Struct, array_like=True, frozen=True):
    """A part of a snapshot."""

    covers: int
    """The record that it goes up to."""
    number: int
    count: int
    at_ms: int
    trimmed: int
    is_graveyard: bool
    marks: list[tuple[int, int]]
    """Earlier snapshots: when, and which record they covered."""
    kept: list[bytes]


decode_part = msgspec.msgpack.Decoder(Part).decode


def snapshot(state: State, partition: int, covers: int, at_ms: int, marks: list[tuple[int, int]]) -> list[bytes]:
    """The state of a partition in parts."""
    (topic,) = state.topics.values()
    runs = split([encode(kept) for kept in capture_progress(state)])
    trimmed = topic.partitions[partition].trimmed
    return [
        encode(Part(covers, number, len(runs), at_ms, trimmed, topic.is_graveyard, marks, run))
        for number, run in enumerate(runs)
    ]


def take_in(state: State, partition: int, parts: list[Part]) -> None:
    """Back into a state that has its topic and nothing else."""
    (topic,) = state.topics.values()
    topic.is_graveyard = parts[0].is_graveyard
    topic.partitions[partition].trimmed = parts[0].trimmed
    for part in parts:
        for one in part.kept:
            kept: Kept = decode_kept(one)
            restore(state, kept)
