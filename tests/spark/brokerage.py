"""Traffic of a broker on JetStream for tests of the lake: a node in this process, and a client that counts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, ProduceBody
from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import Client, connect
from oncewire.broker.engine import Consume, Limits, Settle
from oncewire.broker.jetstream.engine import JetStreamEngine, open_jetstream
from tests.support.broker import Reader
from tests.support.nats import NatsServer
from tests.support.wait import until, within

T = TypeVar("T")
TENANT = "acme"


class Desk:
    """What a client asks of a node, each answered before the next."""

    def __init__(self, engine: JetStreamEngine, client: Client) -> None:
        self._engine = engine
        self._client = client

    async def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        answered = asyncio.get_running_loop().create_future()
        call(*args, answered.set_result)
        answer = await within(answered)
        assert not isinstance(answer, OncewireError), answer
        return answer

    async def make(self, topic: str, partitions: int = 1) -> None:
        await self._ask(self._engine.create_topic, TENANT, topic, partitions)

    async def delete(self, topic: str) -> None:
        await self._ask(self._engine.delete_topic, TENANT, topic)

    async def produce(self, topic: str, value: str, key: str = "", **envelope: Any) -> int:
        """The offset."""
        sent = BrokerEnvelope(**envelope) if envelope else None
        body = ProduceBody(topic=topic, value=value, key=key, envelope=sent)
        offset: int = (await self._ask(self._engine.produce, TENANT, body)).offset
        return offset

    async def read(self, topic: str, count: int, group: str = "g") -> list[Delivery]:
        reader = Reader()
        joined = await self._ask(self._engine.subscribe, TENANT, Consume(topic, group, "worker", 60_000, 1_000), reader)
        await until(lambda: len(reader.got) >= count)
        joined.close()
        return sorted(reader.got, key=lambda one: one.offset)

    async def first_of(self, topic: str) -> int:
        """The first sequence that its stream has."""
        info = await self._client.api(f"STREAM.INFO.{self._engine.node.catalog.topics[TENANT, topic].stream}")
        first: int = info["state"]["first_seq"]
        return first

    async def settle(self, topic: str, act: Any, one: Delivery, group: str = "g", reason: str = "") -> None:
        settle = Settle(act, topic, group, one.partition, one.offset, "worker", reason=reason)
        await self._ask(self._engine.settle, TENANT, settle)


def with_node(server: NatsServer, script: Callable[[Desk], Coroutine[Any, Any, T]], **limits: Any) -> T:
    """Run a script of requests against a node that is there for it alone."""

    async def whole() -> T:
        async with connect(server.url) as client:
            engine = await open_jetstream(client, limits=Limits(**{"tick_ms": 10, **limits}), owner_lease_ms=3_000)
            try:
                return await script(Desk(engine, client))
            finally:
                await engine.stop()

    return asyncio.run(whole())
