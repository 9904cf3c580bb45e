"""The dead-letter service: from requests, advisories and sweeps to letters, until it is stopped.

    async with serving(client, DlqOptions()) as service: …

Several may run side by side: they share the durables, and a letter's id lets one of them through. The steps, in the
order of an event's way; `on_step` is told each by its name once it is over:

    fetched     a batch of events is in hand            decided     it is known what follows, originals are read
    letters     the letters stand in DLQ                settled     given-up sequences are acked
    told        log, metric and hook are through        acked       the events are acked
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oncewire._ground.errors import NotFound, OncewireError, Unavailable
from oncewire._ground.jetstream import Client, Outgoing, PubAck, Pull
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.metrics import Page, Tally
from oncewire._ground.settings import Settings
from oncewire._ground.tracing import Tracer
from oncewire.dlq import events as reading
from oncewire.dlq import metrics, rules, traces
from oncewire.dlq.alerts import Alerts
from oncewire.dlq.events import Event, Facts, StreamFacts
from oncewire.dlq.rules import Act, Failure, Letter, Limits

OnStep = Callable[[str], None]
log = logging.getLogger("oncewire.dlq")

BATCH: Final = 250
FETCH_S: Final = 0.5
STOP_S_MAX: Final = 15.0
READY_S_MAX: Final = 5.0
RETRY_S: Final = 1.0
WAIT_S: Final = 5.0
"""So long an event rests whose letter could not be stored."""


def _no_step(_: str) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class DlqOptions:
    """`on_step` is told each step by its name; tests stop a process there."""

    sweep_s: float = 30.0
    stalled_s: float = 300.0
    alert_command: str = ""
    alert_url: str = ""
    metrics_file: str = ""
    on_step: OnStep = _no_step
    tracer: Tracer | None = None


def options_of(settings: Settings, tracer: Tracer | None = None) -> DlqOptions:
    """The options that the settings ask for."""
    return DlqOptions(
        sweep_s=settings.dlq_sweep_s,
        stalled_s=settings.dlq_stalled_s,
        alert_command=settings.alert_command,
        alert_url=settings.alert_url,
        metrics_file=settings.metrics_file,
        tracer=tracer,
    )


@dataclass
class Swept:
    """How everything stood at the last sweep. The last two are by stream and consumer."""

    letters: int = 0
    full_ratio: float = 0.0
    stands: list[rules.Stand] = field(default_factory=list)
    unattended: dict[tuple[str, str], int] = field(default_factory=dict)
    exhausted: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass
class _Batch:
    """Events on their way: what is known, what follows."""

    events: list[Event]
    streams: dict[str, StreamFacts] = field(default_factory=dict)
    acts: dict[int, Act] = field(default_factory=dict)
    letters: dict[int, Letter] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    new: list[Letter] = field(default_factory=list)

    def where(self, *acts: Act) -> list[int]:
        return [at for at in range(len(self.events)) if self.acts.get(at) in acts and at not in self.failed]


class Service:
    """Made by `serving`, or run by itself with `run`."""

    def __init__(self, client: Client, options: DlqOptions) -> None:
        self.client = client
        self.options = options
        self.alerts = Alerts(command=options.alert_command, url=options.alert_url)
        self.facts = Facts(client)
        self.letters = 0
        self._stopping = asyncio.Event()
        self._problems: dict[str, str] = {}
        self.written, self.seen = Tally(3), Tally(2)
        """Letters by stream, consumer and cause; failures by kind and what followed."""
        self.swept: Swept | None = None
        """What the last sweep saw."""

    @property
    def problem(self) -> str:
        """What keeps it from its work just now, '' when nothing does."""
        return next(iter(self._problems.values()), "")

    def stop(self) -> None:
        """Finish the batch at hand, then end."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until `stop`."""
        from oncewire.dlq.sweep import Sweep  # it knows us

        sweep = Sweep(self)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep("requests", lambda: self._read(rules.REQUESTS, self._requests)))
            group.create_task(self._keep("advisories", lambda: self._read(rules.ADVISORIES, self._advisories)))
            group.create_task(self._keep("sweep", lambda: sweep.run(self._stopping)))

    async def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Again and again, whatever is away."""
        while not self._stopping.is_set():
            try:
                await self.client.connection.ready(time.monotonic() + READY_S_MAX)
                await work()
            except Exception as error:
                self._tell(name, error)
                await self.rest(RETRY_S)

    async def rest(self, seconds: float) -> None:
        """Wait, but not longer than until it is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def well(self, name: str) -> None:
        self._problems.pop(name, None)

    def _tell(self, name: str, error: Exception) -> None:
        """Once per problem, not once per attempt; a bug of ours with its traceback."""
        told = f"{error.message} {error.hint}".strip() if isinstance(error, OncewireError) else repr(error)
        if self._problems.get(name) != told:
            self._problems[name] = told
            level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
            bug = None if isinstance(error, OncewireError) else error
            log.log(level, "dead letters, %s: waiting: %s", name, told, exc_info=bug)

    # ---- events

    async def _read(self, stream: str, handle: Callable[[Pull, list[Message]], Awaitable[None]]) -> None:
        consumer = rules.REQUESTS_CONSUMER if stream == rules.REQUESTS else rules.ADVISORIES_CONSUMER
        async with self.client.pull(stream, consumer, batch=BATCH, ahead=1) as pull:
            while not self._stopping.is_set():
                messages = await pull.fetch(timeout_s=FETCH_S)
                if messages:
                    await handle(pull, messages)
                self.well(stream.rpartition("_")[2].lower())

    async def _requests(self, pull: Pull, messages: list[Message]) -> None:
        self.options.on_step("fetched")
        await self.handle([reading.of_request(message) for message in messages], pull)

    async def _advisories(self, pull: Pull, messages: list[Message]) -> None:
        self.options.on_step("fetched")
        found = [(message, reading.of_advisory(message)) for message in messages]
        garbage = [message for message, event in found if event is None]
        if garbage:
            self.seen.add("garbage", Act.COUNT.value, times=len(garbage))
            size = len(garbage[0].payload)
            log.warning("%d advisories cannot be read and are passed over, the first has %d bytes", len(garbage), size)
            pull.ack(garbage)
        await self.handle([event for _, event in found if event is not None], pull)

    async def handle(self, events: Sequence[Event], pull: Pull | None = None) -> list[Event]:
        """One batch, in the order that is law: letters, then settling, then the alert, then the events' acks. Returns
        those that are done with."""
        if not events:
            return []
        batch = _Batch(list(events))
        await self._decide(batch)
        self.options.on_step("decided")
        await self._write(batch)
        self.options.on_step("letters")
        await self._settle(batch)
        self.options.on_step("settled")
        await self._alert(batch)
        self.options.on_step("told")
        done = self._ack(batch, pull)
        self.options.on_step("acked")
        return done

    # ---- deciding

    async def _decide(self, batch: _Batch) -> None:
        told = [event.failure for event in batch.events if not event.is_read]
        agents = await self.facts.agents(told)
        for at, event in enumerate(batch.events):
            place = (event.failure.stream, event.failure.consumer)
            batch.acts[at] = Act.LETTER if event.is_read else rules.decide(event.failure, is_agents=place in agents)
        batch.streams = await self.facts.streams(event.failure.stream for event in batch.events)
        await self._fetch(batch)

    async def _fetch(self, batch: _Batch) -> None:
        """Originals for what comes of them. A message that is gone and has its letter is done with."""
        missing = [at for at in batch.where(Act.LETTER) if not batch.events[at].is_read]
        there = [at for at in missing if batch.events[at].failure.stream in batch.streams]
        found = await self.facts.originals([batch.events[at].failure for at in there])
        for at, original in zip(there, found, strict=True):
            batch.events[at].original = original
        gone = [at for at in missing if batch.events[at].original is None]
        written = await self.facts.letters_at([batch.events[at].failure for at in gone]) if gone else set()
        for at in gone:
            if batch.events[at].failure.place in written:
                batch.acts[at] = Act.ACK

    # ---- acting

    async def _write(self, batch: _Batch) -> None:
        limits = Limits(self.client.server.max_payload)
        for at in batch.where(Act.LETTER):
            event = batch.events[at]
            facts = batch.streams.get(event.failure.stream)
            created_ns = facts.created_ns if facts else 0
            batch.letters[at] = rules.letter_of(event.failure, event.original, created_ns, _now_ms(), limits)
        messages = [Outgoing(one.subject, one.payload, one.id, one.headers) for one in batch.letters.values()]
        if not messages:
            return
        began_ns = time.time_ns()
        for (at, letter), outcome in zip(
            batch.letters.items(), await self.client.publisher.publish_all(messages), strict=True
        ):
            if not isinstance(outcome, PubAck):
                batch.failed[at] = str(outcome)
                self._tell("letters", outcome)
            elif not outcome.is_duplicate or batch.events[at].deliveries > 1:
                batch.new.append(letter)
            if isinstance(outcome, PubAck) and not outcome.is_duplicate:
                self.letters += 1
                self.written.add(letter.failure.stream, letter.failure.consumer, letter.cause)
                if self.options.tracer is not None:
                    traces.tell(self.options.tracer, letter, outcome, began_ns)
        if not batch.failed:
            self.well("letters")

    async def _settle(self, batch: _Batch) -> None:
        """Ack the given-up sequences: that takes them out of a work queue. A pointer's original must stay there; of a
        request the agent settles its own."""
        places = []
        for at in batch.where(Act.LETTER, Act.ACK):
            event, letter = batch.events[at], batch.letters.get(at)
            facts = batch.streams.get(event.failure.stream)
            stays = letter is not None and letter.is_pointer and facts is not None and facts.removes_on_ack
            if not event.is_read and facts is not None and not stays:
                places.append(event.failure)
        await asyncio.gather(*(self._ack_exhausted(one) for one in places))

    async def _ack_exhausted(self, failure: Failure) -> None:
        subject = f"$JS.ACK.{failure.stream}.{failure.consumer}.1.{failure.sequence}.1.0.0"
        with contextlib.suppress(NotFound, Unavailable):  # the consumer is gone, or the sweep sees to it
            await self.client.call(subject, b"+ACK", timeout_s=FETCH_S)

    async def _alert(self, batch: _Batch) -> None:
        bad = [one for one in batch.new if one.failure.kind == rules.BAD_REQUEST]
        if bad:
            await self.alerts.tell("bad_request", f"{len(bad)} requests cannot be read", [_item(one) for one in bad])
        new = [one for one in batch.new if one.failure.kind != rules.BAD_REQUEST]
        for one in new:
            told = one.failure
            log.warning(
                "dead letter %s: %s %d for %s: %s",
                one.id,
                told.stream,
                told.sequence,
                told.consumer,
                told.reason,
                extra={"trace_id": traces.trace_id_of(one)},
            )
        if new:
            causes = ", ".join(sorted({one.cause for one in new})[:5])
            await self.alerts.tell("dead_letters", f"{len(new)} new dead letters ({causes})", [_item(o) for o in new])

    def _ack(self, batch: _Batch, pull: Pull | None) -> list[Event]:
        for at, event in enumerate(batch.events):
            self.seen.add(event.failure.kind, "failed" if at in batch.failed else batch.acts[at].value)
        done = [event for at, event in enumerate(batch.events) if at not in batch.failed]
        if pull is not None:
            pull.ack(event.message for event in done if event.message is not None)
            later = [batch.events[at].message for at in sorted(batch.failed)]
            pull.nak([one for one in later if one is not None], WAIT_S)
        return done

    def write_metrics(self) -> None:
        if self.options.metrics_file:
            page = Page()
            metrics.collect(page, self)
            try:
                page.write(Path(self.options.metrics_file))
            except OSError as error:
                log.warning("metrics cannot be written to %s: %s", self.options.metrics_file, error)


def _item(letter: Letter) -> dict[str, Any]:
    failure = letter.failure
    return {
        "letter": letter.id,
        "subject": letter.subject,
        "cause": letter.cause,
        "error": failure.reason,
        "stream": failure.stream,
        "sequence": failure.sequence,
        "consumer": failure.consumer,
        "deliveries": failure.deliveries,
    }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextlib.asynccontextmanager
async def serving(client: Client, options: DlqOptions | None = None) -> AsyncIterator[Service]:
    """A service for the length of a block; it ends with the batch at hand."""
    service = Service(client, options or DlqOptions())
    task = asyncio.create_task(service.run(), name="oncewire-dlq")
    try:
        yield service
    finally:
        service.stop()
        await asyncio.wait((task,), timeout=STOP_S_MAX)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
