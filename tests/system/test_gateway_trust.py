"""The gateway behind a gate: rooms, tokens, history, presence and acks of two tenants under the same id, and nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import oncewire
from oncewire import GatewayClient, tokens
from oncewire._ground.contracts.headers import TENANT
from oncewire._ground.contracts.subjects import chat_stop
from oncewire._ground.errors import AuthenticationFailed, PermissionDenied
from oncewire._ground.http import OPEN, Routes, Server
from oncewire._ground.jetstream import Client, Outgoing
from oncewire._ground.settings import resolve
from oncewire._ground.topology import ensure
from oncewire._ground.trust.gate import Gate
from oncewire._ground.trust.jwts import LEEWAY_S, Rules, Tokens
from oncewire._ground.trust.keys import KeyFile
from oncewire._ground.trust.tickets import Tickets
from oncewire.cli.gateway import serving
from oncewire.gateway import frames
from oncewire.gateway.client import Limits
from oncewire.gateway.run import serving as serving_at
from oncewire.gateway.websocket import REVOKED, RULES
from tests.support.gateway import Guest, chunk, lifecycle, message, new_conversation
from tests.support.http import Answer, Wire, wire
from tests.support.nats import NatsServer
from tests.support.wait import until, until_async, within

NOW = int(time.time())
QUICK = Limits(backoff_first_ms=100, backoff_most_ms=1_000)


@pytest.fixture
async def client(shared_server: NatsServer) -> AsyncIterator[Client]:
    async with oncewire.connect(shared_server.url) as client:
        await ensure(client)
        yield client


class Edge:
    def __init__(self, port: int, keys: KeyFile, rules: dict[tuple[str, str], str]) -> None:
        self.port = port
        self.rules = rules
        self.keys = keys

    def key(self, tenant: str, *grants: str) -> str:
        return self.keys.create("test", tenant, grants or ("*",), NOW)[1]

    async def ask(self, method: str, path: str, key: str = "", body: bytes = b"", origin: str = "") -> Answer:
        credential = f"Authorization: Bearer {key}\r\n" if key else ""
        credential += f"Origin: {origin}\r\n" if origin else ""
        credential += "Access-Control-Request-Method: POST\r\n" if method == "OPTIONS" else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{credential}"
        async with wire(self.port) as line:
            await line.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return await line.answer(is_head=method == "HEAD")

    @contextlib.asynccontextmanager
    async def guest(self, key: str = "", ticket: str = "", origin: str | None = None) -> AsyncIterator[Guest]:
        address = f"ws://127.0.0.1:{self.port}/ws" + (f"?ticket={ticket}" if ticket else "")
        headers = {"Authorization": f"Bearer {key}"} if key else None
        page: dict[str, Any] = {"origin": origin} if origin else {}
        async with connect(address, open_timeout=30, additional_headers=headers, **page) as socket:
            one = Guest(socket)
            one.hello = await one.next()
            yield one


PAGE = "https://chat.example"


@pytest.fixture
async def edge(client: Client, tmp_path: Path) -> AsyncIterator[Edge]:
    keys = KeyFile(tmp_path / "keys.json")
    settings = resolve({"auth_keys": str(keys.path), "http_origins": PAGE}, {}, {}).settings
    async with serving(client, settings, "127.0.0.1", 0) as (gateway, _):
        assert gateway.server is not None
        yield Edge(gateway.server.port, keys, gateway.server.routes.rules)


def of(tenant: str, one: Outgoing) -> Outgoing:
    return msgspec.structs.replace(one, headers={**(one.headers or {}), TENANT: tenant})


async def test_every_route_has_a_rule_and_keeps_it(edge: Edge) -> None:
    little = edge.key("acme", "produce")
    assert {OPEN, "known"} < set(edge.rules.values())
    for (method, pattern), action in edge.rules.items():
        path = pattern.replace("{id}", new_conversation())
        if action == OPEN:
            assert (await edge.ask(method, path)).status in (200, 204, 503), (method, pattern)
            continue
        assert 401 == (await edge.ask(method, path)).status, (method, pattern)
        assert 401 == (await edge.ask(method, path, "ow_0")).status, (method, pattern)
        expected = (201,) if action == "known" else (403,)
        assert (await edge.ask(method, path, little)).status in expected, (method, pattern)


async def test_nobody_and_who_may_not_join_get_no_socket(edge: Edge) -> None:
    for key, status in (("", 401), ("ow_0", 401), (edge.key("acme", "produce"), 403)):
        with pytest.raises(InvalidStatus) as caught:
            async with edge.guest(key):
                pass
        assert status == caught.value.response.status_code


@pytest.mark.parametrize(("what", "code"), [("nothing", 4401), ("ow_0", 4401), ("ticket", 4401), ("produce", 4403)])
async def test_a_page_that_may_not_join_is_told_why_by_its_socket(edge: Edge, what: str, code: int) -> None:
    """Browsers hide the status and the body of an answer that is no upgrade."""
    key = edge.key("acme", "produce") if what == "produce" else "ow_0" if what == "ow_0" else ""
    with pytest.raises(ConnectionClosed) as caught:
        async with edge.guest(key, ticket="x" if what == "ticket" else "", origin=PAGE):
            pass
    assert caught.value.rcvd is not None
    assert code == caught.value.rcvd.code
    assert "credential" in caught.value.rcvd.reason or "key" in caught.value.rcvd.reason or what == "ticket"
    with pytest.raises(InvalidStatus):
        async with edge.guest(key, origin="https://evil.example"):
            pass


async def test_a_page_of_an_allowed_origin_may_buy_tickets_and_read_refusals(edge: Edge) -> None:
    conversation, key = new_conversation(), edge.key("acme", "join")
    for path in ("/tickets", f"/conversations/{conversation}/messages", f"/stream/{conversation}/stop"):
        preflight = await edge.ask("OPTIONS", path, origin=PAGE)
        assert (204, PAGE) == (preflight.status, preflight.headers["access-control-allow-origin"])
        allowed = preflight.headers["access-control-allow-headers"].split(", ")
        assert {"authorization", "x-api-key", "content-type", "last-event-id"} <= set(allowed)
        assert 403 == (await edge.ask("OPTIONS", path, origin="https://evil.example")).status
    asked = [
        (201, "POST", "/tickets", key),
        (401, "POST", "/tickets", "ow_0"),
        (401, "POST", "/tickets", ""),
        (401, "GET", f"/conversations/{conversation}/messages", ""),
        (403, "POST", f"/stream/{conversation}/stop", key),
        (400, "GET", f"/conversations/{conversation}/messages?limit=x", key),
        (405, "POST", "/health", key),
        (404, "GET", "/nothing", key),
    ]
    for status, method, path, credential in asked:
        answer = await edge.ask(method, path, credential, origin=PAGE)
        assert (status, PAGE) == (answer.status, answer.headers.get("access-control-allow-origin")), (method, path)
        answer = await edge.ask(method, path, credential, origin="https://evil.example")
        assert "access-control-allow-origin" not in answer.headers, (method, path)


async def test_a_client_asks_for_a_credential_before_each_connect_and_request(client: Client, edge: Edge) -> None:
    """One that ends is followed by the next; one that is refused is a state with a reason."""
    conversation = new_conversation()
    made, first = edge.keys.create("first", "acme", ("join",), NOW)
    given, states = [first, edge.key("acme", "join")], list[Any]()
    await client.publish_one(of("acme", message(conversation, 1)))

    async def token() -> str:
        return given[0]

    async with GatewayClient(f"http://127.0.0.1:{edge.port}", token=token, limits=QUICK) as gateway:
        gateway.states.append(states.append)
        room = gateway.room(conversation, resume=0)
        assert 1 == (await within(anext(room))).sequence
        del given[0]
        edge.keys.revoke(made.id, NOW)
        await until(lambda: "waiting" in [one.state for one in states], "a connection that ended with its key")
        await client.publish_one(of("acme", message(conversation, 2)))
        assert 2 == (await within(anext(room))).sequence
        assert [1, 2] == [one["sequence"] for one in (await gateway.history(conversation)).messages]
        given[0] = "ow_0"
        with pytest.raises(AuthenticationFailed):
            await gateway.history(conversation)
    async with GatewayClient(f"http://127.0.0.1:{edge.port}", token=lambda: "ow_0", limits=QUICK) as refused:
        refused.states.append(states.append)
        with pytest.raises(AuthenticationFailed, match="unknown, revoked or expired"):
            await within(anext(refused.room(conversation)))
    assert (4401, "closed") == (states[-1].code, states[-1].state)
    assert "unknown, revoked or expired" in states[-1].reason


async def test_a_room_that_is_not_allowed_is_an_error_that_is_not_retried_before_the_next_connect(
    client: Client, edge: Edge
) -> None:
    mine, other = new_conversation(), new_conversation()
    given = [edge.key("acme", f"join:{mine}")]
    await client.publish_one(of("acme", message(other, 1)))
    async with GatewayClient(f"http://127.0.0.1:{edge.port}", token=lambda: given[0], limits=QUICK) as gateway:
        await within(gateway.room(mine).is_joined.wait())
        room = gateway.room(other, resume=0)
        with pytest.raises(PermissionDenied, match="does not allow to join"):
            await within(anext(room))
        assert gateway.rules.wake_at is not None
        assert gateway.rules.wake_at > time.time() * 1000 + 5_000, "nothing but the next heartbeat"
        edge.keys.revoke(given[0].split("_")[1], NOW)
        given[0] = edge.key("acme", "join")
        assert 1 == (await within(anext(room))).sequence


async def test_a_credential_that_cannot_be_had_now_is_asked_for_again(edge: Edge) -> None:
    key, asked, states = edge.key("acme", "join"), list[str](), list[Any]()

    def token() -> str:
        asked.append(key)
        if len(asked) < 3:
            raise ConnectionError("the identity provider is away")
        return key

    async with GatewayClient(f"http://127.0.0.1:{edge.port}", token=token, limits=QUICK) as gateway:
        gateway.states.append(states.append)
        await within(gateway.room(new_conversation()).is_joined.wait())
    reasons = [one.reason for one in states if one.state == "waiting"]
    assert 2 == len(reasons)
    assert "identity provider" in reasons[0]


async def test_two_tenants_under_one_id_hear_their_own(client: Client, edge: Edge) -> None:
    conversation = new_conversation()
    for n in (1, 2):
        await client.publish_one(of("acme", message(conversation, n, content="acme's")))
    async with edge.guest(edge.key("acme")) as ours, edge.guest(edge.key("globex")) as theirs:
        assert "e1" == (await ours.join(conversation, 0))["epoch"]
        assert None is (await theirs.join(conversation, 0))["epoch"], "to them it is a room without messages"
        assert [1, 2] == await ours.sequences(2)
        await client.publish_one(of("acme", message(conversation, 3)))
        await client.publish_one(message(conversation, 4))  # of nobody's tenant
        assert [3] == await ours.sequences(1)
        for one in (ours, theirs):
            await one.hears_nothing_more()


async def test_presence_stays_in_its_tenant_and_names_the_principal(edge: Edge) -> None:
    conversation = new_conversation()
    async with (
        edge.guest(edge.key("acme")) as ours,
        edge.guest(edge.key("acme")) as also,
        edge.guest(edge.key("globex")) as theirs,
    ):
        for one in (ours, also, theirs):
            await one.join(conversation)
        await ours.say("presence", conversation, state="typing")
        assert "typing" == (await also.next())["event"]["state"]
        await theirs.hears_nothing_more()


async def test_history_and_tokens_of_another_tenant_cannot_be_read_or_stopped(client: Client, edge: Edge) -> None:
    conversation = new_conversation()
    await client.publish_one(of("acme", message(conversation, 1)))
    await client.publish_one(of("acme", lifecycle(conversation, "started", 1)))
    await client.publish_one(of("acme", chunk(conversation, 1)))
    ours, theirs = edge.key("acme"), edge.key("globex")
    path = f"/conversations/{conversation}/messages"
    assert [1] == [one["sequence"] for one in (await edge.ask("GET", path, ours)).json["messages"]]
    assert [] == (await edge.ask("GET", path, theirs)).json["messages"]
    stops: list[bytes] = []

    async def stopping(_: Any) -> bytes:
        stops.append(b"x")
        return b'["a1"]'

    subscription = client.serve(chat_stop(conversation), stopping, queue="t")
    assert 404 == (await edge.ask("POST", f"/stream/{conversation}/stop", theirs)).status
    assert [] == stops
    assert 202 == (await edge.ask("POST", f"/stream/{conversation}/stop", ours)).status
    client.unsubscribe(subscription)
    async with wire(edge.port) as own, wire(edge.port) as foreign:
        for line, key in ((own, ours), (foreign, theirs)):
            head = f"GET /stream/{conversation} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {key}\r\n\r\n"
            await line.send(head.encode())
            assert 200 == (await line.head())[0]
        async with asyncio.timeout(30):
            await own.reader.readuntil(b't1 "')
        await client.publish_one(of("globex", chunk(conversation, 2)))
        async with asyncio.timeout(30):
            heard = await foreign.reader.readuntil(b't2 "')
        assert b"t1 " not in heard


SENT: dict[type, dict[str, Any]] = {
    frames.JoinRoom: {"type": "join_room", "resumeFromSeq": 0},
    frames.LeaveRoom: {"type": "leave_room"},
    frames.Ack: {"type": "ack", "sequence": 1},
    frames.ResumeFromSeq: {"type": "resume_from_seq", "sequence": 0},
    frames.SetPresence: {"type": "presence", "state": "typing"},
    frames.Heartbeat: {"type": "heartbeat"},
}


async def test_every_frame_has_a_rule_and_keeps_it(client: Client, edge: Edge) -> None:
    """A new frame must be described in SENT and have a rule. Nobody gets no socket, and so no frame through."""
    assert set(get_args(frames.ClientFrame)) == set(RULES) == set(SENT)
    conversation, elsewhere = new_conversation(), new_conversation()
    await client.publish_one(of("acme", message(conversation, 1, content="acme's")))
    async with (
        edge.guest(edge.key("acme", "join", "speak")) as ours,
        edge.guest(edge.key("globex", "*")) as theirs,
        edge.guest(edge.key("acme", f"join:{elsewhere}", f"speak:{elsewhere}")) as bound,
    ):
        assert "joined" == (await ours.join(conversation, 0))["type"]
        assert [1] == await ours.sequences(1)
        assert "joined" == (await theirs.join(conversation, 0))["type"]
        for kind, action in RULES.items():
            for one in (theirs, bound):
                await one.socket.send(json.dumps({**SENT[kind], "conversationId": conversation}))
            if action == OPEN:
                assert (await bound.next())["type"] in ("heartbeat", "left")
                continue
            assert "permission_denied" == (await bound.next())["code"], kind
        # The other tenant was answered, and heard nothing of ours; we heard nothing of theirs.
        heard = []
        while not heard or heard[-1].get("type") != "heartbeat":
            heard.append(await theirs.next())
        assert "acme's" not in json.dumps(heard)
        await ours.hears_nothing_more()
    for key in ("", "ow_0", edge.key("acme", "produce")):
        with pytest.raises(InvalidStatus):
            async with edge.guest(key):
                pass


async def test_a_grant_names_its_conversations(edge: Edge) -> None:
    mine, other = new_conversation(), new_conversation()
    async with edge.guest(edge.key("acme", f"join:{mine}")) as one:
        assert "joined" == (await one.join(mine))["type"]
        assert "permission_denied" == (await one.join(other))["code"]
        await one.say("presence", mine, state="typing")
        assert "permission_denied" == (await one.next())["code"]


async def test_a_ticket_opens_a_socket_for_a_browser_with_no_more_than_it_was_sold_for(edge: Edge) -> None:
    conversation = new_conversation()
    body = json.dumps({"grants": [f"join:{conversation}"]}).encode()
    sold = await edge.ask("POST", "/tickets", edge.key("acme", "join"), body)
    assert (201, "no-store") == (sold.status, sold.headers["cache-control"])
    async with edge.guest(ticket=sold.json["ticket"]) as one:
        assert "joined" == (await one.join(conversation))["type"]
        assert "permission_denied" == (await one.join(new_conversation()))["code"]
    for wrong in (b"[]", b'{"grants": 3}', b'{"more": 1}', b"\xff", b'{"grants": ["fly"]}'):
        assert 400 == (await edge.ask("POST", "/tickets", edge.key("acme", "join"), wrong)).status
    assert 403 == (await edge.ask("POST", "/tickets", edge.key("acme", "join"), b'{"grants": ["admin"]}')).status
    assert 401 == (await edge.ask("POST", "/tickets")).status


async def test_acks_are_kept_by_principal_and_not_shared_with_another_tenant(client: Client, edge: Edge) -> None:
    conversation = new_conversation()
    for n in range(1, 5):
        for tenant in ("acme", "globex"):
            await client.publish_one(of(tenant, message(conversation, n)))
    ours, theirs = edge.key("acme"), edge.key("globex")
    async with edge.guest(ours) as one:
        await one.join(conversation, 0)
        assert [1, 2, 3, 4] == await one.sequences(4)
        await one.say("ack", conversation, sequence=3)
        await one.hears_nothing_more()
    for key, first in ((ours, 4), (theirs, 1)):
        async with asyncio.timeout(30):
            while True:  # the ack is written a moment after its client has gone
                async with edge.guest(key) as again:
                    await again.join(conversation, resume="acked")
                    found = (await again.next())["sequence"]
                if found == first:
                    break


async def test_each_device_of_a_user_has_an_ack_of_its_own(client: Client, edge: Edge) -> None:
    conversation, key = new_conversation(), edge.key("acme")

    async def publish(first: int, last: int) -> None:
        for n in range(first, last + 1):
            await client.publish_one(of("acme", message(conversation, n)))

    async def read(device: str, last: int, **position: Any) -> list[int]:
        """What a device gets up to a message, which it acknowledges."""
        async with edge.guest(key) as one:
            await one.join(conversation, clientId=device, **position)
            sequences = await one.sequences(1)
            sequences += await one.sequences(last - sequences[0])
            await one.say("ack", conversation, sequence=last)
            await one.hears_nothing_more()
            return sequences

    async def is_known(device: str, last: int) -> bool:
        """Whether the device's ack was written: that happens a moment after it has left."""
        async with edge.guest(key) as one:
            return last == (await one.join(conversation, clientId=device, resume="acked"))["after"]

    await publish(1, 5)
    assert [1, 2, 3, 4, 5] == await read("phone", 5, resume="acked")
    await until_async(lambda: is_known("phone", 5))
    await publish(6, 10)
    assert [3, 4, 5, 6, 7, 8, 9, 10] == await read("laptop", 10, resume="acked", resumeFromSeq=2), "it has no ack yet"
    await until_async(lambda: is_known("laptop", 10))
    assert [6, 7, 8, 9, 10] == await read("phone", 10, resume="acked")


