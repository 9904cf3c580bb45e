"""What servers say about themselves, asked over the system account: one server, a cluster, and who may not ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oncewire._ground import monitor
from oncewire._ground.errors import AuthenticationFailed, NotConnected, OncewireError, PermissionDenied, Unavailable
from oncewire._ground.jetstream import connect, system
from oncewire._ground.jetstream.nkeys import ensure_key
from oncewire._ground.jetstream.options import Options
from oncewire._ground.monitor import Promise, durability
from oncewire._ground.topology.permissions import document
from oncewire._ground.topology.permissions import monitor as monitor_user
from tests.support.nats import nats_cluster, nats_server
from tests.support.ports import free_port


def accounts(key: Path, other: Path) -> str:
    """The system account with its user, and an account of another."""
    system_users = document([monitor_user()], lambda _: ensure_key(key))
    return f"""
        system_account: SYS
        accounts {{
            SYS {{ {system_users} }}
            SHOP {{ jetstream: enabled, users: [{{ nkey: {ensure_key(other)} }}] }}
        }}
    """


@pytest.mark.parametrize("is_always", [True, False])
async def test_a_server_says_what_it_syncs(tmp_path: Path, is_always: bool) -> None:
    key, other = tmp_path / "monitor.nk", tmp_path / "shop.nk"
    with nats_server(accounts(key, other), sync_always=is_always) as server:
        options = Options((server.url,), nkey=str(other))
        (answer,) = await system.jsz(options, str(key))
        shown = await monitor.ask_json(server.monitor_url, "/jsz")
        assert (shown["server_id"], shown["config"]) == (answer["server_id"], answer["config"])
        async with connect(server.url, nkey=str(other)) as client:
            found = durability([answer], client.server.server_id)
        assert (Promise.POWER if is_always else Promise.CRASH) is found.promise
        assert (await monitor.ask_json(server.monitor_url, "/varz"))["version"] == await system.healthy_version(
            options, str(key)
        )


async def test_all_servers_of_a_cluster_answer(tmp_path: Path) -> None:
    """And when one is gone, what the others say is not taken for all of it."""
    key, other = tmp_path / "monitor.nk", tmp_path / "shop.nk"
    with nats_cluster(config=accounts(key, other)) as cluster:
        options = Options(tuple(cluster.urls), nkey=str(other))
        answers = await system.jsz(options, str(key))
        assert 3 == len({answer["server_id"] for answer in answers})
        assert Promise.CRASH is durability(answers).promise
        cluster.servers[2].kill()
        left = await system.jsz(options, str(key))
        assert 2 == len(left)
        assert Promise.UNKNOWN is durability(left).promise


async def test_who_may_not_ask_is_told(tmp_path: Path) -> None:
    key, other, stranger = (tmp_path / f"{name}.nk" for name in ("monitor", "shop", "stranger"))
    ensure_key(stranger)
    with nats_server(accounts(key, other)) as server:
        options = Options((server.url,))
        with pytest.raises(AuthenticationFailed):
            await system.jsz(options, str(stranger))
        with pytest.raises(AuthenticationFailed):
            await system.jsz(options, str(tmp_path / "none.nk"))
        with pytest.raises(OncewireError):  # a user of another account
            await system.jsz(options, str(other))
    with pytest.raises(NotConnected):
        await system.jsz(Options((f"nats://127.0.0.1:{free_port()}",)), str(key))
    assert "" == await system.healthy_version(Options((f"nats://127.0.0.1:{free_port()}",)), str(key))


async def test_the_user_may_ask_about_the_server_and_nothing_else(tmp_path: Path) -> None:
    key, other = tmp_path / "monitor.nk", tmp_path / "shop.nk"
    with nats_server(accounts(key, other)) as server:
        async with connect(server.url, nkey=str(key), inbox_prefix="_INBOX_monitor") as client:
            for subject in ("$SYS.REQ.SERVER.PING.CONNZ", "$SYS.REQ.SERVER.X.RELOAD", "$SYS.ACCOUNT.X", "evt.a"):
                with pytest.raises(PermissionDenied):
                    await client.call(subject, b"{}")


async def test_credentials_in_an_address_are_not_those_of_the_question(tmp_path: Path) -> None:
    key, other = tmp_path / "monitor.nk", tmp_path / "shop.nk"
    with nats_server(accounts(key, other)) as server:
        options = Options((server.url.replace("//", "//me:secret@"),))
        assert 1 == len(await system.jsz(options, str(key)))


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"[]", b'{"data": 1, "server": {"ver": "2"}}', b'{"data": {}}', b"\xff"]
)
def test_an_answer_of_another_shape_is_refused(payload: bytes) -> None:
    with pytest.raises(OncewireError, match="PING"):
        system._read(payload)


def test_an_answer_is_read() -> None:
    assert {} == system._read(json.dumps({"server": {"ver": "2.15.1"}, "data": {}}).encode())["data"]
    assert issubclass(NotConnected, Unavailable)
