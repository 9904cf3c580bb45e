"""Copies of given-up messages, back to their subjects, once each: recorded, looked up, published, recorded.

A copy has an id of its own: under the original's id the server would drop it in silence within the duplicate window.
The record in DLQ_REPLAYS is written first, so that whoever comes after a kill finds the same id and generation; within
half the window the server itself refuses a repeat, after that the target is read before anything is published.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from oncewire._ground.contracts import ids, subjects
from oncewire._ground.errors import Conflict, NotFound, OncewireError
from oncewire._ground.jetstream import Client, Outgoing, PubAck, Start
from oncewire._ground.jetstream.lookup import find_ids
from oncewire.dlq import rules
from oncewire.dlq.rules import Next, Record, State

BATCH_MAX = 500
"""The server answers for up to 1,024 subjects at once."""

OnStep = Callable[[str], None]


class Copy(Struct, frozen=True):
    """What is to stand in a stream once more."""

    letter: str
    subject: str
    payload: bytes
    headers: dict[str, str]
    letter_sequence: int = 0

    @property
    def content(self) -> str:
        return hashlib.sha256(self.payload).hexdigest()[:32]


class Target(Struct, frozen=True):
    """The stream that takes a subject."""

    stream: str
    last: int
    window_s: float
    keeps: bool
    """Whether what was published once can still be found: not on work queues, not with limits per subject."""


Outcome = PubAck | OncewireError


class Republisher:
    """For one run; asks for each target once per batch."""

    def __init__(self, client: Client, on_step: OnStep) -> None:
        self._client = client
        self._on_step = on_step

    async def publish(self, copies: Sequence[Copy], now_ms: int) -> list[Outcome]:
        """Each copy stands in its stream when this returns a PubAck for it. At most BATCH_MAX at once."""
        assert len(copies) <= BATCH_MAX
        outcomes: dict[str, Outcome] = {}
        targets = await self._targets({copy.subject for copy in copies}, outcomes, copies)
        known = await self.records([copy.letter for copy in copies])
        by_step: dict[Next, list[Copy]] = {step: [] for step in Next}
        records: dict[str, Record] = {}
        for copy in copies:
            if copy.letter in outcomes:
                continue
            target, found = targets[copy.subject], known.get(copy.letter)
            old = found[0] if found else None
            step = rules.next_step(old, copy.letter_sequence, now_ms, target.window_s)
            by_step[Next.AGAIN if step is Next.LOOK and not target.keeps else step].append(copy)
            if old is not None and step is not Next.FRESH:
                records[copy.letter] = old
        begun = [copy for step in (Next.AGAIN, Next.LOOK, Next.OUT) for copy in by_step[step]]
        outcomes |= {copy.letter: _other(known[copy.letter][0]) for copy in begun if not _is_same(copy, known)}
        fresh = await self._record(by_step[Next.FRESH], known, targets, now_ms)
        records |= fresh.records
        outcomes |= fresh.outcomes
        outcomes |= {
            copy.letter: _ack(records[copy.letter]) for copy in by_step[Next.OUT] if copy.letter not in outcomes
        }
        outcomes |= await self._look([copy for copy in by_step[Next.LOOK] if copy.letter not in outcomes], records)
        open_ = [copy for copy in copies if copy.letter not in outcomes]
        outcomes |= await self._send(open_, records, is_fresh=len(open_) == len(by_step[Next.FRESH]))
        await self._note(copies, outcomes, records)
        return [outcomes[copy.letter] for copy in copies]

    async def _targets(
        self, wanted: set[str], outcomes: dict[str, Outcome], copies: Sequence[Copy]
    ) -> dict[str, Target]:
        found: dict[str, Target] = {}
        for subject in sorted(wanted):
            try:
                found[subject] = await self._target(subject)
            except OncewireError as error:
                outcomes |= {copy.letter: error for copy in copies if copy.subject == subject}
        return found

    async def _target(self, subject: str) -> Target:
        names = (await self._client.api("STREAM.NAMES", {"subject": subject})).get("streams") or []
        if len(names) != 1:
            raise NotFound(f"no stream captures {subject}", hint="Declare one, and run `oncewire topology apply`.")
        info = await self._client.api(f"STREAM.INFO.{names[0]}")
        config = info["config"]
        keeps = config["retention"] == "limits" and config.get("max_msgs_per_subject", -1) <= 0
        window_s = (config.get("duplicate_window") or 0) / 1e9
        return Target(names[0], info["state"]["last_seq"], window_s, keeps and not config.get("allow_msg_ttl"))

    # ---- records

    async def records(self, letters: Sequence[str]) -> dict[str, tuple[Record, int]]:
        """What is known of letters, with the sequence of each record."""
        found: dict[str, tuple[Record, int]] = {}
        for at in range(0, len(letters), BATCH_MAX):
            wanted = sorted({subjects.dlq_replay(one) for one in letters[at : at + BATCH_MAX]})
            for one in await self._client.get_last_of(rules.REPLAYS, wanted):
                record = rules.read_record(one.payload)
                found[record.letter] = (record, one.sequence)
        return found

    async def write(self, records: Sequence[Record], revisions: Sequence[int | None]) -> list[Outcome]:
        """Each only on the revision that was seen; None means whatever stands there."""
        messages = [
            Outgoing(subjects.dlq_replay(one.letter), rules.pack_record(one), expected_last_subject_sequence=revision)
            for one, revision in zip(records, revisions, strict=True)
        ]
        return list(await self._client.publish_all(messages, raw=True))

    async def _record(
        self,
        copies: Sequence[Copy],
        known: dict[str, tuple[Record, int]],
        targets: dict[str, Target],
        now_ms: int,
    ) -> _Recorded:
        records: list[Record] = []
        for copy in copies:
            target, old = targets[copy.subject], known.get(copy.letter)
            generation = old[0].generation + 1 if old else 1
            replay_id = ids.replay_id(copy.letter, generation)
            place = (target.stream, copy.subject, target.last, now_ms, 0, copy.letter_sequence, copy.content)
            records.append(Record(copy.letter, State.SENT, generation, replay_id, *place))
        revisions = [known[copy.letter][1] if copy.letter in known else 0 for copy in copies]
        written = await self.write(records, revisions) if records else []
        self._on_step("recorded")
        failed = {one.letter: _refusal(done) for one, done in zip(records, written, strict=True) if _is_bad(done)}
        return _Recorded({one.letter: one for one in records}, failed)

    # ---- copies

    async def _look(self, copies: Sequence[Copy], records: dict[str, Record]) -> dict[str, Outcome]:
        """Those that stand in their targets already."""
        places: dict[tuple[str, str], list[Copy]] = {}
        for copy in copies:
            places.setdefault((records[copy.letter].stream, copy.subject), []).append(copy)
        found: dict[str, Outcome] = {}
        for (stream, subject), part in places.items():
            wanted = {records[copy.letter].replay_id: copy.letter for copy in part}
            start = Start(sequence=min(records[copy.letter].after for copy in part) + 1)
            there = await find_ids(self._client, stream, subject, wanted.keys(), start)
            found |= {wanted[id_]: ack for id_, ack in there.items()}
        return found

    async def _send(self, copies: Sequence[Copy], records: dict[str, Record], *, is_fresh: bool) -> dict[str, Outcome]:
        by_stream: dict[str, list[Copy]] = {}
        for copy in copies:
            by_stream.setdefault(records[copy.letter].stream, []).append(copy)
        publish = self._client.publish_all if is_fresh else self._client.publish_many
        outcomes: dict[str, Outcome] = {}

        async def send(part: list[Copy]) -> None:
            messages = [
                Outgoing(copy.subject, copy.payload, records[copy.letter].replay_id, copy.headers) for copy in part
            ]
            for copy, outcome in zip(part, await publish(messages), strict=True):
                outcomes[copy.letter] = outcome

        await asyncio.gather(*(send(part) for part in by_stream.values()))
        self._on_step("published")
        return outcomes

    async def _note(self, copies: Sequence[Copy], outcomes: dict[str, Outcome], records: dict[str, Record]) -> None:
        """Write down where they stand, before anything is cleared."""
        done: list[Record] = []
        for copy in copies:
            outcome, record = outcomes[copy.letter], records.get(copy.letter)
            if isinstance(outcome, PubAck) and record is not None and record.state is State.SENT:
                done.append(replace(record, state=State.PUBLISHED, stream=outcome.stream, sequence=outcome.sequence))
        if done:
            for one, outcome in zip(done, await self.write(done, [None] * len(done)), strict=True):
                if not isinstance(outcome, PubAck):
                    outcomes[one.letter] = outcome
        self._on_step("noted")


class _Recorded(Struct, frozen=True):
    records: dict[str, Record]
    outcomes: dict[str, Outcome]


def _is_same(copy: Copy, known: dict[str, tuple[Record, int]]) -> bool:
    return known[copy.letter][0].content == copy.content


def _other(record: Record) -> Conflict:
    return Conflict(
        f"letter {record.letter} was replayed with another content, as {record.replay_id}",
        hint="Replay it again as it was then: that finishes what was begun and clears the letter.",
    )


def _ack(record: Record) -> PubAck:
    return PubAck(record.stream, record.sequence, is_duplicate=True)


def _is_bad(outcome: Outcome) -> bool:
    return not isinstance(outcome, PubAck)


def _refusal(outcome: Outcome) -> Outcome:
    if isinstance(outcome, Conflict):
        return Conflict("somebody else is replaying this letter", hint="Run it again: it goes on where that one is.")
    return outcome
