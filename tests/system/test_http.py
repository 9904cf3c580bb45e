# ruff: noqa: E501 (requests as they are, one to a line)
"""The HTTP front over real sockets: order, keep-alive, limits, deadlines, streams, stopping."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from oncewire._ground.errors import AuthenticationFailed, InvalidSetting, Overloaded, Unavailable
from oncewire._ground.http import NDJSON, OPEN, Limits, Principal, Request, Routes, Server, Stream
from oncewire._ground.http.connection import SLICE_BYTES
from tests.support.http import Wire, get, post, serving, wire
from tests.support.wait import until, within


class Part:
    """A part with one handler of each kind."""

    def __init__(self) -> None:
        self.held: list[Request] = []
        self.streams: list[Stream] = []
        self.told: list[str] = []
        self.routes = Routes(lambda request: request.refuse(404, "NOT_FOUND", "nothing here"))
        self.routes.add("GET", "/now", lambda request: request.respond(200, b'"now"'), action=OPEN)
        self.routes.add("POST", "/echo", self.echo, action=OPEN)
        self.routes.add("GET", "/later", self.later, action=OPEN)
        self.routes.add("GET", "/stream", self.stream, has_head=False, action=OPEN)
        self.routes.add("GET", "/big", lambda request: request.respond(200, b"x" * 300_000, "text/plain"), action=OPEN)
        self.routes.add("GET", "/bug", lambda request: 1 / 0, action=OPEN)
        self.routes.add("GET", "/full", self.full, action=OPEN)
        self.routes.add(
            "GET", "/topics/{name}", lambda request: request.respond(200, request.params["name"].encode()), action=OPEN
        )

    def echo(self, request: Request) -> None:
        seen = {"body": request.body.decode("latin-1"), "query": request.query, "tenant": request.principal.tenant}
        request.respond(200, json.dumps(seen).encode())

    def later(self, request: Request) -> None:
        self.held.append(request)
        if request.query.get("wait"):
            request.on_close = lambda: self.told.append("gone")

    def stream(self, request: Request) -> None:
        stream = request.stream(NDJSON)
        assert stream is not None
        stream.on_close = lambda: self.told.append("closed")
        stream.on_drain = lambda: self.told.append("drained")
        self.streams.append(stream)

    def full(self, request: Request) -> None:
        raise Overloaded("no room", retry_after_s=3.2)


@pytest.fixture
async def part() -> Part:
    return Part()


@pytest.fixture
async def server(part: Part) -> AsyncIterator[Server]:
    async with serving(part.routes) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Wire]:
    async with wire(server.port) as client:
        yield client


async def test_one_connection_serves_many_requests(client: Wire) -> None:
    for _ in range(3):
        answer = await client.ask(get("/now"))
        assert (200, b'"now"') == (answer.status, answer.body)
        assert {"content-type", "content-length", "x-request-id", "date"} == set(answer.headers)


async def test_pipelined_requests_are_answered_in_order(client: Wire, part: Part) -> None:
    """Also when the first takes longest."""
    await client.send(get("/later") + post("/echo", b"1") + get("/nothing") + get("/now"))
    await until(lambda: part.held)
    part.held[0].respond(200, b'"late"')
    answers = [await client.answer() for _ in range(4)]
    assert [200, 200, 404, 200] == [answer.status for answer in answers]
    assert b'"late"' == answers[0].body


async def test_a_request_may_arrive_in_any_pieces(client: Wire) -> None:
    """Cut at every byte, alone and behind another one."""
    request = post("/echo?a=%C3%A9", b"hello")
    for cut in range(1, len(request)):
        await client.send(request[:cut])
        await asyncio.sleep(0)
        answer = await client.ask(request[cut:])
        assert {"body": "hello", "query": {"a": "é"}, "tenant": ""} == answer.json


async def test_a_request_may_arrive_byte_by_byte(client: Wire) -> None:
    chunked = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: ignored\r\n\r\n"
    for at in range(len(chunked)):
        await client.send(chunked[at : at + 1])
    assert "abcde" == (await client.answer()).json["body"]
    assert 200 == (await client.ask(get("/now"))).status


async def test_head_is_get_without_the_body(client: Wire) -> None:
    await client.send(b"HEAD /now HTTP/1.1\r\nHost: localhost\r\n\r\n" + get("/now"))
    head = await client.answer(is_head=True)
    assert (200, "5", b"") == (head.status, head.headers["content-length"], head.body)
    assert b'"now"' == (await client.answer()).body


async def test_a_method_that_a_path_lacks_is_405_and_says_which_it_has(client: Wire) -> None:
    answer = await client.ask(post("/now", b""))
    assert (405, "GET, HEAD") == (answer.status, answer.headers["allow"])
    assert "METHOD_NOT_ALLOWED" == answer.json["error"]
    await client.send(b"HEAD /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (405, "GET") == ((answer := await client.answer(is_head=True)).status, answer.headers["allow"])


async def test_a_segment_of_the_path_may_be_a_name(client: Wire) -> None:
    assert b"a b/\xc3\xa9" == (await client.ask(get("/topics/a%20b%2F%C3%A9"))).body
    assert 400 == (await client.ask(get("/topics/%FF"))).status
    assert 404 == (await client.ask(get("/topics/a/b"))).status


async def test_a_request_id_is_echoed_when_it_is_one_and_made_when_not(client: Wire) -> None:
    assert "abc-1.2" == (await client.ask(get("/now", "X-Request-Id: abc-1.2"))).headers["x-request-id"]
    for bad in ("a b", "x" * 129, "ü"):
        made = (await client.ask(get("/now", f"X-Request-Id: {bad}"))).headers["x-request-id"]
        assert bad != made
        assert made
    first, second = [(await client.ask(get("/now"))).headers["x-request-id"] for _ in range(2)]
    assert first != second


async def test_a_client_that_asks_first_is_told_to_go_on(client: Wire) -> None:
    body = b"x" * 10
    request = post("/echo", body, "Expect: 100-continue")
    await client.send(request[: -len(body)])
    assert 100 == (await client.answer()).status
    assert 200 == (await client.ask(body)).status


async def test_a_client_that_asks_first_waits_for_the_answers_before(client: Wire, part: Part) -> None:
    await client.send(get("/later") + post("/echo", b"x", "Expect: 100-continue")[:-1])
    await until(lambda: part.held)
    part.held[0].respond(200, b"1")
    assert [200, 100] == [(await client.answer()).status for _ in range(2)]
    assert 200 == (await client.ask(b"x")).status


async def test_an_offer_to_upgrade_is_ignored(client: Wire) -> None:
    """Java's client offers h2c with each request and is served in HTTP/1.1."""
    offer = (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    )
    await client.send(post("/echo", b"abc", *offer) + get("/now", *offer) + get("/now"))
    answers = [await client.answer() for _ in range(3)]
    assert [200, 200, 200] == [answer.status for answer in answers]
    assert "abc" == answers[0].json["body"]


