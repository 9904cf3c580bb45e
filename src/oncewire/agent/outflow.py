"""From the ledger to the streams: publish what a commit holds, remember what is confirmed, find what is not.

Fresh effects go out by fast ingest or in atomic batches where they are many (exits.py). What is left open (an error, a
crash, another process that died) is swept: within half the duplicate window it is simply published again under its id;
after that the target is read first (ids only, from where it stood when the effect was written), since the server has
forgotten the id by then.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from oncewire.agent.exits import Exit
from oncewire.contracts import blocks, subjects
from oncewire.errors import ContractViolation
from oncewire.fields import columns, distinct
from oncewire.jetstream import Client, Outgoing, PubAck
from oncewire.jetstream import protocol as wire
from oncewire.jetstream.lookup import find_ids
from oncewire.jetstream.publish import DEAD_LETTER_RESERVE, Outcome, reserve_of
from oncewire.ledger.rules import Ledger, Sending, targets_of
from oncewire.ledger.store import Block, Mark

MANY = 24
"""So many waiting messages make an atomic batch cheaper than single publishes on a server that syncs always."""
OWN_HEADERS = 256
"""So much the id and the trace of an effect take at most."""
SURELY_FREE = OWN_HEADERS + DEAD_LETTER_RESERVE
RESOLVE_S = 10.0
HALF = 0.5
LEDGER_STREAM = "LEDGER"


class Targets:
    """Which stream a subject belongs to, how long it remembers ids, and how far it is known to reach."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._streams: dict[str, str] = {}
        self.last: dict[str, int] = {}
        self.window_s: dict[str, float] = {}
        self.keeps: dict[str, bool] = {}
        self.exits: dict[str, Exit] = {}
        """Streams that allow fast ingest and atomic batches."""
        self._loop = asyncio.get_running_loop()

    def stream_of(self, subject: str) -> str:
        """From the ledger's thread: the stream, asked of the server once per subject."""
        found = self._streams.get(subject)
        if found is None:
            asked = asyncio.run_coroutine_threadsafe(self.resolve(subject), self._loop)
            found = asked.result(RESOLVE_S)
        return found

    async def resolve(self, subject: str) -> str:
        if subject not in self._streams:
            wire.encode_subject(subject)
            names = (await self._client.api("STREAM.NAMES", {"subject": subject})).get("streams") or []
            if len(names) != 1:
                raise ContractViolation(
                    f"an effect goes to {subject}, which no stream captures",
                    field="subject",
                    hint="Declare a stream for it and run `oncewire topology apply`.",
                )
            await self.learn(names[0])
            self._streams[subject] = names[0]
        return self._streams[subject]

    async def learn(self, stream: str) -> None:
        if stream in self.last:
            return
        info = await self._client.api(f"STREAM.INFO.{stream}")
        config = info["config"]
        self.window_s[stream] = (config.get("duplicate_window") or 0) / 1e9
        self.keeps[stream] = config["retention"] != "workqueue" and config.get("max_msgs_per_subject", -1) <= 0
        if config.get("allow_batched") and config.get("allow_atomic"):
            self.exits[stream] = Exit(self._client)
        self.last[stream] = info["state"]["last_seq"]

    def check_size(self, sending: Sending) -> None:
        connection = self._client.connection
        if not sending.headers and len(sending.payload) <= connection.server.max_payload - SURELY_FREE:
            return
        headers = sum(len(name) + len(value) + 4 for name, value in sending.headers.items()) if sending.headers else 0
        connection.check_size(len(sending.payload) + headers + OWN_HEADERS, reserve_of(sending.subject))


def outgoing(sendings: Sequence[Sending]) -> list[Outgoing]:
    fields = columns(sendings, Sending, "subject", "payload", "id", "headers", "trace")
    no_stream, no_sequence = itertools.repeat(""), itertools.repeat(None)
    return list(map(Outgoing, *fields[:4], no_stream, no_sequence, no_sequence, fields[4]))


