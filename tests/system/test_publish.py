"""`oncewire publish`: one message, confirmed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import oncewire
from oncewire._ground.topology import init_streams
from tests.support.nats import NatsServer
from tests.support.up import oncewire as command


@pytest.fixture
async def ready(server: NatsServer) -> NatsServer:
    async with oncewire.connect(server.url) as client:
        await init_streams(client)
    return server


def test_a_repeat_under_the_same_id_says_that_it_stands_there_already(ready: NatsServer, tmp_path: Path) -> None:
    args = ("publish", "evt.default.demo.x.y", '{"type": "x", "payload": {}}', "--id", "one", "--header", "a=b")
    first, second = (command(*args, cwd=tmp_path, NATS_URL=ready.url) for _ in range(2))
    assert "MESHFORGE_EVENTS 1\n" == first.stdout
    assert "MESHFORGE_EVENTS 1 (duplicate: already stored)\n" == second.stdout


def test_json_tells_machines_where_it_stands(ready: NatsServer, tmp_path: Path) -> None:
    told = command("publish", "evt.default.demo.x.y", "{}", "--raw", "--json", cwd=tmp_path, NATS_URL=ready.url)
    assert {"stream": "MESHFORGE_EVENTS", "sequence": 1, "duplicate": False} == json.loads(told.stdout)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nowhere.at.all", "{}"), "no stream captures nowhere.at.all"),
        (("evt.*", "{}"), "wildcard"),
        (("evt.a b", "{}"), "not a subject"),
        (("evt.default.demo.x", "{}", "--header", "broken"), "NAME=VALUE"),
        (("evt.default.demo.x", '{"type": "x", "payload": {}}', "--header", "a=b\r\nc: d"), "line break"),
        (("sr.queries.loop", "{}"), "is for requests"),
    ],
)
def test_what_cannot_be_published_is_one_sentence(
    ready: NatsServer, tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    refused = command("publish", *args, cwd=tmp_path, NATS_URL=ready.url)
    assert 2 == refused.returncode
    assert says in refused.stderr


def test_without_a_server_it_says_how_to_start_one(tmp_path: Path) -> None:
    gone = command("publish", "evt.x", "{}", cwd=tmp_path, NATS_URL="nats://127.0.0.1:1")
    assert 3 == gone.returncode
    assert "oncewire up" in gone.stderr
