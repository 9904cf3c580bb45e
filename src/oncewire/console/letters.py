"""Dead letters for the console: an index of their headers, a look into one, and replay and drop as jobs with progress.

The index holds the newest letters without their bodies and follows DLQ: what is new is read from where it ended, what
is gone is asked for when the count does not add up. Acts go through `oncewire.dlq.replay`, as the command line's do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncewire._ground.contracts import letters as names
from oncewire._ground.errors import NotFound, OncewireError, Overloaded
from oncewire._ground.jetstream import Client
from oncewire._ground.topology.rules import FoundStream
from oncewire.console import rules
from oncewire.console.payloads import shown_payload
from oncewire.dlq import standing
from oncewire.dlq.letters import Dead, Filter, find_letter, group, read_heads
from oncewire.dlq.replay import Replay, ReplayOptions, Report, drop
from oncewire.dlq.republish import Republisher
from oncewire.dlq.rules import DLQ

KEPT_MAX: Final = 10_000
"""Letters in the index, the newest; older ones are counted, and found by the command line."""
PAGE_MAX: Final = 200
GROUPS_MAX: Final = 200
JOBS_MAX: Final = 4
"""At once."""
JOBS_KEPT: Final = 20
WITHDRAWN_S_MAX: Final = 3.0


class Letters:
    """The index."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[int, Dead] = {}
        self._end = 0
        self._seen: tuple[int, int, int] | None = None
        self._turn = asyncio.Lock()
        self.total = 0
        self.version = 0
        """Another one whenever it holds others than before."""

    async def follow(self, stream: FoundStream | None) -> None:
        """Bring the index up to what a look has found."""
        async with self._turn:
            if stream is None:
                self._known, self.total, self._seen, self._end = {}, 0, None, 0
                self.version += 1
            elif (stream.messages, stream.first, stream.last) != self._seen:
                await self._read(stream)
                self._seen, self.total = (stream.messages, stream.first, stream.last), stream.messages
                self.version += 1

    async def catch_up(self) -> None:
        """For who does not watch: look at DLQ by itself."""
        try:
            state = (await self._client.api(f"STREAM.INFO.{DLQ}"))["state"]
        except NotFound:
            await self.follow(None)
            return
        facts = {"messages": state["messages"], "first": state["first_seq"], "last": state["last_seq"]}
        await self.follow(FoundStream(name=DLQ, config={}, **facts))

    async def _read(self, stream: FoundStream) -> None:
        if stream.last < self._end:  # made anew
            self._known, self._end = {}, 0
        first = max(self._end + 1, stream.first, stream.last - KEPT_MAX + 1)
        if stream.messages and first <= stream.last:
            async for letter in read_heads(self._client, first):
                self._known[letter.sequence] = letter
                self._end = letter.sequence  # who is cut off goes on from here
        self._end = max(stream.last, max(self._known, default=0))
        for sequence in [one for one in self._known if one < max(stream.first, self._end - KEPT_MAX + 1)]:
            del self._known[sequence]
        if len(self._known) > min(stream.messages, KEPT_MAX) or stream.messages < stream.last - stream.first + 1:
            for sequence in await self._deleted():
                self._known.pop(sequence, None)

    async def _deleted(self) -> list[int]:
        answer = await self._client.api(f"STREAM.INFO.{DLQ}", {"deleted_details": True})
        return answer["state"].get("deleted") or []

    # ---- what is shown

    def section(self) -> dict[str, Any]:
        groups = group(self._known.values(), {})[:GROUPS_MAX]
        return {
            "total": self.total,
            "indexed": len(self._known),
            "groups": [_texts(msgspec.to_builtins(one)) for one in groups],
            "newest": [self._row(one) for one in self._newest(Filter(), 0, 10)],
        }

    def page(self, chosen: Filter, before: int, limit: int) -> dict[str, Any]:
        found = self._newest(chosen, before, min(limit, PAGE_MAX) + 1)
        return {"letters": [self._row(one) for one in found[:limit]], "is_more": len(found) > limit}

    def _newest(self, chosen: Filter, before: int, limit: int) -> list[Dead]:
        found: list[Dead] = []
        for sequence in sorted(self._known, reverse=True):
            if (not before or sequence < before) and chosen.takes(self._known[sequence]):
                found.append(self._known[sequence])
                if len(found) == limit:
                    break
        return found

    def _row(self, letter: Dead) -> dict[str, Any]:
        return _texts(msgspec.to_builtins(letter))

    async def detail(self, name: str) -> dict[str, Any]:
        """One letter with its headers, its body as far as it is shown, and what became of it."""
        found = await find_letter(self._client, name)
        letter = found.letter
        record = (await Republisher(self._client, lambda _: None).records([letter.id])).get(letter.id)
        return {
            "letter": self._row(letter),
            "is_withdrawn": await self._is_withdrawn(letter),
            "headers": {rules.shown(key, 200): rules.shown(value, 2_000) for key, value in found.headers.items()},
            "story": {
                rules.shown(key, 200): rules.shown(value, 2_000)
                for key, value in found.stored.headers.items()
                if key.startswith("Oncewire-Dlq-")
            },
            "record": _texts(msgspec.to_builtins(record[0])) if record else None,
            "payload": shown_payload(found.stored.payload),
            "can_edit": letter.payload_is != names.POINTER,
        }

    async def _is_withdrawn(self, letter: Dead) -> bool | None:
        """None when that cannot be known in time."""
        try:
            async with asyncio.timeout(WITHDRAWN_S_MAX):
                return letter.id in await standing.withdrawn(self._client, [letter])
        except (OncewireError, TimeoutError):
            return None


