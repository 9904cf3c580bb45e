"""Frames of messages that are alike: byte for byte what the usual way writes, or left to it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncewire.errors import Refused
from oncewire.jetstream import Outgoing, protocol
from oncewire.jetstream.plain import plain_frames
from oncewire.jetstream.publish import encode_header

pytestmark = pytest.mark.usefixtures("loops")

TEXT = st.text(max_size=20)
SUBJECT = st.sampled_from(["evt.a.b", "evt.ü.x", "x"])
EXTRA = "Nats-Batch-Id: b\r\nNats-Batch-Sequence: 1\r\n"


@dataclass(frozen=True)
class Case:
    messages: list[Outgoing]
    extras: list[str]
    replies: list[str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly alike, with ids and traces of any kind among them."""
    subject = draw(SUBJECT)
    plain = st.text("abc019.-", min_size=1, max_size=8)
    names = st.one_of(plain, plain, plain, TEXT)
    messages = draw(st.lists(st.builds(Outgoing, st.just(subject), st.binary(max_size=30), names), max_size=5))
    messages = [msgspec.structs.replace(one, traceparent=draw(names)) for one in messages]
    replies = draw(st.lists(st.sampled_from(["", "_INBOX.a.1"]), min_size=len(messages), max_size=len(messages)))
    return Case(messages, [EXTRA] * len(messages), replies)


def usual(message: Outgoing, extra: str, reply: str) -> bytes:
    header = encode_header(message, extra)
    return protocol.encode_pub(protocol.encode_subject(message.subject), reply.encode(), message.payload, header)


@given(cases())
def test_they_are_what_the_usual_way_writes(case: Case) -> None:
    found = plain_frames(case.messages, case.extras, case.replies)
    if found is None:
        return
    expected = list(map(usual, case.messages, case.extras, case.replies))
    assert b"".join(expected) == b"".join(found.pieces)
    sizes = [len(encode_header(one, EXTRA)) + len(one.payload) for one in case.messages]
    assert max(sizes) == found.longest


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
    assert plain_frames([PLAIN, other], [EXTRA, EXTRA], ["", ""]) is None


def test_plain_ones_are_written_here() -> None:
    found = plain_frames([PLAIN, PLAIN], [EXTRA, EXTRA], ["", "_INBOX.a.1"])
    assert found is not None
    assert usual(PLAIN, EXTRA, "") + usual(PLAIN, EXTRA, "_INBOX.a.1") == b"".join(found.pieces)


def test_a_subject_that_nobody_could_publish_to_is_refused_here_too() -> None:
    with pytest.raises(Refused):
        plain_frames([msgspec.structs.replace(PLAIN, subject="a b")], [EXTRA], [""])
