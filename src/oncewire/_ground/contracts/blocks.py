"""Ledger blocks on the wire, and the sums that they carry. What an agent announces and an auditor reads.

Each group commit of an agent is announced to the stream LEDGER (`ledger.<agent>.<ledger id>`): the positions that it
settled by outcome, the ids of its effects, and three things that cannot be made up afterwards:

    previous    SHA-256 of the announcement before: blocks chain
    sum         per stream, over position and raw body of every settled input: bodies cannot change
    state       over identity, subject, content and outcome of all settled inputs so far: the state hash

Sums add up: one element of eight 64-bit lanes per input, summed lane by lane. They do not depend on order, can be kept
up to date block by block, and can be computed in parallel. Positions and filled-in fields are not part of the state.

Fields with a default are often empty, and then left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final

import msgspec

from oncewire._ground.contracts import hashes
from oncewire._ground.errors import ContractViolation
from oncewire._ground.native import Columns

LANES: Final = 8
STATE_BYTES: Final = LANES * 8
NO_STATE: Final = bytes(STATE_BYTES)
NO_HASH: Final = bytes(32)
LANE_MASK: Final = (1 << 64) - 1
_EVEN_LANES: Final = sum(LANE_MASK << 128 * pair for pair in range(LANES // 2))
ANNOUNCEMENT_VERSION: Final = 1

Ranges = list[tuple[int, int]]
"""Closed ranges."""


class Outcome(StrEnum):
    """How an input ended. Only `done` makes a later copy a duplicate."""

    DONE = "done"
    DUPLICATE = "duplicate"
    TERMINATED = "terminated"
    DEAD = "dead"
    PASSED = "passed"


COUNTED: Final = (Outcome.DONE, Outcome.TERMINATED, Outcome.DEAD)
"""The outcomes that are part of the state hash: a duplicate or a replay for somebody else changes nothing."""


class Inputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The positions of one durable that a block settles, by outcome: closed ranges. `filters` are all that the agent
    reads on the stream, by whichever durable."""

    stream: str
    created: str
    consumer: str
    filters: tuple[str, ...]
    start: int
    sum: str
    done: Ranges = []
    duplicate: Ranges = []
    terminated: Ranges = []
    dead: Ranges = []
    passed: Ranges = []
    listed: list[tuple[int, str, str]] = []
    """On a work queue, which nobody else can read: sequence, identity and content digest of each."""
    subjects: list[str] = []
    """Of those that are listed, in their order; a single one stands for all."""


class Confirmed(msgspec.Struct, frozen=True):
    """All effects up to this block are confirmed; the highest sequence confirmed per stream."""

    block: int
    streams: dict[str, int]


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
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
    targets: dict[str, Ranges] = {}
    """Which stream the effects go to: by stream their places in `effects`."""
    settled: list[tuple[str, str, int]] = []
    """Stream, its creation time, and the sequence up to which every input has its outcome in this block or before."""


_json = msgspec.json.Encoder().encode
_read_json = msgspec.json.Decoder(Announcement).decode


def agent_name(tenant: str, workspace: str, agent: str) -> str:
    """The full name of an agent, as chains, keys and sums carry it."""
    return f"{tenant}/{workspace}/{agent}"


# ---- sums


def element(agent: str, identity: str, subject: str, outcome: str, digest: bytes) -> bytes:
    """What an input adds to the state hash: identity, subject, content and outcome, not where it stood."""
    return elements(agent, [identity], [subject], [outcome], [digest])[0]


def elements(
    agent: str, identities: list[str], subjects: Iterable[str], outcomes: Iterable[str], digests: list[bytes]
) -> list[bytes]:
    """The elements of many inputs."""
    return hashes.blake2b_all(_counted(agent), _elements(identities, subjects, outcomes, digests), STATE_BYTES)


def element_sum(
    agent: str, identities: list[str], subjects: Iterable[str], outcomes: Iterable[str], digests: list[bytes]
) -> bytes:
    """What many inputs add together."""
    return _sum(_counted(agent), _elements(identities, subjects, outcomes, digests))


