"""Telling people: a log line, a metric and, where one is set, a hook for each thing that went wrong.

The hook is a command that gets one JSON object on its standard input, or an address that gets it by POST. It may be
slow or broken: it has ten seconds, and after a failure it is left alone for a minute. Letters are stored before it is
called; what a killed process has not told is told by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from oncewire._ground.metrics import Tally

log = logging.getLogger("oncewire.dlq")

HOOK_S_MAX: Final = 10.0
QUIET_S: Final = 60.0
ITEMS_MAX: Final = 50
"""So many items are spelled out in one alert; `count` says how many there are."""


class Alert(msgspec.Struct, frozen=True):
    """What the hook gets. `kind`: dead_letters, bad_request, exhausted, nobody_pulls, dlq_full."""

    kind: str
    text: str
    count: int
    items: list[dict[str, Any]]


class Alerts:
    """Made by the service."""

    def __init__(self, *, command: str = "", url: str = "") -> None:
        self._command = shlex.split(command)
        self._url = url
        self._quiet_until = 0.0
        self.told = Tally(1)
        self.failures = 0

    async def tell(self, kind: str, text: str, items: Sequence[dict[str, Any]]) -> None:
        """Log it, count it, call the hook. Never raises."""
        log.warning("%s: %s", kind, text)
        self.told.add(kind)
        if not (self._command or self._url) or time.monotonic() < self._quiet_until:
            return
        body = msgspec.json.encode(Alert(kind, text, len(items), list(items[:ITEMS_MAX])))
        try:
            async with asyncio.timeout(HOOK_S_MAX):
                if self._command:
                    await self._run(body)
                if self._url:
                    await asyncio.to_thread(self._post, body)
        except (OSError, TimeoutError, ValueError) as error:
            self._quiet_until = time.monotonic() + QUIET_S
            self.failures += 1
            told = str(error) or "it took too long"
            log.error("the alert hook failed and is left alone for %d s: %s", QUIET_S, told)

    async def _run(self, body: bytes) -> None:
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet
        )
        try:
            await process.communicate(body)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise OSError(f"{self._command[0]} ended with {process.returncode}")

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310 - http(s) only, by its setting
        with urllib.request.urlopen(request, timeout=HOOK_S_MAX) as answer:  # noqa: S310
            answer.read(1)
