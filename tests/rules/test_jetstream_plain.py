"""Frames of messages that are alike: byte for byte what the usual way writes, or left to it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire._ground.errors import Refused
from oncewire._ground.jetstream import Outgoing, protocol
from oncewire._ground.jetstream.plain import Numbered, plain_frames
from oncewire._ground.jetstream.publish import encode_header

pytestmark = pytest.mark.usefixtures("loops")

TEXT = st.text(max_size=20)
SUBJECT = st.sampled_from(["evt.a.b", "evt.ü.x", "x"])
EXTRA = Numbered("Nats-Batch-Id: b\r\nNats-Batch-Sequence: ", "\r\n", "\r\n", "\r\nNats-Batch-Commit: 1\r\n")
REPLY = Numbered("_INBOX.a.", ".0.$FI", ".1.$FI", ".2.$FI")


@dataclass(frozen=True)
class Case:
    messages: list[Outgoing]
    first: int
    extra: Numbered | None
    reply: Numbered | None
    step: int

    def usual(self) -> list[bytes]:
        """What the usual way writes."""
        count = len(self.messages)
        extras = self.extra.texts(self.first, count) if self.extra else [""] * count
        replies = self.reply.texts(self.first, count) if self.reply else [""] * count
        return list(map(usual, self.messages, extras, replies))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly alike, with ids and traces of any kind among them."""
    subject = draw(SUBJECT)
    plain = st.text("abc019.-", min_size=1, max_size=8)
    names = st.one_of(plain, plain, plain, TEXT)
    messages = draw(st.lists(st.builds(Outgoing, st.just(subject), st.binary(max_size=30), names), max_size=5))
    messages = [msgspec.structs.replace(one, traceparent=draw(names)) for one in messages]
    extra, reply = draw(st.sampled_from([None, EXTRA])), draw(st.sampled_from([None, REPLY]))
    return Case(messages, draw(st.sampled_from([1, 2, 9, 98])), extra, reply, draw(st.integers(1, 6)))


def usual(message: Outgoing, extra: str, reply: str) -> bytes:
    header = encode_header(message, extra)
    return protocol.encode_pub(protocol.encode_subject(message.subject), reply.encode(), message.payload, header)


@given(cases())
def test_they_are_what_the_usual_way_writes(case: Case) -> None:
    found = plain_frames(case.messages, first=case.first, extra=case.extra, reply=case.reply, step=case.step)
    if found is None:
        return
    expected = case.usual()
    assert [b"".join(expected[at : at + case.step]) for at in range(0, len(expected), case.step)] == found.pieces
    count = len(case.messages)
    extras = case.extra.texts(case.first, count) if case.extra else [""] * count
    headers = list(map(encode_header, case.messages, extras))
    sizes = [len(header) + len(one.payload) for header, one in zip(headers, case.messages, strict=True)]
    assert max(sizes) == found.longest


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, []),
        (1, ["_INBOX.a.9.2.$FI"]),
        (2, ["_INBOX.a.9.0.$FI", "_INBOX.a.10.2.$FI"]),
        (4, ["_INBOX.a.9.0.$FI", "_INBOX.a.10.1.$FI", "_INBOX.a.11.1.$FI", "_INBOX.a.12.2.$FI"]),
    ],
)
def test_the_first_and_the_last_have_endings_of_their_own(count: int, expected: list[str]) -> None:
    assert expected == REPLY.texts(9, count)


PLAIN = Outgoing("evt.a.b", b"{}", "fx.1", traceparent="00-a-b-01")


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(PLAIN, msg_id=""),
        msgspec.structs.replace(PLAIN, traceparent=""),
        msgspec.structs.replace(PLAIN, subject="evt.a.c"),
        msgspec.structs.replace(PLAIN, headers={"A": "b"}),
        msgspec.structs.replace(PLAIN, expected_stream="S"),
        msgspec.structs.replace(PLAIN, expected_last_sequence=0),
        msgspec.structs.replace(PLAIN, expected_last_subject_sequence=0),
        msgspec.structs.replace(PLAIN, msg_id="a\r\nNats-Expected-Stream: X"),
        msgspec.structs.replace(PLAIN, traceparent="a\nb"),
        msgspec.structs.replace(PLAIN, msg_id="ä"),
    ],
)
def test_one_that_is_not_alike_leaves_all_to_the_usual_way(other: Outgoing) -> None:
    assert plain_frames([PLAIN, other], first=1, extra=EXTRA, reply=None) is None


def test_plain_ones_are_written_here() -> None:
    found = plain_frames([PLAIN, PLAIN], first=1, extra=EXTRA, reply=REPLY)
    assert found is not None
    assert [b"".join(Case([PLAIN, PLAIN], 1, EXTRA, REPLY, 1).usual())] == found.pieces


def test_a_subject_that_nobody_could_publish_to_is_refused_here_too() -> None:
    with pytest.raises(Refused):
        plain_frames([msgspec.structs.replace(PLAIN, subject="a b")], first=1, extra=EXTRA, reply=None)
