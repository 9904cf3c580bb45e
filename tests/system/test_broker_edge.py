"""The broker behind the HTTP front, under everything that a client can get wrong: each is answered, none with a 5xx."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import AuthenticationFailed
from oncewire._ground.http import Principal, Request, Server
from oncewire.broker.local import open_local
from oncewire.broker.routes import BrokerRoutes
from tests.support.http import get, post, wire
from tests.support.scenarios import local_broker
from tests.support.wait import until_async

SEED = 20261115
OWNED = {"topic": "t", "group": "g", "owner": "a"}
PLACE = OWNED | {"partition": 0, "offset": 0}
ENVELOPE = {
    "run_id": "r", "step_id": "s", "parent_step_id": "p", "tenant_id": "x", "idempotency_key": "i", "target_topic": "t",
    "partition_override": 0, "deadline": "2125-12-21T12:00:00Z", "deadline_ms": 4_900_000_000_000,
    "retry_policy": {"max_attempts": 5, "backoff_ms": 250, "max_backoff_ms": 5000},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/topics": {"name": "n", "partitions": 2},
    "/v1/produce": {"topic": "t", "key": "k", "value": "v", "envelope": ENVELOPE},
    "/v1/ack": PLACE,
    "/v1/nack": PLACE | {"reason": "r"},
    "/v1/extend": PLACE | {"lease_ms": 100},
    "/v1/idempotency/begin": PLACE | {"tenant_id": "x", "idempotency_key": "i", "error": "e"},
    "/v1/idempotency/success": PLACE | {"tenant_id": "x", "idempotency_key": "i"},
    "/v1/idempotency/failure": PLACE | {"tenant_id": "x", "idempotency_key": "i", "error": "e"},
}
WRONG: list[Any] = [
    None, True, -1, 0, 1.5, 2**31, 2**53, 2**63, 2**64, 10**400, "", " ", "\0", "\ud800", "x" * 300, "9" * 30, [], {},
    [[]], {"a": {}}, "2025-02-30T00:00:00Z", "0001-01-01T00:00:00+10:00", "9999-12-31T23:59:59-10:00", "t\n", "é" * 150,
]  # fmt: skip


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    async with local_broker({"wal": "", "tick_ms": "10"}, tmp_path / "wal") as port:
        async with wire(port) as client:
            assert 201 == (await client.ask(post("/v1/topics?name=t", b""))).status
        yield port


def with_each_field_wrong(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The body with each field, at each level, replaced by each wrong value, and once left out."""
    found = []
    for name, value in body.items():
        found += [{**body, name: wrong} for wrong in WRONG]
        found.append({other: kept for other, kept in body.items() if other != name})
        if isinstance(value, dict):
            found += [{**body, name: inner} for inner in with_each_field_wrong(value)]
    return found


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_of_any_type_is_answered_and_never_with_5xx(port: int, path: str) -> None:
    async with wire(port) as client:
        for body in with_each_field_wrong(BODIES[path]):
            sent = json.dumps(body).encode()
            answer = await client.ask(post(path, sent))
            assert answer.status < 500, (sent, answer.body)
            if answer.status >= 400:
                assert {"error", "message"} <= set(answer.json), sent


@pytest.mark.parametrize("path", [*BODIES, "/v1/consume"])
async def test_a_parameter_of_any_kind_is_answered_and_never_with_5xx(port: int, path: str) -> None:
    from urllib.parse import quote, urlencode

    fields = BODIES.get(path, OWNED | {"lease_ms": 5, "max": 1, "wait_ms": 0})
    flat = {name: value for name, value in fields.items() if not isinstance(value, dict)}
    flat |= {"partition_override": 0, "deadline_ms": 1, "retry_max_attempts": 1, "retry_backoff_ms": 1}
    if path == "/v1/consume":
        flat = {name: value for name, value in flat.items() if name not in ("max", "wait_ms")}
    ask = get if path == "/v1/consume" else lambda target: post(target, b"")
    tail = "&max=1&wait_ms=0" if path == "/v1/consume" else ""
    async with wire(port) as client:
        for name in flat:
            for wrong in [str(one) for one in WRONG if one != "\ud800"] + ["%FF", "%", "%zz", "+"]:
                given = quote(wrong) if not wrong.startswith("%") and wrong != "+" else wrong
                query = urlencode({other: kept for other, kept in flat.items() if other != name}) + f"&{name}={given}"
                answer = await client.ask(ask(f"{path}?{query}{tail}"))
                assert answer.status < 500, (query, answer.body)


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe",
        b'{"topic": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 5000,
        b'{"a":' * 5000,
        b"{} {}",
        b"null",
        b"\0",
        b'"' + b"x" * 9_000_000,
    ],
    ids=[
        "no UTF-8",
        "no UTF-8 in a string",
        "a byte order mark",
        "deep lists",
        "deep objects",
        "two",
        "null",
        "NUL",
        "too large",
    ],
)
async def test_a_body_that_is_no_object_is_refused(port: int, body: bytes) -> None:
    for path in BODIES:
        async with wire(port) as client:
            for content_type in ("application/json", "application/x-ndjson"):
                await client.send(post(path, body, f"Content-Type: {content_type}"))
                answer = await client.answer()
                lines = answer.body.splitlines() if answer.status == 200 else []
                assert answer.status in (400, 413) or all(b'"error"' in line for line in lines), answer.body
                if answer.status == 413:
                    break


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_with_as_many_names_as_fit_is_refused_and_others_are_served(port: int, path: str) -> None:
    """The same name 400,000 times, and as many different ones: both sent before the others ask."""
    same = b"{" + b'"topic":"orders",' * 400_000 + b'"value":"x"}'
    different = b"{" + b",".join(b'"n%d":1' % n for n in range(600_000)) + b"}"
    async with wire(port) as hostile, wire(port) as other:
        for body in (same, different):
            await hostile.send(post(path, body))
            assert 200 == (await other.ask(get("/v1/topics"))).status
            answer = await hostile.answer()
            assert (400, True) == (answer.status, "members, more than" in answer.json["message"])


