"""The engine over JetStream: the routes' calls, each taken to the owner of its partition. See engine.py one level up.

Names are looked up in the catalog that all nodes share; a name that is not in it is asked of the server once, so that
a topic that another node has just made is there. A message with an idempotency key is stored under an id of its own, so
that the server keeps it single in its topic; if it goes to another topic than the one that its producer named, its key
is first stored under the named one, with the place that was chosen: whoever comes again with the key goes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from oncewire._ground import topology
from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody, Routing
from oncewire._ground.errors import ContractViolation, InvalidSetting, NotFound, OncewireError, TooLarge, Unavailable
from oncewire._ground.jetstream import Client, Outgoing
from oncewire.broker import rules, view
from oncewire.broker.engine import (
    Consume,
    Done,
    Idempotency,
    IdempotencyStatus,
    Limits,
    NodeStats,
    Produced,
    Router,
    RoutingDecision,
    Settle,
    Sink,
    Stats,
    Subscription,
    TooManyReaders,
    TopicCreated,
    TopicShown,
    TopicStats,
)
from oncewire.broker.idempotency import identity_of
from oncewire.broker.jetstream import names, ops
from oncewire.broker.jetstream.catalog import WINDOW_MS_MIN, Listed
from oncewire.broker.jetstream.cell import Cell, Phase
from oncewire.broker.jetstream.node import Node
from oncewire.broker.jetstream.readers import Fan
from oncewire.broker.local import ROUTER_TIMEOUT_MS, Clock, steady_clock
from oncewire.broker.messages import partition_of
from oncewire.broker.placing import NO_TOPIC, Place, place_of, routing_of
from oncewire.broker.routing import Routers
from oncewire.broker.state import COUNTERS
from oncewire.broker.taking import Take

OWNER_LEASE_MS: Final = 3_000
SERVICE: Final = "broker"


async def open_jetstream(
    client: Client,
    *,
    limits: Limits | None = None,
    router: Router | None = None,
    router_timeout_ms: int = ROUTER_TIMEOUT_MS,
    owner_lease_ms: int = OWNER_LEASE_MS,
    declared: topology.Topology | None = None,
    clock: Clock | None = None,
) -> JetStreamEngine:
    """A node that is ready. It makes what it needs on the server; the client stays the caller's to close."""
    limits = limits or Limits()
    if limits.idempotency_ttl_ms < WINDOW_MS_MIN:
        raise InvalidSetting(
            f"broker.idempotency_ttl_ms is {limits.idempotency_ttl_ms}, and a NATS server remembers at least"
            f" {WINDOW_MS_MIN} ms"
        )
    part = (declared or topology.load()).for_service(SERVICE)
    await topology.ensure(client, topology=part)
    replicas = max((stream.replicas for stream in part.streams), default=1) or 1
    node = Node(client, limits, owner_lease_ms, replicas, clock or steady_clock())
    await node.open()
    return JetStreamEngine(node, router, router_timeout_ms)


