"""A page of another origin at a gateway that asks for credentials: tickets are renewed, and a refusal is a state."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import oncewire
from oncewire._ground.contracts.headers import TENANT
from oncewire._ground.http import OPEN, Request, Routes
from oncewire._ground.jetstream import Client
from oncewire._ground.settings import resolve
from oncewire._ground.topology import ensure
from oncewire._ground.trust import tickets
from oncewire._ground.trust.keys import KeyFile
from oncewire.cli.gateway import serving
from tests.support.browser import CHROMIUM, Browser, browser
from tests.support.gateway import chunk, lifecycle, message
from tests.support.http import post, wire
from tests.support.http import serving as serving_pages
from tests.support.nats import NatsServer
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.timeout(240),
]

PAGE = b"<!doctype html><title>chat</title><link rel=icon href='data:,'>"
FOLLOW = """
(async () => {{
  const {{ GatewayClient }} = await import("{gateway}/client/index.js");
  window.seen = {{ messages: [], tokens: "", states: [], tokenStates: [], problems: [] }};
  const options = {{ backoffFirstMs: 100, backoffMostMs: 300, credentials: {credentials} }};
  const client = new GatewayClient("{gateway}", options);
  client.onState((state) => seen.states.push(state));
  client.join("{conversation}", {{
    resume: 0,
    onMessage: ({{ sequence }}) => seen.messages.push(sequence),
    onError: (error) => seen.problems.push(error.message),
  }});
  client.tokens("{conversation}", {{
    backoffFirstMs: 100, backoffMostMs: 300,
    onToken: ({{ text }}) => (seen.tokens = text),
    onState: (state) => seen.tokenStates.push(state),
  }});
  client.start();
}})()
"""
FROM_THE_SERVER = "async () => (await fetch('/ticket', { method: 'POST' })).json()"


class Shop:
    """An application with pages of its own, which buys tickets at the gateway for whoever is signed in."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.gateway_port = 0
        self.bought = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.routes = Routes(lambda request: request.respond(200, PAGE, "text/html"))
        self.routes.add("POST", "/ticket", self.buy, action=OPEN)

    def buy(self, request: Request) -> None:
        task = asyncio.get_running_loop().create_task(self._buy(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _buy(self, request: Request) -> None:
        try:
            async with wire(self.gateway_port) as web:
                answer = await web.ask(post("/tickets", b"", f"Authorization: Bearer {self.key}"))
        except OSError:
            request.refuse(503, "UNAVAILABLE", "the gateway is away")
            return
        self.bought += 1
        request.respond(answer.status, answer.body)


@pytest.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        yield client


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running


async def publish(client: Client, *outgoing: Any) -> None:
    for one in outgoing:
        await client.publish_one(msgspec.structs.replace(one, headers={**(one.headers or {}), TENANT: "acme"}))


async def test_a_page_stays_connected_beyond_its_ticket_and_sees_why_it_is_refused(
    client: Client, chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket lives for two seconds. The gateway goes away in the middle of an answer and comes back."""
    monkeypatch.setattr(tickets, "LIVES_S", 2)
    keys = KeyFile(tmp_path / "keys.json")
    made, key = keys.create("bob", "acme", ("join", "speak"), int(time.time()))
    shop, conversation, port = Shop(key), str(uuid.uuid4()), free_port()
    async with serving_pages(shop.routes) as pages:
        origin = f"http://localhost:{pages.port}"
        shop.gateway_port = port
        settings = resolve({"auth_keys": str(keys.path), "http_origins": origin}, {}, {}).settings
        told = {"gateway": f"http://localhost:{port}", "conversation": conversation}
        await publish(client, message(conversation, 1), lifecycle(conversation, "started", 1), chunk(conversation, 1))
        async with serving(client, settings, "127.0.0.1", port):
            tab = await chromium.tab(origin)
            await tab.until("document.title === 'chat'")
            await tab.evaluate(FOLLOW.format(**told, credentials=FROM_THE_SERVER))
            await tab.until("seen.messages.length === 1 && seen.tokens === 't1 '")
        await tab.until("seen.states.at(-1).state === 'waiting' && seen.tokenStates.at(-1).state === 'waiting'")
        await tab.until("Date.now() > performance.timeOrigin + 3000")  # the first ticket is worth nothing now
        await publish(client, message(conversation, 2), chunk(conversation, 2))
        bought = shop.bought
        async with serving(client, settings, "127.0.0.1", port):
            await tab.until("seen.messages.length === 2 && seen.tokens === 't1 t2 '")
            assert [1, 2] == await tab.evaluate("seen.messages")
            assert shop.bought >= bought + 2, "the socket and the stream each with a ticket of their own"

            refused = {
                "() => 'ow_0'": 4401,  # a key that nobody knows, refused when it buys a ticket
                "() => ({ ticket: 'x' })": 4401,  # a page is not shown why its WebSocket does not open
                json.dumps(keys.create("x", "acme", ("produce",), int(time.time()))[1]): 4403,
            }
            for credentials, code in refused.items():
                told["credentials"] = credentials if "=>" in credentials else f"() => {credentials}"
                await tab.evaluate(FOLLOW.format(**told))
                await tab.until("seen.states.at(-1).state === 'closed' && seen.tokenStates.at(-1).state === 'closed'")
                state, stream = await tab.evaluate("[seen.states.at(-1), seen.tokenStates.at(-1)]")
                assert (code, code) == (state["code"], stream["code"])
                assert state["reason"]
                assert stream["reason"]
                assert "open" not in await tab.evaluate("seen.states.map((one) => one.state)")

            await tab.evaluate(FOLLOW.format(**told | {"credentials": FROM_THE_SERVER}))
            await tab.until("seen.states.at(-1).state === 'open'")
            keys.revoke(made.id, int(time.time()))
            await tab.until("seen.states.some(({ reason }) => reason?.includes('no longer good'))")
            assert [] == tab.problems
