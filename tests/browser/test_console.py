"""The console in a real browser: every view with real data, what is live, what is broken, what a click does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from oncewire._ground.contracts.broker import BrokerEnvelope
from oncewire._ground.jetstream import losses
from oncewire._ground.jetstream.losses import Cause, Loss
from oncewire._ground.settings import resolve
from oncewire._ground.trust.keys import KeyFile
from oncewire.broker.client import BrokerClient
from oncewire.cli import broker, observe
from tests.support.browser import CHROMIUM, Browser, Tab, browser
from tests.support.console import SUBJECT, Served, kill_off, make_lake, served
from tests.support.nats import NatsServer, nats_server

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

SHOTS = os.environ.get("ONCEWIRE_SCREENSHOTS", "")
"""A folder in which the tests leave what they see."""
IS_LIVE = "document.getElementById('connection')?.dataset.state === 'live'"
TEXT = "(document.getElementById('main')?.innerText ?? '')"
EVIL = '{"type": "Evil", "payload": {"note": "<img src=x onerror=document.title=1><script>document.title=2</script>"}}'


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server(sync_always=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served_busy(nats: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with busy(nats, tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def console(served_busy: Served) -> AsyncIterator[Served]:
    """The one console of most tests, without letters."""
    await served_busy.client.api("STREAM.PURGE.DLQ", {})
    yield served_busy


@contextlib.asynccontextmanager
async def busy(nats: NatsServer, folder: Path) -> AsyncIterator[Served]:
    """A console over streams, topics, letters, a run and a lake that all hold something."""
    make_lake(folder / "lake")
    flags = {"broker_listen": "127.0.0.1:0", "broker_engine": "jetstream", "nats_url": nats.url}
    settings = resolve(flags, {}, {}).settings
    async with broker.serving(settings) as (front, routes):
        url, observer = f"http://127.0.0.1:{front.port}", observe.Observer(settings)
        observer.watch(broker.watched(routes))
        async with BrokerClient(url) as client, served(nats, folder, url, observer.histograms) as console:
            await client.create_topic("thumbnails", partitions=2)
            step = BrokerEnvelope(run_id="job-1", step_id="resize")
            await client.produce("thumbnails", "{}", envelope=step)
            await client.produce("thumbnails", "{}", envelope=BrokerEnvelope(run_id="job-1", parent_step_id="resize"))
            await client.take("thumbnails", "resizers", wait_s=5.0)
            for number in range(3):
                body = {"type": "OrderPlaced", "payload": {"order": number}}
                await console.client.publish(SUBJECT, body, msg_id=f"order-{number}")
            yield console


class Window:
    """Tabs of one test. Each holds a connection to its console, of which a browser has six for one server."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self.tabs: list[Tab] = []

    async def tab(self, url: str, **options: Any) -> Tab:
        self.tabs.append(await self._chromium.tab(url, **options))
        return self.tabs[-1]


@pytest_asyncio.fixture(loop_scope="module")
async def window(chromium: Browser) -> AsyncIterator[Window]:
    made = Window(chromium)
    yield made
    for tab in made.tabs:
        await tab.call("Page.navigate", url="about:blank")


async def shot(tab: Tab, name: str) -> None:
    if SHOTS:
        await tab.screenshot(Path(SHOTS) / f"{name}.png")


async def go(tab: Tab, path: str, text: str) -> None:
    """By the link that leads there."""
    await tab.evaluate(f"document.querySelector('#nav a[href=\"{path}\"]').click()")
    await tab.until(f"location.pathname === '{path}' && {TEXT}.includes({json.dumps(text)})")


async def test_every_view_shows_what_is_there_in_both_schemes_and_in_a_narrow_window(
    console: Served, window: Window
) -> None:
    await kill_off(console.client, EVIL.encode(), "TimeoutError: the carrier did not answer")
    tabs = [
        await window.tab(console.url, width=1280, height=900),
        await window.tab(console.url, width=390, height=800, is_dark=True),
    ]
    for tab, name in zip(tabs, ("light", "narrow-dark"), strict=True):
        await tab.until(f"{IS_LIVE} && {TEXT}.includes('survives a power cut')")
        await tab.until(f"{TEXT}.includes('1 dead letter') && {TEXT}.includes('MESHFORGE_EVENTS')")
        await shot(tab, f"overview-{name}")
        for path, text in {
            "/streams": "dlq_advisories".upper(),
            "/topics": "resizers",
            "/letters": "TimeoutError",
            "/runs": "01JCORDER",
            "/pipeline": "every sequence is in bronze once",
        }.items():
            await go(tab, path, text)
            await shot(tab, f"{path[1:]}-{name}")
            assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is too wide"
            assert "title" == await tab.evaluate("document.activeElement.id"), "the focus is at the new title"
        assert [] == tab.problems
    light, dark = [await tab.evaluate("getComputedStyle(document.body.parentElement).backgroundColor") for tab in tabs]
    assert light != dark
    await tabs[1].evaluate("document.getElementById('theme').click()")
    assert light == await tabs[1].evaluate("getComputedStyle(document.documentElement).backgroundColor")
    await tabs[1].evaluate("localStorage.removeItem('theme')")


