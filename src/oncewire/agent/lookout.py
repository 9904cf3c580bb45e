"""What the server will not bring again by itself, and what it has lost.

For each source the ledger notes how far it is *seen*: every input in the agent's filter up to there is settled. Each
second the server is asked how it stands (two requests, nothing is read):

    nothing that was redelivered is open       seen moves up to what nobody has in hand
    something is, and nobody has it in hand    the server gave it up: its deliveries are used up, and each time the
                                               process died before it could leave a mark. It is taken in once more, as
                                               its last delivery: marked, alone, and dead if it fails
    the stream begins behind what was read     a loss: limits dropped messages that nobody had read
    the stream ends before what was seen       a loss: it went back. The agent stops

The count of open redeliveries is the server's own and survives it, so nothing is missed while the agent is down. (With
max_deliver 1 there is no count, and the ledger is asked about every input once more, which costs a second read.) A loss
is recorded (`jetstream.losses`), and the agent is not ready until a person has acknowledged it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from oncewire._ground.jetstream import Client, StoredMessage, losses
from oncewire._ground.jetstream.losses import Cause, Loss
from oncewire._ground.jetstream.protocol import Message, encode_acks, encode_headers, parse_time_ns
from oncewire._ground.ledger.keys import Place
from oncewire._ground.ledger.rules import Durable, Source
from oncewire._ground.ledger.store import Attempt
from oncewire.agent import sources
from oncewire.agent.batch import Item, attempt_of
from oncewire.agent.commits import Commits
from oncewire.agent.outflow import now_ms
from oncewire.agent.read import Reading
from oncewire.agent.sources import Opened, Seen

NOTE_EVERY_S = 30.0
"""So often at most a busy agent writes down how far it has seen."""
SCAN_MAX = 500
SCAN_LOOK_MAX = 5_000
"""So many inputs at most are compared with the ledger in one look."""


class Facts(NamedTuple):
    """A stream and a durable on it, as the server tells; the stream was asked first."""

    first: int
    last: int
    last_ns: int
    is_kept: bool
    """Whether only age and size remove messages: on a work queue acks do, with limits per subject newer ones."""
    delivered: int
    floor: int
    unread: int
    in_hand: int
    redelivered: int


def facts_of(stream: dict[str, Any], consumer: dict[str, Any]) -> Facts:
    state, config = stream["state"], stream["config"]
    return Facts(
        state["first_seq"],
        state["last_seq"],
        parse_time_ns(state["last_ts"]) if state["last_seq"] else 0,
        config["retention"] == "limits" and config.get("max_msgs_per_subject", -1) <= 0,
        consumer["delivered"]["stream_seq"],
        consumer["ack_floor"]["stream_seq"],
        consumer["num_pending"],
        consumer["num_ack_pending"],
        consumer["num_redelivered"],
    )


def seen_by(facts: Facts) -> tuple[int, int]:
    """How far every input is settled, and the time of the message there if it is known. Acks follow settling."""
    if facts.in_hand:
        return facts.floor, 0
    return (facts.delivered, 0) if facts.unread else (facts.last, facts.last_ns)


def trimmed(facts: Facts, read: int) -> tuple[int, int] | None:
    """The range that was dropped and never read. What the server says it delivered is no help: it skips such ranges."""
    return (read + 1, facts.first - 1) if facts.is_kept and facts.first > read + 1 else None


def as_delivered(found: StoredMessage, source: Source, deliveries: int) -> Message:
    """A stored message as a delivery would bring it; its acknowledgement ends the server's count of redeliveries."""
    reply = f"$JS.ACK.{source.stream}.{source.consumer}.{deliveries}.{found.sequence}.0.{found.timestamp_ns}.0"
    header = encode_headers(found.headers) if found.headers else b""
    return Message(0, found.subject.encode("utf-8", "surrogateescape"), reply.encode(), header, found.payload)


