"""Relays the general outbox: MessageEnvelopes to any subject, each under its idempotency key, in no order.

A row is marked as sent, on disk, before it is published. So a row without that mark was surely never published, and one
with it is published again under the same id while the stream remembers ids; once it may have forgotten (half the
duplicate window), the stream is searched behind the recorded sequence first. Streams that drop messages early (work
queues, limits per subject) cannot be searched: there it is published again, and its reader drops the double.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from msgspec import Struct

from oncewire._ground.contracts.headers import MSG_ID, TRACEPARENT
from oncewire._ground.contracts.message import decode_message
from oncewire._ground.contracts.publishing import refuse_reserved
from oncewire._ground.contracts.subjects import check_subject
from oncewire._ground.database.postgres import queries
from oncewire._ground.errors import NotFound, OncewireError, Refused, Unavailable
from oncewire._ground.jetstream import Client, Outgoing, PubAck, Start
from oncewire._ground.jetstream.client import QUERIES_PREFIX
from oncewire._ground.tracing import Tracer
from oncewire.outbox import traces
from oncewire.outbox.publish import OnStep
from oncewire.outbox.rules import BYTES_MAX, ROWS_MAX
from oncewire.outbox.source import Taken, transaction

log = logging.getLogger("oncewire.outbox")

SQL = queries("oncewire.outbox")
LEASE_S: Final = 60.0
PUBLISH_S_MAX: Final = 10.0
SEARCH_S_MAX: Final = 20.0
"""One search and two ways to publish fit in the lease."""


class Waiting(Struct, frozen=True):
    """A row of the general outbox. `sent_age_s` is None when it was never sent."""

    id: int
    subject: str
    body: str
    key: str
    traceparent: str | None
    sent_stream: str | None
    sent_after: int | None
    sent_age_s: float | None
    waited_s: float = 0.0


class Target(Struct, frozen=True):
    """The stream that takes a subject, as it is now."""

    stream: str
    last: int
    window_s: float
    is_searchable: bool


class Messages:
    """One relay's view of the general outbox."""

    name = "messages"

    def __init__(self, client: Client, *, schema: str, on_step: OnStep, tracer: Tracer | None = None) -> None:
        self._client = client
        self._schema = schema
        self._on_step = on_step
        self._tracer = tracer
        self._names: dict[str, str] = {}

    async def relay_once(self, connection: Any) -> Taken:
        began = time.monotonic()
        taken, targets = await self._claim(connection)
        if not taken:
            return Taken(0, False)
        self._on_step("sent")
        leased_until = time.monotonic() + LEASE_S
        homeless = [one for one in taken if one.subject not in targets]
        fresh, sent = _split(one for one in taken if one.subject in targets)
        there = await self._search(sent, targets) if sent else set()
        missing = [one for one in sent if one.id not in there]
        async with transaction(connection, SQL["begin_durable"], self._schema):
            await self._mark(connection, there, {one.id: "no stream captures its subject" for one in homeless})
            if missing:
                afters = [targets[one.subject].last for one in missing]
                await connection.execute(SQL["mark_sent_anew"], [one.id for one in missing], afters)
        done = await self._publish(connection, [*fresh, *missing], leased_until)
        took_s = time.monotonic() - began
        return Taken(done + len(there), len(taken) == ROWS_MAX, [one.waited_s + took_s for one in fresh[:done]])

    async def _claim(self, connection: Any) -> tuple[list[Waiting], dict[str, Target]]:
        """Rows for this relay alone, marked as sent with where their streams stand now; both on disk."""
        async with transaction(connection, SQL["begin_durable"], self._schema):
            records = await connection.fetch(SQL["claim_messages"], ROWS_MAX, BYTES_MAX)
            claimed = [Waiting(*record[:9]) for record in map(tuple, records)]
            flaws = {one.id: flaw for one in claimed if (flaw := flaw_of(one))}
            await self._mark(connection, (), flaws)
            taken = [one for one in claimed if one.id not in flaws]
            if not taken:
                return [], {}
            targets = await self._targets({one.subject for one in taken})
            known = [one for one in taken if one.subject in targets]
            streams = [targets[one.subject].stream for one in known]
            afters = [targets[one.subject].last for one in known]
            lease_ms = int(LEASE_S * 1000)
            await connection.execute(SQL["mark_sent"], [one.id for one in known], streams, afters, lease_ms)
            self._on_step("marking_sent")
        return taken, targets

    async def _publish(self, connection: Any, rows: Sequence[Waiting], leased_until: float) -> int:
        """Publish and mark; returns how many are confirmed."""
        if not rows:
            return 0
        if time.monotonic() > leased_until - 2 * PUBLISH_S_MAX:
            raise Unavailable("this relay was held up for so long that others may have its messages by now")
        began_ns = time.time_ns()
        outcomes = await self._client.publish_all([_outgoing(one) for one in rows], PUBLISH_S_MAX, raw=True)
        if self._tracer is not None:
            traces.tell_messages(self._tracer, rows, outcomes, began_ns)
        self._on_step("messages_published")
        confirmed, refused, again = _sorted_out(rows, outcomes)
        async with transaction(connection, SQL["begin_claim"], self._schema):
            await self._mark(connection, confirmed, refused)
            if again:
                await connection.execute(SQL["release_messages"], list(again))
            self._on_step("messages_marked")
        if again and not confirmed:
            raise Unavailable(next(iter(again.values())))
        return len(confirmed)

    async def _mark(self, connection: Any, confirmed: Iterable[int], refused: dict[int, str]) -> None:
        if ids := list(confirmed):
            await connection.execute(SQL["mark_messages"], ids)
        if refused:
            log.error("%d messages of the outbox are refused: %s", len(refused), next(iter(refused.values())))
            await connection.execute(SQL["mark_messages_failed"], list(refused), list(refused.values()))

    # ---- the streams

    async def _targets(self, subjects: set[str]) -> dict[str, Target]:
        """Each subject's stream as it is now; subjects that no stream captures are left out."""
        by_stream: dict[str, Target] = {}
        found: dict[str, Target] = {}
        for subject in sorted(subjects):
            name = self._names.get(subject) or await self._name(subject)
            if name and name not in by_stream:
                by_stream[name] = await self._look(name)
            if name:
                found[subject] = by_stream[name]
        return found

    async def _name(self, subject: str) -> str:
        answer = await self._client.api("STREAM.NAMES", {"subject": subject})
        name = str((answer.get("streams") or [""])[0])
        if name:
            if len(self._names) >= ROWS_MAX:
                self._names.clear()
            self._names[subject] = name
        return name

    async def _look(self, name: str) -> Target:
        try:
            info = await self._client.api(f"STREAM.INFO.{name}")
        except NotFound:
            self._names.clear()
            raise Unavailable(f"stream {name} is gone") from None
        config = info["config"]
        drops_early = config["retention"] != "limits" or config.get("max_msgs_per_subject", -1) > 0
        return Target(name, info["state"]["last_seq"], config["duplicate_window"] / 1e9, not drops_early)

    async def _search(self, sent: Sequence[Waiting], targets: dict[str, Target]) -> set[int]:
        """Those that were sent so long ago that their ids may be forgotten, and that stand in their stream."""
        old: dict[str, list[Waiting]] = {}
        for one in sent:
            target = targets[one.subject]
            is_same = one.sent_stream == target.stream and (one.sent_after or 0) <= target.last
            if is_same and target.is_searchable and (one.sent_age_s or 0.0) > target.window_s / 2:
                old.setdefault(one.subject, []).append(one)
        found: set[int] = set()
        for subject, rows in old.items():
            ids = await self._ids_behind(subject, min(one.sent_after or 0 for one in rows), targets[subject])
            found |= {one.id for one in rows if one.key in ids}
        return found

    async def _ids_behind(self, subject: str, after: int, target: Target) -> set[str]:
        """The message ids on a subject behind a sequence, by headers alone."""
        try:
            last = (await self._client.get_last(target.stream, subject)).sequence
        except NotFound:
            return set()
        ids: set[str] = set()
        start = Start(sequence=after + 1)
        async with self._client.read(target.stream, subjects=[subject], start=start, headers_only=True) as reader:
            deadline = time.monotonic() + SEARCH_S_MAX
            while max(after, reader.sequence) < last:
                if time.monotonic() > deadline:
                    raise Unavailable(f"searching {target.stream} for {subject} takes longer than {SEARCH_S_MAX:.0f} s")
                messages = await reader.fetch(timeout_s=1.0)
                ids |= {message.headers.get(MSG_ID, "") for message in messages}
        return ids


