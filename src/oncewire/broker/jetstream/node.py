"""A node: the cells that it owns, how it takes and leaves them, and what it does for readers and for other nodes.

What is idle is owned by nobody until it is used. How requests find the owner of a partition: paths.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from oncewire._ground.contracts import topics
from oncewire._ground.errors import Conflict, NotFound, OncewireError, OutcomeUnknown, Refused, Unavailable
from oncewire._ground.jetstream import Client, Outgoing
from oncewire._ground.jetstream.options import State as ConnectionState
from oncewire.broker.engine import Consume, Limits
from oncewire.broker.jetstream import names, ops, packed
from oncewire.broker.jetstream.catalog import Catalog, Listed
from oncewire.broker.jetstream.cell import Cell, Phase
from oncewire.broker.jetstream.keeping import Keeper
from oncewire.broker.jetstream.letters import Letters
from oncewire.broker.jetstream.link import Link
from oncewire.broker.jetstream.ops import Placed, Request
from oncewire.broker.jetstream.owners import Done, Local
from oncewire.broker.jetstream.paths import STEP_S, Paths
from oncewire.broker.jetstream.readers import NOT_TAKEN, Fan, Guest
from oncewire.broker.jetstream.sending import Outlet
from oncewire.broker.jetstream.session import Session
from oncewire.broker.jetstream.takeover import Taker
from oncewire.broker.jetstream.trials import Trials
from oncewire.broker.local import Clock
from oncewire.broker.rules import NO_TOPIC
from oncewire.broker.view import show_partition

NODES_S: Final = 0.05
"""How often it is looked who is there."""
DETACH_AGAIN_S: Final = 0.25
TAKES_MAX: Final = 32
SEARCH_EXTRA_S: Final = 10.0
ATTACH_AGAIN_S: Final = 0.05
STOP_S_MAX: Final = 5.0
RECORDS_AGE_MS: Final = 7 * 86_400_000
"""For so long records stay for others to read, after a snapshot covers them."""
MARKS_PER_AGE: Final = 14
_log = logging.getLogger(__name__)


def _no_step(_: str) -> None:
    """Nobody watches."""


class Node:
    """See the module's head. What the engine asks goes through `at_owner`. `on_step` is told each step by its name, so
    that tests can stop a process there:

        entry                                  a topic is in the list, its stream is not made yet
        unlisted  cleared                      a topic is deleted: all it had is there yet; only its stream is
        lease  fence  replay  taken  open      a partition is taken: see takeover.py
        stored  recorded                       messages, or records, are durable and nobody was told
        kept                                   a worker's key is done at its home, its message is not settled yet
        reread                                 records were read after a doubt; messages are not fenced and read yet
        letter                                 a dead letter is stored, its message is not settled yet
        snapshot                               one is written
        release                                a partition is left in order
        proof                                  a group has settled something, and has no key that says so
        chosen                                 a key is noted in the topic that was named, its message is nowhere yet
        purge                                  messages count as trimmed, and are stored yet
    """

    def __init__(self, client: Client, limits: Limits, lease_ms: int, replicas: int, clock: Clock) -> None:
        self.limits = limits
        self.clock = clock
        self.client = client
        self.outlet = Outlet(client.connection)
        self.catalog = Catalog(
            client, replicas, limits.idempotency_ttl_ms, self._topic_gone, lambda name: self.on_step(name)
        )
        self.session = Session(client, lease_ms, self._session_lost, self._session_begun, self._nodes_moved)
        self.link = Link(client, self._on_request)
        self.taker = Taker(client, lambda name: self.on_step(name))
        self.keeper = Keeper(self)
        self.commit, self.gone_of = self.keeper.commit, self.keeper.gone_of
        self.trials = Trials(self)
        self.letters = Letters(self)
        self.bury = self.letters.bury
        self.on_step: Callable[[str], None] = _no_step
        self.cells: dict[tuple[int, int], Cell] = {}
        self.fans: dict[int, Fan] = {}
        self.is_stopping = False
        self.search_s = lease_ms / 1000 + SEARCH_EXTRA_S
        """For so long it is tried to reach an owner: another one may have to take the partition first."""
        self.paths = Paths(self)
        self._readers = 0
        self._guests: dict[tuple[str, int], Guest] = {}
        self._nodes: set[str] = set()
        self._taking: dict[tuple[int, int], asyncio.Task[str]] = {}
        self._takes = asyncio.Semaphore(TAKES_MAX)
        self._woken: dict[Cell, None] = {}
        self._is_waking = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- life

    async def open(self) -> None:
        await self.catalog.open()
        await self.session.open()
        self._nodes = {self.session.node}
        self.spawn(self._watch_nodes())
        self.spawn(self.catalog.sweep_for_ever())
        self.spawn(self.keeper.look_for_gone(self.limits.idempotency_ttl_ms / 1000))

    async def stop(self) -> None:
        """Hand over what is ours, in order, then leave."""
        self.is_stopping = True
        for fan in list(self.fans.values()):
            fan.ended(Unavailable("the broker is stopping", retry_after_s=1.0))
        if self.is_connected:  # else there is nobody to hand over to, and the lease ends by itself
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S_MAX):
                    await asyncio.gather(*(self.release(cell) for cell in list(self.cells.values())))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()
        self.link.close()
        self.outlet.close()
        await self.catalog.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, OncewireError):  # ours are for those who wait
            _log.error("a task of the broker failed", exc_info=error)

    @property
    def node(self) -> str:
        return self.session.node

    @property
    def is_connected(self) -> bool:
        return self.client.state is ConnectionState.CONNECTED

    @property
    def is_held(self) -> bool:
        return self.session.is_held

    def wake(self, cell: Cell) -> None:
        self._woken[cell] = None
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._awake)

    def _awake(self) -> None:
        self._is_waking = False
        woken, self._woken = self._woken, {}
        for cell in woken:
            cell.look()

    def tick(self, now_ms: int) -> None:
        for cell in list(self.cells.values()):
            cell.tick(now_ms)
            self.trials.look(cell)
        for guest in list(self._guests.values()):
            guest.tick()

    def soon(self, work: Callable[[], None]) -> None:
        self._loop.call_soon(work)

    def at_owner(self, topic: Listed, partition: int, request: Callable[[], Placed], local: Local, done: Done) -> None:
        self.paths.at_owner(topic, partition, request, local, done)

    # ---- taking partitions

    async def take(self, topic: Listed, partition: int) -> str:
        """Own it. The name of the owner when somebody else is."""
        key = (topic.number, partition)
        if key not in self._taking:
            self._taking[key] = self.spawn(self._take_once(topic, partition))
            self._taking[key].add_done_callback(lambda _: self._taking.pop(key, None))
        return await asyncio.shield(self._taking[key])

    async def _take_once(self, topic: Listed, partition: int) -> str:
        async with self._takes:
            if (topic.number, partition) in self.cells:
                return self.node
            if not self.is_held or self.is_stopping:
                raise Unavailable("this node has no session", retry_after_s=0.1)
            cell = Cell(self, topic, partition)
            self.cells[cell.key] = cell
            try:
                await self.catalog.ensure(topic)
                owner = await self.taker.take(cell, self.session.end)
            except BaseException as error:
                self._drop(cell, "between owners")
                if isinstance(error, (Refused, TimeoutError)) and not isinstance(error, NotFound):
                    raise Unavailable(f"partition {partition} was not taken: {error}", retry_after_s=0.1) from error
                raise
            if owner != cell.node:
                self._drop(cell, "another node's")
                self.paths.known[cell.key] = owner
            elif cell.node != self.node or cell.phase is not Phase.OPEN:
                self._drop(cell, "between owners")
                raise Unavailable("the session ended meanwhile", retry_after_s=0.1)
            else:
                cell.look()
            return owner

    def _drop(self, cell: Cell, why: str) -> None:
        if self.cells.get(cell.key) is cell:
            del self.cells[cell.key]
        cell.leave(why)

    # ---- requests of other nodes

    def ask(self, node: str, request: Request, done: Done) -> None:
        """Ask a node, which may be this one."""
        if node == self.node:
            self._loop.call_soon(self._on_request, node, request, done)
        else:
            self.link.ask(node, request, done)

    def _on_request(self, node: str, request: Request, done: Done) -> None:
        if isinstance(request, ops.Lend):
            guest = self._guests.get((node, request.reader))
            done(guest.lend(request) if guest is not None else NotFound("the reader is not known here"))
        elif isinstance(request, ops.Leave):
            if (guest := self._guests.pop((node, request.reader), None)) is not None:
                guest.leave()
            done(None)
        elif isinstance(request, (ops.HandOver, ops.News, ops.Detached)):
            self._on_news(node, request, self.fans.get(request.reader), done)
        else:
            self.paths.serve(node, request, done)

    def _on_news(self, node: str, request: ops.HandOver | ops.News | ops.Detached, fan: Fan | None, done: Done) -> None:
        """An owner speaks of a reader that should be here."""
        if isinstance(request, ops.HandOver):
            done(fan.deliver(node, request.deliveries, is_more=request.is_more) if fan is not None else NOT_TAKEN)
        elif fan is None:
            done(NotFound("the reader is gone"))
        elif isinstance(request, ops.News):
            done(None)
            fan.called(node)
        else:
            done(None)
            for partition in request.partitions:
                self.paths.known.pop((fan.topic.number, partition), None)
            fan.detached(node, request.partitions)

    def serve(self, cell: Cell, node: str, request: Placed, done: Done) -> None:
        if isinstance(request, ops.Produce):
            cell.produce(request.body, request.requested, request.envelope, request.routing, done)
        elif isinstance(request, ops.Settling):
            cell.settle(request.settle, done)
        elif isinstance(request, ops.Mark):
            self.keeper.step(cell, request.step, done)
        elif isinstance(request, ops.Keep):
            self.keeper.keep(cell, request.group, request.claim, done)
        elif isinstance(request, ops.Ask):
            self.keeper.ask(cell, request.group, request.holder, done)
        elif isinstance(request, ops.Letter):
            cell.store_letter(request.identity, request.size, request.body, done)
        elif isinstance(request, ops.Show):
            self.show(cell, done)
        else:
            self._seat(cell, node, request, done)

    def _seat(self, cell: Cell, node: str, request: ops.Join, done: Done) -> None:
        guest = self._guests.get((node, request.reader))
        if guest is None:
            guest = self._guests[node, request.reader] = Guest(self, node, request.reader)
        guest.attach(cell, request.consume, lambda error: done(error or self.node))

    # ---- readers

    def fan(self, topic: Listed, consume: Consume, sink: Any, *, is_poll: bool) -> Fan:
        self._readers += 1
        fan = Fan(self, self._readers, topic, consume, sink, is_poll=is_poll)
        self.fans[fan.number] = fan
        return fan

    def forget(self, fan: Fan) -> None:
        self.fans.pop(fan.number, None)

    def enter(self, cell: Cell, consume: Consume, done: Done) -> None:
        known = cell.held.groups.get(consume.group)
        if (known is not None and not known.is_leaving) or cell.loaded_from <= cell.messages.trimmed + 2:
            cell.enter(consume, done)
        else:
            self.spawn(self._enter_whole(cell, consume, done))

    async def _enter_whole(self, cell: Cell, consume: Consume, done: Done) -> None:
        try:
            await self.taker.read_prefix(cell)
        except OncewireError as error:
            done(error)
            return
        if (refused := cell.refused()) is not None:
            done(refused)
        else:
            cell.enter(consume, done)

    def join(self, fan: Fan, partition: int, done: Done) -> None:
        """Attach a reader at a partition's owner, once."""
        request = ops.Join(fan.topic.number, partition, fan.number, fan.consume)

        def local(cell: Cell, told: Done) -> None:
            self._seat(cell, self.node, request, told)

        def joined(answer: str | OncewireError) -> None:
            if isinstance(answer, OncewireError):
                done(answer)
            else:
                fan.attached(answer, partition)
                done(None)

        self.at_owner(fan.topic, partition, lambda: request, local, joined)

    def attach(self, fan: Fan, partition: int) -> None:
        """Find the owner anew, until there is one or the reader is gone."""

        def joined(answer: OncewireError | None) -> None:
            if answer is None or not fan.is_open or self.is_stopping:
                return
            if isinstance(answer, NotFound):
                fan.ended(answer)
            else:
                self._loop.call_later(ATTACH_AGAIN_S, self.attach, fan, partition)

        if fan.is_open and not self.is_stopping:
            self.join(fan, partition, joined)

    def detach(self, guest: Guest, partitions: list[int]) -> None:
        """Let a guest's fan look for the owners of these, as soon as it can be told."""
        if not guest.has_seats and self._guests.get((guest.node, guest.number)) is guest:
            del self._guests[guest.node, guest.number]
        if partitions and not self.is_stopping:
            self.spawn(self._detach(guest.node, ops.Detached(guest.number, partitions)))

    async def _detach(self, node: str, detached: ops.Detached) -> None:
        while self.session.is_there(node):
            told: asyncio.Future[OncewireError | None] = self._loop.create_future()

            def answered(answer: OncewireError | None, told: asyncio.Future[OncewireError | None] = told) -> None:
                if not told.done():  # this node stops
                    told.set_result(answer)

            self.ask(node, detached, answered)
            if not isinstance(await told, Unavailable):
                return
            await asyncio.sleep(DETACH_AGAIN_S)

    def show(self, cell: Cell, done: Done) -> None:
        async def whole() -> None:
            try:
                await self.taker.read_prefix(cell)
            except OncewireError as error:
                done(error)
                return
            done(ops.Shown(*show_partition(cell.held, cell.partition, self.node)))

        self.spawn(whole())

    # ---- what cells ask

    def doubt(self, cell: Cell) -> None:
        self.spawn(self._read_again(cell))

    async def _read_again(self, cell: Cell) -> None:
        while cell.phase is Phase.DOUBTING:
            try:
                await self.taker.read_again(cell)
                cell.look()
            except (Conflict, NotFound) as lost:
                if self.catalog.numbered.get(cell.topic.number) is None:
                    self._drop(cell, NO_TOPIC)
                else:
                    _log.info("%s is given up: %s", cell.subject, lost.message)
                    self._drop(cell, "another node's")
            except (OncewireError, TimeoutError) as error:
                _log.info("%s is still in doubt: %s", cell.subject, error)
                await asyncio.sleep(ATTACH_AGAIN_S)

    def find(
        self, cell: Cell, bodies: list[bytes], last: int, done: Callable[[list[int] | OncewireError], None]
    ) -> None:
        self.spawn(self._find(cell, bodies, last, done))

    async def _find(
        self, cell: Cell, bodies: list[bytes], last: int, done: Callable[[list[int] | OncewireError], None]
    ) -> None:
        try:
            done(await self.taker.find(cell, bodies, last))
        except (OncewireError, TimeoutError) as error:
            done(OutcomeUnknown(f"outcome unknown: {error}", retry_after_s=1.0))

    def purge(self, cell: Cell, sequence: int) -> None:
        self.spawn(self._purge(cell.topic.stream, cell.subject, sequence))

    async def _purge(self, stream: str, subject: str, sequence: int) -> None:
        self.on_step("purge")
        try:
            await self.client.api(f"STREAM.PURGE.{stream}", {"filter": subject, "seq": sequence})
        except OncewireError as error:
            _log.info("%s was not trimmed, a later trim will: %s", subject, error.message)

    def snapshot(self, cell: Cell) -> None:
        cell.is_snapshotting = True
        self.spawn(self._snapshot(cell))

    async def _snapshot(self, cell: Cell) -> None:
        covers, now_ms = cell.record_sequence, self.clock()
        since, cell.records_since = cell.records_since, 0
        parts = packed.snapshot(cell.state, cell.partition, covers, now_ms, cell.marks)
        prefix = names.snapshot_of(*cell.key)
        messages = [
            Outgoing(
                f"{prefix}.{number}", part, expected_last_subject_sequence=None if number else cell.snapshot_sequence
            )
            for number, part in enumerate(parts)
        ]
        try:
            if len(messages) == 1:
                cell.snapshot_sequence = (await self.client.publish_one(messages[0], raw=True)).sequence
            else:
                ack = await self.client.publish_atomic(messages, raw=True)
                cell.snapshot_sequence = ack.sequence - len(messages) + 1
            cell.snapshot_size = sum(map(len, parts)) // 100
            self.on_step("snapshot")
            await self._forget_records(cell, covers, now_ms)
        except OncewireError as error:
            cell.records_since += since
            _log.info("no snapshot of %s was written, the next one will be: %s", cell.records_subject, error.message)
            if isinstance(error, Conflict):  # the one before was stored and not confirmed, or an older one was read
                with contextlib.suppress(OncewireError):
                    cell.snapshot_sequence = await self.taker.snapshot_stands_at(cell)
        finally:
            cell.is_snapshotting = False

    async def _forget_records(self, cell: Cell, covers: int, now_ms: int) -> None:
        """Records that snapshots have covered for long enough go."""
        old = [mark for mark in cell.marks if mark[0] <= now_ms - RECORDS_AGE_MS]
        if old:
            body = {"filter": cell.records_subject, "seq": old[-1][1] + 1}
            await self.client.api(f"STREAM.PURGE.{topics.RECORDS}", body)
        kept = cell.marks[len(old) :]
        if not kept or kept[-1][0] <= now_ms - RECORDS_AGE_MS // MARKS_PER_AGE:
            kept = [*kept, (now_ms, covers)]
        cell.marks = kept

    # ---- coming and going

    async def release(self, cell: Cell) -> None:
        """Finish what is on its way, write down where it stands, and let another node have it."""
        if cell.phase is not Phase.OPEN:
            return
        cell.phase = Phase.LEAVING
        cell.look()
        while cell.phase is Phase.LEAVING and not cell.is_idle:  # noqa: ASYNC110 - rare, and short
            await asyncio.sleep(STEP_S)
        if cell.phase is not Phase.LEAVING:
            return
        if cell.records_since:
            await self._snapshot(cell)
        self.on_step("release")
        try:
            await self.taker.release(cell)
        except OncewireError as error:
            _log.info("%s was not released in order: %s", cell.subject, error.message)
        self._drop(cell, "between owners")

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(NODES_S)
            self._nodes_moved()

    def _nodes_moved(self) -> None:
        nodes = set(self.session.nodes)
        gone, come, self._nodes = self._nodes - nodes, nodes - self._nodes, nodes
        for node in gone:
            self._node_gone(node)
        if come - {self.node}:
            self.spawn(self._spread())

    def _node_gone(self, node: str) -> None:
        self.link.lose(node)
        self.paths.lose(node)
        for key in [key for key in self._guests if key[0] == node]:
            self._guests.pop(key).leave()
        for fan in list(self.fans.values()):
            fan.lost(node)

    async def _spread(self) -> None:
        """Nodes came: give them their share."""
        nodes = self.session.nodes
        cells = [cell for cell in list(self.cells.values()) if names.preferred(nodes, *cell.key) != self.node]
        for first in range(0, len(cells), TAKES_MAX):
            await asyncio.gather(*(self.release(cell) for cell in cells[first : first + TAKES_MAX]))

    def _session_lost(self) -> None:
        """Others may have what was ours: begin anew."""
        _log.warning("the session of node %s ended: its partitions are released", self.node)
        for guest in self._guests.values():
            guest.leave()
        self._guests.clear()
        for cell in list(self.cells.values()):
            self._drop(cell, "between owners")
        for fan in list(self.fans.values()):
            fan.lost_all()  # the others know it by a name that is gone

    def _session_begun(self) -> None:
        self.link.open(self.node)

    def _topic_gone(self, topic: Listed) -> None:
        for cell in [one for one in self.cells.values() if one.topic.number == topic.number]:
            self._drop(cell, NO_TOPIC)
        for fan in [one for one in self.fans.values() if one.topic.number == topic.number]:
            fan.ended(NotFound(NO_TOPIC))
        self.paths.forget(topic.number)
        self.keeper.gone.pop(topic.number, None)
        self.trials.forget(topic.number)
        self.outlet.tails.pop(topic.number, None)
