"""Gateway nodes and their nats-server, killed under load while a crowd follows rooms in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oncewire
from oncewire._ground.jetstream import Client, Outgoing, PubAck
from tests.support.gateway import Running, message, new_conversation
from tests.support.nats import NatsServer
from tests.support.streams import witness
from tests.support.wait import DEADLINE_S, within

ROOT = Path(__file__).parents[2]


class Crowd:
    """`tests.faults.gateway_crowd`, half our clients and half witnesses."""

    def __init__(self, urls: Sequence[str], rooms: Sequence[str], clients: int) -> None:
        self._plan = {"urls": urls, "rooms": rooms, "clients": clients // 2, "witnesses": clients - clients // 2}

    async def start(self) -> Crowd:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "tests.faults.gateway_crowd", json.dumps(self._plan)]
        self._process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert b"ready\n" == await within(self._hear(), 4 * DEADLINE_S)
        return self

    async def _hear(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def report(self, last: int) -> dict[str, Any]:
        """What they say once everybody has the last message of its room."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(last).encode() + b"\n")
        found: dict[str, Any] = json.loads(await within(self._hear(), 6 * DEADLINE_S))
        return found

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Speaker:
    """Says one message after the other in every room, each until it is stored, and each once."""

    def __init__(self, client: Client, rooms: Sequence[str], *, pause_s: float) -> None:
        self._client = client
        self._rooms = rooms
        self._pause_s = pause_s
        self.said = 0
        self._is_ending = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._is_ending:
            await self._say(self.said + 1)
            self.said += 1
            await asyncio.sleep(self._pause_s)

    async def _say(self, sequence: int) -> None:
        waiting = [self._message(room, sequence) for room in self._rooms]
        while waiting:
            found = await self._client.publish_many(waiting, 5.0)
            waiting = [one for one, ack in zip(waiting, found, strict=True) if not isinstance(ack, PubAck)]
            if waiting:
                await asyncio.sleep(0.05)

    def _message(self, room: str, sequence: int) -> Outgoing:
        told = message(room, sequence)
        return Outgoing(told.subject, told.payload, msg_id=f"{room}-{sequence}", headers=told.headers)

    async def end(self) -> int:
        """The last sequence of every room."""
        self._is_ending = True
        await within(self._task, 2 * DEADLINE_S)
        return self.said


async def stored_sequences(url: str, rooms: Sequence[str]) -> dict[str, list[int]]:
    """What really stands in the stream, read by a client that is not ours."""
    found: dict[str, list[int]] = {room: [] for room in rooms}
    async with witness(url) as connection:
        jetstream = connection.jetstream()
        left = (await jetstream.stream_info("CHAT_EVENTS")).state.messages
        sub = await jetstream.pull_subscribe("", stream="CHAT_EVENTS")
        while left:
            batch = await sub.fetch(min(left, 500), timeout=10)
            left -= len(batch)
            for one in batch:
                kind, _, room = one.subject.rpartition(".")
                if kind == "chat.events":
                    found[room].append(json.loads(one.data)["sequence"])
                await one.ack()
        await sub.unsubscribe()
    return found


async def storm(
    server: NatsServer, victims: Sequence[str], *, clients: int, rooms: int, nodes: int = 2, pause_s: float = 0.02
) -> dict[str, Any]:
    """Kill each victim in turn ("nats", or a node by its number) while messages flow. The crowd's report."""
    names = [new_conversation() for _ in range(rooms)]
    async with oncewire.connect(server.url) as client:
        await oncewire.init_streams(client)
        running = [await asyncio.to_thread(Running, server.url) for _ in range(nodes)]
        crowd = Crowd([node.url for node in running], names, clients)
        try:
            await crowd.start()
            speaker = Speaker(client, names, pause_s=pause_s)
            for victim in victims:
                await _flow(speaker)
                if victim == "nats":
                    server.kill()
                    await asyncio.to_thread(server.start)
                else:
                    node = running[int(victim)]
                    _kill(node)
                    await _flow(speaker)
                    again = f"127.0.0.1:{node.port}"
                    running[int(victim)] = await asyncio.to_thread(Running, server.url, listen=again)
            await _flow(speaker)
            last = await speaker.end()
            report = await crowd.report(last)
            stored = await stored_sequences(server.url, names)
        finally:
            await crowd.stop()
            for node in running:
                _kill(node)
    report["last"] = last
    report["is_stored_once"] = all(found == list(range(1, last + 1)) for found in stored.values())
    return report


def _kill(node: Running) -> None:
    node.kill()
    node.stop()  # closes what it said


async def _flow(speaker: Speaker, messages: int = 15) -> None:
    """Until some more messages are out: then there is something to be in the middle of."""
    target = speaker.said + messages
    while speaker.said < target:
        await asyncio.sleep(0.01)


def assert_all_once_in_order(report: dict[str, Any], clients: int) -> None:
    """Every client saw every message of its room once and in order, and the stream holds just these."""
    assert report["is_stored_once"], report
    assert [] == report["failed"] == report["problems"] == report["short"], report
    assert clients == report["clients"] == report["complete"], report