class Outflow:
    """Publishes for one agent."""

    def __init__(self, client: Client, ledger: Ledger, targets: Targets) -> None:
        self._client = client
        self._ledger = ledger
        self._targets = targets
        self._subject = subjects.ledger(ledger.agent, ledger.id)

    async def start(self) -> None:
        await self._targets.learn(LEDGER_STREAM)

    def announcement(self, number: int, body: bytes) -> Sending:
        id_ = blocks.announcement_id(self._ledger.id, self._ledger.name, number)
        return Sending(id_, self._subject, body, None, LEDGER_STREAM)

    async def publish(self, block: int, sendings: Sequence[Sending], announcement: bytes) -> tuple[list[Mark], str]:
        """Publish a fresh block: marks for what is confirmed, and the first error ('' when all is)."""
        everything = [*sendings, self.announcement(block, announcement)]
        by_stream = {stream: [*_all_of(part)] for stream, part in targets_of(sendings).items()}
        by_stream.setdefault(LEDGER_STREAM, []).append(len(sendings))
        parts = await asyncio.gather(*(self._part(block, everything, indexes) for indexes in by_stream.values()))
        marks = sorted(itertools.chain.from_iterable(found for found, _ in parts))
        return marks, next((error for _, error in parts if error), "")

    async def _part(self, block: int, everything: list[Sending], indexes: list[int]) -> tuple[list[Mark], str]:
        messages = outgoing([everything[index] for index in indexes])
        outcomes = await self._way_of(everything[indexes[0]].stream, len(messages))(messages)
        is_one_run = indexes[-1] - indexes[0] + 1 == len(indexes)
        last = outcomes[-1]
        different = distinct(outcomes)
        acks = [outcome for outcome in different if isinstance(outcome, PubAck)]
        if is_one_run and isinstance(last, PubAck) and len(acks) == len(different):
            highest = max([ack.sequence for ack in acks])
            self._targets.last[last.stream] = max(self._targets.last.get(last.stream, 0), highest)
            return [Mark(block, indexes[0], indexes[-1], last.stream, highest)], ""
        return self.marks(block, everything, dict(zip(indexes, outcomes, strict=True)))

    def _way_of(self, stream: str, count: int) -> Callable[[Sequence[Outgoing]], Awaitable[list[Outcome]]]:
        if count < MANY:
            return self._client.publish_many
        way = self._targets.exits.get(stream)
        return way.publish if way is not None else self._client.publish_all

    def marks(self, block: int, everything: Sequence[Sending], outcomes: dict[int, Any]) -> tuple[list[Mark], str]:
        """Confirmed effects as ranges of one stream each, and the first error."""
        marks: list[Mark] = []
        error = ""
        for index in sorted(outcomes):
            outcome = outcomes[index]
            if isinstance(outcome, PubAck):
                self._targets.last[outcome.stream] = max(self._targets.last.get(outcome.stream, 0), outcome.sequence)
                last = marks[-1] if marks else None
                if last is not None and last.last == index - 1 and last.stream == outcome.stream:
                    marks[-1] = last._replace(last=index, sequence=max(last.sequence, outcome.sequence))
                else:
                    marks.append(Mark(block, index, index, outcome.stream, outcome.sequence))
            elif not error:
                error = f"{everything[index].subject}: {outcome}"
        return marks, error

    # ---- what is left open

    async def resend(self, block: Block, holes: Sequence[tuple[int, int]], now_ms: int) -> tuple[list[Mark], str]:
        """Effects of a block that nobody has confirmed: look where the id may be forgotten, then publish singly."""
        everything = [*block.content.effects, self.announcement(block.number, block.announcement)]
        open_ = [*_all_of(holes)]
        outcomes: dict[int, Any] = {}
        old = [index for index in open_ if self._is_forgotten(everything[index].stream, block.content.sent_ms, now_ms)]
        if old:
            found = await self._find([everything[index] for index in old], block.content.targets)
            outcomes |= {index: found[everything[index].id] for index in old if everything[index].id in found}
        rest = [index for index in open_ if index not in outcomes]
        acks = await self._client.publish_many(outgoing([everything[index] for index in rest]))
        return self.marks(block.number, everything, outcomes | dict(zip(rest, acks, strict=True)))

    def _is_forgotten(self, stream: str, sent_ms: int, now_ms: int) -> bool:
        """The server may have dropped the id, and the stream still holds what came in: worth a look."""
        window_s = self._targets.window_s.get(stream, 0.0)
        return self._targets.keeps.get(stream, True) and now_ms - sent_ms > window_s * HALF * 1000

    async def _find(self, sendings: Sequence[Sending], starts: dict[str, int]) -> dict[str, PubAck]:
        """Where these ids stand: one scan without bodies per stream and subject, from where the target stood."""
        wanted: dict[tuple[str, str], set[str]] = {}
        for sending in sendings:
            await self._targets.learn(sending.stream)
            wanted.setdefault((sending.stream, sending.subject), set()).add(sending.id)
        found: dict[str, PubAck] = {}
        for (stream, subject), ids in wanted.items():
            found |= await find_ids(self._client, stream, subject, ids, starts.get(stream, 0) + 1)
        return found


def _all_of(ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    """What closed ranges cover."""
    return itertools.chain.from_iterable(range(first, last + 1) for first, last in ranges)


def now_ms() -> int:
    """The wall clock of this process: for ages and due times, never for what a handler sees."""
    return time.time_ns() // 1_000_000
