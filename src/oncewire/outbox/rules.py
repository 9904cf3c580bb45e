"""What a relay decides. Pure: rows and what was found in the stream go in, what to publish and to mark comes out.

The fence. A conversation's messages stand on one subject, and the first message of a publish names the stream sequence
that must be the subject's last (`Nats-Expected-Last-Subject-Sequence`). Whoever publishes with an outdated view is
refused (10071), so two relays, a relay that was stopped and continued, and a relay that does not know what became of
its last publish can do no harm. After a refusal the stream is read from the recorded place on, and each row is in one
of three positions:

    a stored message has its epoch, sequence and dedupe id     it was published: mark it
    a stored message of a relay stands at or above its number   the database was restored: new epoch, new numbers
    neither                                                     publish it, behind the last message seen

Other envelopes on the subject carry committed sequences too; only the relay's own headers count.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from oncewire._ground.contracts.headers import DEDUPE_ID, EPOCH, SEQUENCE, TENANT
from oncewire._ground.contracts.realtime import VERSION, decode_realtime
from oncewire._ground.errors import Refused

ROWS_MAX = 1_000
"""An atomic batch takes no more."""
BYTES_MAX = 16 * 1024 * 1024
PAUSE_MS_MIN = 20.0
PAUSE_MS_MAX = 100.0
PAUSE_PER_WORK = 0.5
IDLE_AFTER_MS = 200.0
RETRY_MS_MIN = 100.0
RETRY_MS_MAX = 5_000.0


class Row(Struct, frozen=True, gc=False):
    """A message that waits, as the database holds it; JSON columns are still text."""

    conversation_id: str
    id: int
    sequence: int
    dedupe_id: str
    epoch: str
    tenant: str
    message_id: str
    role: str
    content: str
    model: str | None
    citations: str | None
    metadata: str | None
    void_reason: str | None
    created_at: datetime
    traceparent: str | None = None

    @property
    def key(self) -> Key:
        return Key(self.epoch, self.sequence, self.dedupe_id)


class Key(Struct, frozen=True, gc=False):
    """By what a stored message is known to be a row's."""

    epoch: str
    sequence: int
    dedupe_id: str


class Stored(Struct, frozen=True, gc=False):
    """A message found on the subject; `key` is None when no relay wrote it."""

    stream_sequence: int
    key: Key | None


class Claim(Struct, frozen=True):
    """Rows of one conversation, in sequence, and the stream sequence that must be the last on its subject."""

    conversation_id: str
    expected: int
    rows: tuple[Row, ...]


