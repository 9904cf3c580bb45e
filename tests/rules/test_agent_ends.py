"""How a handler's end counts, whatever it raised."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from oncewire.agent import Retry
from oncewire.agent.ends import TRACEBACK_CHARS_MAX, cause_of, failure_of, is_signal, reason_of, traceback_of


class PanicException(BaseException):
    """What PyO3 raises for a panic in Rust."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("a\0b"), "ValueError: a b"),
        (Retry("later"), "Retry: later"),
        (SystemExit(5), "SystemExit: 5"),
        (SystemExit(), "SystemExit"),
        (PanicException("index"), "PanicException: index"),
        (asyncio.CancelledError(), "CancelledError"),
        (BaseExceptionGroup("two", [GeneratorExit()]), "BaseExceptionGroup: two (1 sub-exception)"),
    ],
    ids=repr,
)
def test_an_input_fails_with_what_its_handler_raised(error: BaseException, reason: str) -> None:
    failure = failure_of(error)

    assert (error, reason) == (cause_of(failure), reason_of(failure))


def test_an_exception_is_its_own_failure() -> None:
    error = ValueError("x")

    assert error is failure_of(error)


def by_statement() -> None:
    raise KeyboardInterrupt


def by_signal() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        """Until it comes."""


@pytest.mark.parametrize(("act", "expected"), [(by_statement, False), (by_signal, True)])
def test_ctrl_c_is_told_from_a_handler_that_raises_the_same(act: Callable[[], None], expected: bool) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        act()

    assert expected == is_signal(caught.value)


def test_only_an_interrupt_can_be_a_signal() -> None:
    assert not is_signal(SystemExit(5))


def test_a_traceback_is_text_that_every_log_can_hold() -> None:
    def fail() -> None:
        raise ValueError("half \ud800 a\0b" + "x" * 100_000)

    with pytest.raises(ValueError, match="half") as caught:
        fail()
    shown = traceback_of(caught.value)

    assert (TRACEBACK_CHARS_MAX, False) == (len(shown.encode()), "\0" in shown)
    with pytest.raises(ValueError, match="short") as caught:
        raise ValueError("short \ud800")
    assert "in test_a_traceback_is_text_that_every_log_can_hold" in traceback_of(caught.value)
