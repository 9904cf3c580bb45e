"""A node of the broker in a process of its own that kills itself at a step, or is built wrongly on purpose.

python -m tests.faults.broker_node SETTINGS STEP COUNT MUTATION
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from oncewire.broker.jetstream import cell, sending, session, takeover
from oncewire.broker.jetstream.engine import JetStreamEngine
from oncewire.cli.broker import serving
from oncewire.settings import resolve

STEPS = ("lease", "fence", "replay", "taken", "open", "confirmed", "letter", "snapshot", "release")


def no_ownership_record() -> None:
    """Takes a partition without writing that it did."""

    async def read_only(self: Any, cell: Any) -> None:
        last = await self._last(takeover.names.RECORDS, cell.records_subject)
        while cell.record_sequence < last:
            await self._apply_records(cell, last)

    takeover.Taker._read_records = read_only  # type: ignore[method-assign]


def no_expectation() -> None:
    """Writes records whatever was written before them."""
    cell.expect = lambda _: b""  # type: ignore[attr-defined]


def no_fence() -> None:
    """Stores messages whoever owns the partition."""
    cell.fence = lambda *_: b""  # type: ignore[attr-defined]


def lease_clock_ignored() -> None:
    """Thinks that it holds its session for ever."""
    session.Session.is_held = property(lambda self: bool(self.node))  # type: ignore[method-assign,assignment]


MUTATIONS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (no_ownership_record, no_expectation, no_fence, lease_clock_ignored)
}


def killed_at(step: str, count: int) -> Callable[[str], None]:
    left = count

    def on_step(name: str) -> None:
        nonlocal left
        if name == step:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    return on_step


async def main(flags: dict[str, str], step: str, count: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    cell.SNAPSHOT_RECORDS = 50  # type: ignore[misc]
    async with serving(resolve(flags, {}, {}).settings) as (server, routes):
        engine = routes.engine
        assert isinstance(engine, JetStreamEngine)
        if step:
            engine.node.on_step = killed_at(step, count)
        print(json.dumps({"url": f"http://127.0.0.1:{server.port}", "node": engine.node.node}), flush=True)
        await stop.wait()


if __name__ == "__main__":
    assert sending.fence is not None
    if sys.argv[4:]:
        MUTATIONS[sys.argv[4]]()
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