async def test_http_1_0_closes_unless_asked_otherwise(server: Server) -> None:
    async with wire(server.port) as client:
        answer = await client.ask(b"GET /now HTTP/1.0\r\n\r\n")
        assert (200, "close") == (answer.status, answer.headers["connection"])
        assert await client.is_closed()
    async with wire(server.port) as client:
        kept = b"GET /now HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        assert "keep-alive" == (await client.ask(kept)).headers["connection"]
        assert 200 == (await client.ask(kept)).status


async def test_connection_close_is_honoured(client: Wire) -> None:
    await client.send(get("/now", "Connection: close") + get("/now"))
    assert "close" == (await client.answer()).headers["connection"]
    assert await client.is_closed()


async def test_only_the_last_of_several_answers_says_that_it_is_the_last(client: Wire, part: Part) -> None:
    await client.send(get("/later") + get("/now") + get("/now", "Connection: close"))
    await until(lambda: part.held)
    part.held[0].respond(200, b"1")
    told = [(await client.answer()).headers.get("connection") for _ in range(3)]
    assert [None, None, "close"] == told


async def test_a_failing_handler_is_an_internal_error_that_tells_nothing(
    client: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await client.ask(get("/bug"))
    assert (500, {"error": "INTERNAL", "message": "internal error"}) == (answer.status, answer.json)
    assert "ZeroDivisionError" in caplog.text
    assert 200 == (await client.ask(get("/now"))).status


async def test_an_error_of_ours_becomes_its_answer(client: Wire) -> None:
    answer = await client.ask(get("/full"))
    assert (429, "RESOURCE_EXHAUSTED", "3") == (answer.status, answer.json["error"], answer.headers["retry-after"])


SMUGGLED = {
    "both lengths": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, other order": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
    "a list of lengths": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1, 1\r\n\r\na",
    "a signed length": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: +1\r\n\r\na",
    "a hex length": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0x1\r\n\r\na",
    "space before the colon": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length : 1\r\n\r\na",
    "another encoding first": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "an unknown encoding": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "identity": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: identity\r\n\r\nabc",
    "chunked twice": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in 1.0": b"POST /echo HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length in the trailer": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a chunk size that is none": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "a chunk size with a sign": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk size with 0x": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
    "a chunk size too big": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n11111111111111111\r\n",
    "a chunk that is longer": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    "bare line feeds": b"GET /now HTTP/1.1\nHost: localhost\n\n",
    "one bare line feed": b"GET /now HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
    "a bare line feed after a chunk size": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n",
    "a bare carriage return": b"GET /now HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n",
    "a folded header": b"GET /now HTTP/1.1\r\nHost: localhost\r\nX: y\r\n z\r\n\r\n",
    "a header before any": b"GET /now HTTP/1.1\r\n X: y\r\nHost: localhost\r\n\r\n",
    "a header without a colon": b"GET /now HTTP/1.1\r\nHost: localhost\r\nXY\r\n\r\n",
    "a NUL in a header": b"GET /now HTTP/1.1\r\nHost: localhost\r\nX: \0\r\n\r\n",
    "no host": b"GET /now HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /now HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "a byte above ASCII in the path": b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a tab in the path": b"GET /a\tb HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a version to come": b"GET /now HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "a version from before": b"GET /now\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a method in small letters": b"get /now HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}  # fmt: skip


@pytest.mark.parametrize("sent", SMUGGLED.values(), ids=SMUGGLED.keys())
async def test_what_two_servers_could_read_differently_is_refused_and_ends_the_connection(
    server: Server, sent: bytes
) -> None:
    """What follows it is never taken for a request."""
    async with wire(server.port) as client:
        await client.send(get("/now") + sent + get("/now"))
        answers = [await client.answer(), await client.answer()]
        assert [200, 400] == [answer.status for answer in answers]
        assert "INVALID_ARGUMENT" == answers[1].json["error"]
        assert await client.is_closed()


FOREIGN = [
    "Origin: https://evil.example",
    "Origin: http://localhost:1",
    "Origin: null",
    "Sec-Fetch-Site: cross-site",
    "Sec-Fetch-Site: same-site",
]


@pytest.mark.parametrize("header", FOREIGN)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "TRACE"])
async def test_a_page_of_another_origin_reaches_no_handler(
    part: Part, server: Server, method: str, header: str
) -> None:
    """Whatever the method, the path and the body, and without a wait for that body."""
    for path in ("/later", "/echo", "/stream", "/topics/a", "/unknown"):
        async with wire(server.port) as client:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\nContent-Type: text/plain\r\n"
            await client.send(f"{head}Content-Length: 9\r\n\r\n".encode())
            answer = await client.answer()
            assert (403, "PERMISSION_DENIED") == (answer.status, answer.json["error"])
            assert "access-control-allow-origin" not in answer.headers
            assert await client.is_closed()
    assert [] == part.held
    assert [] == part.streams


