"""The way into one stream: publishes many effects by fast ingest or as atomic batches, and learns which is quicker.

A trial has the stream for itself: what waits behind another block would tell of that one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from oncewire.agent.ways import TRIAL, Ways
from oncewire.errors import OncewireError, Refused
from oncewire.fields import distinct
from oncewire.jetstream import Client, Outgoing, PubAck
from oncewire.jetstream.publish import Outcome


class Exit:
    """One stream that takes both. Each message has an id, so what broke half-way may be sent again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ways = Ways()
        self._reconnects = client.connection.reconnects
        self._turn = asyncio.Lock()
        self._on_their_way = 0
        self._is_quiet = asyncio.Event()

    async def publish(self, messages: Sequence[Outgoing]) -> list[Outcome]:
        """One outcome per message; where fast ingest took them, each is told the sequence of the last."""
        async with self._turn:
            self._notice_reconnect()
            tried = await self._try_both(messages) if self._ways.wants_trial(len(messages)) else []
        rest = messages[len(tried) :]
        if not rest:
            return tried
        self._on_their_way += 1
        try:
            sent = await self._send(rest, is_atomic=self._ways.choose_atomic(len(rest)))
        finally:
            self._on_their_way -= 1
            if not self._on_their_way:
                self._is_quiet.set()
        return tried + sent

    def _notice_reconnect(self) -> None:
        """Another server may do it otherwise."""
        reconnects = self._client.connection.reconnects
        if reconnects != self._reconnects:
            self._reconnects, self._ways = reconnects, Ways()

    async def _try_both(self, messages: Sequence[Outgoing]) -> list[Outcome]:
        while self._on_their_way:
            self._is_quiet.clear()
            await self._is_quiet.wait()
        outcomes: list[Outcome] = []
        while self._ways.wants_trial(len(messages) - len(outcomes)):
            for is_atomic in (False, True):
                part = messages[len(outcomes) : len(outcomes) + TRIAL]
                outcomes += await self._send(part, is_atomic=is_atomic)
            self._ways.tried()
        return outcomes

    async def _send(self, messages: Sequence[Outgoing], *, is_atomic: bool) -> list[Outcome]:
        ways, began = self._ways, time.monotonic()
        outcomes = await (self._client.publish_all(messages) if is_atomic else self._ingest(messages))
        if all(isinstance(outcome, PubAck) for outcome in distinct(outcomes)):
            ways.learn(len(messages), (time.monotonic() - began) * 1e6, is_atomic=is_atomic)
        return outcomes

    async def _ingest(self, messages: Sequence[Outgoing]) -> list[Outcome]:
        try:
            ingested = await self._client.publish_fast(messages)
        except Refused:  # one of them can never be published: who asks for each is told which
            return await self._client.publish_all(messages)
        except OncewireError as error:
            return [error] * len(messages)
        return [PubAck(ingested.stream, ingested.sequence)] * len(messages)
