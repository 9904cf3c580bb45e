"""Fast ingest (nats-server 2.14, `allow_batched`): many messages under one flow of acknowledgements.

Every message is stored as it comes; the server confirms in steps ("all up to n") instead of one by one, and the last
one with a PubAck for the whole. What the server must know stands in the reply subject:

    <inbox>.<batch id>.<step>.<gap mode>.<number in batch>.<operation>.$FI
    operation: 0 first, 1 next, 2 last;  gap mode: fail

Ids work as ever: a duplicate is counted and not stored. When the batch breaks (a gap, an error, a lost connection),
what is not confirmed goes out again as single publishes under the same ids; without ids that would risk a double, so
it is OutcomeUnknown. On the server's default sync this is the quickest way in; under `sync_interval: always` each
message still costs a sync, and atomic batches win by far.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from oncewire._ground.errors import (
    NoResponders,
    OncewireError,
    OutcomeUnknown,
    PermissionDenied,
    ProtocolViolation,
    Refused,
    TooLarge,
    Unavailable,
)
from oncewire._ground.jetstream import codes, protocol
from oncewire._ground.jetstream.connection import each
from oncewire._ground.jetstream.plain import Numbered, plain_frames
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.publish import (
    PUBLISH_TIMEOUT_S,
    Outcome,
    Outgoing,
    PubAck,
    Publisher,
    encode_header,
    reserve_of,
)

STEP: Final = 500
STEPS_OPEN_MAX: Final = 4
STEP_BYTES_MAX: Final = 1024 * 1024
SINCE: Final = (2, 14, 0)

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Ingested(msgspec.Struct, frozen=True):
    """All of it is stored: in which stream, up to which sequence, how many messages. What stood there already stands
    before that."""

    stream: str
    sequence: int
    count: int


async def publish_fast(
    publisher: Publisher, messages: Sequence[Outgoing], timeout_s: float = PUBLISH_TIMEOUT_S
) -> Ingested:
    """Publish many messages into one stream, in order. `timeout_s` bounds the time without progress."""
    if not messages:
        raise Refused("there is nothing to publish")
    if publisher.connection.server.version_tuple < SINCE:
        return await _one_by_one(publisher, messages, timeout_s)
    batch = Batch(publisher, messages, timeout_s)
    try:
        ack = await batch.run()
    except (NoResponders, OutcomeUnknown):
        ack = None
    except (Refused, Unavailable) as error:
        if error.server_code == 0:
            raise
        ack = None
    if ack is not None and ack.count == len(messages) and ack.sequence:
        publisher.count(ack.count, 0, batch.begun)
        return Ingested(ack.stream, ack.sequence, ack.count)
    # Where all stood there already, the server tells no sequence; single publishes are told each its own.
    confirmed = max(batch.confirmed, ack.count if ack is not None else 0) if ack is None or ack.sequence else 0
    rest = messages[confirmed:]
    if not batch.is_refused and not all(message.may_repeat for message in rest):
        raise OutcomeUnknown(f"{confirmed} of {len(messages)} messages are confirmed, the rest has no ids to repeat it")
    done = await _one_by_one(publisher, rest, timeout_s)
    return Ingested(done.stream, done.sequence, len(messages))


async def _one_by_one(publisher: Publisher, messages: Sequence[Outgoing], timeout_s: float) -> Ingested:
    outcomes = await publisher.publish_many(messages, timeout_s)
    last: Outcome | None = None
    for outcome in outcomes:
        if isinstance(outcome, OncewireError):
            raise outcome
        last = outcome if not isinstance(last, PubAck) or outcome.sequence > last.sequence else last
    assert isinstance(last, PubAck)
    return Ingested(last.stream, last.sequence, len(messages))


def _number_of(message: Message) -> int:
    """Which message of the batch this answers: the server replies to the subject that the message carried."""
    tokens = message.subject_raw.split(b".")
    return int(tokens[-3]) if len(tokens) > 3 and tokens[-3].isdigit() else 0


class Batch:
    """One fast batch from its first message to its PubAck."""

    def __init__(self, publisher: Publisher, messages: Sequence[Outgoing], timeout_s: float) -> None:
        self.connection = publisher.connection
        self._messages = messages
        self._timeout_s = timeout_s
        self._id = secrets.token_hex(12)
        self._inbox = self.connection.inbox + b"f." + self._id.encode()
        self._done: asyncio.Future[PubAck] = self.connection.loop.create_future()
        self._done.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._progress = asyncio.Event()
        self.begun = self._heard_at = time.monotonic()
        self.confirmed = 0
        """So many from the start are surely stored."""
        self.is_refused = False
        """The server refused the first message and so the batch: repeating is safe even without ids. An error of a
        later one says nothing about those before it, which are stored as they come."""

    async def run(self) -> PubAck:
        if not self.connection.is_ready:
            await self.connection.ready(time.monotonic() + self._timeout_s)
        steps = self._steps()
        sub = self.connection.subscribe((self._inbox + b".>").decode(), each(self._on_message))
        self.connection.listeners.append(self)
        try:
            await self.send(steps)
            while not self._done.done():
                await self._wait()
            return self._done.result()
        finally:
            self.connection.listeners.remove(self)
            with contextlib.suppress(OncewireError):
                self.connection.unsubscribe(sub)

    def _steps(self) -> list[bytes]:
        """What goes out, a step at a time."""
        reply = Numbered(f"{self._inbox.decode()}.{STEP}.fail.", ".0.$FI", ".1.$FI", ".2.$FI")
        plain = plain_frames(self._messages, first=1, extra=None, reply=reply, step=STEP)
        if plain is not None:
            self._check_size(plain.longest, self._messages[0])
            return plain.pieces
        replies = reply.texts(1, len(self._messages))
        frames = [self._frame(one, text.encode()) for one, text in zip(self._messages, replies, strict=True)]
        return [b"".join(frames[at : at + STEP]) for at in range(0, len(frames), STEP)]

    def _frame(self, message: Outgoing, reply: bytes) -> bytes:
        header = encode_header(message)
        self._check_size(len(header) + len(message.payload), message)
        return protocol.encode_pub(protocol.encode_subject(message.subject), reply, message.payload, header)

    def _check_size(self, size: int, message: Outgoing) -> None:
        self.connection.check_size(size, reserve_of(message.subject, message.headers))
        if size > STEP_BYTES_MAX:
            raise TooLarge(f"fast ingest is for messages of at most {STEP_BYTES_MAX} bytes, this one has {size}")

    async def send(self, steps: list[bytes]) -> None:
        """Keep a bounded number of steps on their way."""
        for number, step in enumerate(steps):
            start = number * STEP
            while start - self.confirmed >= STEP * STEPS_OPEN_MAX and not self._done.done():
                await self._wait()
            while not self.connection.is_ready and not self._done.done():
                await self._wait()
            if self._done.done():
                return
            self.connection.write(step)

    async def _wait(self) -> None:
        """Until the server says something, at most `timeout_s` since it last did."""
        self._progress.clear()
        left = self._heard_at + self._timeout_s - time.monotonic()
        try:
            async with asyncio.timeout(min(max(0.0, left), 0.05 if not self.connection.is_ready else left)):
                await self._progress.wait()
        except TimeoutError:
            if left <= 0:
                raise OutcomeUnknown(f"fast ingest stopped after {self.confirmed} confirmed messages") from None

    def _on_message(self, message: Message) -> None:
        self._heard_at = time.monotonic()
        self._progress.set()
        if self._done.done():
            return
        if message.header_raw and message.status == 503:
            self.is_refused = _number_of(message) == 1
            self._fail(NoResponders("no stream takes fast ingest on this subject now"))
            return
        try:
            body = _decode(message.payload)
        except msgspec.DecodeError:
            self._fail(ProtocolViolation(f"fast ingest was answered with {message.payload[:80]!r}"))
            return
        if body.get("type") == "ack":
            self.confirmed = max(self.confirmed, int(body.get("seq") or 0))
        elif "error" in body and body.get("type") != "err":
            self.is_refused = _number_of(message) == 1
            self._fail(codes.from_api(body["error"], "fast ingest"))
        elif "batch" in body:
            ack = PubAck(str(body["stream"]), int(body["seq"]), batch=self._id, count=int(body.get("count") or 0))
            self._done.set_result(ack)

    def _fail(self, error: OncewireError) -> None:
        if not self._done.done():
            self._done.set_exception(error)
        self._progress.set()

    # ---- the connection tells

    def on_connected(self) -> None:
        """A batch does not survive its connection: nothing to do."""

    def on_lost(self, reason: str) -> None:
        self._fail(OutcomeUnknown(f"the connection broke during fast ingest: {reason}"))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        if any(message.subject == subject for message in self._messages):
            self._fail(error)

    def in_flight(self) -> int:
        return 1
