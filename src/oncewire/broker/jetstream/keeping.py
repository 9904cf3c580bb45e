"""Where workers' idempotency entries are: one key of a topic has one entry, whatever partitions its messages are in.

The key's hash names the partition that keeps the entry, its home; the owner of that one decides every step, and writes
it as one of its records. What only the owners of other partitions know is asked of them, in this order:

    begin, success, failure   the delivery's owner: is it the caller's?  →  home: the entry  →  answer
      another has begun       home  →  that delivery's owner: is it leased still?  →  home: refuse, or take over
    ack after a begin         home: COMMITTED  →  the delivery's owner: settled

The last two are two records. Between them the entry says that it is done and the message comes again: its worker is
told so and acks. The other way round a second message with the key would be worked on again.

An entry stays while its message is held. Of other partitions it is known what their stream still has: looked up once in
a TTL, for topics that have entries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from oncewire._ground.contracts.records import Acked
from oncewire._ground.errors import ContractViolation, NotFound, OncewireError, Unavailable
from oncewire._ground.jetstream import Client, codes
from oncewire.broker import rules
from oncewire.broker.engine import Consume, Idempotency, IdempotencyStatus
from oncewire.broker.idempotency import Claim, Holder, claim_of
from oncewire.broker.jetstream import ops
from oncewire.broker.jetstream.catalog import Listed
from oncewire.broker.jetstream.cell import Cell
from oncewire.broker.jetstream.owners import Done, Owners

_log = logging.getLogger(__name__)


class Desk(Owners, Protocol):
    """What is needed from the node."""

    client: Client
    cells: dict[tuple[int, int], Cell]

    @property
    def is_held(self) -> bool: ...
    def enter(self, cell: Cell, consume: Consume, done: Done) -> None: ...


class Keeper:
    """See the module's head."""

    def __init__(self, node: Desk) -> None:
        self._node = node
        self.gone: dict[int, dict[int, int]] = {}
        """Of each topic's partitions the last offset that is known to be gone."""

    # ---- at the delivery's owner

    def step(self, cell: Cell, request: Idempotency, done: Done) -> None:
        flight = rules.held(cell.state, cell.topic.tenant, request)
        if isinstance(flight, rules.Step):
            cell.submit(flight, done)
            return
        claim = claim_of(request)

        def kept(answer: IdempotencyStatus | OncewireError) -> None:
            if not isinstance(answer, OncewireError):
                rules.note_begun(flight, claim)
            done(answer)

        self._keep(cell, request.group, claim, kept)

    def commit(self, cell: Cell, acked: Acked, done: Callable[[OncewireError | None], None]) -> None:
        """What a worker began is done with its ack. One that another delivery has by now is that one's to decide."""
        group = cell.state.groups[acked.group].name
        claim = Claim("success", acked.identity, Holder(acked.partition, acked.offset, acked.owner))

        def kept(answer: IdempotencyStatus | OncewireError) -> None:
            if isinstance(answer, OncewireError) and not isinstance(answer, ContractViolation):
                done(answer)
                return
            self._node.on_step("kept")
            done(None)

        self._keep(cell, group, claim, kept)

    def _keep(self, cell: Cell, group: str, claim: Claim, done: Done) -> None:
        home = cell.held.home_of(claim.identity)
        request = ops.Keep(cell.topic.number, home, group, claim)

        def local(at: Cell, told: Done) -> None:
            self.keep(at, group, claim, told)

        self._node.at_owner(cell.topic, home, lambda: request, local, done)

    # ---- at the entry's home

    def keep(self, cell: Cell, group: str, claim: Claim, done: Done) -> None:
        """Decide a step."""

        def entered(error: OncewireError | None) -> None:
            if (refused := error or cell.refused()) is not None:
                done(refused)
            else:
                self._decide(cell, group, claim, done)

        known = cell.held.groups.get(group)
        if known is not None and not known.is_leaving:
            self._decide(cell, group, claim, done)
        else:  # its readers have not come to this partition yet
            self._node.enter(cell, Consume(cell.topic.name, group, claim.holder.owner, 0), entered)

    def _decide(self, cell: Cell, group: str, claim: Claim, done: Done) -> None:
        rival = rules.rival_of(self._node.clock(), cell.held.groups[group], claim)
        if rival is None:
            self._mark(cell, group, claim, None, done)
            return

        def asked(answer: bool | OncewireError) -> None:
            if isinstance(answer, OncewireError):
                done(answer)
            elif (refused := cell.refused()) is not None:
                done(refused)
            else:
                self._mark(cell, group, claim, None if answer else rival, done)

        def local(at: Cell, told: Done) -> None:
            self.ask(at, group, rival, told)

        request = ops.Ask(cell.topic.number, rival.partition, group, rival)
        self._node.at_owner(cell.topic, rival.partition, lambda: request, local, asked)

    def _mark(self, cell: Cell, group: str, claim: Claim, freed: Holder | None, done: Done) -> None:
        known = cell.held.groups.get(group)
        if known is None or known.is_leaving:
            done(Unavailable(f"group {group!r} is being forgotten: try again", retry_after_s=0.1))
        else:
            cell.submit(rules.mark(cell.state, self._node.clock(), known, claim, freed), done)

    # ---- at another delivery's owner

    def ask(self, cell: Cell, group: str, holder: Holder, done: Done) -> None:
        """Whether a delivery is leased. An owner that was replaced does not know, and must not say no."""
        known = cell.held.groups.get(group)
        if not self._node.is_held:
            done(Unavailable("this node has no session", retry_after_s=0.1))
        else:
            done(known is not None and rules.is_leased(known, holder))

    # ---- messages of other partitions

    async def look_for_gone(self, pause_s: float) -> None:
        """For ever: learn which messages are gone, so that their entries may go."""
        while True:
            await asyncio.sleep(pause_s)
            topics = {cell.topic for cell in self._node.cells.values() if _has_entries(cell)}
            for topic in topics:
                try:
                    await self._look(topic)
                except OncewireError as error:
                    _log.info("entries of %s stay for now: %s", topic.stream, error.message)

    async def _look(self, topic: Listed) -> None:
        gone = self.gone_of(topic.number)
        info = await self._node.client.api(f"STREAM.INFO.{topic.stream}")
        for number in topic.partitions:
            first = await self._first(topic, number) or info["state"]["last_seq"] + 1
            gone[number] = max(gone.get(number, -1), first - 2)

    async def _first(self, topic: Listed, partition: int) -> int:
        """The sequence of a partition's first message, 0 when there is none; a replica may not know it yet."""
        try:
            found = await self._node.client.get_next(topic.stream, 1, f"{topic.prefix}.{partition}", is_exact=True)
        except NotFound as missing:
            if missing.server_code != codes.NO_MESSAGE_FOUND:
                raise
            return 0
        return found.sequence

    def gone_of(self, number: int) -> dict[int, int]:
        return self.gone.setdefault(number, {})


def _has_entries(cell: Cell) -> bool:
    return cell.topic.count > 1 and any(group.worked for group in cell.state.groups.values())
