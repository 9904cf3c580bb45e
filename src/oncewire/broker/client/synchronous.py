"""The sync twin: the same calls over the standard library's connection, one at a time. For one thread."""

from __future__ import annotations

import functools
import http.client
import secrets
import select
import ssl
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeVar

from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery
from oncewire._ground.errors import NotConnected, OutcomeUnknown, ProtocolViolation, TimedOut
from oncewire.broker.client import calls
from oncewire.broker.client.asynchronous import ANSWER_BYTES_MAX, RETRY_FIRST_S, RETRY_MOST_S, Trust
from oncewire.broker.client.calls import Call, Lease, Message, Result
from oncewire.broker.engine import IdempotencyStatus, TopicCreated, TopicShown

T = TypeVar("T")


class SyncBrokerClient:
    """`with SyncBrokerClient("http://127.0.0.1:8080") as client`. See BrokerClient for what each call does."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        owner: str = "",
        timeout_s: float = 30.0,
        token: str = "",
        tls: Trust | None = None,
    ) -> None:
        self._address = calls.address_of(url)
        self.owner = owner or f"py-{secrets.token_hex(6)}"
        self._timeout_s = timeout_s
        self._tls = tls or functools.cache(ssl.create_default_context)
        self._headers = dict(calls.headers_of(token))
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> SyncBrokerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def create_topic(self, name: str, *, partitions: int = 1) -> TopicCreated:
        return self.call(calls.create_topic(name, partitions))

    def topics(self) -> list[str]:
        return self.call(calls.list_topics())

    def topic(self, name: str) -> TopicShown:
        return self.call(calls.show_topic(name))

    def delete_topic(self, name: str) -> None:
        self.call(calls.delete_topic(name))

    def version(self) -> dict[str, Any]:
        return self.call(calls.version())

    def produce(self, topic: str, value: str, *, key: str = "", envelope: BrokerEnvelope | None = None) -> None:
        self.call(calls.produce(Message(topic, value, key, envelope or BrokerEnvelope())))

    def produce_many(self, messages: Iterable[Message]) -> list[Result]:
        return self.call(calls.produce_many(messages))

    def take(
        self, topic: str, group: str, *, most: int = 1, wait_s: float = 0.0, lease_ms: int | None = None
    ) -> list[Delivery]:
        return self.call(calls.take(topic, group, self.owner, most, round(wait_s * 1000), lease_ms))

    def lease(self, topic: str, group: str, delivery: Delivery) -> Lease:
        return Lease(topic, group, self.owner, delivery.partition, delivery.offset)

    def ack(self, lease: Lease) -> None:
        self.call(lease.settle("ack"))

    def nack(self, lease: Lease, reason: str = "") -> None:
        self.call(lease.settle("nack", reason=reason))

    def extend(self, lease: Lease, *, lease_ms: int | None = None) -> None:
        self.call(lease.settle("extend", **({} if lease_ms is None else {"lease_ms": lease_ms})))

    def ack_many(self, leases: Iterable[Lease]) -> list[Result]:
        return self.call(calls.settle_many("ack", list(leases)))

    def begin(self, lease: Lease, key: str, *, tenant_id: str = "") -> IdempotencyStatus:
        return self.call(lease.idempotency("begin", tenant_id, key))

    def mark_success(self, lease: Lease, key: str, *, tenant_id: str = "") -> IdempotencyStatus:
        return self.call(lease.idempotency("success", tenant_id, key))

    def mark_failure(self, lease: Lease, key: str, error: str, *, tenant_id: str = "") -> IdempotencyStatus:
        return self.call(lease.idempotency("failure", tenant_id, key, error))

    def call(self, call: Call[T]) -> T:
        """Ask, and ask again where that is safe."""
        deadline = time.monotonic() + self._timeout_s
        delay_s = RETRY_FIRST_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                status, body = self._ask(call, max(0.1, left_s) + call.wait_s)
            except (NotConnected, OutcomeUnknown) as error:
                is_safe = call.is_repeatable or isinstance(error, NotConnected)
                if not is_safe or left_s <= delay_s:
                    raise
            else:
                return calls.answer(call, status, body)
            time.sleep(delay_s)
            delay_s = min(RETRY_MOST_S, delay_s * 2)

    def _ask(self, call: Call[Any], timeout_s: float) -> tuple[int, bytes]:
        connection = self._connected(timeout_s)
        headers = dict(self._headers)
        if call.body:
            headers["Content-Type"] = call.content_type
        try:
            connection.request(call.method, self._address.prefix + call.path, call.body or None, headers)
            response = connection.getresponse()
            body = response.read(ANSWER_BYTES_MAX + 1)
        except TimeoutError:
            self.close()
            raise TimedOut(f"no answer from the broker at {self._address.authority} in time") from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise OutcomeUnknown(f"the connection to the broker broke: {error!r}") from None
        if len(body) > ANSWER_BYTES_MAX:
            self.close()
            raise ProtocolViolation(f"the broker's answer is larger than {ANSWER_BYTES_MAX} bytes")
        return response.status, body

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is not None and _is_closed(self._connection):
            self.close()
        if self._connection is None:
            connection = self._new_connection(timeout_s)
            try:
                connection.connect()
            except OSError as error:
                raise calls.not_connected(self._address, error) from None
            self._connection = connection
        assert self._connection.sock is not None
        self._connection.sock.settimeout(timeout_s)
        return self._connection

    def _new_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        at = self._address
        if at.is_secure:
            return http.client.HTTPSConnection(at.host, at.port, timeout=timeout_s, context=self._tls())
        return http.client.HTTPConnection(at.host, at.port, timeout=timeout_s)


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the broker closed a connection that waited. Nothing is asked, so what can be read is its end."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
