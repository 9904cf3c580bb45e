"""One look for all who watch, none for nobody. Each source has a loop of its own while somebody watches: what is slow
or away holds nothing else up. What is shown goes out in sections, each as one event, when it differs from the last one.

    tick        every second: the time, and which sources answer
    history     once, at the begin: the points so far
    point       the newest point of the plots
    overview, latency, streams, topics, letters, pipeline, jobs
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec

from oncewire._ground.errors import NotConnected, OncewireError, TimedOut
from oncewire._ground.http import Stream
from oncewire._ground.jetstream import Client, State
from oncewire._ground.monitor import Durability, Promise
from oncewire.console import rules
from oncewire.console.lake import LakeSide
from oncewire.console.letters import Jobs, Letters
from oncewire.console.rules import Notice
from oncewire.console.streams import Surveyor
from oncewire.console.topics import Topics, cause
from oncewire.dlq.rules import DLQ

WATCHERS_MAX: Final = 200
POINTS_MAX: Final = 180
"""Three minutes of plots."""
LATENCY_S: Final = 2.0
LATENCY_LOOKS: Final = 31
"""A minute of them."""
TICK_S: Final = 1.0
TOPICS_S: Final = 2.0
SLOW_S: Final = 5.0
PATIENCE_S: Final = 6.0
"""How long a source may take before it counts as away."""
LAKE_PATIENCE_S: Final = 60.0
"""Its first look loads Arrow, and a large lake has many files."""
NATS_HINT: Final = "Start the server, or `oncewire up`; this page goes on by itself when it is back."

Figures = dict[str, list[int]]
"""The counts of histograms by their names in the table of metrics, over all their labels."""

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger("oncewire.console")


class Watcher:
    """One open page."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.is_behind = False


class Backend(msgspec.Struct):
    """Where figures come from. `state` is waiting, ok, broken or off; `ok_ms` when it answered last."""

    state: str = "waiting"
    text: str = ""
    hint: str = ""
    ok_ms: int = 0


