"""What nodes of the broker say to each other: an error arrives as the class that it was."""

from __future__ import annotations

import pytest

from oncewire._ground.errors import (
    AuthenticationFailed,
    Conflict,
    ContractViolation,
    Corrupt,
    NotConnected,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    Overloaded,
    ProtocolViolation,
    Refused,
    TimedOut,
    TooLarge,
    Unavailable,
)
from oncewire.broker.engine import BufferFull, TooManyReaders
from oncewire.broker.jetstream.ops import Moved, Unsent, error_of, failure_of

KEPT = [
    Conflict("m"), ContractViolation("m"), Corrupt("m"), NotFound("m"), OutcomeUnknown("m", retry_after_s=0.5),
    Overloaded("m", retry_after_s=0.5), Refused("m"), TooLarge("m"), TooManyReaders("m", retry_after_s=0.5),
    Unavailable("m", retry_after_s=0.5), BufferFull("m", reason="partition_buffer_full", retry_after_s=0.5),
    Moved("m", node="n2"),
]  # fmt: skip


@pytest.mark.parametrize("error", KEPT, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_raised(error: OncewireError) -> None:
    arrived = error_of(failure_of(error))
    assert (type(error), "m") == (type(arrived), arrived.message)
    for name in ("retry_after_s", "reason", "node"):
        assert getattr(error, name, None) == getattr(arrived, name, None)


@pytest.mark.parametrize(
    ("error", "branch"),
    [
        (AuthenticationFailed("m"), Refused),
        (NotConnected("m"), Unavailable),
        (TimedOut("m"), Unavailable),
        (Unsent("m"), Unavailable),
        (ProtocolViolation("m"), Corrupt),
        (OncewireError("m"), Unavailable),
    ],
)
def test_an_error_that_nodes_do_not_tell_apart_arrives_as_its_branch(
    error: OncewireError, branch: type[OncewireError]
) -> None:
    assert branch is type(error_of(failure_of(error)))
