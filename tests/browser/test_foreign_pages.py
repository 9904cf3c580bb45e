"""A web page of another origin in a real browser, against a broker without credentials: it changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from oncewire import BrokerClient
from oncewire._ground.http import Server
from oncewire._ground.settings import resolve
from oncewire.cli.broker import serving
from tests.support.browser import CHROMIUM, browser

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.timeout(120),
]

ATTACK = """
(async () => {
  const broker = %s;
  const post = (path, body) => fetch(broker + path, {method: 'POST', mode: 'no-cors', body: JSON.stringify(body)});
  const image = (path) => new Promise((done) => {
    const sent = new Image();
    sent.onload = sent.onerror = done;
    sent.src = broker + path;
  });
  const form = (path) => new Promise((done) => {
    const frame = document.createElement('iframe');
    frame.name = 'hidden';
    document.body.append(frame);
    const sent = document.body.appendChild(document.createElement('form'));
    Object.assign(sent, {method: 'POST', enctype: 'text/plain', target: 'hidden', action: broker + path});
    frame.onload = done;
    sent.submit();
  });
  await post('/v1/topics', {name: 'forged'});
  await post('/v1/produce', {topic: 'orders', value: 'forged'});
  await form('/v1/produce?topic=orders&value=forged');
  await image('/v1/consume?topic=orders&group=payout&owner=evil&max=5&wait_ms=0');
  await fetch(broker + '/v1/consume?topic=orders&group=payout&owner=evil&max=5&wait_ms=0', {mode: 'no-cors'});
  for (let offset = 0; offset < 3; offset += 1) {
    await post('/v1/ack', {topic: 'orders', group: 'payout', owner: 'evil', partition: 0, offset});
  }
  const read = await fetch(broker + '/v1/topics').then(() => 'read', () => 'refused');
  const websocket = await new Promise((done) => {
    const socket = new WebSocket(broker.replace('http', 'ws') + '/ws');
    socket.onopen = () => done('open');
    socket.onerror = () => done('refused');
  });
  return [read, websocket];
})()
"""


@contextlib.asynccontextmanager
async def page() -> AsyncIterator[int]:
    """A server of an empty page, for any host name."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 15\r\nConnection: close\r\n\r\n"
            writer.write(head + b"<!doctype html>")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def broker() -> AsyncIterator[Server]:
    settings = resolve({"broker_listen": "127.0.0.1:0"}, {}, {}).settings
    async with serving(settings) as (server, _):
        yield server


@pytest.mark.parametrize("host", ["evil.example", "localhost", "127.0.0.1"])
async def test_a_page_of_another_origin_changes_nothing_in_a_broker(broker: Server, host: str) -> None:
    """Another site, and another port of the same one."""
    url = f"http://127.0.0.1:{broker.port}"
    async with (
        BrokerClient(url) as client,
        page() as port,
        browser("--host-resolver-rules=MAP evil.example 127.0.0.1") as chromium,
    ):
        await client.create_topic("orders")
        for number in (1, 2, 3):
            await client.produce("orders", f"pay {number}")
        tab = await chromium.tab(f"http://{host}:{port}/")
        await tab.until(f"location.host === '{host}:{port}'")
        before = broker.answers[403]
        assert ["refused", "refused"] == await tab.evaluate(ATTACK % json.dumps(url))
        assert 10 == broker.answers[403] - before, "each attempt reached the broker, and was refused"
        assert ["orders"] == await client.topics()
        taken = await client.take("orders", "payout", most=10, wait_s=1)
        assert [("pay 1", 1), ("pay 2", 1), ("pay 3", 1)] == [(one.value, one.attempts) for one in taken]


async def test_a_page_of_an_allowed_origin_may_use_the_broker() -> None:
    async with page() as port, browser("--host-resolver-rules=MAP shop.example 127.0.0.1") as chromium:
        origin = f"http://shop.example:{port}"
        settings = resolve({"broker_listen": "127.0.0.1:0", "http_origins": origin}, {}, {}).settings
        async with serving(settings) as (server, _):
            url = f"http://127.0.0.1:{server.port}"
            tab = await chromium.tab(f"{origin}/")
            await tab.until(f"location.origin === '{origin}'")
            kept = await tab.evaluate(f"""(async () => {{
                const headers = {{'Content-Type': 'application/json'}};
                const post = (path, sent) =>
                    fetch('{url}' + path, {{method: 'POST', headers, body: JSON.stringify(sent)}});
                await post('/v1/topics', {{name: 'orders'}});
                await post('/v1/produce', {{topic: 'orders', value: 'v'}});
                return (await (await fetch('{url}/v1/topics')).json()).topics;
            }})()""")
            assert ["orders"] == kept
