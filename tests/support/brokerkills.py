"""A broker process that is killed under load, and the ledger of the client that talks to it.

The child (`python -m tests.support.brokerkills FOLDER`) answers one JSON line per request and sends deliveries as they
come; it is the local engine with its log and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oncewire.broker.engine import Consume, Limits, Produced, Settle
from oncewire.broker.local import open_local
from oncewire.contracts.broker import BrokerEnvelope, Delivery, ProduceBody
from oncewire.errors import OncewireError

WINDOW = 40
SECONDS_MAX = 60


# ---- the child


class _Stream:
    def __init__(self, send: Any) -> None:
        self._send = send

    def room(self) -> int:
        return 1_000

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for one in deliveries:
            self._send("got", one.offset, one.value)

    def ended(self, error: OncewireError) -> None:
        pass


async def serve(folder: str) -> None:
    def send(*parts: Any) -> None:
        sys.stdout.write(json.dumps(parts) + "\n")
        sys.stdout.flush()

    engine = await open_local(Path(folder), limits=Limits(settled_age_ms=0, lease_ms=60_000))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    made = asyncio.get_running_loop().create_future()
    engine.create_topic("", "t", 1, made.set_result)
    await made
    joined = asyncio.get_running_loop().create_future()
    engine.subscribe("", Consume("t", "g", "a"), _Stream(send), joined.set_result)
    await joined
    send("ready")
    while line := await lines.readline():
        name, argument = json.loads(line)
        if name == "produce":
            envelope = BrokerEnvelope(idempotency_key=argument)
            body = ProduceBody(topic="t", value=argument, envelope=envelope)
            engine.produce("", body, lambda r, v=argument: send("produced", v, isinstance(r, Produced)))
        elif name == "ack":
            settle = Settle("ack", "t", "g", 0, argument, "a")
            engine.settle("", settle, lambda r, o=argument: send("acked", o, r is None))
        elif name == "lag":
            engine.show_topic("", "t", lambda r: send("lag", r.groups[0].lag))  # type: ignore[union-attr]
    await engine.stop()


# ---- the client


class Kills:
    """A client's life over many kills of its broker."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.next = 0
        self.produced: set[str] = set()
        self.values: dict[int, str] = {}
        self.offsets: dict[str, int] = {}
        self.acked: set[int] = set()
        self.problems: list[str] = []
        self.kills = 0

    async def _child(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.brokerkills",
            str(self.folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def until_killed(self) -> None:
        """Load, and a kill -9 in the middle of it."""
        child = await self._child()
        assert child.stdout is not None
        left = self.chance.randint(1, 400)
        try:
            async with asyncio.timeout(SECONDS_MAX):
                while left and (line := await child.stdout.readline()):
                    left -= self._heard(child, json.loads(line))
        finally:
            child.kill()
            self.kills += 1
            for line in (await child.stdout.read()).splitlines(keepends=True):
                if line.endswith(b"\n"):
                    self._heard(None, json.loads(line))
            await child.wait()

    def _heard(self, child: asyncio.subprocess.Process | None, parts: list[Any]) -> int:
        """Take note, and go on; returns 1 for what counts as work."""
        name = parts[0]
        if name == "ready":
            for _ in range(WINDOW):
                self._produce(child)
            return 0
        if name == "produced":
            if parts[2]:
                self.produced.add(parts[1])
            self._produce(child)
        elif name == "got":
            self._got(child, parts[1], parts[2])
        elif name == "acked" and parts[2]:
            self.acked.add(parts[1])
        return 1

    def _produce(self, child: asyncio.subprocess.Process | None) -> None:
        self._send(child, "produce", f"v{self.next}")
        self.next += 1

    def _got(self, child: asyncio.subprocess.Process | None, offset: int, value: str) -> None:
        if offset in self.acked:
            self.problems.append(f"{offset} was acked and came again")
        if self.values.setdefault(offset, value) != value:
            self.problems.append(f"{offset} was {self.values[offset]} and is {value}")
        if self.offsets.setdefault(value, offset) != offset:
            self.problems.append(f"{value} stands at {self.offsets[value]} and {offset}")
        if child is not None and self.chance.random() < 0.9:
            self._send(child, "ack", offset)

    @staticmethod
    def _send(child: asyncio.subprocess.Process | None, *parts: Any) -> None:
        if child is not None and child.stdin is not None:
            child.stdin.write(json.dumps(parts).encode() + b"\n")

    async def finish(self) -> list[str]:
        """Read and ack everything; then nothing that was acknowledged may be missing."""
        child = await self._child()
        assert child.stdin is not None
        assert child.stdout is not None
        async with asyncio.timeout(SECONDS_MAX):
            self._send(child, "lag", 0)
            while True:
                parts = json.loads(await child.stdout.readline())
                if parts[0] == "got":
                    self._got(None, parts[1], parts[2])
                    self._send(child, "ack", parts[1])
                elif parts[0] == "lag" and parts[1] == 0:
                    break
                elif parts[0] in ("lag", "acked"):
                    self._send(child, "lag", 0)
            child.stdin.close()
            await child.wait()
        missing = self.produced - self.offsets.keys()
        return self.problems + [f"{value} was acknowledged and never came" for value in sorted(missing)]


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
