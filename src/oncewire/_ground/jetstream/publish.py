"""Confirmed publishing: windows of messages, each answered by a PubAck under its own reply number.

A window is what went out together: one message, or some hundreds. Its frames are kept until they are confirmed, so
that what a broken connection left open can be sent again *under the same id*:

    answer                                   what happens
    PubAck                                   settled
    error                                    settled with that error; a cluster that is electing: sent again
    no responders                            stored nowhere: sent again while a stream for the subject exists
    none, connection lost, has an id         sent again after the reconnect; the server drops the double
    none, connection lost, no id             OutcomeUnknown: it may stand in the stream
    none, connection fine, has an id         sent again after RESEND_S: a leader may have died with it
    none until the deadline                  OutcomeUnknown

A message that carries an expectation is never sent again: a repeat of what was stored would be answered with a
conflict, and that would be a lie. Its sender looks into the stream.

Atomic batches are JetStream's group commit: all or nothing, one sync for all. `publish_all` uses them where it can and
falls back to single publishes under the same ids when a batch is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import repeat
from typing import Final

import msgspec

from oncewire._ground.contracts.headers import REPLAY_FOR
from oncewire._ground.errors import (
    Conflict,
    ContractViolation,
    NotFound,
    OncewireError,
    OutcomeUnknown,
    PermissionDenied,
    ProtocolViolation,
    Refused,
    Unavailable,
)
from oncewire._ground.jetstream import codes, protocol
from oncewire._ground.jetstream.connection import Connection
from oncewire._ground.jetstream.options import State
from oncewire._ground.jetstream.plain import Numbered, cut, plain_frames
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.unwritable import wrong_message
from oncewire._ground.metrics import Histogram

PUBLISH_TIMEOUT_S: Final = 20.0
"""Longer than a cluster needs to elect a new leader (4 to 6 s)."""
PENDING_MAX: Final = 8_192
PENDING_BYTES_MAX: Final = 32 * 1024 * 1024
WINDOW_MESSAGES: Final = 512
WINDOW_BYTES: Final = 4 * 1024 * 1024
RESEND_S: Final = 3.0
SWEEP_S: Final = 0.25
RETRY_DELAY_S: Final = 0.1
RETRY_DELAY_MAX_S: Final = 1.0
BATCH_MESSAGES_MAX: Final = 1_000
BATCH_BYTES_MAX: Final = 32 * 1024 * 1024
BATCHES_OPEN_MAX: Final = 8
DEAD_LETTER_RESERVE: Final = 16 * 1024
"""Kept free below max_payload, so that a dead letter with its own headers always fits."""
LETTER_HEADER_BYTES_MAX: Final = 60 * 1024
"""A letter carries the original's headers besides its own; the server takes 64 KiB."""
_LETTERS: Final = ("dlq.", "dlq_requests.")


