"""Where an agent can die: every durable step, just before and just after it, and in its middle where it has one.

The runtime names some steps itself (`Runner(…, at=…)`); the others are seams around what it does to its store and to
the server, put there by the worker: the product holds nothing for the sake of these tests.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oncewire._ground.jetstream import Client, Pull, fast
from oncewire._ground.jetstream.pull import ACK, IN_PROGRESS
from oncewire.agent import exits
from oncewire.agent.outflow import Outflow

INBOX = ("begin:before", "begin:after", "claim:before", "claimed")
HANDLER = ("handler:before", "row:before", "row:after", "handler:after", "section:inside", "handled")
CALLS = ("call:before", "call:made", "keep_call:before", "keep_call:after", "called")
BLOCK = ("append:before", "append:after", "written", "commit:before", "commit:after", "committed")
EFFECTS = ("publish:before", "publish:half", "publish:sent", "publish:after", "published")
ATOMIC = ("atomic:before", "atomic:half", "atomic:sent", "atomic:after")
FAST = ("fast:before", "fast:half", "fast:sent", "fast:after", "ingest:half")
"""`ingest:half`: the server has stored the first half of a batch that goes on."""
LOOK = ("look:half",)
"""The first effects of a block are out to be looked at, the others are not."""
SETTLING = ("ack:before", "ack:half", "ack:after", "acked", "nak:before", "nak:after", "term:before", "term:after")
MARKS = ("mark:before", "mark:after", "marked")
DELAYED = ("drop_due:before", "drop_due:after", "due")
STARTING = ("enter:before", "enter:after", "swept", "fetched")
RECOVERY = ("begun:before", "begun:after", "begun")
SWEEP = ("resend:before", "resend:after")
BURIAL = ("buried",)
"""Reached once an input has killed as many processes as it may."""
FORGETTING = ("forget:before", "forget:inside", "forget:after", "forgotten")
"""Reached by an agent that finds old blocks: days later."""
ENDING = ("drained", "leave:before", "leave:after")
"""Reached only by an agent that is asked to stop."""

FRESH = STARTING + INBOX + HANDLER + CALLS + BLOCK + EFFECTS + ATOMIC + FAST + LOOK + SETTLING + MARKS + DELAYED
POINTS = FRESH + RECOVERY + SWEEP + BURIAL + FORGETTING + ENDING
SWEEP_PRELUDE = "publish:before"
"""A process that dies here leaves effects for the next one to sweep."""
RECOVERY_PRELUDE = "claimed"
"""A process that dies here leaves inputs that may be what killed it."""


@dataclass(frozen=True)
class Death:
    """At which point a process dies, and at which of its visits there."""

    point: str = ""
    nth: int = 1
    by: int = signal.SIGKILL


class Points:
    """Counts the visits; at the chosen one the process is gone, without a word."""

    def __init__(self, death: Death, before: Callable[[], None] = lambda: None) -> None:
        self.death = death
        self.hits: Counter[str] = Counter()
        self._before = before

    def __call__(self, name: str) -> None:
        self.hits[name] += 1
        if name == self.death.point and self.hits[name] == self.death.nth:
            self._before()
            os.kill(os.getpid(), self.death.by)

    def is_next(self, name: str) -> bool:
        """Whether the next visit there is the last: only then a step is cut in two."""
        return name == self.death.point and self.hits[name] + 1 == self.death.nth


def _around(cls: Any, method: str, at: Points, label: str = "") -> None:
    original = getattr(cls, method)
    label = label or method

    @functools.wraps(original)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        at(f"{label}:before")
        result = original(self, *args, **kwargs)
        at(f"{label}:after")
        return result

    setattr(cls, method, around)


def _around_publish(method: str, label: str, at: Points) -> None:
    original = getattr(Client, method)

    @functools.wraps(original)
    async def around(self: Client, messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        at(f"{label}:before")
        if len(messages) > 1:
            if at.is_next(f"{label}:half"):
                await original(self, messages[: len(messages) // 2], *args, **kwargs)
            at(f"{label}:half")
        if at.is_next(f"{label}:sent"):
            sending = asyncio.ensure_future(original(self, messages, *args, **kwargs))
            for _ in range(5):  # until the frames are written, before an answer can be read
                await asyncio.sleep(0)
            at(f"{label}:sent")
            return await sending
        at(f"{label}:sent")
        result = await original(self, messages, *args, **kwargs)
        at(f"{label}:after")
        return result

    setattr(Client, method, around)


def _inside_ingest(at: Points) -> None:
    """Between two writes of one batch."""
    original = fast.Batch.send

    @functools.wraps(original)
    async def around(self: fast.Batch, steps: list[bytes]) -> None:
        if at.is_next("ingest:half"):
            frames = [b"HPUB " + frame for frame in b"".join(steps).split(b"HPUB ")[1:]]
            await original(self, [b"".join(frames[: (len(frames) + 1) // 2])])
            await self.connection.flush(5.0)
        at("ingest:half")
        await original(self, steps)

    fast.Batch.send = around  # type: ignore[method-assign]


def _behind_look(at: Points) -> None:
    original = exits.Exit._look

    @functools.wraps(original)
    async def around(self: exits.Exit, messages: Sequence[Any]) -> Any:
        outcomes = await original(self, messages)
        at("look:half")
        return outcomes

    exits.Exit._look = around  # type: ignore[method-assign]


def _around_settle(at: Points) -> None:
    original = Pull.settle

    @functools.wraps(original)
    def around(self: Pull, messages: Any, verb: bytes) -> None:
        messages = list(messages)
        if not messages or verb == IN_PROGRESS:
            return original(self, messages, verb)
        label = verb[1:4].decode().lower() if verb != ACK else "ack"
        label = {"ter": "term"}.get(label, label)
        at(f"{label}:before")
        if len(messages) > 1:
            if at.is_next(f"{label}:half"):
                original(self, messages[: len(messages) // 2], verb)
            at(f"{label}:half")
        original(self, messages, verb)
        at(f"{label}:after")
        return None

    Pull.settle = around  # type: ignore[method-assign]


def _around_resend(at: Points) -> None:
    original = Outflow.resend

    @functools.wraps(original)
    async def around(self: Outflow, *args: Any, **kwargs: Any) -> Any:
        at("resend:before")
        result = await original(self, *args, **kwargs)
        at("resend:after")
        return result

    Outflow.resend = around  # type: ignore[method-assign]


STORE_STEPS = (
    "begin",
    "claim",
    "begun",
    "append",
    "mark",
    "commit",
    "keep_call",
    "drop_due",
    "forget",
    "enter",
    "leave",
)


def _inside_forget(store: type, at: Points) -> None:
    """Between two statements of its transaction."""
    module = sys.modules[store.__module__]
    original = module.identity_keys

    @functools.wraps(original)
    def around(*args: Any) -> Any:
        at("forget:inside")
        return original(*args)

    module.identity_keys = around  # type: ignore[attr-defined]


def put_seams(store: type, at: Points) -> None:
    """Around everything that lasts: the store's methods, publishing, settling."""
    for step in STORE_STEPS:
        _around(store, step, at)
    _inside_forget(store, at)
    _around_publish("publish_many", "publish", at)
    _around_publish("publish_all", "atomic", at)
    _around_publish("publish_fast", "fast", at)
    _inside_ingest(at)
    _behind_look(at)
    _around_settle(at)
    _around_resend(at)
