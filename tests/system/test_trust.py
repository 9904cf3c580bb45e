"""Two tenants, somebody with little rights, and nobody, at every route of the broker: who gets what."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from oncewire import BrokerClient
from oncewire._ground.errors import AuthenticationFailed, PermissionDenied
from oncewire._ground.http import OPEN, Server
from oncewire._ground.settings import resolve
from oncewire._ground.trust.keys import KeyFile
from oncewire.broker.routes import BrokerRoutes
from oncewire.cli import main
from oncewire.cli.broker import serving
from tests.support.http import wire
from tests.support.wait import within

NOW = int(time.time())
BODIES: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("GET", "/v1/topics"): ("/v1/topics", {}),
    ("POST", "/v1/topics"): ("/v1/topics", {"name": "new"}),
    ("GET", "/v1/topics/{name}"): ("/v1/topics/mine", {}),
    ("DELETE", "/v1/topics/{name}"): ("/v1/topics/gone", {}),
    ("POST", "/v1/produce"): ("/v1/produce", {"topic": "mine", "value": "x"}),
    ("GET", "/v1/consume"): ("/v1/consume?topic=mine&group=g&owner=o&max=1&wait_ms=0", {}),
    ("GET", "/metrics"): ("/metrics", {}),
}
NAMELESS = ("/v1/topics", "/metrics")
"""Routes that answer every tenant, each with its own."""
SETTLING = {"topic": "mine", "group": "g", "owner": "o", "partition": 0, "offset": 0}
for act in ("ack", "nack", "extend"):
    BODIES["POST", f"/v1/{act}"] = (f"/v1/{act}", SETTLING)
for step in ("begin", "success", "failure"):
    BODIES["POST", f"/v1/idempotency/{step}"] = (f"/v1/idempotency/{step}", {**SETTLING, "idempotency_key": "k"})


class Edge:
    """A broker behind a gate, and the keys that were made for it."""

    def __init__(self, server: Server, routes: BrokerRoutes, keys: KeyFile) -> None:
        self.server = server
        self.rules = routes.routes().rules
        self.keys = keys

    def key(self, tenant: str, *grants: str) -> str:
        return self.keys.create("test", tenant, grants, NOW)[1]

    def client(self, key: str) -> BrokerClient:
        return BrokerClient(f"http://127.0.0.1:{self.server.port}", token=key, timeout_s=10)

    async def ask(self, method: str, path: str, body: dict[str, object], *headers: str) -> tuple[int, bytes]:
        sent = json.dumps(body).encode() if body else b""
        lines = "".join(f"{line}\r\n" for line in headers)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}"
        async with wire(self.server.port) as line:
            await line.send(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
            answer = await line.answer(is_head=method == "HEAD")
        return answer.status, answer.body


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    keys = KeyFile(tmp_path / "keys.json")
    settings = resolve({"broker_listen": "127.0.0.1:0", "auth_keys": str(keys.path)}, {}, {}).settings
    async with serving(settings) as (server, routes):
        yield Edge(server, routes, keys)


async def test_every_route_has_a_rule_and_keeps_it(edge: Edge) -> None:
    """A new route must be described in BODIES, or be open to all on purpose."""
    everything, nothing, stranger = edge.key("acme", "*"), edge.key("acme", "join"), edge.key("globex", "*")
    async with edge.client(everything) as acme:
        await acme.create_topic("mine")
        await acme.create_topic("gone")
    seen = set()
    for (method, path), action in edge.rules.items():
        if action == OPEN:
            assert 200 == (await edge.ask(method, path, {}))[0], path
            continue
        there, body = BODIES[method if method != "HEAD" else "GET", path]
        assert 401 == (await edge.ask(method, there, body))[0], f"nobody, {method} {path}"
        assert 401 == (await edge.ask(method, there, body, "Authorization: Bearer ow_0"))[0], f"a wrong key, {path}"
        assert 403 == (await edge.ask(method, there, body, f"X-Api-Key: {nothing}"))[0], f"no right, {method} {path}"
        status, told = await edge.ask(method, there, body, f"X-Api-Key: {stranger}")
        if path in NAMELESS:
            assert (200 <= status < 300, b"mine" in told) == (True, False), f"another tenant, {method} {path}"
        else:
            assert status in (400, 404, 409), f"{status} for another tenant at {method} {path}"
            assert method == "HEAD" or b"topic does not exist" in told, told
        status, _ = await edge.ask(method, there, body, f"X-Api-Key: {everything}")
        assert status not in (401, 403, 404, 500), f"{status} for all rights at {method} {path}"
        seen.add((method if method != "HEAD" else "GET", path))
    assert set(BODIES) == seen, "rules for routes that are not there"


async def test_the_same_topic_of_two_tenants_is_two_topics(edge: Edge) -> None:
    async with edge.client(edge.key("acme", "*")) as acme, edge.client(edge.key("globex", "*")) as globex:
        await acme.create_topic("orders")
        assert [] == await globex.topics()
        with pytest.raises(Exception, match="does not exist"):
            await globex.produce("orders", "stolen?")
        await globex.create_topic("orders")
        await acme.produce("orders", "of acme")
        await globex.produce("orders", "of globex")
        for client, own in ((acme, "of acme"), (globex, "of globex")):
            (delivery,) = await client.take("orders", "g", most=10, wait_s=5)
            assert own == delivery.value


async def test_a_body_cannot_name_another_tenant(edge: Edge) -> None:
    key = edge.key("acme", "*")
    async with edge.client(key) as acme:
        await acme.create_topic("orders")
    body: dict[str, object] = {"topic": "orders", "value": "x", "envelope": {"tenant_id": "globex"}}
    status, answer = await edge.ask("POST", "/v1/produce", body, f"X-Api-Key: {key}")
    assert (403, "PERMISSION_DENIED") == (status, json.loads(answer)["error"])


async def test_a_grant_names_its_topics_and_groups(edge: Edge) -> None:
    async with edge.client(edge.key("acme", "*")) as acme:
        for name in ("orders", "secret"):
            await acme.create_topic(name)
    async with edge.client(edge.key("acme", "produce:orders", "read:orders")) as shop:
        await shop.produce("orders", "x")
        assert ["orders"] == await shop.topics()
        for forbidden in (
            shop.produce("secret", "x"),
            shop.topic("secret"),
            shop.create_topic("more"),
            shop.delete_topic("orders"),
            shop.take("orders", "g", most=1, wait_s=0),
        ):
            with pytest.raises(PermissionDenied):
                await forbidden
    async with edge.client(edge.key("acme", "consume:orders", "group:billing")) as billing:
        with pytest.raises(PermissionDenied):
            await billing.take("orders", "shipping", most=1, wait_s=0)
        (delivery,) = await billing.take("orders", "billing", most=1, wait_s=5)
        assert "x" == delivery.value


async def test_an_envelope_cannot_carry_a_message_past_a_grant(edge: Edge) -> None:
    async with edge.client(edge.key("acme", "*")) as acme:
        for name in ("orders", "secret"):
            await acme.create_topic(name)
    key = edge.key("acme", "produce:orders")
    body: dict[str, object] = {"topic": "orders", "value": "x", "envelope": {"target_topic": " secret"}}
    assert 403 == (await edge.ask("POST", "/v1/produce", body, f"X-Api-Key: {key}"))[0]
    lines = b"\n".join(json.dumps(one).encode() for one in (body, {"topic": "secret", "value": "y"}))
    head = f"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\nX-Api-Key: {key}\r\n"
    async with wire(edge.server.port) as line:
        await line.send(f"{head}Content-Length: {len(lines)}\r\n\r\n".encode() + lines)
        answers = [json.loads(one) for one in (await line.answer()).body.splitlines()]
    assert [True, True] == ["does not allow" in json.dumps(one) for one in answers]


async def _ask_on(client: BrokerClient) -> None:
    while True:
        await client.topics()
        await asyncio.sleep(0.05)


async def test_a_revoked_key_stops_working_while_the_server_runs(edge: Edge) -> None:
    made, text = edge.keys.create("test", "acme", ("read",), NOW)
    async with edge.client(text) as client:
        assert [] == await client.topics()
        edge.keys.revoke(made.id, NOW)
        with pytest.raises(AuthenticationFailed):
            await within(_ask_on(client))


async def test_a_revoked_key_ends_streams_polls_and_bodies_that_are_on_their_way(edge: Edge) -> None:
    """Within three seconds of the revocation, as docs/security.md says; another key of the tenant is not touched."""
    made, text = edge.keys.create("test", "acme", ("*",), NOW)
    other = edge.key("acme", "*")
    async with edge.client(other) as acme:
        await acme.create_topic("mine")
    consume = "GET /v1/consume?topic=mine&group={}&owner=o{} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {}\r\n\r\n"
    slow = f"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {text}\r\nContent-Length: 30\r\n\r\n{{"
    async with wire(edge.server.port) as stream, wire(edge.server.port) as kept:
        await stream.send(consume.format("g", "", text).encode())
        await kept.send(consume.format("h", "", other).encode())
        for line in (stream, kept):
            assert 200 == (await line.head())[0]
        async with wire(edge.server.port) as poll, wire(edge.server.port) as body:
            await poll.send(consume.format("p", "&max=1&wait_ms=60000", text).encode())
            await body.send(slow.encode())
            edge.keys.revoke(made.id, NOW)
            assert b"" == await stream.chunk(), "the proper end of a stream"
            assert await stream.is_closed()
            assert 401 == (await poll.answer()).status
            assert await poll.is_closed()
            await body.send(b'"topic":"mine","value":"xxx"}')
            assert 401 == (await body.answer()).status
        async with edge.client(other) as acme:
            await acme.produce("mine", "still here")
        assert b"still here" in await kept.chunk()


async def test_metrics_show_topics_of_their_tenant_and_all_of_them_to_who_was_given_that(edge: Edge) -> None:
    for tenant in ("acme", "globex"):
        async with edge.client(edge.key(tenant, "*")) as client:
            await client.create_topic(f"secret-of-{tenant}")
    for grants, is_all in ((("*",), False), (("metrics",), False), (("metrics:every-tenant",), True)):
        status, shown = await edge.ask("GET", "/metrics", {}, f"X-Api-Key: {edge.key('acme', *grants)}")
        assert (200, True, is_all) == (status, b"secret-of-acme" in shown, b"secret-of-globex" in shown), grants


async def test_a_damaged_file_of_keys_lets_nobody_in_and_says_nothing_outside(edge: Edge) -> None:
    key = edge.key("acme", "*")
    assert 200 == (await edge.ask("GET", "/v1/topics", {}, f"X-Api-Key: {key}"))[0]
    edge.keys.path.write_text("{")
    async with asyncio.timeout(30):
        while (answer := await edge.ask("GET", "/v1/topics", {}, f"X-Api-Key: {key}"))[0] == 200:
            await asyncio.sleep(0.05)
    assert (500, "internal error") == (answer[0], json.loads(answer[1])["message"])


def test_keys_are_made_listed_and_revoked_from_the_command_line(tmp_path: Path) -> None:
    where = ["--auth-keys", str(tmp_path / "keys.json")]

    def run(*words: str) -> object:
        result = CliRunner().invoke(main, ["keys", *words, *where, "--json"], catch_exceptions=False)
        assert 0 == result.exit_code, result.output
        return json.loads(result.stdout)

    made = run("create", "--tenant", "acme", "--name", "checkout", "--allow", "produce:orders", "--days", "3")
    assert isinstance(made, dict)
    assert "acme" == KeyFile(tmp_path / "keys.json").principal(made["key"], NOW).tenant
    (listed,) = run("ls")  # type: ignore[misc]
    assert ("works", False) == (listed["state"], "key" in listed)
    assert "revoked" == run("revoke", made["id"])["state"]  # type: ignore[index]
    with pytest.raises(AuthenticationFailed):
        KeyFile(tmp_path / "keys.json").principal(made["key"], NOW)


@pytest.mark.parametrize(
    "words",
    [
        ["create", "--tenant", "a b", "--name", "x", "--allow", "read"],
        ["create", "--tenant", "a", "--name", "x", "--allow", "fly"],
        ["create", "--tenant", "a", "--name", "", "--allow", "read"],
        ["revoke", "nothing"],
        ["revoke", "../../etc/passwd"],
    ],
)
def test_what_makes_no_key_is_refused_with_a_sentence(tmp_path: Path, words: list[str]) -> None:
    result = CliRunner().invoke(main, ["keys", *words, "--auth-keys", str(tmp_path / "keys.json")])
    assert 2 == result.exit_code
    assert "error:" in result.stderr
    assert not (tmp_path / "keys.json").exists()