async def test_requests_of_a_foreign_page_are_not_handled_behind_one_that_is_good(part: Part, server: Server) -> None:
    async with wire(server.port) as client:
        await client.send(get("/now") + get("/later", FOREIGN[0]) + get("/later"))
        assert [200, 403] == [(await client.answer()).status for _ in range(2)]
        assert await client.is_closed()
    assert [] == part.held


async def test_a_foreign_page_is_refused_before_its_credential_is_looked_at(part: Part) -> None:
    seen: list[Request] = []

    def authenticate(request: Request) -> Principal:
        seen.append(request)
        return Principal("acme", frozenset({"*"}))

    server = Server(part.routes, Limits(), authenticate)
    await server.start("127.0.0.1", 0)
    try:
        async with wire(server.port) as client:
            assert 403 == (await client.ask(get("/now", "Authorization: Bearer ow_x", FOREIGN[0]))).status
        assert [] == seen
    finally:
        await server.stop(grace_s=1.0)


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("/page", (), 404),
        ("/now", (), 403),
        ("/topics/a", (), 403),
        ("/topics/%FF", (), 403),
        ("/page", ("Origin: https://evil.example",), 403),
    ],
)
async def test_a_link_on_another_page_leads_to_pages_and_not_to_routes(
    server: Server, path: str, more: tuple[str, ...], status: int
) -> None:
    headers = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document", *more)
    async with wire(server.port) as client:
        assert status == (await client.ask(get(path, *headers))).status


