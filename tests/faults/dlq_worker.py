"""The dead-letter service as a process that dies at a named step, with or without a law broken."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import oncewire
from oncewire._ground.contracts import ids
from oncewire.dlq.service import DlqOptions, Service, serving

OnStep = Callable[[str], None]


def settle_first(on_step: OnStep) -> None:
    """The given-up sequence is acked before its letter stands."""
    write = Service._write

    async def changed(self: Service, batch: Any) -> None:
        await self._settle(batch)
        on_step("mutated")
        await write(self, batch)

    Service._write = changed  # type: ignore[method-assign]


def ack_first(on_step: OnStep) -> None:
    """The event is acked before its letter stands."""
    handle = Service.handle

    async def changed(self: Service, events: Any, pull: Any = None) -> Any:
        if pull is not None and events:
            pull.ack([event.message for event in events])
            await self.client.connection.flush()
            on_step("mutated")
        return await handle(self, events, pull)

    Service.handle = changed  # type: ignore[method-assign]


def new_ids(_: OnStep) -> None:
    """A letter has another id each time."""
    numbers = itertools.count()
    ids.letter_id = lambda *_: f"dl.{os.getpid():020d}{next(numbers):020d}"


MUTATIONS = {"settle_first": settle_first, "ack_first": ack_first, "new_ids": new_ids}


async def main(url: str, step: str, nth: int, mutation: str) -> None:
    visits: Counter[str] = Counter()

    def on_step(name: str) -> None:
        visits[name] += 1
        if name == step and visits[name] == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    if mutation:
        MUTATIONS[mutation](on_step)
    async with oncewire.connect(url) as client, serving(client, DlqOptions(sweep_s=0.5, on_step=on_step)):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
