"""Ordered reading of a stream by a reader that keeps its own position: an ephemeral consumer that is replaced at once
when anything is missing.

The consumer (`ow-reader-…`, ack none, in memory) numbers its deliveries 1, 2, 3 …; a number that is skipped means that
a message was lost on the way, and the reader makes a new consumer behind the last message that it handed out. So its
caller sees every stored message once and in order, whatever happens to connections and servers in between.

A stream that was deleted and made again, or restored to an older state, cannot be continued: that raises Corrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from oncewire._ground.contracts.subjects import READER_PREFIX
from oncewire._ground.errors import Corrupt, NotFound, OncewireError, Unavailable
from oncewire._ground.jetstream.options import State
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.pull import Pull, parse_reply
from oncewire._ground.jetstream.requests import Requests

INACTIVE_S: Final = 30.0
READ_BATCH: Final = 500
REOPEN_DELAY_S: Final = 0.05
REOPEN_DELAY_MAX_S: Final = 2.0

Api = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Start(msgspec.Struct, frozen=True):
    """Where to begin: at a sequence, at a time (RFC 3339), at what comes next, or with the last of each subject."""

    sequence: int = 0
    time: str = ""
    is_new_only: bool = False
    is_last_per_subject: bool = False


class Reader:
    """See the module's head. An async context manager; made by `Client.read`."""

    def __init__(
        self,
        requests: Requests,
        api: Api,
        stream: str,
        *,
        start: Start,
        subjects: Sequence[str] = (),
        headers_only: bool = False,
        batch: int = READ_BATCH,
        heartbeat_s: float = 5.0,
    ) -> None:
        self._requests = requests
        self._api = api
        self.stream = stream
        self._start = start
        self._subjects = list(subjects)
        self._headers_only = headers_only
        self._batch = batch
        self._heartbeat_s = heartbeat_s
        self._id = secrets.token_hex(8)
        self._serial = 0
        self._pull: Pull | None = None
        self._expected = 1
        self._created = ""
        self.sequence = 0
        """The stream sequence of the last message handed out, 0 before the first."""
        self.pending = 0
        """How many stored messages matched behind its position when its consumer was last created."""
        self.restarts = 0

    async def __aenter__(self) -> Reader:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        pull, self._pull = self._pull, None
        if pull is not None:
            pull.close()
            if self._requests.connection.state is State.CONNECTED:
                with contextlib.suppress(OncewireError):
                    await self._api(f"CONSUMER.DELETE.{self.stream}.{pull.consumer}", {})

    @property
    def is_following(self) -> bool:
        """Whether the server says that what is stored reaches this reader; not while its consumer must be replaced."""
        return self._pull is not None and self._pull.is_fed

    async def fetch(self, count: int = 0, *, timeout_s: float | None = None) -> list[Message]:
        """The next messages in order, at most `count`; an empty list when none came within `timeout_s`.

        Waits through outages. Raises Corrupt when the stream cannot be continued, NotFound when it is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            pull = self._pull or await self._renew(deadline)
            if pull is None:
                return []
            try:
                messages = await pull.fetch(count, timeout_s=_left(deadline))
            except NotFound:  # the server restarted, something got lost, or nobody pulled for a while
                await self._drop()
                continue
            good = self._in_order(messages)
            if len(good) < len(messages):
                await self._drop()
            if good or not messages:
                return good

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            for message in await self.fetch():
                yield message

    def _in_order(self, messages: list[Message]) -> list[Message]:
        """The messages up to the first hole in the consumer's own numbers."""
        for index, message in enumerate(messages):
            delivery = parse_reply(message.reply)
            if delivery.consumer_sequence != self._expected:
                return messages[:index]
            self._expected += 1
            self.sequence = delivery.sequence
        return messages

    async def _drop(self) -> None:
        self.restarts += 1
        await self.close()

    async def _renew(self, deadline: float | None) -> Pull | None:
        """A new consumer behind what was handed out; None when the deadline passes before there is one."""
        delay = REOPEN_DELAY_S
        while True:
            try:
                async with asyncio.timeout(_left(deadline)):
                    return await self._open()
            except TimeoutError:
                return None
            except Unavailable:
                if self._requests.connection.state in (State.CLOSED, State.DRAINING):
                    raise
            left = _left(deadline)
            await asyncio.sleep(delay if left is None else min(delay, left))
            delay = min(delay * 2, REOPEN_DELAY_MAX_S)

    async def _open(self) -> Pull:
        info = await self._api(f"STREAM.INFO.{self.stream}", {})
        if self._start.is_new_only and not self._created:
            self.sequence = info["state"]["last_seq"]
        self._check_same(info)
        self._serial += 1
        name = f"{READER_PREFIX}{self._id}-{self._serial}"
        config: dict[str, Any] = {
            "name": name,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(INACTIVE_S * 1e9),
            "max_deliver": 1,
            "replay_policy": "instant",
            "headers_only": self._headers_only,
        }
        config |= self._position()
        if len(self._subjects) > 1:
            config["filter_subjects"] = self._subjects
        else:
            config["filter_subject"] = self._subjects[0] if self._subjects else ">"
        body = {"stream_name": self.stream, "config": config, "action": "create"}
        self.pending = (await self._api(f"CONSUMER.CREATE.{self.stream}.{name}", body)).get("num_pending", 0)
        self._expected = 1
        self._pull = Pull(
            self._requests,
            self.stream,
            name,
            batch=self._batch,
            expires_s=15.0,
            heartbeat_s=self._heartbeat_s,
            fails_on_loss=True,
        )
        return self._pull

    def _check_same(self, info: dict[str, Any]) -> None:
        created, last = info["created"], info["state"]["last_seq"]
        if self._created and created != self._created:
            raise Corrupt(
                f"stream {self.stream} was deleted and made again",
                hint="Its sequences start anew: read it from the start.",
            )
        if last < self.sequence:
            raise Corrupt(
                f"stream {self.stream} went back from sequence {self.sequence} to {last}",
                hint="It was restored, or lost messages in a power cut.",
            )
        self._created = created

    def _position(self) -> dict[str, Any]:
        if self.sequence:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self.sequence + 1}
        if self._start.is_last_per_subject:
            return {"deliver_policy": "last_per_subject"}
        if self._start.time:
            return {"deliver_policy": "by_start_time", "opt_start_time": self._start.time}
        if self._start.sequence > 1:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self._start.sequence}
        return {"deliver_policy": "all"}
