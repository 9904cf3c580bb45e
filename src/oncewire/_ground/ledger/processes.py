"""Who runs on a ledger: names of processes, and whether one of this machine still lives."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from oncewire._ground.processes import is_stopped, start_time


def machine() -> str:
    """This machine, the same after a restart of it. In a container without a machine id it is the host name."""
    with contextlib.suppress(OSError):
        found = Path("/etc/machine-id").read_text().strip()
        if found:
            return found
    return os.uname().nodename


def process_name() -> str:
    """This process, told from a later one with the same number by its start."""
    return f"{os.getpid()}:{start_time(os.getpid())}:{secrets.token_hex(4)}"


def is_alive(process: str) -> bool:
    """Whether a process of this machine runs, by the name that it gave itself."""
    pid, _, rest = process.partition(":")
    started, _, _ = rest.rpartition(":")  # it may have colons of its own
    return start_time(int(pid)) == started != ""


def told(process: str) -> str:
    """A living process in words: one that was stopped holds what it has."""
    pid = process.partition(":")[0]
    return f"{pid} (stopped: kill -CONT {pid})" if is_stopped(int(pid)) else pid
