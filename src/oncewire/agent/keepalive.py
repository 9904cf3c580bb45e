"""A process of its own that says "still at it" for inputs in hand.

A handler may hold the interpreter for seconds (one regular expression is enough), and then no thread of its process can
send anything: the server would deliver its inputs to somebody else. So this process holds a connection of its own and
extends every input that it was told of, each third of ack_wait, until it is told that the input is settled or the
handler's time is up. It ends when its parent does: its input closes.

Nothing is pulled before it is up. With a TLS context of the user's own, which no other process can have, the loop of
this process does it instead, and a handler that holds the interpreter silences it.

One byte on stdout says that it is up. Lines on stdin: first the settings as JSON (never on the command line: they hold
credentials), then `w <token> <seconds> <seconds> <reply> <reply> …` and `d <token>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import msgspec

from oncewire.errors import OncewireError
from oncewire.jetstream import Client, Options
from oncewire.jetstream.options import DEFAULT_INBOX_PREFIX
from oncewire.jetstream.protocol import encode_acks
from oncewire.jetstream.pull import IN_PROGRESS

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
            self._extending = asyncio.get_running_loop().create_task(_extend(self._client, self._held, is_open=True))
        else:
            await self._start_process()

    async def ready(self) -> None:
        """Until the process is up, a second on a busy machine. One that failed to start is started again by `check`."""
        if self._process is not None and self._process.stdout is not None:
            await self._process.stdout.read(1)

    async def check(self) -> None:
        """Start it again if something killed it: inputs that it watched may come back, which is harmless."""
        if self._process is not None and self._process.returncode is not None:
            await self._start_process()

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
        self._token += 1
        if self._extending is not None:
            now = time.monotonic()
            held = _Held(replies, now + self._interval_s, self._interval_s, now + self._limit_s)
            self._held[b"%d" % self._token] = held
        else:
            head = b"w %d %.3f %.3f " % (self._token, self._interval_s, self._limit_s)
            self._write(head + b" ".join(replies) + b"\n")
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


class _Held(msgspec.Struct):
    replies: list[bytes]
    due_at: float
    interval_s: float
    until: float


async def _serve(reader: asyncio.StreamReader) -> None:
    settings = msgspec.json.decode(await reader.readline(), type=Settings)
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
    extending = asyncio.create_task(_extend(client, held))
    try:
        while line := await reader.readline():
            verb, token, *rest = line.split()
            if verb == b"d":
                held.pop(token, None)
            else:
                now = time.monotonic()
                interval_s, limit_s = float(rest[0]), float(rest[1])
                held[token] = _Held(rest[2:], now + interval_s, interval_s, now + limit_s)
    finally:
        extending.cancel()
        await asyncio.gather(extending, return_exceptions=True)
        await client.close()


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
    sys.stdout.write("r")
    sys.stdout.flush()
    await _serve(reader)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
