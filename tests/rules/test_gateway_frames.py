"""Frames as clients that are not ours read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oncewire._ground.errors import Overloaded
from oncewire.gateway import frames
from tests.support.gateway import reads_as_envelope
from tests.support.gatewaysim import stored, unframed

SENT: dict[Callable[..., bytes], list[bytes]] = {
    frames.hello_frame: [frames.hello_frame("connection")],
    frames.joined_frame: [frames.joined_frame("c", "e1", 7), frames.joined_frame("c", None, 0)],
    frames.left_frame: [frames.left_frame("c")],
    frames.heartbeat_frame: [frames.heartbeat_frame(1_700_000_000_000)],
    frames.control_frame: [frames.control_frame("c", 7, "e1")],
    frames.error_frame: [frames.error_frame(Overloaded("no"), "c", "join_room"), frames.error_frame(Overloaded("no"))],
}


def test_every_frame_is_described_here() -> None:
    """A new frame must pass the test below too."""
    builders = {one for name, one in vars(frames).items() if name.endswith("_frame") and name[0] not in "_r"}
    assert builders == set(SENT)


@pytest.mark.parametrize("sent", [one for some in SENT.values() for one in some])
def test_the_reference_client_takes_no_frame_for_an_envelope(sent: bytes) -> None:
    """It takes every frame with a conversationId and a truthy `sequence` for one, and throws at what is none."""
    (frame,) = unframed(sent)
    assert not reads_as_envelope(frame)


def test_the_reference_client_takes_an_envelope_for_one() -> None:
    """Or the test above would prove nothing."""
    envelope = stored(1, 7, "e1", "m7", is_numbered=True)
    assert [True, True] == [reads_as_envelope(one) for one in unframed(envelope.frame + envelope.replay_frame)]