def flaw_of(one: Waiting) -> str:
    """Why a row can never be published, '' when it can. Enqueue refuses such rows; an INSERT of one's own does not."""
    try:
        check_subject(one.subject)
        refuse_reserved(one.subject)
        decode_message(one.body.encode())
    except Refused as wrong:
        return wrong.message
    return "queries are requests: no stream confirms them" if one.subject.startswith(QUERIES_PREFIX) else ""


def _split(rows: Iterable[Waiting]) -> tuple[list[Waiting], list[Waiting]]:
    """Those that were never sent, and those that were."""
    fresh: list[Waiting] = []
    sent: list[Waiting] = []
    for one in rows:
        (fresh if one.sent_age_s is None else sent).append(one)
    return fresh, sent


def _outgoing(one: Waiting) -> Outgoing:
    headers = {TRACEPARENT: one.traceparent} if one.traceparent else None
    return Outgoing(one.subject, one.body.encode(), one.key, headers)


def _sorted_out(
    rows: Sequence[Waiting], outcomes: Sequence[PubAck | OncewireError]
) -> tuple[list[int], dict[int, str], dict[int, str]]:
    """Confirmed, refused with the reason, and to be tried again with the reason."""
    confirmed: list[int] = []
    refused: dict[int, str] = {}
    again: dict[int, str] = {}
    for one, outcome in zip(rows, outcomes, strict=True):
        if isinstance(outcome, PubAck):
            confirmed.append(one.id)
        else:
            (again if isinstance(outcome, Unavailable) else refused)[one.id] = outcome.message
    return confirmed, refused, again
