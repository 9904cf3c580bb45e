"""What a NATS server really syncs. It says so over its system account (jetstream/system.py) and on its monitoring port.

By default a server acknowledges before it syncs (every 2 minutes), and a power cut loses what was acknowledged since.
Nothing on the client's connection tells the two kinds apart, so without either the answer is `unknown`, which is never
shown as good.

`durability` is pure; `ask` and `ask_json` are the shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import SplitResult, urlsplit

from oncewire._ground.errors import InvalidSetting, NotConnected, ProtocolViolation, TimedOut

ANSWER_BYTES_MAX = 4 << 20
ANSWER_S_MAX = 5.0


class Promise(StrEnum):
    """What an acknowledgement of the server is worth."""

    POWER = "power"
    """It survives a power cut: the server syncs before it acknowledges."""
    CRASH = "crash"
    """It survives the end of the server process, but not always a power cut."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Durability:
    """The promise that holds, and the sentence that says so."""

    promise: Promise
    text: str


def durability(answers: Sequence[Mapping[str, Any]], server_id: str = "") -> Durability:
    """Judge `/jsz` answers of the servers in use: all of a cluster, or the promise is not known.

    `server_id` is the server that the client is connected to: a monitoring address of another server proves nothing.
    """
    if not answers:
        return _unknown("neither the system account nor a monitoring address was asked")
    if server_id and server_id not in {answer.get("server_id") for answer in answers}:
        return _unknown("what was asked is another server than the one connected to")
    cluster_size = max(_cluster_size(answer) for answer in answers)
    asked = len({answer.get("server_id") for answer in answers})
    if asked < cluster_size:
        return _unknown(f"{asked} of {cluster_size} servers of the cluster answered")
    return max((_one(answer) for answer in answers), key=_badness)


def _one(answer: Mapping[str, Any]) -> Durability:
    if answer.get("disabled"):
        return _unknown("JetStream is off")
    config = answer.get("config") or {}
    if config.get("sync_always") is True:
        return Durability(Promise.POWER, "what is acknowledged survives a power cut (the server syncs always)")
    interval_ns = config.get("sync_interval")
    if not isinstance(interval_ns, int):
        return _unknown("the server does not say when it syncs")
    return Durability(
        Promise.CRASH,
        f"a power cut loses what was acknowledged in the last {interval_ns / 1e9:g} s (sync_interval); "
        "a crash of the server loses nothing",
    )


def _badness(one: Durability) -> int:
    return (Promise.POWER, Promise.CRASH, Promise.UNKNOWN).index(one.promise)


def _cluster_size(answer: Mapping[str, Any]) -> int:
    size = (answer.get("meta_cluster") or {}).get("cluster_size", 1)
    return size if isinstance(size, int) else 1


def _unknown(why: str) -> Durability:
    return Durability(Promise.UNKNOWN, f"not known whether a power cut loses what is acknowledged: {why}")


Trust = Callable[[], ssl.SSLContext]
"""Whom to believe at an https address; asked for each connection, so that renewed files count."""


async def ask_json(url: str, path: str, trust: Trust = ssl.create_default_context) -> dict[str, Any]:
    """The answer of a monitoring endpoint such as `/jsz`."""
    status, body = await ask(url, path, trust)
    where = _shown(urlsplit(url))
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if status != 200 or not isinstance(answer, dict):
        raise ProtocolViolation(
            f"{where}{path} does not answer like a NATS monitoring port (status {status})",
            hint="Check NATS_MONITOR_URL; the server's `http` setting names its monitoring port.",
        )
    return answer


async def ask(url: str, path: str, trust: Trust = ssl.create_default_context) -> tuple[int, bytes]:
    """GET `path`: status and body."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidSetting("that is not a monitoring address", hint="Write it like http://host:8222.")
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            tls = trust() if parts.scheme == "https" else None
            raw = await _exchange(parts.hostname, parts.port, tls, parts.path.rstrip("/") + path)
    except TimeoutError:
        raise TimedOut(f"{_shown(parts)} did not answer within {ANSWER_S_MAX:g} s") from None
    except ssl.SSLError as error:
        raise NotConnected(
            f"{_shown(parts)} cannot be trusted: {error}", hint="Check nats.ca and the address of the monitoring port."
        ) from None
    except OSError as error:
        raise NotConnected(f"{_shown(parts)} cannot be reached: {error.strerror or error}") from None
    head, _, body = raw.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), body


def _shown(parts: SplitResult) -> str:
    """The address without what somebody may have put before its host."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


async def _exchange(host: str, port: int | None, tls: ssl.SSLContext | None, path: str) -> bytes:
    # HTTP/1.0: the server closes after its answer, and never answers in chunks.
    reader, writer = await asyncio.open_connection(host, port or (443 if tls else 80), ssl=tls)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        chunks = bytearray()
        while len(chunks) < ANSWER_BYTES_MAX and (chunk := await reader.read(1 << 16)):
            chunks += chunk
        return bytes(chunks)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
