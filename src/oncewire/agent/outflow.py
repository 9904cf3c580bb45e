"""From the ledger to the streams: publish what a commit holds, remember what is confirmed, find what is not.

Fresh effects go out by fast ingest or in atomic batches where they are many (exits.py). What is left open (an error, a
crash, another process that died) is swept. What that means depends on the stream it goes to, which is learned first:

    a log, sent by this process less than    published again under its id: the server still drops a repeat
    half a duplicate window ago
    a log, in all other cases                read first (ids only, from where it ended when the effect was written), and
                                             published only if it is not there: the server may have forgotten the id
    a work queue, a stream with a limit per  published again: what was stored there may have left the stream since, so
    subject or a time to live per message    reading proves nothing. The receiver's ledger drops a repeat

The age of an effect is measured by the monotonic clock of the process that sent it. Two processes' wall clocks may
differ by more than the window.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from oncewire._ground.contracts import blocks, subjects
from oncewire._ground.errors import ContractViolation, NotFound, TooLarge
from oncewire._ground.fields import columns, distinct
from oncewire._ground.jetstream import Client, Outgoing, PubAck, Start
from oncewire._ground.jetstream import protocol as wire
from oncewire._ground.jetstream.lookup import find_ids
from oncewire._ground.jetstream.publish import DEAD_LETTER_RESERVE, Outcome, encode_header, reserve_of
from oncewire._ground.ledger.rules import Ledger, Sending, targets_of
from oncewire._ground.ledger.store import Block, Mark
from oncewire.agent.effects import no_confirmation
from oncewire.agent.exits import Exit

MANY = 24
"""So many waiting messages make an atomic batch cheaper than single publishes on a server that syncs always."""
OWN_HEADERS = 256
"""So much the id and the trace of an effect take at most."""
SURELY_FREE = OWN_HEADERS + DEAD_LETTER_RESERVE
RESOLVE_S = 10.0
HALF = 0.5
LEDGER_STREAM = "LEDGER"


class Target(NamedTuple):
    """A stream that effects go to."""

    window_s: float
    """How long it remembers ids."""
    is_log: bool
    """Whether only the stream's age and size remove messages: an id that is not found there was not stored."""
    is_confirming: bool
    bytes_max: int | None
    """Set where it takes no larger message."""
    exit: Exit | None
    """Set where the stream allows fast ingest and atomic batches."""


DELETED = Target(0.0, False, True, None, None)


def target_of(config: dict[str, Any], exit_: Exit | None) -> Target:
    """A stream by its configuration at the server."""
    return Target(
        (config.get("duplicate_window") or 0) / 1e9,
        config["retention"] == "limits"
        and config.get("max_msgs_per_subject", -1) <= 0
        and not config.get("allow_msg_ttl", False),
        not config.get("no_ack", False),
        config["max_msg_size"] if config.get("max_msg_size", -1) >= 0 else None,
        exit_ if config.get("allow_batched") and config.get("allow_atomic") else None,
    )