def _elements(identities: list[str], subjects: Iterable[str], outcomes: Iterable[str], digests: list[bytes]) -> Columns:
    endings = list(map(_ending, subjects, outcomes))
    return (list(map(len, identities)), b":", identities, endings, digests)


@lru_cache(maxsize=4096)
def _ending(subject: str, outcome: str) -> str:
    return f"{_counted(subject)}{outcome}"


@lru_cache(maxsize=4096)
def _counted(text: str) -> str:
    """With its length before it, so that no two texts meet."""
    return f"{len(text)}:{text}"


def position_element(stream: str, sequence: int, body: bytes) -> bytes:
    """What an input adds to the sum over positions and raw bodies."""
    return position_elements(stream, [sequence], [body])[0]


def position_elements(stream: str, sequences: list[int], bodies: list[bytes]) -> list[bytes]:
    """The elements of many inputs of one stream."""
    return hashes.blake2b_all(_counted(stream), (sequences, b":", bodies), STATE_BYTES)


def position_sum(stream: str, sequences: list[int], bodies: list[bytes]) -> bytes:
    """What many inputs of one stream add together."""
    return _sum(_counted(stream), (sequences, b":", bodies))


def _sum(begin: str, columns: Columns) -> bytes:
    found = hashes.blake2b_sum(begin, columns)
    return found if found is not None else add(NO_STATE, hashes.blake2b_all(begin, columns, STATE_BYTES))


def raw_digest(body: bytes) -> bytes:
    """Stands for the content digest of an input that breaks its contract; its identity is empty."""
    return hashlib.sha256(body).digest()


def add(state: bytes, elements: Sequence[bytes]) -> bytes:
    """Sum lanes modulo 2^64. Any order, any grouping gives the same.

    Each element is one large number. Every second lane alone has room above it for the carries of 2^64 elements, and
    the other lanes are the rest of the whole sum: two additions per element instead of eight.
    """
    numbers = [int.from_bytes(one, "little") for one in (state, *elements)]
    even = sum([number & _EVEN_LANES for number in numbers])
    odd = (sum(numbers) - even) >> 64
    return (even & _EVEN_LANES | (odd & _EVEN_LANES) << 64).to_bytes(STATE_BYTES, "little")


def ranges(sequences: Iterable[int]) -> Ranges:
    """Closed ranges that cover exactly these numbers."""
    ordered = sorted(set(sequences))
    if not ordered:
        return []
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return [(ordered[0], ordered[-1])]
    ends = [at for at, number in enumerate(ordered[1:]) if number != ordered[at] + 1]
    starts = [0, *(at + 1 for at in ends)]
    return [(ordered[first], ordered[last]) for first, last in zip(starts, [*ends, -1], strict=True)]


# ---- announcements


def write_announcement(announcement: Announcement) -> bytes:
    return _json(announcement)


def read_announcement(announcement: bytes) -> Announcement:
    return _read_json(announcement)


def effect_targets(announcement: Announcement) -> list[str]:
    """The stream of each effect. ContractViolation when one has none: then nobody could look for it."""
    count = len(announcement.effects)
    target = {
        at: stream
        for stream, places in announcement.targets.items()
        for first, last in places
        for at in range(max(0, first), min(last + 1, count))
    }
    try:
        return [target[at] for at in range(count)]
    except KeyError as missing:
        raise ContractViolation(f"ledger block: effect {missing} has no target", field="targets") from None


def listed_subjects(inputs: Inputs) -> list[str]:
    """The subject of each listed input. ContractViolation when they are not as many."""
    subjects = inputs.subjects * len(inputs.listed) if len(inputs.subjects) == 1 else inputs.subjects
    if len(subjects) != len(inputs.listed):
        text = f"ledger block: {len(inputs.listed)} inputs are listed with {len(subjects)} subjects"
        raise ContractViolation(text, field="subjects")
    return subjects


def announcement_hash(announcement: bytes) -> bytes:
    return hashlib.sha256(announcement).digest()


def announcement_id(ledger_id: str, agent: str, number: int) -> str:
    """`Nats-Msg-Id` of a block's announcement."""
    text = f"{len(ledger_id)}:{ledger_id}{len(agent)}:{agent}{number}".encode()
    return f"bl.{hashlib.sha256(text).hexdigest()[:40]}"
