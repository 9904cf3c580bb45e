"""Reading `dlq.>` for people and for replay: by direct get, with filters and in groups.

Not through the durable `dlq_inspector`: it delivers once, and what a tool had in hand when it died nobody sees again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncewire._ground.contracts import ids, subjects
from oncewire._ground.contracts import letters as names
from oncewire._ground.errors import NotFound, Refused
from oncewire._ground.jetstream import Client, Start, StoredMessage, parse_reply
from oncewire.dlq import rules

PART: Final = 500
PART_BYTES_MAX: Final = 16 * 1024 * 1024
HEADS_S: Final = 2.0
UNKNOWN: Final = "unknown"


class Dead(Struct, frozen=True, kw_only=True):
    """A letter as it stands in DLQ. `sequence` is its place there, `of_sequence` the original's in its stream."""

    id: str
    sequence: int
    cause: str
    error: str
    consumer: str
    subject: str
    stream: str
    of_sequence: int
    created_ns: int
    timestamp_ns: int
    deliveries: int
    outcome: str
    tenant: str
    at_ms: int
    trace: str
    payload_is: str
    """'' when the body is the original's, else gone or pointer."""
    bytes: int
    is_injected: bool = False

    @property
    def origin(self) -> ids.Origin:
        return ids.Origin(self.stream, self.created_ns, self.of_sequence, self.timestamp_ns)


def read_letter(stored: StoredMessage) -> Dead:
    """A letter from its headers. What somebody else wrote to `dlq.>` has no story: it is shown as it is."""
    told = stored.headers

    def number(name: str) -> int:
        text = told.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else 0

    return Dead(
        id=told.get("Nats-Msg-Id", ""),
        sequence=stored.sequence,
        cause=told.get(names.CAUSE, UNKNOWN),
        error=told.get(names.ERROR, ""),
        consumer=told.get(names.CONSUMER, ""),
        subject=told.get(names.SUBJECT, ""),
        stream=told.get(names.STREAM, ""),
        of_sequence=number(names.SEQUENCE),
        created_ns=number(names.CREATED),
        timestamp_ns=number(names.TIMESTAMP),
        deliveries=number(names.DELIVERIES),
        outcome=told.get(names.OUTCOME, ""),
        tenant=told.get(names.TENANT, ""),
        at_ms=number(names.AT) or stored.timestamp_ns // 1_000_000,
        trace=told.get(names.TRACE, ""),
        payload_is=told.get(names.PAYLOAD, ""),
        bytes=number(names.BYTES) or len(stored.payload),
        is_injected=names.INJECTED in told,
    )


class Filter(Struct, frozen=True, kw_only=True):
    """Which letters are meant; all that is set must fit. Empty means all."""

    since_ms: int = 0
    until_ms: int = 0
    cause: str = ""
    tenant: str = ""
    consumer: str = ""
    stream: str = ""
    subject: str = ""
    ids: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        return self == Filter()

    def takes(self, letter: Dead) -> bool:
        if self.ids and letter.id not in self.ids and str(letter.sequence) not in self.ids:
            return False
        if letter.at_ms < self.since_ms or (self.until_ms and letter.at_ms >= self.until_ms):
            return False
        if self.subject and not subjects.matches(letter.subject, self.subject):
            return False
        fields = ("cause", "tenant", "consumer", "stream")
        return all(not getattr(self, name) or getattr(self, name) == getattr(letter, name) for name in fields)


class Group(Struct, frozen=True):
    """Letters of one consumer, subject and cause."""

    consumer: str
    subject: str
    cause: str
    count: int
    first_ms: int
    last_ms: int
    withdrawn: int
    """Dead, and done after all."""
    example: str
    error: str


def group(letters: Iterable[Dead], withdrawn: Mapping[str, bool]) -> list[Group]:
    """The largest group first."""
    parts: dict[tuple[str, str, str], list[Dead]] = {}
    for one in letters:
        parts.setdefault((one.consumer, one.subject, one.cause), []).append(one)
    groups = [
        Group(
            *key,
            len(part),
            min(one.at_ms for one in part),
            max(one.at_ms for one in part),
            sum(withdrawn.get(one.id, False) for one in part),
            part[-1].id,
            part[-1].error,
        )
        for key, part in parts.items()
    ]
    return sorted(groups, key=lambda one: (-one.count, one.consumer, one.subject, one.cause))


class Found(Struct, frozen=True):
    """A letter with what it holds."""

    letter: Dead
    stored: StoredMessage

    @property
    def headers(self) -> dict[str, str]:
        """The original's own."""
        return names.originals(self.stored.headers)


async def read_letters(client: Client, chosen: Filter, up_to: int = 0) -> AsyncIterator[Found]:
    """Those that fit, in order, up to a sequence of DLQ (else to its present end)."""
    end = up_to or (await client.api(f"STREAM.INFO.{rules.DLQ}"))["state"]["last_seq"]
    sequence = 1
    while sequence <= end:
        part = await client.get_batch(rules.DLQ, count=PART, sequence=sequence, bytes_max=PART_BYTES_MAX)
        if not part:
            return
        for stored in part:
            found = Found(read_letter(stored), stored)
            if stored.sequence <= end and chosen.takes(found.letter):
                yield found
        sequence = part[-1].sequence + 1


async def read_heads(client: Client, first: int) -> AsyncIterator[Dead]:
    """Letters from a sequence of DLQ on to its present end, by their headers alone: whatever their bodies weigh."""
    async with client.read(rules.DLQ, start=Start(sequence=max(1, first)), headers_only=True) as reader:
        while messages := await reader.fetch(timeout_s=HEADS_S):
            for message in messages:
                place = parse_reply(message.reply)
                at = datetime.fromtimestamp(place.timestamp_ns / 10**9, UTC).isoformat().replace("+00:00", "Z")
                told = message.headers
                size = told.get("Nats-Msg-Size", "")
                letter = read_letter(StoredMessage(rules.DLQ, message.subject, place.sequence, at, told, b""))
                yield letter if letter.bytes or not size.isdigit() else replace(letter, bytes=int(size[:12]))
            if parse_reply(messages[-1].reply).pending == 0:
                return


async def find_letter(client: Client, name: str) -> Found:
    """One letter by its id, the begin of it, or its sequence in DLQ."""
    if name.isascii() and name.isdigit() and len(name) <= 19:
        try:
            stored = await client.get(rules.DLQ, int(name))
        except NotFound:
            raise NotFound(f"DLQ has no letter {name}", hint="See `oncewire dlq ls`.") from None
        return Found(read_letter(stored), stored)
    found = [one async for one in read_letters(client, Filter()) if name and one.letter.id.startswith(name)]
    if not found:
        raise NotFound(f"DLQ has no letter {name!r}", hint="See `oncewire dlq ls --letters`.")
    if len(found) > 1:
        raise Refused(f"{len(found)} letters begin with {name!r}", hint="Give more of its id.")
    return found[0]
