"""TLS to PostgreSQL by the words of its address: the server is who it says it is, or nothing is sent to it.

The embedded PostgreSQL is built without TLS, so that a real handshake needs somebody before it who speaks it: what
follows the handshake is the server's own.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest

from oncewire._ground.database.postgres import connected
from oncewire._ground.errors import NotConnected, OncewireError
from tests.support.postgres import shared_postgres
from tests.support.tls import Authority

SSL_REQUEST = bytes.fromhex("0000000804d2162f")


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class Terminating:
    """Speaks TLS before a server that cannot. `clear` is what came to it in the clear."""

    def __init__(self, authority: Authority, port: int, *, has_tls: bool = True) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(*authority.issue("postgres"))
        self._behind = port
        self._has_tls = has_tls
        self.clear: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(client,)))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self.clear.append(client.recv(8))
            client.sendall(b"S" if self._has_tls else b"N")
            if not self._has_tls:
                return
            with (
                self._context.wrap_socket(client, server_side=True) as inner,
                socket.create_connection(("127.0.0.1", self._behind)) as behind,
            ):
                back = threading.Thread(target=_pipe, args=(behind, inner))
                back.start()
                _pipe(inner, behind)
                back.join()

    def __enter__(self) -> Terminating:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)


async def one(port: int, words: str) -> object:
    async with connected(f"postgresql://oncewire@127.0.0.1:{port}/postgres?{words}") as connection:
        return await connection.fetchval("SELECT 1")


async def test_the_certificate_of_postgres_is_checked_as_the_address_says(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")
    with Terminating(authority, shared_postgres().port) as before:
        assert 1 == await one(before.port, f"sslmode=verify-full&sslrootcert={authority.path}")
        for words in (f"sslmode=verify-full&sslrootcert={other.path}", f"sslmode=verify-ca&sslrootcert={other.path}"):
            with pytest.raises(NotConnected):
                await one(before.port, words)
        assert {SSL_REQUEST} == set(before.clear), "nothing but the wish for TLS came in the clear"


async def test_a_name_that_is_not_in_the_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with Terminating(authority, shared_postgres().port) as before:
        words = f"sslmode=verify-full&sslrootcert={authority.path}"
        with pytest.raises(OncewireError):
            async with connected(f"postgresql://oncewire@localhost:{before.port}/postgres?{words}"):
                pass


@pytest.mark.parametrize("mode", ["require", "verify-full"])
async def test_a_server_without_tls_gets_nothing_from_who_wants_it(tmp_path: Path, mode: str) -> None:
    authority = Authority(tmp_path)
    with Terminating(authority, shared_postgres().port, has_tls=False) as before:
        with pytest.raises(NotConnected):
            await one(before.port, f"sslmode={mode}&sslrootcert={authority.path}")
        assert {SSL_REQUEST} == set(before.clear)
