"""Messages on their way into their topic's stream, at the owner of their partition.

    add → (wait) → sent as a group → confirmed: they count, in the order of the stream → answered

Two groups may be on their way, so that the server stores one while the other is made; only one in a cluster, and where
it goes as a batch. Clients that wait for each other's groups would ask in step, and one group would hold them all: they
are told in halves. A batch costs the same whatever it holds, so there they should be in step: they are told before the
next one goes, which then takes along what they ask next.

Groups count in the order in which they were sent. When one fails, those behind it do not count either, whatever became
of them: an earlier message may stand in the stream, and what is stored is read there (takeover.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from oncewire._ground.contracts.records import Stored
from oncewire._ground.errors import OncewireError, OutcomeUnknown, Unavailable
from oncewire._ground.jetstream import codes
from oncewire._ground.jetstream.publish import BATCH_MESSAGES_MAX
from oncewire.broker import rules
from oncewire.broker.engine import Produced
from oncewire.broker.jetstream import names
from oncewire.broker.jetstream.sending import Sending, Way, for_clients, header_of, unknown

if TYPE_CHECKING:
    from oncewire.broker.jetstream.cell import Cell

GROUPS_MAX: Final = 2

Done = Callable[[Produced | OncewireError], None]


class _Group:
    """Messages that were sent together, and who waits for them under which topic's name."""

    __slots__ = ("error", "is_over", "records", "sending", "told", "way")

    def __init__(self, records: list[Stored], told: list[tuple[Done, str]], way: Way) -> None:
        self.records = records
        self.told = told
        self.way = way
        self.sending: Sending | None = None
        self.error: OncewireError | None = None
        self.is_over = False

    def fail(self, error: OncewireError) -> None:
        """Tell that it is not stored, or that nobody knows."""
        if not self.is_over or (self.sending is not None and not self.sending.is_nothing_stored):
            error = unknown(error)
        for done, _ in self.told:
            done(error)


class Intake:
    """See the module's head."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._waiting: list[Stored] = []
        self._told: list[tuple[Done, str]] = []
        self.bytes = 0
        """Of those that were not sent yet."""
        self._going: deque[_Group] = deque()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._going and not self._waiting

    @property
    def is_still(self) -> bool:
        """Of all that was sent it is known what became of it, or that nobody knows."""
        return all(group.is_over for group in self._going)

    def add(self, record: Stored, done: Done, topic: str) -> None:
        """`topic` is the one that the producer named."""
        self._waiting.append(record)
        self._told.append((done, topic))
        self.bytes += record.size

    # ---- there

    def go(self) -> None:
        """Send what waits."""
        cell, outlet, going = self._cell, self._cell.home.outlet, self._going
        while self._waiting and cell.may_send:
            if going and (going[-1].way is Way.BATCH or len(going) == GROUPS_MAX or outlet.is_clustered):
                return
            records = self._waiting[:BATCH_MESSAGES_MAX]
            is_batch = outlet.wants_batch(len(records))
            if is_batch and going:
                return
            way = Way.BATCH if is_batch else self._one_by_one(records)
            group = _Group(records, self._told[:BATCH_MESSAGES_MAX], way)
            del self._waiting[:BATCH_MESSAGES_MAX], self._told[:BATCH_MESSAGES_MAX]
            self.bytes = sum(one.size for one in self._waiting) if self._waiting else 0
            going.append(group)
            self._send(group)

    def _one_by_one(self, records: list[Stored]) -> Way:
        """One answer for all does not say which of them stood there already under their ids."""
        if any(one.identity for one in records):
            return Way.SINGLES
        takes_ingest = self._cell.home.outlet.takes_ingest(len(records), self._cell.tail)
        return Way.INGEST if takes_ingest else Way.SINGLES

    def _send(self, group: _Group) -> None:
        cell, plain = self._cell, self._cell.plain_header
        frames = [(self._header_of(one) if one.identity else plain, one.body) for one in group.records]
        sent = partial(self._sent, group)
        failed = cell.home.outlet.send(
            cell.subject_raw, frames, sent, group.way, guard=cell.message_head, tail=cell.tail
        )
        if isinstance(failed, OncewireError):
            group.error, group.is_over = failed, True
            self._ended()

    def _header_of(self, record: Stored) -> bytes:
        if record.requested:
            number = self._cell.numbers[record.requested]
            name = names.message_id(number, record.requested, record.identity)
        else:
            name = names.letter_id(record.identity)
        return header_of(self._cell.message_head + f"Nats-Msg-Id: {name}\r\n".encode())

    # ---- and back

    def _sent(self, group: _Group, sending: Sending) -> None:
        error = sending.error
        if error is not None and error.server_code == codes.BATCH_DUPLICATE and group in self._going:
            group.way = Way.SINGLES  # nothing of it is stored: one by one it turns out which stands there already
            self._send(group)
            return
        group.sending, group.error = sending, error
        if error is None and sending.is_vague:
            bodies = [one.body for one in group.records]
            self._cell.home.find(self._cell, bodies, sending.sequences[-1], partial(self._found, group))
            return
        group.is_over = True
        self._ended()

    def _found(self, group: _Group, found: list[int] | OncewireError) -> None:
        """Where the group stands, when others wrote between."""
        if group not in self._going:
            return  # given up meanwhile
        assert group.sending is not None
        if isinstance(found, OncewireError):
            group.error = found
        else:
            group.sending.sequences = found
        group.is_over = True
        self._ended()

    def _ended(self) -> None:
        going = self._going
        while going and going[0].is_over and going[0].error is None:
            self._count_in(going.popleft())
        if going and going[0].is_over and going[0].error is not None:
            self._cell.fail(going[0].error)
        self._cell.settle_down()

    def _count_in(self, group: _Group) -> None:
        cell, sending, records = self._cell, group.sending, group.records
        assert sending is not None
        cell.home.on_step("stored")
        cell.is_due = True
        for record, sequence in zip(records, sending.sequences, strict=True):
            record.offset = sequence - 1
        cell.message_sequence = max(cell.message_sequence, max(sending.sequences))
        if sending.duplicates:
            for at in sending.duplicates:
                records[at].offset = -1
                rules.take_back(cell.state, records[at])
            cell.state.store_all(cell.held, [one for one in records if one.offset >= 0])
        else:
            cell.state.store_all(cell.held, records)
        if group.way is not Way.BATCH:
            cell.go()
        half = len(records) // 2 if cell.is_quiet and cell.home.outlet.takes_halves(len(records)) else 0
        _tell(group.told[:half], records[:half])
        if half:
            cell.go()
        _tell(group.told[half:], records[half:])
        cell.look()

    # ---- when it goes wrong

    def fail(self, error: OncewireError) -> None:
        """Nothing more comes: of what was sent nothing counts, and the rest was never sent."""
        going, self._going = self._going, deque()
        told, self._told = self._told, []
        self._waiting, self.bytes = [], 0
        for group in going:
            group.fail(for_clients(group.error) if group.error is not None else error)
        unsent = error if not isinstance(error, OutcomeUnknown) else _not_sent(error)
        for done, _ in told:
            done(unsent)


def _tell(told: list[tuple[Done, str]], records: list[Stored]) -> None:
    for (done, topic), record in zip(told, records, strict=True):
        done(Produced(topic, record.partition, record.offset, record.offset < 0))


def _not_sent(error: OncewireError) -> OncewireError:
    return Unavailable(f"nothing was written: a commit before it failed ({error.message})", retry_after_s=1.0)
