"""Publishes claims: as one atomic batch over many conversations, or in rounds of single messages, one of each
conversation, where that is quicker (learned, jetstream/pace.py) or the batch was refused. In order within each
conversation, whatever happens; what becomes of each conversation is the answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec.structs import replace

from oncewire._ground.contracts import trace
from oncewire._ground.contracts.subjects import chat_events
from oncewire._ground.errors import (
    Conflict,
    NotFound,
    OncewireError,
    PermissionDenied,
    Refused,
    Unavailable,
)
from oncewire._ground.jetstream import Client, Outgoing, PubAck
from oncewire._ground.jetstream.pace import Pace
from oncewire.outbox.rules import (
    Claim,
    Progress,
    Row,
    Stored,
    body_of,
    headers_of,
    key_in,
    resolved,
    rounds_of,
    started,
)

log = logging.getLogger("oncewire.outbox")

PUBLISH_S_MAX: Final = 10.0
RESOLVES_MAX: Final = 3
"""After so many refusals in one pass somebody else is at work on the subject: look again later."""
SUBJECTS_PER_LOOK: Final = 100
PAGE: Final = 256
PAGE_BYTES: Final = 8 * 1024 * 1024
BATCHES_ARE_OFF: Final = 10174
FORGET: Final = 0.02
"""Passes are few, and how busy the machine is changes between them: what a way took a minute ago says little."""

OnStep = Callable[[str], None]
StillOurs = Callable[[], Awaitable[None]]


class Publishing:
    """The way of claims into the stream that captures `<prefix>.*`."""

    def __init__(self, client: Client, prefix: str, on_step: OnStep, *, is_traced: bool = False) -> None:
        self._client = client
        self._prefix = prefix
        self._on_step = on_step
        self._is_traced = is_traced
        self._stream = ""
        self._has_batches = True
        self._pace = Pace(FORGET, is_wary=True)

    async def publish(self, claims: Sequence[Claim], still_ours: StillOurs) -> list[Progress]:
        """How far each conversation came. Raises Unavailable when none can be published now.

        `still_ours` raises when the claim is lost: it is asked before a row is published with an expectation that was
        not recorded, since then the fence no longer tells us from whoever has the claim now.
        """
        open_ones = [started(claim) for claim in claims]
        rounds = rounds_of([one.claim for one in open_ones if not one.is_over])
        if self._has_batches and self._pace.choose_batch(sum(rounds), rounds):
            open_ones = await self._as_batch(open_ones, still_ours)
        found = await self._one_by_one(open_ones, still_ours)
        if all(one.postponed and not one.confirmed for one in found):
            raise Unavailable(found[0].postponed)
        return found

    def _message(self, row: Row, expected: int | None) -> Outgoing:
        subject = chat_events(row.conversation_id, prefix=self._prefix)
        headers = headers_of(row)
        context = trace.parse_traceparent(row.traceparent) if row.traceparent else None
        if context is None and self._is_traced:
            context = trace.begun_by(row.message_id)
        if context is not None:
            headers |= context.headers()
        return Outgoing(subject, body_of(row), headers=headers, expected_last_subject_sequence=expected)

    # ---- many at once

    async def _as_batch(self, given: list[Progress], still_ours: StillOurs) -> list[Progress]:
        """All as one batch; a second time when only what we expected was out of date. What is left goes one by one."""
        found = given
        for is_second in (False, True):
            try:
                return await self._commit(found)
            except Conflict:
                if is_second:
                    return found
                found = await self._resolve(found)
                await still_ours()
            except (Refused, Unavailable) as error:
                if isinstance(error, Unavailable) and not error.server_code:
                    raise
                self._note(error)
                return found
        return found

    async def _commit(self, given: list[Progress]) -> list[Progress]:
        rest = [one for one in given if not one.is_over]
        messages = [
            self._message(row, one.expected if at == 0 else None)
            for one in rest
            for at, row in enumerate(one.claim.rows[one.confirmed :])
        ]
        if not messages:
            return given
        self._on_step("publishing")
        began = time.monotonic()
        ack = await self._client.publish_atomic(messages, PUBLISH_S_MAX, raw=True)
        self._pace.learn(len(messages), (time.monotonic() - began) * 1e6, is_batch=True)
        place = ack.sequence - len(messages)
        found = []
        for one in given:
            if not one.is_over:
                place += len(one.claim.rows) - one.confirmed
                one = replace(one, confirmed=len(one.claim.rows), stream_sequence=place)
            found.append(one)
        return found

    def _note(self, error: OncewireError) -> None:
        if error.server_code == BATCHES_ARE_OFF:
            self._has_batches = False
            log.warning("the stream takes no atomic batches, rows go one by one: run `oncewire topology apply`")
        else:
            log.info("a batch was refused, its rows go one by one: %s", error.message)

    # ---- one by one

    async def _one_by_one(self, given: list[Progress], still_ours: StillOurs) -> list[Progress]:
        """One row of each conversation at a time, all conversations side by side."""
        found = list(given)
        resolves = 0
        while places := [place for place, one in enumerate(found) if not one.is_over]:
            refused = await self._next_rows(found, places)
            if refused:
                resolves += 1
                if resolves > RESOLVES_MAX:
                    for place in refused:
                        found[place] = replace(found[place], postponed="others write to its subject all the time")
                    continue
                for place, one in zip(refused, await self._resolve([found[at] for at in refused]), strict=True):
                    found[place] = one
                await still_ours()
        return found

    async def _next_rows(self, found: list[Progress], places: list[int]) -> list[int]:
        """Publish the next row of those at `places`; returns which were refused for what they expected."""
        messages = [self._message(found[place].next_row, found[place].expected) for place in places]
        self._on_step("publishing")
        began = time.monotonic()
        try:
            outcomes = await self._client.publish_many(messages, PUBLISH_S_MAX, raw=True)
            self._pace.learn(len(messages), (time.monotonic() - began) * 1e6, is_batch=False)
        except Unavailable as away:
            outcomes = [away] * len(messages)
        refused = []
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, Conflict):
                refused.append(place)
            else:
                found[place] = _after(found[place], outcome)
        self._on_step("row_published")
        return refused

    # ---- after a refusal

    async def _resolve(self, given: list[Progress]) -> list[Progress]:
        """What the stream holds of those that are not over; the rest as they are."""
        subjects = {chat_events(one.claim.conversation_id, prefix=self._prefix): one for one in given}
        lasts = await self._lasts([subject for subject, one in subjects.items() if not one.is_over])
        found = []
        for subject, one in subjects.items():
            last = lasts.get(subject, 0)
            if one.is_over or last == one.expected:
                found.append(one)
                continue
            if last < one.expected:
                log.warning("%s ended at %d and now ends at %d: the stream lost messages", subject, one.expected, last)
            found.append(resolved(one, await self._stored(subject, one.expected, last), last))
        return found

    async def _lasts(self, subjects: list[str]) -> dict[str, int]:
        """The last stream sequence of each subject that holds anything."""
        stream = await self.stream()
        found: dict[str, int] = {}
        for at in range(0, len(subjects), SUBJECTS_PER_LOOK):
            part = subjects[at : at + SUBJECTS_PER_LOOK]
            found |= {one.subject: one.sequence for one in await self._client.get_last_of(stream, part)}
        return found

    async def _stored(self, subject: str, after: int, last: int) -> list[Stored]:
        """The messages of a subject behind `after`, up to `last`."""
        found: list[Stored] = []
        while after < last:
            page = await self._client.get_batch(
                await self.stream(), count=PAGE, sequence=after + 1, subject=subject, bytes_max=PAGE_BYTES
            )
            if not page:
                break
            found += [Stored(one.sequence, key_in(one.headers)) for one in page if one.sequence <= last]
            after = page[-1].sequence
        return found

    async def stream(self) -> str:
        """The stream that captures the conversations' subjects."""
        if not self._stream:
            answer = await self._client.api("STREAM.NAMES", {"subject": f"{self._prefix}.*"})
            names = answer.get("streams") or []
            if not names:
                raise Unavailable(
                    f"no stream captures {self._prefix}.*", hint="Run `oncewire topology apply`, or check the prefix."
                )
            self._stream = names[0]
        return self._stream


def _after(one: Progress, outcome: PubAck | OncewireError) -> Progress:
    """A conversation after an outcome that was no conflict. What is not the row's fault only postpones it."""
    if isinstance(outcome, PubAck):
        return replace(one, confirmed=one.confirmed + 1, stream_sequence=outcome.sequence)
    if isinstance(outcome, Unavailable | NotFound | PermissionDenied):
        return replace(one, postponed=outcome.message)
    return replace(one, refused=outcome.message)
