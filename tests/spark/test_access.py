"""How a task reaches NATS, against real servers: passwords, tokens, nkeys, creds, TLS, several addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nkeys
import pytest

from oncewire._ground.errors import AuthenticationFailed, NotConnected, PermissionDenied
from oncewire.pipeline.options import Access, read_options
from oncewire.pipeline.wire import Wire, connect
from tests.support.jwt import Operator, make_seed
from tests.support.nats import NatsServer, nats_server
from tests.support.tls import Authority


def access(server: NatsServer, **options: str) -> Access:
    given = {"url": server.url, "stream": "S", **options}
    return read_options(given, lambda path: Path(path).read_text(), is_streaming=False).access


def works(how: Access) -> bool:
    wire = connect(how, 5.0)
    try:
        return "streams" in wire.api("INFO")
    finally:
        wire.close()


def refused(how: Access) -> str:
    with pytest.raises(AuthenticationFailed) as caught:
        connect(how, 5.0)
    return str(caught.value)


def test_user_and_password_inline_or_in_the_address() -> None:
    with nats_server('authorization { user: "me", password: "s3cr:t@" }') as server:
        assert works(access(server, user="me", password="s3cr:t@"))
        assert works(access(server, url=f"nats://me:s3cr%3At%40@127.0.0.1:{server.port}"))
        assert "s3cr" not in refused(access(server, user="me", password="s3cr-wrong"))
        refused(access(server))


def test_token() -> None:
    with nats_server('authorization { token: "t0ken" }') as server:
        assert works(access(server, token="t0ken"))
        assert works(access(server, url=f"nats://t0ken@127.0.0.1:{server.port}"))
        refused(access(server, token="other"))


def test_nkey_inline_or_as_a_file(tmp_path: Path) -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(seed.encode()).public_key.decode()
    (tmp_path / "user.nk").write_text(f"{seed}\n")
    with nats_server(f"authorization {{ users: [ {{ nkey: {public} }} ] }}") as server:
        assert works(access(server, nkey=seed))
        assert works(access(server, nkeyFile=str(tmp_path / "user.nk")))
        refused(access(server, nkey=make_seed(nkeys.PREFIX_BYTE_USER)))


def test_answers_come_below_the_inbox_prefix_of_the_user() -> None:
    user = 'user: "me", password: "p", permissions: { subscribe: { allow: ["_INBOX_me.>"] } }'
    with nats_server(f"authorization {{ users: [ {{ {user} }} ] }}") as server:
        assert works(access(server, user="me", password="p", inboxPrefix="_INBOX_me"))
        with pytest.raises(PermissionDenied, match="_INBOX"):
            connect(access(server, user="me", password="p"), 5.0)


def test_credentials_inline_or_as_a_file(tmp_path: Path) -> None:
    operator = Operator()
    text = operator.user()
    (tmp_path / "user.creds").write_text(text)
    with nats_server(operator.config) as server:
        assert works(access(server, credentials=text))
        assert works(access(server, credentialsFile=str(tmp_path / "user.creds")))
        refused(access(server, credentials=Operator().user()))


@pytest.mark.parametrize("is_first", [False, True])
def test_tls_with_a_client_certificate(tmp_path: Path, is_first: bool) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    own_cert, own_key = authority.issue("client")
    config = f"""tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.path}", verify: true,
        handshake_first: {str(is_first).lower()} }}"""
    options: dict[str, Any] = {"tlsCa": str(authority.path), "tlsFirst": str(is_first).lower()}
    with nats_server(config) as server:
        assert works(access(server, tlsCert=str(own_cert), tlsKey=str(own_key), **options))
        with pytest.raises(NotConnected):
            connect(access(server, **options), 0.0)
        refused(access(server, tlsFirst=str(is_first).lower(), tls="true"))


def test_the_first_server_that_answers_is_taken(shared_server: NatsServer) -> None:
    assert works(access(shared_server, url=f"nats://127.0.0.1:1,{shared_server.url}"))
    with pytest.raises(NotConnected, match=r"127\.0\.0\.1:1 cannot be reached"):
        connect(access(shared_server, url="nats://127.0.0.1:1"), 0.0)


def test_a_server_error_is_raised_where_the_task_waits(shared_server: NatsServer) -> None:
    wire = Wire(access(shared_server), shared_server.url)
    wire.send(b"NONSENSE\r\n")
    with pytest.raises(NotConnected, match="Unknown Protocol"):
        wire.api("INFO")
    wire.close()
