"""Between nodes: requests to the owner of a partition, over plain NATS.

What is asked of one node within a turn of the loop goes as one message, and so do the answers that are ready together.
A request is answered once, or fails: Unsent when the node is not there (nothing happened), OutcomeUnknown when no
answer came. Nothing is sent twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from oncewire._ground.errors import OncewireError, OutcomeUnknown, PermissionDenied, TooLarge, Unavailable
from oncewire._ground.jetstream import Client, protocol
from oncewire._ground.jetstream.connection import Subscription
from oncewire._ground.jetstream.protocol import Message
from oncewire.broker.jetstream import ops
from oncewire.broker.jetstream.ops import Answer, Asked, Request, Unsent

ANSWER_S_MAX: Final = 15.0
SWEEP_S: Final = 0.5
MESSAGE_BYTES_MAX: Final = 256 << 10
WRAPPING_BYTES: Final = 256
"""Around a request that goes alone."""
_log = logging.getLogger(__name__)

Done = Callable[[Any], None]
Handle = Callable[[str, Request, Done], None]


class _Batch:
    """Requests that went together and are not all answered."""

    __slots__ = ("deadline", "node", "open")

    def __init__(self, node: str, waiting: list[tuple[type, Done]]) -> None:
        self.node = node
        self.open = dict(enumerate(waiting))
        self.deadline = time.monotonic() + ANSWER_S_MAX


class Link:
    """See the module's head. `handle` gets requests."""

    def __init__(self, client: Client, handle: Handle) -> None:
        self._connection = client.connection
        self._client = client
        self._handle = handle
        self._node = ""
        self._subscription: Subscription | None = None
        self._asking: dict[str, list[tuple[bytes, type, Done]]] = {}
        self._answering: dict[bytes, list[Answer]] = {}
        self._batches: dict[int, _Batch] = {}
        self._is_due = False
        self._sweeper = self._connection.loop.call_later(SWEEP_S, self._sweep)
        self._connection.listeners.append(self)

    def open(self, node: str) -> None:
        """Be heard under a name, and no longer under the one before."""
        self._unsubscribe()
        self._node = node
        self._subscription = self._client.subscribe(f"broker_nodes.{node}", self._on_requests)

    def _unsubscribe(self) -> None:
        if self._subscription is not None:
            self._connection.unsubscribe(self._subscription)
            self._subscription = None

    def close(self) -> None:
        self._sweeper.cancel()
        self._unsubscribe()
        if self in self._connection.listeners:
            self._connection.listeners.remove(self)

    # ---- asking

    def ask(self, node: str, request: Request, done: Done) -> None:
        encoded = ops.encode(request)
        if len(encoded) + WRAPPING_BYTES > self._connection.server.max_payload:
            done(TooLarge(f"the message has {len(encoded)} bytes, more than the NATS server takes"))
            return
        self._asking.setdefault(node, []).append((encoded, type(request), done))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._connection.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        asking, self._asking = self._asking, {}
        for node, waiting in asking.items():
            for part in runs_of(waiting, lambda one: len(one[0])):
                self._send(node, part)
        answering, self._answering = self._answering, {}
        for reply, answers in answering.items():
            for group in runs_of(answers, lambda one: len(one.value)):
                self._write(protocol.encode_pub(reply, b"", ops.encode(group)))

    def _send(self, node: str, part: list[tuple[bytes, type, Done]]) -> None:
        number = self._connection.take_numbers()
        batch = _Batch(node, [(kind, done) for _, kind, done in part])
        payload = ops.encode(Asked(self._node, [encoded for encoded, _, _ in part]))
        subject = f"broker_nodes.{node}".encode()
        self._batches[number] = batch
        self._connection.replies[number] = self._on_answers
        if not self._write(protocol.encode_pub(subject, self._connection.reply_to(number), payload)):
            self._end(number, Unsent("the broker is not connected to NATS", retry_after_s=1.0))

    def _write(self, frame: bytes) -> bool:
        try:
            self._connection.write(frame)
        except OncewireError:
            return False
        return True

    def _on_answers(self, number: int, message: Message) -> None:
        batch = self._batches.get(number)
        if batch is None:
            return
        if message.header_raw and not message.payload:
            self._end(number, Unsent(f"node {batch.node} is not there", retry_after_s=0.1))
            return
        for answer in ops.decode_answers(message.payload):
            self._take(batch, answer)
        if not batch.open:
            self._end(number, None)

    def _take(self, batch: _Batch, answer: Answer) -> None:
        if answer.at in batch.open:
            kind, done = batch.open.pop(answer.at)
            failure = answer.failure
            done(ops.error_of(failure) if failure is not None else ops.decode_value(kind, answer.value))

    def _end(self, number: int, error: OncewireError | None) -> None:
        batch = self._batches.pop(number, None)
        self._connection.replies.pop(number, None)
        if batch is not None and error is not None:
            for _, done in batch.open.values():
                done(error)

    def lose(self, node: str) -> None:
        """The node is gone: whoever waits for it will hear nothing."""
        for number, batch in list(self._batches.items()):
            if batch.node == node:
                self._end(number, OutcomeUnknown(f"node {node} went away: outcome unknown", retry_after_s=0.1))

    def _sweep(self) -> None:
        self._sweeper = self._connection.loop.call_later(SWEEP_S, self._sweep)
        now = time.monotonic()
        for number, batch in list(self._batches.items()):
            if batch.deadline <= now:
                error = f"node {batch.node} did not answer in time: outcome unknown"
                self._end(number, OutcomeUnknown(error, retry_after_s=0.1))

    # ---- answering

    def _on_requests(self, message: Message) -> None:
        try:
            asked = ops.decode_asked(message.payload)
            requests = [ops.decode_request(one) for one in asked.requests]
        except msgspec.DecodeError as error:
            _log.warning("a request of another node cannot be read: %s", error)
            return
        for at, request in enumerate(requests):
            self._handle(asked.node, request, partial(self._answer, message.reply, at))

    def _answer(self, reply: bytes, at: int, result: Any) -> None:
        answers = self._answering.setdefault(reply, [])
        if isinstance(result, OncewireError):
            answers.append(Answer(at, b"", ops.failure_of(result)))
        else:
            answers.append(Answer(at, ops.encode(result)))
        self._flush_soon()

    # ---- the connection tells

    def on_connected(self) -> None:
        """Subscriptions are renewed by the connection."""

    def on_lost(self, reason: str) -> None:
        for number in list(self._batches):
            self._end(number, OutcomeUnknown(f"the connection to NATS broke: outcome unknown ({reason})"))

    def on_denied(self, subject: str, error: PermissionDenied) -> None:
        for number, batch in list(self._batches.items()):
            if subject == f"broker_nodes.{batch.node}":
                self._end(number, Unavailable(error.message))

    def in_flight(self) -> int:
        return len(self._batches)


def runs_of(items: list[Any], size_of: Callable[[Any], int]) -> list[list[Any]]:
    """In runs of bounded bytes."""
    runs: list[list[Any]] = []
    size = 0
    for item in items:
        if not runs or size + size_of(item) > MESSAGE_BYTES_MAX:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += size_of(item) + 16
    return runs
