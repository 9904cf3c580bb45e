"""The broker built wrongly on purpose, one rule at a time: each must turn the simulation red."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from oncewire._ground.contracts.records import Acked, Retried
from oncewire.broker import desk, dispatch, image, rules, upkeep
from oncewire.broker.credit import Credit
from oncewire.broker.log import writer
from oncewire.broker.progress import Progress
from oncewire.broker.state import State, Subscriber, Topic
from tests.support.brokersim import Simulation
from tests.support.disk import SimDisk

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[function.__name__] = function
    return function


def found(seed: int, steps: int) -> list[str]:
    """What the simulation says; a crash of the rules is found too."""
    try:
        return Simulation(seed).run(steps)
    except Exception as error:
        return [f"seed {seed}: {error!r}"]


# ---- visible before it is durable


@mutation
def counts_before_it_is_durable(patch: Patch) -> None:
    def propose(self: Any, records: Any) -> None:
        records = list(records)
        original(self, records)
        for record in records:
            self.state.apply(record)

    def applied(self: Any) -> None:
        self._answers += self._take_going().waiters

    original = desk.Desk.propose
    patch.setattr(desk.Desk, "propose", propose)
    patch.setattr(desk.Desk, "applied", applied)


@mutation
def answers_before_it_is_durable(patch: Patch) -> None:
    def submit(self: Any, step: Any, done: Any) -> None:
        self.propose(step.records)
        done(step.answer)

    patch.setattr(desk.Desk, "submit", submit)


@mutation
def sync_left_out(patch: Patch) -> None:
    original = SimDisk.__init__

    def lying(self: Any, seed: int = 0) -> None:
        original(self, seed)
        self.is_lying = True

    patch.setattr(SimDisk, "__init__", lying)


@mutation
def file_kept_after_a_failed_sync(patch: Patch) -> None:
    patch.setattr(writer.Log, "_abandon", lambda self: None)


@mutation
def tentative_state_kept_after_a_failed_commit(patch: Patch) -> None:
    patch.setattr(State, "forget_tentative", lambda self: None)


# ---- progress


@mutation
def an_ack_advances_over_gaps(patch: Patch) -> None:
    def settle(self: Progress, done: Iterable[int]) -> bool:
        before = self.floor
        self.floor = max(before, *done)
        return self.floor > before

    patch.setattr(Progress, "settle", settle)


@mutation
def acks_above_a_gap_are_not_kept_in_snapshots(patch: Patch) -> None:
    original = image._progress
    patch.setattr(image, "_progress", lambda progress: msgspec.structs.replace(original(progress), ahead=[]))


@mutation
def only_the_first_group_holds_messages_back(patch: Patch) -> None:
    patch.setattr(Topic, "holders", lambda self: list(self.groups.values())[:1])


@mutation
def offsets_start_anew_after_a_restart(patch: Patch) -> None:
    original = image.settle_in

    def settle_in(state: State) -> None:
        original(state)
        for topic in state.topics.values():
            topic.next_offset = max([0, *(one.offsets[-1] for one in topic.partitions.values() if len(one))])

    patch.setattr("oncewire.broker.journal.settle_in", settle_in)


# ---- deliveries


@mutation
def anyone_may_settle(patch: Patch) -> None:
    original = rules.held

    def held(state: State, tenant: str, request: Any) -> Any:
        found = original(state, tenant, request)
        if isinstance(found, rules.Step) and getattr(found.answer, "message", "") == "not owner":
            group = state.topics[tenant, request.topic].groups[request.group]
            return group.progress[request.partition].flights[request.offset]
        return found

    patch.setattr(rules, "held", held)


@mutation
def attempts_are_counted_twice(patch: Patch) -> None:
    original = rules._retry

    def retry(*args: Any) -> Retried:
        record = original(*args)
        return msgspec.structs.replace(record, attempts=record.attempts + 1)

    patch.setattr(rules, "_retry", retry)


@mutation
def leases_never_end(patch: Patch) -> None:
    patch.setattr(upkeep, "_look", lambda state, now_ms, flight: [])


@mutation
def the_in_flight_limit_is_ignored(patch: Patch) -> None:
    original = dispatch._drain_new

    def drain_new(state: State, *args: Any) -> bool:
        limits, state.limits = state.limits, msgspec.structs.replace(state.limits, in_flight_max=1_000)
        try:
            return original(state, *args)
        finally:
            state.limits = limits

    patch.setattr(dispatch, "_drain_new", drain_new)


@mutation
def room_is_ignored(patch: Patch) -> None:
    original = dispatch._Turns.next

    def next_(self: Any) -> Any:
        reader = original(self)
        if reader is None and self._readers:
            return self._readers[0]
        return reader

    patch.setattr(dispatch._Turns, "next", next_)


@mutation
def credit_is_ignored(patch: Patch) -> None:
    def look(self: Any) -> None:
        self.room = self.sink.room()

    patch.setattr(Subscriber, "look", look)


@mutation
def credit_is_not_given_back(patch: Patch) -> None:
    patch.setattr(Credit, "give_back", lambda self: None)


@mutation
def what_nobody_takes_is_passed_over(patch: Patch) -> None:
    original = dispatch._drain_new

    def drain_new(state: State, progress: Progress, *args: Any) -> bool:
        is_cut_short = original(state, progress, *args)
        if is_cut_short:
            progress.cursor += 1
        return is_cut_short

    patch.setattr(dispatch, "_drain_new", drain_new)


@mutation
def attempts_are_not_limited(patch: Patch) -> None:
    original = rules.failed

    def failed(state: State, now_ms: int, flight: Any, reason: str) -> Any:
        if flight.policy is not None:
            flight.policy = msgspec.structs.replace(flight.policy, max_attempts=0)
        return original(state, now_ms, flight, reason)

    patch.setattr(rules, "failed", failed)
    patch.setattr(upkeep, "failed", failed)


@mutation
def a_dead_letter_is_only_a_settlement(patch: Patch) -> None:
    def bury(state: State, now_ms: int, flight: Any, reason: str) -> Any:
        group, number = flight.progress.group, flight.progress.partition.number
        flight.is_settling = True
        return [Acked(group.topic.number, group.number, number, flight.offset, now_ms)]

    patch.setattr(rules, "bury", bury)
    patch.setattr(dispatch, "bury", bury)


# ---- idempotency


@mutation
def keys_are_not_looked_up(patch: Patch) -> None:
    patch.setattr(rules, "_gate", lambda *args: None)


@mutation
def keys_are_not_written_with_the_message(patch: Patch) -> None:
    original = rules._reserve
    patch.setattr(rules, "_reserve", lambda *args: original(*args[:5], b"", "", 0))


@mutation
def keys_are_not_in_snapshots(patch: Patch) -> None:
    patch.setattr(image, "_produced", lambda *args: lambda: iter([]))


@mutation
def keys_on_their_way_are_free(patch: Patch) -> None:
    original = rules._gate

    def gate(state: State, *args: Any) -> Any:
        pending, state.pending = state.pending, set()
        try:
            return original(state, *args)
        finally:
            state.pending = pending

    patch.setattr(rules, "_gate", gate)
