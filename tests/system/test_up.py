"""`oncewire up` with real servers: from start to an orderly stop, and everything that can stand in its way."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import nats
import pytest

from oncewire._ground import users
from oncewire.embedded.folder import DataFolder, Running
from oncewire.embedded.postgres import programs
from oncewire.embedded.process import LAUNCH, Mark
from tests.support.nats import NatsServer
from tests.support.up import ANY_PORTS, ONCEWIRE, WAIT_S, Up, clean_environ, made, oncewire, until

IS_ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach: pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="ow-up-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def write(up: Up, number: int) -> None:
    """One message and one row, both confirmed."""
    key = str(users.key_path(up.folder.keys, users.OPERATOR))
    client = await nats.connect(up.url("nats"), nkeys_seed=key, inbox_prefix=b"_INBOX_operator")
    stream = client.jetstream()
    await stream.add_stream(name="KEPT", subjects=["kept"])
    await stream.publish("kept", str(number).encode())
    await client.close()
    connection = await asyncpg.connect(up.url("postgres"))
    await connection.execute("CREATE TABLE IF NOT EXISTS kept (number int)")
    await connection.execute("INSERT INTO kept VALUES ($1)", number)
    await connection.close()


async def read(up: Up) -> tuple[list[int], list[int]]:
    client = await nats.connect(up.url("nats"))
    stream = client.jetstream()
    state = (await stream.stream_info("KEPT")).state
    messages = [await stream.get_msg("KEPT", number) for number in range(1, state.last_seq + 1)]
    await client.close()
    connection = await asyncpg.connect(up.url("postgres"))
    rows = await connection.fetch("SELECT number FROM kept ORDER BY number")
    await connection.close()
    return [int(message.data or b"") for message in messages], [row["number"] for row in rows]


def test_ctrl_c_stops_services_then_postgres_then_nats_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as up:
        marks = [server.mark for server in up.ready().running.servers.values()]
        assert up.stop(signal.SIGINT) == 0
        steps = [(event["event"], event.get("part")) for event in up.events if event["event"] in ("stopped", "end")]
        stopped = ["metrics", "console", "broker", "gateway", "dlq", "relay", "PostgreSQL", "nats-server"]
        assert steps == [*(("stopped", part) for part in stopped), ("end", None)]
        assert not any(mark and mark.is_alive for mark in marks)
        assert up.folder.read() is None
        assert up.folder.holder() is None


async def test_data_survives_a_stop_and_a_kill(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as first:
        await write(first.ready(), 1)
        assert first.stop(signal.SIGTERM) == 0
    with Up(tmp_path / "data") as second:
        assert await read(second.ready()) == ([1], [1])
        await write(second, 2)
        second.process.kill()
        second.process.wait()
    with Up(tmp_path / "data") as third:
        assert await read(third.ready()) == ([1, 2], [1, 2])


@on_linux
def test_the_servers_end_when_up_is_killed(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as up:
        marks = [server.mark for server in up.ready().running.servers.values() if server.mark is not None]
        assert [True, True] == [mark.is_alive for mark in marks]
        up.process.kill()
        until(lambda: not any(mark.is_alive for mark in marks), "the end of the servers")


def test_the_next_up_stops_servers_that_outlived_a_killed_one(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as first:
        marks = [server.mark for server in first.ready().running.servers.values()]
        pids = [mark.pid for mark in marks if mark]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that they cannot end by themselves
        first.process.kill()
        first.process.wait()
        assert all(mark and mark.is_alive for mark in marks)
    with Up(tmp_path / "data") as second:
        second.ready()
        assert not any(mark and mark.is_alive for mark in marks)
        assert not set(pids) & {second.pid("nats"), second.pid("postgres")}


def test_a_process_that_only_has_the_id_of_a_dead_server_is_left_alone(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as first, subprocess.Popen(["sleep", "60"]) as bystander:
        running = first.ready().running
        first.stop()
        mark = Mark(bystander.pid, "another start time")
        servers = {name: type(server)(server.url, mark=mark) for name, server in running.servers.items()}
        first.folder.write(type(running)(running.up, servers))
        (first.folder.postgres / "data" / "postmaster.pid").write_text(f"{bystander.pid}\n")
        with Up(tmp_path / "data") as second:
            second.ready()
            assert bystander.poll() is None
        bystander.kill()


def test_a_second_up_on_the_same_folder_says_which_process_has_it(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as first:
        first.ready()
        second = oncewire("up", "--data", str(tmp_path / "data"), cwd=tmp_path, **ANY_PORTS)
        assert second.returncode == 2
        assert f"already runs on {tmp_path / 'data'} (process {first.process.pid}: {first.url('nats')}" in second.stderr
        assert "--data" in second.stderr
        assert first.process.poll() is None


@pytest.mark.parametrize("variable", list(ANY_PORTS))
def test_a_taken_port_is_named_with_the_setting_that_changes_it(tmp_path: Path, variable: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = f"127.0.0.1:{port}" if variable.endswith("LISTEN") else str(port)
        result = oncewire("up", cwd=tmp_path, **(ANY_PORTS | {variable: value}))
    assert result.returncode == 3
    assert f"port {port} is taken" in result.stderr
    if sys.platform == "linux":
        assert f"(process {os.getpid()})" in result.stderr
    assert variable in result.stderr


@as_root
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        result = oncewire("up", "--data", str(mount / "data"), cwd=tmp_path, **ANY_PORTS)
        with pytest.raises(OSError, match="No space left"):
            (mount / "filler").write_bytes(bytes(32 << 20))
        full = oncewire("up", "--data", str(mount / "other"), cwd=tmp_path, **ANY_PORTS)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    assert result.returncode == full.returncode == 3
    assert "MiB free" in result.stderr
    assert "Free some room" in result.stderr
    assert "Free some room" in full.stderr


def as_nobody() -> list[str]:
    """A command prefix that runs the rest as an ordinary user, wherever the interpreter lives."""
    order = {"parent": os.getpid(), "death_signal": signal.SIGTERM, "uid": 65534, "gid": 65534}
    code = (
        "import json, os, sys; order = json.loads(sys.argv[2]); "
        "order.update(argv=sys.argv[3:], parent=os.getppid(), reach=[sys.executable]); "
        "os.execv(sys.executable, [sys.executable, '-I', '-S', sys.argv[1], json.dumps(order)])"
    )
    return [sys.executable, "-c", code, str(LAUNCH), json.dumps(order)]


@as_root
async def test_an_ordinary_user_can_run_it(open_folder: Path) -> None:
    home = open_folder / "home"
    home.mkdir(mode=0o700)
    os.chown(home, 65534, 65534)
    with Up(home / "data", prefix=as_nobody(), HOME=str(home)) as up:
        await write(up.ready(), 1)
        assert await read(up) == ([1], [1])
        owners = {(home / "data" / name).stat().st_uid for name in ("nats", "postgres/data", "up.json")}
        assert owners == {65534}
        assert up.stop() == 0


@as_root
@on_linux
def test_as_root_postgres_gets_no_capability_that_it_does_not_need(open_folder: Path, tmp_path: Path) -> None:
    """pytest's folder is closed to other users, the open one is not; only in the former does PostgreSQL keep a key."""
    if any(not folder.stat().st_mode & 0o001 for folder in (programs() / "postgres").parents):
        pytest.skip("this checkout lies in a closed folder: there it needs one")
    for folder, kept in ((open_folder, 0), (tmp_path, 1 << 2)):
        with Up(folder / "data") as up:
            up.ready()
            status = Path(f"/proc/{up.pid('postgres')}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            assert int(fields["CapEff"], 16) == kept
            assert fields["Uid"].split()[0] != "0"


@as_root
@on_linux
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
def test_as_the_root_of_a_container_another_capability_serves(tmp_path: Path) -> None:
    with Up(tmp_path / "data", prefix=["setpriv", "--bounding-set", "-dac_read_search"]) as up:
        up.ready()
        status = Path(f"/proc/{up.pid('postgres')}/status").read_text()
        assert "CapEff:\t0000000000000002" in status


@as_root
@on_linux
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
def test_a_root_that_may_not_become_another_user_is_told_what_to_do(tmp_path: Path) -> None:
    with Up(tmp_path / "data", prefix=["setpriv", "--bounding-set", "-setuid,-setgid"]) as up:
        code, said = up.end()
    assert code == 2
    assert "PostgreSQL does not run as root" in said
    assert "ONCEWIRE_POSTGRES_URL" in said


def test_a_folder_without_write_permission_is_named(open_folder: Path) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o555)
    with Up(closed / "data", prefix=as_nobody() if IS_ROOT else ()) as up:
        code, said = up.end()
    assert code == 2
    assert f"{closed} cannot be written by this user" in said


