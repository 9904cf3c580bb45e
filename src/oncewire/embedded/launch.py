"""Become a child that dies with its parent, as another user if asked, then run a program in this process.

A script, not a library: `python -I -S launch.py '{"argv": […], …}'`. It imports nothing of Oncewire, so that it starts
in a few milliseconds, and it runs before the program does, so that nothing is done between fork and exec of a process
that has threads.

PostgreSQL refuses to run as root. As root we give it an unprivileged user without creating one and without opening
anybody's folders: when that user cannot reach the program or its data because a folder above is closed (a home with
mode 0700), the program keeps the one capability that lets it pass: CAP_DAC_READ_SEARCH, or CAP_DAC_OVERRIDE where root
itself lacks the former (Docker's default). It is kept only then.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE = 1
CAP_SETPCAP = 8
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 1 << 2
CAP_DAC_READ_SEARCH = 2
EXIT_NOT_STARTED = 126


class LaunchError(Exception):
    """One sentence; the parent finds it in the log of the child."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def main(order: dict[str, Any]) -> None:
    """`order`: argv, parent (its pid), death_signal, and optionally uid, gid, reach (paths that argv must get at)."""
    os.umask(0o077)  # what it stores is its owner's alone
    is_linux = sys.platform == "linux"
    libc = ctypes.CDLL(None, use_errno=True) if is_linux else None
    if order.get("uid") is not None:
        _become(libc, order["uid"], order["gid"], order["reach"])
    if libc is not None:
        # Only now: a change of user clears it.
        _call(libc.prctl, PR_SET_PDEATHSIG, order["death_signal"], 0, 0, 0)
        if os.getppid() != order["parent"]:
            raise LaunchError("the process that asked for this one has ended")
    os.execv(order["argv"][0], order["argv"])  # noqa: S606


def _become(libc: Any, uid: int, gid: int, reach: list[str]) -> None:
    if libc is not None:
        _call(libc.prctl, PR_SET_KEEPCAPS, 1, 0, 0, 0)
    try:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    except OSError as error:
        raise LaunchError(f"this process is root but may not become user {uid}: {error.strerror}") from None
    # The effective capabilities went with the user: from here on this process sees what that user sees.
    closed = next((path for path in reach if not _can_reach(path)), None)
    if libc is None:
        if closed:
            raise LaunchError(f"user {uid} cannot reach {closed}")
        return
    _keep(libc, _way_in(libc, uid, closed) if closed else None)


def _can_reach(path: str) -> bool:
    try:
        os.stat(path)  # noqa: PTH116  importing pathlib costs more than all the rest
    except PermissionError:
        return False
    return True


def _way_in(libc: Any, uid: int, closed: str) -> int:
    permitted = _capabilities(libc)
    for capability in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE):
        if permitted & 1 << capability:
            return capability
    raise LaunchError(f"user {uid} cannot reach {closed}, and this process may not let it")


def _capabilities(libc: Any) -> int:
    sets = (_Sets * 2)()
    _call(libc.capget, ctypes.byref(_Header(CAPABILITY_VERSION_3, 0)), sets)
    permitted: int = sets[0].permitted
    return permitted


def _keep(libc: Any, capability: int | None) -> None:
    """Drop every capability but this one, which then survives exec."""
    bit = 0 if capability is None else 1 << capability
    if capability is not None:
        _let_access_see(libc, bit)
    sets = (_Sets * 2)(_Sets(bit, bit, bit), _Sets(0, 0, 0))
    _call(libc.capset, ctypes.byref(_Header(CAPABILITY_VERSION_3, 0)), sets)
    if capability is not None:
        _call(libc.prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def _let_access_see(libc: Any, bit: int) -> None:
    """access(2) forgets the capabilities of all but root unless this is set, and initdb asks it about its programs."""
    needed = 1 << CAP_SETPCAP
    if _capabilities(libc) & needed:
        sets = (_Sets * 2)(_Sets(needed, bit | needed, bit), _Sets(0, 0, 0))
        _call(libc.capset, ctypes.byref(_Header(CAPABILITY_VERSION_3, 0)), sets)
        _call(libc.prctl, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)


def _call(function: Any, *args: Any) -> None:
    if function(*(ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args)) != 0:
        raise LaunchError(f"{function.__name__} failed: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    try:
        main(_order)
    except (LaunchError, OSError) as _error:
        sys.stderr.write(f"not started: {_order['argv'][0]}: {_error}\n")
        sys.exit(EXIT_NOT_STARTED)