async def _listening(edge: Edge, line: Wire, conversation: str, credential: str) -> None:
    await line.send(f"GET /stream/{conversation} HTTP/1.1\r\nHost: localhost\r\n{credential}\r\n\r\n".encode())
    assert 200 == (await line.head())[0]


async def _is_cut_off(line: Wire) -> bool:
    return b"no longer good" in await within(line.reader.read())


async def test_a_revoked_key_closes_what_is_open_and_so_does_one_that_allows_less(client: Client, edge: Edge) -> None:
    """Sockets and event sources, opened with the key or with a ticket that it bought; within three seconds."""
    conversation = new_conversation()
    made, text = edge.keys.create("test", "acme", ("join",), NOW)
    narrowed, narrow = edge.keys.create("test", "acme", ("join", "read"), NOW)
    other = edge.key("acme")
    ticket = (await edge.ask("POST", "/tickets", text)).json["ticket"]
    async with (
        edge.guest(text) as direct,
        edge.guest(ticket=ticket) as ticketed,
        edge.guest(narrow) as less,
        edge.guest(other) as kept,
        wire(edge.port) as heard,
        wire(edge.port) as heard_by_other,
    ):
        for one in (direct, ticketed, less, kept):
            assert "joined" == (await one.join(conversation))["type"]
        await _listening(edge, heard, conversation, f"X-Api-Key: {text}")
        await _listening(edge, heard_by_other, conversation, f"X-Api-Key: {other}")
        edge.keys.revoke(made.id, NOW)
        document = edge.keys.path.read_text()
        edge.keys.path.write_text(document.replace('"join",\n        "read"', '"join:elsewhere"'))
        assert ["join:elsewhere"] == [key.grants[0] for key in edge.keys.keys() if key.id == narrowed.id]  # noqa: SIM118
        for one in (direct, ticketed, less):
            await within(one.socket.wait_closed())
            assert REVOKED == one.socket.close_code
        assert await _is_cut_off(heard)
        await client.publish_one(of("acme", message(conversation, 1)))
        while (told := await kept.next()).get("type") == "joined":
            pass  # the room has its epoch now
        assert 1 == told["sequence"]
        await client.publish_one(of("acme", lifecycle(conversation, "started", 1)))
        await client.publish_one(of("acme", chunk(conversation, 1)))
        await within(heard_by_other.reader.readuntil(b't1 "'))
    for credential in ({"key": text}, {"ticket": ticket}):
        with pytest.raises(InvalidStatus):
            async with edge.guest(**credential):
                pass


