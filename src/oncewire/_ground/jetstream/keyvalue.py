"""A key-value bucket: the last message of each subject of a stream `KV_<bucket>`.

A revision is the stream's sequence. `create` succeeds for one of many that try; `update` succeeds only on the revision
that the caller has seen. Both are fenced by the server (expected last sequence of the subject), so they also hold
between processes. Buckets are declared by the topology, not here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

import msgspec

from oncewire._ground.errors import Conflict, ContractViolation, NotFound, TooLarge
from oncewire._ground.jetstream import codes
from oncewire._ground.jetstream.protocol import Message
from oncewire._ground.jetstream.publish import Outgoing
from oncewire._ground.jetstream.pull import HEARTBEAT_S, parse_reply
from oncewire._ground.jetstream.reader import Start

if TYPE_CHECKING:
    from oncewire._ground.jetstream.client import Client

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
KEY_BYTES_MAX: Final = 1_024
_OPERATION: Final = "KV-Operation"


class Entry(msgspec.Struct, frozen=True):
    """A value with the revision that `update` and `delete` ask for. `is_deleted` only in a watch."""

    key: str
    value: bytes
    revision: int
    is_deleted: bool = False


class KeyValue:
    """See the module's head. Made by `Client.kv`."""

    def __init__(self, client: Client, bucket: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", bucket):
            raise ContractViolation(f"{bucket!r} is not the name of a bucket", field="bucket")
        self._client = client
        self.bucket = bucket
        self.stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    def _subject(self, key: str) -> str:
        if not _KEY.fullmatch(key) or len(key) > KEY_BYTES_MAX:
            raise ContractViolation(
                f"{key[:80]!r} is not a key", field="key", hint="Letters, digits and - _ = / . are."
            )
        return self._prefix + key

    async def get(self, key: str, *, is_exact: bool = False) -> Entry | None:
        """The value, or None when there is none or it was deleted. A replica that lags may answer, unless it must be
        exact."""
        entry = await self._last(key, is_exact=is_exact)
        return None if entry is None or entry.is_deleted else entry

    async def _last(self, key: str, *, is_exact: bool) -> Entry | None:
        try:
            found = await self._client.get_last(self.stream, self._subject(key), is_exact=is_exact)
        except NotFound as missing:
            if missing.server_code == codes.STREAM_NOT_FOUND:
                raise
            return None
        return Entry(key, found.payload, found.sequence, _OPERATION in found.headers)

    async def put(self, key: str, value: bytes) -> int:
        """Set whatever stood there; return the new revision."""
        return await self._write(key, value, None)

    async def create(self, key: str, value: bytes) -> int:
        """Set only if there is no value; Conflict for everybody but the first."""
        try:
            return await self._write(key, value, 0)
        except Conflict:
            last = await self._last(key, is_exact=True)
            if last is None or not last.is_deleted:
                raise Conflict(f"key {key} of {self.bucket} exists already") from None
            return await self._write(key, value, last.revision)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Set only if the last revision is the one given, else Conflict."""
        return await self._write(key, value, revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Leave a marker that it is gone; with a revision only if that is still the last."""
        await self._write(key, b"", revision, {_OPERATION: "DEL"})

    async def _write(self, key: str, value: bytes, revision: int | None, headers: dict[str, str] | None = None) -> int:
        outgoing = Outgoing(self._subject(key), value, headers=headers, expected_last_subject_sequence=revision)
        try:
            ack = await self._client.publish_one(outgoing, raw=True)
        except Conflict as conflict:
            raise Conflict(f"key {key} of {self.bucket}: {conflict.message}") from None
        return ack.sequence

    async def entries(self, pattern: str = ">") -> list[Entry]:
        """All values whose keys match: one consistent picture, as long as the server puts them into one answer."""
        try:
            found = await self._client.get_last_of(self.stream, [self._prefix + pattern])
        except TooLarge:
            return await self._read_entries(pattern)
        entries = [
            Entry(one.subject.removeprefix(self._prefix), one.payload, one.sequence, _OPERATION in one.headers)
            for one in found
        ]
        return [entry for entry in entries if not entry.is_deleted]

    async def _read_entries(self, pattern: str) -> list[Entry]:
        entries: dict[str, Entry] = {}
        start = Start(is_last_per_subject=True)
        async with self._client.read(self.stream, subjects=[self._prefix + pattern], start=start) as reader:
            pending = 1
            while pending:
                messages = await reader.fetch()
                entries |= {entry.key: entry for entry in map(self._entry_of, messages)}
                pending = parse_reply(messages[-1].reply).pending
        return [entry for entry in entries.values() if not entry.is_deleted]

    def _entry_of(self, message: Message) -> Entry:
        key, is_deleted = message.subject.removeprefix(self._prefix), _OPERATION in message.headers
        return Entry(key, message.payload, parse_reply(message.reply).sequence, is_deleted)

    async def watch(self, pattern: str = ">", *, heartbeat_s: float = HEARTBEAT_S) -> AsyncGenerator[Entry]:
        """Each key's present value, then every change, deletions included. Ends when the caller stops iterating.
        Two to three heartbeats of silence and it is watched anew."""
        async with contextlib.AsyncExitStack() as stack:
            subject = self._prefix + pattern
            start = Start(is_last_per_subject=True)
            reading = self._client.read(self.stream, subjects=[subject], start=start, heartbeat_s=heartbeat_s)
            reader = await stack.enter_async_context(reading)
            while True:
                for message in await reader.fetch():
                    yield self._entry_of(message)
