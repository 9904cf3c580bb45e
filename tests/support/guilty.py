"""Handlers that misbehave, each in its own way, and the cause that the dead letter of its input must name."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

from oncewire._ground.errors import Corrupt, NotConnected, Unavailable
from oncewire.agent import Effect, Retry, Terminate


class Guilt(NamedTuple):
    """What a handler does with its input, and what the letter says about it."""

    act: Callable[[], Any]
    cause: str


def raising(error: BaseException | type[BaseException]) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Numeric(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Bare(Exception):
    def __init__(self) -> None:
        """Without Exception's own."""


ERRORS = {
    "nul": Guilt(raising(ValueError("unknown a\0b")), "ValueError: unknown a b"),
    "surrogate": Guilt(raising(ValueError("half \ud800 a character")), "ValueError: half a character"),
    "lines": Guilt(raising(ValueError("one\r\ntwo\x1b[31m")), "ValueError: one two [31m"),
    "long": Guilt(raising(ValueError("x" * 100_000)), "ValueError: xxx"),
    "unreadable": Guilt(raising(Unreadable()), "Unreadable"),
    "numeric": Guilt(raising(Numeric()), "Numeric"),
    "leaving": Guilt(raising(Leaving()), "Leaving"),
    "bare": Guilt(raising(Bare()), "Bare"),
    "recursion": Guilt(raising(RecursionError("too deep")), "RecursionError: too deep"),
    "memory": Guilt(raising(MemoryError()), "MemoryError"),
    "stop": Guilt(raising(StopIteration("end")), ""),
    "unavailable": Guilt(raising(Unavailable("the bank is closed\0")), "Unavailable: the bank is closed"),
    "away": Guilt(raising(NotConnected("my own database is away")), "NotConnected: my own database is away"),
    "corrupt": Guilt(raising(Corrupt("my own file is broken")), "Corrupt: my own file is broken"),
}
"""Exceptions of every kind, and texts that no store, header or log can hold."""


def retrying(*arguments: object) -> Callable[[], Any]:
    def act() -> Any:
        raise Retry(*arguments)  # type: ignore[arg-type]

    return act


_AFTER = "Refused: Retry: after_s is a number of seconds from 0 to 31622400 (366 days) or a timedelta, not "
RETRIES = {
    "reason": Guilt(retrying("the bank is closed"), "Retry: the bank is closed"),
    "digits": Guilt(retrying("5"), "Retry: 5"),
    "timedelta": Guilt(retrying(timedelta(milliseconds=10), "soon"), "Retry: soon"),
    "swapped": Guilt(retrying("again", 0.2), "Refused: Retry: reason is text, not 0.2"),
    "infinite": Guilt(retrying(float("inf")), f"{_AFTER}inf"),
    "nan": Guilt(retrying(float("nan")), f"{_AFTER}nan"),
    "negative": Guilt(retrying(-1), f"{_AFTER}-1"),
    "huge": Guilt(retrying(1e10), f"{_AFTER}10000000000.0"),
    "flag": Guilt(retrying(True), f"{_AFTER}True"),
    "list": Guilt(retrying([1]), f"{_AFTER}[1]"),
    "no text": Guilt(lambda: Terminate(5), "Refused: Terminate: reason is text, not 5"),  # type: ignore[arg-type]
}
"""Delays and reasons that cannot be meant, or that are meant otherwise."""


class PanicException(BaseException):
    """What PyO3 raises for a panic in Rust."""


class Payload:
    """Its own code runs when it is written."""

    def model_dump(self, **_: object) -> dict[str, Any]:
        sys.exit(6)


def cancelled_inside() -> None:
    """An inner loop whose task was cancelled: it has none of the agent's."""

    async def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, cancel()).result()


ENDS = {
    "exit": Guilt(lambda: sys.exit(5), "SystemExit: 5"),
    "exit well": Guilt(lambda: sys.exit(0), "SystemExit: 0"),
    "exit bare": Guilt(lambda: sys.exit(), "SystemExit"),
    "exit text": Guilt(lambda: sys.exit("usage: a\0b"), "SystemExit: usage: a b"),
    "panic": Guilt(raising(PanicException("index out of bounds")), "PanicException: index out of bounds"),
    "cancelled": Guilt(raising(asyncio.CancelledError("inner")), "CancelledError: inner"),
    "inner loop": Guilt(cancelled_inside, "CancelledError"),
    "interrupt": Guilt(raising(KeyboardInterrupt), "KeyboardInterrupt"),
    "closing": Guilt(raising(GeneratorExit), "GeneratorExit"),
    "group": Guilt(
        raising(BaseExceptionGroup("two", [SystemExit(1), ValueError("b")])),
        "BaseExceptionGroup: two (2 sub-exceptions)",
    ),
    "payload": Guilt(lambda: Effect("evt.default.demo.guilty", Payload()), "SystemExit: 6"),
}
"""Ends of a handler that are no Exceptions."""
