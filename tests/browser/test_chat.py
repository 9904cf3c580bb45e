"""The demo chat in a real browser: two tabs, a gateway killed in the middle of an answer, nothing lost or twice."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, Browser, Tab, browser
from tests.support.gateway import Running
from tests.support.up import Up, made
from tests.support.wait import until_async

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.timeout(240),
]

SHOTS = os.environ.get("ONCEWIRE_SCREENSHOTS", "")
"""A folder in which the tests leave what they see."""
MESSAGES = """[...document.querySelectorAll('#log [data-sequence]')].map((item) => Number(item.dataset.sequence))"""
TEXT_OF_LAST = """[...document.querySelectorAll('#log [data-sequence] .bubble')].at(-1)?.textContent"""
IS_CONNECTED = """document.getElementById('connection').dataset.state === 'open'"""
STREAMED = """(document.querySelector('.streaming .bubble')?.textContent ?? '')"""
ANSWER_END = "nothing is there twice."


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(made(tmp_path_factory.mktemp("chat") / "data")) as running:
        yield running.ready()


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running


def address(up: Up) -> str:
    return next(event["url"] for event in up.events if event.get("part") == "gateway" and "url" in event)


async def shot(tab: Tab, name: str) -> None:
    if SHOTS:
        await tab.screenshot(Path(SHOTS) / f"{name}.png")


async def say(tab: Tab, text: str) -> None:
    await tab.evaluate("document.getElementById('content').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def test_two_tabs_lose_and_double_nothing_when_their_gateway_is_killed_in_the_middle_of_an_answer(
    up: Up, chromium: Browser
) -> None:
    """The page comes from `up`; rooms and tokens from a second node, which is the one that dies."""
    origin = address(up)
    node = Running(up.url("nats"), "--http-origins", origin)
    try:
        page = f"{origin}/?room={uuid.uuid4()}&gateway={node.url}"
        tabs = [await chromium.tab(page), await chromium.tab(page, width=420, is_dark=True)]
        for tab in tabs:
            await tab.until(IS_CONNECTED)
        await tabs[0].until("document.querySelectorAll('#people li').length === 2")
        await say(tabs[0], "What happens to my words?")
        for tab in tabs:
            await tab.until(f"{STREAMED}.length > 60")
        await shot(tabs[0], "streaming")
        await shot(tabs[1], "streaming-narrow-dark")
        port = node.port
        node.kill()
        node.stop()
        for tab in tabs:
            await tab.until(f"!({IS_CONNECTED})")
        await shot(tabs[0], "away")
        await say(tabs[1], "Said while the gateway was away.")
        node = Running(up.url("nats"), "--http-origins", origin, listen=f"127.0.0.1:{port}")
        for tab in tabs:
            await tab.until(f"({MESSAGES}).length === 4 && ({TEXT_OF_LAST}).endsWith({ANSWER_END!r})")
            assert [1, 2, 3, 4] == await tab.evaluate(MESSAGES)
            texts = await tab.evaluate("[...document.querySelectorAll('#log .bubble')].map((one) => one.textContent)")
            assert 4 == len(texts) == len(set(texts)), texts
            assert "Said while the gateway was away." in texts
            assert 0 == await tab.evaluate("document.querySelectorAll('.pending, .streaming, .gap').length")
            assert [] == tab.problems
        await shot(tabs[0], "after")
        await shot(tabs[1], "after-narrow-dark")
    finally:
        node.kill()
        node.stop()


async def test_a_stopped_answer_ends_for_everybody_with_what_there_was(up: Up, chromium: Browser) -> None:
    page = f"{address(up)}/?room={uuid.uuid4()}"
    writer, reader = await chromium.tab(page), await chromium.tab(page)
    for tab in (writer, reader):
        await tab.until(IS_CONNECTED)
    await say(writer, "Stop me")
    await writer.until(f"{STREAMED}.length > 40")
    await writer.evaluate("document.getElementById('stop').click()")
    for tab in (writer, reader):
        await tab.until(f"({MESSAGES}).length === 2")
        text = await tab.evaluate(TEXT_OF_LAST)
        assert text.startswith("You wrote: “Stop me”")
        assert not text.endswith(ANSWER_END)
        assert "stopped" in await tab.evaluate("[...document.querySelectorAll('.who')].at(-1).textContent")
    assert await writer.evaluate(TEXT_OF_LAST) == await reader.evaluate(TEXT_OF_LAST)
    assert await writer.evaluate("document.getElementById('stop').hidden")


async def test_others_are_seen_typing_going_and_coming_back(up: Up, chromium: Browser) -> None:
    page = f"{address(up)}/?room={uuid.uuid4()}"
    stays, goes = await chromium.tab(page), await chromium.tab(page)
    for tab in (stays, goes):
        await tab.until("document.querySelectorAll('#people li').length === 2")
    await goes.evaluate("document.getElementById('content').focus()")

    async def is_seen() -> bool:
        await goes.type("H")
        return bool(await stays.evaluate("document.getElementById('typing').textContent.endsWith('is typing…')"))

    await until_async(is_seen, "somebody who is typing")
    await goes.call("Page.navigate", url="about:blank")
    await stays.until("document.querySelectorAll('#people li').length === 1")
    await goes.evaluate("history.back()")  # the browser has kept the page as it was left
    for tab in (stays, goes):
        await tab.until("document.querySelectorAll('#people li').length === 2")