def may_take(attempt: Attempt | None, max_deliver: int, *, is_certain: bool) -> bool:
    """Whether an open input that the server gave up is nobody's. At its last delivery it is somebody's, who runs it or
    died of it; with a mark of an earlier one it may wait for its retry, unless the server is certain."""
    return attempt is None or (is_certain and attempt.deliveries < max_deliver)


class Feed(Protocol):
    """The intake of one durable."""

    reached: int
    """The highest sequence that came."""

    def take_in(self, messages: list[Message]) -> None: ...


class _Watch:
    """One source."""

    def __init__(self, opened: Opened, seen: Seen) -> None:
        self.opened = opened
        self.first = opened.first
        self.seen = seen
        self.noted = seen
        self.stale = 0
        """Redeliveries that the server counts as open although all it delivered is settled."""
        self.stuck_at = 0.0
        self.stuck_delivered = 0
        self.scan: _Scan | None = None
        self.taken: dict[bytes, Item] = {}
        self.losses: list[Loss] = []

    def may_have_abandoned(self, facts: Facts) -> bool:
        """By the server's count. It counts nothing where nothing is redelivered: then all that came is looked at."""
        if self.opened.max_deliver == 1:
            return facts.delivered > self.seen.sequence
        return facts.redelivered > self.stale


class _Scan:
    """A search for inputs without an outcome, from `at` to `end`, in parts."""

    def __init__(self, at: int, end: int, is_certain: bool, redelivered: int) -> None:
        self.at = at
        self.end = end
        self.is_certain = is_certain
        self.redelivered = redelivered
        self.is_all_settled = True


