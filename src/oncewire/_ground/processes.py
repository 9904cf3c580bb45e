"""Processes of this machine: when one began, so that none is taken for a later one with its id."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

IS_LINUX: Final = sys.platform == "linux"
_ENDED: Final = "ZX"
"""A process that was killed is there until its parent asks for it, which in a container may be never."""


def start_time(pid: int) -> str:
    """When a living process started, unique over reboots; '' when there is no such process."""
    if IS_LINUX:
        try:
            state, ticks = _state_and_ticks(pid)
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except (OSError, ValueError, IndexError):
            return ""
        return "" if state in _ENDED else f"{boot}/{ticks}"
    return _shown(pid, "lstart")


def is_stopped(pid: int) -> bool:
    """By SIGSTOP: it lives, holds what it has, and does nothing."""
    if IS_LINUX:
        try:
            return _state_and_ticks(pid)[0] == "T"
        except (OSError, ValueError, IndexError):
            return False
    return _shown(pid, "state").startswith("T")


def _state_and_ticks(pid: int) -> tuple[str, str]:
    behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return behind_name[0], behind_name[19]


def _shown(pid: int, field: str) -> str:
    shown = subprocess.run(["ps", "-o", f"{field}=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607
    return shown.stdout.strip()
