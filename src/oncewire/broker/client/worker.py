"""A worker: takes messages, runs an effect once for each, and settles them.

The consumer contract, in its order: begin (is it done already?), the effect, mark success, ack; when the effect fails,
mark failure and nack with the reason. Without an idempotency key there is nothing to begin or to mark, and the effect
runs once per delivery. While an effect runs its lease is renewed; a lease that was lost all the same is not settled,
since another worker has the message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from oncewire._ground.contracts.broker import Delivery
from oncewire._ground.errors import OncewireError, Refused, Unavailable
from oncewire.broker.client.asynchronous import RETRY_FIRST_S, RETRY_MOST_S, BrokerClient
from oncewire.broker.client.calls import Lease

Effect = Callable[[Delivery], Awaitable[None]]

REASON_CHARS_MAX = 500
_log = logging.getLogger("oncewire.broker.worker")


class Worker:
    """`await Worker(client, "orders", "billing", effect).run()` until `stop`."""

    def __init__(
        self,
        client: BrokerClient,
        topic: str,
        group: str,
        effect: Effect,
        *,
        lease_ms: int = 30_000,
        concurrency: int = 1,
        wait_s: float = 20.0,
    ) -> None:
        self._client = client
        self._topic = topic
        self._group = group
        self._effect = effect
        self._lease_ms = lease_ms
        self._concurrency = concurrency
        self._wait_s = wait_s
        self._running: set[asyncio.Task[None]] = set()
        self._is_stopping = asyncio.Event()
        self.done = 0
        """Messages acked."""
        self.failed = 0
        """Messages given back."""

    def stop(self) -> None:
        """Take nothing more; `run` returns when what is in hand is settled."""
        self._is_stopping.set()

    async def run(self) -> None:
        """Work until `stop`. While the broker is away it waits; when it refuses (no such topic), it raises."""
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._is_stopping.wait())
        delay_s = RETRY_FIRST_S
        try:
            while not self._is_stopping.is_set():
                try:
                    await self._round(stopping)
                    delay_s = RETRY_FIRST_S
                except Unavailable as error:
                    _log.warning("the broker is away, trying again: %s", error)
                    await asyncio.wait([stopping], timeout=delay_s)
                    delay_s = min(RETRY_MOST_S, delay_s * 2)
        finally:
            stopping.cancel()
            if self._running:
                await asyncio.wait(self._running)

    async def _round(self, stopping: asyncio.Future[Any]) -> None:
        """Take as many as there are hands free."""
        if len(self._running) >= self._concurrency:
            waiting: list[asyncio.Future[Any]] = [stopping, *self._running]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return
        free = self._concurrency - len(self._running)
        taking: asyncio.Future[list[Delivery]] = asyncio.ensure_future(
            self._client.take(self._topic, self._group, most=free, wait_s=self._wait_s, lease_ms=self._lease_ms)
        )
        either: list[asyncio.Future[Any]] = [stopping, taking]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()  # the broker sees the client go, and leases it nothing
            await asyncio.wait([taking])
            return
        for delivery in taking.result():
            task = asyncio.ensure_future(self._handle(delivery))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _handle(self, delivery: Delivery) -> None:
        lease = self._client.lease(self._topic, self._group, delivery)
        renewing = asyncio.ensure_future(self._renew(lease))
        try:
            await self._follow_contract(lease, delivery)
        except OncewireError as error:
            # Not settled: the lease lapses and the message comes again. With a key the effect does not run again.
            _log.warning("message %s/%s could not be settled: %s", delivery.partition, delivery.offset, error)
        finally:
            renewing.cancel()

    async def _follow_contract(self, lease: Lease, delivery: Delivery) -> None:
        key = delivery.envelope.idempotency_key if delivery.envelope else ""
        tenant = delivery.envelope.tenant_id if delivery.envelope else ""
        if key and (await self._client.begin(lease, key, tenant_id=tenant)).status == "COMMITTED":
            await self._ack(lease)
            return
        try:
            await self._effect(delivery)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
            _log.warning("message %s/%s failed: %s", delivery.partition, delivery.offset, reason)
            if key:
                await self._client.mark_failure(lease, key, reason, tenant_id=tenant)
            await self._client.nack(lease, reason)
            self.failed += 1
            return
        if key:
            await self._client.mark_success(lease, key, tenant_id=tenant)
        await self._ack(lease)

    async def _ack(self, lease: Lease) -> None:
        await self._client.ack(lease)
        self.done += 1

    async def _renew(self, lease: Lease) -> None:
        """Until cancelled, or until the broker says that the lease is another's."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            try:
                await self._client.extend(lease, lease_ms=self._lease_ms)
            except Refused as error:
                _log.warning("the lease of %s/%s is lost: %s", lease.partition, lease.offset, error)
                return
            except Unavailable:
                continue
