"""Who runs on a ledger: names of processes, and whether one of this machine still lives."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def machine() -> str:
    """This machine, the same after a restart of it. In a container without a machine id it is the host name."""
    with contextlib.suppress(OSError):
        found = Path("/etc/machine-id").read_text().strip()
        if found:
            return found
    return os.uname().nodename


def process_name() -> str:
    """This process, told from a later one with the same number by its start."""
    return f"{os.getpid()}:{_start_of(os.getpid())}:{secrets.token_hex(4)}"


def is_alive(process: str) -> bool:
    """Whether a process of this machine runs, by the name that it gave itself."""
    pid, start, _ = process.split(":")
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _start_of(int(pid)) == start


def _start_of(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def told(process: str) -> str:
    """A living process in words: one that was stopped holds what it has."""
    pid = process.partition(":")[0]
    with contextlib.suppress(OSError, IndexError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return f"{pid} (stopped: kill -CONT {pid})"
    return pid
