"""What a ledger records and what follows from it. Pure: no clock, no store, no chance.

A ledger is a chain of blocks, one per group commit. A block holds the inputs that were settled together, with their
outcomes, and the effects that they caused; it is written in the transaction that holds the handlers' own rows. So
after a crash either all of it is there or nothing is:

    on disk                     a redelivered input
    nothing of it               runs, as if for the first time
    its block                   does not run again; effects that are not confirmed go out again under their stable ids
    its block, all confirmed    is acked

What is known of an input is found by its key: for inputs that are done the hash of agent and *identity* (the same
message under another position is a duplicate), for all other outcomes the hash of agent and *position* (the identity
may come again, as a replay, and then runs).

The state hash adds up: one element per settled identity, summed lane by lane, so it does not depend on order, can be
kept up to date block by block, and can be computed in parallel. Positions and filled-in fields are not part of it.

Each block is announced to the stream LEDGER in a form that names positions, effects and sums, and the hash of the
announcement before it: that is what an auditor reads (`Announcement`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

KEY_BYTES: Final = 16
LANES: Final = 8
STATE_BYTES: Final = LANES * 8
NO_STATE: Final = bytes(STATE_BYTES)
NO_HASH: Final = bytes(32)
LANE_MASK: Final = (1 << 64) - 1
ANNOUNCEMENT_VERSION: Final = 1
RETRY_DELAYS_S: Final = (1.0, 5.0, 10.0, 30.0)
ERROR_CHARS_MAX: Final = 1_000


class Outcome(StrEnum):
    """How an input ended. Only `done` makes a later copy a duplicate."""

    DONE = "done"
    DUPLICATE = "duplicate"
    TERMINATED = "terminated"
    DEAD = "dead"
    PASSED = "passed"


COUNTED: Final = (Outcome.DONE, Outcome.TERMINATED, Outcome.DEAD)
"""The outcomes that are part of the state hash: a duplicate or a replay for somebody else changes nothing."""


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One settled input, with all that is needed to run it again in a replay."""

    key: bytes
    identity: str
    subject: str
    body: bytes
    header: bytes
    outcome: Outcome
    stream: str
    sequence: int
    timestamp_ns: int
    digest: bytes
    effects: int
    error: str = ""


