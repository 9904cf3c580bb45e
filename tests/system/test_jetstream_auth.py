"""Who we are, against real servers: passwords, tokens, nkeys, JWTs that expire, TLS."""

from __future__ import annotations

import asyncio
import ssl
import stat
from pathlib import Path

import nkeys
import pytest
import uvloop

from oncewire._ground.errors import AuthenticationFailed, InvalidSetting, NotConnected, PermissionDenied
from oncewire._ground.jetstream import Client, Options, State, connect
from oncewire._ground.jetstream.nkeys import ensure_key
from oncewire._ground.jetstream.options import TlsFiles, tls_files
from tests.support.jwt import Operator, make_seed
from tests.support.nats import NatsServer, nats_server
from tests.support.streams import make_consumer, make_stream
from tests.support.tls import Authority
from tests.support.wait import until, until_async, within


async def works(client: Client) -> bool:
    async with client:
        return "streams" in await client.api("INFO")


# ---- passwords and tokens


async def test_user_and_password() -> None:
    with nats_server('authorization { user: "me", password: "s3cr:t@" }') as server:
        assert await works(connect(server.url, user="me", password="s3cr:t@"))
        assert await works(connect(f"nats://me:s3cr%3At%40@127.0.0.1:{server.port}"))
        for user, password in (("me", "wrong"), ("", ""), ("other", "s3cr:t@")):
            with pytest.raises(AuthenticationFailed) as caught:
                await within(connect(server.url, user=user, password=password).open())
            assert "refuses the credentials" in caught.value.message
            assert "s3cr" not in str(caught.value)
            assert caught.value.hint


async def test_token() -> None:
    with nats_server('authorization { token: "t0ken" }') as server:
        assert await works(connect(server.url, token="t0ken"))
        assert await works(connect(f"nats://t0ken@127.0.0.1:{server.port}"))
        with pytest.raises(AuthenticationFailed):
            await within(connect(server.url, token="wrong").open())


async def test_refused_credentials_say_more_than_a_server_that_is_down() -> None:
    with nats_server('authorization { token: "t" }') as server, pytest.raises(AuthenticationFailed):
        await within(connect([server.url, "nats://127.0.0.1:1"], token="wrong").open())


# ---- nkeys and JWTs


async def test_nkey(tmp_path: Path) -> None:
    seed = make_seed(nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(seed.encode()).public_key.decode()
    path, other = tmp_path / "u.nk", tmp_path / "other.nk"
    path.write_text(seed)
    other.write_text(make_seed(nkeys.PREFIX_BYTE_USER))
    with nats_server(f"authorization {{ users: [ {{ nkey: {public} }} ] }}") as server:
        assert await works(connect(server.url, nkey=str(path)))
        with pytest.raises(AuthenticationFailed):
            await within(connect(server.url, nkey=str(other)).open())
        with pytest.raises(AuthenticationFailed, match="cannot be read"):
            await within(connect(server.url, nkey=str(tmp_path / "missing")).open())


async def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "u.nk"
    public = ensure_key(path)
    assert public == nkeys.from_seed(path.read_text().strip().encode()).public_key.decode()
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert public == ensure_key(path) != ensure_key(tmp_path / "other.nk")
    assert {"u.nk", "other.nk"} == {one.name for one in tmp_path.iterdir()}
    with nats_server(f"authorization {{ users: [ {{ nkey: {public} }} ] }}") as server:
        assert await works(connect(server.url, nkey=str(path)))


async def test_answers_come_below_the_inbox_prefix_of_the_user() -> None:
    user = 'user: "me", password: "p", permissions: { subscribe: { allow: ["_INBOX_me.>"] } }'
    with nats_server(f"authorization {{ users: [ {{ {user} }} ] }}") as server:
        assert await works(connect(server.url, user="me", password="p", inbox_prefix="_INBOX_me"))
        with pytest.raises(PermissionDenied, match="_INBOX") as caught:
            await within(works(connect(server.url, user="me", password="p")))
        assert "nats.inbox_prefix" in caught.value.hint


async def test_who_may_pull_and_not_settle_is_told_so() -> None:
    user = 'user: "me", password: "p", permissions: { publish: { deny: ["$JS.ACK.>"] } }'
    with nats_server(f"authorization {{ users: [ {{ {user} }} ] }}") as server:
        async with connect(server.url, user="me", password="p") as client:
            stream = await make_stream(client)
            await make_consumer(client, stream)
            await client.publish(f"{stream}.a", b"")
            async with client.pull(stream, "c") as pull:
                pull.ack(await within(pull.fetch()))
                with pytest.raises(PermissionDenied, match=r"\$JS\.ACK"):
                    await within(pull.fetch())


async def test_creds_of_an_operators_account(tmp_path: Path) -> None:
    operator, stranger = Operator(), Operator()
    path, foreign = tmp_path / "u.creds", tmp_path / "f.creds"
    path.write_text(operator.user(deny_publish=["closed.>"]))
    foreign.write_text(stranger.user())
    with nats_server(operator.config) as server:
        async with connect(server.url, creds=str(path)) as client:
            await make_stream(client, subjects=["closed.>", "open.>"])
            assert (await client.publish("open.a", b"")).sequence == 1
            with pytest.raises(PermissionDenied):
                await client.publish("closed.a", b"")
        with pytest.raises(AuthenticationFailed):
            await within(connect(server.url, creds=str(foreign)).open())


async def may_publish(client: Client) -> bool:
    try:
        await client.publish("new.a", b"", msg_id="1")
    except PermissionDenied:
        return False
    return True


async def test_an_expired_user_comes_back_with_renewed_credentials(tmp_path: Path) -> None:
    """The server ends the connection when the JWT expires; the file is read again at the next attempt."""
    operator = Operator()
    path = tmp_path / "u.creds"
    changes: list[tuple[State, str]] = []
    with nats_server(operator.config) as server:
        path.write_text(operator.user(expires_in_s=2, deny_publish=["new.>"]))
        options = Options((server.url,), creds=str(path), on_change=lambda *change: changes.append(change))
        async with Client(options) as client:
            await make_stream(client, subjects=["new.>"])
            assert not await may_publish(client)
            path.write_text(operator.user())
            await until_async(lambda: may_publish(client), "the renewed user's permission")
    assert any(state is State.RECONNECTING and "xpired" in reason for state, reason in changes)


async def test_an_expired_user_without_renewal_is_told_so_in_the_end(tmp_path: Path) -> None:
    operator = Operator()
    path = tmp_path / "u.creds"
    with nats_server(operator.config) as server:
        path.write_text(operator.user(expires_in_s=2))
        async with connect(server.url, creds=str(path)) as client:
            stream = await make_stream(client)
            await make_consumer(client, stream)
            async with client.pull(stream, "c") as pull:
                fetching = asyncio.create_task(pull.fetch())
                await until(lambda: client.state is State.CLOSED)
                for use in (fetching, client.publish(f"{stream}.x", b""), client.api("INFO")):
                    with pytest.raises(AuthenticationFailed, match="refuses the credentials"):
                        await within(use)


async def test_a_password_that_is_changed_meanwhile_ends_the_reconnect_with_its_reason(server: NatsServer) -> None:
    async with connect(server.url) as client:
        server.kill()
        server.config = 'authorization { token: "new" }'
        server.start()
        await until(lambda: client.state is State.CLOSED)
        with pytest.raises(AuthenticationFailed):
            await client.api("INFO")


# ---- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def tls_config(authority: Authority, *, more: str = "") -> str:
    cert, key = authority.issue("server")
    return f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.path}", {more} }}'


