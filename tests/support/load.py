"""Publishers and consumers under load, with a count that only they and an outside witness keep."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from oncewire._ground.errors import OncewireError
from oncewire._ground.jetstream import Client, Options, Outgoing, PubAck

PAYLOAD = b"x" * 200


def load_client(*urls: str, **changes: Any) -> Client:
    options: dict[str, Any] = {
        "reconnect_delay_min_s": 0.02,
        "reconnect_delay_max_s": 0.3,
        "connect_timeout_s": 2.0,
        "ping_interval_s": 1.0,
    }
    return Client(Options(urls, **(options | changes)))


class Publisher:
    """Publishes in rounds until told to stop, by four ways in turn; notes every id that was acknowledged."""

    def __init__(self, client: Client, stream: str, name: str, *, batch: int = 20) -> None:
        self._client = client
        self._stream = stream
        self._name = name
        self._batch = batch
        self.acknowledged: set[str] = set()
        self.errors: Counter[str] = Counter()
        self.rounds = 0

    def _messages(self) -> list[Outgoing]:
        self.rounds += 1
        ids = [f"{self._name}-{self.rounds}-{index}" for index in range(self._batch)]
        return [Outgoing(f"{self._stream}.{self._name}", PAYLOAD, one) for one in ids]

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            messages = self._messages()
            try:
                match self.rounds % 4:
                    case 0:
                        await self._singles(messages)
                    case 1:
                        self._note(messages, await self._client.publish_all(messages))
                    case 2:
                        self._note(messages, await self._client.publish_many(messages))
                    case _:
                        await self._client.publish_fast(messages)
                        self.acknowledged |= {message.msg_id for message in messages}
            except OncewireError as error:
                self._note(messages, [error] * len(messages))
            await asyncio.sleep(0.002)

    async def _singles(self, messages: list[Outgoing]) -> None:
        for message in messages[:5]:
            self._note([message], [await self._client.publish_one(message)])

    def _note(self, messages: list[Outgoing], outcomes: list[Any]) -> None:
        for message, outcome in zip(messages, outcomes, strict=True):
            if isinstance(outcome, PubAck):
                self.acknowledged.add(message.msg_id)
            else:
                self.errors[f"{type(outcome).__name__}: {outcome}"] += 1


class Consumer:
    """Pulls and acks until told to stop; notes every id it saw."""

    def __init__(self, client: Client, stream: str, consumer: str) -> None:
        self._client = client
        self._stream = stream
        self._consumer = consumer
        self.seen: set[str] = set()
        self.errors: Counter[str] = Counter()

    async def run(self, stop: asyncio.Event) -> None:
        async with self._client.pull(self._stream, self._consumer, batch=50, heartbeat_s=0.5, expires_s=5.0) as pull:
            while not stop.is_set():
                messages = await pull.fetch(timeout_s=0.2)
                self.seen |= {message.headers["Nats-Msg-Id"] for message in messages}
                try:
                    pull.ack(messages)
                except OncewireError as error:  # the connection is down: they come back
                    self.errors[type(error).__name__] += 1


class Load:
    """Some publishers and consumers of one stream, each with its own connection."""

    def __init__(self, urls: list[str], stream: str, consumer: str, *, count: int) -> None:
        self._clients = [load_client(*urls) for _ in range(2 * count)]
        publishing, consuming = self._clients[:count], self._clients[count:]
        self.publishers = [Publisher(client, stream, f"p{index}") for index, client in enumerate(publishing)]
        self.consumers = [Consumer(client, stream, consumer) for client in consuming]
        self._stop_publishing = asyncio.Event()
        self._stop_consuming = asyncio.Event()
        self._publishing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []

    @property
    def acknowledged(self) -> set[str]:
        return set().union(*(publisher.acknowledged for publisher in self.publishers))

    @property
    def seen(self) -> set[str]:
        return set().union(*(consumer.seen for consumer in self.consumers))

    @property
    def errors(self) -> Counter[str]:
        return sum((publisher.errors for publisher in self.publishers), Counter())

    async def __aenter__(self) -> Load:
        await asyncio.gather(*(client.open() for client in self._clients))
        self._publishing = [asyncio.create_task(one.run(self._stop_publishing)) for one in self.publishers]
        self._consuming = [asyncio.create_task(one.run(self._stop_consuming)) for one in self.consumers]
        return self

    async def stop_publishing(self) -> None:
        self._stop_publishing.set()
        await asyncio.gather(*self._publishing)

    async def __aexit__(self, *_: object) -> None:
        self._stop_publishing.set()
        self._stop_consuming.set()
        await asyncio.gather(*self._publishing, *self._consuming)
        await asyncio.gather(*(client.close() for client in self._clients))