async def test_details_are_addresses_and_hostile_data_stays_text(console: Served, window: Window) -> None:
    await kill_off(console.client, EVIL.encode(), "<b>Evil</b>: <script>document.title=3</script>")
    (row,) = (await console.get("/api/letters"))["letters"]
    tab = await window.tab(f"{console.url}/letters/{row['sequence']}", width=1280)
    await tab.until(f"{TEXT}.includes('<script>document.title=2</script>') && {TEXT}.includes('<img src=x')")
    assert 0 == await tab.evaluate("document.querySelectorAll('main script, main img, main b').length")
    assert (await tab.evaluate("document.title")).startswith("Letter ")
    await shot(tab, "letter")
    for path, text in {
        "/streams/MESHFORGE_EVENTS": SUBJECT,
        "/topics/thumbnails": "resizers",
        "/runs/01JCORDER?tenant=acme": "PaymentTaken",
        "/runs/job-1?source=live": "resize",
        "/streams/NONE": "No such stream",
        "/nowhere/at/all": "No such page",
    }.items():
        await tab.call("Page.navigate", url=f"{console.url}{path}")
        await tab.until(f"location.pathname === '{path.partition('?')[0]}' && {TEXT}.includes({json.dumps(text)})")
    assert [] == tab.problems


async def test_what_happens_is_seen_without_a_reload(console: Served, window: Window) -> None:
    tab = await window.tab(f"{console.url}/streams/MESHFORGE_EVENTS")
    await tab.until(f"{IS_LIVE} && document.querySelector('.facts')")
    await tab.evaluate("document.body.dataset.same = '1'")
    seen = await tab.evaluate("document.querySelector('.facts').innerText")
    await console.client.publish(SUBJECT, {"type": "Late", "payload": {}}, msg_id="late-1")
    await tab.until(f"document.querySelector('.facts').innerText !== {json.dumps(seen)} && {TEXT}.includes('late-1')")
    await kill_off(console.client, b'{"type": "A", "payload": {}}', "late: y")
    await tab.until("document.querySelector('#nav .number')")
    assert "1" == await tab.evaluate("document.body.dataset.same"), "the page is the same"


async def test_a_letter_is_replayed_with_the_keyboard_alone(console: Served, window: Window) -> None:
    for number in range(3):
        await kill_off(console.client, b'{"type": "A", "payload": {"n": %d}}' % number, "TimeoutError: z")
    before = (await console.client.api("STREAM.INFO.MESHFORGE_EVENTS"))["state"]["messages"]
    tab = await window.tab(f"{console.url}/letters", width=1280)
    await tab.until(f"{IS_LIVE} && document.querySelector('[data-act=replay]')")
    await focus_by_tab(tab, "document.activeElement.dataset.act === 'replay'")
    await tab.press("Enter")
    await tab.until("document.getElementById('dialog').open && !document.getElementById('confirm').disabled")
    assert "3 of 3 letters would be replayed" in await tab.evaluate("document.getElementById('dialog').innerText")
    await shot(tab, "replay-question")
    await tab.press("Escape")
    await tab.until("!document.getElementById('dialog').open && document.activeElement.dataset.act === 'replay'")
    await tab.press("Enter")
    await tab.until("document.getElementById('dialog').open && !document.getElementById('confirm').disabled")
    await focus_by_tab(tab, "document.activeElement.id === 'confirm'")
    await tab.press("Enter")
    await tab.until("document.querySelector('[data-job=done]')")
    await tab.until(f"{TEXT}.includes('No dead letter')")
    await shot(tab, "replayed")
    assert before + 3 == (await console.client.api("STREAM.INFO.MESHFORGE_EVENTS"))["state"]["messages"]
    assert [] == tab.problems


async def focus_by_tab(tab: Tab, expression: str) -> None:
    for _ in range(60):
        await tab.press("Tab")
        if await tab.evaluate(expression):
            return
    raise AssertionError(f"the focus never came to where {expression}")