class Watch:
    """See the module's head. `async with watch.running():` around the server."""

    def __init__(
        self,
        client: Client,
        surveyor: Surveyor,
        letters: Letters,
        topics: Topics | None,
        lake: LakeSide,
        figures: Callable[[], Figures] = dict,
    ) -> None:
        self._client = client
        self.surveyor = surveyor
        self.letters = letters
        self.topics = topics
        self.lake = lake
        self.jobs = Jobs(client, self._jobs_moved)
        self.looks = 0
        """How often NATS was looked at, for the test that nobody's watching costs nothing."""
        self._watchers: set[Watcher] = set()
        self._sections: dict[str, bytes] = {}
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS_MAX)
        self._durability = Durability(Promise.UNKNOWN, "not looked at yet")
        self._losses: list[dict[str, Any]] = []
        self._figures = figures
        self._latencies: list[rules.Latency] = []
        self._counted: deque[dict[str, list[int]]] = deque(maxlen=LATENCY_LOOKS)
        self._letters_shown = -1
        self._someone = asyncio.Event()
        self.backends = {"nats": Backend(), "broker": Backend(), "lake": Backend()}
        if topics is None:
            self.backends["broker"] = Backend("off", "no broker is known to the console", "Set console.broker_url.")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        loops = [self._loop(self._tick, TICK_S), self._loop(self._look, TICK_S), self._loop(self._look_slowly, SLOW_S)]
        loops += [self._loop(self._look_at_lake, SLOW_S), self._loop(self._look_at_latency, LATENCY_S)]
        loops += [self._loop(self._look_at_topics, TOPICS_S)] if self.topics else []
        tasks = [asyncio.create_task(one) for one in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.jobs.close()

    # ---- who watches

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    def add(self, watcher: Watcher) -> bool:
        """Begin with all that is known. False when too many watch."""
        if len(self._watchers) >= WATCHERS_MAX:
            return False
        self._watchers.add(watcher)
        self._put("jobs", self.jobs.section())
        watcher.stream.on_close = lambda: self._remove(watcher)
        watcher.stream.on_drain = lambda: self._caught_up(watcher)
        self._begin(watcher)
        self._someone.set()
        return True

    def _begin(self, watcher: Watcher) -> None:
        watcher.stream.write(_frame("history", list(self._points)) + b"".join(self._sections.values()) + self._tell())

    def _caught_up(self, watcher: Watcher) -> None:
        if watcher.is_behind:
            watcher.is_behind = False
            self._begin(watcher)

    def _remove(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._someone.clear()
            self._points.clear()
            self._counted.clear()
            self._sections.clear()  # whoever comes next sees nothing old
            self.surveyor.forget()

    def _send(self, frame: bytes) -> None:
        for watcher in list(self._watchers):
            if watcher.stream.is_full:
                watcher.is_behind = True  # it gets everything anew once it has caught up
            else:
                watcher.stream.write(frame)

    def _put(self, name: str, value: Any) -> None:
        frame = _frame(name, value)
        if self._sections.get(name) != frame:
            self._sections[name] = frame
            self._send(frame)

    def _jobs_moved(self) -> None:
        self._put("jobs", self.jobs.section())

    # ---- the loops

    async def _loop(self, look: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            await self._someone.wait()
            begun = time.monotonic()
            try:
                await look()
            except Exception:
                _log.exception("a look of the console failed")
            await asyncio.sleep(max(0.2, every_s - (time.monotonic() - begun)))

    async def _ask(self, name: str, look: Callable[[], Awaitable[None]], patience_s: float = PATIENCE_S) -> bool:
        """Let a source answer, and note whether it did."""
        backend = self.backends[name]
        try:
            async with asyncio.timeout(patience_s):
                await look()
        except TimeoutError:
            self._note(backend, TimedOut(f"no answer within {patience_s:g} s"), name)
            return False
        except OncewireError as error:
            self._note(backend, error, name)
            return False
        backend.state, backend.text, backend.hint = "ok", "", ""
        backend.ok_ms = _now_ms()
        return True

    def _note(self, backend: Backend, error: OncewireError, name: str) -> None:
        text, hint = cause(error) if name == "broker" else (error.message, error.hint or NATS_HINT)
        backend.state, backend.text, backend.hint = "broken", rules.shown(text), rules.shown(hint)

    async def _tick(self) -> None:
        self._send(self._tell())

    def _tell(self) -> bytes:
        return _frame("tick", {"now_ms": _now_ms(), "backends": self.backends, "watchers": len(self._watchers)})

    async def _look(self) -> None:
        """Streams, consumers, letters; and the overview, which is made of all."""
        was = self.backends["nats"].state
        if await self._ask("nats", self._look_at_nats):
            self.looks += 1
            self._put("streams", self.surveyor.rows)
            if self._letters_shown != self.letters.version or "letters" not in self._sections:
                self._letters_shown = self.letters.version
                self._put("letters", self.letters.section())
            self._add_point()
            self._put_overview()
        elif was != "broken":
            self._send(self._tell())

    async def _look_at_nats(self) -> None:
        if self._client.state is not State.CONNECTED:
            raise NotConnected(f"the connection to NATS is {self._client.state}")
        await self.surveyor.look()
        await self.letters.follow(self.surveyor.found(DLQ))

    def _add_point(self) -> None:
        figures = msgspec.to_builtins(self._totals())
        busy = {one.name: one.rate for one in self.surveyor.rows if one.rate}
        slowest = max((one.p95_ms or 0.0 for one in self._latencies), default=0.0)
        point = {"at_ms": _now_ms(), **figures, "latency_ms": slowest, "streams": busy}
        self._points.append(point)
        self._send(_frame("point", point))

    def _totals(self) -> rules.Totals:
        topics = self.topics.rows if self.topics else []
        return rules.totals(self.surveyor.rows, topics, self.letters.total, self.surveyor.answer_ms)

    async def _look_at_latency(self) -> None:
        """What the parts in this process have counted over the last minute."""
        self._counted.append({name: counts for name, counts in self._figures().items() if name in rules.LATENCIES})
        self._latencies = rules.latencies(self._counted[0], self._counted[-1])
        self._put("latency", self._latencies)

    def _put_overview(self) -> None:
        server = self._client.server
        self._put(
            "overview",
            {
                "notices": self._notices(),
                "durability": {"promise": self._durability.promise, "text": self._durability.text},
                "losses": self._losses,
                "server": {"version": server.version, "name": rules.shown(server.server_id, 64)},
            },
        )

    async def _look_slowly(self) -> None:
        """What changes seldom: promises and losses."""
        if self._client.state is State.CONNECTED:
            with contextlib.suppress(OncewireError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    self._durability = await self.surveyor.durability()
                    self._losses = await self.surveyor.losses()

    async def _look_at_topics(self) -> None:
        assert self.topics is not None
        if await self._ask("broker", self.topics.look):
            self._put("topics", {"topics": self.topics.rows, "count": self.topics.names, "url": self.topics.url})

    async def _look_at_lake(self) -> None:
        if await self._ask("lake", self.lake.look, LAKE_PATIENCE_S):
            if self.lake.told is None:
                self.backends["lake"] = Backend("off", f"there is no lake in {self.lake.place}")
            self._put("pipeline", self.lake.told)

    # ---- what needs a person

    async def acknowledge(self, stream: str, until_ms: int) -> dict[str, Any]:
        """Losses that somebody has looked at: their readers go on, and every page shows it at once."""
        count = await self.surveyor.acknowledge(stream, until_ms)
        self._losses = await self.surveyor.losses()
        if self._someone.is_set():
            self._put_overview()
        return {"stream": rules.shown(stream), "acknowledged": count}

    def _notices(self) -> list[Notice]:
        found = list(self.surveyor.notices)
        found += [
            Notice(level="broken", title=f"{one['stream']} lost messages", text=one["sentence"],
                   command=f"oncewire dlq losses --acknowledge {one['stream']}", link="/")
            for one in self._losses if one["is_open"]
        ]  # fmt: skip
        if self._durability.promise is Promise.CRASH:
            found.append(Notice(level="warning", title="A power cut can lose messages", text=self._durability.text,
                                command="", link=""))  # fmt: skip
        if self.letters.total:
            count = self.letters.total
            found.append(Notice(level="warning", title=f"{count:,} dead letter{'s' * (count != 1)}",
                                text="messages that could not be processed wait for a decision",
                                command="oncewire dlq ls", link="/letters"))  # fmt: skip
        return found + self._lake_notices()

    def _lake_notices(self) -> list[Notice]:
        told = self.lake.told or {}
        found = [
            Notice(level="broken", title=f"the pipeline stopped reading {one['name']}", text=rules.shown(one["error"]),
                   command=rules.command_in(one["hint"]), link="/pipeline")
            for one in told.get("streams", ()) if one["state"] == "stopped"
        ]  # fmt: skip
        topics = told.get("topics") or {}
        found += [
            Notice(level="broken", title=f"the pipeline stopped reading topic {rules.shown(name, 80)}",
                   text=rules.shown(why), command="oncewire pipeline status", link="/pipeline")
            for name, why in topics.get("stopped", {}).items()
        ]  # fmt: skip
        verdict = told.get("verdict")
        if verdict and not verdict["is_good"]:
            found.append(Notice(level="broken", title=f"the last audit has {verdict['errors']:,} findings",
                                text=verdict["findings"][0] if verdict["findings"] else "",
                                command="oncewire pipeline audit", link="/pipeline"))  # fmt: skip
        return found


def _frame(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(value))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
