"""What services tell whoever watches them: health, readiness with the real server gone and back, every metric."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from oncewire import BrokerClient, dlq, outbox
from oncewire._ground import monitor, topology
from oncewire._ground.database.postgres import connected
from oncewire._ground.jetstream import Client, connect
from oncewire._ground.jetstream.losses import Cause, Loss, acknowledge, record
from oncewire._ground.jetstream.protocol import parse_time_ns
from oncewire._ground.metrics.table import TABLE, Kind
from oncewire._ground.settings import Settings
from oncewire._ground.trust.keys import KeyFile
from oncewire.agent import Effect
from oncewire.cli import agent as cli_agent
from oncewire.cli import broker as cli_broker
from oncewire.cli import dlq as cli_dlq
from oncewire.cli import gateway as cli_gateway
from oncewire.cli import observe
from oncewire.cli import relay as cli_relay
from oncewire.pipeline import metrics as pipeline_metrics
from oncewire.pipeline import standing
from oncewire.pipeline.auditing.run import keep_verdict
from oncewire.pipeline.auditing.verdict import Verdict
from oncewire.pipeline.lake.hold import write_state
from oncewire.pipeline.lake.log import Lake
from oncewire.pipeline.reading import Streams
from oncewire.pipeline.tables import BRONZE, app_id, table_path
from tests.support import lakes
from tests.support.gateway import publish
from tests.support.http import get, wire
from tests.support.nats import NatsServer, nats_server
from tests.support.outbox import ENQUEUE
from tests.support.postgres import shared_postgres
from tests.support.running import command, counted, new_agent, run, send, sqlite_in
from tests.support.tls import Authority
from tests.support.wait import until

ANY = "127.0.0.1:0"


@pytest.fixture(scope="module")
def durable() -> Iterator[NatsServer]:
    """A server that keeps its promise against power cuts, and says so."""
    with nats_server(sync_always=True) as running:
        yield running


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "FRESH_S", 0.0)


def settings_for(server: NatsServer, tmp_path: Path, **more: Any) -> Settings:
    monitored = {"nats_url": server.url, "nats_monitor_url": server.monitor_url}
    return Settings(data=tmp_path, metrics_listen=ANY, **(monitored | more))


async def ask(url: str, path: str) -> tuple[int, dict[str, Any]]:
    status, body = await monitor.ask(url, path)
    return status, json.loads(body)


async def judged(url: str) -> dict[str, str]:
    """By check its verdict, and under '' the whole."""
    _, told = await ask(url, "/readyz")
    return {"": told["status"], **{one["name"]: one["verdict"] for one in told["checks"]}}


@contextlib.asynccontextmanager
async def gateway_of(settings: Settings) -> AsyncIterator[tuple[str, Client]]:
    """A gateway that is observed, and its user's client."""
    async with connect(settings.nats_url) as client:
        await topology.ensure(client, topology=topology.load(settings=settings))
        async with (
            cli_gateway.serving(client, settings, "127.0.0.1", 0) as (running, _),
            observe.serving(cli_gateway.observer(settings, client, running)) as url,
        ):
            yield url, client


async def test_readiness_follows_the_server_and_liveness_does_not(tmp_path: Path) -> None:
    """A restart of this process mends nothing while the server is away."""
    with nats_server(sync_always=True) as server:
        async with gateway_of(settings_for(server, tmp_path)) as (url, client):
            assert {"": "ready", "durability": "ok", "gateway": "ok"}.items() <= (await judged(url)).items()
            server.kill()
            await until(lambda: not client.connection.is_ready, "the connection is lost")
            status, told = await ask(url, "/readyz")
            (away,) = [one for one in told["checks"] if one["name"] == "NATS"]
            assert (503, "not ready", "broken") == (status, told["status"], away["verdict"])
            assert "away" in away["text"]
            assert away["remedy"]
            assert (200, {"status": "ok"}) == await ask(url, "/healthz")
            server.start()
            deadline = time.monotonic() + 60
            while (found := await judged(url))[""] != "ready":
                assert time.monotonic() < deadline, found
                await asyncio.sleep(0.05)