@pytest.mark.parametrize("below", ["file", "file/data"])
def test_a_data_path_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    result = oncewire("up", "--data", below, cwd=tmp_path, **ANY_PORTS)
    assert result.returncode == 2
    assert f"{tmp_path / 'file'} is not a folder" in result.stderr


def test_a_corrupt_config_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "oncewire.toml").write_text("data = 1\n[nats\n")
    result = oncewire("up", cwd=tmp_path)
    assert result.returncode == 2
    assert "oncewire.toml is not valid TOML" in result.stderr
    assert "line 2" in result.stderr
    assert not (tmp_path / ".oncewire").exists()


@pytest.mark.parametrize(
    ("version", "code", "sentence"),
    [("16", 2, "was written by PostgreSQL 16, and the installed one is"), ("", 4, "is not a PostgreSQL folder")],
)
def test_a_postgres_folder_that_cannot_be_used_is_explained(
    tmp_path: Path, version: str, code: int, sentence: str
) -> None:
    data = tmp_path / "data" / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text(version)
    result = oncewire("up", "--data", str(tmp_path / "data"), cwd=tmp_path, **ANY_PORTS)
    assert result.returncode == code
    assert sentence in result.stderr
    assert (data / "PG_VERSION").read_text() == version


def test_a_damaged_postgres_folder_is_corrupt_with_its_last_words(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as up:
        up.ready()
        up.stop()
    (up.folder.postgres / "data" / "global" / "pg_control").write_bytes(bytes(8192))
    with Up(tmp_path / "data") as up:
        code, said = up.end()
    assert code == 4
    assert "is damaged" in said


def test_a_start_cut_off_while_making_the_database_is_made_good(tmp_path: Path) -> None:
    with Up(tmp_path / "data") as up:
        until(lambda: any(up.folder.postgres.glob("data.new-*/PG_VERSION")), "initdb at work")
        up.process.kill()
    with Up(tmp_path / "data") as up:
        up.ready()


@pytest.mark.parametrize("name", ["nats", "postgres"])
def test_a_server_that_dies_ends_up_with_its_last_words(tmp_path: Path, name: str) -> None:
    with Up(made(tmp_path / "data")) as up:
        other = up.ready().running.servers["postgres" if name == "nats" else "nats"].mark
        os.kill(up.pid(name), signal.SIGKILL)
        code, said = up.end()
    assert code == 3
    assert "was killed by SIGKILL while serving" in said
    assert "server.log" in said
    assert other
    assert not other.is_alive


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with Up(made(tmp_path / "data")) as up:
        mark = up.ready().running.servers["postgres"].mark
        assert mark
        os.kill(mark.pid, signal.SIGSTOP)  # so that it does not stop when asked
        up.process.send_signal(signal.SIGINT)
        up.wait_for("stopping")
        assert up.stop(signal.SIGINT) == 130
        os.kill(mark.pid, signal.SIGCONT)
        until(lambda: not mark.is_alive, "the end of PostgreSQL")


def test_ctrl_c_while_starting_stops_too(tmp_path: Path) -> None:
    with Up(tmp_path / "data") as up:
        up.wait_for("starting", "PostgreSQL")
        assert up.stop(signal.SIGINT) == 0
        assert up.folder.read() is None


async def test_servers_named_by_settings_are_used_and_not_started(tmp_path: Path, server: NatsServer) -> None:
    with Up(made(tmp_path / "one")) as one:
        postgres_url = one.ready().url("postgres")
        given = {"NATS_URL": server.url, "ONCEWIRE_POSTGRES_URL": postgres_url}
        with Up(tmp_path / "two", **given) as two:
            two.ready()
            shown = {event["part"]: event for event in two.events if event["event"] == "ready"}
            assert shown["NATS"]["url"].startswith(server.url)
            assert shown["PostgreSQL"]["url"].startswith(postgres_url)
            assert shown["durability"]["warning"] == "unknown"
            assert not list((tmp_path / "two" / "nats").iterdir())
            assert not list((tmp_path / "two" / "postgres").iterdir())
            assert two.stop() == 0
        assert one.process.poll() is None
    assert server.process
    assert server.process.poll() is None


@pytest.mark.parametrize(
    ("variable", "url"),
    [("NATS_URL", "nats://127.0.0.1:1"), ("ONCEWIRE_POSTGRES_URL", "postgresql://me:hush@127.0.0.1:1/x")],
)
def test_a_named_server_that_is_not_there_is_unavailable(tmp_path: Path, variable: str, url: str) -> None:
    with Up(tmp_path / "data", **{variable: url}) as up:
        code, said = up.end()
    assert code == 3
    assert "127.0.0.1:1" in said
    assert "hush" not in said


def test_a_reader_that_goes_away_does_not_stop_the_servers(tmp_path: Path) -> None:
    """As in `oncewire up | head -1`."""
    folder = DataFolder.at(tmp_path / "data")
    command = [*ONCEWIRE, "up", "--data", str(folder.path)]
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environ(**ANY_PORTS), stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline().startswith(b"oncewire ")
        process.stdout.close()
        until(lambda: len((folder.read() or Running(Mark(0, ""))).servers) == 2, "both servers")
        until(lambda: "accept connections" in (folder.postgres / "server.log").read_text(), "PostgreSQL")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


@on_linux
def test_ctrl_c_in_a_terminal_reaches_only_up(tmp_path: Path) -> None:
    """The terminal sends it to everyone in the foreground; the servers must not be among them."""
    terminal, other_side = os.openpty()
    # The first terminal that the leader of a new session opens is the one that controls it.
    on_terminal = ["/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(other_side), *ONCEWIRE, "up"]
    environ = clean_environ(**ANY_PORTS, TERM="xterm")
    with subprocess.Popen(on_terminal, cwd=tmp_path, env=environ, start_new_session=True) as process:
        shown = _read_until(terminal, b"ready in")
        os.write(terminal, b"\x03")
        shown += _read_until(terminal, b"the data is kept")
        assert process.wait(WAIT_S) == 0
    os.close(terminal)
    os.close(other_side)
    text = shown.decode()
    assert "\x1b[" in text  # rows are rewritten in place
    assert text.rindex("PostgreSQL") < text.rindex("nats-server") < text.rindex("the data is kept")
    log = (tmp_path / ".oncewire" / "nats" / "server.log").read_text()
    assert 'Trapped "terminated"' in log
    assert "interrupt" not in log


def _read_until(terminal: int, end: bytes) -> bytes:
    shown = b""
    while end not in shown:
        assert select.select([terminal], [], [], WAIT_S)[0], shown.decode()
        shown += os.read(terminal, 4096)
    return shown
