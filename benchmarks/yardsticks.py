"""What the gateway is measured beside, each as a process of its own: `python -m benchmarks.yardsticks KIND PORT`.

`websockets` is the broadcast example of its documentation; `uvicorn` is a raw ASGI application that streams events.
Both make their messages themselves, when a line on standard input says how many and how fast: they need no stream, keep
no history and cut no slow client.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvloop


async def orders() -> AsyncIterator[tuple[int, float, str]]:
    """Each line: how many messages, seconds between two, and what one looks like, with `{}` for the time."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        yield order["count"], order["pause_s"], order["text"]


async def drive(say: Callable[[str], None]) -> None:
    async for count, pause_s, text in orders():
        begun = time.perf_counter()
        for number in range(count):
            say(text.replace("{}", str(time.time_ns())))
            await asyncio.sleep(max(0.0, begun + (number + 1) * pause_s - time.perf_counter()))
        print("done", flush=True)


async def serve_websockets(port: int) -> None:
    from websockets.asyncio.server import ServerConnection, broadcast, serve

    clients: set[ServerConnection] = set()

    async def handler(websocket: ServerConnection) -> None:
        clients.add(websocket)
        try:
            await websocket.send("joined")
            await websocket.wait_closed()
        finally:
            clients.remove(websocket)

    async with serve(handler, "127.0.0.1", port, compression=None, ping_interval=None):
        print("serving", flush=True)
        await drive(lambda text: broadcast(clients, text))


async def serve_uvicorn(port: int) -> None:
    import uvicorn

    queues: set[asyncio.Queue[bytes]] = set()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        queues.add(queue)
        head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"event: protocol\ndata: joined\n\n", "more_body": True})
        try:
            while True:
                await send({"type": "http.response.body", "body": await queue.get(), "more_body": True})
        finally:
            queues.discard(queue)

    def say(text: str) -> None:
        event = f"event: token\ndata: {text}\n\n".encode()
        for queue in queues:
            queue.put_nowait(event)

    config = uvicorn.Config(app, "127.0.0.1", port, log_level="warning", backlog=4_096)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print("serving", flush=True)
    await drive(say)
    server.should_exit = server.force_exit = True
    await serving


if __name__ == "__main__":
    kinds = {"websockets": serve_websockets, "uvicorn": serve_uvicorn}
    uvloop.run(kinds[sys.argv[1]](int(sys.argv[2])))
