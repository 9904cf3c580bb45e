"""One look at NATS, by the parts' functions: streams and consumers with drift, what the server promises, losses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from oncewire._ground import monitor
from oncewire._ground.errors import NotFound, OncewireError
from oncewire._ground.jetstream import Client, losses
from oncewire._ground.topology.model import Topology
from oncewire._ground.topology.rules import FoundStream, Plan, Step, plan, show
from oncewire._ground.topology.server import look
from oncewire._ground.topology.service import troubles
from oncewire.console import rules
from oncewire.console.rules import Look, Notice, StreamRow

LOOK_S_MAX: Final = 5.0
FRESH_S: Final = 2.0
NEWEST_MAX: Final = 25
NEWEST_BYTES_MAX: Final = 1 << 20
LOSSES_MAX: Final = 200


AskServers = Callable[[], Awaitable[tuple[list[dict[str, Any]], str]]]
"""What all servers say about JetStream, and why nothing is known."""


class Surveyor:
    """Looks, and remembers the look before for rates."""

    def __init__(self, client: Client, declared: Topology, ask_servers: AskServers) -> None:
        self.client = client
        self.declared = declared
        self._ask_servers = ask_servers
        self._before: Look | None = None
        self._turn = asyncio.Lock()
        self.plan = Plan()
        self.rows: list[StreamRow] = []
        self.notices: list[Notice] = []
        self.answer_ms = 0.0

    async def look(self) -> None:
        """Everything once more. Raises what the client raises when the server is away."""
        begun = time.perf_counter()
        await self.client.api("INFO", timeout_s=LOOK_S_MAX, repeat=False)
        self.answer_ms = (time.perf_counter() - begun) * 1000
        now = Look(time.monotonic(), await look(self.client, self.declared, is_deep=True))
        self.plan = plan(self.declared, now.found)
        self.rows = rules.rows(self.declared, now, self._before, self.plan)
        self.notices = [
            rules.of_problem(one.item, one.trouble, one.text, one.remedy)
            for one in troubles(self.declared, now.found, self.declared)
        ]
        self._before = now

    async def be_fresh(self) -> None:
        """For who does not watch: look, unless somebody just did."""
        async with self._turn:
            if self._before is None or time.monotonic() - self._before.at_s > FRESH_S:
                await self.look()

    def found(self, name: str) -> FoundStream | None:
        """A declared stream as the last look has found it."""
        return self._before.found.streams.get(name) if self._before else None

    def forget(self) -> None:
        """Nobody has looked for a while: rates begin anew."""
        self._before = None

    async def durability(self) -> monitor.Durability:
        """What the server promises; not known when nobody says it."""
        answers, problem = await self._ask_servers()
        if problem:
            text = f"not known whether a power cut loses what is acknowledged: {problem}"
            return monitor.Durability(monitor.Promise.UNKNOWN, text)
        return monitor.durability(answers, self.client.server.server_id)

    async def losses(self) -> list[dict[str, Any]]:
        """Open ones and acknowledged ones, the newest first."""
        try:
            found = await losses.losses(self.client)
        except NotFound:  # a server without our buckets yet
            return []
        return [
            {"id": rules.shown(one.key), "stream": one.stream, "reader": one.reader,
             "sentence": rules.shown(one.sentence), "found_ms": one.found_ms, "is_open": not one.is_acknowledged}
            for one in found[::-1][:LOSSES_MAX]
        ]  # fmt: skip

    async def acknowledge(self, stream: str, until_ms: int) -> int:
        """A person has looked at the losses of a stream that were found until then; how many were open."""
        now_ms = time.time_ns() // 1_000_000
        return len(await losses.acknowledge(self.client, stream, now_ms, found_until_ms=until_ms))

    # ---- one stream

    async def detail(self, name: str) -> dict[str, Any]:
        """What there is to know of one stream beyond its row."""
        await self.be_fresh()
        row = next((one for one in self.rows if one.name == name), None)
        if row is None:
            raise NotFound(f"there is no stream {rules.shown(name, 80)}", hint="See `oncewire topology plan`.")
        steps = [one for one in self.plan.steps if one.stream == name]
        return {
            "stream": msgspec.to_builtins(row),
            "steps": [_step(one) for one in steps],
            "newest": await self._newest(row) if row.is_there and row.messages and row.kind != "bucket" else [],
        }

    async def _newest(self, row: StreamRow) -> list[dict[str, Any]]:
        """The last messages by their heads; what they say is read elsewhere."""
        first = max(row.first, row.last - NEWEST_MAX + 1)
        try:
            found = await self.client.get_batch(row.name, count=NEWEST_MAX, sequence=first, bytes_max=NEWEST_BYTES_MAX)
        except OncewireError:
            return []  # a stream that allows no direct get
        return [
            {"sequence": one.sequence, "subject": rules.shown(one.subject), "at": one.timestamp,
             "bytes": len(one.payload), "id": rules.shown(one.headers.get("Nats-Msg-Id", ""), 120)}
            for one in reversed(found)
        ]  # fmt: skip


def _step(step: Step) -> dict[str, Any]:
    return {
        "item": step.item,
        "act": step.act,
        "cost": rules.shown(step.cost),
        "command": f"oncewire topology apply{' ' * bool(step.flag)}{step.flag}",
        "changes": [
            {"key": one.key, "found": rules.shown(show(one.key, one.found)),
             "declared": rules.shown(show(one.key, one.declared)), "cost": one.cost}
            for one in step.changes
        ],
    }  # fmt: skip