class JetStreamEngine:
    """See the module's head, and engine.py for what each call does."""

    is_durable = True

    def __init__(self, node: Node, router: Router | None, router_timeout_ms: int) -> None:
        self.node = node
        self.limits = node.limits
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._catalog = node.catalog
        self._loop = asyncio.get_running_loop()
        self._routers = Routers(router, router_timeout_ms, self._loop, self._counters) if router else None
        self._ticker = self._loop.call_later(self.limits.tick_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self.limits.tick_ms / 1000, self._tick)
        self.node.tick(self.node.clock())

    def _stopping(self) -> OncewireError | None:
        return Unavailable("the broker is stopping", retry_after_s=1.0) if self.node.is_stopping else None

    def _spawn(self, work: Awaitable[Any], done: Callable[[Any], None]) -> None:
        """Answer with what the work returns, or with its error."""

        async def run() -> None:
            try:
                answer = await work
            except OncewireError as error:
                answer = error
            except TimeoutError:
                answer = Unavailable("NATS did not answer in time", retry_after_s=1.0)
            done(answer)

        self.node.spawn(run())

    # ---- topics

    def create_topic(self, tenant: str, name: str, partitions: int, done: Done[TopicCreated]) -> None:
        self._spawn(self._create_topic(tenant, name, partitions), done)

    async def _create_topic(self, tenant: str, name: str, partitions: int) -> TopicCreated:
        if (stopping := self._stopping()) is not None:
            raise stopping
        if not 1 <= partitions <= self.limits.partitions_max:
            raise ContractViolation("invalid partitions", field="partitions")
        topic = await self._catalog.find(tenant, name)
        if topic is None:
            if sum(1 for owner, _ in self._catalog.topics if owner == tenant) >= self.limits.topics_max:
                raise TooLarge(f"there are {self.limits.topics_max} topics already, and more are not allowed")
            topic = await self._catalog.create(tenant, name, partitions, self.node.clock())
        else:  # whoever made it may have died before its stream was there
            await self._catalog.ensure(topic)
        return TopicCreated(name, topic.count)

    def list_topics(self, tenant: str, done: Done[list[str]]) -> None:
        async def listed() -> list[str]:
            await self._catalog.catch_up()
            return sorted(name for owner, name in self._catalog.topics if owner == tenant)

        self._spawn(listed(), done)

    def show_topic(self, tenant: str, name: str, done: Done[TopicShown]) -> None:
        self._spawn(self._show_topic(tenant, name), done)

    async def _show_topic(self, tenant: str, name: str) -> TopicShown:
        topic = await self._find(tenant, name)
        parts: list[ops.Shown] = []
        for answer in await asyncio.gather(*(self._show(topic, number) for number in topic.partitions)):
            if isinstance(answer, OncewireError):
                raise answer
            parts.append(answer)
        shown = tuple(part.partition for part in parts)
        groups = view.merge_groups((part.partition.owner, group) for part in parts for group in part.groups)
        messages, size = view.add(one.messages for one in shown), view.add(one.bytes for one in shown)
        return TopicShown(topic.name, messages, size, topic.at_ms, shown, groups)

    def _show(self, topic: Listed, number: int) -> asyncio.Future[Any]:
        shown = self._loop.create_future()
        request = ops.Show(topic.number, number)
        self.node.at_owner(topic, number, lambda: request, self.node.show, shown.set_result)
        return shown

    def delete_topic(self, tenant: str, name: str, done: Done[None]) -> None:
        async def deleted() -> None:
            await self._catalog.delete(await self._find(tenant, name))

        self._spawn(deleted(), done)

    async def _find(self, tenant: str, name: str) -> Listed:
        topic = await self._catalog.find(tenant, name)
        if topic is None:
            raise NotFound(NO_TOPIC)
        return topic

    # ---- producing

    def produce(self, tenant: str, body: ProduceBody, done: Done[Produced]) -> None:
        if body.envelope is None and self._routers is None and not self.node.is_stopping:
            topic = self._catalog.topics.get((tenant, body.topic))
            if topic is not None:  # the common case, without what only envelopes and routers need
                number = 0 if topic.count == 1 else partition_of(body.key, topic.count)
                cell = self.node.cells.get((topic.number, number))
                if cell is not None and cell.phase is Phase.OPEN:
                    cell.produce(body, topic.number, None, None, done)
                else:
                    self._store(body, topic.number, (topic, number, None), None, done)
                return
        if self._routers is not None:
            self._routers.ask(body.topic, body, lambda decision: self._produce(tenant, body, decision, done))
        else:
            self._produce(tenant, body, None, done)

    def _produce(
        self,
        tenant: str,
        body: ProduceBody,
        decision: RoutingDecision | None,
        done: Done[Produced],
        *,
        has_looked: bool = False,
    ) -> None:
        refused = self._stopping() or rules.expired(self.node.clock(), body)
        if refused is not None:
            done(refused)
            return
        place = place_of(self._catalog.topics, self._counters, tenant, body, decision)
        if isinstance(place, NotFound) and not has_looked:
            self._spawn(self._look_for(tenant, body, decision, done), _ignore)
            return
        if isinstance(place, OncewireError):
            done(place)
            return
        routing = routing_of(decision)
        if place.topic.name != body.topic and place.envelope is not None and place.envelope.idempotency_key:
            self._spawn(self._produce_elsewhere(tenant, body, place, routing), done)
        else:
            self._store(body, place.topic.number, place, routing, done)

    async def _look_for(
        self, tenant: str, body: ProduceBody, decision: RoutingDecision | None, done: Done[Produced]
    ) -> None:
        try:
            await self._catalog.find(tenant, body.topic)
            if body.envelope is not None and body.envelope.target_topic:
                await self._catalog.find(tenant, body.envelope.target_topic)
        except OncewireError as error:
            done(error)
            return
        self._produce(tenant, body, decision, done, has_looked=True)

    def _store(
        self,
        body: ProduceBody,
        requested: int,
        place: tuple[Listed, int, BrokerEnvelope | None],
        routing: Routing | None,
        done: Done[Produced],
    ) -> None:
        topic, number, envelope = place
        cell = self.node.cells.get((topic.number, number))
        if cell is not None and cell.phase is Phase.OPEN:
            cell.produce(body, requested, envelope, routing, done)
            return

        def local(at: Cell, told: Callable[[Any], None]) -> None:
            at.produce(body, requested, envelope, routing, told)

        def request() -> ops.Placed:
            return ops.Produce(topic.number, number, requested, body, envelope, routing)

        self.node.at_owner(topic, number, request, local, done)

    async def _produce_elsewhere(
        self, tenant: str, body: ProduceBody, place: Place[Listed], routing: Routing | None
    ) -> Produced | OncewireError:
        """The key belongs to the topic that the producer named; the message goes where the first one with it went."""
        named = await self._catalog.find(tenant, body.topic)
        number = named.number if named is not None else 0
        if named is not None:
            assert place.envelope is not None
            identity = identity_of(place.envelope.tenant_id, place.envelope.idempotency_key)
            chosen = await self._choose(named, names.message_id(number, body.topic, identity), place)
            if chosen is None:
                self._counters["deduplicated"] += 1
                return Produced(body.topic, place.partition, -1, is_duplicate=True)
            place = chosen
        stored: asyncio.Future[Any] = self._loop.create_future()
        self._store(body, number, place, routing, stored.set_result)
        answer: Produced | OncewireError = await stored
        return answer

    async def _choose(self, named: Listed, message_id: str, place: Place[Listed]) -> Place[Listed] | None:
        """Where the message with this key goes; None when it stands in the named topic itself."""
        choice = msgspec.json.encode([place.topic.name, place.partition])
        ack = await self.node.client.publish_one(Outgoing(f"{named.prefix}.keys", choice, message_id), raw=True)
        self.node.on_step("chosen")
        if not ack.is_duplicate:
            return place
        first = await self.node.client.get(named.stream, ack.sequence, is_exact=True)
        if not first.subject.endswith(".keys"):
            return None
        name, partition = msgspec.json.decode(first.payload, type=tuple[str, int])
        topic = await self._catalog.find(named.tenant, name)
        return Place(topic, partition, place.envelope) if topic is not None else place

    def produce_many(
        self, tenant: str, bodies: Sequence[ProduceBody], done: Done[list[Produced | OncewireError]]
    ) -> None:
        gather = _Gather(len(bodies), done)
        for at, body in enumerate(bodies):
            self.produce(tenant, body, partial(gather.put, at))

    # ---- settling

    def settle(self, tenant: str, settle: Settle, done: Done[None]) -> None:
        topic = self._catalog.topics.get((tenant, settle.topic))
        if topic is not None and not self.node.is_stopping:
            cell = self.node.cells.get((topic.number, settle.partition))
            if cell is not None and cell.phase is Phase.OPEN:
                cell.settle(settle, done)
                return

        def request(topic: Listed) -> ops.Placed:
            return ops.Settling(topic.number, settle.partition, settle)

        def local(cell: Cell, told: Callable[[Any], None]) -> None:
            cell.settle(settle, told)

        self._placed(tenant, settle.topic, settle.partition, request, local, done)

    def settle_many(self, tenant: str, settles: Sequence[Settle], done: Done[list[OncewireError | None]]) -> None:
        gather = _Gather(len(settles), done)
        for at, one in enumerate(settles):
            self.settle(tenant, one, partial(gather.put, at))

    def idempotency(self, tenant: str, step: Idempotency, done: Done[IdempotencyStatus]) -> None:
        def request(topic: Listed) -> ops.Placed:
            return ops.Mark(topic.number, step.partition, step)

        def local(cell: Cell, told: Callable[[Any], None]) -> None:
            self.node.keeper.step(cell, step, told)

        self._placed(tenant, step.topic, step.partition, request, local, done)

    def _placed(
        self,
        tenant: str,
        name: str,
        partition: int,
        request: Callable[[Listed], ops.Placed],
        local: Callable[[Cell, Callable[[Any], None]], None],
        done: Callable[[Any], None],
    ) -> None:
        """Ask the owner of a partition that a client named."""
        topic = self._catalog.topics.get((tenant, name))
        if self.node.is_stopping:
            done(self._stopping())
        elif topic is None:
            self._spawn(self._placed_unseen(tenant, name, partition, request, local), done)
        elif not 0 <= partition < topic.count:
            done(ContractViolation("partition out of range", field="partition"))
        else:
            self.node.at_owner(topic, partition, lambda: request(topic), local, done)

    async def _placed_unseen(
        self,
        tenant: str,
        name: str,
        partition: int,
        request: Callable[[Listed], ops.Placed],
        local: Callable[[Cell, Callable[[Any], None]], None],
    ) -> Any:
        await self._find(tenant, name)
        answer = self._loop.create_future()
        self._placed(tenant, name, partition, request, local, answer.set_result)
        return await answer

    # ---- readers

    def subscribe(self, tenant: str, consume: Consume, sink: Sink, done: Done[Subscription]) -> None:
        self._subscribe(tenant, consume, sink, done, is_poll=False)

    def take(
        self, tenant: str, consume: Consume, messages_max: int, wait_ms: int, done: Done[list[Delivery]]
    ) -> Subscription:
        take = Take(self._loop, messages_max, wait_ms, done)
        polled = msgspec.structs.replace(consume, in_flight=messages_max)
        self._subscribe(tenant, polled, take, take.joined, is_poll=True)
        return take

    def _subscribe(self, tenant: str, consume: Consume, sink: Sink, done: Done[Subscription], *, is_poll: bool) -> None:
        topic = self._catalog.topics.get((tenant, consume.topic))
        if (stopping := self._stopping()) is not None:
            done(stopping)
        elif topic is None:
            self._spawn(self._subscribe_unseen(tenant, consume, sink, done, is_poll), _ignore)
        elif not 0 <= consume.lease_ms <= self.limits.lease_ms_max:
            done(ContractViolation("invalid lease_ms", field="lease_ms"))
        else:
            self._join(topic, self.node.fan(topic, consume, sink, is_poll=is_poll), done)

    async def _subscribe_unseen(
        self, tenant: str, consume: Consume, sink: Sink, done: Done[Subscription], is_poll: bool
    ) -> None:
        try:
            await self._find(tenant, consume.topic)
        except OncewireError as error:
            done(error)
            return
        self._subscribe(tenant, consume, sink, done, is_poll=is_poll)

    def _join(self, topic: Listed, fan: Fan, done: Done[Subscription]) -> None:
        """Begin when each partition was asked: a refusal ends it, an owner that is away is tried on."""
        left = topic.count
        refused: OncewireError | None = None

        def joined(partition: int, error: OncewireError | None) -> None:
            nonlocal left, refused
            left -= 1
            if isinstance(error, Unavailable) and not isinstance(error, TooManyReaders):
                self.node.attach(fan, partition)
            elif error is not None:
                refused = refused or error
            if left:
                return
            if refused is not None:
                fan.close()
                done(NotFound(NO_TOPIC) if isinstance(refused, NotFound) else refused)
            else:
                done(fan)
                self._loop.call_soon(fan.begin)

        for partition in topic.partitions:
            self.node.join(fan, partition, partial(joined, partition))

    # ---- what an operator sees

    def stats(self) -> Stats:
        counters = dict(self._counters)
        parts: dict[tuple[str, str], list[TopicStats]] = {}
        entries = 0
        for cell in self.node.cells.values():
            entries += cell.state.entries
            for name, count in cell.state.counters.items():
                counters[name] += count
            for part in view.topic_stats(cell.state):
                parts.setdefault((part.tenant, part.name), []).append(part)
        topics = tuple(view.merge_stats(ones) for ones in parts.values())
        return Stats(counters, topics, entries, None, self._node_stats())

    def _node_stats(self) -> NodeStats:
        session = self.node.session
        return NodeStats(len(session.nodes), len(self.node.cells), session.begun)

    def problems(self) -> list[str]:
        node = self.node
        if node.is_stopping:
            return ["the broker is stopping"]
        found: list[str] = []
        if not node.is_connected:
            found.append(f"the connection to NATS is {node.client.state}")
        elif not node.is_held:
            found.append("this node's session ended, and it has not begun another one yet")
        doubting = sum(1 for cell in node.cells.values() if cell.phase is Phase.DOUBTING)
        if doubting:
            found.append(f"{doubting} partitions are read again: a commit was not confirmed")
        return [*found, node.letters.problem] if node.letters.problem else found

    async def stop(self) -> None:
        if self.node.is_stopping:
            return
        self._ticker.cancel()
        if self._routers is not None:
            self._routers.close()
        await self.node.stop()


def _ignore(_: object) -> None:
    """The work answers by itself."""


class _Gather:
    """Many answers as one, in their places."""

    __slots__ = ("_answers", "_done", "_left")

    def __init__(self, count: int, done: Callable[[Any], None]) -> None:
        self._answers: list[Any] = [None] * count
        self._left = count
        self._done = done
        if not count:
            done([])

    def put(self, at: int, answer: Any) -> None:
        self._answers[at] = answer
        self._left -= 1
        if not self._left:
            self._done(self._answers)