def _texts(value: dict[str, Any]) -> dict[str, Any]:
    return {key: rules.shown(one, 1_000) if isinstance(one, str) else one for key, one in value.items()}


# ---- acts


class Wanted(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the page asks for: which letters, and what is to become of them."""

    ids: tuple[str, ...] = ()
    cause: str = ""
    consumer: str = ""
    subject: str = ""
    stream: str = ""
    until_ms: int = 0
    body: str | None = None
    reason: str = ""
    is_dry_run: bool = False

    @property
    def filter(self) -> Filter:
        return Filter(
            ids=frozenset(self.ids),
            cause=self.cause,
            consumer=self.consumer,
            subject=self.subject,
            stream=self.stream,
            until_ms=self.until_ms,
        )


class Job(Struct, kw_only=True):
    """A replay or a drop, while it runs and for a while after."""

    id: int
    kind: str
    by: str
    what: str
    state: str = "running"
    total: int = 0
    done: int = 0
    text: str = ""
    hint: str = ""
    problems: list[dict[str, Any]] = []
    ended_ms: int = 0


class Jobs:
    """What people have set going. `changed` is called whenever one has moved."""

    def __init__(self, client: Client, changed: Callable[[], None]) -> None:
        self._client = client
        self._changed = changed
        self._jobs: deque[Job] = deque(maxlen=JOBS_KEPT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    def section(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(job) for job in reversed(self._jobs)]

    async def close(self) -> None:
        """Cut off what runs: a replay that is begun again finds what is out by its records."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def try_out(self, wanted: Wanted) -> dict[str, Any]:
        """What a replay would do."""
        options = ReplayOptions(is_dry_run=True, body=_body(wanted))
        return _report(await Replay(self._client, wanted.filter, options).run())

    def replay(self, wanted: Wanted, by: str, what: str) -> Job:
        job = self._begin("replay", by, what)

        async def work() -> None:
            def begin(count: int) -> None:
                job.total = count
                self._changed()

            options = ReplayOptions(body=_body(wanted), begin=begin, progress=lambda count: self._moved(job, count))
            report = await Replay(self._client, wanted.filter, options).run()
            told = _report(report)
            job.text, job.problems = told["text"], told["problems"]
            job.state = "partly" if report.done + report.refused else "done"

        self._run(job, work)
        return job

    def drop(self, wanted: Wanted, by: str, what: str) -> Job:
        job = self._begin("drop", by, what)

        async def work() -> None:
            reason = f"{wanted.reason or 'dropped in the console'}{f' (by {by})' if by else ''}"
            count = await drop(self._client, wanted.filter, reason, lambda count: self._moved(job, count))
            job.total, job.text, job.state = count, f"{count} letters dropped", "done"

        self._run(job, work)
        return job

    def _begin(self, kind: str, by: str, what: str) -> Job:
        if len(self._tasks) >= JOBS_MAX:
            raise Overloaded(f"{JOBS_MAX} jobs run already: wait for one to end", retry_after_s=1.0)
        self._number += 1
        job = Job(id=self._number, kind=kind, by=by, what=rules.shown(what, 120))
        self._jobs.append(job)
        return job

    def _moved(self, job: Job, count: int) -> None:
        job.done += count
        self._changed()

    def _run(self, job: Job, work: Callable[[], Any]) -> None:
        async def run() -> None:
            try:
                await work()
            except OncewireError as error:
                job.state, job.text, job.hint = "failed", rules.shown(error.message), rules.shown(error.hint)
            except asyncio.CancelledError:
                job.state, job.text = "failed", "cut off: the console stopped. Begin it again: what is out is found."
                raise
            finally:
                job.ended_ms = time.time_ns() // 1_000_000
                self._changed()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._changed()


def _body(wanted: Wanted) -> bytes | None:
    return None if wanted.body is None else wanted.body.encode("utf-8", "surrogatepass")


def _report(report: Report) -> dict[str, Any]:
    verb = "would be replayed" if report.is_dry_run else "replayed"
    text = f"{report.replayed} of {report.matched} letters {verb}"
    if report.already_out:
        text += f", {report.already_out} were out already"
    if report.done:
        text += f", {report.done} are done by now"
    if report.refused:
        text += f", {report.refused} refused"
    return {"text": text, "matched": report.matched, "replayed": report.replayed, "problems": _problems(report)}


def _problems(report: Report) -> list[dict[str, Any]]:
    found: Iterable[Any] = report.problems[:20]
    return [{"sequence": one.sequence, "reason": rules.shown(one.reason)} for one in found]
