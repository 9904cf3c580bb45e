"""A process of its own that says "still at it" for inputs in hand.

A handler may hold the interpreter for seconds (one regular expression is enough), and then no thread of its process can
send anything: the server would deliver its inputs to somebody else. So this process holds a connection of its own and
extends every input that it was told of, each third of ack_wait, until it is told that the input is settled or the
handler's time is up. It ends when its parent does: its input closes.

Nothing is pulled before it is up. With a TLS context of the user's own, which no other process can have, the loop of
this process does it instead, and a handler that holds the interpreter silences it.

One byte on stdout says that it is up. Lines on stdin: first the settings as JSON (never on the command line: they hold
credentials), then `w <token> <seconds> <seconds> <reply> <reply> …`, or for a run of sequences `r <token> <seconds>
<seconds> <begin of the replies> <first> <count>`, and `d <token>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from oncewire._ground.errors import OncewireError
from oncewire._ground.fields import columns
from oncewire._ground.jetstream import Client, Options
from oncewire._ground.jetstream.options import DEFAULT_INBOX_PREFIX
from oncewire._ground.jetstream.protocol import encode_acks
from oncewire._ground.jetstream.pull import IN_PROGRESS, Delivery

log = logging.getLogger("oncewire.agent")

LINE_BYTES_MAX = 16 * 1024 * 1024


class Settings(msgspec.Struct):
    """What the child must know to connect."""

    servers: tuple[str, ...]
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    inbox_prefix: str = DEFAULT_INBOX_PREFIX


class KeepAlive:
    """The parent's side."""

    def __init__(self, client: Client, interval_s: float, limit_s: float) -> None:
        self._client = client
        self._options = client.connection.options
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._extending: asyncio.Task[None] | None = None
        self._held: dict[bytes, _Held] = {}
        self._token = 0

    async def start(self) -> None:
        """Begin; `ready` says when inputs may come."""
        if self._options.tls is not None:
            self._start_task()
        else:
            await self._start_process()

    def _start_task(self) -> None:
        self._extending = asyncio.get_running_loop().create_task(_extend(self._client, self._held, is_open=True))

    async def ready(self) -> None:
        """Until the process is up, a second on a busy machine. One that failed to start is started again by `check`."""
        if self._process is not None and self._process.stdout is not None:
            await self._process.stdout.read(1)

    async def check(self) -> None:
        """Start it again if something ended it: inputs that it watched may come back, which is harmless."""
        if self._process is not None and self._process.returncode is not None:
            log.warning("the keep-alive process ended with %d and is started again", self._process.returncode)
            await self._start_process()
        if self._extending is not None and self._extending.done():
            error = None if self._extending.cancelled() else self._extending.exception()
            log.error("the keep-alive task ended and is started again", exc_info=error)
            self._start_task()

    async def _start_process(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "oncewire.agent.keepalive"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        o = self._options
        settings = Settings(o.servers, o.user, o.password, o.token, o.creds, o.nkey, o.inbox_prefix)
        self._write(msgspec.json.encode(settings) + b"\n")

    def watch(self, replies: list[bytes]) -> int:
        """From now on these inputs are extended, until `release`."""
        return self._watch(b"w", replies)

    def watch_all(self, replies: list[bytes], deliveries: Sequence[Delivery]) -> int:
        """The same for what came together from one consumer. Mostly that is a run of sequences, and its ends say it."""
        first, count = deliveries[0].sequence, len(deliveries)
        head = replies[0].rsplit(b".", 5)[0]
        (sequences,) = columns(deliveries, Delivery, "sequence")
        if head.count(b".") != _HEAD_DOTS or sequences != list(range(first, first + count)):
            return self.watch(replies)
        return self._watch(b"r", [head, b"%d" % first, b"%d" % count])

    def _watch(self, verb: bytes, words: list[bytes]) -> int:
        self._token += 1
        token = b"%d" % self._token
        if self._extending is not None:
            self._held[token] = _held(verb, words, self._interval_s, self._limit_s)
        else:
            self._write(b"%b %b %.3f %.3f %b\n" % (verb, token, self._interval_s, self._limit_s, b" ".join(words)))
        return self._token

    def release(self, token: int) -> None:
        if self._extending is not None:
            self._held.pop(b"%d" % token, None)
        else:
            self._write(b"d %d\n" % token)

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    async def stop(self) -> None:
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.gather(self._extending, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


_HEAD_DOTS = 3
"""`$JS.ACK.<stream>.<consumer>`. Replies of another form are told one by one."""


class _Held(msgspec.Struct):
    words: list[bytes]
    is_run: bool
    due_at: float
    interval_s: float
    until: float

    @property
    def replies(self) -> list[bytes]:
        """Of a run the sequence alone: that is all by which the server finds an input that goes on."""
        if not self.is_run:
            return self.words
        head, first, count = self.words
        return [b"%b.1.%d.0.0.0" % (head, at) for at in range(int(first), int(first) + int(count))]


def _held(verb: bytes, words: list[bytes], interval_s: float, limit_s: float) -> _Held:
    now = time.monotonic()
    return _Held(words, verb == b"r", now + interval_s, interval_s, now + limit_s)


async def _serve(reader: asyncio.StreamReader) -> None:
    line = await reader.readline()
    if not line.endswith(b"\n"):  # the agent died before it had said all of it
        return
    settings = msgspec.json.decode(line, type=Settings)
    options = Options(
        servers=settings.servers,
        name="oncewire-keepalive",
        user=settings.user,
        password=settings.password,
        token=settings.token,
        creds=settings.creds,
        nkey=settings.nkey,
        inbox_prefix=settings.inbox_prefix,
    )
    held: dict[bytes, _Held] = {}
    client = Client(options)
    extending, reading = asyncio.create_task(_extend(client, held)), asyncio.create_task(_read(reader, held))
    try:
        ended, _ = await asyncio.wait((extending, reading), return_when=asyncio.FIRST_COMPLETED)
        for task in ended:  # if it extends no more, it ends: the agent starts another
            task.result()
    finally:
        for task in (extending, reading):
            task.cancel()
        await asyncio.gather(extending, reading, return_exceptions=True)
        await client.close()


async def _read(reader: asyncio.StreamReader, held: dict[bytes, _Held]) -> None:
    while (line := await reader.readline()).endswith(b"\n"):
        verb, token, *rest = line.split()
        if verb == b"d":
            held.pop(token, None)
        else:
            held[token] = _held(verb, rest[2:], float(rest[0]), float(rest[1]))


async def _extend(client: Client, held: dict[bytes, _Held], *, is_open: bool = False) -> None:
    while True:
        await asyncio.sleep(0.1)
        now = time.monotonic()
        due = [one for one in held.values() if one.due_at <= now < one.until]
        if not due:
            continue
        with contextlib.suppress(OncewireError):
            if not is_open:
                await client.open()  # a connection only once an input really takes long
                is_open = True
            for one in due:
                client.connection.write(encode_acks(one.replies, IN_PROGRESS))
                one.due_at = now + one.interval_s


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    protocol: Any = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, sys.stdin)
    with contextlib.suppress(BrokenPipeError):  # the agent died while this process started
        os.write(sys.stdout.fileno(), b"r")
        await _serve(reader)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