async def test_pages_of_an_allowed_origin_may_ask_and_read(part: Part) -> None:
    shop = "Origin: https://shop.example"
    async with serving(part.routes, origins=frozenset({"https://shop.example"})) as server, wire(server.port) as client:
        for sent in (get("/now", shop, "Sec-Fetch-Site: cross-site"), post("/echo", b"{}", shop), get("/full", shop)):
            answer = await client.ask(sent)
            assert "https://shop.example" == answer.headers["access-control-allow-origin"]
            assert "true" == answer.headers["access-control-allow-credentials"]
            assert "Origin" == answer.headers["vary"]
        asked = get("/echo", shop, "Access-Control-Request-Method: POST").replace(b"GET", b"OPTIONS", 1)
        preflight = await client.ask(asked)
        assert (204, "POST") == (preflight.status, preflight.headers["access-control-allow-methods"])
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert "https://shop.example" == preflight.headers["access-control-allow-origin"]
        program = await client.ask(get("/now"))
        assert (200, "Origin") == (program.status, program.headers["vary"])
        assert "access-control-allow-origin" not in program.headers
        assert 403 == (await client.ask(get("/now", "Origin: https://evil.example"))).status


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]", "", "a b"],
)
async def test_on_loopback_only_its_own_names_are_answered(server: Server, host: str) -> None:
    """A web page that rebinds its name to 127.0.0.1 still sends that name."""
    async with wire(server.port) as client:
        answer = await client.ask(f"GET /now HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert (403, "PERMISSION_DENIED") == (answer.status, answer.json["error"])
    async with wire(server.port) as client:
        answer = await client.ask(f"GET http://{host or 'x'}/now HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer.status in (400, 403)
    for own in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "127.1.2.3", "[::1]:99"):
        async with wire(server.port) as client:
            assert 200 == (await client.ask(f"GET http://{own}/now HTTP/1.1\r\nHost: {own}\r\n\r\n".encode())).status


async def test_elsewhere_than_on_loopback_it_does_not_start_without_credentials(part: Part) -> None:
    with pytest.raises(InvalidSetting, match="without authentication"):
        await Server(part.routes).start("0.0.0.0", 0)


async def test_a_taken_port_is_reported_in_a_sentence(server: Server, part: Part) -> None:
    with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{server.port}"):
        await Server(part.routes).start("127.0.0.1", server.port)


async def test_the_principal_comes_from_the_credential(part: Part) -> None:
    def authenticate(request: Request) -> Principal:
        if request.header(b"authorization") != "Bearer right":
            raise AuthenticationFailed("the credential is missing or wrong")
        return Principal("acme", frozenset({"produce"}))

    server = Server(part.routes, authenticate=authenticate)
    await server.start("0.0.0.0", 0)
    try:
        async with wire(server.port) as client:
            right = "Authorization: Bearer right"
            assert "acme" == (await client.ask(post("/echo", b"", right))).json["tenant"]
            answer = await client.ask(post("/echo", b"", "Authorization: Bearer wrong"))
            assert (401, "UNAUTHENTICATED") == (answer.status, answer.json["error"])
            assert await client.is_closed()
    finally:
        await server.stop()


TOO_MUCH = {
    "a header": (431, b"GET /now HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 3000 + b"\r\n\r\n"),
    "a header without an end": (431, b"GET /now HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 60_000),
    "a path without an end": (431, b"GET /" + b"x" * 60_000),
    "headers": (431, b"GET /now HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20 + b"\r\n"),
    "a body": (413, b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5001\r\n\r\n"),
    "a body of chunks": (413, b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"a\r\n0123456789\r\n" * 501),
    "a body that is asked for first": (413, b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5001\r\nExpect: 100-continue\r\n\r\n"),
    "framing": (400, b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 60_000),
    "trailers": (400, b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 60_000),
    "an expectation": (417, b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nExpect: miracles\r\n\r\n"),
}  # fmt: skip


@pytest.mark.parametrize(("status", "sent"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
async def test_too_much_is_refused_and_its_sender_can_read_why(part: Part, status: int, sent: bytes) -> None:
    """Also a sender that goes on sending: closing at once would cut the answer off."""
    limits = {"head_bytes_max": 2048, "headers_max": 16, "body_bytes_max": 5000}
    async with serving(part.routes, **limits) as server, wire(server.port) as client:
        await client.send(sent + b"y" * 200_000)
        answer = await client.answer()
        assert (status, "INVALID_ARGUMENT") == (answer.status, answer.json["error"])
        await client.send(b"", eof=True)
        assert await client.is_closed()


async def test_a_connection_too_many_gets_503(part: Part) -> None:
    async with serving(part.routes, connections_max=1) as server:
        async with wire(server.port) as first:
            assert 200 == (await first.ask(get("/now"))).status
            async with wire(server.port) as second:
                assert 503 == (await second.answer()).status
        await until(lambda: not server.connections)
        async with wire(server.port) as third:
            assert 200 == (await third.ask(get("/now"))).status


async def test_requests_that_wait_are_bounded_and_none_is_lost(part: Part) -> None:
    """The socket is not read on; what was read is kept."""
    async with serving(part.routes, pipelined_max=4) as server, wire(server.port) as client:
        await client.send(get("/later") + get("/now") * 5000)
        await until(lambda: part.held)
        connection = next(iter(server.connections))
        await until(lambda: connection._held)
        assert len(connection._waiting) <= 4 + SLICE_BYTES // len(get("/now"))
        part.held[0].respond(200, b"1")
        for _ in range(5001):
            assert 200 == (await client.answer()).status


SLOW = {
    "a head": (408, b"GET /now HTT"),
    "a body": (408, post("/echo", b"abc")[:-1]),
    "nothing": (None, b""),
    "nothing more": (200, get("/now")),
}


@pytest.mark.parametrize(("status", "sent"), SLOW.values(), ids=SLOW.keys())
async def test_who_is_too_slow_is_sent_away(part: Part, status: int | None, sent: bytes) -> None:
    limits = {"head_s_max": 0.5, "body_s_max": 0.5, "idle_s_max": 0.5}
    async with serving(part.routes, **limits) as server, wire(server.port) as client:
        await client.send(sent)
        if status is not None:
            assert status == (await client.answer()).status
        await client.send(b"", eof=status == 408)
        assert await client.is_closed()


async def test_waiting_for_an_answer_is_not_being_slow(part: Part) -> None:
    limits = {"head_s_max": 0.5, "body_s_max": 0.5, "idle_s_max": 0.5}
    async with serving(part.routes, **limits) as server, wire(server.port) as client:
        await client.send(get("/later"))
        await until(lambda: part.held)
        begun = server.now
        await until(lambda: server.now > begun + 0.8)
        part.held[0].respond(200, b"1")
        assert 200 == (await client.answer()).status


async def test_a_client_that_reads_nothing_is_bounded_and_then_cut_off(part: Part) -> None:
    limits = {"write_buffer_bytes_max": 100_000, "stalled_s_max": 0.3, "pipelined_max": 4}
    async with serving(part.routes, **limits) as server, wire(server.port) as client:
        client.writer.write(get("/big") * 500)
        connection = (await until(lambda: list(server.connections)))[0]
        await until(lambda: connection.is_write_paused)
        assert connection.buffered_bytes < 1_000_000
        await until(lambda: not server.connections)


async def test_a_stream_sends_its_head_at_once_and_then_what_comes(client: Wire, part: Part) -> None:
    await client.send(get("/stream"))
    status, headers = await client.head()
    assert (200, NDJSON) == (status, headers["content-type"])
    part.streams[0].write(b'{"a":1}\n')
    assert b'{"a":1}\n' == await client.chunk()
    part.streams[0].end()
    assert b"" == await client.chunk()
    assert await client.is_closed()
    assert [] == part.told


async def test_http_1_0_gets_a_stream_without_chunks(client: Wire, part: Part) -> None:
    await client.send(b"GET /stream HTTP/1.0\r\n\r\n")
    assert "transfer-encoding" not in (await client.head())[1]
    part.streams[0].write(b"line\n")
    part.streams[0].end()
    assert b"line\n" == await within(client.reader.read())


@pytest.mark.parametrize("path", ["/stream", "/later?wait=1"])
async def test_who_waits_for_a_client_hears_that_it_is_gone(server: Server, part: Part, path: str) -> None:
    """Its end of the input counts as its going: nothing is handed to somebody who may not be there."""
    async with wire(server.port) as client:
        await client.send(get(path))
        await until(lambda: part.streams or part.held)
        await client.send(b"", eof=True)
        await until(lambda: part.told)
    assert 1 == len(part.told)


async def test_a_half_closed_client_still_gets_its_answers(client: Wire, part: Part) -> None:
    await client.send(get("/later") + get("/now"), eof=True)
    await until(lambda: part.held)
    part.held[0].respond(200, b"1")
    assert [200, 200] == [(await client.answer()).status for _ in range(2)]
    assert await client.is_closed()


async def test_an_answer_to_a_client_that_is_gone_goes_nowhere(server: Server, part: Part) -> None:
    async with wire(server.port) as client:
        await client.send(get("/later?wait=1"))
        await until(lambda: part.held)
        client.writer.transport.abort()
        await until(lambda: not server.connections)
    assert not part.held[0].is_open
    part.held[0].respond(200, b"1")
    assert part.held[0].stream(NDJSON) is None


async def test_a_stream_shows_how_far_its_reader_is_behind(part: Part) -> None:
    async with serving(part.routes, write_buffer_bytes_max=50_000) as server, wire(server.port) as client:
        await client.send(get("/stream"))
        await client.head()
        stream = part.streams[0]
        written = 0
        while not stream.is_full:
            stream.write(b"x" * 10_000)
            written += 10_000
            await asyncio.sleep(0)
        assert stream.buffered_bytes > 50_000
        read = 0
        while read < written:
            read += len(await client.chunk())
        await until(lambda: "drained" in part.told)
        assert not stream.is_full


async def test_a_stop_finishes_what_is_in_hand_and_ends_streams(part: Part) -> None:
    server = Server(part.routes, Limits())
    await server.start("127.0.0.1", 0)
    async with wire(server.port) as busy, wire(server.port) as idle, wire(server.port) as streaming:
        await idle.ask(get("/now"))
        await busy.send(get("/later"))
        await streaming.send(get("/stream"))
        await streaming.head()
        await until(lambda: part.held)
        stopping = asyncio.create_task(server.stop(grace_s=20))
        assert await idle.is_closed()
        assert b"" == await streaming.chunk()
        assert ["closed"] == part.told
        assert not stopping.done()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", server_port(busy))
        part.held[0].respond(200, b"1")
        answer = await busy.answer()
        assert (200, "close") == (answer.status, answer.headers["connection"])
        await within(stopping)


def server_port(client: Wire) -> int:
    port: int = client.writer.get_extra_info("peername")[1]
    return port


async def test_who_waits_for_long_is_told_of_a_stop_and_may_still_answer(part: Part) -> None:
    server = Server(part.routes, Limits())
    await server.start("127.0.0.1", 0)
    async with wire(server.port) as client:
        await client.send(get("/later?wait=1"))
        await until(lambda: part.held)
        part.held[0].on_close = lambda: part.held[0].respond(200, b"[]")
        await within(server.stop(grace_s=20))
        answer = await client.answer()
        assert (b"[]", "close") == (answer.body, answer.headers["connection"])


async def test_what_arrives_behind_the_last_answer_of_a_stop_has_no_effect(part: Part) -> None:
    server = Server(part.routes, Limits())
    await server.start("127.0.0.1", 0)
    async with wire(server.port) as client:
        body = post("/echo", b"abc")
        await client.send(body[:-1])
        await until(lambda: server.connections and not next(iter(server.connections)).is_idle)
        stopping = asyncio.create_task(server.stop(grace_s=20))
        await asyncio.sleep(0)
        await client.send(body[-1:] + get("/later"))
        assert "close" == (await client.answer()).headers["connection"]
        await within(stopping)
    assert [] == part.held


async def test_a_stop_does_not_wait_for_ever(part: Part) -> None:
    server = Server(part.routes, Limits())
    await server.start("127.0.0.1", 0)
    async with wire(server.port) as busy:
        await busy.send(get("/later"))
        await until(lambda: part.held)
        await within(server.stop(grace_s=0.05))
        assert await busy.is_closed()


async def test_answers_are_counted_by_status(client: Wire, server: Server) -> None:
    for path in ("/now", "/now", "/nothing", "/bug"):
        await client.ask(get(path))
    assert {200: 2, 404: 1, 500: 1} == dict(server.answers)
