"""A thousand hostile names at the edges: taken as they are or refused with a reason, never a crash, never another's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest

from oncewire._ground.contracts import subjects
from oncewire._ground.errors import ContractViolation
from oncewire._ground.settings import resolve
from oncewire._ground.trust.keys import KeyFile
from oncewire.cli.broker import serving
from tests.support import hostile
from tests.support.http import Answer, Wire, wire

NAMES = hostile.names()
FINE = (200, 201, 204)
REFUSED = (400, 401, 403, 404, 413, 414, 431)


class Caller:
    """One tenant on one connection, which a refused head may end."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key.encode()

    async def ask(self, line: Wire, method: str, path: str, body: object = None, headers: bytes = b"") -> Answer:
        sent = json.dumps(body).encode() if body is not None else b""
        head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: %b\r\n" % (method.encode(), path.encode(), self._key)
        await line.send(head + headers + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
        answer = await line.answer()
        assert answer.status in FINE + REFUSED, f"{answer.status} {answer.body!r}"
        assert "x-evil" not in answer.headers
        return answer

    async def once(self, method: str, path: str, body: object = None, headers: bytes = b"") -> Answer:
        async with wire(self._port) as line:
            return await self.ask(line, method, path, body, headers)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


async def test_the_broker_takes_each_name_as_it_is_or_refuses_it(keys: KeyFile) -> None:
    acme, globex = (keys.create("x", tenant, ("*",), 1)[1] for tenant in ("acme", "globex"))
    settings = resolve({"broker_listen": "127.0.0.1:0", "auth_keys": str(keys.path)}, {}, {}).settings
    kept: dict[str, str] = {}
    answers: Counter[int] = Counter()
    async with serving(settings) as (server, _):
        theirs = Caller(server.port, globex)
        await theirs.once("POST", "/v1/topics", {"name": "theirs"})
        ours = Caller(server.port, acme)
        async with wire(server.port) as line:
            for name in NAMES:
                made = await ours.ask(line, "POST", "/v1/topics", {"name": name})
                answers[made.status] += 1
                group = {"topic": "theirs", "group": name, "owner": name, "max": 1}
                assert 400 == (await ours.ask(line, "GET", "/v1/consume", group)).status
                if made.status not in FINE:
                    assert 400 == (await ours.ask(line, "POST", "/v1/produce", {"topic": name, "value": "v"})).status
                    continue
                kept[made.json["name"]] = name
                assert 200 == (await ours.ask(line, "POST", "/v1/produce", {"topic": name, "value": name})).status
                where = {"topic": name, "group": "g", "owner": "o", "max": 10}
                taken = (await ours.ask(line, "GET", "/v1/consume", where)).body.splitlines()
                assert name in [json.loads(one)["value"] for one in taken]
                shown = await ours.ask(line, "GET", f"/v1/topics/{quote(made.json['name'], safe='')}")
                assert made.json["name"] == shown.json["name"]
        assert set(kept) == set((await ours.once("GET", "/v1/topics")).json["topics"])
        assert ["theirs"] == (await theirs.once("GET", "/v1/topics")).json["topics"]
    assert answers[201] > 100 < answers[400], answers
    assert all(name == sent.strip() for name, sent in kept.items())


async def test_the_front_takes_each_header_value_or_refuses_it(keys: KeyFile) -> None:
    acme = keys.create("x", "acme", ("*",), 1)[1]
    settings = resolve({"broker_listen": "127.0.0.1:0", "auth_keys": str(keys.path)}, {}, {}).settings
    async with serving(settings) as (server, _):
        ours = Caller(server.port, acme)
        await ours.once("POST", "/v1/topics", {"name": "t"})
        body = {"topic": "t", "value": "v"}
        for at, name in enumerate(NAMES):
            value = name.replace("\r\n", "\n").encode()  # a CRLF would be a header of its own, which is no attack
            await ours.once(
                "POST", "/v1/produce", body, (b"Idempotency-Key: ", b"X-Request-Id: ")[at % 2] + value + b"\r\n"
            )
            stranger = Caller(server.port, "ow_0")
            assert (await stranger.once("GET", f"/v1/topics?ticket={quote(name, safe='')}")).status in (400, 401)
        assert 200 == (await ours.once("GET", "/v1/topics")).status


def test_a_subject_token_is_safe_or_refused() -> None:
    """What stands in for an id in a subject can be no wildcard, no second token, no break of a line."""
    for name in NAMES:
        try:
            token = subjects.token(name)
        except ContractViolation:
            continue
        assert not set(token) & set(" .*>\r\n\t\0"), repr(name)
