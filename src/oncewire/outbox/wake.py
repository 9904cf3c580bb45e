"""Waking an idle relay: it says in the database that it sleeps, and the next writer notifies it.

A notification in every transaction would serialise all commits, so writers send one only while a relay says that it is
idle. That only shortens the wait: an idle relay still looks every poll interval. A connection of its own listens; where
notifications do not arrive (a pooler that hands out connections per transaction), everything works by polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from oncewire._ground.database import postgres
from oncewire._ground.errors import OncewireError
from oncewire.outbox.rules import retry_ms
from oncewire.outbox.source import transaction

log = logging.getLogger("oncewire.outbox")

CHANNEL: Final = "oncewire_outbox"
SELF_TEST_S: Final = 2.0
TEST_AGAIN_S: Final = 60.0
ADVERTISED_MS_MIN: Final = 2_000
ADVERTISED_MS_MAX: Final = 60_000
"""For so long at most writers go on to notify a relay that has died in its sleep."""
CHECK_S: Final = 10.0

SQL = postgres.queries("oncewire.outbox")


class Wake:
    """The relay's ear. `run` keeps it open; until it hears, waiting is for the full time."""

    def __init__(self, url: str, *, schema: str, poll_ms: int) -> None:
        self._url = url
        self._schema = schema
        self._poll_ms = poll_ms
        self._sleepers: set[asyncio.Event] = set()
        self._advertised_ms = min(max(ADVERTISED_MS_MIN, 2 * poll_ms), ADVERTISED_MS_MAX)
        self._advertised_until = 0.0
        self._lost = asyncio.Event()
        self._is_deaf = False
        self.hears = False
        """Whether notifications arrive here."""
        self.heard = 0
        """Notifications so far. Who is about to sleep notes it before the last look, or one in between is lost."""
        self.sleep_ms_max = min(poll_ms, self._advertised_ms // 2)
        """Longer than that nobody may sleep: writers would no longer notify."""
        self.is_known = asyncio.Event()
        """Set when the first self-test has decided."""

    async def run(self) -> None:
        """Listen for ever; come back when the connection is lost."""
        failures = 0
        while True:
            try:
                async with postgres.connected(self._url, cache_statements=False) as connection:
                    await self._listen(connection)
                    failures = 0
                    if self.hears:
                        await self._stay(connection)
            except OncewireError as error:
                failures += 1
                log.info("listening for wake-ups was cut off: %s", error.message)
            finally:
                self.hears = False
            await asyncio.sleep(TEST_AGAIN_S if self._is_deaf else retry_ms(failures or 1) / 1000)

    async def _listen(self, connection: Any) -> None:
        self._lost.clear()
        connection.add_termination_listener(lambda _: self._lost.set())
        await connection.add_listener(CHANNEL, self._on_notification)
        self.hears = await self._is_heard(connection)
        self.is_known.set()
        was_deaf, self._is_deaf = self._is_deaf, not self.hears
        if self._is_deaf and not was_deaf:
            log.warning("LISTEN does not work here (a pooler in transaction mode?): polling every %d ms", self._poll_ms)

    async def _is_heard(self, connection: Any) -> bool:
        """A notification from a second connection must arrive."""
        heard = asyncio.Event()
        own = f"oncewire_test_{connection.get_server_pid()}"
        await connection.add_listener(own, lambda *_: heard.set())
        async with postgres.connected(self._url, cache_statements=False) as other:
            await other.execute(f"NOTIFY {own}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SELF_TEST_S):
                await heard.wait()
        return heard.is_set()

    async def _stay(self, connection: Any) -> None:
        """Until the connection ends; a socket that died without a word shows at the next look."""
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._lost.wait()
            if not self._lost.is_set():
                await connection.execute("SELECT 1")

    def _on_notification(self, *_: object) -> None:
        self.heard += 1
        for sleeper in self._sleepers:
            sleeper.set()

    # ---- for those who wait

    async def advertise(self, connection: Any) -> None:
        """Tell writers that a wake-up is welcome. Look once more afterwards: what was committed before did not wake."""
        now = time.monotonic()
        if self.hears and now + self.sleep_ms_max / 1000 > self._advertised_until:
            self._advertised_until = now + self._advertised_ms / 1000
            async with transaction(connection, SQL["begin_claim"], self._schema):
                await connection.execute(SQL["advertise"], self._advertised_ms)

    async def work_has_come(self, connection: Any) -> None:
        """Writers need not notify: this relay is awake."""
        if self._advertised_until:
            self._advertised_until = 0.0
            async with transaction(connection, SQL["begin_claim"], self._schema):
                await connection.execute(SQL["work_has_come"])

    async def sleep(self, wait_ms: float, heard: int) -> bool:
        """For so long, or until woken; returns whether it was woken, be it since `heard` was read."""
        if self.heard != heard:
            return True
        sleeper = asyncio.Event()
        self._sleepers.add(sleeper)
        try:
            async with asyncio.timeout(wait_ms / 1000):
                return await sleeper.wait()
        except TimeoutError:
            return False
        finally:
            self._sleepers.discard(sleeper)
