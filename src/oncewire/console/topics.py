"""The broker's topics, as its API shows them to every client: partitions with their owners, groups with their lag."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from oncewire._ground.errors import AuthenticationFailed, InvalidSetting, NotFound, OncewireError, PermissionDenied
from oncewire.broker.client import BrokerClient
from oncewire.broker.client.calls import UntrustedCertificate
from oncewire.broker.engine import TopicShown
from oncewire.console import rules

TOPICS_MAX: Final = 100
"""Looked into again and again; of what goes beyond only the names are shown, and one at a time is looked into."""
PARTITIONS_MAX: Final = 256
GROUPS_MAX: Final = 200
AT_ONCE_MAX: Final = 8


class Topics:
    """Asks one broker. `url` is shown to people."""

    def __init__(self, client: BrokerClient, url: str) -> None:
        self._client = client
        self.url = url
        self.rows: list[dict[str, Any]] = []
        self.names = 0

    async def look(self) -> None:
        names = await self._client.topics()
        gate = asyncio.Semaphore(AT_ONCE_MAX)

        async def one(name: str) -> dict[str, Any] | None:
            async with gate:
                try:
                    return _row(await self._client.topic(name))
                except NotFound:
                    return None  # deleted since

        found = await asyncio.gather(*(one(name) for name in names[:TOPICS_MAX]))
        rest = [{"name": rules.shown(name), "is_brief": True} for name in names[TOPICS_MAX : 10 * TOPICS_MAX]]
        self.rows = [row for row in found if row is not None] + rest
        self.names = len(names)

    async def detail(self, name: str) -> dict[str, Any]:
        return _row(await self._client.topic(name))

    def forget(self) -> None:
        self.rows = []


def _row(topic: TopicShown) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(topic)
    row["name"] = rules.shown(topic.name)
    row["partitions"] = row["partitions"][:PARTITIONS_MAX]
    row["groups"] = [group | {"name": rules.shown(group["name"])} for group in row["groups"][:GROUPS_MAX]]
    return row


def cause(error: OncewireError) -> tuple[str, str]:
    """What is wrong with the broker, and what to do."""
    if isinstance(error, UntrustedCertificate):
        return error.message, "Name who signs it: console.broker_ca (ONCEWIRE_CONSOLE_BROKER_CA)."
    if isinstance(error, InvalidSetting):
        return error.message, error.hint
    if isinstance(error, AuthenticationFailed | PermissionDenied):
        return error.message, "Give the console a key that may read: console.broker_key (ONCEWIRE_CONSOLE_BROKER_KEY)."
    return error.message, "Start it with `oncewire broker run`, or set console.broker_url."
