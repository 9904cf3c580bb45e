"""Who gets into the embedded nats-server: any program as `developer`, or only one with a key: when that is asked for,
and wherever credentials are configured."""

from __future__ import annotations

import asyncio
import json
import stat
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oncewire import BrokerClient
from oncewire._ground import users
from oncewire._ground.contracts.broker import BrokerEnvelope
from oncewire._ground.errors import AuthenticationFailed, OncewireError, PermissionDenied
from oncewire._ground.jetstream import Outgoing, connect
from oncewire._ground.jetstream.nkeys import ensure_key
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.trust.keys import KeyFile
from tests.support.ports import free_port
from tests.support.up import Up, made, oncewire

EVENT = '{"type": "OrderPlaced", "payload": {"order": 1}}'


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """An `up` whose NATS takes nobody without a key."""
    folder = tmp_path_factory.mktemp("closed")
    monitored = {"ONCEWIRE_MONITOR_PORT": str(free_port())}
    with Up(made(folder / "data"), ONCEWIRE_NATS_ACCESS="keys", **monitored) as up:
        yield up.ready()


def key(up: Up, user: str) -> str:
    return str(users.key_path(up.folder.keys, user))


async def test_nobody_gets_in_without_a_key(closed: Up) -> None:
    with pytest.raises(AuthenticationFailed):
        await connect(closed.url("nats")).open()
    async with connect(closed.url("nats"), nkey=key(closed, users.DEVELOPER)) as client:
        assert (await client.publish("evt.default.demo.a", b"{}", raw=True)).sequence


async def test_the_broker_serves_as_its_own_user(closed: Up) -> None:
    """With its own key, not the operator's: it works, and nothing that it tries is denied."""
    url = next(one["url"] for one in closed.events if one.get("part") == "broker" and "url" in one)
    async with BrokerClient(url) as client:
        await client.create_topic("orders", partitions=2)
        await client.produce("orders", "v", envelope=BrokerEnvelope(idempotency_key="k"))
        (delivery,) = await client.take("orders", "g", most=1, wait_s=30)
        await client.nack(client.lease("orders", "g", delivery), "not yet")
    with urllib.request.urlopen(f"{closed.running.servers['nats'].monitor_url}/connz?auth=1") as answer:
        connections = json.load(answer)["connections"]
    is_who = {one["name"]: one["authorized_user"] for one in connections if "name" in one}
    assert ensure_key(Path(key(closed, "broker"))) == is_who["oncewire broker"]
    assert "Violation" not in (closed.folder.nats / "server.log").read_text()


def test_commands_find_their_key_in_the_data_folder(closed: Up) -> None:
    """What README shows works without typing a credential."""
    here = closed.folder.path.parent
    for command in (
        ("publish", "evt.default.demo.orders.placed", EVENT),
        ("topology", "check"),
        ("dlq", "inject", "evt.default.demo.orders.placed", EVENT, "--testing"),
        ("dlq", "replay", "--cause", "injected"),
        ("doctor",),
    ):
        done = oncewire(*command, "--data", str(closed.folder.path), cwd=here)
        assert 0 == done.returncode, (command, done.stdout, done.stderr)


def test_a_program_is_told_where_its_key_lies(closed: Up) -> None:
    told = next(one for one in closed.events if one.get("part") == "access")
    assert key(closed, users.DEVELOPER) in told["text"]
    refused = oncewire(
        "publish", "evt.default.demo.a", EVENT, cwd=closed.folder.path.parent, NATS_URL=closed.url("nats")
    )
    assert "refuses the credentials" in refused.stderr
    assert "NATS_NKEY" in refused.stderr


def test_seeds_are_their_owners_alone_and_show_up_nowhere(closed: Up) -> None:
    """Not in what others can read, not in the logs, not on a command line."""
    keys = sorted(closed.folder.keys.iterdir())
    assert {users.OPERATOR, users.DEVELOPER, "relay", "dlq"} <= {one.stem for one in keys}
    for path in (*keys, closed.folder.nats / "server.conf", closed.folder.path / "up.json"):
        assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    said = "".join(str(event) for event in closed.events)
    said += (closed.folder.nats / "server.log").read_text() + (closed.folder.path / "up.json").read_text()
    said += (closed.folder.nats / "server.conf").read_text()
    for pid in (closed.process.pid, closed.pid("nats")):
        said += Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
    assert not [one for one in keys if one.read_text().strip() in said]


def test_an_open_server_lets_programs_in_and_keeps_its_own_parts_apart(tmp_path: Path) -> None:
    """Also on a data folder of which another `up` was killed: keys stay."""
    first = Up(made(tmp_path / "data")).ready()
    before = {one.name: one.read_text() for one in first.folder.keys.iterdir()}
    first.process.kill()
    first.end()
    with Up(tmp_path / "data").ready() as up:
        assert before == {one.name: one.read_text() for one in up.folder.keys.iterdir()}
        asyncio.run(_look_around(up))


