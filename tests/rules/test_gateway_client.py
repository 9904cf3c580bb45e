"""A client of rooms keeps order and loses nothing, whatever the connection, the gateway and the history do."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oncewire.gateway.client.rules import Rules
from tests.support.roomsim import LIMITS, ROOM, Story, envelope, limits, tell

JS = Path(__file__).parents[2] / "clients" / "js"
SEEDS = range(300)


@pytest.mark.parametrize("is_complete", [True, False])
def test_every_message_is_handled_once_and_in_order(is_complete: bool) -> None:
    """What history still has is never skipped; what it lost is told as a gap in its place."""
    for seed in SEEDS:
        story = Story(seed, is_complete).run()
        missing = {n for first, last in story.gaps for n in range(first, last + 1)}
        assert sorted(story.handled) == story.handled, seed
        assert len(set(story.handled)) == len(story.handled), seed
        assert set(range(1, story.last + 1)) == set(story.handled) | missing, seed
        assert not set(story.handled) & missing, seed
        if is_complete:
            assert not missing, seed


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_room_that_was_empty_when_it_was_joined_misses_nothing_from_then_on(is_complete: bool) -> None:
    """Also over reconnects before its first message."""
    for seed in SEEDS:
        story = Story(seed, is_complete, is_live=True).run()
        missing = {n for first, last in story.gaps for n in range(first, last + 1)}
        assert sorted(set(story.handled)) == story.handled, seed
        assert set(range(story.began + 1, story.last + 1)) <= set(story.handled) | missing, seed
        if is_complete:
            assert not missing, seed


def test_nothing_is_acknowledged_before_it_is_done() -> None:
    acks = [ack for seed in SEEDS for ack in Story(seed).run().acks]
    assert acks
    assert all(acked <= handled for acked, handled in acks)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_javascript_rules_do_the_same() -> None:
    """Two languages, one behaviour: the same events lead to the same actions, timers and positions."""
    stories = [Story(seed, bool(seed % 2), is_live=seed % 3 == 0).run() for seed in SEEDS]
    lines = [json.dumps({"options": LIMITS, "steps": story.steps}) for story in stories]
    command = ["node", str(Path(__file__).parents[1] / "support" / "rules_replay.mjs")]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True, timeout=120)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(stories) == len(answers)
    for story, answer in zip(stories, answers, strict=True):
        for step, ours, theirs in zip(story.steps, story.results, answer, strict=True):
            assert ours == theirs, (story.seed, step)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_javascript_tests_pass() -> None:
    """`node --test` in its folder, as its README says, for those who run only pytest."""
    done = subprocess.run(["node", "--test"], cwd=JS, capture_output=True, text=True, check=False, timeout=120)
    assert 0 == done.returncode, done.stdout


class Client:
    """The rules, told by name."""

    def __init__(self, **options: int) -> None:
        self.rules = Rules(limits(options))

    def tell(self, kind: str, now: int = 0, chance: float = 0.5, **fields: Any) -> list[Any]:
        return tell(self.rules, {"type": kind, **fields}, now, chance)

    def connected(self, **joined: Any) -> Client:
        self.tell("join", room=ROOM, **joined)
        self.tell("start")
        self.tell("opened")
        self.tell("frame", frame={"type": "joined", "conversationId": ROOM, "epoch": "e1", "after": 7})
        return self

    def sent(self, actions: list[Any]) -> list[dict[str, Any]]:
        return [action.frame for action in actions if hasattr(action, "frame")]


def test_reconnects_wait_longer_each_time_up_to_a_cap() -> None:
    client = Client()
    client.tell("start")
    waits = []
    for _ in range(7):
        (state,) = client.tell("closed", code=1006, chance=0.999999)
        waits.append(state.retry_ms)
        client.tell("tick", now=client.rules.wake_at or 0)
    assert [2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000] == waits


def test_chance_halves_a_wait_at_most() -> None:
    client = Client()
    client.tell("start")
    (state,) = client.tell("closed", code=1006, chance=0.0)
    assert 1_000 == state.retry_ms


def test_a_refusal_is_final() -> None:
    client = Client()
    client.tell("start")
    (state,) = client.tell("closed", code=4403)
    assert ("closed", None) == (state.state, client.rules.wake_at)


def test_a_silent_connection_is_dropped() -> None:
    client = Client().connected()
    assert {"type": "heartbeat", "ts": 15_000} in client.sent(client.tell("tick", now=15_000))
    client.tell("frame", now=15_001, frame={"type": "heartbeat", "ts": 15_000})
    close, state = client.tell("tick", now=50_001)[:2]
    assert (4000, "waiting") == (close.code, state.state)


def test_a_room_that_is_only_followed_resumes_where_it_was_joined() -> None:
    """Or what was said between a first connection and the next would be lost."""
    client = Client().connected()
    client.tell("closed", code=1006)
    client.tell("wake")
    joined = {"type": "join_room", "conversationId": ROOM, "resumeFromSeq": 7, "epoch": "e1"}
    assert [joined] == client.sent(client.tell("opened"))


def test_acks_are_cumulative_and_sent_together() -> None:
    client = Client().connected(sequence=0)
    for sequence in (1, 2, 3):
        client.tell("frame", frame=envelope(sequence))
    for sequence in (1, 2, 3):
        assert [] == client.sent(client.tell("processed", room=ROOM, sequence=sequence))
    assert [{"type": "ack", "conversationId": ROOM, "sequence": 3}] == client.sent(client.tell("tick", now=50))


def test_a_message_that_failed_comes_again_and_holds_back_the_next() -> None:
    client = Client().connected(sequence=0)
    client.tell("frame", frame=envelope(1))
    client.tell("frame", frame=envelope(2))
    (problem,) = client.tell("failed", room=ROOM, sequence=1, message="no disk")
    assert "no disk" == problem.message
    again = [action.sequence for action in client.tell("tick", now=2_000) if hasattr(action, "sequence")]
    assert [1] == again


def test_a_message_under_a_second_number_is_handled_once() -> None:
    client = Client().connected(sequence=0)
    client.tell("frame", frame=envelope(1))
    client.tell("processed", room=ROOM, sequence=1)
    assert [] == client.tell("frame", frame=envelope(2, message_id="m1"))
    assert 2 == client.rules.position(ROOM).sequence  # type: ignore[union-attr]


def test_a_history_that_is_not_complete_shows_a_gap_and_goes_on() -> None:
    client = Client().connected(sequence=2)
    control = {"type": "chat.ack.requested", "conversationId": ROOM, "upToSequence": 9}
    (fetch,) = client.tell("frame", frame={"control": control})
    page = {"messages": [], "next": None, "complete": False}
    actions = client.tell("history", room=ROOM, repair=fetch.repair, page=page)
    (gap,) = [action.gap for action in actions if hasattr(action, "gap")]
    assert (3, 9) == (gap.first, gap.last)
    assert 9 == client.sent(actions)[0]["sequence"]


def test_a_gateway_that_asks_for_history_again_and_again_is_not_hurried_after() -> None:
    client = Client().connected(sequence=2)
    control = {"control": {"type": "chat.ack.requested", "conversationId": ROOM, "upToSequence": 9}}
    (fetch,) = client.tell("frame", frame=control)
    page = {"messages": [], "next": None, "complete": True}
    client.tell("history", room=ROOM, repair=fetch.repair, page=page)
    assert [] == client.tell("frame", frame=control)
    assert client.tell("tick", now=2_000)[-1].after == 9


def test_another_epoch_is_taken_over_with_the_history() -> None:
    client = Client().connected(sequence=2, epoch="e0")
    assert "e0" == client.rules.position(ROOM).epoch  # type: ignore[union-attr]
    control = {"type": "chat.ack.requested", "conversationId": ROOM, "upToSequence": 2}
    (fetch,) = client.tell("frame", frame={"control": control})
    page = {"messages": [], "next": None, "complete": True}
    (resume,) = client.sent(client.tell("history", room=ROOM, repair=fetch.repair, page=page))
    assert {"type": "resume_from_seq", "conversationId": ROOM, "sequence": 2, "epoch": "e1"} == resume


def test_presence_is_said_again_after_a_reconnect() -> None:
    client = Client().connected(sequence=0)
    client.tell("presence", room=ROOM, state="typing")
    client.tell("closed", code=1006)
    client.tell("wake")
    client.tell("opened")
    frames = client.sent(
        client.tell("frame", frame={"type": "joined", "conversationId": ROOM, "epoch": "e1", "after": 0})
    )
    assert [{"type": "presence", "conversationId": ROOM, "state": "typing"}] == frames


def test_a_join_that_fails_for_now_is_sent_again_later_and_later() -> None:
    client, now, waits = Client(), 0, list[int]()
    client.tell("join", room=ROOM, sequence=3)
    client.tell("start")
    client.tell("opened")
    refusal = {"type": "error", "conversationId": ROOM, "frame": "join_room", "code": "timed_out", "message": "no"}
    for _ in range(3):
        client.tell("frame", now, 0.999999, frame=refusal | {"retryable": True})
        due = client.rules.wake_at
        assert due is not None
        (join,) = client.sent(client.tell("tick", due))
        assert {"type": "join_room", "conversationId": ROOM, "resumeFromSeq": 3} == join
        waits.append(due - now)
        now = due
    assert [2_000, 4_000, 8_000] == waits


def test_a_resume_that_fails_for_now_becomes_a_join() -> None:
    client = Client().connected(sequence=2)
    refusal = {"type": "error", "conversationId": ROOM, "frame": "resume_from_seq", "code": "timed_out", "message": ""}
    client.tell("frame", frame=refusal | {"retryable": True})
    (join,) = client.sent(client.tell("tick", 2_000))
    assert {"type": "join_room", "conversationId": ROOM, "resumeFromSeq": 2, "epoch": "e1"} == join


def test_what_was_on_its_way_when_a_room_was_left_is_not_taken_for_the_next() -> None:
    """Joined again at once: until the gateway has confirmed that it was left, all its frames are of before."""
    client = Client().connected(sequence=3)
    leave = client.sent(client.tell("leave", room=ROOM))[-1]
    assert {"type": "leave_room", "conversationId": ROOM} == leave
    client.tell("join", room=ROOM, sequence=3)
    joined = {"type": "joined", "conversationId": ROOM, "epoch": "e1", "after": 3}
    assert [] == client.tell("frame", frame=envelope(9))
    assert [] == client.tell("frame", frame=joined)
    client.tell("frame", frame={"type": "left", "conversationId": ROOM})
    (state,) = client.tell("frame", frame=joined)
    assert ("joined", "e1") == (state.state, state.epoch)


def test_a_history_that_was_asked_for_before_a_room_was_left_is_not_taken_for_the_next() -> None:
    client = Client().connected(sequence=2)
    control = {"control": {"type": "chat.ack.requested", "conversationId": ROOM, "upToSequence": 9}}
    (first,) = client.tell("frame", frame=control)
    client.tell("leave", room=ROOM)
    client.tell("join", room=ROOM, sequence=0)
    client.tell("frame", frame={"type": "left", "conversationId": ROOM})
    (second,) = client.tell("frame", frame=control)
    page = {"messages": [envelope(3)], "next": None, "complete": False}
    assert [] == client.tell("history", room=ROOM, repair=first.repair, page=page)
    assert client.tell("history", room=ROOM, repair=second.repair, page=page)


def test_a_room_that_is_not_allowed_is_not_asked_for_again_before_the_next_connect() -> None:
    client = Client()
    client.tell("join", room=ROOM)
    client.tell("start")
    client.tell("opened")
    refusal = {"type": "error", "conversationId": ROOM, "frame": "join_room", "code": "permission_denied"}
    (state,) = client.tell("frame", frame=refusal | {"message": "not you", "retryable": False})
    assert ("refused", "permission_denied", "not you") == (state.state, state.code, state.reason)
    assert [] == client.sent(client.tell("tick", now=14_999))
    client.tell("closed", code=1006)
    client.tell("wake")
    assert [{"type": "join_room", "conversationId": ROOM}] == client.sent(client.tell("opened"))
