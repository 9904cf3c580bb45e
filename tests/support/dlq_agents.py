"""Agents for tests of dead letters: one handler that does, or fails, what it is told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from oncewire._ground.contracts import blocks
from oncewire._ground.jetstream import Client
from oncewire._ground.ledger.sqlite import SqliteStore
from oncewire.agent import Agent
from oncewire.agent.run import Runner, running
from tests.support.streams import unique

EVENTS = "MESHFORGE_EVENTS"


class Work:
    """An agent with one handler that counts what it did, and a store of its own."""

    def __init__(self, folder: Path, *, name: str = "", event: str = "", **options: Any) -> None:
        self.agent = Agent(name or unique("ag"), tenant="default", workspace="dlq", **options)
        self.event = event or unique("e")
        self.subject = f"evt.default.dlq.{self.event}"
        self.path = str(folder / f"{self.agent.name}.db")
        self.seen: list[dict[str, Any]] = []
        self.problem: Exception | None = None
        self.agent.on(self.subject)(self._handle)

    def _handle(self, ctx: Any, payload: dict[str, Any]) -> None:
        if self.problem is not None:
            raise self.problem
        ctx.tx.execute("CREATE TABLE IF NOT EXISTS done (n)")
        self.seen.append(payload)

    @property
    def consumer(self) -> str:
        return f"default_dlq_{self.agent.name}_consumer"

    @property
    def full_name(self) -> str:
        return blocks.agent_name("default", "dlq", self.agent.name)

    @contextlib.asynccontextmanager
    async def running(self, client: Client) -> AsyncIterator[Runner]:
        async with running(self.agent, client, SqliteStore(self.path)) as runner:
            yield runner

    async def prepare(self, client: Client) -> None:
        """Its durable and its ownership are there, nothing runs."""
        async with self.running(client):
            pass

    async def publish(self, client: Client, n: int) -> int:
        body = {"type": "Made", "payload": {"n": n}}
        return (await client.publish(self.subject, body, msg_id=f"{self.event}-{n}")).sequence
