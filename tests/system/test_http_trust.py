"""The front against those who mean no good: TLS and its renewal, rates per tenant, floods, bodies without end."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from oncewire._ground.errors import InvalidSetting
from oncewire._ground.http import NOBODY, OPEN, Certificate, Limits, Principal, Request, Routes, Server, certificate_of
from oncewire._ground.http.connection import Connection
from oncewire._ground.http.rates import TENANTS_MAX, Rates
from tests.support.http import Wire, get, wire
from tests.support.wait import until, within


def routes() -> Routes:
    table = Routes(lambda request: request.refuse(404, "NOT_FOUND", "nothing here"))
    table.add("GET", "/health", lambda request: request.respond(200, b"{}"), action=OPEN)
    table.add("GET", "/thing", lambda request: request.respond(200, b"{}"), action="read")
    table.add("POST", "/echo", lambda request: request.respond(200, request.body), action="read")
    return table


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[Server]:
    await server.start("127.0.0.1", 0)
    async with server:
        yield server


# ---- TLS


def write_pair(folder: Path, name: str) -> None:
    """A certificate for 127.0.0.1, and its key, under the names that the server was given."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))


@asynccontextmanager
async def secure(port: int) -> AsyncIterator[tuple[Wire, str]]:
    """A connection that looks at no authority, and the name in the certificate that it was shown."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reader, writer = await within(asyncio.open_connection("127.0.0.1", port, ssl=context))
    shown = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    try:
        yield Wire(reader, writer), str(shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def shown_by(server: Server) -> str:
    async with secure(server.port) as (line, name):
        await line.send(get("/health"))
        assert 200 == (await line.answer()).status
    return name


async def test_a_renewed_certificate_is_shown_to_new_connections_and_old_ones_go_on(tmp_path: Path) -> None:
    write_pair(tmp_path, "first")
    certificate = Certificate(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    async with listening(Server(routes(), certificate=certificate)) as server, secure(server.port) as (old, name):
        assert "first" == name
        write_pair(tmp_path, "second")
        async with asyncio.timeout(30):
            while await shown_by(server) != "second":
                await asyncio.sleep(0.05)
        await old.send(get("/health"))
        assert 200 == (await old.answer()).status


async def test_a_certificate_that_does_not_fit_its_key_leaves_the_old_one_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pair(tmp_path, "good")
    certificate = Certificate(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    good = (tmp_path / "cert.pem").read_bytes()
    async with listening(Server(routes(), certificate=certificate)) as server:
        write_pair(tmp_path, "bad")
        (tmp_path / "cert.pem").write_bytes(good[: len(good) // 2])
        await until(lambda: "the old one stays" in caplog.text)
        assert "good" == await shown_by(server)


async def test_large_bodies_and_answers_pass_through_tls(tmp_path: Path) -> None:
    write_pair(tmp_path, "x")
    certificate = Certificate(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    body = b"x" * 3_000_000
    async with (
        listening(Server(routes(), certificate=certificate)) as server,
        secure(server.port) as (line, _),
    ):
        await line.send(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert body == (await line.answer()).body


async def test_plain_http_and_garbage_at_a_tls_port_disturb_nobody(tmp_path: Path) -> None:
    write_pair(tmp_path, "x")
    certificate = Certificate(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    async with listening(Server(routes(), certificate=certificate)) as server:
        for sent in (get("/health"), b"\x16\x03\x01" + bytes(300), b"\0" * 50):
            async with wire(server.port) as line:
                await line.send(sent)
                with pytest.raises(asyncio.IncompleteReadError):
                    await line.head()
        assert "x" == await shown_by(server)


def test_a_certificate_that_cannot_be_used_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nothing")
    for cert, key in ((tmp_path / "none", ""), (tmp_path / "cert.pem", "")):
        with pytest.raises(InvalidSetting, match="certificate"):
            certificate_of(str(cert), key)
    with pytest.raises(InvalidSetting, match="tls_cert"):
        certificate_of("", "key.pem")
    assert certificate_of("", "") is None


# ---- rates


def test_a_tenant_may_ask_as_often_as_its_rate_and_no_more() -> None:
    rates = Rates(10)
    assert [0.0] * 10 == [rates.wait_s("a", 5.0) for _ in range(10)]
    assert pytest.approx(0.1) == rates.wait_s("a", 5.0)
    assert 0.0 == rates.wait_s("b", 5.0), "another tenant is not touched"
    assert 0.0 == rates.wait_s("a", 5.125)
    assert rates.wait_s("a", 5.125) > 0
    assert rates.wait_s("a", 4.0) > 0, "a clock that goes back gives nothing away"


def test_tenants_without_number_take_no_memory_without_bound() -> None:
    rates = Rates(1)
    for number in range(TENANTS_MAX + 500):
        rates.wait_s(str(number), 1.0)
    assert TENANTS_MAX == len(rates._buckets)


async def test_a_tenant_that_asks_too_often_is_told_when_to_come_again_and_others_are_served() -> None:
    def authenticate(request: Request) -> Principal:
        return Principal(request.header(b"x-tenant"), frozenset({"*"}))

    server = Server(routes(), Limits(requests_per_s_max=5), authenticate)
    async with listening(server), wire(server.port) as line:
        asked = b"GET /%b HTTP/1.1\r\nHost: localhost\r\nX-Tenant: %b\r\n\r\n"
        statuses = []
        for _ in range(40):
            await line.send(asked % (b"thing", b"a"))
            answer = await line.answer()
            statuses.append(answer.status)
            if answer.status == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert "RESOURCE_EXHAUSTED" == answer.json["error"]
        assert {200, 429} == set(statuses)
        for path, tenant in ((b"thing", b"b"), (b"health", b"a")):
            await line.send(asked % (path, tenant))
            assert 200 == (await line.answer()).status


async def test_a_rate_is_that_of_one_process_and_counts_the_beginning_of_websockets() -> None:
    """As docs/security.md says: who runs two nodes gives a tenant twice the rate."""

    def authenticate(request: Request) -> Principal:
        return Principal(request.header(b"x-tenant"), frozenset({"*"}))

    first, second = (Server(routes(), Limits(requests_per_s_max=5), authenticate) for _ in range(2))
    asked = b"GET /%b HTTP/1.1\r\nHost: localhost\r\nX-Tenant: a\r\n%b\r\n"
    async with listening(first), listening(second), wire(first.port) as line, wire(second.port) as other:
        statuses = [(await line.ask(asked % (b"health", b"Upgrade: websocket\r\n"))).status for _ in range(40)]
        assert 429 in statuses
        assert 200 == (await other.ask(asked % (b"thing", b""))).status


# ---- connections of a tenant


async def test_a_tenant_has_as_many_connections_as_it_may_and_others_are_served() -> None:
    """Idle ones and streams alike. One too many is answered and closed; what is open to all is never counted."""

    def authenticate(request: Request) -> Principal:
        tenant = request.header(b"x-tenant")
        return Principal(tenant, frozenset({"*"})) if tenant else NOBODY

    table = routes()
    streams = []
    table.add("GET", "/stream", lambda request: streams.append(request.stream("text/plain")), action="read")
    server = Server(table, Limits(connections_per_tenant_max=2), authenticate)
    async with listening(server), wire(server.port) as idle, wire(server.port) as other:
        assert 200 == (await idle.ask(get("/thing", "X-Tenant: a"))).status
        async with wire(server.port) as stream:
            await stream.send(get("/stream", "X-Tenant: a"))
            assert 200 == (await stream.head())[0]
            for more in ((), ("Upgrade: websocket", "Connection: Upgrade")):
                async with wire(server.port) as third:
                    assert 200 == (await third.ask(get("/health"))).status, "not counted: nobody's yet"
                    answer = await third.ask(get("/thing", "X-Tenant: a", *more) + get("/thing", "X-Tenant: b"))
                    assert (429, "RESOURCE_EXHAUSTED") == (answer.status, answer.json["error"])
                    assert int(answer.headers["retry-after"]) >= 1
                    assert "close" == answer.headers["connection"]
                    assert await third.is_closed()
            assert 200 == (await other.ask(get("/thing", "X-Tenant: b"))).status
            assert 200 == (await idle.ask(get("/thing", "X-Tenant: a"))).status, "a connection is counted once"
        await until(lambda: 2 == len(server.connections))
        async with wire(server.port) as again:
            assert 200 == (await again.ask(get("/thing", "X-Tenant: a"))).status
        assert 200 == (await idle.ask(get("/thing", "X-Tenant: b"))).status, "a proxy's connection changes hands"
        assert 200 == (await other.ask(get("/thing", "X-Tenant: a"))).status


async def test_who_never_finishes_a_tls_handshake_is_sent_away(tmp_path: Path) -> None:
    write_pair(tmp_path, "x")
    certificate = Certificate(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    async with (
        listening(Server(routes(), Limits(head_s_max=0.2), certificate=certificate)) as server,
        wire(server.port) as silent,
    ):
        assert await silent.is_closed()


# ---- floods


class FromElsewhere(asyncio.Transport):
    """A socket of another machine, as far as the front asks about it."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_one_machine_cannot_take_all_connections() -> None:
    server = Server(routes(), Limits(connections_per_address_max=3))

    def come(address: str) -> tuple[Connection, FromElsewhere]:
        connection, transport = Connection(server), FromElsewhere(address)
        connection.connection_made(transport)
        return connection, transport

    first = [come("203.0.113.7") for _ in range(4)]
    assert [False, False, False, True] == [b"503" in transport.written for _, transport in first]
    assert b"" == come("203.0.113.8")[1].written, "another machine has its own share"
    assert not any(come("127.0.0.1")[1].written for _ in range(10)), "this machine is not counted"
    for connection, _ in first[2:]:
        connection.connection_lost(None)
    assert b"" == come("203.0.113.7")[1].written


async def test_bodies_that_are_being_read_have_a_bound_all_together() -> None:
    server = Server(routes(), Limits(body_bytes_max=1 << 20, held_body_bytes_max=600_000))
    head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000\r\n\r\n"
    async with listening(server), wire(server.port) as slow:
        await slow.send(head + b"x" * 400_000)
        await until(lambda: 400_000 == server.held_body_bytes)
        async with wire(server.port) as other:
            await other.send(head + b"x" * 300_000)
            assert 503 == (await other.answer()).status
        await until(lambda: 400_000 == server.held_body_bytes)
        await slow.send(b"x" * 100_000)
        assert 200 == (await slow.answer()).status
        assert 0 == server.held_body_bytes
        async with wire(server.port) as gone:
            await gone.send(head + b"x" * 100_000)
            await until(lambda: 100_000 == server.held_body_bytes)
        await until(lambda: 0 == server.held_body_bytes)