class _Event(Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    type: Literal["chat.message.created"]
    message_id: str
    dedupe_id: str
    role: str
    content: str
    model: str | UnsetType = UNSET
    citations: Raw | UnsetType = UNSET
    metadata: Raw | dict[str, Any] | UnsetType = UNSET


class _Contract(Struct, frozen=True, rename="camel", gc=False):
    guarantee: Literal["at-least-once"]
    dedupe_key: str


class _Envelope(Struct, frozen=True, rename="camel", gc=False):
    """The realtime envelope with its JSON columns as they came: contracts.realtime has the same one, checked."""

    version: str
    conversation_id: str
    sequence: int
    issued_at: datetime
    contract: _Contract
    event: _Event


_encode = msgspec.json.Encoder().encode


def body_of(row: Row) -> bytes:
    """The envelope that is published for a row; a tombstone when a person has voided it."""
    if row.void_reason is not None:
        told = {"voided": True, "reason": row.void_reason}
        event = _Event("chat.message.created", row.message_id, row.dedupe_id, row.role, "", metadata=told)
    else:
        event = _Event(
            "chat.message.created",
            row.message_id,
            row.dedupe_id,
            row.role,
            row.content,
            UNSET if row.model is None else row.model,
            UNSET if row.citations is None else Raw(row.citations.encode()),
            UNSET if row.metadata is None else Raw(row.metadata.encode()),
        )
    contract = _Contract("at-least-once", row.dedupe_id)
    return _encode(_Envelope(VERSION, row.conversation_id, row.sequence, row.created_at, contract, event))


def headers_of(row: Row) -> dict[str, str]:
    """By these a message is known to be this row's, and the gateway learns epoch and sequence without the body."""
    return {EPOCH: row.epoch, SEQUENCE: str(row.sequence), DEDUPE_ID: row.dedupe_id, TENANT: row.tenant}


def key_in(headers: Mapping[str, str]) -> Key | None:
    """The key of a relay's message, None when another wrote it."""
    sequence = headers.get(SEQUENCE, "")
    if EPOCH not in headers or DEDUPE_ID not in headers or not (sequence.isascii() and sequence.isdigit()):
        return None
    return Key(headers[EPOCH], int(sequence), headers[DEDUPE_ID])


def grouped(rows: Iterable[Row], fences: Mapping[str, int]) -> list[Claim]:
    """One claim per conversation, rows in the order of their sequence."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.conversation_id, []).append(row)
    return [
        Claim(conversation_id, fences[conversation_id], tuple(sorted(theirs, key=lambda row: row.sequence)))
        for conversation_id, theirs in found.items()
    ]


class Progress(Struct, frozen=True):
    """How far a conversation came: `confirmed` rows stand in the stream, the last at `stream_sequence`.

    At most one of the other two: `refused` says why the next row cannot be published as it is, `postponed` why it
    cannot be published now. `renumber_above` is set when the stream holds another history.
    """

    claim: Claim
    confirmed: int = 0
    stream_sequence: int = 0
    refused: str = ""
    postponed: str = ""
    renumber_above: int = 0

    @property
    def is_over(self) -> bool:
        return self.confirmed == len(self.claim.rows) or bool(self.refused or self.postponed) or self.renumber_above > 0

    @property
    def next_row(self) -> Row:
        return self.claim.rows[self.confirmed]

    @property
    def expected(self) -> int:
        """What must be the subject's last sequence when the next row is published."""
        return self.stream_sequence


def started(claim: Claim) -> Progress:
    """Before anything is published. The claim ends before a row that readers would refuse; where that row is the first
    one, the conversation stops at it."""
    flaw = flaw_of(claim.rows[0])
    if flaw:
        return Progress(claim, 0, claim.expected, refused=flaw)
    readable = tuple(itertools.takewhile(lambda row: not flaw_of(row), claim.rows))
    return Progress(replace(claim, rows=readable), 0, claim.expected)


def flaw_of(row: Row) -> str:
    """Why readers would refuse a row's envelope, '' when they take it.

    Enqueue checks its JSON; SQL that calls the function itself may store numbers that JSON readers refuse.
    """
    if row.void_reason is not None or (row.citations is None and row.metadata is None):
        return ""
    try:
        decode_realtime(body_of(row))
    except Refused as wrong:
        return wrong.message
    return ""


def resolved(progress: Progress, stored: Sequence[Stored], last: int) -> Progress:
    """Where a conversation stands after a refusal, from what the stream holds behind the recorded place.

    `last` is the subject's last stream sequence, 0 when it holds nothing: it becomes the next expectation.
    """
    places = {found.key: found.stream_sequence for found in stored if found.key is not None}
    rows = progress.claim.rows
    confirmed = progress.confirmed
    while confirmed < len(rows) and rows[confirmed].key in places:
        confirmed += 1
    if confirmed == len(rows):
        return Progress(progress.claim, confirmed, places[rows[-1].key])
    ours = {row.key for row in rows}
    others = [key.sequence for key in places if key not in ours]
    above = max(others, default=0)
    if above >= rows[confirmed].sequence:
        return Progress(progress.claim, confirmed, last, renumber_above=above)
    return Progress(progress.claim, confirmed, last)


def rounds_of(claims: Sequence[Claim]) -> list[int]:
    """How many rows would go in each round, one row of each conversation at a time."""
    lengths = sorted((len(claim.rows) for claim in claims), reverse=True)
    return [bisect.bisect_right(lengths, -one, key=operator.neg) for one in range(1, lengths[0] + 1)] if lengths else []


def conversations_wanted(rows: int, conversations: int, batch_size: int) -> int:
    """How many conversations to look at next, so that their rows just fill a batch."""
    least = -(-ROWS_MAX // batch_size)
    if rows == 0 or conversations == 0:
        return max(least, 200)
    return min(ROWS_MAX, max(least, -(-ROWS_MAX * conversations // rows)))


class Pace(Struct, frozen=True):
    """How a relay waits between passes. Time is in milliseconds of whatever clock the caller has."""

    quiet_since: float | None = None

    def after(self, is_busy: bool, now: float) -> Pace:
        if is_busy:
            return Pace()
        return self if self.quiet_since is not None else Pace(now)

    def is_idle(self, now: float) -> bool:
        """Nothing came for a while: worth telling writers that a wake-up is welcome."""
        return self.quiet_since is not None and now - self.quiet_since >= IDLE_AFTER_MS


def pause_ms(took_ms: float) -> float:
    """Between two passes when nothing is left over, in proportion to the work: when the machine is busy the same work
    takes longer, and the writers, who are what it is busy with, get the rest."""
    return min(PAUSE_MS_MAX, max(PAUSE_MS_MIN, PAUSE_PER_WORK * took_ms))


def retry_ms(failures: int) -> float:
    """How long to wait when a server is away, for the n-th time in a row."""
    return float(min(RETRY_MS_MAX, RETRY_MS_MIN * 2 ** min(failures - 1, 10)))
