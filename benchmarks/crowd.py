"""A crowd of clients that only count: `python -m benchmarks.crowd`, told what to do by JSON lines, one answer per line.

A plain epoll loop over non-blocking sockets: nothing is parsed but the head, so that the crowd is not what is measured.
Every delivered envelope holds one `|`, which is what is counted, however reads cut the bytes. Every `sample`-th client
also reads the time that stands in each envelope behind `|`, as 19 digits: the latency.

    {"do": "connect", "port": …, "requests": […], "ready": …, "sample": n}    open a socket per request
    {"do": "count", "each": n, "timeout_s": …, "is_from_start": …}            until every client has n deliveries
    {"do": "close"}
"""

from __future__ import annotations

import base64
import json
import select
import socket
import sys
import time
from typing import Any

BUFFER = 1 << 18
AT_ONCE = 200
"""Connections that may be waiting to be accepted."""


class Client:
    """One socket."""

    __slots__ = ("count", "is_in", "is_sampled", "left", "request", "socket", "tail", "target")

    def __init__(self, request: bytes, is_sampled: bool) -> None:
        self.request = request
        self.is_sampled = is_sampled
        self.is_in = False
        self.count = 0
        self.target = 0
        self.tail = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)


class Crowd:
    """All of them."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.clients: dict[int, Client] = {}
        self.buffer = bytearray(BUFFER)
        self.view = memoryview(self.buffer)
        self.latencies: list[int] = []

    def connect(self, port: int, requests: list[str], ready: str, sample: int) -> dict[str, Any]:
        """`ready` is what stands in the last thing a client hears before it is in."""
        begun = time.perf_counter()
        todo = [base64.b64decode(request) for request in requests]
        waiting = 0
        marker = ready.encode()
        while todo or waiting:
            while todo and waiting < AT_ONCE:
                client = Client(todo.pop(), is_sampled=len(todo) % sample == 0)
                client.socket.connect_ex(("127.0.0.1", port))
                self.clients[client.socket.fileno()] = client
                self.poll.register(client.socket.fileno(), select.EPOLLOUT)
                waiting += 1
            for number, _ in self.poll.poll(5.0):
                client = self.clients[number]
                if client.request:
                    client.socket.send(client.request)
                    client.request = b""
                    self.poll.modify(number, select.EPOLLIN)
                    continue
                data = client.socket.recv(BUFFER)
                if not data:
                    raise ConnectionError(f"a client was refused: {client.tail!r}")
                client.count += data.count(b"|")
                if not client.is_in:
                    client.tail += data
                    if marker in client.tail:
                        client.is_in, client.tail = True, b""
                        waiting -= 1
        return {"seconds": time.perf_counter() - begun, "clients": len(self.clients)}

    def count(self, each: int, timeout_s: float, *, is_from_start: bool) -> dict[str, Any]:
        """Until every client has `each` more deliveries, or, from the start, that many in all."""
        clients, buffer, view, poll = self.clients, self.buffer, self.view, self.poll
        self.latencies = []
        left = 0
        for client in clients.values():
            client.target = each + (0 if is_from_start else client.count)
            left += client.count < client.target
        deadline = time.monotonic() + timeout_s
        first = last = 0.0
        reads = 0
        while left and time.monotonic() < deadline:
            for number, _ in poll.poll(1.0):
                client = clients[number]
                size = client.socket.recv_into(view)
                if not size:
                    raise ConnectionError("a client was cut off")
                reads += 1
                first = first or time.perf_counter()
                found = buffer.count(b"|", 0, size)
                was_short = client.count < client.target
                client.count += found
                if client.is_sampled:
                    self.sample(client, bytes(view[:size]))
                if was_short and client.count >= client.target:
                    left -= 1
                    last = time.perf_counter()
        over = sum(max(0, client.count - client.target) for client in clients.values())
        latencies = sorted(self.latencies)
        return {
            "seconds": last - first,
            "missing": left,
            "over": over,
            "reads": reads,
            "p50_ms": latencies[len(latencies) // 2] / 1e6 if latencies else None,
            "p99_ms": latencies[int(len(latencies) * 0.99)] / 1e6 if latencies else None,
            "cpu_s": time.process_time(),
        }

    def sample(self, client: Client, data: bytes) -> None:
        now = time.time_ns()
        data = client.tail + data
        at = data.find(b"|")
        while at >= 0 and len(data) >= at + 20:
            self.latencies.append(now - int(data[at + 1 : at + 20]))
            at = data.find(b"|", at + 20)
        client.tail = data[at:] if at >= 0 else b""

    def close(self) -> dict[str, Any]:
        for number, client in self.clients.items():
            self.poll.unregister(number)
            client.socket.close()
        closed = len(self.clients)
        self.clients.clear()
        return {"closed": closed}


def main() -> None:
    crowd = Crowd()
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "connect":
                answer = crowd.connect(**order)
            case "count":
                answer = crowd.count(**order)
            case _:
                answer = crowd.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
