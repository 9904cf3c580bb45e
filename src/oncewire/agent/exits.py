"""The way into one stream: publishes many effects by fast ingest or as atomic batches, whichever is quicker there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from oncewire._ground.errors import OncewireError, Refused
from oncewire._ground.fields import distinct
from oncewire._ground.jetstream import Client, Outgoing, PubAck
from oncewire._ground.jetstream.protocol import MSG_ID
from oncewire._ground.jetstream.publish import Outcome
from oncewire.agent.ways import LOOK, Ways


class Exit:
    """One stream that takes both. Each message has an id, so what broke half-way may be sent again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ways = Ways()
        self._reconnects = client.connection.reconnects
        self._turn = asyncio.Lock()

    async def publish(self, messages: Sequence[Outgoing]) -> list[Outcome]:
        """One outcome per message; where fast ingest took them, each is told the sequence of the last."""
        async with self._turn:
            self._notice_reconnect()
            looked = await self._look(messages[:LOOK]) if self._ways.wants_look() else []
        rest = messages[len(looked) :]
        return looked + await self._send(rest, is_atomic=self._ways.choose_atomic()) if rest else looked

    def _notice_reconnect(self) -> None:
        """Another server may do it otherwise."""
        reconnects = self._client.connection.reconnects
        if reconnects != self._reconnects:
            self._reconnects, self._ways = reconnects, Ways()

    async def _look(self, messages: Sequence[Outgoing]) -> list[Outcome]:
        """Send them by fast ingest, and see when each of them was stored."""
        outcomes, times_ns = await self._ingest(messages), list[int]()
        last = outcomes[-1]
        if isinstance(last, PubAck):
            first = max(1, last.sequence - len(messages) + 1)
            ids = {one.msg_id for one in messages}
            with contextlib.suppress(OncewireError):
                found = await self._client.get_batch(last.stream, sequence=first, count=len(messages))
                times_ns = [one.timestamp_ns for one in found if one.headers.get(MSG_ID) in ids]
        self._ways.looked(times_ns)
        return outcomes

    async def _send(self, messages: Sequence[Outgoing], *, is_atomic: bool) -> list[Outcome]:
        ways, began = self._ways, time.monotonic()
        outcomes = await (self._client.publish_all(messages, raw=True) if is_atomic else self._ingest(messages))
        if all(isinstance(outcome, PubAck) for outcome in distinct(outcomes)):
            ways.learn(len(messages), (time.monotonic() - began) * 1e6, is_atomic=is_atomic)
        return outcomes

    async def _ingest(self, messages: Sequence[Outgoing]) -> list[Outcome]:
        try:
            ingested = await self._client.publish_fast(messages, raw=True)
        except Refused:  # one of them can never be published: who asks for each is told which
            return await self._client.publish_all(messages, raw=True)
        except OncewireError as error:
            return [error] * len(messages)
        return [PubAck(ingested.stream, ingested.sequence)] * len(messages)
