"""A crowd of clients that come back at once: raw sockets which check that they get each message, in order and once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import cast

from oncewire.gateway.frames import TEXT
from tests.support.wait import until

UPGRADE = (
    "GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
_SEQUENCE = b'"sequence":'


class Returning(asyncio.Protocol):
    """One client. `last` is the last message that it has."""

    def __init__(self, conversation: str, after: int) -> None:
        self.last = after
        self.problem = ""
        self._join = json.dumps({"type": "join_room", "conversationId": conversation, "resumeFromSeq": after}).encode()
        self._held = bytearray()
        self._is_open = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        size = len(self._join)
        assert size < 126
        self.transport.write(UPGRADE.encode() + b"\x81" + bytes([0x80 | size]) + bytes(4) + self._join)

    def data_received(self, data: bytes) -> None:
        held = self._held
        held += data
        if not self._is_open:
            end = held.find(b"\r\n\r\n")
            if end < 0:
                return
            self._is_open = held.startswith(b"HTTP/1.1 101")
            del held[: end + 4]
        at, there = 0, len(held)
        while there - at >= 2:
            size, head = held[at + 1], 2
            if size == 126:
                size, head = int.from_bytes(held[at + 2 : at + 4], "big"), 4
            elif size == 127:
                size, head = int.from_bytes(held[at + 2 : at + 10], "big"), 10
            if there - at < head + size:
                break
            if held[at] == TEXT:  # else it asks whether we live
                self._frame(bytes(held[at + head : at + head + min(size, 300)]))
            at += head + size
        del held[:at]

    def _frame(self, start: bytes) -> None:
        """By its first bytes: envelopes name their sequence before anything long."""
        found = start.find(_SEQUENCE)
        if found < 0:
            if b'"hello"' not in start and b'"joined"' not in start:
                self.problem = self.problem or f"at {self.last}: {start!r}"
            return
        digits = start[found + len(_SEQUENCE) :]
        sequence = int(digits[: next(at for at, byte in enumerate(digits) if byte not in b"0123456789")])
        if sequence != self.last + 1:
            self.problem = self.problem or f"{sequence} after {self.last}"
        self.last = sequence

    def connection_lost(self, error: Exception | None) -> None:
        self.problem = self.problem or f"cut off at {self.last}: {error}"


async def come_back(url: str, conversation: str, positions: list[int], last: int, *, deadline_s: float) -> list[str]:
    """One client for each position; what was wrong, once all have the last message. They stay until then."""
    loop, port = asyncio.get_running_loop(), int(url.rpartition(":")[2])

    async def connect(after: int) -> Returning:
        _, client = await loop.create_connection(lambda: Returning(conversation, after), "127.0.0.1", port)
        return client

    clients: list[Returning] = []
    for at in range(0, len(positions), 200):  # no more than may wait to be accepted
        clients += await asyncio.gather(*(connect(after) for after in positions[at : at + 200]))
    await until(
        lambda: all(client.last >= last or client.problem for client in clients), "the crowd", deadline_s=deadline_s
    )
    problems = [client.problem for client in clients if client.problem]
    for client in clients:
        client.transport.abort()
    return problems


def peak_bytes(process_id: int) -> int:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peak) * 1024
