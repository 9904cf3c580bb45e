"""What a handler raises to say what should become of its input: checked where it is made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from oncewire._ground.errors import ContractViolation, Refused
from oncewire._ground.jetstream.pull import NAK_DELAY_S_MAX, nak_verb
from oncewire.agent import Retry, Terminate
from oncewire.agent.effects import DELAY_S_MAX


@pytest.mark.parametrize(
    ("arguments", "after_s", "text"),
    [
        ((), None, "retry"),
        ((None, "later"), None, "later"),
        ((0,), 0.0, "retry"),
        ((2.5,), 2.5, "retry"),
        ((timedelta(minutes=5),), 300.0, "retry"),
        ((DELAY_S_MAX,), DELAY_S_MAX, "retry"),
        (("the bank is closed",), None, "the bank is closed"),
        (("5",), None, "5"),
        ((30, "the bank is closed"), 30.0, "the bank is closed"),
    ],
)
def test_a_retry_says_when_and_why(arguments: tuple[Any, ...], after_s: float | None, text: str) -> None:
    retry = Retry(*arguments)

    assert (after_s, text) == (retry.after_s, str(retry))


@pytest.mark.parametrize(
    "after_s",
    [
        float("nan"),
        float("inf"),
        -1,
        -0.001,
        True,
        DELAY_S_MAX + 1,
        1e300,
        timedelta(seconds=-1),
        timedelta.max,
        b"5",
        [],
    ],
    ids=repr,
)
def test_a_retry_refuses_a_delay_that_nobody_can_wait_for(after_s: Any) -> None:
    with pytest.raises(
        Refused, match=r"Retry: after_s is a number of seconds from 0 to 31622400 \(366 days\)"
    ) as caught:
        Retry(after_s)
    assert caught.value.message.endswith(f"not {after_s!r}")


def test_a_retry_refuses_its_arguments_the_other_way_round() -> None:
    wrong: Any = 0.2
    with pytest.raises(Refused, match=r"Retry: reason is text, not 0\.2"):
        Retry("again", wrong)
    with pytest.raises(Refused, match=r"Retry: after_s is a number of seconds .* not 'again'"):
        Retry("again", "later")


def test_a_long_value_is_cut_where_an_error_quotes_it() -> None:
    with pytest.raises(Refused) as caught:
        Retry(["x" * 1_000])  # type: ignore[arg-type]
    assert len(caught.value.message) < 250


def test_a_reason_to_terminate_is_text() -> None:
    with pytest.raises(Refused, match="Terminate: reason is text, not 5"):
        Terminate(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay_s", [float("nan"), float("inf"), -1.0, NAK_DELAY_S_MAX + 1])
def test_a_delay_that_the_server_cannot_read_never_goes_out(delay_s: float) -> None:
    """It would redeliver at once, until the deliveries are used up."""
    with pytest.raises(ContractViolation, match="a nak's delay is from 0 to"):
        nak_verb(delay_s)


def test_every_delay_of_a_retry_can_be_sent() -> None:
    assert b'-NAK {"delay": 31622400000000000}' == nak_verb(Retry(DELAY_S_MAX).after_s or 0.0)