class PubAck(msgspec.Struct, frozen=True, gc=False, rename={"sequence": "seq"}):
    """The server has stored it: in which stream, at which sequence, and whether it stood there already."""

    stream: str
    sequence: int
    is_duplicate: bool = msgspec.field(default=False, name="duplicate")
    domain: str = ""
    batch: str = ""
    count: int = 0


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message to publish. With `msg_id` it can be sent again without a double; expectations exclude that."""

    subject: str
    payload: bytes
    msg_id: str = ""
    headers: Mapping[str, str] | None = None
    expected_stream: str = ""
    expected_last_sequence: int | None = None
    expected_last_subject_sequence: int | None = None
    traceparent: str = ""

    @property
    def may_repeat(self) -> bool:
        if self.msg_id == "" or self.expected_last_sequence is not None:
            return False
        if self.expected_last_subject_sequence is not None:
            return False
        return not self.headers or not any(name.startswith("Nats-Expected-Last-") for name in self.headers)


def reserve_of(subject: str, headers: Mapping[str, str] | None = None) -> int:
    """What a message leaves free below max_payload: letters, requests for them and what they bring back, nothing."""
    is_free = subject.startswith(_LETTERS) or (headers is not None and REPLAY_FOR in headers)
    return 0 if is_free else DEAD_LETTER_RESERVE


Outcome = PubAck | OncewireError
Api = Callable[[str, dict[str, object]], Awaitable[dict[str, object]]]

_decode_ack = msgspec.json.Decoder(PubAck).decode
_decode_json = msgspec.json.Decoder(dict[str, object]).decode


def encode_header(message: Outgoing, extra: str = "") -> bytes:
    """The header block of a message; `extra` are lines of our own, already in wire form."""
    trace = message.traceparent
    plain = message.msg_id + trace
    if (
        not message.headers
        and plain.isascii()
        and plain.isprintable()
        and not message.expected_stream
        and message.expected_last_sequence is None
        and message.expected_last_subject_sequence is None
    ):
        if trace:
            extra = f"traceparent: {trace}\r\n{extra}"
        if message.msg_id:
            return f"NATS/1.0\r\nNats-Msg-Id: {message.msg_id}\r\n{extra}\r\n".encode()
        return f"NATS/1.0\r\n{extra}\r\n".encode() if extra else b""
    bytes_max = LETTER_HEADER_BYTES_MAX if message.subject.startswith(_LETTERS) else protocol.HEADER_BYTES_MAX
    block = protocol.encode_headers(_all_headers(message), bytes_max)
    return block[:-2] + extra.encode() + protocol.CRLF if extra else block


def _all_headers(message: Outgoing) -> dict[str, str]:
    headers = dict(message.headers or {})
    if message.msg_id:
        headers[protocol.MSG_ID] = message.msg_id
    if message.traceparent:
        headers["traceparent"] = message.traceparent
    if message.expected_stream:
        headers["Nats-Expected-Stream"] = message.expected_stream
    if message.expected_last_sequence is not None:
        headers["Nats-Expected-Last-Sequence"] = str(message.expected_last_sequence)
    if message.expected_last_subject_sequence is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(message.expected_last_subject_sequence)
    return headers


def parse_ack(payload: bytes, subject: str) -> Outcome:
    """A PubAck, or the error in its place."""
    if b'"error"' in payload:
        with contextlib.suppress(msgspec.DecodeError):
            problem = _decode_json(payload).get("error")
            if isinstance(problem, dict):
                return codes.from_api(problem, f"publish to {subject}")
    try:
        return _decode_ack(payload)
    except msgspec.DecodeError:
        return ProtocolViolation(
            f"publish to {subject} was answered with {payload[:80]!r}, which is no PubAck",
            hint="Is something other than a stream listening on that subject?",
        )


class _Window:
    """Messages that went out together and the answers so far."""

    __slots__ = (
        "base", "begun", "deadline", "done", "frames", "left", "messages", "owner", "resend_at", "results", "retries",
    )  # fmt: skip

    def __init__(self, owner: Publisher, messages: Sequence[Outgoing], frames: list[bytes], base: int) -> None:
        self.owner = owner
        self.messages = messages
        self.frames = frames
        self.base = base
        self.results: list[Outcome | None] = [None] * len(frames)
        self.left = len(frames)
        self.done: asyncio.Future[None] = owner.connection.loop.create_future()
        self.begun = time.monotonic()
        self.deadline = 0.0
        self.resend_at = self.begun + RESEND_S
        self.retries = 0

    def on_reply(self, number: int, message: Message) -> None:
        index = number - self.base
        subject = self.messages[index].subject
        if message.header_raw and not message.payload:
            status, text = protocol.parse_status(message.header_raw)
            if status == 503:
                self.owner.on_nobody(self, index)
                return
            self.settle(index, Unavailable(f"publish to {subject}: {status} {text}"))
            return
        outcome = parse_ack(message.payload, subject)
        if not isinstance(outcome, PubAck) and outcome.server_code in codes.RETRY_NUMBERS:
            self.owner.send_later(self, index)
            return
        self.settle(index, outcome)

    def settle(self, index: int, outcome: Outcome) -> None:
        if self.results[index] is not None:
            return
        self.results[index] = outcome
        size = len(self.frames[index])
        self.frames[index] = b""
        self.left -= 1
        self.owner.on_settled(self, self.base + index, size)
        if self.left == 0 and not self.done.done():
            self.done.set_result(None)

    def open_indexes(self) -> list[int]:
        return [index for index, result in enumerate(self.results) if result is None]


class Publisher:
    """All confirmed publishing of one connection. Listens to it for loss and reconnect."""

    def __init__(self, connection: Connection, api: Api) -> None:
        self.connection = connection
        self._api = api
        self._windows: dict[int, _Window] = {}
        self._pending = 0
        self._pending_bytes = 0
        self.confirmed = self.failed = 0
        self.seconds = Histogram()
        self._room = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        self._last_ack_at = 0.0
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._retries: set[asyncio.TimerHandle] = set()
        self._batches: dict[int, tuple[asyncio.Future[PubAck], str, frozenset[str]]] = {}
        self._batch_slots = asyncio.Semaphore(BATCHES_OPEN_MAX)
        connection.listeners.append(self)

    # ---- the three ways to publish

    async def publish(self, message: Outgoing, timeout_s: float = PUBLISH_TIMEOUT_S) -> PubAck:
        """Publish one message; return when the server has it."""
        window = await self._start((message,), time.monotonic() + timeout_s)
        try:
            await window.done
        finally:
            self._forget(window)
        outcome = window.results[0]
        assert outcome is not None
        if isinstance(outcome, OncewireError):
            raise outcome
        return outcome

    async def publish_many(self, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S) -> list[Outcome]:
        """Publish in pipelined windows. One outcome per message, in order: a PubAck or the error, never raised."""
        windows: list[_Window] = []
        outcomes: list[Outcome] = []
        failure: OncewireError | None = None
        try:
            for part in cut(messages, WINDOW_MESSAGES, WINDOW_BYTES):
                try:
                    windows.append(await self._start(part, time.monotonic() + timeout_s))
                except OncewireError as error:  # no server or no room in time: the rest was not sent
                    failure = error
                    break
            for window in windows:
                await window.done
                outcomes += [outcome for outcome in window.results if outcome is not None]
        finally:
            for window in windows:
                self._forget(window)
        if failure is not None:
            outcomes += [failure] * (len(messages) - len(outcomes))
        assert len(outcomes) == len(messages)
        return outcomes

    async def publish_atomic(self, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S) -> PubAck:
        """Publish all or nothing, into one stream, with one sync. The ack's sequence is that of the last message.

        Raises Refused on a server that has no batches, Conflict when a message id stands in the stream already
        (nothing is stored then), OutcomeUnknown when the connection broke before the commit was confirmed.
        """
        if self.connection.server.version_tuple < (2, 12, 0):
            raise Refused(
                f"NATS server {self.connection.server.version} has no atomic batches", hint="Use 2.12 or newer."
            )
        if not 1 <= len(messages) <= BATCH_MESSAGES_MAX:
            raise Refused(f"an atomic batch has 1 to {BATCH_MESSAGES_MAX} messages, this one {len(messages)}")
        deadline = time.monotonic() + timeout_s
        async with self._batch_slots:
            if not self.connection.is_ready:
                await self.connection.ready(deadline)
            begun = time.monotonic()
            ack = await self._commit_batch(messages, deadline)
        self.count(len(messages), 0, begun)
        return ack

    async def publish_all(self, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S) -> list[Outcome]:
        """Publish with atomic batches where the server takes them, else one by one under the same ids."""
        outcomes: list[Outcome] = []
        for part in cut(messages, BATCH_MESSAGES_MAX, BATCH_BYTES_MAX):
            outcomes += await self._publish_part(part, timeout_s)
        return outcomes

    async def _publish_part(self, part: Sequence[Outgoing], timeout_s: float) -> list[Outcome]:
        if len(part) > 1:
            try:
                ack = await self.publish_atomic(part, timeout_s)
            except OutcomeUnknown as unknown:
                if not all(message.may_repeat for message in part):
                    return [unknown] * len(part)
            except (Conflict, Refused, Unavailable, TypeError, AttributeError):
                pass  # one by one each meets its own error
            else:
                first = ack.sequence - len(part) + 1
                sequences = range(first, ack.sequence + 1)
                return list(map(PubAck, repeat(ack.stream), sequences, repeat(False), repeat(ack.domain)))
        return await self.publish_many(part, timeout_s)

    # ---- windows

    async def _start(self, messages: Sequence[Outgoing], deadline: float) -> _Window:
        connection = self.connection
        if self._pending + len(messages) > PENDING_MAX or self._pending_bytes > PENDING_BYTES_MAX:
            await self._wait_for_room(len(messages), deadline)
        if not connection.is_ready:
            await connection.ready(deadline)
        base = connection.take_numbers(len(messages))
        frames, refused = self._frames(messages, base)
        window = _Window(self, messages, frames, base)
        window.deadline = deadline
        connection.replies.update(dict.fromkeys(range(base, base + len(frames)), window.on_reply))
        self._windows[base] = window
        self._pending += len(frames)
        self._pending_bytes += sum(map(len, frames))
        connection.write(b"".join(frames) if len(frames) > 1 else frames[0])
        for index, error in refused:
            window.settle(index, error)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(SWEEP_S, self._sweep)
        return window

    def _frames(self, messages: Sequence[Outgoing], base: int) -> tuple[list[bytes], list[tuple[int, Refused]]]:
        """The frames; what can never be published has an empty one and its reason, and does not hold up the others."""
        frames: list[bytes] = []
        refused: list[tuple[int, Refused]] = []
        for index, message in enumerate(messages):
            try:
                frames.append(self._frame(message, base + index))
            except Refused as error:
                frames.append(b"")
                refused.append((index, error))
            except (TypeError, AttributeError, ValueError) as error:
                frames.append(b"")
                unknown = ContractViolation(f"the message cannot be written: {error}")
                refused.append((index, wrong_message(message, Outgoing) or unknown))
        return frames, refused

    def _frame(self, message: Outgoing, number: int, extra: str = "") -> bytes:
        header = encode_header(message, extra)
        self.connection.check_size(len(header) + len(message.payload), reserve_of(message.subject, message.headers))
        reply = self.connection.reply_to(number) if number else b""
        return protocol.encode_pub(protocol.encode_subject(message.subject), reply, message.payload, header)

    async def _wait_for_room(self, count: int, deadline: float) -> None:
        while self._pending and (self._pending + count > PENDING_MAX or self._pending_bytes > PENDING_BYTES_MAX):
            self._room.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._room.wait()
            except TimeoutError:
                raise Unavailable(
                    f"{self._pending} messages wait for confirmation, and none came in time",
                    hint="The server is slow or away.",
                ) from None

    def on_settled(self, window: _Window, number: int, size: int) -> None:
        self.connection.replies.pop(number, None)
        self._pending -= 1
        self._pending_bytes -= size
        self._last_ack_at = time.monotonic()
        if window.left == 0:
            self._windows.pop(window.base, None)
        if self._pending <= PENDING_MAX // 2 and self._pending_bytes <= PENDING_BYTES_MAX:
            self._room.set()

    def _forget(self, window: _Window) -> None:
        """Nobody waits for it any more: cancelled, or done."""
        if window.left:
            for index in window.open_indexes():
                window.settle(index, OutcomeUnknown("the publish was cancelled before it was confirmed"))
        self._windows.pop(window.base, None)
        failed = sum(type(outcome) is not PubAck for outcome in window.results)
        self.count(len(window.results) - failed, failed, window.begun)

    def count(self, confirmed: int, failed: int, begun: float) -> None:
        self.confirmed += confirmed
        self.failed += failed
        if confirmed:
            self.seconds.observe(time.monotonic() - begun, confirmed)

    # ---- what can go wrong

    def on_nobody(self, window: _Window, index: int) -> None:
        """No responders: nothing was stored. Try again for as long as a stream claims the subject."""
        subject = window.messages[index].subject
        if subject not in self._probes:
            task = self.connection.loop.create_task(self._probe(subject), name="oncewire-probe")
            self._probes[subject] = task
        self.send_later(window, index)

    async def _probe(self, subject: str) -> None:
        """Ask whether any stream captures the subject; if surely none does, waiting is in vain."""
        error: OncewireError | None = None
        try:
            answer = await self._api("STREAM.NAMES", {"subject": subject})
            if not answer.get("streams"):
                error = NotFound(
                    f"no stream captures {subject}",
                    hint="Declare one and run `oncewire topology apply`, or mend the subject.",
                )
        except Refused as refused:
            error = refused
        except OncewireError as away:
            error = None if self.connection.server.jetstream else away  # a server without it will not grow it
        finally:
            self._probes.pop(subject, None)
        if error is not None:
            self._fail_subject(subject, error)

    def _fail_subject(self, subject: str, error: OncewireError) -> None:
        for window in list(self._windows.values()):
            for index in window.open_indexes():
                if window.messages[index].subject == subject:
                    window.settle(index, error)

    def send_later(self, window: _Window, index: int) -> None:
        """It was not stored, for a reason that may pass."""
        window.retries += 1
        delay = min(RETRY_DELAY_S * 2 ** min(window.retries, 8), RETRY_DELAY_MAX_S)

        def again() -> None:
            self._retries.discard(timer)
            self._send_again(window, [index])

        timer = self.connection.loop.call_later(delay, again)
        self._retries.add(timer)

    def _send_again(self, window: _Window, indexes: Sequence[int]) -> None:
        frames = [window.frames[index] for index in indexes if window.results[index] is None]
        if frames and self.connection.is_ready:
            self.connection.write(b"".join(frames))

    def _sweep(self) -> None:
        """Deadlines and lost answers, for all windows at once: a timer per message would cost more than the message."""
        self._sweeper = None
        now = time.monotonic()
        for window in list(self._windows.values()):
            if now >= window.deadline:
                self._expire(window)
            elif now >= window.resend_at and self._is_silent(window, now):
                window.resend_at = now + RESEND_S
                self._send_again(window, [i for i in window.open_indexes() if window.messages[i].may_repeat])
        if self._windows:
            self._sweeper = self.connection.loop.call_later(SWEEP_S, self._sweep)

    def _is_silent(self, window: _Window, now: float) -> bool:
        """No answer to anybody for a while: lost, not slow. A slow server must not get everything twice."""
        return now - self._last_ack_at > RESEND_S or now - window.resend_at > 2 * RESEND_S

    def _expire(self, window: _Window) -> None:
        for index in window.open_indexes():
            subject = window.messages[index].subject
            window.settle(
                index,
                OutcomeUnknown(
                    f"publish to {subject} was not confirmed in time (connection {self.connection.state})",
                    hint="Publish again under the same msg_id: the server drops the double.",
                ),
            )

    # ---- the connection tells

    def on_lost(self, reason: str) -> None:
        is_final = self.connection.state in (State.CLOSED, State.DRAINING)
        for window in list(self._windows.values()):
            for index in window.open_indexes():
                if is_final or not window.messages[index].may_repeat:
                    window.settle(index, OutcomeUnknown(f"the connection broke before the confirmation: {reason}"))
        for number in list(self._batches):
            self._finish_batch(
                number, OutcomeUnknown(f"the connection broke before the commit was confirmed: {reason}")
            )
        if is_final:
            self._stop()

    def _stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for timer in self._retries:
            timer.cancel()
        self._retries.clear()
        for task in list(self._probes.values()):
            task.cancel()

    def on_connected(self) -> None:
        now = time.monotonic()
        for window in list(self._windows.values()):
            window.resend_at = now + RESEND_S
            frames = [window.frames[index] for index in window.open_indexes()]
            if frames:
                with contextlib.suppress(Unavailable):  # no room at once: the sweep sends the rest
                    self.connection.write(b"".join(frames))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        self._fail_subject(subject, error)
        for number, (_, _, subjects) in list(self._batches.items()):
            if subject in subjects:
                self._finish_batch(number, error)

    def in_flight(self) -> int:
        return self._pending + len(self._batches)

    # ---- atomic batches

    async def _commit_batch(self, messages: Sequence[Outgoing], deadline: float) -> PubAck:
        connection = self.connection
        batch = secrets.token_hex(12)
        first = connection.take_numbers(2)
        frames = self._batch_frames(messages, batch, first)
        done: asyncio.Future[PubAck] = connection.loop.create_future()
        self._batches[first] = (done, batch, frozenset(message.subject for message in messages))
        connection.replies[first] = connection.replies[first + 1] = self._on_batch_reply
        try:
            connection.write(b"".join(frames))
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                ack = await done
        except TimeoutError:
            raise OutcomeUnknown("the batch was not confirmed in time") from None
        finally:
            self._batches.pop(first, None)
            connection.replies.pop(first, None)
            connection.replies.pop(first + 1, None)
        if ack.batch != batch or ack.count != len(messages):
            raise ProtocolViolation(f"a batch of {len(messages)} was confirmed as {ack.count}")
        return ack

    def _batch_frames(self, messages: Sequence[Outgoing], batch: str, first: int) -> list[bytes]:
        """The first one is answered when the batch is open, the last one commits it; nobody answers in between."""
        last = len(messages)
        lines = f"Nats-Batch-Id: {batch}\r\nNats-Batch-Sequence: "
        extra = Numbered(lines, "\r\n", "\r\n", "\r\n")
        inner = plain_frames(messages[1:-1], first=2, extra=extra, reply=None)
        if inner is not None:
            self.connection.check_size(inner.longest, reserve_of(messages[1].subject))
            pieces = inner.pieces
        else:
            pieces = [self._frame(one, 0, f"{lines}{at}\r\n") for at, one in enumerate(messages[1:-1], start=2)]
        opens = [self._frame(messages[0], first, f"{lines}1\r\n")] if last > 1 else []
        commits = self._frame(messages[-1], first + 1, f"{lines}{last}\r\nNats-Batch-Commit: 1\r\n")
        return [*opens, *pieces, commits]

    def _on_batch_reply(self, number: int, message: Message) -> None:
        """The first message is answered empty when the batch is open; the last one with the commit's PubAck."""
        key = number if number in self._batches else number - 1
        if key not in self._batches:
            return
        if message.payload:
            self._finish_batch(key, parse_ack(message.payload, "an atomic batch"))
        elif message.header_raw and message.status == 503:
            self._finish_batch(key, Unavailable("no stream takes this batch now"))

    def _finish_batch(self, key: int, outcome: Outcome) -> None:
        done = self._batches[key][0]
        if done.done():
            return
        if isinstance(outcome, PubAck):
            done.set_result(outcome)
        else:
            done.set_exception(outcome)
