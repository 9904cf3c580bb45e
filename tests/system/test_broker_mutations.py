"""Requests with a few bytes wrong, from a seed: each is answered or closed, none with a 5xx."""

from __future__ import annotations

import contextlib
import json
import random
import re

from tests.support.http import Wire, get, post, wire
from tests.system.test_broker_edge import BODIES, SEED, port

__all__ = ["port"]  # the fixture
MUTATIONS = 400


def mutated(chance: random.Random, request: bytes) -> bytes:
    """A request with one to four things wrong."""
    sent = bytearray(request)
    for _ in range(chance.randint(1, 4)):
        if not sent:
            break
        at = chance.randrange(len(sent))
        kind = chance.randrange(6)
        if kind == 0:
            sent[at] = chance.randrange(256)
        elif kind == 1:
            del sent[at : at + chance.randint(1, 20)]
        elif kind == 2:
            sent[at:at] = chance.choice(
                [b"\r\n", b"\n", b"\r", b"\0", b" ", b"\xff", b"%", b"{", b'"', b"0\r\n\r\n", b"GET / HTTP/1.1\r\n"]
            )
        elif kind == 3:
            piece = bytes(sent[at : at + chance.randint(1, 60)])
            sent[at:at] = piece
        elif kind == 4:
            sent[at:at] = chance.choice(
                [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: evil\r\n"]
            )
        else:
            sent = sent[: at + 1]
    return bytes(sent)


async def read_all(client: Wire) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await client.reader.read()
    return b""


async def test_mutated_requests_never_get_a_5xx_and_leave_the_broker_well(port: int) -> None:
    """From a seed: a failing one is the same in every run."""
    chance = random.Random(SEED)
    pattern = [post(path, json.dumps(body).encode()) for path, body in BODIES.items()]
    pattern += [get("/v1/topics"), get("/v1/consume?topic=t&group=g&owner=a&max=1"), get("/metrics")]
    pattern.append(
        b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'1a\r\n{"topic": "t", "value": "v\r\n2\r\n"}\r\n0\r\n\r\n'
    )
    for number in range(MUTATIONS):
        sent = b"".join(mutated(chance, chance.choice(pattern)) for _ in range(chance.randint(1, 3)))
        async with wire(port) as client:
            await client.send(sent, eof=True)
            for status in re.findall(rb"HTTP/1\.1 ([0-9]{3}) [A-Z]", await read_all(client)):
                assert status < b"500", (number, sent)
    async with wire(port) as client:
        assert 200 == (await client.ask(get("/v1/healthz"))).status
