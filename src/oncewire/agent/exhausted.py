"""Inputs that the server gave up: the dead-letter service asks, the ledger knows whether they ever began.

A delivery that died before its mark is known to the server alone, so the ledger may hold an attempt that looks as if
others would follow, or none at all. Being asked is being told that none follows (contracts/letters.py has the answers):
an attempt is marked as the last one there, so that the sweep hands it over, before "begun" is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import msgspec

from oncewire.agent.batch import Item
from oncewire.agent.commits import Commits
from oncewire.agent.read import Reading
from oncewire.agent.sources import Opened
from oncewire.contracts.letters import Exhausted, Known, exhausted_subject
from oncewire.errors import ContractViolation, NotFound, OncewireError
from oncewire.jetstream import Client
from oncewire.jetstream.connection import Subscription
from oncewire.jetstream.protocol import Message
from oncewire.ledger import rules
from oncewire.ledger.store import Attempt

ASKED_MAX = 1_000
GETS_MAX = 64
QUEUE = "agent"
"""One process of an agent answers: they share the ledger."""


class Asked:
    """Answers for the durables of one agent, from start to `stop`."""

    def __init__(self, client: Client, commits: Commits, reading: Reading, in_hand: Callable[[], list[Item]]) -> None:
        self._client = client
        self._commits = commits
        self._reading = reading
        self._in_hand = in_hand
        self._subscriptions: list[Subscription] = []

    def start(self, opened: dict[str, Opened]) -> None:
        for one in opened.values():
            subject = exhausted_subject(one.source.stream, one.source.consumer)
            self._subscriptions.append(self._client.serve(subject, partial(self._answer, one), queue=QUEUE))

    def stop(self) -> None:
        for one in self._subscriptions:
            with contextlib.suppress(OncewireError):
                self._client.connection.unsubscribe(one)

    async def _answer(self, opened: Opened, message: Message) -> bytes:
        try:
            asked = msgspec.json.decode(message.payload, type=Exhausted)
        except msgspec.DecodeError as error:
            raise ContractViolation(f"not a question about exhausted inputs: {error}") from None
        if len(asked.sequences) > ASKED_MAX:
            raise ContractViolation(f"{len(asked.sequences)} sequences at once, {ASKED_MAX} may be asked for")
        commits, source = self._commits, opened.source
        name = commits.ledger.name
        keys = {rules.position_key(name, source.stream, source.created, one): one for one in asked.sequences}
        held = [item.at_key for item in self._in_hand() if item.at_key in keys]
        identities = await self._identities(opened, asked.sequences)
        async with commits.turn:
            known: Known = await commits.db(self._look_up, opened, keys, identities, held)
        return msgspec.json.encode(known)

    async def _identities(self, opened: Opened, sequences: list[int]) -> dict[bytes, bytes]:
        """By position the key of what stands there: inputs that are done are known by their identity."""
        gate = asyncio.Semaphore(GETS_MAX)

        async def read(sequence: int) -> Item | None:
            async with gate:
                try:
                    return self._reading.stored(await self._client.get(opened.source.stream, sequence), opened.source)
                except NotFound:
                    return None

        items = await asyncio.gather(*map(read, sequences))
        return {item.at_key: item.key for item in items if item is not None and item.key}

    def _look_up(
        self, opened: Opened, keys: dict[bytes, int], identities: dict[bytes, bytes], held: list[bytes]
    ) -> Known:
        store = self._commits.store
        store.begin()
        try:
            found = store.claim([], look=[*keys, *set(identities.values())])
        finally:
            store.rollback()
        settled = {key for key in keys if key in found or identities.get(key) in found}
        attempts = {one.key: one for one in store.attempts() if one.key in keys}
        for key in held:
            first = Attempt(key, opened.source.stream, keys[key], 0, self._commits.now_ms(), "")
            attempts.setdefault(key, first)
        begun = [one._replace(deliveries=opened.max_deliver) for one in attempts.values() if one.key not in settled]
        if begun:
            store.begun(begun)
        rest = keys.keys() - settled - {one.key for one in begun}
        return Known(
            sorted(keys[key] for key in settled),
            sorted(one.sequence for one in begun),
            sorted(keys[key] for key in rest),
        )
