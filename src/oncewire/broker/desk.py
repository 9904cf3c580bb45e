"""Requests share commits: who waits for which records, and what happens once they are durable. No I/O, no clock.

    submit → (records wait) → cut → the shell makes the group durable → applied → answered, hand_out
                                                                     └─ failed: all who waited are told, and those
                                                                        behind them too: they built on the same ground

One group is on its way at a time; the next one fills meanwhile. The order is law: a record counts only when it is
durable (`applied`), those who waited hear of it next (`answered`), and only then are deliveries made of it
(`hand_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from oncewire._ground.contracts.records import Record
from oncewire._ground.errors import NotFound, OncewireError, OutcomeUnknown, Unavailable
from oncewire.broker.dispatch import dispatch
from oncewire.broker.rules import NO_TOPIC, Step
from oncewire.broker.state import Group, State

Waiter = tuple[Callable[[Any], None], Any]


class _Commit:
    """Records that go to the disk together, and who waits for them."""

    __slots__ = ("bytes", "encoded", "records", "waiters")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.encoded: list[bytes] = []
        self.bytes = 0
        self.waiters: list[Waiter] = []


Encode = Callable[[Record], bytes]


class Desk:
    """See the module's head. Without `encode` nothing is written anywhere."""

    def __init__(self, state: State, encode: Encode | None) -> None:
        self.state = state
        self._encode = encode
        self._filling = _Commit()
        self._going: _Commit | None = None
        self._answers: list[Waiter] = []

    # ---- in

    @property
    def is_full(self) -> bool:
        return self._filling.bytes >= self.state.limits.commit_bytes_max

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is on its way."""
        return self._going is None and not self._filling.records

    @property
    def can_cut(self) -> bool:
        return self._going is None and bool(self._filling.records)

    def submit(self, step: Step, done: Callable[[Any], None]) -> None:
        """Answer at once, or when the step's records are durable."""
        if step.records:
            self.propose(step.records)
            self._filling.waiters.append((done, step.answer))
        elif step.waits and self._filling.records:
            self._filling.waiters.append((done, step.answer))
        elif step.waits and self._going is not None:
            self._going.waiters.append((done, step.answer))
        else:
            done(step.answer)

    def propose(self, records: Iterable[Record]) -> None:
        """Records that nobody waits for, or whose waiter comes next."""
        for record in records:
            self.fill(record)

    def fill(self, record: Record) -> None:
        filling = self._filling
        filling.records.append(record)
        if self._encode is not None:
            encoded = self._encode(record)
            filling.encoded.append(encoded)
            filling.bytes += len(encoded)

    # ---- through

    @property
    def going(self) -> list[Record]:
        """The records on their way; what `cut` returned is their encoded form, one for one."""
        return self._going.records if self._going is not None else []

    def cut(self) -> list[bytes]:
        """The next group, to be made durable. Asked only when no other is on its way."""
        assert self._going is None
        self._going, self._filling = self._filling, _Commit()
        return self._going.encoded

    def applied(self) -> None:
        """The group is durable: from now on it counts. `answered` must follow."""
        going = self._take_going()
        self.state.apply_all(going.records)
        self._answers += going.waiters

    def answered(self, halfway: Callable[[], None] | None = None) -> None:
        """Tell those who waited. `halfway` may send what the first half asks next while the others are told."""
        answers, self._answers = self._answers, []
        half = len(answers) // 2 if halfway is not None else 0
        for done, answer in answers[:half]:
            done(answer)
        if halfway is not None:
            halfway()
        for done, answer in answers[half:]:
            done(answer)

    def failed(self, error: OncewireError) -> None:
        """The group is not durable, or nobody knows. What fills behind it stood on it and was never written."""
        going, behind = self._take_going(), self._filling
        self._filling = _Commit()
        self.state.forget_tentative()
        self.state.counters["commits_failed"] += 1
        for done, _ in going.waiters:
            done(error)
        told = error if not isinstance(error, OutcomeUnknown) else _not_written(error)
        for done, _ in behind.waiters:
            done(told)

    def _take_going(self) -> _Commit:
        assert self._going is not None
        going, self._going = self._going, None
        return going

    # ---- out

    def hand_out(self, now_ms: int) -> None:
        """Deliver what can be delivered."""
        state = self.state
        ended, state.ended = state.ended, []
        for subscriber in ended:
            if subscriber.is_open:
                subscriber.is_open = False
                subscriber.sink.ended(NotFound(NO_TOPIC))
        while state.stirred:
            group, _ = state.stirred.popitem()
            self._rounds(group, now_ms)

    def _rounds(self, group: Group, now_ms: int) -> None:
        """A reader's room is for one round, so that a write has a bound: go on until nobody takes more."""
        while group.busy:
            for subscriber in group.subscribers:
                subscriber.look()
            turn = dispatch(self.state, group, now_ms)
            self.propose(turn.records)
            for subscriber, deliveries in turn.handed.items():
                if subscriber.is_open:
                    subscriber.sink.deliver(deliveries)
            if not turn.handed:
                return


def _not_written(error: OncewireError) -> OncewireError:
    return Unavailable(f"nothing was written: a commit before it failed ({error.message})", retry_after_s=1.0)