async def test_a_client_that_stops_reading_is_bounded_and_its_leases_lapse(tmp_path: Path) -> None:
    async with local_broker({"tick_ms": "10"}, tmp_path) as port, wire(port) as busy, wire(port) as other:
        await other.ask(post("/v1/topics?name=t", b""))
        await busy.send(get("/v1/consume?topic=t&group=g&owner=deaf&lease_ms=50&in_flight=1000"))
        await busy.head()
        line = json.dumps({"topic": "t", "value": "x" * 50_000}).encode()
        for _ in range(4):
            answer = await other.ask(post("/v1/produce", b"\n".join([line] * 60), "Content-Type: application/x-ndjson"))
            assert 200 == answer.status

        async def redelivered() -> bool:
            taken = await other.ask(get("/v1/consume?topic=t&group=g&owner=b&lease_ms=60000&max=50&wait_ms=1000"))
            return any(json.loads(one)["attempts"] > 1 for one in taken.body.splitlines())

        await until_async(redelivered)


TENANTS = {"Bearer a": Principal("a", frozenset({"*"})), "Bearer b": Principal("b", frozenset({"read"}))}


def authenticate(request: Request) -> Principal:
    found = TENANTS.get(request.header(b"authorization"))
    if found is None:
        raise AuthenticationFailed("the credential is missing or wrong")
    return found


async def test_with_credentials_each_tenant_has_its_own_topics() -> None:
    """And may do what its credential says, in its own name."""
    engine = await open_local(None)
    server = Server(BrokerRoutes(engine).routes(), authenticate=authenticate)
    await server.start("127.0.0.1", 0)
    a, b = "Authorization: Bearer a", "Authorization: Bearer b"
    message = {"topic": "t", "value": "v", "envelope": {"tenant_id": "b"}}
    async with wire(server.port) as client:
        assert 201 == (await client.ask(post("/v1/topics?name=t", b"", a))).status
        assert {"topics": ["t"]} == (await client.ask(get("/v1/topics", a))).json
        assert {"topics": []} == (await client.ask(get("/v1/topics", b))).json
        assert 404 == (await client.ask(get("/v1/topics/t", b))).status
        refused = await client.ask(post("/v1/topics?name=t", b"", b))
        assert (403, "PERMISSION_DENIED") == (refused.status, refused.json["error"])
        foreign = await client.ask(post("/v1/produce", json.dumps(message).encode(), a))
        assert (403, "PERMISSION_DENIED") == (foreign.status, foreign.json["error"])
        step = json.dumps(PLACE | {"idempotency_key": "i", "tenant_id": "b"}).encode()
        assert 403 == (await client.ask(post("/v1/idempotency/begin", step, a))).status
        assert 401 == (await client.ask(get("/v1/topics"))).status
    await server.stop()
    await engine.stop()


@pytest.mark.faults
async def test_openapi_promises_hold_for_whatever_it_allows_and_forbids(port: int, tmp_path: Path) -> None:
    """schemathesis asks what the document allows and what it forbids: no 5xx, no answer that it does not name."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/v1/openapi.json",
        "--seed", str(SEED),
        "--checks", "not_a_server_error,status_code_conformance", "--phases", "examples,coverage,fuzzing",
        "--max-examples", "15",
        "--exclude-path", "/v1/consume", "--no-color", "--request-timeout", "10", "--generation-database", "none",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert 0 == process.returncode, said.decode()[-4000:]
