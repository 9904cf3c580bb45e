"""The async client: a few connections to one broker, each with one request at a time.

A connection that broke is replaced. Calls that may be repeated are, with a growing delay, until `timeout_s` is over;
the others end in OutcomeUnknown once a byte of them may have been read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar, cast

import httptools

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery
from oncewire._ground.errors import NotConnected, OutcomeUnknown, ProtocolViolation, TimedOut
from oncewire.broker.client import calls
from oncewire.broker.client.calls import Address, Call, Lease, Message, Result
from oncewire.broker.engine import IdempotencyStatus, TopicCreated, TopicShown

T = TypeVar("T")
Trust = Callable[[], ssl.SSLContext]
CONNECTIONS_MAX = 16
ANSWER_BYTES_MAX = 64 << 20
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0
STREAM_BYTES_MAX = 4 << 20
"""Of a stream that its reader does not take: then the socket is not read on."""


class Connection(asyncio.Protocol):
    """One socket, one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._size = 0
        self._done: asyncio.Future[tuple[int, bytes]] | None = None
        self._pieces: asyncio.Queue[bytes] | None = None
        self._queued = 0
        self.is_usable = True
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as wrong:
            self._fail(ProtocolViolation(f"the broker's answer is not HTTP: {wrong}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.is_usable = False
        self._fail(OutcomeUnknown("the broker closed the connection before it answered"))
        if self._pieces is not None:
            self._pieces.put_nowait(b"")

    def on_headers_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_usable = False
        if self._pieces is not None and self._done is not None and self._parser.get_status_code() == 200:
            self._finish(b"")

    def on_body(self, data: bytes) -> None:
        if self._pieces is not None and self._done is None:
            self._queued += len(data)
            self._pieces.put_nowait(data)
            if self._queued > STREAM_BYTES_MAX:
                self.transport.pause_reading()
            return
        self._size += len(data)
        if self._size > ANSWER_BYTES_MAX:
            self._fail(ProtocolViolation(f"the broker's answer is larger than {ANSWER_BYTES_MAX} bytes"))
            self.close()
            return
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._pieces is not None and self._done is None:
            self._pieces.put_nowait(b"")
            return
        body, self._body, self._size = b"".join(self._body), [], 0
        self._finish(body)

    def _finish(self, body: bytes) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result((self._parser.get_status_code(), body))

    def _fail(self, error: Exception) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(error)

    async def ask(self, request: bytes, timeout_s: float) -> tuple[int, bytes]:
        """The answer to a request. Who gives up makes the connection useless: its answer may still come."""
        done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._done = done
        self.transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except BaseException:
            self.close()
            raise

    async def open_stream(self, request: bytes, timeout_s: float) -> tuple[int, bytes]:
        self._pieces = asyncio.Queue()
        return await self.ask(request, timeout_s)

    async def piece(self) -> bytes:
        """The next piece of a stream, empty at its end."""
        assert self._pieces is not None
        piece = await self._pieces.get()
        self._queued -= len(piece)
        if self._queued <= STREAM_BYTES_MAX // 2 and not self.transport.is_closing():
            self.transport.resume_reading()
        return piece

    def close(self) -> None:
        self.is_usable = False
        self.transport.close()


class BrokerClient:
    """`async with BrokerClient("http://127.0.0.1:8080") as client`. `owner` names this process to the broker.

    With an `https` address `tls` says whom to trust, for each new connection; without it, whom the system trusts.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        owner: str = "",
        timeout_s: float = 30.0,
        token: str = "",
        tls: Trust | None = None,
    ) -> None:
        self._address: Address = calls.address_of(url)
        self.owner = owner or f"py-{secrets.token_hex(6)}"
        self._timeout_s = timeout_s
        self._tls = tls or functools.cache(ssl.create_default_context)
        self._headers = calls.headers_of(token)
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._streams: set[Connection] = set()

    async def __aenter__(self) -> BrokerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. A reader of a stream sees its end."""
        for connection in [*self._idle, *self._streams]:
            connection.close()
        self._idle.clear()

    # ---- topics

    async def create_topic(self, name: str, *, partitions: int = 1) -> TopicCreated:
        """Make a topic. One that is there keeps its partition count, and that is what comes back."""
        return await self.call(calls.create_topic(name, partitions))

    async def topics(self) -> list[str]:
        return await self.call(calls.list_topics())

    async def topic(self, name: str) -> TopicShown:
        return await self.call(calls.show_topic(name))

    async def delete_topic(self, name: str) -> None:
        await self.call(calls.delete_topic(name))

    async def version(self) -> dict[str, Any]:
        return await self.call(calls.version())

    # ---- messages

    async def produce(self, topic: str, value: str, *, key: str = "", envelope: BrokerEnvelope | None = None) -> None:
        """Store a message. Returns when it is as durable as the broker makes it."""
        await self.call(calls.produce(Message(topic, value, key, envelope or BrokerEnvelope())))

    async def produce_many(self, messages: Iterable[Message]) -> list[Result]:
        """Store many with one commit. Look at each result's `problem`."""
        return await self.call(calls.produce_many(messages))

    async def take(
        self, topic: str, group: str, *, most: int = 1, wait_s: float = 0.0, lease_ms: int | None = None
    ) -> list[Delivery]:
        """Up to `most` messages, as soon as there is one; none after `wait_s`."""
        call = calls.take(topic, group, self.owner, most, round(wait_s * 1000), lease_ms)
        return await self.call(call)

    async def consume(
        self, topic: str, group: str, *, in_flight: int = 1, lease_ms: int | None = None
    ) -> AsyncIterator[Delivery]:
        """Messages as they come, over one stream that is opened again when it breaks.

        The broker sends at most `in_flight` that are not settled. Leases run while messages wait for their turn, so ask
        for as many as you work on at a time: one, if you settle each before the next.
        """
        delay_s = RETRY_FIRST_S
        while True:
            try:
                async with contextlib.aclosing(self._stream(topic, group, in_flight, lease_ms)) as lines:
                    async for delivery in lines:
                        delay_s = RETRY_FIRST_S
                        yield delivery
            except (NotConnected, OutcomeUnknown, TimedOut):
                pass
            await asyncio.sleep(delay_s)
            delay_s = min(RETRY_MOST_S, delay_s * 2)

    async def _stream(
        self, topic: str, group: str, in_flight: int, lease_ms: int | None
    ) -> AsyncGenerator[Delivery, None]:
        wanted: dict[str, Any] = {"topic": topic, "group": group, "owner": self.owner, "in_flight": in_flight}
        if lease_ms is not None:
            wanted["lease_ms"] = lease_ms
        call = Call("GET", "/v1/consume", calls.body_of(wanted), calls.deliveries, True)
        connection = await self._connect()
        self._streams.add(connection)
        try:
            request = calls.encode_call(self._address, call, self._headers)
            status, body = await connection.open_stream(request, self._timeout_s)
            calls.answer(call, status, body)
            left = b""
            while piece := await connection.piece():
                whole, _, left = (left + piece).rpartition(b"\n")
                for delivery in calls.deliveries(whole):
                    yield delivery
        finally:
            self._streams.discard(connection)
            connection.close()

    def lease(self, topic: str, group: str, delivery: Delivery) -> Lease:
        """What settlements of a delivery name."""
        return Lease(topic, group, self.owner, delivery.partition, delivery.offset)

    async def ack(self, lease: Lease) -> None:
        await self.call(lease.settle("ack"))

    async def nack(self, lease: Lease, reason: str = "") -> None:
        await self.call(lease.settle("nack", reason=reason))

    async def extend(self, lease: Lease, *, lease_ms: int | None = None) -> None:
        await self.call(lease.settle("extend", **({} if lease_ms is None else {"lease_ms": lease_ms})))

    async def ack_many(self, leases: Iterable[Lease]) -> list[Result]:
        """Ack many with one commit. Look at each result's `problem`."""
        return await self.call(calls.settle_many("ack", list(leases)))

    async def begin(self, lease: Lease, key: str, *, tenant_id: str = "") -> IdempotencyStatus:
        """Before an effect. COMMITTED: it is done already, skip it and ack."""
        return await self.call(lease.idempotency("begin", tenant_id, key))

    async def mark_success(self, lease: Lease, key: str, *, tenant_id: str = "") -> IdempotencyStatus:
        return await self.call(lease.idempotency("success", tenant_id, key))

    async def mark_failure(self, lease: Lease, key: str, error: str, *, tenant_id: str = "") -> IdempotencyStatus:
        return await self.call(lease.idempotency("failure", tenant_id, key, error))

    # ---- connections

    async def call(self, call: Call[T]) -> T:
        """Ask, and ask again where that is safe."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        request = calls.encode_call(self._address, call, self._headers)
        delay_s = RETRY_FIRST_S
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                status, body = await self._ask(request, max(0.1, left_s) + call.wait_s)
            except (NotConnected, OutcomeUnknown) as error:
                is_safe = call.is_repeatable or isinstance(error, NotConnected)
                if not is_safe or left_s <= delay_s:
                    raise
            else:
                return calls.answer(call, status, body)
            await asyncio.sleep(delay_s)
            delay_s = min(RETRY_MOST_S, delay_s * 2)

    async def _ask(self, request: bytes, timeout_s: float) -> tuple[int, bytes]:
        async with self._slots:
            connection = self._idle.pop() if self._idle else await self._connect()
            if not connection.is_usable or connection.transport.is_closing():
                connection = await self._connect()
            try:
                answer = await connection.ask(request, timeout_s)
            except TimeoutError:
                raise TimedOut(f"no answer from the broker at {self._address.authority} in time") from None
            if connection.is_usable:
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                at = self._address
                tls = self._tls() if at.is_secure else None
                _, connection = await loop.create_connection(Connection, at.host, at.port, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise calls.not_connected(self._address, error) from None
        return connection
