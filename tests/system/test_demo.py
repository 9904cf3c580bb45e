"""The chat that `oncewire up` serves: a message is stored once, and answered once, also when everything is killed."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncewire import GatewayClient
from oncewire.gateway.client import Limits, Token
from oncewire.gateway.client.fetch import ask
from tests.support.up import Up, made
from tests.support.wait import within

QUICK = Limits(backoff_first_ms=100, backoff_most_ms=1_000)


def address(up: Up) -> str:
    return next(event["url"] for event in up.events if event.get("part") == "gateway" and "url" in event)


def message(conversation: str, **fields: str) -> dict[str, str]:
    told = {"conversationId": conversation, "content": "Hello?", "author": "Jade Wren", "key": str(uuid.uuid4())}
    return told | fields


async def post(url: str, body: dict[str, str]) -> tuple[int, Any]:
    sent, told = {"Content-Type": "application/json"}, json.dumps(body).encode()
    status, answer = await ask("POST", f"{url}/demo/messages", headers=sent, body=told, timeout_s=30.0)
    return status, json.loads(answer)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(made(tmp_path_factory.mktemp("demo") / "data")) as running:
        yield running.ready()


async def test_a_message_that_is_sent_again_under_its_key_is_stored_once(up: Up) -> None:
    conversation = str(uuid.uuid4())
    told = message(conversation)
    first, again = await post(address(up), told), await post(address(up), told)
    assert 201 == first[0]
    assert first == again
    other = await post(address(up), message(conversation))
    assert 2 == other[1]["sequence"]


async def test_an_answer_streams_and_becomes_a_message(up: Up) -> None:
    conversation = str(uuid.uuid4())
    async with GatewayClient(address(up), limits=QUICK) as client:
        room, stream = client.room(conversation, resume=0), client.tokens(conversation)
        await post(address(up), message(conversation))
        text = ""
        while not (isinstance(news := await within(anext(stream)), Token) and news.is_final):
            text = news.text
        question, answer = await within(anext(room)), await within(anext(room))
        await stream.aclose()  # type: ignore[attr-defined]
    assert ("Hello?", "assistant") == (question.event.content, answer.event.role)
    assert text == answer.event.content


def test_the_chat_follows_the_prefixes_of_the_settings(tmp_path: Path) -> None:
    """Without them its answers would go to subjects that no stream captures, and nobody would be told."""
    prefixes = {"NATS_EVENTS_PREFIX": "acme.events", "NATS_TOKENS_PREFIX": "acme.tokens"}

    async def answered(url: str) -> str:
        conversation = str(uuid.uuid4())
        async with GatewayClient(url, limits=QUICK) as client:
            room = client.room(conversation, resume=0)
            await post(url, message(conversation))
            return [(await within(anext(room))).event.role for _ in range(2)][-1]

    with Up(made(tmp_path / "data"), **prefixes) as running:
        assert "assistant" == asyncio.run(answered(address(running.ready())))


@pytest.mark.parametrize(
    ("headers", "fields", "status"),
    [
        ({"Content-Type": "text/plain"}, {}, 400),
        ({"Origin": "http://elsewhere.example"}, {}, 403),
        ({}, {"conversationId": "no uuid"}, 400),
        ({}, {"content": ""}, 400),
        ({}, {"content": "x" * 4_001}, 400),
    ],
)
async def test_what_is_no_message_of_the_page_is_refused(
    up: Up, headers: dict[str, str], fields: dict[str, str], status: int
) -> None:
    sent = {"Content-Type": "application/json"} | headers
    body = json.dumps(message(str(uuid.uuid4())) | fields).encode()
    found, _ = await ask("POST", f"{address(up)}/demo/messages", headers=sent, body=body, timeout_s=30.0)
    assert status == found


async def test_a_question_whose_writer_was_killed_is_answered_once_by_the_next(tmp_path: Path) -> None:
    data, conversation = made(tmp_path / "data"), str(uuid.uuid4())
    with Up(data) as up:
        url = address(up.ready())
        async with GatewayClient(url, limits=QUICK) as client:
            stream = client.tokens(conversation)
            await post(url, message(conversation))
            while len((await within(anext(stream))).text) < 20:
                pass
            await stream.aclose()  # type: ignore[attr-defined]
        up.process.kill()
        up.end()
    with Up(data) as up:
        async with GatewayClient(address(up.ready()), limits=QUICK) as client:
            room = client.room(conversation, resume=0)
            roles = [(await within(anext(room))).event.role for _ in range(2)]
            assert ["user", "assistant"] == roles
            page = await client.history(conversation)
            assert 2 == len(page.messages)
