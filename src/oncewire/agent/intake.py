"""One source: ask for what can be worked on soon, keep it in progress, cut it into batches.

Everything that arrives is watched by the keep-alive process from its arrival to its end, wherever it waits: in the
queue, for a token of its handler's rate, for a place among the async handlers, behind the same input that is being
worked on already.

An input that was delivered before and left no error behind may be what killed a process. Such a suspect gets a durable
mark and then runs alone, and those that were marked before run last: a poison message takes nobody along.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import NamedTuple

from oncewire._ground.contracts.subjects import overlaps
from oncewire._ground.errors import NotConnected, Unavailable
from oncewire._ground.fields import columns
from oncewire._ground.jetstream import Client, Pull
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.pull import Delivery, parse_replies
from oncewire.agent.agent import Agent
from oncewire.agent.batch import Item, Settled, attempt_of
from oncewire.agent.commits import Commits
from oncewire.agent.flow import Bucket, Pace, Shares
from oncewire.agent.lane import Lane
from oncewire.agent.outflow import now_ms
from oncewire.agent.read import Reading
from oncewire.agent.sources import Opened

FETCH_S = 0.2
LATE_S = 0.1
"""After asking for nothing more, so long a message may still be on its way."""
FEW = 64
"""Fewer messages than that are read where they arrive."""
ASYNC = "async"


class Waiting(NamedTuple):
    """An input that waits for its turn, and its keep-alive token."""

    item: Item
    token: int


class Arrived(NamedTuple):
    """What came together and is not read yet, with its keep-alive token and the time."""

    messages: list[Message]
    deliveries: list[Delivery]
    token: int
    at_ns: int


class Intake:
    """Pulls from one durable and hands batches to the commits, inputs to the lane."""

    def __init__(
        self,
        client: Client,
        agent: Agent,
        opened: Opened,
        reading: Reading,
        commits: Commits,
        lane: Lane,
        *,
        is_unclean: bool,
    ) -> None:
        self.client = client
        self.agent = agent
        self.opened = opened
        self.reading = reading
        self.commits = commits
        self.lane = lane
        self.is_careful = is_unclean
        self.unread: deque[Arrived] = deque()
        self.queue: deque[tuple[list[Item], int]] = deque()
        self.ready: deque[Waiting] = deque()
        self.twins: list[Waiting] = []
        handlers = [one for one in agent.handlers if any(overlaps(one.pattern, mine) for mine in opened.source.filters)]
        self.buckets = {one.pattern: Bucket(one.rate_per_s) for one in handlers if one.rate_per_s}
        self.rated: dict[str, deque[Waiting]] = {pattern: deque() for pattern in self.buckets}
        self.has_async = any(one.is_async for one in handlers)
        self.pace = Pace(agent.batch)
        self.shares = Shares([ASYNC, *self.buckets])
        self.working: list[Item] = []
        self.reached = 0
        self._changed = asyncio.Event()
        self._pull: Pull | None = None
        lane.listeners.append(self._changed.set)

    @property
    def held(self) -> int:
        """Inputs that wait or are being worked on, but for those in async handlers."""
        waiting = sum(len(one.messages) for one in self.unread) + sum(len(items) for items, _ in self.queue)
        waiting += len(self.ready) + len(self.twins)
        return waiting + sum(map(len, self.rated.values())) + len(self.working)

    async def run(self) -> None:
        """Until the agent stops: then what is here already is finished."""
        source = self.opened.source
        async with self.client.pull(source.stream, source.consumer, batch=self.agent.batch, ahead=0) as pull:
            self._pull = pull
            feeding = asyncio.get_running_loop().create_task(self._feed(pull))
            try:
                await self._work(pull, feeding)
                await feeding
            finally:
                feeding.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await feeding
                self._give_back(pull)

    def _give_back(self, pull: Pull) -> None:
        """What was not begun is offered to the others at once. Nothing may be asked for here any more, or the server
        could hand it back to us, and nobody would read it before ack_wait is over."""
        pull.close()
        waiting = [*self.ready, *self.twins, *(one for rated in self.rated.values() for one in rated)]
        items = [item for arrived, _ in self.queue for item in arrived]
        unread = [message for one in self.unread for message in one.messages]
        with contextlib.suppress(NotConnected):
            pull.nak([*unread, *(item.message for item in (*items, *(one.item for one in waiting)))])

    # ---- taking in

    async def _feed(self, pull: Pull) -> None:
        stopping = self.commits.stopping
        try:
            while not stopping.is_set():
                self._ask()
                self.take_in(await pull.fetch(timeout_s=FETCH_S))
            while pull.expected:
                messages = await pull.fetch(timeout_s=LATE_S)
                self.take_in(messages)
                if not messages:
                    break
        finally:
            self._changed.set()

    def take_in(self, messages: list[Message]) -> None:
        """What was delivered, or found in the stream after the server had given it up."""
        if messages:
            (replies,) = columns(messages, Message, "reply")
            deliveries = parse_replies(replies)
            token = self.commits.keepalive.watch_all(replies, deliveries)
            self.reached = max(self.reached, deliveries[-1].sequence)
            self.unread.append(Arrived(messages, deliveries, token, time.time_ns()))
            self._changed.set()

    async def _read(self) -> None:
        """Read what a batch still lacks, in the thread where it will be worked on: what one thread makes and another
        uses goes from cache to cache. For a few that is not worth the way there."""
        size = 1 if self.is_careful else self.pace.batch
        lacking = size - len(self.ready) - sum(len(items) for items, _ in self.queue)
        chosen: list[Arrived] = []
        for one in self.unread:
            if lacking <= 0:
                break
            chosen.append(one)
            lacking -= len(one.messages)
        if not chosen:
            return
        few = sum(len(one.messages) for one in chosen) < FEW
        found = self._read_all(chosen) if few else await self.commits.db(self._read_all, chosen)
        for one, items in zip(chosen, found, strict=True):
            self.unread.popleft()
            self.commits.arrived(items, one.at_ns)
            self.queue.append((items, one.token))

    def _read_all(self, arrived: list[Arrived]) -> list[list[Item]]:
        return [self.reading.read_delivered(one.messages, one.deliveries) for one in arrived]

    def _ask(self) -> None:
        """Ask for what is missing to the work that may wait here, in requests that are worth it."""
        pull = self._pull
        if pull is None or self.commits.stopping.is_set():
            return
        if self.is_careful or self.agent.is_ordered:
            pull.ask(1 - self.held - self.lane.in_hand - pull.expected)
            return
        hold = self.pace.hold
        room = min([hold - self.held, *self._rooms()]) - pull.expected
        if room >= min(hold // 3, self.agent.batch) or not (self.held or pull.expected):
            pull.ask(room)

    def _rooms(self) -> list[int]:
        """What the limited kinds allow, each by its share of the messages."""
        rooms = [
            self.shares.room(pattern, bucket.hold - len(self.rated[pattern]))
            for pattern, bucket in self.buckets.items()
        ]
        if self.has_async:
            rooms.append(self.shares.room(ASYNC, self.lane.room))
        return rooms

    # ---- working

    async def _work(self, pull: Pull, feeding: asyncio.Task[None]) -> None:
        while True:
            self._ask()
            self.working, tokens = await self._next_batch()
            if self.working:
                self._ask()
                await self._take(pull, self.working, tokens)
                self.working = []
            elif feeding.done() and (not self.held or feeding.exception() is not None):
                return
            else:
                await self._wait()
            if self.is_careful:
                await self._look_around()

    async def _wait(self) -> None:
        """For something to arrive, a token, or the end of a twin."""
        waits = [self.buckets[pattern].wait_s() for pattern, waiting in self.rated.items() if waiting]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min([FETCH_S, *waits])):
                await self._changed.wait()
        self._changed.clear()

    async def _next_batch(self) -> tuple[list[Item], list[int]]:
        """Read on until there is something that may run."""
        while True:
            await self._read()
            items, tokens = self._cut()
            if not items:  # what waits for a token of its rate is watched by itself
                self._release(tokens)
            if items or not self.unread:
                return items, tokens

    def _cut(self) -> tuple[list[Item], list[int]]:
        """What may run now: those that waited first, then what arrived, up to a batch: one block's effects are then
        one atomic batch."""
        size = 1 if self.is_careful else self.pace.batch
        items: list[Item] = []
        tokens: list[int] = []
        self._release_waiting()
        while self.ready and len(items) < size:
            item, token = self.ready.popleft()
            items.append(item)
            tokens.append(token)
        while self.queue and (not items or len(items) + len(self.queue[0][0]) <= size):
            arrived, token = self.queue.popleft()
            items += self._sift(arrived)
            tokens.append(token)
        return items, tokens

    def _release_waiting(self) -> None:
        now = time.monotonic()
        for pattern, waiting in self.rated.items():
            while waiting and self.buckets[pattern].take(now):
                self.ready.append(waiting.popleft())
        free = [one for one in self.twins if not self.lane.has(one.item.key)]
        if free:
            self.twins = [one for one in self.twins if one not in free]
            self.ready += free

    def _sift(self, items: list[Item]) -> list[Item]:
        """Without those that must wait for a token."""
        if not self.buckets and not self.has_async:
            return items
        counts: dict[str, int] = {}
        now = time.monotonic()
        kept = [item for item in items if self._may_run(item, now, counts)]
        self.shares.seen(counts, len(items))
        return kept

    def _may_run(self, item: Item, now: float, counts: dict[str, int]) -> bool:
        handler = item.handler
        if handler is None:
            return True
        if handler.is_async:
            counts[ASYNC] = counts.get(ASYNC, 0) + 1
        if handler.rate_per_s:
            pattern = handler.pattern
            counts[pattern] = counts.get(pattern, 0) + 1
            if self.rated[pattern] or not self.buckets[pattern].take(now):
                self.rated[pattern].append(self._watched(item))
                return False
        return True

    def _watched(self, item: Item) -> Waiting:
        return Waiting(item, self.commits.keepalive.watch([item.message.reply]))

    async def _take(self, pull: Pull, items: list[Item], tokens: list[int]) -> None:
        commits = self.commits
        commits.at("fetched")
        commits.busy_at = time.monotonic()
        plain, suspects = await self._sort_out(items)
        if suspects:
            token = commits.keepalive.watch([item.message.reply for item in suspects])
            await self._run(pull, plain, tokens, is_careful=False)
            for item in suspects:
                if await commits.insist(commits.store.begun, [attempt_of(item, now_ms(), "")]):
                    commits.at("begun")
                    await self._run(pull, [item], [], is_careful=True)
            commits.keepalive.release(token)
        else:
            await self._run(pull, plain, tokens, is_careful=False)

    async def _sort_out(self, items: list[Item]) -> tuple[list[Item], list[Item]]:
        """Those that may run together, and those that must run alone, the most suspicious last."""
        (places,) = columns(items, Item, "delivery")
        (deliveries,) = columns(places, Delivery, "deliveries")
        if not self.is_careful and max(deliveries, default=1) == 1:
            return items, []
        again = [item for item in items if item.delivery.deliveries > 1 or self.is_careful]
        found: list[tuple[dict[bytes, str], set[bytes]]] = []
        if not await self.commits.insist(lambda: found.append(self._look_up(again))):
            return [item for item in items if item not in again], []  # it stops: they come back
        errors, settled = found[0]
        alone = [item for item in again if item.at_key not in settled and not errors.get(item.at_key)]
        alone.sort(key=lambda item: item.at_key in errors)
        names = {item.at_key for item in alone}
        together = [item for item in items if item.at_key not in names]
        retried = [item for item in again if item.at_key not in names and item.at_key not in settled]
        if retried:
            await self.commits.insist(self.commits.store.begun, [attempt_of(item, now_ms(), "") for item in retried])
        return together, alone

    def _look_up(self, items: list[Item]) -> tuple[dict[bytes, str], set[bytes]]:
        """The last error of each position that began before, and the positions that are settled."""
        store = self.commits.store
        errors = {one.key: one.error for one in store.attempts()}
        store.begin()
        try:
            found = store.claim([], look=[key for item in items for key in (item.at_key, item.key) if key])
        finally:
            store.rollback()
        return errors, {item.at_key for item in items if item.at_key in found or item.key in found}

    async def _run(self, pull: Pull, items: list[Item], tokens: list[int], *, is_careful: bool) -> None:
        """Commit them, and start what follows from each commit: publishing, acks, async handlers."""
        commits = self.commits
        finishings: list[asyncio.Task[None]] = []
        began, count = time.monotonic(), 0
        async for settled in commits.commit(items, self.opened.max_deliver, is_careful=is_careful):
            self._put_back(settled)
            self._start_async(pull, settled.later)
            done = sum(settled.counts.values())
            count += done
            commits.handling.observe(time.monotonic() - began, done)
            finishings.append(await commits.finish_soon(pull, settled))
        self.pace.measured(count, time.monotonic() - began)
        if finishings:  # how each of them ended is the commits' affair
            asyncio.gather(*finishings, return_exceptions=True).add_done_callback(lambda _: self._release(tokens))
        else:
            self._release(tokens)
        if finishings and (is_careful or self.agent.is_ordered):
            await asyncio.wait(finishings)

    def _start_async(self, pull: Pull, items: list[Item]) -> None:
        for item in items:
            waiting = self._watched(item)
            if self.lane.has(item.key):
                self.twins.append(waiting)
            else:
                self.lane.add(item, pull, waiting.token, self.opened.max_deliver)

    def _release(self, tokens: list[int]) -> None:
        for token in tokens:
            self.commits.keepalive.release(token)

    def _put_back(self, settled: Settled) -> None:
        """What the batch did not come to is next."""
        if settled.left:
            waiting = [self._watched(item) for item in settled.left]
            self.ready.extendleft(reversed(waiting))

    # ---- after an unclean stop

    async def _look_around(self) -> None:
        """One at a time until everything that was in hand at the crash is settled."""
        source = self.opened.source
        with contextlib.suppress(NotConnected, Unavailable):
            info = await self.client.api(f"CONSUMER.INFO.{source.stream}.{source.consumer}")
            is_over = info["ack_floor"]["stream_seq"] >= self.opened.delivered or not info["num_ack_pending"]
            self.is_careful = not is_over
