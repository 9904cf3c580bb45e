"""How long a ledger remembers what is complete.

By default for ever. With `ledger_keep_s` the oldest blocks go once they are older than that, a few at a time, and the
base of the chain (number, hash, state) stands for them: the state hash, the chain and all that is kept stay provable.
What is not complete (unsettled, unconfirmed) never goes.

An input that comes again after it was forgotten would run again. So nothing may be forgotten that can still come:

    a stream with max_age          a message may be read anew while it lives, be dead-lettered at the end of its life,
                                   replayed at the end of the letter's, and then live once more:
                                   2 × max_age + max_age of DLQ + 1 day is the least
    a work queue without max_age   what was settled is gone from it, but copies may wait as long as they like: the time
                                   counts from the oldest message that waits
    a log without max_age          holds everything for ever, so nothing is ever forgotten

An adapter's state is folded from all blocks, so an agent around an adapter keeps them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from oncewire._ground.errors import NotFound, Refused
from oncewire._ground.jetstream import Client
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire.agent.agent import Agent
from oncewire.agent.commits import Commits
from oncewire.agent.sources import Opened

DLQ_STREAM = "DLQ"
DAY_S = 86_400
LOOK_EVERY_S = 60.0
BLOCKS_MAX = 20
"""So many blocks go in one transaction: others wait for it."""


class Life(NamedTuple):
    """How long messages of a source can come again."""

    stream: str
    max_age_s: float
    is_work_queue: bool


def least_s(lives: Iterable[Life], dlq_max_age_s: float) -> float:
    """The shortest time after which nothing that was settled can come again."""
    return max((2 * life.max_age_s for life in lives), default=0.0) + dlq_max_age_s + DAY_S


def check_keep(agent: Agent, keep_s: float, lives: list[Life], dlq_max_age_s: float) -> None:
    """Refuse a setting under which something would be forgotten that can still come."""
    if agent.adapted is not None:
        raise Refused(
            f"agent {agent.full_name} is an adapter: its state is folded from the whole ledger",
            hint="Set ledger.keep_s to 0, which keeps everything.",
        )
    endless = [life.stream for life in lives if not life.max_age_s and not life.is_work_queue]
    if endless:
        raise Refused(
            f"stream {endless[0]} keeps its messages for ever, so the ledger may forget nothing",
            hint=f"Set ledger.keep_s to 0, or give {endless[0]} a max_age.",
        )
    least = least_s(lives, dlq_max_age_s)
    if keep_s < least:
        raise Refused(
            f"ledger.keep_s is {keep_s:.0f}, but an input may come again for {least:.0f} s",
            hint=f"Set it to {least:.0f} or more (2 × max_age + max_age of DLQ + 1 day), or to 0: for ever.",
        )


class Forgetting:
    """Runs as a part of upkeep. `clock_ms` is the wall clock."""

    def __init__(
        self, client: Client, commits: Commits, opened: Iterable[Opened], keep_s: float, clock_ms: Callable[[], int]
    ) -> None:
        self._client = client
        self._commits = commits
        self._queues = [one.source.stream for one in opened if one.source.is_work_queue]
        self._keep_s = keep_s
        self._clock_ms = clock_ms
        self._next_at = 0.0
        self.rounds = 0
        """How often it looked for old blocks."""

    async def round(self) -> None:
        """A few blocks, if there are any that old; more soon if there may be."""
        if not self._keep_s or time.monotonic() < self._next_at:
            return
        commits = self._commits
        before_ms = await self._oldest_waiting_ms() - int(self._keep_s * 1000)
        async with commits.turn:
            count = await commits.db(commits.store.forget, before_ms, BLOCKS_MAX)
        self.rounds += 1
        if count:
            commits.at("forgotten")
        self._next_at = 0.0 if count == BLOCKS_MAX else time.monotonic() + LOOK_EVERY_S

    async def _oldest_waiting_ms(self) -> int:
        """Now, or when the oldest message came that waits in a work queue."""
        times = [self._clock_ms()]
        for stream in self._queues:
            state = (await self._client.api(f"STREAM.INFO.{stream}"))["state"]
            if state["messages"]:
                times.append(parse_time_ns(state["first_ts"]) // 1_000_000)
        return min(times)


async def check_life(client: Client, agent: Agent, opened: Iterable[Opened], keep_s: float) -> None:
    """Ask the server how long messages live; refuse a setting that is too short."""
    if keep_s:
        lives = [
            Life(one.source.stream, await _max_age_s(client, one.source.stream), one.source.is_work_queue)
            for one in opened
        ]
        check_keep(agent, keep_s, lives, await _max_age_s(client, DLQ_STREAM))


async def _max_age_s(client: Client, stream: str) -> float:
    try:
        config: dict[str, Any] = (await client.api(f"STREAM.INFO.{stream}"))["config"]
    except NotFound:
        return 0.0
    return float(config.get("max_age") or 0) / 1e9
