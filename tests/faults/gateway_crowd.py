"""Clients of rooms in a process of their own, through every kill: half of them ours, half strict witnesses.

    python -m tests.faults.gateway_crowd '{"urls": […], "rooms": […], "clients": 100, "witnesses": 100}'

A witness is written on the `websockets` library alone. It forgives nothing: on each connection the messages of its
room must be last + 1, last + 2, …, from the sequence that it asked to resume behind. Prints "ready", then reads one
line (the last sequence of every room), waits until everybody has it, and prints a report.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import websockets
from websockets.asyncio.client import connect

from oncewire import GatewayClient
from oncewire.gateway.client import Limits

DEADLINE_S = 120.0
RETRY_S = 0.2
LIMITS = Limits(backoff_first_ms=200, backoff_most_ms=2_000, heartbeat_ms=1_000, silence_ms=5_000)


@dataclass
class Log:
    """What one client has seen."""

    kind: str
    room: str
    seen: list[int] = field(default_factory=list)
    connections: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.seen[-1] if self.seen else 0


async def follow(url: str, log: Log) -> None:
    """Our client. The loop's body counts: what it has seen is what it was given."""

    def gap(missing: Any) -> None:
        log.problems.append(f"gap {missing.first}–{missing.last}")

    async with GatewayClient(url, limits=LIMITS) as client:

        def changed(state: Any) -> None:
            log.connections += state.state == "open"

        client.states.append(changed)
        async for message in client.room(log.room, resume=0, on_gap=gap):
            if message.sequence != log.last + 1:
                log.problems.append(f"{message.sequence} after {log.last}")
            log.seen.append(message.sequence)


async def watch(url: str, log: Log) -> None:
    """A witness."""
    address = url.replace("http", "ws", 1) + "/ws"
    while True:
        try:
            async with connect(address, open_timeout=10, ping_interval=2, ping_timeout=4, max_size=None) as socket:
                log.connections += 1
                join = {"type": "join_room", "conversationId": log.room, "resumeFromSeq": log.last}
                await socket.send(json.dumps(join))
                async for text in socket:
                    note(log, json.loads(text))
        except (OSError, TimeoutError, websockets.WebSocketException):
            pass
        await asyncio.sleep(RETRY_S)


def note(log: Log, frame: dict[str, Any]) -> None:
    if "control" in frame:
        log.problems.append(f"control frame at {log.last}: {frame['control']}")
    elif frame.get("event", {}).get("type") == "chat.message.created":
        if frame["sequence"] != log.last + 1:
            log.problems.append(f"{frame['sequence']} after {log.last} on connection {log.connections}")
        log.seen.append(frame["sequence"])


async def main() -> None:
    plan = json.loads(sys.argv[1])
    urls, rooms = plan["urls"], plan["rooms"]
    logs, tasks = [], []
    for kind, act, count in (("client", follow, plan["clients"]), ("witness", watch, plan["witnesses"])):
        for number in range(count):
            log = Log(kind, rooms[number % len(rooms)])
            logs.append(log)
            tasks.append(asyncio.create_task(act(urls[number // len(rooms) % len(urls)], log)))
    while not all(log.connections for log in logs):
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    last = json.loads(line)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while any(log.last < last for log in logs):
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    report = {
        "clients": len(logs),
        "complete": sum(log.seen == list(range(1, last + 1)) for log in logs),
        "connections": sum(log.connections for log in logs),
        "problems": [f"{log.kind} of {log.room}: {problem}" for log in logs for problem in log.problems][:20],
        "short": [f"{log.kind} of {log.room}: {log.last} of {last}" for log in logs if log.last < last][:20],
        "failed": [repr(task.exception()) for task in tasks if task.done()][:5],
    }
    print(json.dumps(report), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
