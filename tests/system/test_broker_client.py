"""The broker's clients and the worker, against a real broker, over connections that break."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import oncewire
from oncewire._ground.contracts.broker import BrokerEnvelope, Delivery, RetryPolicy
from oncewire._ground.errors import (
    AuthenticationFailed,
    Conflict,
    InvalidSetting,
    NotConnected,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Refused,
    TimedOut,
)
from oncewire._ground.settings import resolve
from oncewire.broker.client import BrokerClient, Message, SyncBrokerClient, Worker
from oncewire.cli.broker import serving
from tests.support.fakes import Proxy
from tests.support.scenarios import local_broker
from tests.support.tls import Authority
from tests.support.wait import until, within

KEYED = BrokerEnvelope(idempotency_key="i", tenant_id="acme")


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    async with local_broker({"wal": "", "tick_ms": "10", "partition_messages_max": "50"}, tmp_path / "wal") as port:
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[BrokerClient]:
    async with BrokerClient(f"http://127.0.0.1:{port}", timeout_s=20) as client:
        await client.create_topic("t")
        yield client


async def test_every_call_of_the_async_client(client: BrokerClient) -> None:
    assert 3 == (await client.create_topic("a/b é", partitions=3)).partitions
    assert ["a/b é", "t"] == await client.topics()
    assert 3 == len((await client.topic("a/b é")).partitions)
    await client.delete_topic("a/b é")
    assert (await client.version())["wal_enabled"]
    await client.produce("t", "one", key="k", envelope=KEYED)
    results = await client.produce_many([Message("t", "two"), Message("none", "x"), Message("t", "three")])
    assert [0, -1, 0] == [result.partition for result in results]
    assert [None, Refused, None] == [type(result.problem) if result.problem else None for result in results]
    taken = await client.take("t", "g", most=10, wait_s=10, lease_ms=60_000)
    assert ["one", "two", "three"] == [delivery.value for delivery in taken]
    first, second, third = [client.lease("t", "g", delivery) for delivery in taken]
    await client.extend(first, lease_ms=60_000)
    assert "PENDING" == (await client.begin(first, "i", tenant_id="acme")).status
    assert "FAILED" == (await client.mark_failure(first, "i", "no", tenant_id="acme")).status
    assert "no" == (await client.begin(first, "i", tenant_id="acme")).last_error
    assert "COMMITTED" == (await client.mark_success(first, "i", tenant_id="acme")).status
    await client.ack(first)
    await client.nack(second, "broken")
    assert [None] == [result.problem for result in await client.ack_many([third])]
    again = await client.take("t", "g", wait_s=10)
    assert [("two", 2, "broken")] == [(one.value, one.attempts, one.last_error) for one in again]


def use_every_call(url: str) -> None:
    with SyncBrokerClient(url, timeout_s=20) as client:
        assert 2 == client.create_topic("s", partitions=2).partitions
        assert ["s"] == client.topics()
        assert client.version()["wal_enabled"]
        client.produce("s", "one", envelope=KEYED)
        assert [0] == [result.partition for result in client.produce_many([Message("s", "two")])]
        taken = client.take("s", "g", most=10, wait_s=10, lease_ms=60_000)
        first, second = [client.lease("s", "g", delivery) for delivery in taken]
        client.extend(first)
        assert "PENDING" == client.begin(first, "i", tenant_id="acme").status
        client.mark_failure(first, "i", "no", tenant_id="acme")
        client.begin(first, "i", tenant_id="acme")
        client.mark_success(first, "i", tenant_id="acme")
        client.ack(first)
        with pytest.raises(Refused, match="not in-flight"):
            client.ack(first)
        client.nack(second, "broken")
        again = client.take("s", "g", wait_s=10)
        assert [("two", "broken")] == [(one.value, one.last_error) for one in again]
        assert [None] == [result.problem for result in client.ack_many([second])]
        assert 0 == client.topic("s").groups[0].lag
        client.delete_topic("s")
        with pytest.raises(NotFound, match="topic does not exist"):
            client.topic("s")


async def test_every_call_of_the_sync_client(port: int) -> None:
    await asyncio.get_running_loop().run_in_executor(None, use_every_call, f"http://127.0.0.1:{port}")


async def test_refusals_become_errors_of_ours(client: BrokerClient, port: int) -> None:
    with pytest.raises(Refused, match="create it first"):
        await client.produce("none", "x")
    await client.produce("t", "x")
    (delivery,) = await client.take("t", "g", wait_s=10, lease_ms=60_000)
    async with BrokerClient(f"http://127.0.0.1:{port}") as other:
        with pytest.raises(Conflict, match="not owner"):
            await other.ack(other.lease("t", "g", delivery))
    results = await client.produce_many([Message("t", "x")] * 60)
    assert 49 == len([result for result in results if result.problem is None])
    with pytest.raises(Overloaded) as caught:
        await client.produce("t", "x")
    assert 1.0 == caught.value.retry_after_s


async def test_no_broker_is_not_connected() -> None:
    async with BrokerClient("http://127.0.0.1:1", timeout_s=0.2) as client:
        with pytest.raises(NotConnected, match=r"no broker at 127\.0\.0\.1:1"):
            await client.produce("t", "x")
    with SyncBrokerClient("http://127.0.0.1:1", timeout_s=0.2) as sync, pytest.raises(NotConnected):
        sync.topics()
    with pytest.raises(InvalidSetting, match="is not an address"):
        BrokerClient("localhost:8080")


async def test_both_clients_speak_tls_to_who_is_trusted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("broker")
    flags = {"broker_listen": "127.0.0.1:0", "broker_wal": str(tmp_path / "wal")}
    flags |= {"http_tls_cert": str(cert), "http_tls_key": str(key)}
    async with serving(resolve(flags, {}, {}).settings) as (front, _):
        url = f"https://127.0.0.1:{front.port}"
        trust = functools.partial(ssl.create_default_context, cafile=str(authority.path))

        def use_both_ways() -> None:
            with SyncBrokerClient(url, tls=trust) as sync:
                assert ["t"] == sync.topics() == sync.topics()
            with SyncBrokerClient(url) as stranger, pytest.raises(AuthenticationFailed, match="not trusted"):
                stranger.topics()

        async with BrokerClient(url, tls=trust) as client:
            await client.create_topic("t")
            await client.produce("t", "x" * 500_000)
            assert [500_000] == [len(one.value) for one in await client.take("t", "g", wait_s=10)]
        async with BrokerClient(url) as stranger:
            with pytest.raises(AuthenticationFailed, match="not trusted"):
                await stranger.topics()
        await asyncio.to_thread(use_both_ways)


async def test_a_produce_without_a_key_is_never_sent_twice(client: BrokerClient, port: int) -> None:
    """Its answer was lost: it may stand there, and only the caller knows whether twice would matter."""
    async with Proxy(port) as proxy, BrokerClient(f"http://127.0.0.1:{proxy.port}", timeout_s=20) as cut:
        proxy.swallow_answers = True
        producing = asyncio.ensure_future(cut.produce("t", "x"))
        await until(lambda: proxy.swallowed_bytes)
        proxy.swallow_answers = False
        proxy.cut()
        with pytest.raises(OutcomeUnknown):
            await within(producing)
    assert 1 == (await client.topic("t")).messages


async def test_a_produce_with_a_key_is_sent_again_and_stands_once(client: BrokerClient, port: int) -> None:
    async with Proxy(port) as proxy, BrokerClient(f"http://127.0.0.1:{proxy.port}", timeout_s=20) as cut:
        proxy.swallow_answers = True
        producing = asyncio.ensure_future(cut.produce("t", "x", envelope=KEYED))
        await until(lambda: proxy.swallowed_bytes)
        proxy.swallow_answers = False
        proxy.cut()
        await within(producing)
        assert 2 <= proxy.connections
    assert 1 == (await client.topic("t")).messages


async def test_an_answer_that_does_not_come_times_out(port: int) -> None:
    async with Proxy(port) as proxy, BrokerClient(f"http://127.0.0.1:{proxy.port}", timeout_s=0.2) as client:
        proxy.swallow_answers = True
        with pytest.raises(TimedOut):
            await client.produce("t", "x")


async def test_a_stream_goes_on_after_its_connection_broke(client: BrokerClient, port: int) -> None:
    async with Proxy(port) as proxy, BrokerClient(f"http://127.0.0.1:{proxy.port}", timeout_s=20) as reader:
        await client.produce("t", "one")
        deliveries = reader.consume("t", "g", lease_ms=1_000)  # what went to the dead stream comes again
        assert "one" == (await within(anext(deliveries))).value
        proxy.cut()
        await client.produce("t", "two")
        while (await within(anext(deliveries))).value != "two":
            pass


async def test_a_worker_runs_an_effect_once_though_it_is_delivered_twice(client: BrokerClient) -> None:
    """The first worker dies after its mark and before its ack."""
    await client.produce("t", "x", envelope=KEYED)
    (delivery,) = await client.take("t", "g", wait_s=10, lease_ms=1_000)
    lease = client.lease("t", "g", delivery)
    await client.begin(lease, "i", tenant_id="acme")
    await client.mark_success(lease, "i", tenant_id="acme")
    ran: list[Delivery] = []

    async def effect(delivery: Delivery) -> None:
        ran.append(delivery)

    worker = Worker(client, "t", "g", effect)
    running = asyncio.ensure_future(worker.run())
    await until(lambda: worker.done)
    worker.stop()
    await within(running)
    assert [] == ran


async def test_a_failed_effect_is_given_back_with_its_reason_and_tried_again(client: BrokerClient) -> None:
    await client.produce(
        "t", "x", envelope=BrokerEnvelope(idempotency_key="i", retry_policy=RetryPolicy(max_attempts=5))
    )
    await client.produce("t", "y")
    seen: list[tuple[str, int, str]] = []

    async def effect(delivery: Delivery) -> None:
        seen.append((delivery.value, delivery.attempts, delivery.last_error))
        if delivery.attempts == 1:
            raise ValueError("not yet")

    worker = Worker(client, "t", "g", effect, concurrency=4)
    running = asyncio.ensure_future(worker.run())
    await until(lambda: worker.done == 2)
    worker.stop()
    await within(running)
    assert 2 == worker.failed
    assert [("x", 1, ""), ("x", 2, "ValueError: not yet"), ("y", 1, ""), ("y", 2, "ValueError: not yet")] == sorted(
        seen
    )


async def test_a_lease_is_renewed_while_the_effect_runs(client: BrokerClient) -> None:
    """Several leases long, and nobody else gets the message; a stop waits for it."""
    await client.produce("t", "x")
    begun, go = asyncio.Event(), asyncio.Event()

    async def effect(delivery: Delivery) -> None:
        begun.set()
        await go.wait()

    worker = Worker(client, "t", "g", effect, lease_ms=2_400)
    running = asyncio.ensure_future(worker.run())
    await within(begun.wait())
    assert [] == await client.take("t", "g", wait_s=3)
    worker.stop()
    await asyncio.sleep(0)
    assert not running.done()
    go.set()
    await within(running)
    assert 1 == worker.done
    assert 0 == (await client.topic("t")).groups[0].lag


async def test_a_worker_waits_for_a_broker_that_is_away(tmp_path: Path) -> None:
    done: list[str] = []

    async def effect(delivery: Delivery) -> None:
        done.append(delivery.value)

    async with (
        local_broker({"wal": ""}, tmp_path / "wal") as first,
        BrokerClient(f"http://127.0.0.1:{first}") as client,
    ):
        await client.create_topic("t")
    async with Proxy(first) as proxy, BrokerClient(f"http://127.0.0.1:{proxy.port}", timeout_s=0.3) as client:
        worker = Worker(client, "t", "g", effect, wait_s=0.2)
        running = asyncio.ensure_future(worker.run())
        await until(lambda: proxy.connections)
        async with local_broker({"wal": ""}, tmp_path / "wal") as second:
            proxy._target = second
            async with BrokerClient(f"http://127.0.0.1:{second}") as producer:
                await producer.produce("t", "x")
            await until(lambda: done)
            worker.stop()
            await within(running)
    assert ["x"] == done


async def test_a_worker_on_a_topic_that_is_not_there_says_so(client: BrokerClient) -> None:
    async def effect(delivery: Delivery) -> None: ...

    with pytest.raises(Refused, match="topic does not exist"):
        await within(Worker(client, "none", "g", effect).run())


def test_the_public_name_is_the_async_client() -> None:
    assert oncewire.BrokerClient is BrokerClient
