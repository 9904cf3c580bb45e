"""Requests that a browser makes for a page of another origin, at every listener: refused before they have an effect."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground import topology
from oncewire._ground.http import OPEN, Routes, Server
from oncewire._ground.jetstream import Client, connect
from oncewire._ground.settings import Settings
from oncewire._ground.trust.keys import KeyFile
from oncewire.cli import broker as cli_broker
from oncewire.cli import console as cli_console
from oncewire.cli import gateway as cli_gateway
from oncewire.cli import observe
from oncewire.console.routes import ConsoleRoutes
from tests.support.http import Answer, get, post, wire
from tests.support.nats import NatsServer

ANY = "127.0.0.1:0"
PAGES = [
    ("Origin: https://evil.example", "Sec-Fetch-Site: cross-site"),
    ("Origin: https://evil.example",),
    ("Origin: http://localhost:1",),
    ("Origin: null",),
    ("Sec-Fetch-Site: cross-site",),
    ("Sec-Fetch-Site: same-site",),
]
EDGES = ["broker", "jetstream broker", "gateway", "console", "metrics"]


@dataclasses.dataclass
class Edge:
    """A listener, and a credential that may do everything there."""

    port: int
    routes: Routes
    credential: str

    async def ask(self, sent: bytes) -> Answer:
        async with wire(self.port) as client:
            return await client.ask(sent)

    def headers(self, *more: str) -> tuple[str, ...]:
        return (*([f"X-Api-Key: {self.credential}"] if self.credential else []), *more)


@contextlib.asynccontextmanager
async def serving(name: str, client: Client, settings: Settings) -> AsyncIterator[tuple[int, Routes]]:
    async with contextlib.AsyncExitStack() as stack:
        if name.endswith("broker"):
            engine = "jetstream" if name.startswith("jetstream") else "local"
            chosen = dataclasses.replace(settings, broker_listen=ANY, broker_engine=engine)
            yield served(await stack.enter_async_context(cli_broker.serving(chosen)))
        elif name == "gateway":
            gateway, _ = await stack.enter_async_context(cli_gateway.serving(client, settings, "127.0.0.1", 0))
            yield served((gateway.server,))
        elif name == "console":
            chosen = dataclasses.replace(settings, console_listen=ANY)
            watch, url = await stack.enter_async_context(cli_console.serving(client, chosen, ""))
            yield int(url.rpartition(":")[2]), ConsoleRoutes(client, watch, None).routes()
        else:
            observer = observe.Observer(dataclasses.replace(settings, metrics_listen=ANY), client)
            await stack.enter_async_context(observe.serving(observer))
            yield served((observer.server,))


def served(found: tuple[Any, ...]) -> tuple[int, Routes]:
    server: Server = found[0]
    return server.port, server.routes


@pytest.fixture(params=["open", "keys"])
async def settings(request: pytest.FixtureRequest, shared_server: NatsServer, tmp_path: Path) -> Settings:
    chosen = Settings(data=tmp_path, nats_url=shared_server.url, console_tenant="acme")
    if request.param == "open":
        return chosen
    keys = KeyFile(tmp_path / "keys.json")
    secret = keys.create("test", "acme", ("*",), int(time.time()))[1]
    (tmp_path / "secret").write_text(secret)
    return dataclasses.replace(chosen, auth_keys=str(keys.path))


@contextlib.asynccontextmanager
async def edge(name: str, settings: Settings) -> AsyncIterator[Edge]:
    secret = Path(settings.data) / "secret"
    async with connect(settings.nats_url) as client:
        await topology.ensure(client)
        async with serving(name, client, settings) as (port, routes):
            yield Edge(port, routes, secret.read_text() if secret.exists() else "")


def asked_of(routes: Routes) -> list[tuple[str, str]]:
    """Every route, and one that there is not."""
    paths = [(method, path.replace("{id}", "x").replace("{name}", "x")) for method, path in routes.rules]
    return [*paths, ("GET", "/nowhere"), ("GET", "/ws")]


@pytest.mark.parametrize("name", EDGES)
async def test_no_route_of_any_listener_answers_a_page_of_another_origin(name: str, settings: Settings) -> None:
    async with edge(name, settings) as there:
        asked = asked_of(there.routes)
        assert len(asked) > 4
        for method, path in asked:
            for page in PAGES:
                answer = await there.ask(get(path, *there.headers(*page)).replace(b"GET", method.encode(), 1))
                assert 403 == answer.status, (method, path, page)
                assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("name", EDGES)
async def test_programs_and_the_own_page_are_answered_as_before(name: str, settings: Settings) -> None:
    """A program sends neither header; a page of the server itself names the server."""
    own = ("Origin: http://localhost", "Sec-Fetch-Site: same-origin")
    async with edge(name, settings) as there:
        opened = {path for (method, path), action in there.routes.rules.items() if (method, action) == ("GET", OPEN)}
        for path in opened:
            for page in ((), own, ("Sec-Fetch-Site: none",)):
                assert (await there.ask(get(path, *there.headers(*page)))).status in (200, 503), (path, page)


@pytest.mark.parametrize("name", EDGES[:2])
async def test_a_foreign_page_changes_nothing_in_the_broker(name: str, settings: Settings) -> None:
    """Neither with JSON as text/plain, which needs no preflight, nor by parameters, nor by a GET that consumes. A
    program that sends JSON without its type is served."""
    async with edge(name, settings) as there:
        plain = there.headers("Content-Type: text/plain;charset=UTF-8")

        async def send(method: str, path: str, body: Any = None, page: tuple[str, ...] = ()) -> Answer:
            sent = b"" if body is None else json.dumps(body).encode()
            return await there.ask(post(path, sent, *plain, *page).replace(b"POST", method.encode(), 1))

        topic = f"orders-{there.port}"
        assert 201 == (await send("POST", "/v1/topics", {"name": topic})).status
        assert 200 == (await send("POST", "/v1/produce", {"topic": topic, "value": "pay 1"})).status
        taken = {"topic": topic, "group": "payout", "owner": "evil", "partition": 0, "offset": 0}
        for page in PAGES:
            for refused in (
                await send("POST", "/v1/produce", {"topic": topic, "value": "forged"}, page),
                await send("POST", f"/v1/produce?topic={topic}&value=forged", page=page),
                await send("GET", f"/v1/consume?topic={topic}&group=payout&owner=evil&max=1", page=page),
                await send("POST", "/v1/ack", taken, page),
                await send("POST", "/v1/nack", taken, page),
                await send("POST", "/v1/topics?name=forged", page=page),
                await send("DELETE", f"/v1/topics/{topic}", page=page),
            ):
                assert 403 == refused.status
        names = (await send("GET", "/v1/topics")).json["topics"]
        assert topic in names
        assert "forged" not in names
        consumed = await send("GET", f"/v1/consume?topic={topic}&group=payout&owner=me&max=10&wait_ms=5000")
        lines = [json.loads(line) for line in consumed.body.splitlines()] if consumed.body else []
        assert [("pay 1", 1)] == [(line["value"], line["attempts"]) for line in lines]
