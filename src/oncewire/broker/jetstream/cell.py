"""One partition at its owner: its state, its desk, and the way of its records to the server and back.

    OPENING ──► OPEN ──► DOUBTING ──► OPEN …        a commit whose outcome nobody knows: the streams are read again
       │          │          │
       ▼          ▼          ▼
      GONE ◄──────┴──────────┘    taken by another node, deleted, or the session ended; through LEAVING when in order

Two ways lead to the server, and neither waits for the other: messages go to the topic's stream (intake.py), all else
that the desk cuts as one packed record to the stream of records. Each counts when it is confirmed. Messages carry the
fence, so that none of them can land behind a successor's back; a packed record expects the record before it, so that a
stale owner settles nothing. A message's offset is the sequence that the server gave it. When a commit fails on either
way nothing new begins; once all that was sent is answered or given up, the streams are read again.

Nothing is delivered unless the node's session holds on its monotonic clock at that moment.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from oncewire._ground.contracts import topics
from oncewire._ground.contracts.broker import BrokerEnvelope, ProduceBody, Routing
from oncewire._ground.contracts.records import SAME_BATCH, Acked, Buried, Record, Stored, Trimmed, encode_document
from oncewire._ground.errors import NotFound, OncewireError, Overloaded, TooLarge, Unavailable
from oncewire.broker import rules
from oncewire.broker.credit import Credit
from oncewire.broker.desk import Desk
from oncewire.broker.engine import Consume, Limits, Produced, Settle, Sink
from oncewire.broker.image import settle_in
from oncewire.broker.jetstream import packed
from oncewire.broker.jetstream.catalog import Listed
from oncewire.broker.jetstream.intake import Intake
from oncewire.broker.jetstream.sending import (
    Frame,
    Outlet,
    Sending,
    Way,
    expect,
    fence,
    for_clients,
    header_of,
    unknown,
)
from oncewire.broker.rules import Step
from oncewire.broker.state import State, Subscriber, Topic
from oncewire.broker.upkeep import tick

SNAPSHOT_RECORDS: Final = 20_000
"""Records after which a snapshot is due, besides as many as the last snapshot held."""
HEADER_RESERVE: Final = 8 << 10
"""Kept free below the server's largest message, for headers and for a dead letter's own fields."""
_log = logging.getLogger(__name__)

Page = list[tuple[int, int, int, bytes]]


class Phase(Enum):
    OPENING = "opening"
    OPEN = "open"
    DOUBTING = "doubting"
    LEAVING = "leaving"
    """What is on its way is finished, nothing new begins."""
    GONE = "gone"


class Home(Protocol):
    """What a cell needs from its node."""

    limits: Limits
    outlet: Outlet
    on_step: Callable[[str], None]

    @property
    def node(self) -> str: ...
    @property
    def is_held(self) -> bool:
        """Whether the session holds at this moment."""

    def clock(self) -> int: ...
    def wake(self, cell: Cell) -> None:
        """Look at the cell once the requests that came together are all in."""

    def bury(self, cell: Cell, record: Buried, done: Callable[[OncewireError | None], None]) -> None:
        """Store a dead letter where it belongs, once."""

    def commit(self, cell: Cell, record: Acked, done: Callable[[OncewireError | None], None]) -> None:
        """Mark what a worker began as done, at the partition that keeps its key."""

    def gone_of(self, number: int) -> dict[int, int]:
        """Of a topic's partitions the last offset that is known to be gone."""

    def find(
        self, cell: Cell, bodies: list[bytes], last: int, done: Callable[[list[int] | OncewireError], None]
    ) -> None:
        """The sequences of messages that were stored one behind the other, up to the last one's."""

    def doubt(self, cell: Cell) -> None:
        """Read again what is stored."""

    def purge(self, cell: Cell, sequence: int) -> None:
        """Let the topic's stream forget the partition's messages below a sequence."""

    def snapshot(self, cell: Cell) -> None: ...


