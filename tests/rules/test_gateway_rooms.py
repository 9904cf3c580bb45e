"""Single rules of a room, each by the frames that a member gets."""

from __future__ import annotations

from typing import Any

from oncewire.gateway.frames import Conversation
from oncewire.gateway.rooms import Act, Fetch, Load, Member, Pump, Room, Say
from tests.support.gatewaysim import CONVERSATION, stored, unframed


class Hall:
    """A room, and what its shell was asked to read."""

    def __init__(self, backlog: int = 4) -> None:
        self.room = Room(Conversation(CONVERSATION), backlog)
        self.loads: list[Load] = []
        self.fetches: list[Fetch] = []
        self.perform(self.room.open())

    def perform(self, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Say):
                for write in act.writes:
                    write(act.data)
            elif isinstance(act, Pump):
                while (step := self.room.step(act.member)) is not None:
                    self.perform([step])
            elif isinstance(act, Fetch):
                self.fetches.append(act)
            else:
                self.loads.append(act)

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
