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

from oncewire.broker.engine import Produced
from oncewire.broker.jetstream import cell
from oncewire.broker.jetstream.engine import JetStreamEngine
from oncewire.cli.broker import serving
from oncewire.contracts.records import Acked
from oncewire.settings import resolve

LATE_S = 0.05
STEPS = (
    "entry", "unlisted", "cleared", "lease", "fence", "replay", "taken", "open", "stored", "recorded", "kept", "reread",
    "letter", "snapshot", "release", "chosen", "purge",
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


def answer_early() -> None:
    """A produce is answered, and sent a little later."""
    take_in = cell.Cell._take_in

    def hasty(self: Any, stored: Any, done: Any, topic: str) -> None:
        done(Produced(topic, stored.partition, 0))
        asyncio.get_running_loop().call_later(LATE_S, take_in, self, stored, lambda _: None, topic)

    cell.Cell._take_in = hasty  # type: ignore[method-assign]


def settle_early() -> None:
    """An ack is answered, and written a little later."""
    submit = cell.Cell.submit

    def hasty(self: Any, step: Any, done: Any) -> None:
        if step.records and type(step.records[0]) is Acked:
            done(step.answer)
            asyncio.get_running_loop().call_later(LATE_S, submit, self, step, lambda _: None)
        else:
            submit(self, step, done)

    cell.Cell.submit = hasty  # type: ignore[method-assign]


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
        print(json.dumps({"url": f"http://127.0.0.1:{server.port}", "node": engine.node.node}), flush=True)
        await stop.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    if sys.argv[4]:
        MUTATIONS[sys.argv[4]]()
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
