"""The servers that the HTTP benchmarks load, each as a process of its own: `python -m benchmarks.serve KIND FOLDER`.

Prints its port when it serves, ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from oncewire._ground.contracts.broker import decode_produce
from oncewire._ground.http import OPEN, Request, Routes, Server
from oncewire._ground.settings import resolve
from oncewire.cli.broker import serving

ANSWER = b'{"status":"produced","topic":"t"}'
ROOM = {"broker_partition_messages_max": 10**9, "broker_partition_bytes_max": 2**40, "broker_in_flight_max": 10**5}


@contextlib.asynccontextmanager
async def bare(decodes: bool) -> AsyncIterator[int]:
    """The front alone: every request gets the same answer. With `decodes` the body is read and checked first."""

    def handle(request: Request) -> None:
        if decodes:
            decode_produce(request.body)
        request.respond(200, ANSWER)

    routes = Routes(lambda request: request.refuse(404, "NOT_FOUND", "not found"))
    routes.add("POST", "/v1/produce", handle, action=OPEN)
    server = Server(routes)
    await server.start("127.0.0.1", 0)
    yield server.port
    await server.stop(0.1)


@contextlib.asynccontextmanager
async def broker(folder: str) -> AsyncIterator[int]:
    flags: dict[str, Any] = {**ROOM, "broker_listen": "127.0.0.1:0", "broker_wal": folder}
    async with serving(resolve(flags, {}, {}).settings) as (server, _):
        yield server.port


@contextlib.asynccontextmanager
async def asgi() -> AsyncIterator[int]:
    """uvicorn with an application that does no more than the bare front with decoding."""
    import uvicorn

    async def app(_: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        decode_produce(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})

    config = uvicorn.Config(
        app, port=0, log_level="error", access_log=False, http="httptools", loop="uvloop", lifespan="off"
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def main() -> None:
    kind, folder = sys.argv[1:]
    kinds = {
        "bare": lambda: bare(False),
        "decoding": lambda: bare(True),
        "memory": lambda: broker(""),
        "log": lambda: broker(str(Path(folder) / "wal")),
        "uvicorn": asgi,
    }
    async with kinds[kind]() as port:
        print(port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