class Targets:
    """Which stream a subject belongs to, what kind of stream that is, and how far it is known to reach."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._streams: dict[str, str] = {}
        self._known: dict[str, Target] = {}
        self.last: dict[str, int] = {}
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
            if not (await self.learn(names[0])).is_confirming:
                raise no_confirmation(subject, names[0])
            self._streams[subject] = names[0]
        return self._streams[subject]

    async def learn(self, stream: str) -> Target:
        """What kind of stream it is, asked of the server once per process."""
        target = self._known.get(stream)
        if target is None:
            info = await self._client.api(f"STREAM.INFO.{stream}")
            target = self._known[stream] = target_of(info["config"], Exit(self._client))
            self.last[stream] = max(self.last.get(stream, 0), info["state"]["last_seq"])
        return target

    def exit_of(self, stream: str) -> Exit | None:
        """The quick way into a stream, if it is known to have one."""
        target = self._known.get(stream)
        return target.exit if target is not None else None

    def check_size(self, sending: Sending) -> None:
        """Refuse what its stream or the server would never take."""
        connection, target = self._client.connection, self._known.get(sending.stream)
        limit = target.bytes_max if target is not None else None
        surely = connection.server.max_payload - SURELY_FREE
        if limit is None and not sending.headers and len(sending.payload) <= surely:
            return
        size = len(encode_header(outgoing([sending])[0])) + len(sending.payload)
        connection.check_size(size, reserve_of(sending.subject))
        if limit is not None and size > limit:
            raise TooLarge(
                f"the message on {sending.subject} has {size} bytes with headers, {sending.stream} takes up to {limit}",
                hint="Store large content elsewhere and send its address, or raise the stream's max_msg_bytes.",
            )


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
        self._sent_at: dict[int, float] = {}
        """When this process first sent a block that is still open, by its monotonic clock."""

    async def start(self) -> None:
        await self._targets.learn(LEDGER_STREAM)

    def announcement(self, number: int, body: bytes) -> Sending:
        id_ = blocks.announcement_id(self._ledger.id, self._ledger.name, number)
        return Sending(id_, self._subject, body, None, LEDGER_STREAM)

    async def publish(self, block: int, sendings: Sequence[Sending], announcement: bytes) -> tuple[list[Mark], str]:
        """Publish a fresh block: marks for what is confirmed, and the first error ('' when all is)."""
        self._sent_at[block] = time.monotonic()
        everything = [*sendings, self.announcement(block, announcement)]
        by_stream = {stream: [*_all_of(part)] for stream, part in targets_of(sendings).items()}
        by_stream.setdefault(LEDGER_STREAM, []).append(len(sendings))
        parts = await asyncio.gather(*(self._part(block, everything, indexes) for indexes in by_stream.values()))
        marks = sorted(itertools.chain.from_iterable(found for found, _ in parts))
        error = next((error for _, error in parts if error), "")
        if not error:
            del self._sent_at[block]
        return marks, error

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
            return partial(self._client.publish_many, raw=True)
        way = self._targets.exit_of(stream)
        return way.publish if way is not None else partial(self._client.publish_all, raw=True)

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

    async def resend(self, block: Block, holes: Sequence[tuple[int, int]]) -> tuple[list[Mark], str]:
        """Effects of a block that nobody has confirmed: look for those that a log may hold already, then publish the
        others singly."""
        everything = [*block.content.effects, self.announcement(block.number, block.announcement)]
        open_ = [*_all_of(holes)]
        streams = {everything[index].stream for index in open_}
        targets = {stream: await self._target(stream) for stream in sorted(streams)}
        age_s = time.monotonic() - self._sent_at.get(block.number, -math.inf)
        doubtful = [index for index in open_ if is_doubtful(targets[everything[index].stream], age_s)]
        stored = await self._find([everything[index] for index in doubtful], block.content.targets)
        outcomes: dict[int, Any] = {at: stored[everything[at].id] for at in doubtful if everything[at].id in stored}
        rest = [index for index in open_ if index not in outcomes]
        acks = await self._client.publish_many(outgoing([everything[index] for index in rest]), raw=True)
        marks, error = self.marks(block.number, everything, outcomes | dict(zip(rest, acks, strict=True)))
        if not error:
            self._sent_at.pop(block.number, None)
        return marks, error

    async def _target(self, stream: str) -> Target:
        try:
            return await self._targets.learn(stream)
        except NotFound:  # deleted: there is nothing to read, and the server says what becomes of the subject now
            return DELETED

    async def _find(self, sendings: Sequence[Sending], starts: dict[str, int]) -> dict[str, PubAck]:
        """Where these ids are stored: one scan without bodies per stream and subject, from where the target ended."""
        wanted: dict[tuple[str, str], set[str]] = {}
        for sending in sendings:
            wanted.setdefault((sending.stream, sending.subject), set()).add(sending.id)
        stored: dict[str, PubAck] = {}
        for (stream, subject), ids in wanted.items():
            stored |= await find_ids(self._client, stream, subject, ids, Start(sequence=starts.get(stream, 0) + 1))
        return stored


def is_doubtful(target: Target, age_s: float) -> bool:
    """Whether a log may hold an effect under an id that its server has forgotten."""
    return target.is_log and age_s > target.window_s * HALF


def _all_of(ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    """What closed ranges cover."""
    return itertools.chain.from_iterable(range(first, last + 1) for first, last in ranges)


def now_ms() -> int:
    """The wall clock of this process: for ages and due times, never for what a handler sees."""
    return time.time_ns() // 1_000_000
