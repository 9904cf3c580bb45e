"""The servers of one data folder: started together, watched, stopped in order.

A server that dies is not started again. Whatever ended it (a full disk, the kernel short of memory, damage) would end
it again, and a restart in the background would hide it; `up` says what happened and stops, and a supervisor or a
person starts it again in a second. Nothing that was acknowledged is lost by that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, Protocol

from oncewire._ground.processes import start_time
from oncewire.embedded import nats, postgres
from oncewire.embedded.folder import DataFolder, Running, Server
from oncewire.embedded.process import Child, Mark, stop_leftover

WATCH_S = 5.0


async def clear(folder: DataFolder) -> None:
    """Stop what a killed `up` left behind. The folder's lock must be held: then nothing of it can be in use."""
    left = folder.read()
    for name, steps in (("postgres", postgres.STOP_STEPS), ("nats", nats.STOP_STEPS)):
        server = left.servers.get(name) if left else None
        if server is not None and server.mark is not None:
            await stop_leftover(server.mark, *steps)
    folder.forget()


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all side by side. The first error ends the others and is raised as it is."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Say(Protocol):
    """Told about each step of a part; a part that is ready has a version and addresses."""

    def __call__(self, name: str, state: str, /, **facts: str) -> None: ...


class Embedded(Protocol):
    """A server that we start ourselves."""

    name: str
    child: Child | None

    @property
    def shown(self) -> Server: ...
    async def start(self) -> None: ...
    async def ready(self) -> str: ...
    async def stop(self) -> None: ...
    def force(self) -> None: ...


class Stack:
    """What runs on a data folder. `parts` by name, in the order of stopping reversed; `others` are not ours."""

    def __init__(self, folder: DataFolder, parts: dict[str, Embedded], others: dict[str, Server], say: Say) -> None:
        self.folder = folder
        self._parts = parts
        self._others = others
        self._say = say
        self._services: dict[str, str] = {}

    @property
    def servers(self) -> dict[str, Server]:
        return self._others | {name: part.shown for name, part in self._parts.items()}

    async def start(self) -> None:
        """All parts side by side. The first that fails ends the wait for the others."""
        await together(*(self._start(part) for part in self._parts.values()))

    async def _start(self, part: Embedded) -> None:
        self._say(part.name, State.STARTING)
        await part.start()
        self._record()  # before it can be needed: who kills us now leaves a trace of the child
        version = await part.ready()
        shown = part.shown
        self._say(part.name, State.READY, version=version, url=shown.url, monitor_url=shown.monitor_url)

    def _record(self) -> None:
        self.folder.write(Running(Mark(os.getpid(), start_time(os.getpid())), self.servers, self._services))

    def serves(self, name: str, url: str) -> None:
        """A service on these servers is ready at this address: for other commands."""
        self._services[name] = url
        self._record()

    async def watch(self) -> None:
        """Returns never: raises when a part dies. Keeps the logs below their size."""
        children = [part.child for part in self._parts.values() if part.child]
        await together(_trim(children), *(_fail_when_ended(child) for child in children))

    async def stop(self) -> None:
        """In order, each with its bounded wait: the last part first."""
        for part in reversed(self._parts.values()):
            if part.child is not None:
                self._say(part.name, State.STOPPING)
                await part.stop()
                self._say(part.name, State.STOPPED)
        self.folder.forget()

    def force(self) -> None:
        """Without waiting and without order."""
        for part in self._parts.values():
            part.force()


async def _fail_when_ended(child: Child) -> None:
    await child.wait()
    raise child.died("while serving")


async def _trim(children: list[Child]) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        for child in children:
            child.log.trim()
