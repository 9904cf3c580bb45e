"""Lineage of one run: who caused whom, and which chain of steps the end had to wait for. Pure.

A run is all messages with one correlation id, or one run id on a topic; a step is one message; its parent is the
message that caused it. A step comes to be when its stream takes it in, so it took the time since its parent was there;
one of a topic ends when its groups have settled it. The critical path is the chain of parents behind the step that
ended last: shorten anything else, and the run ends no earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

STEPS_MAX: Final = 10_000
"""Of a run; what goes beyond is left out and said (`is_cut`). A producer that correlates everything makes one run."""


class Message(NamedTuple):
    """A row of silver, as lineage sees it."""

    tenant: str
    run: str
    step: str
    parent: str | None
    type: str
    subject: str
    stream: str
    sequence: int
    at_us: int
    retries: int
    done_us: int = 0
    """When all who had to settle it had; 0 where nobody has to, or not yet."""

    @property
    def end_us(self) -> int:
        return max(self.at_us, self.done_us)


class Step(NamedTuple):
    """A message in its run. `wait_ms` is the time since its parent was there; a root waits for nobody."""

    message: Message
    wait_ms: float
    depth: int
    is_critical: bool


class Run(NamedTuple):
    """A run as a whole."""

    tenant: str
    run: str
    steps: int
    started_us: int
    ended_us: int
    duration_ms: float
    depth: int
    retries: int
    critical_path: list[str]
    critical_ms: float
    is_cut: bool


def runs(messages: Iterable[Message]) -> Iterator[tuple[Run, list[Step]]]:
    """Messages in order of tenant, run and time, run by run."""
    for _, part in groupby(messages, key=lambda one: (one.tenant, one.run)):
        found: list[Message] = []
        is_cut = False
        for message in part:
            if len(found) < STEPS_MAX:
                found.append(message)
            else:
                is_cut = True
        yield run_of(found, is_cut=is_cut)


def run_of(messages: Sequence[Message], *, is_cut: bool = False) -> tuple[Run, list[Step]]:
    """The messages of one run, in order of time."""
    by_step = {message.step: message for message in reversed(messages)}
    depths = _depths(by_step)
    last = max(messages, key=lambda one: (one.end_us, depths[one.step]))
    path = _path(by_step, last.step)
    critical = set(path)
    steps = [Step(one, _wait_ms(one, by_step), depths[one.step], one.step in critical) for one in messages]
    started, ended = min(one.at_us for one in messages), last.end_us
    first = messages[0]
    return Run(
        first.tenant,
        first.run,
        len(messages),
        started,
        ended,
        (ended - started) / 1000,
        max(depths.values()),
        sum(one.retries for one in messages),
        path,
        (ended - by_step[path[0]].at_us) / 1000,
        is_cut,
    ), steps


def _wait_ms(message: Message, by_step: dict[str, Message]) -> float:
    parent = by_step.get(message.parent or "")
    return (message.at_us - parent.at_us) / 1000 if parent is not None else 0.0


def _depths(by_step: dict[str, Message]) -> dict[str, int]:
    """How many parents each step has behind it. Who says to be caused by himself, in a circle, is a root."""
    depths: dict[str, int] = {}
    for step in by_step:
        chain: list[str] = []
        at: str | None = step
        while at in by_step and at not in depths and at not in chain:
            chain.append(at)
            at = by_step[at].parent
        depth = depths.get(at or "", -1)
        for one in reversed(chain):
            depth += 1
            depths[one] = depth
    return depths


def _path(by_step: dict[str, Message], last: str) -> list[str]:
    path = [last]
    parent = by_step[last].parent
    while parent in by_step and parent not in path:
        path.append(parent)
        parent = by_step[parent].parent
    return path[::-1]
