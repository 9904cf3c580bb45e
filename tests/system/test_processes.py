"""Processes of this machine: living, stopped, ended, later ones with the same id, and a child whose parent is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from oncewire._ground.ledger.processes import is_alive, process_name, told
from oncewire._ground.processes import is_stopped, start_time
from oncewire.embedded.process import Mark

NOBODY = 999_999_999
TELLS_ITS_NAME = (
    "import sys\nfrom oncewire._ground.ledger.processes import process_name\n"
    "print(process_name(), flush=True)\nsys.stdin.read()\n"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that says what a ledger would call it, and waits."""
    command = [sys.executable, "-c", TELLS_ITS_NAME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def name_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def wait_for(child: subprocess.Popen[str], options: int) -> None:
    """Until it has changed, without asking for its end: it stays a zombie."""
    os.waitid(os.P_PID, child.pid, options | os.WNOWAIT)


def test_a_living_process_is_known_by_its_number_and_its_start(child: subprocess.Popen[str]) -> None:
    name = name_of(child)
    assert is_alive(name)
    assert is_alive(process_name())
    assert not is_alive(f"{child.pid}:earlier:0a1b2c3d")
    assert not is_alive(f"{child.pid}::0a1b2c3d")
    assert not Mark(child.pid, "earlier").is_alive


def test_a_killed_process_that_nobody_has_asked_for_is_dead(child: subprocess.Popen[str]) -> None:
    """Its number stays until its parent asks, which in a container may be never."""
    name, mark = name_of(child), Mark.of(child.pid)
    child.kill()
    wait_for(child, os.WEXITED)
    os.kill(child.pid, 0)  # the number is still taken
    assert not is_alive(name)
    assert mark is not None
    assert not mark.is_alive
    assert start_time(child.pid) == ""


def test_a_stopped_process_lives_and_says_how_to_continue_it(child: subprocess.Popen[str]) -> None:
    name = name_of(child)
    child.send_signal(signal.SIGSTOP)
    wait_for(child, os.WSTOPPED)
    assert is_alive(name)
    assert f"{child.pid} (stopped: kill -CONT {child.pid})" == told(name)
    child.send_signal(signal.SIGCONT)
    wait_for(child, os.WCONTINUED)
    assert str(child.pid) == told(name)


def test_where_there_is_none_nothing_is_said() -> None:
    assert (False, "") == (is_stopped(NOBODY), start_time(NOBODY))
    assert not is_alive(f"{NOBODY}:0:gone")


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("told", [b"", b'{"servers": ["nats://', b'{"servers": []}\nw 1 0.1', b'{"servers": []}\nd'])
def test_a_keep_alive_whose_agent_died_while_it_started_ends_quietly(told: bytes, is_heard: bool) -> None:
    """Whatever the agent had said by then."""
    command = [sys.executable, "-m", "oncewire.agent.keepalive"]
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as heard, os.fdopen(writer, "wb") as stdout:
        if not is_heard:
            heard.close()
        ended = subprocess.run(command, input=told, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (b"", 0) == (ended.stderr, ended.returncode)
