"""`oncewire doctor` against real servers: what it finds, what it proves, and its exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.jetstream.nkeys import ensure_key
from oncewire._ground.topology.permissions import document, monitor
from tests.support.nats import NatsServer, nats_server
from tests.support.up import Up, made, oncewire


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(made(tmp_path_factory.mktemp("up") / "data")) as running:
        yield running.ready()


def examined(cwd: Path, *args: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = oncewire("doctor", "--json", *args, cwd=cwd, **environ)
    assert not result.stderr
    answer = json.loads(result.stdout)
    assert (result.returncode == 1) == (answer["verdict"] == "broken")
    return result.returncode, {check["name"]: check for check in answer["checks"]}


def test_with_up_running_it_looks_at_those_servers(up: Up, tmp_path: Path) -> None:
    code, checks = examined(tmp_path, "--data", str(up.folder.path))
    assert code == 0
    assert {name for name, check in checks.items() if check["verdict"] == "broken"} == set()
    assert up.url("nats") in checks["NATS"]["text"]
    assert up.url("postgres") in checks["PostgreSQL"]["text"]
    assert (checks["durability"]["verdict"], checks["commits"]["verdict"]) == ("ok", "ok")
    assert f"(process {up.process.pid})" in checks["data folder"]["text"]
    assert checks["payload"]["text"].startswith("8.0 MiB")


def test_for_people_each_line_is_a_verdict_and_the_end_sums_up(up: Up, tmp_path: Path) -> None:
    result = oncewire("doctor", "--data", str(up.folder.path), cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok")
    assert {line.split()[0] for line in lines if line and not line.startswith(" ")} <= {
        "ok",
        "warning",
        "all",
        "1",
        "2",
    }
    assert result.returncode == 0


def test_with_nothing_running_nats_is_broken_and_the_remedy_is_up(tmp_path: Path) -> None:
    code, checks = examined(tmp_path, "--nats-url", "nats://127.0.0.1:1")
    assert code == 1
    assert checks["NATS"]["verdict"] == "broken"
    assert checks["NATS"]["remedy"]
    assert checks["PostgreSQL"]["verdict"] == "warning"
    assert not (tmp_path / ".oncewire").exists(), "the doctor only looks"


def test_a_server_with_the_default_sync_is_a_warning(server: NatsServer, tmp_path: Path) -> None:
    code, checks = examined(tmp_path, NATS_URL=server.url, NATS_MONITOR_URL=server.monitor_url)
    assert code == 0
    assert checks["durability"]["verdict"] == "warning"
    assert "120 s" in checks["durability"]["text"]
    assert "sync_interval: always" in checks["durability"]["remedy"]


def test_without_a_monitoring_address_durability_is_unknown(tmp_path: Path) -> None:
    with nats_server(sync_always=True) as always, nats_server(sync_always=True) as other:
        given = {"NATS_URL": always.url}
        assert examined(tmp_path, **given)[1]["durability"]["verdict"] == "warning"
        assert examined(tmp_path, **given, NATS_MONITOR_URL=always.monitor_url)[1]["durability"]["verdict"] == "ok"
        stranger = examined(tmp_path, **given, NATS_MONITOR_URL=other.monitor_url)[1]["durability"]
        assert stranger["verdict"] == "warning"
        assert "another server" in stranger["text"]
        gone = examined(tmp_path, **given, NATS_MONITOR_URL="http://127.0.0.1:1")[1]["durability"]
        assert gone["verdict"] == "warning"
        assert "cannot be reached" in gone["text"]


def test_the_system_account_says_it_where_there_is_a_key_for_it(tmp_path: Path) -> None:
    key = tmp_path / "monitor.nk"
    users = document([monitor()], lambda _: ensure_key(key))
    with nats_server(f"system_account: SYS\naccounts {{ SYS {{ {users} }} }}", sync_always=True) as server:
        given = {"NATS_URL": server.url, "NATS_SYSTEM_KEY": str(key)}
        assert examined(tmp_path, **given)[1]["durability"]["verdict"] == "ok"
        wrong = examined(tmp_path, **given, NATS_MONITOR_URL="http://127.0.0.1:1")[1]["durability"]
        assert wrong["verdict"] == "ok", "the monitoring port is not asked beside it"
        key.unlink()
        ensure_key(key)
        refused = examined(tmp_path, **given)[1]["durability"]
        assert refused["verdict"] == "warning"
        assert "the system account" in refused["text"]


def test_a_login_that_is_refused_is_broken_and_says_so(tmp_path: Path) -> None:
    with nats_server('authorization { user: me, password: "right" }') as guarded:
        code, checks = examined(tmp_path, NATS_URL=guarded.url, NATS_USER="me", NATS_PASSWORD="wrong")
        assert code == 1
        assert checks["NATS"]["verdict"] == "broken"
        assert "wrong" not in checks["NATS"]["text"]
        code, checks = examined(tmp_path, NATS_URL=guarded.url, NATS_USER="me", NATS_PASSWORD="right")
        assert code == 0


def test_an_account_without_jetstream_is_broken(tmp_path: Path) -> None:
    accounts = """
        accounts { A { users: [{user: a, password: a}] }, B { jetstream: enabled, users: [{user: b, password: b}] } }
    """
    with nats_server(accounts) as server:
        code, checks = examined(tmp_path, NATS_URL=server.url, NATS_USER="a", NATS_PASSWORD="a")
        assert (code, checks["JetStream"]["verdict"]) == (1, "broken")
        code, checks = examined(tmp_path, NATS_URL=server.url, NATS_USER="b", NATS_PASSWORD="b")
        assert (code, checks["JetStream"]["verdict"]) == (0, "ok")


def test_a_postgres_that_is_not_there_is_broken_without_its_password(server: NatsServer, tmp_path: Path) -> None:
    url = "postgresql://me:hush@127.0.0.1:1/x"
    result = oncewire("doctor", cwd=tmp_path, NATS_URL=server.url, ONCEWIRE_POSTGRES_URL=url)
    assert result.returncode == 1
    assert "hush" not in result.stdout
    assert "ONCEWIRE_POSTGRES_URL" in result.stdout


def test_a_folder_that_cannot_be_used_is_broken(server: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, checks = examined(tmp_path, "--data", "file", NATS_URL=server.url)
    assert (code, checks["data folder"]["verdict"]) == (1, "broken")
    assert "is not a folder" in checks["data folder"]["text"]


def test_no_java_is_a_warning(server: NatsServer, tmp_path: Path) -> None:
    """Found or not, Java never breaks what does not need it."""
    checks = examined(tmp_path, NATS_URL=server.url, JAVA_HOME="/nowhere", PATH=os.defpath)[1]
    assert checks["Java"]["verdict"] in ("ok", "warning")