async def test_a_weaker_promise_a_drifted_stream_and_a_missing_one_are_told(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    """Degraded still takes work; without its stream nothing can be stored."""
    async with gateway_of(settings_for(shared_server, tmp_path)) as (url, client):
        assert {"": "degraded", "durability": "warning", "topology": "ok"}.items() <= (await judged(url)).items()
        config = (await client.api("STREAM.INFO.CHAT_EVENTS"))["config"]
        await client.api("STREAM.UPDATE.CHAT_EVENTS", config | {"max_age": 10**12})
        assert {"": "degraded", "topology": "warning"}.items() <= (await judged(url)).items()
        await client.api("STREAM.DELETE.CHAT_EVENTS")
        assert {"": "not ready", "topology": "broken"}.items() <= (await judged(url)).items()


async def test_a_loss_degrades_until_a_person_has_looked(durable: NatsServer, tmp_path: Path) -> None:
    settings = settings_for(durable, tmp_path)
    loss = Loss("BILLING", "2026-11-16T00:00:00Z", "worker", Cause.TRIMMED, 3, 9, found_ms=1)
    async with connect(durable.url) as client:
        await topology.ensure(client, topology=topology.load(settings=settings))
        async with (
            dlq.serving(client) as service,
            observe.serving(cli_dlq.observer(settings, client, service)) as url,
        ):
            assert {"": "ready", "losses": "ok"}.items() <= (await judged(url)).items()
            await record(client, loss)
            _, told = await ask(url, "/readyz")
            assert ("degraded", True) == (told["status"], loss.sentence in json.dumps(told, ensure_ascii=False))
            assert 'oncewire_stream_losses{stream="BILLING"} 1\n' in (await monitor.ask(url, "/metrics"))[1].decode()
            await acknowledge(client, "BILLING", 2)
            assert {"": "ready", "losses": "ok"}.items() <= (await judged(url)).items()


async def test_a_relay_is_not_ready_without_its_database(durable: NatsServer, tmp_path: Path) -> None:
    away = "postgresql://app:hunter2@127.0.0.1:1/app"
    settings = settings_for(durable, tmp_path, postgres_url=away)
    async with connect(durable.url) as client:
        relay = outbox.Relay(client, away, outbox.RelayOptions())
        async with observe.serving(cli_relay.observer(settings, client, relay)) as url:
            status, told = await ask(url, "/readyz")
    assert (503, "not ready") == (status, told["status"])
    assert {"PostgreSQL"} <= {one["name"] for one in told["checks"] if one["verdict"] == "broken"}
    assert "hunter2" not in json.dumps(told)


# ---- every metric, from what really runs


async def test_every_declared_metric_is_there_with_its_type_and_labels(durable: NatsServer, tmp_path: Path) -> None:
    """All services with some work behind them; what they show is what is declared, no more and no less."""
    settings = settings_for(durable, tmp_path, postgres_url=await shared_postgres().new_database())
    pages = [
        await page_of_streams(settings, tmp_path),
        await page_of_a_log(tmp_path),
        page_of_a_lake(durable, tmp_path),
    ]
    found: dict[str, tuple[str, set[str]]] = {}
    for page in pages:
        for name, (kind, labels) in read(page).items():
            assert kind == found.setdefault(name, (kind, set()))[0]
            found[name][1].update(labels)
    assert set(TABLE) == set(found)
    wrong = {
        name: (kind, labels)
        for name, (kind, labels) in found.items()
        if kind != TABLE[name].kind
        or labels - {"tenant"} != set(TABLE[name].labels) - {"tenant"} | ({"le"} if kind == Kind.HISTOGRAM else set())
    }
    assert {} == wrong


def read(page: str) -> dict[str, tuple[str, set[str]]]:
    """By name the type and the labels, as any reader of the format finds them."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    found: dict[str, tuple[str, set[str]]] = {}
    for name, labels in re.findall(r"^([a-z_]+)(?:\{(.*)\})? \S+$", page, re.MULTILINE):
        family = name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)
        found.setdefault(family, (kinds[family], set()))[1].update(re.findall(r'([a-z_]+)="', labels))
    return found


async def page_of_streams(settings: Settings, tmp_path: Path) -> str:
    """All that `up` runs, and an agent."""
    async with connect(settings.nats_url) as client, contextlib.AsyncExitStack() as stack:
        await topology.ensure(client, topology=topology.load(settings=settings))
        observer = observe.Observer(settings, client, postgres_url=settings.postgres_url, sees_losses=True)
        relay = await stack.enter_async_context(outbox.relaying(client, settings.postgres_url))
        service = await stack.enter_async_context(dlq.serving(client, dlq.DlqOptions(sweep_s=0.2)))
        gateway, _ = await stack.enter_async_context(cli_gateway.serving(client, settings, "127.0.0.1", 0))
        engine = settings_with(settings, broker_engine="jetstream", broker_listen=ANY)
        _, routes = await stack.enter_async_context(cli_broker.serving(engine))
        agent = new_agent()

        @agent.on(command(agent, "charge"))
        def charge(_: Any, payload: dict[str, Any]) -> Effect:
            if payload.get("is_poison"):
                raise ValueError("poison")
            return Effect(f"evt.default.default.{agent.name}.charged", payload)

        runner = await stack.enter_async_context(run(agent, client, sqlite_in(tmp_path), settings=settings))
        for part in (cli_relay.watched(relay), cli_dlq.watched(service), cli_gateway.watched(gateway)):
            observer.watch(part, client)
        observer.watch(cli_broker.watched(routes), cli_broker.client_of(routes))
        observer.watch(cli_agent.watched(runner), client)
        url = await stack.enter_async_context(observe.serving(observer))
        await some_work(client, settings, agent)
        await counted(runner, done=1, terminated=1)
        await until(lambda: service.letters and service.swept and relay.published, "a letter, a sweep, a row")
        await until(lambda: gateway.node.counts["handed_out"], "a message is handed out")
        assert routes.server is not None
        await some_queueing(f"http://127.0.0.1:{routes.server.port}")
        return (await monitor.ask(url, "/metrics"))[1].decode()


def settings_with(settings: Settings, **values: Any) -> Settings:
    return dataclasses.replace(settings, **values)


async def some_work(client: Client, settings: Settings, agent: Any) -> None:
    await send(client, command(agent, "charge"), {"amount": 1})
    await client.publish(command(agent, "charge"), b"no envelope", raw=True)
    await publish(client, "11111111-1111-4111-8111-111111111111", 1, 3)
    async with connected(settings.postgres_url) as database:
        await database.fetch(ENQUEUE, "22222222-2222-4222-8222-222222222222", "hello")


async def some_queueing(url: str) -> None:
    async with BrokerClient(url) as queues:
        await queues.create_topic("orders")
        await queues.produce("orders", "hello")
        await queues.take("orders", "billing", wait_s=20.0, lease_ms=60_000)


async def page_of_a_log(tmp_path: Path) -> str:
    """A broker with its own log, behind a certificate."""
    cert, key = Authority(tmp_path).issue("localhost")
    named = {"http_tls_cert": str(cert), "http_tls_key": str(key), "broker_listen": ANY, "data": tmp_path}
    settings = Settings(broker_wal=str(tmp_path / "queue"), metrics_listen=ANY, **named)
    async with cli_broker.serving(settings) as (_, routes):
        observer = cli_broker.observer(settings, routes)
        async with observe.serving(observer) as url:
            assert url.startswith("https://")
            page = observe.Page()
            await observer.look()
            observer.collect(page)
    return page.text()


def page_of_a_lake(server: NatsServer, tmp_path: Path) -> str:
    made = lakes.Lake(tmp_path / "lake")
    made.event("charged")
    path = made.path if made.path.exists() else made.write()
    keep_verdict(path, Verdict(True, 1_000, 0.1, [], {}, [], [], 0, [], []))
    watch = pipeline_metrics.Watch(Lake(path), [lakes.EVENTS], lambda: Streams({"url": server.url}))
    watch.look()
    page = observe.Page()
    watch.collect(page)
    return page.text()


async def test_a_stream_whose_messages_were_gone_when_it_was_read_is_not_behind(
    durable: NatsServer, tmp_path: Path
) -> None:
    """A dead letter that was replayed before the pipeline came: bronze has its range, and no row of it."""
    async with connect(durable.url) as client:
        made = await client.api("STREAM.CREATE.EMPTIED", {"name": "EMPTIED", "subjects": ["emptied"]})
        await client.publish("emptied", b"x", msg_id="x")
        await client.api("STREAM.PURGE.EMPTIED", {})
    lake = lakes.Lake(tmp_path / "lake")
    lake.event("charged")
    path = lake.write()
    read = Transaction(app_id(("EMPTIED", parse_time_ns(made["created"]), 0)), 1)
    write_deltalake(
        table_path(path, BRONZE.name), BRONZE.schema.empty_table(), mode="append",
        commit_properties=CommitProperties(app_transactions=[read]),
    )  # fmt: skip
    with contextlib.closing(Streams({"url": durable.url})) as server:
        (found,) = standing.streams(Lake(path), ["EMPTIED"], server)
    assert (1, 1) == (found.reached, found.last)


def test_a_topic_that_the_lake_stopped_reading_is_counted_and_it_is_not_ready(
    durable: NatsServer, tmp_path: Path
) -> None:
    assert "\noncewire_pipeline_topics_stopped 0\n" in page_of_a_lake(durable, tmp_path)
    write_state(tmp_path / "lake", {"streams": {}, "topics": {"stopped": {"OWB+jobs": "it went back"}}})
    page = page_of_a_lake(durable, tmp_path)
    assert "\noncewire_pipeline_topics_stopped 1\n" in page
    assert "\noncewire_pipeline_ready 0\n" in page


async def test_watchers_need_a_credential_where_clients_do(tmp_path: Path) -> None:
    """Health and readiness are open: who restarts and who balances load has no key."""
    _, good = KeyFile(tmp_path / "keys.json").create("prometheus", "ops", ("metrics:every-tenant",), 1)
    settings = Settings(data=tmp_path, metrics_listen=ANY, auth_keys=str(tmp_path / "keys.json"))
    async with observe.serving(observe.Observer(settings)) as url, wire(int(url.rpartition(":")[2])) as watcher:
        asked = [get("/healthz"), get("/readyz"), get("/metrics"), get("/metrics", f"Authorization: Bearer {good}")]
        assert [200, 200, 401, 200] == [(await watcher.ask(one)).status for one in asked]
