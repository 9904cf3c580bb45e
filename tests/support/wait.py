"""Waiting in tests: on a condition with a deadline, never for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

DEADLINE_S = 30.0
"""Only bounds a hang: no test asserts how long something takes."""
LOOK_S = 0.01


async def until(condition: Callable[[], Any], what: str = "", *, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until the condition is true; return what it gave."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        await asyncio.sleep(LOOK_S)
    return found


async def until_async(
    condition: Callable[[], Awaitable[Any]], what: str = "", *, deadline_s: float = DEADLINE_S
) -> Any:
    """The same for a condition that must be asked for."""
    deadline = time.monotonic() + deadline_s
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        await asyncio.sleep(LOOK_S)
    return found


async def within(awaitable: Awaitable[Any], deadline_s: float = DEADLINE_S) -> Any:
    """Await, but never for ever."""
    async with asyncio.timeout(deadline_s):
        return await awaitable