async def test_no_monitoring_port_is_open_and_what_the_server_syncs_is_known(tmp_path: Path) -> None:
    """The facts come over the system account, which a program without the owner's key cannot ask."""
    with Up(made(tmp_path / "data")).ready() as up:
        listening = [
            one.laddr.port for one in psutil.Process(up.pid("nats")).net_connections() if one.status == "LISTEN"
        ]
        assert [int(up.url("nats").rpartition(":")[2])] == listening
        promised = next(one for one in up.events if one.get("part") == "durability" and "text" in one)
        assert "survives a power cut" in promised["text"]
        told = oncewire("doctor", "--json", "--data", str(up.folder.path), cwd=tmp_path)
        checks = {one["name"]: one for one in json.loads(told.stdout)["checks"]}
        assert "ok" == checks["durability"]["verdict"]
        assert "ok" == checks["storage"]["verdict"]
        async with connect(up.url("nats")) as client:
            with pytest.raises(OncewireError):
                await client.call("$SYS.REQ.SERVER.PING.JSZ", b"{}", timeout_s=2)


def test_an_open_server_says_so(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")).ready() as up:
        told = next(one for one in up.events if one.get("part") == "access")
        assert "without a key" in told["text"]


async def test_credentials_close_nats_too_and_the_start_says_so(tmp_path: Path) -> None:
    """What a tenant's key protects over HTTP does not lie open beside it."""
    keys = KeyFile(tmp_path / "keys.json")
    secret = keys.create("test", "acme", ("*",), int(time.time()))[1]
    with Up(made(tmp_path / "data"), ONCEWIRE_AUTH_KEYS=str(keys.path)).ready() as up:
        told = next(one for one in up.events if one.get("part") == "access")
        assert "credentials are configured" in told["text"]
        assert key(up, users.DEVELOPER) in told["text"]
        url = next(one["url"] for one in up.events if one.get("part") == "broker" and "url" in one)
        async with BrokerClient(url, token=secret) as client:
            await client.create_topic("orders")
            await client.produce("orders", "acme's")
        with pytest.raises(AuthenticationFailed):
            await connect(up.url("nats")).open()


def test_open_nats_beside_credentials_is_refused(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data"), ONCEWIRE_AUTH_KEYS="keys.json", ONCEWIRE_NATS_ACCESS="open") as up:
        code, said = up.end()
    assert 2 == code
    assert "embedded.nats_access is open" in said


async def test_a_program_without_a_key_makes_no_stream_that_writes_or_hears_for_it(tmp_path: Path) -> None:
    """Not one that republishes to dead letters, nor one that stores inboxes; and it changes none that is there."""
    with Up(made(tmp_path / "data")).ready() as up:
        async with connect(up.url("nats")) as client:
            for configuration in (
                {"subjects": ["via.>"], "republish": {"src": "via.>", "dest": "dlq.forged.>"}},
                {"subjects": ["_INBOX_dlq.>"]},
                {"sources": [{"name": "PAYMENTS"}]},
                {"subjects": ["own.>"]},
            ):
                body = {"name": "SPY", **configuration}
                for verb in ("CREATE", "UPDATE"):
                    with pytest.raises(PermissionDenied):
                        await client.api(f"STREAM.{verb}.SPY", body)
            with pytest.raises(PermissionDenied):
                await client.api("STREAM.RESTORE.SPY", {"config": {"name": "SPY"}})
            await client.publish("evt.default.demo.a", b"{}", raw=True)
        async with connect(up.url("nats"), nkey=key(up, users.OPERATOR), inbox_prefix="_INBOX_operator") as operator:
            names = (await operator.api("STREAM.NAMES", {}))["streams"]
            assert "SPY" not in names
            assert (await operator.api("STREAM.CREATE.SPY", {"name": "SPY", "subjects": ["own.>"]}))["config"]


async def _look_around(up: Up) -> None:
    heard: list[str] = []

    def note(message: Message) -> None:
        heard.append(message.subject)

    async with connect(up.url("nats")) as client:
        client.subscribe(">", note)
        assert (await client.publish("evt.default.demo.a", b"{}", raw=True)).sequence
        with pytest.raises(PermissionDenied, match=r"dlq\.x"):
            await client.publisher.publish(Outgoing("dlq.x", b"{}"))
        async with connect(up.url("nats"), nkey=key(up, "dlq"), inbox_prefix=users.inbox_prefix("dlq")) as dlq:
            await dlq.publisher.publish(Outgoing("dlq.x", b"{}"))
        await client.connection.flush()
    assert {"evt.default.demo.a", "dlq.x"} <= set(heard)
    assert not [one for one in heard if one.startswith("_INBOX_")]
