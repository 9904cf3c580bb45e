"""The rules of rooms built wrongly on purpose, one at a time: each must turn the simulation red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncewire.gateway import rooms
from oncewire.gateway.rooms import Phase, Room, Say
from tests.support.gatewaysim import Simulation

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}
SEEDS = 600
STEPS = 150


def mutation(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[function.__name__] = function
    return function


def found(seed: int) -> list[str]:
    """What the simulation says; a crash of the rules is found too."""
    try:
        return Simulation(seed).run(STEPS)
    except Exception as error:
        return [f"seed {seed}: {error!r}"]


@mutation
def a_gap_is_forwarded(patch: Patch) -> None:
    patch.setattr(Room, "_is_gap", lambda self, one: False)
    patch.setattr(Room, "_break", lambda self, one, acts, is_other: None)


@mutation
def what_was_sent_is_sent_again(patch: Patch) -> None:
    original = Room._take

    def take(self: Any, one: Any, acts: Any, together: Any) -> None:
        if one.is_numbered and one.sequence == self.last:
            together.append(one.frame)
        original(self, one, acts, together)

    patch.setattr(Room, "_take", take)


@mutation
def another_epoch_goes_unnoticed(patch: Patch) -> None:
    patch.setattr(Room, "_is_other_history", lambda self, one: False)


@mutation
def a_client_s_epoch_is_not_compared(patch: Patch) -> None:
    patch.setattr(rooms, "_differ", lambda one, other: False)
    patch.setattr(Room, "_is_other_history", lambda self, one: False)


@mutation
def unnumbered_envelopes_are_not_held(patch: Patch) -> None:
    patch.setattr(Room, "_hold", lambda self, one: self._unheld.append(one.frame))
    original = Room._take

    def take(self: Any, one: Any, acts: Any, together: Any) -> None:
        self._unheld = together
        original(self, one, acts, together)

    patch.setattr(Room, "_take", take)


@mutation
def held_envelopes_are_not_kept_for_who_is_behind(patch: Patch) -> None:
    """Sent at once instead."""

    def pass_on(self: Any, one: Any, together: Any) -> None:
        together.append(one.frame)
        for member in self.members:
            if member.phase is Phase.BEHIND:
                member.write(one.frame)

    patch.setattr(Room, "_pass_on", pass_on)


@mutation
def live_begins_before_replay_has_ended(patch: Patch) -> None:
    original = Room._enter

    def enter(self: Any, joining: Any) -> Any:
        acts = original(self, joining)
        if joining.member.phase is Phase.BEHIND:
            self._go_live(joining.member)
        return acts

    patch.setattr(Room, "_enter", enter)


@mutation
def what_arrives_during_a_reading_is_dropped(patch: Patch) -> None:
    original = Room.arrived
    patch.setattr(Room, "arrived", lambda self, some: [] if self.is_loading else original(self, some))


@mutation
def what_was_read_and_arrives_again_counts_twice(patch: Patch) -> None:
    """Unnumbered envelopes have no number by which a second one would be known."""

    def loaded(self: Any, envelopes: Any, up_to: int) -> Any:
        self._was_at, acts = self.place, original(self, envelopes, up_to)
        self.place = min(self.place, self._was_at)
        return acts

    original = Room.loaded
    patch.setattr(Room, "loaded", loaded)


@mutation
def a_full_buffer_is_written_to(patch: Patch) -> None:
    """The member is no longer live, and its place is lost."""

    def full(self: Any, member: Any) -> None:
        member.is_full = True
        self.live.pop(member, None)

    patch.setattr(Room, "full", full)


@mutation
def a_member_that_fell_behind_skips_to_the_end(patch: Patch) -> None:
    original = Room.step

    def step(self: Any, member: Any) -> Any:
        if member.phase is Phase.BEHIND and not member.fetch and not member.is_full:
            member.last = max(member.last, self.last)
        return original(self, member)

    patch.setattr(Room, "step", step)


@mutation
def a_page_with_a_gap_is_sent_on(patch: Patch) -> None:
    def fetched(self: Any, member: Any, number: int, envelopes: Any) -> Any:
        if member.fetch != number or member not in self.members or member.phase is not Phase.BEHIND:
            return []
        member.fetch = 0
        above = [one for one in envelopes if one.is_numbered and one.sequence > member.last]
        if not above:
            return [self._control(member, self._backlog_first - 1, self.epoch)]
        return [self._replay(member, above), rooms.Pump(member)]

    patch.setattr(Room, "fetched", fetched)


@mutation
def a_backlog_with_a_gap_is_kept(patch: Patch) -> None:
    def note(self: Any, one: Any) -> None:
        kept = list(self.backlog)
        original(self, one)
        if one.is_numbered and self.backlog and self.backlog[0] is one and self.backlog.maxlen != 1:
            self.backlog.clear()
            self.backlog.extend([*kept, one])

    original = Room._note
    patch.setattr(Room, "_note", note)


@mutation
def waiting_members_are_written_to(patch: Patch) -> None:
    def control(self: Any, member: Any, up_to: int, epoch: Any) -> Any:
        return Say((member.write,), rooms.control_frame(self.conversation.id, up_to, epoch))

    patch.setattr(Room, "_control", control)


@mutation
def a_client_that_is_ahead_is_believed(patch: Patch) -> None:
    patch.setattr(Room, "_contradiction", lambda self, member: None)


@mutation
def a_client_that_is_ahead_is_not_looked_into(patch: Patch) -> None:
    """A node that lags tells a client that knows more that its history is another: found as a message twice."""

    def join(self: Any, member: Any, after: Any, epoch: Any = None, *, is_resume: bool = False) -> Any:
        if not self.is_loading:
            return self._enter(rooms.Joining(member, min(after, self.last) if after else after, epoch, is_resume))
        return original(self, member, after, epoch, is_resume=is_resume)

    original = Room.join
    patch.setattr(Room, "join", join)


@mutation
def a_stream_made_anew_leaves_its_clients_alone(patch: Patch) -> None:
    patch.setattr(Room, "_look_again", lambda self: [])


@mutation
def a_stream_made_anew_goes_unnoticed(patch: Patch) -> None:
    patch.setattr(Room, "restart", lambda self: [])


@mutation
def the_archive_is_not_asked(patch: Patch) -> None:
    original = Room.loaded
    patch.setattr(Room, "loaded", lambda self, some, up_to, archived: original(self, some, up_to))


@mutation
def who_left_is_written_to(patch: Patch) -> None:
    patch.setattr(Room, "leave", lambda self, member: self.members.pop(member, None))


@mutation
def a_gap_that_is_in_the_stream_is_not_fetched(patch: Patch) -> None:
    patch.setattr(Room, "_catch_up", lambda self, envelopes, acts: None)
