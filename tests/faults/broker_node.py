"""A node of the broker in a process of its own that kills itself at a step, or is built wrongly on purpose.

python -m tests.faults.broker_node SETTINGS STEP COUNT MUTATION
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from oncewire._ground.contracts.records import Acked
from oncewire._ground.settings import resolve
from oncewire.broker.engine import Produced
from oncewire.broker.jetstream import cell, intake, sending
from oncewire.broker.jetstream.engine import JetStreamEngine
from oncewire.cli.broker import serving

LATE_S = 0.05
STEPS = (
    "entry", "unlisted", "cleared", "lease", "fence", "replay", "taken", "open", "stored", "recorded", "kept", "reread",
    "letter", "snapshot", "release", "chosen", "purge", "ingest",
)  # fmt: skip


def killed_at(step: str, count: int) -> Callable[[str], None]:
    left = count

    def on_step(name: str) -> None:
        nonlocal left
        if name == step:
            left -= 1
            if left == 0:
                print(json.dumps({"dies_at": name}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    return on_step


def cut_ingests(on_step: Callable[[str], None]) -> None:
    """The step inside a fast ingest: half of its bytes have left."""
    begin = sending._Ingest.begin

    def cut(self: Any, subject: bytes, frames: Any, guard: bytes) -> bytes:
        data = begin(self, subject, frames, guard)
        half = len(data) // 2
        connection = self._outlet.connection
        connection.write(data[:half])
        connection.push()
        on_step("ingest")
        return data[half:]

    sending._Ingest.begin = cut  # type: ignore[method-assign]


def answer_early() -> None:
    """A produce is answered, and sent a little later."""
    add = intake.Intake.add

    def late(self: Any, stored: Any, topic: str) -> None:
        add(self, stored, lambda _: None, topic)
        self._cell.home.wake(self._cell)

    def hasty(self: Any, stored: Any, done: Any, topic: str) -> None:
        done(Produced(topic, stored.partition, 0))
        asyncio.get_running_loop().call_later(LATE_S, late, self, stored, topic)

    intake.Intake.add = hasty  # type: ignore[method-assign, assignment]


def settle_early() -> None:
    """An ack is answered, and written a little later."""
    submit = cell.CellDesk.submit

    def late(self: Any, step: Any) -> None:
        submit(self, step, lambda _: None)
        self._cell.home.wake(self._cell)

    def hasty(self: Any, step: Any, done: Any) -> None:
        if step.records and type(step.records[0]) is Acked:
            done(step.answer)
            asyncio.get_running_loop().call_later(LATE_S, late, self, step)
        else:
            submit(self, step, done)

    cell.CellDesk.submit = hasty  # type: ignore[method-assign]


MUTATIONS = {one.__name__: one for one in (answer_early, settle_early)}


async def main(flags: dict[str, str], step: str, count: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    cell.SNAPSHOT_RECORDS = 50  # type: ignore[misc]
    async with serving(resolve(flags, {}, {}).settings) as (server, routes):
        engine = routes.engine
        assert isinstance(engine, JetStreamEngine)
        if step:
            engine.node.on_step = killed_at(step, count)
        if step == "ingest":
            cut_ingests(engine.node.on_step)
        print(json.dumps({"url": f"http://127.0.0.1:{server.port}", "node": engine.node.node}), flush=True)
        await stop.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    if sys.argv[4]:
        MUTATIONS[sys.argv[4]]()
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
