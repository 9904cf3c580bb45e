"""A gateway built wrongly on purpose: `python -m tests.faults.gateway_mutant NAME run …`. Clients must notice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from oncewire.cli.gateway import gateway
from oncewire.gateway.rooms import Room

_join = Room.join


def resumes_one_too_early(self: Room, member: Any, after: int | None, *rest: Any, **more: Any) -> Any:
    """Doubles the message that a client resumes behind."""
    return _join(self, member, max(0, after - 1) if after else after, *rest, **more)


def forgets_to_replay(self: Room, member: Any, after: int | None, *rest: Any, **more: Any) -> Any:
    """Leaves out what a client has missed."""
    return _join(self, member, None if after else after, *rest, **more)


MUTANTS: dict[str, Callable[..., Any]] = {
    "resumes_one_too_early": resumes_one_too_early,
    "forgets_to_replay": forgets_to_replay,
}


if __name__ == "__main__":
    Room.join = MUTANTS[sys.argv.pop(1)]  # type: ignore[method-assign]
    gateway()
