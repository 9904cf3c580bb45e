"""Reading what a stream holds, without a consumer: direct get of one message, of many, and of the last of each subject.

Any replica may answer a direct get, also one that lags: a short tail is not proof that the tail is not there.
Streams that do not allow direct get answer single reads through the leader (`STREAM.MSG.GET`), which is slower.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from oncewire._ground.errors import (
    NoResponders,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    PermissionDenied,
    ProtocolViolation,
    Refused,
    TimedOut,
    TooLarge,
    Unavailable,
)
from oncewire._ground.jetstream import codes, protocol
from oncewire._ground.jetstream.connection import Connection
from oncewire._ground.jetstream.protocol import Message, parse_time_ns
from oncewire._ground.jetstream.requests import Requests

GET_TIMEOUT_S: Final = 5.0
GET_BATCH_MAX: Final = 1_000
_OWN_HEADERS: Final = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
)


class StoredMessage(msgspec.Struct, frozen=True):
    """A message as the stream holds it. `timestamp` is the server's own text (RFC 3339, nanoseconds, UTC)."""

    stream: str
    subject: str
    sequence: int
    timestamp: str
    headers: dict[str, str]
    payload: bytes

    @property
    def timestamp_ns(self) -> int:
        return parse_time_ns(self.timestamp)


def parse_stored(message: Message) -> StoredMessage:
    """A reply of direct get: the stream's own facts stand among the headers."""
    headers = message.headers
    try:
        return StoredMessage(
            headers["Nats-Stream"],
            headers["Nats-Subject"],
            int(headers["Nats-Sequence"]),
            headers["Nats-Time-Stamp"],
            {name: value for name, value in headers.items() if name not in _OWN_HEADERS},
            message.payload,
        )
    except (KeyError, ValueError):
        raise ProtocolViolation(f"an answer of direct get lacks its headers: {message.header_raw[:120]!r}") from None


async def get_message(
    requests: Requests, stream: str, request: dict[str, Any], timeout_s: float = GET_TIMEOUT_S
) -> StoredMessage:
    """One message by {"seq"}, {"last_by_subj"} or {"seq", "next_by_subj"}. NotFound when there is none."""
    what = f"message {request} of {stream}"
    try:
        reply = await requests.call(
            f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), timeout_s=timeout_s, repeat=True
        )
    except NoResponders:
        return await get_from_leader(requests, stream, request, timeout_s)
    status, text = protocol.parse_status(reply.header_raw)
    if status == 404:
        raise NotFound(f"{what} is not there")
    if status:
        raise Refused(f"{what}: {status} {text}")
    return parse_stored(reply)


async def get_from_leader(
    requests: Requests, stream: str, request: dict[str, Any], timeout_s: float = GET_TIMEOUT_S
) -> StoredMessage:
    """The same from the one server that cannot lag."""
    subject = f"$JS.API.STREAM.MSG.GET.{stream}"
    reply = await requests.call(subject, msgspec.json.encode(request), timeout_s=timeout_s, repeat=True)
    answer = msgspec.json.decode(reply.payload)
    if "error" in answer:
        raise codes.from_api(answer["error"], f"message {request} of {stream}")
    found = answer["message"]
    header = base64.b64decode(found.get("hdrs", ""))
    return StoredMessage(
        stream,
        found["subject"],
        found["seq"],
        found["time"],
        protocol.parse_headers(header),
        base64.b64decode(found.get("data", "")),
    )


async def get_batch(
    connection: Connection,
    stream: str,
    *,
    count: int = GET_BATCH_MAX,
    sequence: int = 1,
    start_time: str = "",
    subject: str = "",
    bytes_max: int = 0,
    timeout_s: float = GET_TIMEOUT_S,
) -> list[StoredMessage]:
    """Up to `count` messages from a sequence or a time on, in order; an empty list when there are none."""
    request: dict[str, Any] = {"batch": min(count, GET_BATCH_MAX)}
    request |= {"start_time": start_time} if start_time else {"seq": max(1, sequence)}
    if subject:
        request["next_by_subj"] = subject
    if bytes_max:
        request["max_bytes"] = bytes_max
    return await _collect(connection, stream, request, timeout_s)


async def get_last_of(
    connection: Connection,
    stream: str,
    subjects: Sequence[str],
    *,
    up_to_sequence: int = 0,
    timeout_s: float = GET_TIMEOUT_S,
) -> list[StoredMessage]:
    """The last message of each subject that matches: one consistent picture, at `up_to_sequence` when given.

    TooLarge when more subjects match than the server puts into one answer (1,024).
    """
    request: dict[str, Any] = {"multi_last": list(subjects)}
    if up_to_sequence:
        request["up_to_seq"] = up_to_sequence
    return await _collect(connection, stream, request, timeout_s)


class _Collector:
    """Gathers the replies of one batched get until the server says that it was the last. Listens for loss meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop, subject: str) -> None:
        self.messages: list[Message] = []
        self.done: asyncio.Future[tuple[int, str]] = loop.create_future()
        self.done.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self.subject = subject

    def on_reply(self, number: int, message: Message) -> None:  # noqa: ARG002 - the reply's shape
        status, text = protocol.parse_status(message.header_raw)
        if not status:
            self.messages.append(message)
        elif not self.done.done():
            self.done.set_result((status, text))

    def _fail(self, error: OncewireError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def on_connected(self) -> None:
        """The one who waits asks again."""

    def on_lost(self, reason: str) -> None:
        self._fail(OutcomeUnknown(f"the connection broke while reading: {reason}"))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        if subject == self.subject:
            self._fail(error)

    def in_flight(self) -> int:
        return 1


async def _ask(
    connection: Connection, collector: _Collector, request: dict[str, Any], deadline: float
) -> tuple[int, str]:
    number = connection.take_numbers()
    connection.replies[number] = collector.on_reply
    connection.listeners.append(collector)
    subject = protocol.encode_subject(collector.subject)
    try:
        connection.write(protocol.encode_pub(subject, connection.reply_to(number), msgspec.json.encode(request)))
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await collector.done
    finally:
        connection.listeners.remove(collector)
        connection.replies.pop(number, None)


async def _collect(
    connection: Connection, stream: str, request: dict[str, Any], timeout_s: float
) -> list[StoredMessage]:
    """Ask, and ask again when the connection breaks: reading twice changes nothing."""
    deadline = time.monotonic() + timeout_s
    while True:
        await connection.ready(deadline)
        collector = _Collector(connection.loop, f"$JS.API.DIRECT.GET.{stream}")
        try:
            status, text = await _ask(connection, collector, request, deadline)
            break
        except OutcomeUnknown:
            continue
        except TimeoutError:
            raise TimedOut(f"reading {stream} took longer than {timeout_s} s, {len(collector.messages)} came") from None
    if status == 404:
        return []
    if status == 503:
        raise Unavailable(f"stream {stream} does not answer direct get", hint="Is allow_direct on, does it exist?")
    if status == 413:
        raise TooLarge(f"reading {stream}: {text}", hint="Ask for fewer subjects, or read the stream.")
    if status != 204:
        raise (OutcomeUnknown if status >= 500 else Refused)(f"reading {stream}: {status} {text}")
    return [parse_stored(message) for message in collector.messages]
