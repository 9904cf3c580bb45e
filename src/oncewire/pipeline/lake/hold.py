"""Who works on a lake: one pipeline at a time, and everybody can read which one.

The lock is the kernel's and ends with its process, however that ends. It keeps two pipelines of one machine out of each
other's way. What keeps two of different machines from doubling anything is the tables themselves: a commit that another
one overtook is refused (log.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from oncewire._ground.errors import Conflict
from oncewire._ground.files import make_folder, open_private

LOCK: Final = "_lock"
STATE: Final = "_state.json"


@contextmanager
def held(lake: Path, *, what: str, since: str, name: object = "") -> Iterator[None]:
    """Hold the lake, by a lock in its folder or in the one beside it (`name` is its own). Conflict names who does."""
    make_folder(lake)
    handle = open_private(lake / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"the lake {name or lake} is held by {shown(holder(lake))}",
                hint="One pipeline at a time works on a lake. Stop that one, or let it do the work.",
            ) from None
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "what": what, "since": since})
        os.truncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
        yield
        os.truncate(handle, 0)
    finally:
        os.close(handle)


def holder(lake: Path) -> dict[str, Any]:
    """Who holds the lake; empty when nobody does."""
    try:
        handle = os.open(lake / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                found: dict[str, Any] = json.loads(os.pread(handle, 4096, 0) or b"{}")
            except json.JSONDecodeError:
                return {"what": "a process that has just begun"}
            return found or {"what": "a process that has just begun"}
        return {}
    finally:
        os.close(handle)


def shown(who: dict[str, Any]) -> str:
    if "pid" not in who:
        return str(who.get("what", "nobody"))
    return f"{who['what']}, process {who['pid']} on {who['host']} since {who['since']}"


def write_state(lake: Path, state: dict[str, Any]) -> None:
    """How the streams stand, for `pipeline status`: whole or not at all."""
    begun = lake / f"{STATE}.new"
    with os.fdopen(open_private(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(json.dumps(state))
    begun.replace(lake / STATE)


def read_state(lake: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((lake / STATE).read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return found
