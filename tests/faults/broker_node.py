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

from oncewire.broker.jetstream import cell
from oncewire.broker.jetstream.engine import JetStreamEngine
from oncewire.cli.broker import serving
from oncewire.settings import resolve

STEPS = ("lease", "fence", "replay", "taken", "open", "confirmed", "letter", "snapshot", "release")


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
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
