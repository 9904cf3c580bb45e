"""Scenario files of the broker: read, and replayed over HTTP. The language is described beside the files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.http import Answer, Wire, wire
from tests.support.wait import DEADLINE_S, LOOK_S, within

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
CODES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED", 409: "FAILED_PRECONDITION", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED",
}  # fmt: skip

Start = Callable[[dict[str, str]], AbstractAsyncContextManager[int]]
"""Starts a broker with these settings (the same `wal` folder again after a restart); its port while it runs."""


@dataclass
class Scenario:
    name: str
    place: str
    settings: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[int, str]] = field(default_factory=list)


def read(path: Path) -> list[Scenario]:
    """All scenarios of a file."""
    found: list[Scenario] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip()
        if text.startswith("== "):
            found.append(Scenario(text[3:], f"{path.name}:{number}"))
        elif text.startswith("with "):
            words = shlex.split(text[5:])
            found[-1].settings = dict(word.split("=", 1) if "=" in word else (word, "") for word in words)
        elif text and not text.startswith("#"):
            found[-1].steps.append((number, text))
    return found


class Replay:
    """One scenario being replayed."""

    def __init__(self, scenario: Scenario, start: Start) -> None:
        self._scenario = scenario
        self._start = start
        self._broker = contextlib.AsyncExitStack()
        self._streams: dict[str, Wire] = {}
        self._left: dict[str, bytes] = {}
        self._answer: Answer | None = None
        self._again = ""
        self._port = 0

    async def run(self) -> None:
        try:
            self._port = await self._broker.enter_async_context(self._start(self._scenario.settings))
            for number, step in self._scenario.steps:
                try:
                    await self._step(step)
                except Exception as error:
                    raise AssertionError(f"{self._scenario.place}, line {number}: {step}\n{error!r}") from error
            assert self._answer is None, "the last request has no answer in the scenario"
        finally:
            await self._broker.aclose()

    async def _step(self, step: str) -> None:
        word = step.split(" ", 1)[0]
        if word == "restart":
            await self._restart()
        elif word == "after":
            await asyncio.sleep(int(step[6:]) / 1000)  # a timer of the broker must run out; nothing else shows it
        elif word == "until":
            self._again = step[6:]
            self._answer = await self._ask(self._again)
        elif word in METHODS:
            self._again = ""
            self._answer = await self._ask(step)
        elif word.isdigit():
            await self._expect(step)
        elif word.endswith(":"):
            await self._open(word[:-1], step.split(" ", 1)[1])
        elif word.endswith(("<", "=")):
            await self._next_line(word[:-1], step[len(word) :].strip(), is_exact=word.endswith("="))
        else:
            await self._end(*step.split())

    async def _restart(self) -> None:
        await self._broker.aclose()
        self._streams.clear()
        self._port = await self._broker.enter_async_context(self._start(self._scenario.settings))

    async def _ask(self, step: str) -> Answer:
        async with wire(self._port) as client:
            await client.send(request_of(step))
            return await client.answer(is_head=step.startswith("HEAD"))

    async def _expect(self, step: str) -> None:
        assert self._answer is not None, "there is no request before this answer"
        deadline = time.monotonic() + DEADLINE_S
        while self._again and (wrong := difference(self._answer, step)):
            assert time.monotonic() < deadline, wrong
            await asyncio.sleep(LOOK_S)
            self._answer = await self._ask(self._again)
        assert not (wrong := difference(self._answer, step)), wrong
        self._answer = None

    async def _open(self, name: str, step: str) -> None:
        client = await self._broker.enter_async_context(wire(self._port))
        await client.send(request_of(step))
        status, headers = await client.head()
        assert (200, "application/x-ndjson; charset=utf-8") == (status, headers["content-type"])
        self._streams[name] = client
        self._left[name] = b""

    async def _next_line(self, name: str, expected: str, *, is_exact: bool) -> None:
        left = self._left[name]
        while b"\n" not in left:
            chunk = await self._streams[name].chunk()
            assert chunk, "the stream has ended"
            left += chunk
        line, _, self._left[name] = left.partition(b"\n")
        if is_exact:
            assert expected == line.decode()
        else:
            assert not (wrong := _lacks(json.loads(line), json.loads(expected))), f"{wrong} in {line.decode()}"

    async def _end(self, name: str, how: str) -> None:
        client = self._streams.pop(name)
        if how == "close":
            client.writer.close()
            return
        assert "ends" == how, f"a stream cannot {how}"
        assert b"" == await within(client.chunk()), "more came than the end"


def request_of(step: str) -> bytes:
    """The bytes of a request line of a scenario."""
    found = re.fullmatch(r"(\S+) (\S+)((?: \| [^|{\[\"]+?)*)(?: ((?:lines |raw )?[{\[\"].*))?", step)
    assert found, f"not a request: {step}"
    method, target, headers, content = found.groups()
    target = re.sub(r"NOW\+([0-9]+)", lambda ahead: str(int(time.time() * 1000) + int(ahead.group(1))), target)
    lines = [one.strip() for one in headers.split(" | ") if one.strip()]
    body = b""
    if content and content.startswith("lines "):
        body = "".join(json.dumps(one) + "\n" for one in json.loads(content[6:])).encode()
        lines.append("Content-Type: application/x-ndjson")
    elif content and content.startswith("raw "):
        body = json.loads(content[4:]).encode()
    elif content:
        body = content.encode()
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *lines, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def difference(answer: Answer, expected: str) -> str:
    """What an answer has other than expected, '' when nothing."""
    found = re.fullmatch(r"([0-9]{3})((?: \| [^|{\[\"~]+?)*)(?: ((?:lines |~)?[{\[\"].*))?", expected)
    assert found, f"not an answer: {expected}"
    status, headers, content = int(found.group(1)), found.group(2), found.group(3)
    if answer.status != status:
        return f"{answer.status}, not {status}: {answer.body.decode(errors='replace')[:500]}"
    for one in headers.split(" | ")[1:]:
        name, _, value = one.strip().partition(": ")
        if answer.headers.get(name.lower()) != value:
            return f"{name} is {answer.headers.get(name.lower())!r}, not {value!r}"
    return _body_difference(answer, status, content) if content else ""


def _body_difference(answer: Answer, status: int, content: str) -> str:
    if content.startswith("lines "):
        lines = [json.loads(line) for line in answer.body.splitlines()]
        return _lacks(lines, json.loads(content[6:]))
    if content.startswith("~"):
        return _lacks(answer.json, json.loads(content[1:]))
    wanted = json.loads(content)
    if isinstance(wanted, str):
        wanted = {"error": CODES[status], "message": wanted}
    return "" if answer.json == wanted else f"{answer.json}, not {wanted}"


def _lacks(found: Any, wanted: Any, at: str = "") -> str:
    """Where `found` does not hold what is wanted; objects may hold more, lists may not."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, value in wanted.items():
            if name not in found:
                return f"{at}.{name} is missing"
            if wrong := _lacks(found[name], value, f"{at}.{name}"):
                return wrong
        return ""
    if isinstance(wanted, list) and isinstance(found, list):
        if len(found) != len(wanted):
            return f"{at} has {len(found)} items, not {len(wanted)}: {found}"
        return next((wrong for n, one in enumerate(wanted) if (wrong := _lacks(found[n], one, f"{at}[{n}]"))), "")
    return "" if found == wanted and type(found) is type(wanted) else f"{at} is {found!r}, not {wanted!r}"


@contextlib.asynccontextmanager
async def local_broker(settings: dict[str, str], folder: Path) -> AsyncIterator[int]:
    """The local engine behind the HTTP front, with the settings of a scenario."""
    async with _broker(settings, {"broker_wal": str(folder) if "wal" in settings else ""}) as port:
        yield port


@contextlib.asynccontextmanager
async def jetstream_broker(settings: dict[str, str], url: str) -> AsyncIterator[int]:
    """A node of the engine over JetStream behind the HTTP front, with the settings of a scenario."""
    async with _broker(settings, {"broker_engine": "jetstream", "nats_url": url}) as port:
        yield port


@contextlib.asynccontextmanager
async def _broker(settings: dict[str, str], more: dict[str, str]) -> AsyncIterator[int]:
    from oncewire._ground.settings import resolve
    from oncewire.cli.broker import serving

    flags = {f"broker_{name}": value for name, value in settings.items() if name != "wal"}
    async with serving(resolve({**flags, **more, "broker_listen": "127.0.0.1:0"}, {}, {}).settings) as (server, _):
        yield server.port
