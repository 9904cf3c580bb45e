"""Behind a pooler in transaction mode: noticed, said, and served by polling and without prepared statements."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import uuid
from collections.abc import AsyncIterator

import pytest

import oncewire
from oncewire.outbox import RelayOptions, relaying
from tests.support.nats import NatsServer
from tests.support.outbox import ENQUEUE, assert_all_once_in_order, drained, make_chat_stream, postgres
from tests.support.postgres import shared_postgres

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
    assert "LISTEN does not work here (a pooler in transaction mode?): polling every 50 ms" in caplog.text
    assert pooler.lost_notifications > 0
    assert pooler.named_statements == 0
    assert idle.year < 2000, "no writer must notify in vain"
    assert await assert_all_once_in_order(server.url, url) == 3
