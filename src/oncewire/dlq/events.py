"""What is known of failures: the events as they come, the streams and agents behind them, the originals.

Everything here only looks; what follows is decided in rules.py and done in service.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from oncewire._ground.contracts import letters
from oncewire._ground.errors import ContractViolation, NotFound
from oncewire._ground.jetstream import Client, StoredMessage, parse_reply
from oncewire._ground.jetstream.protocol import Message, parse_time_ns
from oncewire.dlq import rules
from oncewire.dlq.rules import Failure, Original

OWNERS_BUCKET: Final = "OW_LEDGERS"
FETCH_S: Final = 2.0
GETS_MAX: Final = 64


@dataclass
class Event:
    """A failure, and the message that told of it; None when the sweep found it."""

    failure: Failure
    message: Message | None = None
    original: Original | None = None
    deliveries: int = 1
    is_read: bool = False
    """The original came with the event: there is nothing to look for."""


def of_request(message: Message) -> Event:
    """A request, or the failure of a request that cannot be read."""
    delivery = parse_reply(message.reply)
    carried = message.headers
    try:
        failure, original = rules.read_request(message.payload, carried)
    except ContractViolation as wrong:
        place = Failure(
            stream=rules.REQUESTS,
            sequence=delivery.sequence,
            consumer=delivery.consumer,
            kind=rules.BAD_REQUEST,
            deliveries=delivery.deliveries,
            reason=letters.one_line(f"{rules.BAD_REQUEST}: {wrong.message}"),
            timestamp_ns=delivery.timestamp_ns,
            outcome=rules.TERMINATED,
        )
        failure, original = rules.bad_request(message.subject, message.payload, carried, place)
    return Event(failure, message, original, delivery.deliveries, is_read=True)


def of_advisory(message: Message) -> Event | None:
    """An advisory; None when it is not one: whoever wrote it, it names nothing that could be kept."""
    delivery = parse_reply(message.reply)
    try:
        failure = rules.read_advisory(message.payload)
    except ContractViolation:
        return None
    return Event(failure, message, None, delivery.deliveries)


class StreamFacts(msgspec.Struct, frozen=True):
    """What must be known of a stream that holds originals."""

    created_ns: int
    retention: str

    @property
    def removes_on_ack(self) -> bool:
        return self.retention != "limits"


class Facts:
    """Looks things up for one batch of events."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def streams(self, names: Iterable[str]) -> dict[str, StreamFacts]:
        """Those that are there."""
        found: dict[str, StreamFacts] = {}
        for name in sorted(set(names)):
            try:
                info = await self._client.api(f"STREAM.INFO.{name}")
            except NotFound:
                continue
            found[name] = StreamFacts(parse_time_ns(info["created"]), info["config"]["retention"])
        return found

    async def agents(self, failures: Iterable[Failure]) -> set[tuple[str, str]]:
        """Which of these consumers belong to an agent's ledger."""
        bucket = self._client.kv(OWNERS_BUCKET)
        wanted = {(one.stream, one.consumer) for one in failures if one.stream not in rules.OWN_STREAMS}
        return {
            (stream, consumer) for stream, consumer in sorted(wanted) if await bucket.entries(f"{stream}.*.{consumer}")
        }

    async def originals(self, failures: Sequence[Failure]) -> list[Original | None]:
        """Each as its stream holds it; None when it is gone."""
        gate = asyncio.Semaphore(GETS_MAX)

        async def get(failure: Failure) -> Original | None:
            async with gate:
                try:
                    return original_of(await self._client.get(failure.stream, failure.sequence))
                except NotFound:
                    return None

        return list(await asyncio.gather(*map(get, failures)))

    async def letters_at(self, failures: Sequence[Failure]) -> set[tuple[str, str, int]]:
        """Those that have a letter, whatever it is called: of a message that is gone the time is not known, and so
        the name of its letter is not."""
        wanted = {one.place for one in failures}
        found: set[tuple[str, str, int]] = set()
        if not (await self._client.api(f"STREAM.INFO.{rules.DLQ}"))["state"]["messages"]:
            return found
        async with self._client.read(rules.DLQ, headers_only=True) as reader:
            while len(found) < len(wanted):
                messages = await reader.fetch(timeout_s=FETCH_S)
                found |= {place for place in map(_place, messages) if place in wanted}
                if not messages or parse_reply(messages[-1].reply).pending == 0:
                    break
        return found


def original_of(stored: StoredMessage) -> Original:
    return Original(stored.subject, stored.payload, stored.headers, stored.timestamp_ns)


def _place(message: Message) -> tuple[str, str, int]:
    told: dict[str, Any] = message.headers
    sequence = str(told.get(letters.SEQUENCE, ""))
    number = int(sequence) if sequence.isascii() and sequence.isdigit() and len(sequence) <= 19 else 0
    return told.get(letters.STREAM, ""), told.get(letters.CONSUMER, ""), number