async def test_a_socket_ends_with_the_token_that_opened_it(client: Client, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    shown = {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key())), "kid": "e1"}
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [shown]}))
    clock = [float(NOW)]
    claims = {"iss": "i", "aud": "a", "sub": "u", "tenant": "acme", "scope": "join", "exp": NOW + 60}
    token = jwt.encode(claims, key, "ES256", headers={"kid": "e1"})
    rules = Rules(issuer="i", audience="a", jwks=str(tmp_path / "jwks.json"))
    async with Tokens(rules) as signed:
        gate = Gate(None, signed, Tickets(), clock=lambda: clock[0])

        def front(routes: Routes) -> Server:
            return Server(routes, authenticate=gate, vouches=gate.vouches_for)

        async with serving_at(client, "127.0.0.1", 0, front=front) as gateway:
            assert gateway.server is not None
            edge = Edge(gateway.server.port, KeyFile(tmp_path / "none"), {})
            async with edge.guest(token) as one:
                await one.join(new_conversation())
                await one.hears_nothing_more()
                clock[0] = NOW + 60 + LEEWAY_S
                await within(one.socket.wait_closed())
                assert REVOKED == one.socket.close_code


async def test_sockets_and_event_sources_of_a_tenant_are_counted_together(client: Client, tmp_path: Path) -> None:
    """The third is told when to come again, another tenant is not touched, and who closes makes room."""
    keys = KeyFile(tmp_path / "keys.json")
    limited = {"auth_keys": str(keys.path), "http_connections_per_tenant_max": "2"}
    async with serving(client, resolve(limited, {}, {}).settings, "127.0.0.1", 0) as (gateway, _):
        assert gateway.server is not None
        edge = Edge(gateway.server.port, keys, {})
        acme, globex = edge.key("acme"), edge.key("globex")
        source = f"GET /stream/{new_conversation()} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {{}}\r\n\r\n"
        async with wire(edge.port) as tokens_of, edge.guest(acme):
            await tokens_of.send(source.format(acme).encode())
            assert 200 == (await tokens_of.head())[0]
            with pytest.raises(InvalidStatus) as caught:
                async with edge.guest(acme):
                    pass
            assert 429 == caught.value.response.status_code
            assert caught.value.response.headers["Retry-After"]
            async with wire(edge.port) as other, edge.guest(globex):
                await other.send(source.format(acme).encode())
                assert 429 == (await other.head())[0]
        await until(lambda: gateway.server is not None and not gateway.server.connections)
        async with edge.guest(acme), edge.guest(acme):
            pass


async def test_a_stop_reaches_the_answers_of_its_own_tenant_alone(client: Client, edge: Edge) -> None:
    """Two tenants write an answer under the same id."""
    conversation = new_conversation()
    async with (
        tokens.stream(conversation, client=client, tenant="acme") as ours,
        tokens.stream(conversation, client=client, tenant="globex") as theirs,
    ):
        await ours.send("a")
        await theirs.send("b")
        assert 202 == (await edge.ask("POST", f"/stream/{conversation}/stop", edge.key("globex"))).status
        await until(lambda: theirs.stopped)
        assert not ours.stopped
