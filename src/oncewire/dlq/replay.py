"""From letters back to their streams: planned, paced, resumable, and honest about what it does not do.

For each batch of letters: read, plan, record, publish, record where the copies stand, delete the letters. A run that is
killed is begun anew with the same filter: what is out by then is found by its record, and only its letter is cleared.

    replayed    a copy stands in its stream, the letter is gone: a known gap, explained by its record
    done        the input is done by now: running it again would only show a duplicate. `drop` clears the letter
    refused     the payload is gone, the ledger has forgotten, the letter has no story, another content is on its way
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from oncewire._ground.contracts import headers as carried
from oncewire._ground.contracts import ids
from oncewire._ground.contracts import letters as names
from oncewire._ground.errors import NotFound, OncewireError, Refused, Unavailable
from oncewire._ground.jetstream import Client, Outgoing, PubAck
from oncewire.dlq import rules
from oncewire.dlq.letters import Filter, Found, read_letters
from oncewire.dlq.republish import BATCH_MAX, Copy, OnStep, Republisher
from oncewire.dlq.rules import Record, State
from oncewire.dlq.standing import Horizon, LedgerView, Standing, horizon, withdrawn

DELETES_MAX: Final = 64
PROBLEMS_MAX: Final = 100
"""So many letters that were not replayed are named; the rest is counted."""

Progress = Callable[[int], None]


class Problem(Struct, frozen=True):
    """A letter that was not replayed, and why."""

    letter: str
    sequence: int
    reason: str


class Report(Struct):
    """What a run did, or would do."""

    matched: int = 0
    replayed: int = 0
    already_out: int = 0
    """Published by a run before this one; only the letter was left to clear."""
    done: int = 0
    refused: int = 0
    is_dry_run: bool = False
    problems: list[Problem] = field(default_factory=list)

    def note(self, found: Found, reason: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(found.letter.id, found.letter.sequence, reason))


def _nothing(_: int) -> None:
    """Nobody looks at the progress."""


def _no_step(_: str) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class ReplayOptions:
    """`rate_per_s` 0 is as fast as it goes. `body` replaces the content of the one letter that is meant."""

    rate_per_s: float = 0.0
    is_dry_run: bool = False
    body: bytes | None = None
    ledger: LedgerView | None = None
    begin: Progress = _nothing
    """Told how many letters are meant, before anything is done."""
    progress: Progress = _nothing
    on_step: OnStep = _no_step


class Replay:
    """One run."""

    def __init__(self, client: Client, chosen: Filter, options: ReplayOptions) -> None:
        self._client = client
        self._chosen = chosen
        self._options = options
        self._republisher = Republisher(client, options.on_step)
        self._horizon = Horizon({})
        self._withdrawn: set[str] = set()
        self.report = Report(is_dry_run=options.is_dry_run)

    async def run(self) -> Report:
        end = (await self._client.api(f"STREAM.INFO.{rules.DLQ}"))["state"]["last_seq"]
        meant = [one.letter async for one in read_letters(self._client, self._chosen, end)]
        if self._options.body is not None and len(meant) != 1:
            raise Refused(f"{len(meant)} letters are meant, and one body is given", hint="Name one letter.")
        self._withdrawn = await withdrawn(self._client, meant)
        self._horizon = await horizon(self._client, {one.stream for one in meant})
        self._options.begin(len(meant))
        rate = self._options.rate_per_s
        size = BATCH_MAX if rate <= 0 else max(1, min(BATCH_MAX, int(rate / 4)))
        began, handled = time.monotonic(), 0
        batch: list[Found] = []
        async for found in read_letters(self._client, self._chosen, end):
            batch.append(found)
            if len(batch) == size:
                await self._batch(batch)
                handled, batch = handled + len(batch), []
                if rate > 0:
                    await asyncio.sleep(max(0.0, began + handled / rate - time.monotonic()))
        if batch:
            await self._batch(batch)
        return self.report

    async def _batch(self, batch: list[Found]) -> None:
        report, options = self.report, self._options
        report.matched += len(batch)
        planned = await self._plan(batch)
        if options.is_dry_run:
            report.replayed += len(planned)
        elif planned:
            await self._send(planned)
        options.progress(len(batch))

    # ---- planning

    async def _plan(self, batch: list[Found]) -> list[tuple[Found, Copy]]:
        """The copies to publish; the others are noted with their reasons."""
        whole = [await self._whole(one) for one in batch]
        records = await self._republisher.records([one.letter.id for one in batch if one.letter.id])
        begun = {id_ for id_, (known, _) in records.items() if known.letter_sequence}
        standings = await self._standings([one for one in whole if isinstance(one, Found)])
        planned: list[tuple[Found, Copy]] = []
        for found, one in zip(batch, whole, strict=True):
            standing = standings.get(found.letter.id, Standing.OPEN)
            if found.letter.id in begun and isinstance(one, Found):
                planned.append((one, self._copy(one)))  # what was begun is finished, whatever became of it since
            elif not isinstance(one, Found):
                self._refuse(found, one)
            elif standing is Standing.OPEN:
                planned.append((one, self._copy(one)))
            elif standing is Standing.FORGOTTEN:
                self._refuse(found, "its ledger may have forgotten that it was done: it could happen twice")
            else:
                self.report.done += 1
                self.report.note(found, f"it is {standing} by now; `oncewire dlq drop` clears the letter")
        return planned

    def _refuse(self, found: Found, reason: str) -> None:
        self.report.refused += 1
        self.report.note(found, reason)

    async def _whole(self, found: Found) -> Found | str:
        """The letter with its original's body, or why there is none."""
        letter = found.letter
        if not (letter.id and letter.subject and letter.consumer):
            return "it has no story: somebody else wrote it"
        if letter.payload_is == names.GONE and self._options.body is None:
            return "its payload is gone"
        if self._horizon.is_beyond(letter.stream, letter.timestamp_ns, time.time_ns()):
            return "it is older than ledgers must remember: it could happen twice"
        if letter.payload_is != names.POINTER:
            return found
        try:
            stored = await self._client.get(letter.stream, letter.of_sequence)
        except NotFound:
            stored = None
        if stored is None or stored.timestamp_ns != letter.timestamp_ns:
            return "it is a pointer, and the original is gone"
        return Found(letter, replace(found.stored, payload=stored.payload))

    async def _standings(self, whole: Sequence[Found]) -> dict[str, Standing]:
        found = {one.letter.id: Standing.DONE for one in whole if one.letter.id in self._withdrawn}
        if self._options.ledger is not None and whole:
            inputs = [(self._resolved(one, one.stored.payload), one.letter.timestamp_ns) for one in whole]
            told = await asyncio.to_thread(self._options.ledger.standings, inputs)
            found |= {one.letter.id: standing for one, standing in zip(whole, told, strict=True)}
        return found

    @staticmethod
    def _resolved(found: Found, payload: bytes) -> rules.Resolved:
        return rules.resolve(found.letter.subject, payload, found.headers, found.letter.origin)

    def _copy(self, found: Found) -> Copy:
        letter, body = found.letter, self._options.body
        resolved = self._resolved(found, found.stored.payload)
        headers = rules.replay_headers(letter.consumer, letter.id, letter.origin, found.headers, resolved)
        if body is None:
            return Copy(letter.id, letter.subject, found.stored.payload, headers, letter.sequence)
        if resolved.identity:
            edited = rules.resolve(letter.subject, body, headers, letter.origin)
            if edited.identity != resolved.identity:
                raise Refused(
                    f"the edited body is another input ({edited.identity or 'it breaks its contract'})",
                    hint=f"Keep what makes it the same: {resolved.identity}.",
                )
            headers[carried.REPLAY_REPLACES] = resolved.digest
        return Copy(letter.id, letter.subject, body, headers, letter.sequence)

    # ---- acting

    async def _send(self, planned: Sequence[tuple[Found, Copy]]) -> None:
        outcomes = await self._republisher.publish([copy for _, copy in planned], time.time_ns() // 1_000_000)
        cleared: list[Found] = []
        for (found, _), outcome in zip(planned, outcomes, strict=True):
            if isinstance(outcome, Unavailable):
                raise outcome
            if not isinstance(outcome, PubAck):
                self._refuse(found, str(outcome))
                continue
            if outcome.is_duplicate:
                self.report.already_out += 1
            else:
                self.report.replayed += 1
            cleared.append(found)
        if self._options.body is None:
            await clear(self._client, cleared)
        self._options.on_step("cleared")


async def clear(client: Client, letters: Sequence[Found]) -> None:
    """Delete letters by their sequence; what they point at in a work queue may go then too."""
    gate = asyncio.Semaphore(DELETES_MAX)

    async def one(found: Found) -> None:
        letter = found.letter
        async with gate:
            if letter.payload_is == names.POINTER:
                await _ack_original(client, found)
            try:
                await client.api(f"STREAM.MSG.DELETE.{rules.DLQ}", {"seq": letter.sequence, "no_erase": True})
            except NotFound:
                return  # another run was quicker

    await asyncio.gather(*map(one, letters))


async def _ack_original(client: Client, found: Found) -> None:
    letter = found.letter
    subject = f"$JS.ACK.{letter.stream}.{letter.consumer}.1.{letter.of_sequence}.1.0.0"
    try:
        await client.call(subject, b"+ACK", timeout_s=2.0)
    except OncewireError:
        return  # the consumer is gone; nobody is given the original again


async def drop(client: Client, chosen: Filter, reason: str, progress: Progress = _nothing) -> int:
    """Delete letters for good. What became of each is recorded first."""
    republisher = Republisher(client, _no_step)
    dropped = 0
    batch: list[Found] = []

    async def flush() -> None:
        nonlocal dropped
        told = [one for one in batch if one.letter.id]
        known = await republisher.records([one.letter.id for one in told])
        records = [_dropped(one, known, reason) for one in told]
        for outcome in await republisher.write(records, [None] * len(records)) if records else []:
            if not isinstance(outcome, PubAck):
                raise outcome
        await clear(client, batch)
        dropped += len(batch)
        progress(len(batch))
        batch.clear()

    async for found in read_letters(client, chosen):
        batch.append(found)
        if len(batch) == BATCH_MAX:
            await flush()
    if batch:
        await flush()
    return dropped


def _dropped(found: Found, known: dict[str, tuple[Record, int]], reason: str) -> Record:
    letter = found.letter
    old = known.get(letter.id)
    told = names.one_line(reason)
    if old is not None and old[0].state is State.PUBLISHED:
        return replace(old[0], reason=told)  # it was replayed before, edited: that is what became of it
    generation = old[0].generation if old else 0
    now_ms = time.time_ns() // 1_000_000
    return Record(letter.id, State.DROPPED, generation, sent_ms=now_ms, letter_sequence=letter.sequence, reason=told)


async def inject(client: Client, subject: str, body: bytes, consumer: str, cause: str) -> str:
    """A letter for tests, as if a consumer had failed: the service would have written the same."""
    now_ns = time.time_ns()
    names_found = (await client.api("STREAM.NAMES", {"subject": subject})).get("streams") or []
    if len(names_found) != 1:
        raise NotFound(f"no stream captures {subject}", hint="A letter goes back to its subject when it is replayed.")
    reason = names.one_line(cause)
    failure = rules.Failure(
        stream=names_found[0], sequence=0, consumer=consumer, kind="injected", reason=reason, outcome="dead"
    )
    original = rules.Original(subject, body, {}, now_ns)
    limits = rules.Limits(client.server.max_payload)
    letter = rules.letter_of(failure, original, 0, now_ns // 1_000_000, limits)
    id_ = ids.letter_id(ids.Origin(failure.stream, 0, 0, now_ns), hashlib.sha256(body).hexdigest())
    headers = letter.headers | {names.INJECTED: "1"}
    await client.publisher.publish(Outgoing(letter.subject, body, id_, headers))
    return id_
