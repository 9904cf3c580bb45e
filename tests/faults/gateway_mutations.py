"""The rules of rooms built wrongly on purpose, one at a time: each must turn the simulation red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncewire.gateway import rooms
from oncewire.gateway.rooms import Phase, Room, Say
from oncewire.gateway.slabs import Slab, Slabs
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

    def loaded(self: Any, envelopes: Any, up_to: int, archived: Any) -> Any:
        self._was_at, acts = self.place, original(self, envelopes, up_to, archived)
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
        if member.phase is Phase.BEHIND and member not in self._needing and not member.is_full:
            member.last = max(member.last, self.last)
        return original(self, member)

    patch.setattr(Room, "step", step)


@mutation
def a_page_with_a_gap_is_sent_on(patch: Patch) -> None:
    def after_fetch(self: Any, member: Any, page: Any) -> Any:
        following = [one for one in page if one.sequence > member.last]
        if following:
            member.last = following[0].sequence - 1
        return original(self, member, page)

    original = Room._after_fetch
    patch.setattr(Room, "_after_fetch", after_fetch)


@mutation
def a_page_answers_for_who_is_further_behind(patch: Patch) -> None:
    """They are told that messages are gone which the page just does not reach back to."""

    def fetched(self: Any, fetch: Any, envelopes: Any) -> Any:
        if self.is_waiting_for(fetch):
            fetch.after = min([member.last for member in self._needing], default=fetch.after)
        return original(self, fetch, envelopes)

    original = Room.fetched
    patch.setattr(Room, "fetched", fetched)


@mutation
def who_waits_for_the_next_page_is_forgotten(patch: Patch) -> None:
    original = Room.fetched

    def fetched(self: Any, fetch: Any, envelopes: Any) -> Any:
        acts = original(self, fetch, envelopes)
        self._needing.clear()
        return acts

    patch.setattr(Room, "fetched", fetched)


@mutation
def what_was_sent_of_a_stream_before_is_sent_of_the_next(patch: Patch) -> None:
    patch.setattr(Slabs, "forget", lambda self, room: None)


@mutation
def a_member_in_the_middle_of_a_run_gets_all_of_it(patch: Patch) -> None:
    patch.setattr(Slab, "behind", lambda self, sequence: self.data)


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