class Lookout:
    """Looks at all sources of an agent. `feeds` are its intakes, once there are any."""

    def __init__(
        self,
        client: Client,
        commits: Commits,
        reading: Reading,
        feeds: Mapping[Durable, Feed],
        handler_timeout_s: float,
    ) -> None:
        self._client = client
        self._commits = commits
        self._reading = reading
        self._feeds = feeds
        self._handler_timeout_s = handler_timeout_s
        self._watches: dict[Durable, _Watch] = {}
        self._noted_at = time.monotonic()

    @property
    def trouble(self) -> str:
        """Why the agent is not ready, '' when it is: losses that nobody has acknowledged."""
        open_ = [loss for watch in self._watches.values() for loss in watch.losses if not loss.is_acknowledged]
        return f"{open_[0].sentence}: `oncewire agent apply --accept-loss {open_[0].stream}`" if open_ else ""

    def taken(self) -> list[Item]:
        """Inputs that were taken in here and are not known to be settled."""
        return [item for watch in self._watches.values() for item in watch.taken.values()]

    def first_of(self, durable: Durable) -> int:
        """Where the stream of this durable begins now."""
        return self._watches[durable].first

    def seen(self, durable: Durable) -> int:
        """Up to here every input of the durable is settled."""
        return self._watches[durable].seen.sequence

    async def start(self, opened: Iterable[Opened], seen: dict[Durable, Seen]) -> None:
        """Before anything is pulled: an agent that reads a stream for the first time begins where the stream does."""
        self._watches = {one.source.durable: _Watch(one, seen[one.source.durable]) for one in opened}
        for watch in self._watches.values():
            self._tell(watch)
            source = watch.opened.source
            known = await losses.losses(self._client, source.stream)
            watch.losses = [one for one in known if one.reader == source.consumer]
            await self._find_losses(watch, await self._ask(watch))
        await self.note()

    async def look(self) -> None:
        for watch in self._watches.values():
            await self._look_at(watch, await self._ask(watch))
        if time.monotonic() - self._noted_at > NOTE_EVERY_S:
            await self.note()

    async def _ask(self, watch: _Watch) -> Facts:
        source = watch.opened.source
        stream = await self._client.api(f"STREAM.INFO.{source.stream}")
        return facts_of(stream, await self._client.api(f"CONSUMER.INFO.{source.stream}.{source.consumer}"))

    async def _look_at(self, watch: _Watch, facts: Facts) -> None:
        if facts.last < watch.seen.sequence:
            await sources.check_not_back(self._client, watch.opened.source, watch.seen, self._commits.ledger.id)
        watch.first = facts.first
        await self._drop_settled(watch)
        await self._find_losses(watch, facts)
        watch.stale = min(watch.stale, facts.redelivered)
        if watch.scan is not None or watch.may_have_abandoned(facts):
            await self._find_abandoned(watch, facts)
        else:
            watch.stuck_at = 0.0
            self._move(watch, *seen_by(facts))

    def _move(self, watch: _Watch, sequence: int, timestamp_ns: int) -> None:
        if sequence > watch.seen.sequence:
            watch.seen = Seen(watch.seen.created, sequence, timestamp_ns)
            self._tell(watch)

    def _tell(self, watch: _Watch) -> None:
        """The blocks from now on announce it. Acks come after the announcement, so an auditor who has read a block has
        those before it that settle what it calls settled."""
        source = watch.opened.source
        self._commits.sources[source.durable] = msgspec.structs.replace(source, settled=watch.seen.sequence)

    async def note(self) -> None:
        """Write down how far it is seen."""
        self._noted_at = time.monotonic()
        store = self._commits.store
        for watch in self._watches.values():
            seen, name = watch.seen, sources.note_name(watch.opened.source)
            async with self._commits.turn:
                if seen != watch.noted or await self._commits.db(store.noted, name) is None:
                    await self._commits.db(store.note, name, msgspec.json.encode(seen).decode())
            watch.noted = seen

    # ---- losses

    async def _find_losses(self, watch: _Watch, facts: Facts) -> None:
        source = watch.opened.source
        gone = trimmed(facts, watch.seen.sequence) and trimmed(facts, await self._read_up_to(watch))
        if gone is not None:
            loss = Loss(
                source.stream, source.created, source.consumer, Cause.TRIMMED, *gone, now_ms(), self._commits.ledger.id
            )
            known = await losses.record(self._client, loss)
            self._move(watch, known.last, 0)
            watch.losses.append(known)
        if any(not loss.is_acknowledged for loss in watch.losses):
            known_now = await losses.losses(self._client, source.stream)
            watch.losses = [one for one in known_now if one.reader == source.consumer]

    async def _read_up_to(self, watch: _Watch) -> int:
        """The highest sequence that came to this process, or that any process has settled."""
        source, store = watch.opened.source, self._commits.store

        def settled() -> int:
            known = sources.last_settled(store, store.head().number, [watch.opened])
            return known[source.durable].sequence if known else 0

        async with self._commits.turn:
            last: int = await self._commits.db(settled)
        feed = self._feeds.get(source.durable)
        return max(watch.seen.sequence, last, feed.reached if feed else 0)

    # ---- inputs that the server gave up

    async def _find_abandoned(self, watch: _Watch, facts: Facts) -> None:
        """Those without an outcome between what is seen and what was delivered. While others are in hand, nobody can
        tell them apart before all had the time that a handler may take."""
        if watch.scan is None:
            now, is_certain = time.monotonic(), not facts.in_hand
            if not watch.stuck_at:
                watch.stuck_at, watch.stuck_delivered = now, facts.delivered
            patience_s = self._handler_timeout_s + 2 * watch.opened.ack_wait_s
            if not is_certain and now - watch.stuck_at < patience_s:
                return
            watch.stuck_at = 0.0
            end = facts.delivered if is_certain else watch.stuck_delivered
            watch.scan = _Scan(watch.seen.sequence, end, is_certain, facts.redelivered)
        await self._go_on(watch, watch.scan)

    async def _go_on(self, watch: _Watch, scan: _Scan) -> None:
        """A part of a scan: the rest of upkeep must not wait for a long one."""
        left = SCAN_LOOK_MAX
        while scan.at < scan.end and left > 0:
            found, up_to = await self._read(watch, scan)
            left -= max(1, len(found))
            is_settled = not found or await self._take(watch, found, is_certain=scan.is_certain)
            if is_settled and scan.is_certain:
                self._end_counts(watch.opened, [one.sequence for one in found])
            if is_settled and scan.at <= watch.seen.sequence:
                self._move(watch, up_to, 0)
            scan.is_all_settled &= is_settled
            scan.at = up_to
        if scan.at >= scan.end:
            watch.scan = None
            if scan.is_all_settled and scan.is_certain:
                watch.stale = scan.redelivered

    async def _read(self, watch: _Watch, scan: _Scan) -> tuple[list[StoredMessage], int]:
        """The next inputs, and the sequence up to which those are all."""
        found: list[StoredMessage] = []
        up_to = scan.end
        for subject in watch.opened.source.filters:
            part = await self._client.get_batch(
                watch.opened.source.stream, sequence=scan.at + 1, subject=subject, count=SCAN_MAX
            )
            found += part
            if part:  # the server may cut an answer short
                up_to = min(up_to, part[-1].sequence)
        return sorted((one for one in found if one.sequence <= up_to), key=lambda one: one.sequence), up_to

    async def _take(self, watch: _Watch, found: list[StoredMessage], *, is_certain: bool) -> bool:
        """Take in what is open and nobody's; whether nothing is open."""
        opened, commits = watch.opened, self._commits
        items = self._reading.read([as_delivered(one, opened.source, opened.max_deliver) for one in found])
        async with commits.turn:
            open_, free = await commits.db(self._sort, items, opened.max_deliver, is_certain)
        for item in free:
            if item.at_key not in watch.taken and not commits.stopping.is_set():
                watch.taken[item.at_key] = item
                self._feeds[opened.source.durable].take_in([item.message])
        return not open_

    def _sort(self, items: list[Item], max_deliver: int, is_certain: bool) -> tuple[list[Item], list[Item]]:
        """In the ledger's thread: those without an outcome, and those of them that are marked as this process's now."""
        store = self._commits.store
        store.begin()
        try:
            found = store.claim([], look=[key for item in items for key in (item.at_key, item.key) if key])
            open_ = [item for item in items if not self._is_settled(item, found)]
            attempts = {one.key: one for one in store.attempts()} if open_ else {}
            free = [one for one in open_ if may_take(attempts.get(one.at_key), max_deliver, is_certain=is_certain)]
            if free:
                store.begun([attempt_of(item, now_ms(), "") for item in free])
            store.commit()
        except BaseException:
            store.rollback()
            raise
        return open_, free

    def _is_settled(self, item: Item, found: dict[bytes, Place]) -> bool:
        """This position, not only its identity: a copy of something done has an outcome of its own."""
        if item.at_key in found:
            return True
        place = found.get(item.key)
        block = self._commits.store.block(place.block) if place else None
        if place is None or block is None:
            return False
        entry = block.content.entries[place.at]
        return (entry.stream, entry.sequence) == (item.delivery.stream, item.delivery.sequence)

    async def _drop_settled(self, watch: _Watch) -> None:
        if watch.taken:
            items, max_deliver = list(watch.taken.values()), watch.opened.max_deliver
            async with self._commits.turn:
                open_, _ = await self._commits.db(self._sort, items, max_deliver, False)
            watch.taken = {item.at_key: item for item in open_}

    def _end_counts(self, opened: Opened, sequences: list[int]) -> None:
        """All are settled: an acknowledgement that was lost on the way must not be waited for."""
        source = opened.source
        head = f"$JS.ACK.{source.stream}.{source.consumer}.{opened.max_deliver}."
        self._client.connection.write(encode_acks([f"{head}{one}.0.0.0".encode() for one in sequences]))
