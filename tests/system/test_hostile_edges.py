"""The thousand hostile names at the edges beside the broker's: the gateway, claims of tokens, agents, options."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jwt
from cryptography.hazmat.primitives.asymmetric import ed25519

import oncewire
from oncewire._ground.contracts import subjects
from oncewire._ground.errors import (
    AuthenticationFailed,
    ContractViolation,
    InvalidSetting,
    OncewireError,
    PermissionDenied,
)
from oncewire._ground.settings import resolve
from oncewire._ground.topology import ensure
from oncewire._ground.topology.names import durable_name
from oncewire._ground.trust import jwts
from oncewire._ground.trust.keys import KeyFile
from oncewire.cli.gateway import serving
from oncewire.pipeline.options import read_options
from tests.support import hostile
from tests.support.gateway import guest
from tests.support.http import wire
from tests.support.nats import NatsServer
from tests.support.wait import within

NAMES = hostile.names()
UNSAFE = set(" .*>\r\n\t\0")
NOW = int(time.time())


async def test_the_gateway_takes_each_id_in_a_frame_as_it_is_or_refuses_it(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    """Conversations, names of clients, epochs, metadata: answered one by one, on sockets that stay open."""
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.create("x", "acme", ("*",), NOW)[1]
    settings = resolve({"auth_keys": str(keys.path), "gateway_frames_per_s_max": "100000"}, {}, {}).settings
    answers: Counter[str] = Counter()
    known = set(NAMES)
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        async with serving(client, settings, "127.0.0.1", 0) as (gateway, url):
            for start in range(0, len(NAMES), 90):
                headers = {"Authorization": f"Bearer {key}"}
                async with guest(url, additional_headers=headers) as one:
                    for name in NAMES[start : start + 90]:
                        for frame in (
                            {"type": "join_room", "conversationId": name, "clientId": name, "epoch": name},
                            {"type": "ack", "conversationId": name, "sequence": 1},
                            {"type": "presence", "conversationId": name, "state": "idle", "metadata": {name: name}},
                            {"type": name, "conversationId": name},
                        ):
                            await one.socket.send(json.dumps(frame))
                        await one.socket.send('{"type":"heartbeat"}')
                        while (told := await one.next()).get("type") != "heartbeat":
                            answers[told.get("type", "envelope")] += 1
                            if told.get("type") == "joined":
                                assert told["conversationId"] in known
            assert not gateway.node.problem
    assert answers["joined"] > 50 < answers["error"], answers


async def test_the_gateway_takes_each_id_in_an_address_or_a_ticket_as_it_is_or_refuses_it(
    shared_server: NatsServer, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.create("x", "acme", ("join", "speak"), NOW)[1]
    settings = resolve({"auth_keys": str(keys.path)}, {}, {}).settings
    answers: Counter[tuple[str, int]] = Counter()
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        async with serving(client, settings, "127.0.0.1", 0) as (gateway, _):
            assert gateway.server is not None
            port = gateway.server.port

            async def ask(what: str, method: str, path: str, body: bytes = b"", lines: bytes = b"") -> None:
                async with wire(port) as line:
                    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {key}\r\n".encode()
                    await line.send(head + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                    status, headers = await line.head()
                    assert "x-evil" not in headers
                    answers[what, status] += 1

            for name in NAMES:
                place = quote(name, safe="")
                event_id = b"Last-Event-ID: %b\r\n" % name.replace("\r\n", "\n").encode()
                await ask("stream", "GET", f"/stream/{place}", lines=event_id)
                await ask("history", "GET", f"/conversations/{place}/messages?after={place}")
                await ask("ticket", "POST", "/tickets", json.dumps({"grants": [f"join:{name}"]}).encode())
            async with wire(port) as line:
                await line.send(f"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {key}\r\n\r\n".encode())
                assert 200 == (await within(line.answer())).status
    assert {status for _, status in answers} <= {200, 201, 400, 403, 404, 414, 431}, answers
    for what, fine in (("stream", 200), ("ticket", 201)):
        assert answers[what, fine] > 20 < answers[what, 400], answers


async def test_claims_of_a_token_are_taken_as_they_are_or_refused(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    shown = {**json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key())), "kid": "d"}
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [shown]}))
    rules = jwts.Rules(issuer="i", audience="a", jwks=str(tmp_path / "jwks.json"))
    whole: dict[str, Any] = {"iss": "i", "aud": "a", "sub": "u", "tenant": "t", "scope": "read", "exp": NOW + 60}
    fine = 0
    async with jwts.Tokens(rules) as tokens:
        for name in NAMES:
            for claim in ("tenant", "sub", "scope", "grants", "iss", "aud", "kid"):
                value: Any = [name, f"join:{name}"] if claim == "grants" else name
                sent = jwt.encode(
                    {**whole, claim: value}, key, "EdDSA", headers={"kid": "d" if claim != "kid" else name}
                )
                try:
                    found = tokens.principal(sent, NOW)
                except (AuthenticationFailed, PermissionDenied):
                    continue
                fine += 1
                assert claim not in ("iss", "aud", "kid"), repr(name)
                assert found.tenant == (name if claim == "tenant" else "t")
                assert found.tenant.isascii()
                assert found.tenant.isprintable()
                assert found.name == (f"jwt:{name}" if claim == "sub" else "jwt:u")
                allowed = {"join", "read", "*"} if name in ("*", f"join:{name}") else {"join", "read"}
                if claim != "scope":
                    assert {one.partition(":")[0] for one in found.actions} <= allowed, found.actions
    assert fine > 1_000


def test_an_agents_name_is_safe_or_refused() -> None:
    for name in NAMES:
        try:
            made = oncewire.Agent(name)
        except OncewireError:
            continue
        assert not set(durable_name(made.name, "default", "default")) & UNSAFE, repr(name)
        assert not set(subjects.ledger(made.name, "l").removeprefix("ledger.").partition(".")[0]) & UNSAFE


def test_options_of_the_source_are_taken_as_they_are_or_refused() -> None:
    refused: Counter[str] = Counter()
    for name in NAMES:
        for option in ("stream", "subjects", "startingOffsets", "minPartitions", "url", "inboxPrefix", "nkey", name):
            given = {"url": "nats://127.0.0.1:1", "stream": "S", option: name}
            try:
                found = read_options(given, lambda path: Path(path).read_text(), is_streaming=False)
            except (InvalidSetting, ContractViolation):
                refused[option] += 1
                continue
            if option == "stream":
                assert not set(found.stream) & UNSAFE, repr(name)
    assert refused["stream"] > 400
    assert refused["minPartitions"] > 900
