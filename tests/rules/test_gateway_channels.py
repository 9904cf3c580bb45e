"""Tokens of one conversation: each listener gets every event behind its place, once and in order, whatever it costs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from oncewire.gateway.channels import SILENT_S, Channel, Event, Listener, Look
from oncewire.gateway.frames import Conversation, Envelope, read_envelope
from oncewire.gateway.rooms import Say
from oncewire.gateway.tokens import cut_off

CONVERSATION = "c"


def envelope(place: int, kind: str, message_id: str = "m", **fields: str) -> Envelope:
    event = {"type": kind, "messageId": message_id, **fields}
    body = {"version": "2024-12-01", "conversationId": CONVERSATION, "sequence": 0, "event": event}
    found = read_envelope(CONVERSATION, place, json.dumps(body).encode(), None, place)
    assert found is not None
    return found


def lifecycle(place: int, status: str, message_id: str = "m") -> Envelope:
    return envelope(place, "chat.stream.lifecycle", message_id, status=status)


def chunk(place: int, chunk_id: str, message_id: str = "m") -> Envelope:
    return envelope(place, "chat.token.chunk", message_id, chunkId=chunk_id)


class Hall:
    """A channel, its stream, and listeners that come, fall behind and go, by a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.stored: list[Event] = []
        self.channel = Channel(Conversation(CONVERSATION), 0)
        self.looks: list[Look] = []
        self.pages = 0
        self.heard: dict[Listener, list[int]] = {}
        self.began: dict[Listener, int] = {}

    def perform(self, acts: Sequence[Say | Look]) -> None:
        for act in acts:
            if isinstance(act, Look):
                self.looks.append(act)
            else:
                for write in act.writes:
                    write(act.data)

    def step_all(self) -> None:
        for listener in self.channel.behind:
            while (act := self.channel.step(listener)) is not None:
                self.perform([act])

    def say(self) -> None:
        place = (self.stored[-1].place if self.stored else 0) + self.chance.randint(1, 3)
        self.stored.append(Event(place, place, b"%d," % place))
        said = self.channel.arrived(self.stored[-1:])
        self.perform([said] if said is not None else [])
        self.step_all()

    def listen(self) -> None:
        heard: list[int] = []
        listener = Listener(None, lambda data: heard.extend(map(int, data.split(b",")[:-1])), 0)  # type: ignore[arg-type]
        self.heard[listener] = heard
        self.began[listener] = self.chance.randrange(self.channel.place + 1)
        self.channel.join(listener)
        self.channel.ready(listener, self.began[listener])
        self.step_all()

    def answer(self) -> None:
        if self.looks:
            look = self.looks.pop()
            up_to = self.chance.randint(look.after + 1, look.up_to)
            self.perform(self.channel.found(look, [one for one in self.stored if look.after < one.place], up_to))
            self.step_all()

    def buffer(self) -> None:
        if self.heard:
            listener = self.chance.choice(list(self.heard))
            if listener.is_full:
                listener.is_full = False
                self.step_all()
            else:
                self.channel.full(listener)


@pytest.mark.parametrize("seed", range(60))
def test_each_listener_gets_every_event_behind_its_place_once_and_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncewire.gateway.channels.RECENT_MAX", 6)
    hall = Hall(seed)
    for _ in range(300):
        hall.chance.choice([hall.say, hall.say, hall.say, hall.listen, hall.answer, hall.answer, hall.buffer])()
    for listener in hall.heard:
        listener.is_full = False
    hall.step_all()
    while hall.looks:
        hall.answer()
    for listener, heard in hall.heard.items():
        assert [one.place for one in hall.stored if one.place > hall.began[listener]] == heard
        assert listener.is_live


def test_a_crowd_that_comes_back_costs_one_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncewire.gateway.channels.RECENT_MAX", 6)
    hall = Hall(1)
    for _ in range(100):
        hall.say()
    for _ in range(200):
        hall.listen()
    while hall.looks:
        (look,) = hall.looks
        hall.looks.clear()
        hall.pages += 1
        hall.perform(hall.channel.found(look, [one for one in hall.stored if one.place > look.after], look.up_to))
        hall.step_all()
    assert hall.pages <= 2, "who came while the first was read asks for one more"
    for listener, heard in hall.heard.items():
        assert [one.place for one in hall.stored if one.place > hall.began[listener]] == heard


def test_a_new_listener_begins_at_the_running_answer_else_at_the_last_word() -> None:
    channel = Channel(Conversation(CONVERSATION), 100)
    assert 100 == channel.begin
    channel.learn([lifecycle(90, "completed", "b"), lifecycle(80, "started", "b")], 0.0)  # in any order
    assert 89 == channel.begin
    channel.learn([lifecycle(70, "started", "a")], 0.0)
    assert 69 == channel.begin
    channel.learn([lifecycle(110, "errored", "a"), lifecycle(70, "started", "a")], 0.0)
    assert 100 == channel.begin, "the last word is among what is recent"


def test_a_chunk_that_does_not_follow_on_the_one_before_is_seen() -> None:
    """Of those that are counted; others have ids of their own."""
    stretch = [
        chunk(1, "aaaaaaaa-7"),
        chunk(2, "aaaaaaaa-8"),
        chunk(3, "aaaaaaaa-10"),
        lifecycle(4, "started"),
        chunk(5, "bbbbbbbb-1"),
        lifecycle(6, "started"),
        chunk(7, "cccccccc-3"),
        chunk(8, "dddddddd-1"),
        chunk(9, "eeeeeeee-2"),
        chunk(10, "nobody's"),
    ]
    assert [3, 7, 9] == [one.place for one, is_cut in cut_off(stretch) if is_cut]


def test_an_answer_whose_producer_does_not_answer_twice_is_lost_for_all_who_listen_and_come() -> None:
    """Who is live is told at once, who is not when it is; whoever takes it up begins anew."""
    hall = Hall(1)
    channel = hall.channel
    said: dict[str, list[bytes]] = {"live": [], "full": [], "late": []}
    listeners = {name: Listener(None, said[name].append, 0) for name in said}  # type: ignore[arg-type]
    for name in ("live", "full"):
        channel.join(listeners[name])
        channel.ready(listeners[name], 0)
    hall.step_all()
    channel.full(listeners["full"])
    channel.learn([lifecycle(1, "started", "a")], 0.0)
    assert [] == channel.silent(SILENT_S - 1)
    channel.heard("a", 4.0)
    assert [] == channel.silent(SILENT_S + 3)
    assert ["a"] == channel.silent(SILENT_S + 4)
    assert not channel.unheard("a")
    assert [] == channel.silent(SILENT_S + 5), "it is not asked about again at once"
    assert ["a"] == channel.silent(2 * SILENT_S + 4)
    assert channel.unheard("a")
    lost = channel.lose("a", b"lost")
    assert lost is not None
    hall.perform([lost])
    listeners["full"].is_full = False
    channel.join(listeners["late"])
    channel.ready(listeners["late"], channel.begin)
    hall.step_all()
    assert {"live": [b"lost"], "full": [b"lost"], "late": [b"lost"]} == said
    channel.learn([lifecycle(9, "started", "a")], 100.0)
    assert ["a"] == list(channel.running)
