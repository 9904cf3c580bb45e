"""The data folder: who may use it, what runs on it, how much room it has.

    .oncewire/
      up.lock           held (flock) by the living `up`, with its process id inside
      up.json           what that `up` runs and where: for doctor, for other commands, for the next start
      nats/             server.conf, server.log, jetstream/, keys/ (one of each user)
      postgres/         data/, pgpass (the generated password), server.log

The kernel frees the lock when its holder dies, however it dies, so nothing has to be cleaned up by hand. `up.json` is
written anew before anything that it names can be needed, and removed on a clean stop; found without a held lock it
tells what a killed `up` left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from oncewire._ground.errors import Conflict, InvalidSetting, OncewireError, PermissionDenied, Unavailable
from oncewire._ground.files import FOLDER_MODE, close_off, make_folder, open_private, write_whole
from oncewire.embedded.process import POLL_S, Mark

ROOM_BYTES_MIN = 256 << 20
STATE_BYTES_MAX = 1 << 16
LOCK_WAIT_S = 0.2


class Server(msgspec.Struct, frozen=True):
    """A server of the stack. `mark` is None when it is not ours: then `url` is for people, without its secrets."""

    url: str
    monitor_url: str = ""
    mark: Mark | None = None
    keys: str = ""
    """The folder with its users' keys, '' when it is not ours."""


class Running(msgspec.Struct, frozen=True):
    """What `up.json` says."""

    up: Mark
    servers: dict[str, Server] = {}
    services: dict[str, str] = {}
    """What `up` itself serves, and where: the gateway, the broker, …"""


@dataclass(frozen=True)
class Room:
    """The disk below the data folder."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class DataFolder:
    """Paths below the data folder. Making one touches nothing; `create` does."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> DataFolder:
        return cls(Path(os.path.abspath(path.expanduser())))  # noqa: PTH100  keeps symlinks as the user named them

    @property
    def nats(self) -> Path:
        return self.path / "nats"

    @property
    def keys(self) -> Path:
        """The keys of the embedded nats-server's users."""
        return self.nats / "keys"

    @property
    def postgres(self) -> Path:
        return self.path / "postgres"

    @property
    def _lock_file(self) -> Path:
        return self.path / "up.lock"

    @property
    def _state_file(self) -> Path:
        return self.path / "up.json"

    def create(self) -> None:
        """Make what is missing; say in one sentence why it cannot be used."""
        self.check_usable()
        with translated(self.path):
            for folder in (self.path, self.nats, self.postgres):
                make_folder(folder)
                close_off(folder)
            if os.geteuid() == 0:  # PostgreSQL refuses to run as root: its user must get through to its own folder
                for folder in (self.path, self.postgres):
                    folder.chmod(FOLDER_MODE | 0o011)

    def check_usable(self) -> None:
        """That this user can write what is there, and make what is missing. Changes nothing."""
        for wanted in (self.path, self.nats, self.postgres):
            with translated(wanted):
                nearest = next(path for path in (wanted, *wanted.parents) if path.exists())
                if not nearest.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "", str(nearest))
                if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "", str(nearest))

    def room(self) -> Room:
        """Of the nearest folder that exists."""
        nearest = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        usage = shutil.disk_usage(nearest)
        return Room(usage.free, usage.total)

    def check_room(self) -> None:
        room = self.room()
        if room.free_bytes < ROOM_BYTES_MIN:
            raise Unavailable(
                f"the disk of {self.path} has {room.free_bytes >> 20} MiB free, and {ROOM_BYTES_MIN >> 20} MiB is the "
                "least to start with",
                hint="Free some room, or choose a folder on another disk with --data.",
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder. Released when the block ends, or when this process does."""
        with translated(self.path):
            file = open_private(self._lock_file, os.O_RDWR | os.O_CREAT)
        try:
            if not _acquired(file):
                raise self._in_use()
            with translated(self.path):
                os.truncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(file)

    def holder(self) -> int | None:
        """The process id of the `up` that holds the folder now, None when nobody does."""
        try:
            with self._lock_file.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    digits = file.read(32).strip()
                    return int(digits) if digits.isdigit() else 0
                return None
        except OSError:  # no such folder, or not ours to look into
            return None

    def _in_use(self) -> Conflict:
        running = self.read()
        servers = ", ".join(server.url for server in running.servers.values()) if running else ""
        return Conflict(
            f"`oncewire up` already runs on {self.path} (process {self.holder()}{': ' + servers if servers else ''})",
            hint="Use that one, stop it (Ctrl-C, or kill its process), or choose another folder with --data.",
        )

    def read(self) -> Running | None:
        """What the last `up` wrote, None when it is missing or not readable as such."""
        try:
            with self._state_file.open("rb") as file:
                return msgspec.json.decode(file.read(STATE_BYTES_MAX), type=Running)
        except (OSError, msgspec.MsgspecError):
            return None

    def write(self, running: Running) -> None:
        with translated(self.path):
            write_whole(self._state_file, msgspec.json.format(msgspec.json.encode(running)) + b"\n")

    def forget(self) -> None:
        self._state_file.unlink(missing_ok=True)


def _acquired(file: int) -> bool:
    """Try for a moment: whoever looks for the holder has the lock in hand for microseconds."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """What can go wrong with the files of the data folder, as our errors."""
    try:
        yield
    except OSError as error:
        raise _translate(error, Path(error.filename or path)) from error


def _translate(error: OSError, path: Path) -> OncewireError:
    elsewhere = "choose another folder with --data (ONCEWIRE_DATA)."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(
            f"{path} cannot be written by this user: {os.strerror(error.errno)}",
            hint=f"Give {_user_name()} the right to write there, or {elsewhere}",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(f"the disk of {path} is full", hint=f"Free some room, or {elsewhere}")
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return InvalidSetting(f"{path} is not a folder", hint=f"Move that file away, or {elsewhere}")
    return Unavailable(f"{path} cannot be used: {error.strerror or error}", hint=f"Mend that, or {elsewhere}")


def _user_name() -> str:
    import pwd  # only on the way to an error

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"user {os.getuid()}"
