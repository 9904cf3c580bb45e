"""What an agent does each second besides its inputs: nothing that any process of its ledger began is left undone.

due effects        sent in a commit of their own, then published
open blocks        effects that nobody confirmed are published again, under their ids
exhausted inputs   begun, no outcome, no delivery left: a process died of them each time. Settled as dead
abandoned inputs   not even begun, and no delivery left: taken in once more (`lookout`)
marks              what was confirmed is written down when no commit comes along
closing block      before idling, so that the last announcement says that all before it is confirmed
old blocks         forgotten, where a setting says so (`forget`)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable

from oncewire._ground.contracts.blocks import Outcome
from oncewire._ground.errors import Corrupt, NotFound, Unavailable
from oncewire._ground.jetstream import Client, StoredMessage
from oncewire._ground.jetstream.protocol import encode_acks
from oncewire._ground.ledger.rules import Content, Durable, short_error
from oncewire._ground.ledger.store import Attempt, Mark, Store
from oncewire.agent.agent import Agent
from oncewire.agent.batch import GroupCommit, Item
from oncewire.agent.commits import Commits
from oncewire.agent.forget import Forgetting
from oncewire.agent.handlers import Handler
from oncewire.agent.keepalive import KeepAlive
from oncewire.agent.lookout import Lookout, as_delivered
from oncewire.agent.outflow import now_ms
from oncewire.agent.read import Reading
from oncewire.agent.sources import Opened

log = logging.getLogger("oncewire.agent")

EVERY_S = 1.0
LOOK_EVERY_S = 5.0
"""So often at most the server is asked what it gave up or lost."""
SWEEP_AFTER_S = 10.0
"""A block of another process is left to that process for this long after this one first saw it open."""
GIVEN_UP = "died: the process died or stood still while handling it, at every delivery"
LOOK_BACK_MS = 600_000
LOOK_BACK_BLOCKS = 5_000
NEVER = "1970-01-01T00:00:00Z"


class Upkeep:
    """Runs beside the intakes."""

    def __init__(
        self,
        client: Client,
        agent: Agent,
        commits: Commits,
        reading: Reading,
        opened: dict[Durable, Opened],
        in_hand: Callable[[], list[Item]],
        lookout: Lookout,
        forgetting: Forgetting,
        keepalive: KeepAlive,
    ) -> None:
        self.client = client
        self.agent = agent
        self.commits = commits
        self.reading = reading
        self.opened = opened
        self.lookout = lookout
        self.in_hand = in_hand
        self.forgetting = forgetting
        self.keepalive = keepalive
        self._renewed_ms = now_ms()
        self._open_since: dict[int, float] = {}
        """When this process first saw each block open, by its monotonic clock."""
        self._looked_at = time.monotonic()
        self._look_every_s = min([LOOK_EVERY_S, *(one.ack_wait_s for one in opened.values())])

    async def run(self) -> None:
        trouble = ""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self._round()
            except Unavailable as problem:
                self.commits.note(problem)
                trouble = self.commits.trouble
            else:
                if trouble and self.commits.trouble == trouble:
                    self.commits.trouble = ""
                trouble = ""

    async def _round(self) -> None:
        commits = self.commits
        await self.keepalive.check()
        await commits.send_due()
        await self.sweep()
        await self._renew()
        await self._bury_exhausted()
        if time.monotonic() - self._looked_at >= self._look_every_s:
            self._looked_at = time.monotonic()
            await self.lookout.look()
        if time.monotonic() - commits.busy_at > EVERY_S:
            await self.flush_marks()
            await self.close_off()
        await self.forgetting.round()

    # ---- marks

    async def flush_marks(self) -> None:
        """Marks of an idle agent get a commit of their own; that of a closing block once others wrote behind it."""
        commits = self.commits
        async with commits.turn:
            if not commits.marks and not await self._is_overtaken():  # or a commit before us took them along
                return
            marks = commits.take_marks()
            try:
                await commits.db(self._write_marks, marks)
            except BaseException:
                commits.marks = marks + commits.marks
                raise
        commits.at("marked")

    async def _is_overtaken(self) -> bool:
        """Whether another process's blocks wait behind our closing block for its mark."""
        closing = [mark.block for mark in self.commits.closing_marks]
        return bool(closing) and (await self.commits.db(self.commits.store.head)).number > max(closing)

    def _write_marks(self, marks: list[Mark]) -> None:
        store = self.commits.store
        store.begin()
        try:
            store.mark(marks)
            store.commit()
        except BaseException:
            store.rollback()
            raise

    async def close_off(self) -> None:
        """One closing block before idling, whose own mark waits for the next real commit."""
        commits = self.commits
        if commits.is_closed_off or commits.marks or commits.open or commits.finishing:
            return
        async with commits.turn:
            confirmed = await commits.db(commits.store.confirmed)
        if confirmed.block == 0:
            return
        settled = await commits.append(lambda: Content([], [], now_ms(), dict(commits.targets.last)))
        assert settled is not None
        commits.is_closed_off = True  # until a block comes after it, which may be while it is published
        await commits.publish(settled)
        commits.closing_marks += [mark for mark in commits.marks if mark.block == settled.block]
        commits.marks = [mark for mark in commits.marks if mark.block != settled.block]

    # ---- effects

    async def sweep(self, *, is_start: bool = False, is_end: bool = False) -> None:
        """Publish what any process of this ledger left open. At the start all of it, before anything is pulled; at the
        end all of it too, so that a ledger that nobody works on any more is closed off."""
        commits = self.commits
        async with commits.turn:
            open_ = await commits.db(commits.store.unconfirmed)
        mine = {mark.block for mark in (*commits.marks, *commits.closing_marks)} | commits.open
        commits.left_open = {number for number, _ in open_}
        now = time.monotonic()
        self._open_since = {number: self._open_since.get(number, now) for number, _ in open_}
        commits.unfinished = {at: text for at, text in commits.unfinished.items() if at in commits.left_open - mine}
        for number, holes in open_:
            is_due = is_start or is_end or now - self._open_since[number] >= SWEEP_AFTER_S
            if (is_due or number in commits.unfinished) and number not in mine:
                await self._resend(number, holes, is_start=is_start)
        if is_start:
            await self.flush_marks()
            commits.at("swept")
        commits.settle_resumes()

    async def _resend(self, number: int, holes: list[tuple[int, int]], *, is_start: bool) -> None:
        commits = self.commits
        async with commits.turn:
            block = await commits.db(commits.store.block, number)
        if block is None:
            return
        try:
            marks, error = await commits.outflow.resend(block, holes)
        except (Unavailable, Corrupt):
            raise
        except Exception as problem:  # the block's own: the others must not wait for it
            commits.fault(number, "publishing failed", problem)
            marks, error = [], short_error(problem)
        else:
            if error:
                commits.unpublished(number, error)
            else:
                commits.unfinished.pop(number, None)
        commits.marks += marks
        if error and is_start:
            raise Unavailable(f"effects of block {number} cannot be published: {error}")

    # ---- exhausted inputs

    async def _renew(self) -> None:
        """Say of long attempts that they are still at it, or another process would give them up."""
        if now_ms() - self._renewed_ms < min(one.ack_wait_s for one in self.opened.values()) * 1000 / 3:
            return
        self._renewed_ms = now_ms()
        long = [item.at_key for item in self.in_hand() if item.delivery.deliveries > 1]
        if long:
            async with self.commits.turn:  # some may be settled by the time that it is our turn
                await self.commits.db(self.commits.store.renew_attempts, long, now_ms())

    async def _bury_exhausted(self) -> None:
        async with self.commits.turn:
            attempts = await self.commits.db(self.commits.store.attempts)
        mine = {item.at_key for item in self.in_hand()}
        for one in attempts:
            opened = self.opened.get(one.durable)
            if opened is None or one.key in mine:
                continue
            if is_exhausted(one, opened, self.lookout.first_of(one.durable), now_ms()):
                await self._bury(one, opened)

    async def _bury(self, attempt: Attempt, opened: Opened) -> None:
        item, is_gone = await self._fetch(attempt, opened)
        is_settled = is_gone and await self._was_settled(attempt)
        if is_settled or item.at_key != attempt.key:  # or the stream was made anew: that input is nowhere
            async with self.commits.turn:
                await self.commits.db(self.commits.store.forget_attempts, [attempt.key])
            return

        def give_up(group: GroupCommit) -> None:
            group.give_up(item, Outcome.DEAD, attempt.error or GIVEN_UP, is_gone=is_gone)

        settled = await self.commits.settle_without_running(item, opened.max_deliver, give_up)
        self.commits.at("buried")
        if not settled.block or await self.commits.publish(settled):
            self.client.connection.write(encode_acks([item.message.reply]))  # ends the server's count of redeliveries
            if opened.source.is_work_queue and not is_gone:
                await self._remove(attempt)

    async def _fetch(self, attempt: Attempt, opened: Opened) -> tuple[Item, bool]:
        """The input as the stream holds it, or an empty one when it is gone."""
        source = opened.source
        try:
            found, is_gone = await self.client.get(attempt.stream, attempt.sequence), False
        except NotFound:
            found, is_gone = StoredMessage(source.stream, source.filters[0], attempt.sequence, NEVER, {}, b""), True
        return self.reading.read([as_delivered(found, source, attempt.deliveries)])[0], is_gone

    async def _was_settled(self, attempt: Attempt) -> bool:
        """Whether the last blocks have an outcome for it. What is gone from a work queue has no identity to ask for;
        its mark may be younger than its outcome when the process that left it had stood still before."""
        async with self.commits.turn:
            found: bool = await self.commits.db(was_settled, self.commits.store, attempt)
        return found

    async def _remove(self, attempt: Attempt) -> None:
        """What TERM would do on a work queue: nobody is going to be given it again."""
        with contextlib.suppress(NotFound):
            await self.client.api(f"STREAM.MSG.DELETE.{attempt.stream}", {"seq": attempt.sequence, "no_erase": True})

    # ---- ticks

    async def tick(self, handler: Handler) -> None:
        """One command per time slot: all processes publish it, the id lets one through."""
        while True:
            slot = int(time.time() // handler.every_s) + 1
            await asyncio.sleep(max(0.0, slot * handler.every_s - time.time()))
            id_, body = tick_of(self.agent, handler, slot)
            while int(time.time() // handler.every_s) == slot:
                try:
                    await self.client.publish(handler.pattern, body, msg_id=id_)
                    break
                except Unavailable as problem:
                    log.warning("agent %s: tick %d of %s: %s", self.agent.full_name, slot, handler.name, problem)
                    await asyncio.sleep(EVERY_S)


def was_settled(store: Store, attempt: Attempt) -> bool:
    """Looks back over the blocks since shortly before the attempt began."""
    newest = store.head().number
    for number in range(newest, max(store.base().number, newest - LOOK_BACK_BLOCKS), -1):
        block = store.block(number)
        if block is None or block.content.sent_ms < attempt.started_ms - LOOK_BACK_MS:
            return False
        if any((one.stream, one.sequence) == (attempt.stream, attempt.sequence) for one in block.content.entries):
            return True
    return False


def is_exhausted(attempt: Attempt, opened: Opened, first: int, now_ms: int) -> bool:
    """Whether the server will not deliver it again (its deliveries are used up, or the stream has dropped it), and
    whoever had it last has had all the time there is."""
    is_over = attempt.deliveries >= opened.max_deliver or attempt.sequence < first
    return is_over and now_ms - attempt.started_ms > opened.ack_wait_s * 1000


def tick_of(agent: Agent, handler: Handler, slot: int) -> tuple[str, dict[str, object]]:
    """The id and the body of a tick: the same from every process."""
    name = handler.pattern.rpartition(".")[2]
    text = f"{agent.full_name}/{name}/{slot}"
    id_ = f"tick.{hashlib.sha256(text.encode()).hexdigest()[:40]}"
    payload = {"handler": name, "slot": slot}
    return id_, {"id": id_, "type": "tick", "ts": int(slot * handler.every_s * 1000), "payload": payload}
