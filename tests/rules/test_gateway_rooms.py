"""Single rules of a room, each by the frames that a member gets."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from oncewire.gateway.frames import Conversation
from oncewire.gateway.rooms import Act, Archived, Fetch, Load, Member, Pump, Room, Say
from tests.support.gatewaysim import CONVERSATION, stored, unframed


class Hall:
    """A room, and what its shell was asked to read."""

    def __init__(self, backlog: int = 4) -> None:
        self.room = Room(Conversation(CONVERSATION), backlog)
        self.loads: list[Load] = []
        self.fetches: list[Fetch] = []
        self.pumps: deque[Member] = deque()
        self.perform(self.room.open())

    def perform(self, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Say):
                for write in act.writes:
                    write(act.data)
            elif isinstance(act, Pump):
                self.pumps.append(act.member)
            elif isinstance(act, Fetch):
                self.fetches.append(act)
            else:
                self.loads.append(act)
        while self.pumps:
            if (step := self.room.step(self.pumps[0])) is None:
                self.pumps.popleft()
            else:
                self.perform([step])

    def member(self) -> tuple[Member, list[dict[str, Any]]]:
        heard: list[dict[str, Any]] = []
        return Member(None, lambda data: heard.extend(unframed(data))), heard


def messages(first: int, last: int, epoch: str = "e1") -> list[Any]:
    return [stored(n, n, epoch, f"m{n}", is_numbered=True) for n in range(first, last + 1)]


def summary(frame: dict[str, Any]) -> Any:
    """A frame in one word."""
    if "control" in frame:
        return ("control", frame["control"]["upToSequence"])
    return ("joined", frame["after"]) if frame.get("type") == "joined" else frame["sequence"]


def test_a_later_join_replaces_one_that_still_waits() -> None:
    """A member that asks to resume elsewhere, before it was answered, is not answered twice."""
    hall = Hall()
    member, heard = hall.member()
    hall.perform(hall.room.join(member, 9))
    hall.perform(hall.room.join(member, 2, is_resume=True))
    hall.perform(hall.room.loaded(messages(1, 4), 4))
    assert [("joined", 2), 3, 4] == [summary(frame) for frame in heard]


def test_a_room_that_the_stream_forgot_begins_with_what_the_archive_knows() -> None:
    """Who has all of it is live, who has less is told, who asked for what comes gets just that."""
    hall = Hall()
    members = [hall.member() for _ in range(3)]
    for (member, _), after in zip(members, (None, 5, 2), strict=True):
        hall.perform(hall.room.join(member, after, "e1" if after else None))
    hall.perform(hall.room.loaded([], 0, Archived(5, "e1")))
    hall.perform(hall.room.fetched(hall.fetches.pop(), []))
    hall.perform(hall.room.arrived(messages(6, 6)))
    expected = [[("joined", 5), 6], [("joined", 5), 6], [("joined", 2), ("control", 5)]]
    assert expected == [[summary(frame) for frame in heard] for _, heard in members]


def test_what_the_archive_knew_before_the_stream_had_it_comes_once() -> None:
    hall = Hall()
    (live, heard), (late, fetched) = hall.member(), hall.member()
    hall.perform(hall.room.join(live, None))
    hall.perform(hall.room.loaded([], 0, Archived(2, "e1")))
    hall.perform(hall.room.arrived(messages(1, 3)))
    hall.perform(hall.room.join(late, 0, "e1"))
    (fetch,) = hall.fetches
    assert (0, 3) == (fetch.after, fetch.end), "up to there it may be read"
    hall.perform(hall.room.fetched(fetch, messages(1, 2)))
    assert [("joined", 2), 3] == [summary(frame) for frame in heard]
    assert [("joined", 0), 1, 2, 3] == [summary(frame) for frame in fetched]


def test_the_control_frame_leaves_room_for_what_is_said_while_history_is_fetched() -> None:
    """The subject is at its limit and drops a message with each new one: the very edge would have moved."""
    hall = Hall(backlog=4)
    member, heard = hall.member()
    hall.perform(hall.room.loaded(messages(7, 10), 10))
    hall.perform(hall.room.join(member, 1, "e1"))
    hall.perform(hall.room.fetched(hall.fetches.pop(), messages(5, 8)))
    hall.perform(hall.room.arrived(messages(11, 12)))
    assert [("joined", 1), ("control", 8)] == [summary(frame) for frame in heard]
    hall.perform(hall.room.join(member, 8, "e1", is_resume=True))
    assert [9, 10, 11, 12] == [summary(frame) for frame in heard[2:]]


@pytest.mark.parametrize(
    ("stored_from", "backlog", "up_to"), [(9, 4, 8), (5, 4, 8), (5, 0, 10), (None, 4, 8), (3, 20, 2)]
)
def test_the_control_frame_names_nothing_that_is_gone_and_nothing_that_is_not_said_yet(
    stored_from: int | None, backlog: int, up_to: int
) -> None:
    """Never below what can be had from memory or from the stream, never above the room's last."""
    hall = Hall(backlog)
    member, heard = hall.member()
    hall.perform(hall.room.loaded(messages(max(stored_from or 7, 11 - max(1, backlog)), 10), 10))
    hall.perform(hall.room.join(member, 0, "e1"))
    page = messages(stored_from, 10) if stored_from else []
    hall.perform(hall.room.fetched(hall.fetches.pop(), page))
    assert ("control", up_to) == summary(heard[-1])


def test_who_waits_for_a_room_that_cannot_be_read_is_not_in_it() -> None:
    hall = Hall()
    joining, resuming = hall.member()[0], hall.member()[0]
    hall.perform(hall.room.join(joining, 1))
    hall.perform(hall.room.join(resuming, 1, is_resume=True))
    refused = [(one.member, one.frame) for one in hall.room.refuse_joining()]
    assert [(joining, "join_room"), (resuming, "resume_from_seq")] == refused
    assert hall.room.is_empty


def test_a_crowd_behind_the_backlog_costs_one_page_at_a_time() -> None:
    """However many wait for it, and wherever in it they are."""
    hall = Hall(backlog=4)
    crowd = [hall.member() for _ in range(60)]
    hall.perform(hall.room.loaded(messages(37, 40), 40))
    for number, (member, _) in enumerate(crowd):
        hall.perform(hall.room.join(member, number % 20, "e1"))
    pages = 0
    while hall.fetches:
        (fetch,) = hall.fetches
        hall.fetches.clear()
        pages += 1
        hall.perform(hall.room.fetched(fetch, messages(fetch.after + 1, min(40, fetch.after + 16))))
    assert 3 == pages
    for number, (_, heard) in enumerate(crowd):
        assert list(range(number % 20 + 1, 41)) == [summary(frame) for frame in heard[1:]]


def test_a_member_that_knows_more_than_a_reading_that_had_begun_is_read_for() -> None:
    """It comes from another node while this one reads what was there before: it is not sent to fetch history."""
    hall = Hall()
    member, heard = hall.member()
    first = hall.loads.pop()
    hall.perform(hall.room.join(member, 6, "e1"))
    hall.perform(hall.room.loaded(messages(1, 4), 4))
    (second,) = hall.loads
    assert (None, 4) == (first.after, second.after)
    hall.perform(hall.room.loaded(messages(5, 7), 7))
    assert [("joined", 6), 7] == [summary(frame) for frame in heard]