async def test_tls(authority: Authority) -> None:
    with nats_server(tls_config(authority)) as server:
        tls = TlsFiles(str(authority.path)).read()
        for url in (server.url, server.url.replace("nats://", "tls://")):
            async with connect(url, tls=tls) as client:
                stream = await make_stream(client)
                assert (await client.publish(f"{stream}.x", b"x" * 500_000)).sequence == 1
                stored = await client.get(stream, 1)
                assert len(stored.payload) == 500_000
                transport = client.connection._wire.transport  # type: ignore[union-attr]
                assert transport is not None
                assert isinstance(transport.get_extra_info("ssl_object"), ssl.SSLObject)


@pytest.mark.parametrize("tls_first", [False, True])
def test_tls_on_uvloop(authority: Authority, tls_first: bool) -> None:
    async def body(url: str) -> int:
        async with Client(Options((url,), tls=TlsFiles(str(authority.path)).read(), tls_first=tls_first)) as client:
            stream = await make_stream(client)
            return (await client.publish(f"{stream}.x", b"x" * 500_000)).sequence

    more = "handshake_first: true" if tls_first else ""
    with (
        nats_server(tls_config(authority, more=more)) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        assert runner.run(body(server.url)) == 1


async def test_a_reconnect_is_encrypted_too(authority: Authority) -> None:
    with nats_server(tls_config(authority)) as server:
        async with connect(server.url, tls=TlsFiles(str(authority.path)).read()) as client:
            server.kill()
            server.start()
            await until(lambda: client.connection.reconnects == 1)
            transport = client.connection._wire.transport  # type: ignore[union-attr]
            assert transport is not None
            assert transport.get_extra_info("ssl_object") is not None


async def test_tls_before_the_first_line(authority: Authority) -> None:
    with nats_server(tls_config(authority, more="handshake_first: true")) as server:
        options = Options((server.url,), tls=TlsFiles(str(authority.path)).read(), tls_first=True)
        assert await works(Client(options))


async def test_a_server_of_an_unknown_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    with nats_server(tls_config(authority)) as server:
        for tls in (None, TlsFiles(str(stranger.path)).read()):
            with pytest.raises(NotConnected, match=r"TLS failed: .*(certificate|CERTIFICATE)") as caught:
                await within(connect(server.url, tls=tls).open())
            assert "nats.ca" in caught.value.hint


async def test_a_certificate_for_another_address_is_refused(authority: Authority) -> None:
    cert, key = authority.issue("elsewhere", "10.1.2.3")
    with (
        nats_server(f'tls {{ cert_file: "{cert}", key_file: "{key}" }}') as server,
        pytest.raises(NotConnected, match="TLS failed"),
    ):
        await within(connect(server.url, tls=TlsFiles(str(authority.path)).read()).open())


async def test_a_client_certificate(authority: Authority) -> None:
    cert, key = authority.issue("client")
    with nats_server(tls_config(authority, more="verify: true")) as server:
        assert await works(connect(server.url, tls=TlsFiles(str(authority.path), str(cert), str(key)).read()))
        with pytest.raises(NotConnected):
            await within(connect(server.url, tls=TlsFiles(str(authority.path)).read()).open())


async def test_a_server_without_tls_is_refused_when_tls_is_asked_for(server: NatsServer) -> None:
    """Never in the clear when the address says tls://."""
    with pytest.raises(NotConnected, match="offers no TLS") as caught:
        await within(connect(server.url.replace("nats://", "tls://"), user="u", password="p").open())
    assert caught.value.hint


@pytest.mark.parametrize("files", [("missing", "", ""), ("", "missing", ""), ("", "missing", "missing")])
def test_tls_files_that_cannot_be_used_are_named(files: tuple[str, str, str]) -> None:
    with pytest.raises(InvalidSetting, match="TLS files"):
        tls_files(*files)
