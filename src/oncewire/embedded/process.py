"""A server process that belongs to `up`: its start, its log, its end, and how to know it again.

Children live in sessions of their own, so that Ctrl-C in a terminal reaches only `up`, which stops them in order. On
Linux the kernel ends them when `up` is killed; everywhere the next `up` finds what is left by process id *and* start
time, because an id alone may belong to somebody else by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oncewire._ground.errors import PermissionDenied, Unavailable
from oncewire._ground.files import open_private
from oncewire._ground.processes import IS_LINUX, start_time

LAUNCH = Path(__file__).with_name("launch.py")
LOG_BYTES_MAX = 16 << 20
TAIL_LINES = 6
TAIL_BYTES = 8 << 10
POLL_S = 0.01
LOOPBACK = "127.0.0.1"
PORTS_TO_PICK = range(20_000, 32_000)
"""Below the range from which the kernel serves everybody's connections: nobody gets one before the server does."""
PICKS_MAX = 100


@dataclass(frozen=True)
class User:
    """Whom a child runs as, and the paths that it must be able to reach as that user."""

    uid: int
    gid: int
    reach: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mark:
    """A process that can be told from a later one with the same id."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Mark | None:
        started = start_time(pid)
        return cls(pid, started) if started else None

    @property
    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


def plain_environ() -> dict[str, str]:
    """For a server that is not ours: none of our settings, which may hold secrets, and none that PostgreSQL obeys."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ONCEWIRE_", "NATS_", "PG"))}


def command_of(pid: int) -> str:
    """The command line of a living process, '' when there is none."""
    if IS_LINUX:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return ""
    shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607
    return shown.stdout


class Log:
    """The file that a child writes to. Kept below a size by whoever watches the child: one older part stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._run_begins_at = 0

    def open(self) -> int:
        self.trim()
        file = open_private(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._run_begins_at = os.fstat(file).st_size
        return file

    def trim(self) -> None:
        """Copy and truncate: the child keeps its open file, and appends to what is then empty."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > LOG_BYTES_MAX:
                older = self.path.with_suffix(".1.log")
                with os.fdopen(open_private(older, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                    file.write(self.path.read_bytes())
                os.truncate(self.path, 0)
                self._run_begins_at = 0

    def tail(self) -> str:
        """The last lines that the child wrote since it was started."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(self._run_begins_at, size), size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(line.rstrip() for line in lines[-TAIL_LINES:])
        return ""


class Child:
    """One running process. `start` is the only way to make it."""

    def __init__(self, name: str, log: Log, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self._process = process
        self.mark = Mark(process.pid, start_time(process.pid))

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        log: Log,
        *,
        death_signal: int,
        user: User | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        order: dict[str, object] = {"argv": list(argv), "parent": os.getpid(), "death_signal": death_signal}
        if user is not None:
            order |= {"uid": user.uid, "gid": user.gid, "reach": user.reach}
        output = log.open()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(LAUNCH), json.dumps(order)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=dict(os.environ if environ is None else environ),
                start_new_session=True,
            )
        finally:
            os.close(output)
        return cls(name, log, process)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.is_running:
                self._process.send_signal(number)

    async def stop(self, *steps: tuple[int, float]) -> None:
        """Send each signal and give it its seconds; SIGKILL is always the last."""
        for number, wait_s in steps:
            self.signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.wait()
                    return
        self.signal(signal.SIGKILL)
        await self.wait()

    def died(self, when: str) -> Unavailable:
        """The error for a child that ended by itself, with what it said last."""
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        tail = self.log.tail()
        if "No space left on device" in tail:
            when, hint = (
                f"{when} because the disk is full",
                "Free some room and start again: what was confirmed is kept.",
            )
        else:
            hint = f"Its log: {self.log.path}"
        return Unavailable(f"{self.name} {how} {when}{quoted(tail)}", hint=hint)


def quoted(tail: str) -> str:
    """Log lines as the end of an error's message."""
    return "; it said last:\n" + "\n".join(f"  | {line}" for line in tail.splitlines()) if tail else ""


async def stop_leftover(mark: Mark, *steps: tuple[int, float]) -> None:
    """End a process that an `up` which is gone left behind. It is not our child: look, do not wait."""
    for number, wait_s in (*steps, (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            if mark.is_alive:
                os.kill(mark.pid, number)
                os.kill(mark.pid, signal.SIGCONT)  # a stopped process would not hear it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while mark.is_alive:  # noqa: ASYNC110  nothing signals the end of somebody else's child
                    await asyncio.sleep(POLL_S)
                return
    raise Unavailable(
        f"process {mark.pid}, left by an earlier `oncewire up`, does not end", hint=f"Stop it: kill -9 {mark.pid}"
    )


def pick_ports(wanted: Mapping[str, tuple[int, str]]) -> dict[str, int]:
    """A free port for each name. `wanted` holds the port (0: any) and how a person can choose another one."""
    with contextlib.ExitStack() as held:  # so that no two names get the same
        return {name: _claim(held, port, how) if port else _pick(held) for name, (port, how) in wanted.items()}


def _claim(held: contextlib.ExitStack, port: int, how: str) -> int:
    hint = f"Stop what uses it, or choose another port with {how}."
    try:
        return _listen(held, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(f"port {port} is taken{_by_whom(port)}", hint=hint) from None
        if error.errno == errno.EACCES:
            raise PermissionDenied(f"port {port} may not be used by this user", hint=hint) from None
        raise


def _pick(held: contextlib.ExitStack) -> int:
    for port in random.sample(PORTS_TO_PICK, PICKS_MAX):
        with contextlib.suppress(OSError):
            return _listen(held, port)
    raise Unavailable(f"no free port was found in {PICKS_MAX} tries", hint="Name one instead of 0.")


def _listen(held: contextlib.ExitStack, port: int) -> int:
    probe = held.enter_context(socket.socket())
    # Like the servers do: a connection that is still closing does not keep the port.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((LOOPBACK, port))
    probe.listen(1)
    return port


def _by_whom(port: int) -> str:
    """Who listens there, as far as this user may see it."""
    links = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()) in links for file in (folder / "fd").iterdir()):
                return f" by {(folder / 'comm').read_text().strip()} (process {folder.name})"
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                    yield columns[9]
