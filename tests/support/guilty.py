"""Handlers that misbehave, each in its own way, and the cause that the dead letter of its input must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from oncewire.errors import Corrupt, NotConnected, Unavailable


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


class Bare(Exception):
    def __init__(self) -> None:
        """Without Exception's own."""


ERRORS = {
    "nul": Guilt(raising(ValueError("unknown a\0b")), "ValueError: unknown a b"),
    "surrogate": Guilt(raising(ValueError("half \ud800 a character")), "ValueError: half a character"),
    "lines": Guilt(raising(ValueError("one\r\ntwo\x1b[31m")), "ValueError: one two [31m"),
    "long": Guilt(raising(ValueError("x" * 10_000_000)), "ValueError: xxx"),
    "unreadable": Guilt(raising(Unreadable()), "Unreadable"),
    "numeric": Guilt(raising(Numeric()), "Numeric"),
    "bare": Guilt(raising(Bare()), "Bare"),
    "recursion": Guilt(raising(RecursionError("too deep")), "RecursionError: too deep"),
    "memory": Guilt(raising(MemoryError()), "MemoryError"),
    "stop": Guilt(raising(StopIteration("end")), ""),
    "unavailable": Guilt(raising(Unavailable("the bank is closed\0")), "Unavailable: the bank is closed"),
    "away": Guilt(raising(NotConnected("my own database is away")), "NotConnected: my own database is away"),
    "corrupt": Guilt(raising(Corrupt("my own file is broken")), "Corrupt: my own file is broken"),
}
"""Exceptions of every kind, and texts that no store, header or log can hold."""
