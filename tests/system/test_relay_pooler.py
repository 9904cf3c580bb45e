"""Behind a pooler in transaction mode: noticed, said, and served by polling and without prepared statements."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

import oncewire
from oncewire._ground.database.migrate import migrate, migrations
from oncewire.outbox import RelayOptions, relaying
from oncewire.outbox.inspect import status
from tests.support.nats import NatsServer
from tests.support.outbox import ENQUEUE, assert_all_once_in_order, drained, make_chat_stream, postgres
from tests.support.ports import free_port
from tests.support.postgres import NOBODY, as_nobody, shared_postgres
from tests.support.wait import until

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SAID = "LISTEN does not work here (a pooler in transaction mode?): polling every 50 ms"
NOTIFICATION = b"A"
PARSE = b"P"


class Pooler:
    """Passes PostgreSQL's protocol on, as a pooler in transaction mode does it: notifications get lost, since the
    server's connection is another one by then; a statement prepared under a name would be gone as well, so using one
    is counted."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self.lost_notifications = 0
        self.named_statements = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._links |= {writer, server_writer}
        up = asyncio.create_task(self._up(reader, server_writer))
        down = asyncio.create_task(self._down(server_reader, writer))
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        for one in (writer, server_writer):
            one.transport.abort()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The first message of a client has no type; all others are a type, a length and a body."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            size = await reader.readexactly(4)
            writer.write(size + await reader.readexactly(struct.unpack("!i", size)[0] - 4))
            while True:
                kind, body = await _message(reader)
                self.named_statements += kind == PARSE and body[4:5] != b"\0"
                writer.write(kind + body)

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, body = await _message(reader)
                if kind == NOTIFICATION:
                    self.lost_notifications += 1
                else:
                    writer.write(kind + body)

    async def __aenter__(self) -> Pooler:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._links:
            link.transport.abort()
        await asyncio.sleep(0)


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    kind = await reader.readexactly(1)
    size = await reader.readexactly(4)
    return kind, size + await reader.readexactly(struct.unpack("!i", size)[0] - 4)


@pytest.fixture
async def pooler() -> AsyncIterator[Pooler]:
    async with Pooler(shared_postgres().port) as running:
        yield running


async def test_a_pooler_in_transaction_mode_is_noticed_said_and_served(
    server: NatsServer, pooler: Pooler, caplog: pytest.LogCaptureFixture
) -> None:
    url = await shared_postgres().new_database()
    through = url.replace(f":{shared_postgres().port}/", f":{pooler.port}/") + "?sslmode=disable"
    async with oncewire.connect(server.url) as client, postgres(url) as connection:
        await make_chat_stream(client)
        async with relaying(client, through, RelayOptions(poll_ms=50)) as relay:
            for number in range(3):
                await connection.fetch(ENQUEUE, uuid.UUID(int=1), f"{number}")
                await drained(url)
            assert not relay.is_notified
            idle = await connection.fetchval("SELECT idle_until FROM relay_state")
    assert SAID in caplog.text
    assert pooler.lost_notifications > 0
    assert pooler.named_statements == 0
    assert idle.year < 2000, "no writer must notify in vain"
    assert await assert_all_once_in_order(server.url, url) == 3


@pytest.fixture
def pgbouncer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a pgbouncer in transaction mode, with fewer connections than its clients have."""
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed (Debian: apt install pgbouncer)")
    folder, port = tmp_path_factory.mktemp("pgbouncer"), free_port()
    (folder / "users").write_text('"oncewire" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"""
[databases]
* = host=127.0.0.1 port={shared_postgres().port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = 4
"""
    )
    if os.geteuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, NOBODY, NOBODY)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            as_nobody([PGBOUNCER, str(folder / "pgbouncer.ini")], folder), stdout=log, stderr=log, cwd=folder
        )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


async def test_pgbouncer_in_transaction_mode_is_noticed_said_and_served(
    server: NatsServer, pgbouncer: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Migrations, two relays and a writer, all through it."""
    await until(lambda: _answers(pgbouncer), "pgbouncer")
    url = await shared_postgres().new_database()
    through = url.replace(f":{shared_postgres().port}/", f":{pgbouncer}/") + "?sslmode=disable"
    applied = await asyncio.gather(*(migrate(through, "messaging") for _ in range(3)))
    assert sum(map(len, applied)) == len(migrations())
    assert await migrate(through) == []
    options = RelayOptions(poll_ms=50)
    async with oncewire.connect(server.url) as client, postgres(through, statement_cache_size=0) as writer:
        await make_chat_stream(client)
        async with relaying(client, through, options) as one, relaying(client, through, options) as other:
            for number in range(60):
                async with writer.transaction():
                    await writer.fetch(ENQUEUE, uuid.UUID(int=number % 3 + 1), f"{number}")
            await drained(url)
            await until(lambda: caplog.text.count(SAID) == 2, "both to have noticed")
            assert not one.is_notified
            assert not other.is_notified
            async with writer.transaction():
                assert (await writer.fetchval("SELECT idle_until FROM relay_state")).year < 2000
        assert (await status(writer)).is_well
    assert caplog.text.count(SAID) == 2
    assert not one.problem
    assert await assert_all_once_in_order(server.url, url) == 60
