"""What a ledger records and what follows from it. Pure: no clock, no store, no chance.

A ledger is a chain of blocks, one per group commit. A block holds the inputs that were settled together, with their
outcomes, and the effects that they caused; it is written in the transaction that holds the handlers' own rows. So
after a crash either all of it is there or nothing is:

    on disk                     a redelivered input
    nothing of it               runs, as if for the first time
    its block                   does not run again; effects that are not confirmed go out again under their stable ids
    its block, all confirmed    is acked

What is known of an input is found by its key: for inputs that are done the hash of agent and *identity* (the same
message under another position is a duplicate; an identity names the tenant and workspace of its message), for all other
outcomes the hash of agent and *position* (the identity may come again, as a replay, and then runs).

The state hash adds up: one element per settled identity, summed lane by lane, so it does not depend on order, can be
kept up to date block by block, and can be computed in parallel. Positions and filled-in fields are not part of it.

Each block is announced to the stream LEDGER in a form that names positions, effects and sums, and the hash of the
announcement before it: that is what an auditor reads (`Announcement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from oncewire._ground.contracts import blocks, hashes, subjects
from oncewire._ground.contracts.blocks import (
    ANNOUNCEMENT_VERSION,
    COUNTED,
    NO_HASH,
    NO_STATE,
    Announcement,
    Confirmed,
    Inputs,
    Outcome,
    Ranges,
    add,
    agent_name,
    announcement_hash,
    element_sum,
    position_sum,
    ranges,
    write_announcement,
)
from oncewire._ground.contracts.letters import one_line
from oncewire._ground.fields import columns, distinct

KEY_BYTES: Final = 16
RETRY_DELAYS_S: Final = (1.0, 5.0, 10.0, 30.0)


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
    settled: int = 0
    """Up to here every input is known to be settled."""

    @property
    def durable(self) -> Durable:
        return self.stream, self.consumer


Durable = tuple[str, str]
"""Its stream and its name. Those that one agent has on a stream bring different subjects."""
Sources = Mapping[Durable, Source]


def brings(filters: Iterable[str], subject: str) -> bool:
    return any(subjects.matches(subject, pattern) for pattern in filters)


# ---- keys


def identity_key(agent: str, identity: str) -> bytes:
    """`agent` is the full name. Lengths are part of what is hashed, so that no two pairs meet."""
    return keys_of_identities(agent, [identity])[0]


def keys_of_identities(agent: str, identities: Sequence[str]) -> list[bytes]:
    return hashes.blake2b_all(f"i{len(agent)}:{agent}", (list(identities),), KEY_BYTES)


def position_key(agent: str, stream: str, created: str, sequence: int) -> bytes:
    return keys_of_positions(agent, stream, created, [sequence])[0]


def keys_of_positions(agent: str, stream: str, created: str, sequences: Sequence[int]) -> list[bytes]:
    head = f"p{len(agent)}:{agent}{len(stream)}:{stream}{len(created)}:{created}"
    return hashes.blake2b_all(head, (list(sequences),), KEY_BYTES)


# ---- sums


def element(agent: str, entry: Entry) -> bytes:
    """What an entry adds to the state hash."""
    return blocks.element(agent, entry.identity, entry.subject, entry.outcome, entry.digest)


def position_element(entry: Entry) -> bytes:
    """What an entry adds to the sum over positions and raw bodies."""
    return blocks.position_element(entry.stream, entry.sequence, entry.body)


# ---- blocks


def inputs_of(entries: Sequence[Entry], sources: Sources) -> list[Inputs]:
    """The positions of a block by durable and outcome."""
    streams = sorted(set(columns(entries, Entry, "stream")[0]))
    if len(streams) == 1:
        return _inputs_of_stream(entries, [one for one in sources.values() if one.stream == streams[0]])
    found: list[Inputs] = []
    for stream in streams:
        part = [entry for entry in entries if entry.stream == stream]
        found += _inputs_of_stream(part, [one for one in sources.values() if one.stream == stream])
    return found


def _inputs_of_stream(entries: Sequence[Entry], sources: Sequence[Source]) -> list[Inputs]:
    """What an entry came by is told by its subject. Each part names all that the agent reads there, as an auditor
    must know it."""
    if len(sources) == 1:
        return [_inputs(entries, sources[0])]
    filters = tuple(sorted({pattern for source in sources for pattern in source.filters}))
    start = max(source.start for source in sources)
    parts: dict[Durable, list[Entry]] = {}
    for entry in entries:
        source = next((one for one in sources if brings(one.filters, entry.subject)), sources[0])
        parts.setdefault(source.durable, []).append(entry)
    by_durable = {source.durable: source for source in sources}
    return [
        _inputs(part, msgspec.structs.replace(by_durable[durable], filters=filters, start=start))
        for durable, part in sorted(parts.items())
    ]


def _inputs(entries: Sequence[Entry], source: Source) -> Inputs:
    stream = source.stream
    sequences, bodies, outcomes = columns(entries, Entry, "sequence", "body", "outcome")
    there = distinct(outcomes)
    by_outcome = {
        outcome: sequences
        if len(there) == 1
        else [at for at, one in zip(sequences, outcomes, strict=True) if one is outcome]
        for outcome in Outcome
        if outcome in there
    }
    return Inputs(
        stream,
        source.created,
        source.consumer,
        source.filters,
        source.start,
        position_sum(stream, sequences, bodies).hex(),
        **{outcome.value: ranges(sequences) for outcome, sequences in by_outcome.items()},
        listed=[(one.sequence, one.identity, one.digest.hex()) for one in entries] if source.is_work_queue else [],
        subjects=_listed_subjects(entries) if source.is_work_queue else [],
    )


def _listed_subjects(entries: Sequence[Entry]) -> list[str]:
    """One for all where they are the same."""
    named = [entry.subject for entry in entries]
    return named[:1] if len(set(named)) == 1 else named


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
    targets: dict[str, Ranges]
    settled: list[tuple[str, str, int]]


def summed(ledger: Ledger, content: Content, sources: Sources) -> Summed:
    counted = _counted(content.entries)
    return Summed(
        inputs_of(content.entries, sources),
        columns(content.effects, Sending, "id")[0],
        element_sum(ledger.name, *columns(counted, Entry, "identity", "subject", "outcome", "digest")),
        targets_of(content.effects),
        settled_up_to(sources.values()),
    )


def settled_up_to(sources: Iterable[Source]) -> list[tuple[str, str, int]]:
    """By stream how far every input is settled, whichever durable brings it."""
    found: dict[tuple[str, str], int] = {}
    for one in sources:
        known = found.get((one.stream, one.created), one.settled)
        found[one.stream, one.created] = min(known, one.settled)
    return [(stream, created, settled) for (stream, created), settled in found.items() if settled]


def _counted(entries: list[Entry]) -> list[Entry]:
    (outcomes,) = columns(entries, Entry, "outcome")
    if all(one in COUNTED for one in distinct(outcomes)):
        return entries
    return [entry for entry in entries if entry.outcome in COUNTED]


def targets_of(effects: Sequence[Sending]) -> dict[str, Ranges]:
    """By stream the places of the effects that go there."""
    (streams,) = columns(effects, Sending, "stream")
    names = sorted(set(streams))
    if len(names) == 1:
        return {names[0]: [(0, len(streams) - 1)]}
    return {name: ranges(at for at, stream in enumerate(streams) if stream == name) for name in names}


def next_block(ledger: Ledger, head: Head, block: Summed, confirmed: Confirmed) -> tuple[Head, bytes]:
    """The new end of the chain and the announcement of the block that makes it."""
    state = add(head.state, [block.state])
    announcement = write_announcement(
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
            block.targets,
            block.settled,
        )
    )
    return Head(head.number + 1, announcement_hash(announcement), state), announcement


# ---- what is confirmed


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
    """What a handler raised, as it goes into ledger rows, headers and log lines: one line of printable text. All text
    about an input that comes from outside takes this way."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # its author's __str__ is as broken as anything else may be
        text = ""
    return one_line(f"{name}: {text}" if text else name)
