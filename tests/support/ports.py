"""Ports for servers that tests start, stop and start again at the same place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

PORTS = range(11_000, 20_000)
"""Below what systems take for outgoing connections, so that none of those gets there while a server is down, and below
what `oncewire up` picks from."""

_held: list[IO[bytes]] = []


def free_port() -> int:
    """A port that nobody listens at, for this process alone: no other test run gets it before this one ends."""
    folder = Path(tempfile.gettempdir()) / f"oncewire-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.sample(PORTS, len(PORTS)):
        claim = (folder / str(port)).open("wb")
        with contextlib.suppress(OSError), socket.socket() as probe:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            _held.append(claim)
            return port
        claim.close()
    raise AssertionError(f"none of the ports {PORTS.start} to {PORTS.stop - 1} is free")