class Sending(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An effect that is to be published under its id, into the stream that its subject belongs to."""

    id: str
    subject: str
    payload: bytes
    headers: dict[str, str] | None
    stream: str
    trace: str = ""


class Delayed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An effect with a due time ahead."""

    due_ms: int
    sending: Sending


class Content(msgspec.Struct, array_like=True, frozen=True):
    """What a block holds: entries in order, their effects in the same order, and where the targets stood before."""

    entries: list[Entry]
    effects: list[Sending]
    sent_ms: int
    targets: dict[str, int]


class Head(NamedTuple):
    """The end of a chain."""

    number: int
    hash: bytes
    state: bytes


FIRST: Final = Head(0, NO_HASH, NO_STATE)


class Source(msgspec.Struct, frozen=True):
    """A durable consumer that an agent reads, as an auditor must know it."""

    stream: str
    created: str
    consumer: str
    filters: tuple[str, ...]
    start: int
    is_work_queue: bool


class Inputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The positions of one stream that a block settles, by outcome: closed ranges."""

    stream: str
    created: str
    consumer: str
    filters: tuple[str, ...]
    start: int
    sum: str
    done: list[tuple[int, int]] = []
    duplicate: list[tuple[int, int]] = []
    terminated: list[tuple[int, int]] = []
    dead: list[tuple[int, int]] = []
    passed: list[tuple[int, int]] = []
    listed: list[tuple[int, str, str]] = []


class Confirmed(msgspec.Struct, frozen=True):
    """All effects up to this block are confirmed; the highest sequence confirmed per stream."""

    block: int
    streams: dict[str, int]


class Announcement(msgspec.Struct, frozen=True):
    """A block as the stream LEDGER carries it. `previous` is the SHA-256 of the announcement before it."""

    version: int
    ledger: str
    tenant: str
    workspace: str
    agent: str
    number: int
    previous: str
    inputs: list[Inputs]
    effects: list[str]
    state: str
    confirmed: Confirmed


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Content).decode
_json = msgspec.json.Encoder().encode
_read_json = msgspec.json.Decoder(Announcement).decode


def pack(content: Content) -> bytes:
    return _pack(content)


def unpack(data: bytes) -> Content:
    return _unpack(data)


# ---- keys


def agent_name(tenant: str, workspace: str, agent: str) -> str:
    """The full name of an agent, as chains and keys carry it."""
    return f"{tenant}/{workspace}/{agent}"


def identity_key(agent: str, identity: str) -> bytes:
    """`agent` is the full name. Lengths are part of what is hashed, so that no two pairs meet."""
    text = identity.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(_identity_head(agent) + text, digest_size=KEY_BYTES).digest()


def position_key(agent: str, stream: str, created: str, sequence: int) -> bytes:
    head = _position_head(agent, stream, created)
    return hashlib.blake2b(b"%b%d" % (head, sequence), digest_size=KEY_BYTES).digest()


@lru_cache(maxsize=256)
def _identity_head(agent: str) -> bytes:
    return f"i{len(agent)}:{agent}".encode("utf-8", "surrogatepass")


@lru_cache(maxsize=256)
def _position_head(agent: str, stream: str, created: str) -> bytes:
    return f"p{len(agent)}:{agent}{len(stream)}:{stream}{len(created)}:{created}".encode()


# ---- sums


def element(agent: str, entry: Entry) -> bytes:
    """What an entry adds to the state hash: identity, subject, content and outcome, not where it stood."""
    identity, subject = entry.identity, entry.subject
    head = f"{len(agent)}:{agent}{len(identity)}:{identity}{len(subject)}:{subject}{entry.outcome}"
    return hashlib.blake2b(head.encode("utf-8", "surrogatepass") + entry.digest, digest_size=STATE_BYTES).digest()


def position_element(entry: Entry) -> bytes:
    """What an entry adds to the sum over positions and raw bodies."""
    stream = entry.stream
    head = f"{len(stream)}:{stream}{entry.sequence}:".encode()
    return hashlib.blake2b(head + entry.body, digest_size=STATE_BYTES).digest()


def add(state: bytes, elements: Sequence[bytes]) -> bytes:
    """Sum lanes modulo 2^64. Any order, any grouping gives the same."""
    lanes = struct.unpack(f"<{LANES * (len(elements) + 1)}Q", state + b"".join(elements))
    return struct.pack(f"<{LANES}Q", *[sum(lanes[lane::LANES]) & LANE_MASK for lane in range(LANES)])


# ---- blocks


def ranges(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Closed ranges that cover exactly these numbers."""
    ordered = sorted(set(sequences))
    if not ordered:
        return []
    ends = [at for at, number in enumerate(ordered[1:]) if number != ordered[at] + 1]
    starts = [0, *(at + 1 for at in ends)]
    return [(ordered[first], ordered[last]) for first, last in zip(starts, [*ends, -1], strict=True)]


def inputs_of(entries: Sequence[Entry], sources: Mapping[str, Source]) -> list[Inputs]:
    """The positions of a block by stream and outcome."""
    by_stream: dict[str, list[Entry]] = {}
    for entry in entries:
        by_stream.setdefault(entry.stream, []).append(entry)
    return [_inputs(stream, part, sources[stream]) for stream, part in sorted(by_stream.items())]


def _inputs(stream: str, entries: list[Entry], source: Source) -> Inputs:
    by_outcome = {
        outcome: [entry.sequence for entry in entries if entry.outcome is outcome]
        for outcome in Outcome
        if any(entry.outcome is outcome for entry in entries)
    }
    return Inputs(
        stream,
        source.created,
        source.consumer,
        source.filters,
        source.start,
        add(NO_STATE, [position_element(entry) for entry in entries]).hex(),
        **{outcome.value: ranges(sequences) for outcome, sequences in by_outcome.items()},
        listed=[(one.sequence, one.identity, one.digest.hex()) for one in entries] if source.is_work_queue else [],
    )


class Ledger(NamedTuple):
    """Whose chain it is."""

    id: str
    tenant: str
    workspace: str
    agent: str

    @property
    def name(self) -> str:
        return agent_name(self.tenant, self.workspace, self.agent)


class Summed(NamedTuple):
    """What a block adds to its chain, whatever the chain's end is: computed before the chain is locked."""

    inputs: list[Inputs]
    effects: list[str]
    state: bytes


def summed(ledger: Ledger, content: Content, sources: Mapping[str, Source]) -> Summed:
    name = ledger.name
    counted = [element(name, entry) for entry in content.entries if entry.outcome in COUNTED]
    ids = [effect.id for effect in content.effects]
    return Summed(inputs_of(content.entries, sources), ids, add(NO_STATE, counted))


def next_block(ledger: Ledger, head: Head, block: Summed, confirmed: Confirmed) -> tuple[Head, bytes]:
    """The new end of the chain and the announcement of the block that makes it."""
    state = add(head.state, [block.state])
    announcement = _json(
        Announcement(
            ANNOUNCEMENT_VERSION,
            ledger.id,
            ledger.tenant,
            ledger.workspace,
            ledger.agent,
            head.number + 1,
            head.hash.hex(),
            block.inputs,
            block.effects,
            state.hex(),
            confirmed,
        )
    )
    return Head(head.number + 1, announcement_hash(announcement), state), announcement


def announcement_hash(announcement: bytes) -> bytes:
    return hashlib.sha256(announcement).digest()


def read_announcement(announcement: bytes) -> Announcement:
    return _read_json(announcement)


def announcement_id(ledger_id: str, agent: str, number: int) -> str:
    """`Nats-Msg-Id` of a block's announcement."""
    text = f"{len(ledger_id)}:{ledger_id}{len(agent)}:{agent}{number}".encode()
    return f"bl.{hashlib.sha256(text).hexdigest()[:40]}"


# ---- what is confirmed

Ranges = list[tuple[int, int]]
"""Closed ranges of places in a block. The announcement stands after the last effect."""


def holes(count: int, covered: Iterable[tuple[int, int]]) -> Ranges:
    """The closed ranges of 0 … count-1 that are not covered. They may overlap: two processes may have sent the same."""
    found, at = [], 0
    for first, last in sorted(covered):
        if first >= count:
            break
        if first > at:
            found.append((at, first - 1))
        at = max(at, last + 1)
    if at < count:
        found.append((at, count - 1))
    return found


def confirmed_up_to(start: int, blocks: Iterable[tuple[int, int]], marks: Mapping[int, Ranges]) -> int:
    """How far all is confirmed: over (number, effects) of the blocks after `start`, up to the first with a hole."""
    at = start
    for number, effects in blocks:
        if number != at + 1 or holes(effects + 1, marks.get(number, [])):
            break
        at = number
    return at


# ---- retries


def retry_delay_s(deliveries: int) -> float:
    """How long to wait before the next delivery, by how many there were."""
    return RETRY_DELAYS_S[min(max(deliveries, 1), len(RETRY_DELAYS_S)) - 1]


def short_error(error: BaseException) -> str:
    """One line that fits into a ledger row."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " ".join(text.split())[:ERROR_CHARS_MAX]