async def test_a_letter_is_edited_and_dropped_by_clicking(console: Served, window: Window) -> None:
    await kill_off(console.client, b'{"type": "A", "id": "kept", "payload": {}}', "broken: z")
    (row,) = (await console.get("/api/letters"))["letters"]
    tab = await window.tab(f"{console.url}/letters/{row['sequence']}", width=1280)
    await tab.until(f"{IS_LIVE} && document.querySelector('[data-act=edit]')")
    await tab.evaluate("document.querySelector('[data-act=edit]').click()")
    await tab.until("document.activeElement.id === 'edited'")
    await tab.evaluate('document.activeElement.value = \'{"type": "A", "id": "kept", "payload": {"mended": 1}}\'')
    await tab.evaluate("document.getElementById('confirm').click()")
    await tab.until("document.querySelector('[data-job=done]')?.innerText.includes('1 of 1 letters replayed')")
    last = await console.client.get_last("MESHFORGE_EVENTS", SUBJECT)
    assert {"mended": 1} == json.loads(last.payload)["payload"]
    await tab.evaluate("document.querySelector('[data-act=drop]').click()")
    await tab.until("document.activeElement.id === 'reason'")
    await tab.type("mended by hand")
    await tab.evaluate("document.getElementById('confirm').click()")
    await tab.until(
        "[...document.querySelectorAll('[data-job=done]')].some((one) => one.innerText.includes('dropped'))"
    )
    assert 0 == (await console.client.api("STREAM.INFO.DLQ"))["state"]["messages"]


async def test_a_loss_is_acknowledged_by_clicking_and_only_after_a_question(console: Served, window: Window) -> None:
    await losses.record(
        console.client, Loss("DLQ", "", "audit_reader", Cause.TRIMMED, 3, 14, found_ms=1_794_800_000_000)
    )
    tabs = [
        await window.tab(console.url, width=1280, height=1_600),
        await window.tab(console.url, width=390, height=2_900, is_dark=True),
    ]
    button = "document.querySelector('[data-act=acknowledge]')"
    for tab, name in zip(tabs, ("light", "narrow-dark"), strict=True):
        await tab.until(f"{IS_LIVE} && {button} && {TEXT}.includes('produce to its answer')")
        assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        await shot(tab, f"losses-{name}")
    tab = tabs[0]
    await tab.evaluate(f"{button}.focus(), {button}.click()")
    await tab.until("document.querySelector('#dialog[open]')?.innerText.includes('12 messages, 3 to 14')")
    await shot(tab, "losses-question")
    await tab.evaluate("document.querySelector('#dialog .cancel').click()")
    await tab.until(f"document.activeElement === {button}")
    assert not (await losses.losses(console.client, "DLQ"))[0].is_acknowledged
    await tab.evaluate(f"{button}.click()")
    await tab.until("document.getElementById('confirm')")
    await tab.evaluate("document.getElementById('confirm').click()")
    for each in tabs:
        await each.until(f"!{button} && {TEXT}.includes('acknowledged')")
    assert (await losses.losses(console.client, "DLQ"))[0].is_acknowledged
    assert [[], []] == [each.problems for each in tabs]


async def test_what_does_not_answer_is_said_and_its_figures_are_greyed(window: Window, tmp_path: Path) -> None:
    with nats_server() as own:
        async with served(own, tmp_path) as console:
            tab = await window.tab(console.url)
            await tab.until(f"{IS_LIVE} && document.getElementById('verdict')")
            assert "false" == await tab.evaluate("document.getElementById('main').dataset.stale")
            own.kill()
            await tab.until("document.querySelector('[data-backend=nats]')?.innerText.includes('does not answer')")
            assert "true" == await tab.evaluate("document.getElementById('main').dataset.stale")
            assert "oncewire up" in await tab.evaluate("document.getElementById('alerts').innerText")
            await shot(tab, "broken")
            await asyncio.to_thread(own.start)
            await tab.until(f"{IS_LIVE} && !document.querySelector('[data-backend]')")
            assert "false" == await tab.evaluate("document.getElementById('main').dataset.stale")
        await tab.until("document.getElementById('connection').dataset.state === 'waiting'")
        await tab.until("document.querySelector('[data-backend=connection]')")
        assert "again in" in await tab.evaluate("document.getElementById('connection').innerText")
        assert "true" == await tab.evaluate("document.getElementById('main').dataset.stale")
        assert [] == tab.problems


async def test_with_credentials_a_key_opens_the_page(nats: NatsServer, window: Window, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    _, text = keys.create("me", "ops", ("read",), 1)
    async with served(nats, tmp_path, auth_keys=str(keys.path), console_tenant="ops") as console:
        await kill_off(console.client, b'{"type": "A", "payload": {}}', "seen: y")
        tab = await window.tab(f"{console.url}/letters")
        await tab.until("document.getElementById('key')")
        await tab.evaluate("document.getElementById('key').focus()")
        await tab.type("ow_wrong")
        await tab.press("Enter")
        await tab.until("document.getElementById('login-error').innerText.includes('unknown')")
        await tab.evaluate("document.getElementById('key').value = ''")
        await tab.type(text)
        await tab.press("Enter")
        await tab.until(f"{IS_LIVE} && {TEXT}.includes('look only')")
        assert "" == await tab.evaluate("document.cookie"), "no script reads it"
        await shot(tab, "letters-look-only")