class CellDesk(Desk):
    """A desk that does first what a settlement needs elsewhere: a dead letter in its own topic, a worker's key that
    another partition keeps."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell.state, None)  # they are encoded all at once, when they go
        self._cell = cell

    def submit(self, step: Step, done: Callable[[Any], None]) -> None:
        records = step.records
        if len(records) == 1 and type(acked := records[0]) is Acked and not acked.identity:  # nearly all are that
            self._filling.records.append(acked)
            self._filling.waiters.append((done, step.answer))
            return
        for record in records:
            if self._is_shipped(record):
                break
        else:
            super().submit(step, done)
            return

        def shipped(records: list[Record], error: OncewireError | None) -> None:
            if error is not None:
                done(error)
            else:
                Desk.submit(self, Step(step.answer, tuple(records), step.waits), done)
                self._cell.home.wake(self._cell)

        self._ship(step.records, shipped)

    def propose(self, records: Iterable[Record]) -> None:
        for record in records:
            if type(record) is Buried and record.letter:
                self._ship((record,), self._shipped)
            else:
                self.fill(record)

    def _shipped(self, records: list[Record], error: OncewireError | None) -> None:
        if error is None:
            super().propose(records)
            self._cell.home.wake(self._cell)

    def _is_shipped(self, record: Record) -> bool:
        if type(record) is Acked:
            return record.identity != b"" and not self._cell.held.is_home_of(record.identity)
        return type(record) is Buried

    def _ship(self, records: Sequence[Record], done: Callable[[list[Record], OncewireError | None], None]) -> None:
        shipped = [record for record in records if self._is_shipped(record)]
        left = len(shipped)
        failure: OncewireError | None = None

        def one(error: OncewireError | None) -> None:
            nonlocal left, failure
            left -= 1
            failure = failure or error
            if left:
                return
            if failure is None and self._cell.phase is Phase.GONE:
                failure = self._cell.gone_error()
            if failure is not None:
                for record in shipped:
                    self._cell.keep_flying(record)
            done([_without_letter(record) for record in records], failure)

        for record in shipped:
            if type(record) is Buried:
                self._cell.home.bury(self._cell, record, one)
            elif type(record) is Acked:
                self._cell.home.commit(self._cell, record, one)


def _without_letter(record: Record) -> Record:
    if type(record) is not Buried:
        return record
    return msgspec.structs.replace(record, letter=None)


class Cell:
    """See the module's head. takeover.py opens it and reads what is stored."""

    def __init__(self, home: Home, topic: Listed, partition: int) -> None:
        self.home = home
        self.node = home.node
        """Whose it is: the session in which it was taken."""
        self.topic = topic
        self.partition = partition
        self.subject = f"{topic.prefix}.{partition}"
        self.fence_subject = f"{self.subject}.fence"
        self.records_subject = topics.records_of(topic.number, partition)
        self.subject_raw = self.subject.encode()
        self._records_subject = self.records_subject.encode()
        self.tail = home.outlet.tail_of(topic.number)
        self.phase = Phase.OPENING
        self.loss = ""
        """Why it is gone."""
        self.lease_revision = 0
        self.record_sequence = 0
        """Of the last packed record."""
        self.message_sequence = 0
        """All messages up to here are known."""
        self.loaded_from = 0
        """Kept messages below this sequence are settled by all groups and were not read."""
        self.snapshot_sequence = 0
        self.snapshot_size = 0
        self.marks: list[tuple[int, int]] = []
        self.records_since = 0
        self.is_snapshotting = False
        self.trims: deque[tuple[int, int]] = deque()
        """When a trimmed message was stored, and its offset: it is purged once its key may be used again."""
        self.on_gone: list[Callable[[], None]] = []
        self.message_head = self.plain_header = b""
        self._error: OncewireError | None = None
        """Of the first commit that failed, until all others have ended too."""
        self.is_due = False
        """Whether it is looked at soon anyway."""
        self._groups: dict[int, str] | None = None
        self._head = b""
        """What records of these groups begin with."""
        self._is_recording = False
        self._is_unsure = False
        """Whether a packed record whose commit failed may be stored."""
        self.numbers = {topic.name: topic.number}
        """Of the topics that producers named."""
        self.begin_anew()
        self.set_fence(0)

    def begin_anew(self) -> None:
        """An empty state, to be filled from what is stored."""
        topic = self.topic
        self.state = State(self.home.limits, encode_document, is_whole=False)
        self.held = Topic(topic.number, topic.tenant, topic.name, topic.count, topic.at_ms, (self.partition,))
        self.held.gone = self.home.gone_of(topic.number)
        self.messages.behind = []  # none is read yet: a settlement says nothing of those before it
        self.state.add_topic(self.held)
        self.desk: Desk = CellDesk(self)
        self.intake = Intake(self)

    @property
    def key(self) -> tuple[int, int]:
        return self.topic.number, self.partition

    @property
    def messages(self) -> Any:
        return self.held.partitions[self.partition]

    def set_fence(self, sequence: int) -> None:
        self.fence = sequence
        self.tail.reach(sequence)
        self.message_head = fence(sequence, self.fence_subject)
        self.plain_header = header_of(self.message_head)

    # ---- requests

    def refused(self) -> OncewireError | None:
        return self.gone_error() if self.phase is not Phase.OPEN else None

    def gone_error(self) -> OncewireError:
        where = f"partition {self.partition} of topic {self.topic.name!r}"
        if self.loss == rules.NO_TOPIC:
            return NotFound(f"{rules.NO_TOPIC} (create it first)")
        return Unavailable(f"{where} is {self.loss or 'catching up'}: try again", retry_after_s=0.1)

    def submit(self, step: Step, done: Callable[[Any], None]) -> None:
        self.desk.submit(step, done)
        if not self.is_due and self.desk.can_cut:
            self._wake()

    def _wake(self) -> None:
        self.is_due = True
        self.home.wake(self)

    def produce(
        self,
        body: ProduceBody,
        requested: int,
        envelope: BrokerEnvelope | None,
        routing: Routing | None,
        done: Callable[[Produced | OncewireError], None],
    ) -> None:
        """`requested` is the number of the topic that the producer named, 0 when there is none."""
        if self.intake.bytes >= self.home.limits.commit_bytes_max:
            done(Overloaded("too much waits to be written", retry_after_s=self.home.limits.retry_after_ms / 1000))
            return
        here = (self.held, self.partition, envelope)
        stored = rules.accept(self.state, self.home.clock(), self.topic.tenant, body, here, routing)
        if not isinstance(stored, Stored):
            done(stored)
            return
        if len(stored.body) + HEADER_RESERVE > self.home.outlet.connection.server.max_payload:
            rules.take_back(self.state, stored)
            done(TooLarge(f"the message has {len(stored.body)} bytes as stored, more than the NATS server takes"))
            return
        if stored.identity:
            self.numbers[body.topic] = requested
        self.intake.add(stored, done, body.topic)
        if not self.is_due:
            self._wake()

    def store_letter(self, identity: bytes, size: int, body: bytes, done: Callable[[Any], None]) -> None:
        """A dead letter of another topic: no limit holds it up."""
        self.held.is_graveyard = True
        stored = Stored(self.topic.number, self.partition, 0, self.home.clock(), size, body, identity)
        messages = self.messages
        messages.reserved += 1
        messages.reserved_bytes += size
        self.intake.add(stored, partial(_answer_letter, done), self.topic.name)
        if not self.is_due:
            self._wake()

    def settle(self, request: Settle, done: Callable[[Any], None]) -> None:
        self.desk.submit(rules.settle(self.state, self.home.clock(), self.topic.tenant, request), done)
        if not self.is_due and self.desk.can_cut:
            self._wake()

    def enter(self, consume: Consume, done: Callable[[OncewireError | None], None]) -> None:
        self.submit(rules.enter(self.state, self.home.clock(), self.topic.tenant, consume), done)

    def join(self, consume: Consume, sink: Sink, credit: Credit) -> Subscriber | OncewireError:
        return rules.join(self.state, self.home.clock(), self.topic.tenant, consume, sink, credit)

    def keep_flying(self, record: Record) -> None:
        """What it needs elsewhere could not be done: the message stays unsettled and is looked at again."""
        assert type(record) is Buried or type(record) is Acked
        group = self.state.groups.get(record.group)
        flight = group.progress[record.partition].flights.get(record.offset) if group else None
        if flight is not None and flight.is_settling:
            flight.is_settling = False
            self.state.later(flight)

    # ---- through

    def look(self) -> None:
        """Send what waits, deliver what can be delivered."""
        self.go()
        self.hand_out()
        self.is_due = False
        self.go()

    def hand_out(self) -> None:
        if self.phase is Phase.OPEN and self.home.is_held:
            self.desk.hand_out(self.home.clock())

    def tick(self, now_ms: int) -> None:
        if self.phase is Phase.OPEN:
            self.desk.propose(tick(self.state, now_ms))
            self._purge(now_ms)
            self.look()

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is on its way."""
        return self.desk.is_idle and self.intake.is_idle

    @property
    def is_quiet(self) -> bool:
        """The server has nothing of it to do, and no message waits."""
        return not self._is_recording and self.intake.is_idle

    @property
    def may_send(self) -> bool:
        return self.phase is Phase.OPEN or self.phase is Phase.LEAVING

    def go(self) -> None:
        """Send what waits, as far as it may go."""
        if self.intake.has_waiting and self.may_send:
            self.intake.go()
        if self.desk.can_cut and self.may_send:
            self._record()

    def _record(self) -> None:
        self.desk.cut()
        records = self.desk.going
        if (groups := packed.groups_of(self.state, records)) != self._groups:
            self._groups, self._head = groups, packed.head_of(self.node, groups, self.topic)
        frames: list[Frame] = []
        for run in packed.runs_of(records):
            after = SAME_BATCH if frames else self.record_sequence
            head = b"" if frames else header_of(expect(after))
            frames.append((head, packed.pack(self._head, after, run)))
        self._is_recording = True
        way = Way.BATCH if len(frames) > 1 else Way.SINGLES
        failed = self.home.outlet.send(self._records_subject, frames, self._recorded, way)
        if isinstance(failed, OncewireError):
            self._record_failed(failed, is_unsure=False)

    def _recorded(self, sending: Sending) -> None:
        if self.phase is Phase.GONE:
            return
        if sending.error is not None:
            self._record_failed(sending.error, is_unsure=not sending.is_nothing_stored)
            return
        desk, self._is_recording, self.is_due = self.desk, False, True
        self.record_sequence = sending.sequences[-1]
        self.home.on_step("recorded")
        trimmed = [(record, self._stored_at(record)) for record in desk.going if type(record) is Trimmed]
        count = len(desk.going)
        self.records_since += count
        desk.applied()
        self.trims.extend((at_ms, record.offset) for record, at_ms in trimmed)
        if self.records_since > SNAPSHOT_RECORDS + self.snapshot_size and not self.is_snapshotting:
            self.home.snapshot(self)
        self.go()
        takes_halves = self.is_quiet and self.home.outlet.takes_halves(count)
        desk.answered(self.go if takes_halves else None)
        self.look()
        self.settle_down()

    def _record_failed(self, error: OncewireError, *, is_unsure: bool) -> None:
        self._is_recording, self._is_unsure = False, is_unsure
        self.fail(error)
        self.settle_down()

    def _stored_at(self, record: Trimmed) -> int:
        index = self.messages.find(record.offset)
        return self.messages.times[index] if index >= 0 else self.home.clock()

    def fail(self, error: OncewireError) -> None:
        """A commit failed: nothing new begins, and nothing counts before the streams were read again."""
        if self.phase is not Phase.GONE:
            self.phase = Phase.DOUBTING
            self._error = self._error or for_clients(error)

    def settle_down(self) -> None:
        """Once nothing is on its way any more, tell those who waited, and read."""
        error = self._error
        if error is None or self.phase is not Phase.DOUBTING or self._is_recording or not self.intake.is_still:
            return
        self._error = None
        self.state.counters["commits_failed"] += self.desk.is_idle
        self._tell_all(error)
        self.home.doubt(self)

    def _tell_all(self, error: OncewireError) -> None:
        """All that waits and all that is on its way has failed."""
        is_unsure, self._is_unsure = self._is_unsure or self._is_recording, False
        self._is_recording = False
        self.state.forget_tentative()
        self.intake.fail(error)
        if not self.desk.is_idle:
            if self.desk.can_cut:
                self.desk.cut()
            self.desk.failed(unknown(error) if is_unsure else error)

    # ---- life

    def opened(self) -> None:
        """What is stored is known: requests may come, unless it is too late."""
        if self.phase is Phase.GONE:
            return
        settle_in(self.state)
        for name in self.state.counters:
            self.state.counters[name] = 0
        self.phase = Phase.OPEN

    def load(self, page: Page, *, is_last: bool) -> None:
        """Older messages, in order."""
        self.messages.load(page, is_last=is_last)
        for group in self.state.groups.values():
            group.progress[self.partition].absorb()
            self.state.stir(group, self.partition)
        self.state.hold_again(self.held)
        if not self.state.groups:
            self.state.look_to_trim(self.held, self.messages)

    def leave(self, why: str) -> None:
        """Not ours any more. Those who wait are told; readers look for the new owner."""
        if self.phase is Phase.GONE:
            return
        was_open, self.phase, self.loss = self.phase is not Phase.OPENING, Phase.GONE, why
        if was_open:
            self._tell_all(self.gone_error())
        for told in self.on_gone:
            told()
        self.on_gone.clear()

    def _purge(self, now_ms: int) -> None:
        """Nothing younger than the TTL of keys goes: the server would forget them."""
        oldest_ms, last = now_ms - self.home.limits.idempotency_ttl_ms, -1
        while self.trims and self.trims[0][0] <= oldest_ms:
            last = self.trims.popleft()[1]
        if last >= 0:
            self.home.purge(self, last + 2)


def _answer_letter(done: Callable[[Any], None], answer: Produced | OncewireError) -> None:
    done(answer if isinstance(answer, OncewireError) else None)
